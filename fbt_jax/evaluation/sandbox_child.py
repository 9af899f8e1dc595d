"""The other side of sandbox.py; run as a script, imports the standard library only.

Three processes: this one makes the namespaces and waits; the first process inside them builds the file system, waits
for the program and says how it ended; the third gives up all rights and runs it. When the first inside ends, the
kernel ends all that the program has left. Root or not: whoever isn't becomes root of a user namespace for the set-up.
"""

import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
# From the kernel's headers.
NEW_MOUNTS, NEW_UTS, NEW_IPC, NEW_USERS, NEW_PIDS, NEW_NET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
)  # fmt: skip
READ_ONLY, NO_SUID, NO_DEV, NO_EXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
NO_ATIME, NO_DIR_ATIME, RELATIVE_ATIME = 1 << 10, 1 << 11, 1 << 21
DIE_WITH_PARENT, SECCOMP, NO_NEW_PRIVILEGES = 1, 22, 38
CAPABILITY_VERSION = 0x20080522
FILTER, ALLOWED, REFUSED, KILLED = 2, 0x7FFF0000, 0x50001, 0x80000000  # REFUSED: with EPERM
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
FIRST_ARGUMENT = 16  # where its lower half lies
OTHER_NUMBERING = 0x40000000  # x32's calls
# The architecture's mark, socket, then calls that are refused: shmget, msgget, memfd_create, memfd_secret (memory that
# no limit of a process counts); add_key, request_key, keyctl (the caller's keys); io_uring_setup (calls past a filter).
CALLS = {
    'x86_64': (0xC000003E, 41, 29, 68, 319, 447, 248, 249, 250, 425),
    'aarch64': (0xC00000B7, 198, 194, 186, 279, 447, 217, 218, 219, 425),
}
FAMILIES = (1, 2, 10)  # of sockets that the namespaces confine: Unix, IPv4, IPv6

SYSTEM = ('usr', 'lib', 'lib64', 'bin', 'etc/ld.so.cache', 'etc/localtime')
DEVICES = ('dev/null', 'dev/zero', 'dev/random', 'dev/urandom')
MOUNT_POINT = Path('/proc')  # any folder that is there, and not needed any more: nobody else sees what is put over it
NOT_THE_STANDARD_LIBRARY = ('lib*/python*/*-packages', 'lib*/*-packages', 'envs', 'pkgs')
LOOK_SECONDS = 0.05  # between two looks at the memory of all together
OTHER_USERS = 10_000  # one of so many numbers is the program's, so that limits count its own processes only


def main() -> NoReturn:
    task = json.loads(sys.stdin.buffer.read())
    tell = Teller(os.dup(1), task['nonce'])
    null = os.open('/dev/null', os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(null)
    os.closerange(3, tell.handle)
    os.closerange(tell.handle + 1, 1024)
    LIBC.prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != task['parent']:
        os._exit(1)
    alive, held = os.pipe()
    try:
        os.chdir('/proc')  # before it is covered
        user = separate()
        for name in ('smaps_rollup', f'task/{os.getpid()}/children'):
            Path(f'{os.getpid()}/{name}').read_text()  # whether there is one
        first = os.fork()
    except OSError as error:
        tell('refused', str(error))
        os._exit(1)
    if first:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))
        signal.signal(signal.SIGALRM, lambda *_: end_if_large(first, task['limits']['memory'], tell))
        signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS, LOOK_SECONDS)
        os.waitpid(first, 0)  # comes back when all in there are dead
        os._exit(0)
    os.close(held)
    LIBC.prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if select.select([alive], [], [], 0)[0]:  # at its end: the parent died before it could be asked for
        os._exit(1)
    os.close(alive)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nobody inside can send the first process what it has no handler for
    try:
        build(MOUNT_POINT, task['python'], room=4 * task['limits']['file'])
        program = os.fork()
        if not program:
            give_up_rights(user, task['limits'])
    except (OSError, ValueError) as error:
        tell('refused', str(error))
        os._exit(1)
    if not program:
        run(task['program'], tell)
    _, status, used = os.wait4(program, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        # SIGXCPU may be ignored; a second later comes SIGKILL.
        if number == signal.SIGXCPU or used.ru_utime + used.ru_stime > task['limits']['cpu']:
            tell('timeout', f'{task["limits"]["cpu"]} s of processor time')
        else:
            tell('error', f'ended by signal {number}')
    os._exit(0)


def end_if_large(first: int, limit: int, tell: 'Teller') -> None:
    """Ends all in there once they hold more than `limit` bytes together, or hide what they hold."""
    try:
        # Twice, since shares of pages grow when others end between two looks at them.
        if held_together(first) <= limit or held_together(first) <= limit:
            return
        told = f'more than {limit >> 20} MiB of memory in several processes'
    except OSError as error:
        told = f'its memory cannot be seen: {error}'
    os.kill(first, signal.SIGKILL)
    tell('error', told)


def held_together(first: int) -> int:
    """Bytes of memory that `first` and all that came of it hold, each shared page once. The working folder is /proc."""
    total, left = 0, [str(first)]
    while left:
        process = left.pop()
        try:
            for line in Path(f'{process}/smaps_rollup').read_text().splitlines():
                if line.startswith('Pss:'):
                    total += 1024 * int(line.split()[1])
            for thread in Path(f'{process}/task').iterdir():
                left += (thread / 'children').read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    return total


class Teller:
    """Says once how it ended, by the nonce as one who knows it; the program finds only the handle."""

    def __init__(self, handle: int, nonce: str) -> None:
        self.handle, self._nonce = handle, nonce

    def __call__(self, status: str, message: str = '') -> None:
        os.write(self.handle, self.line(status, message))

    def line(self, status: str, message: str) -> bytes:
        return f'{self._nonce} {status} {message}'[:600].replace('\n', ' ').encode(errors='replace') + b'\n'


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f'{what}: {os.strerror(number)}')


def separate() -> tuple[int, int]:
    """Into namespaces of its own; returns the user and group that the program is to have."""
    user, group = os.getuid(), os.getgid()
    spaces = NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_PIDS | NEW_NET
    if user != 0:
        check(LIBC.unshare(spaces | NEW_USERS), 'unshare')
        Path('/proc/self/setgroups').write_text('deny')
        Path('/proc/self/uid_map').write_text(f'{user} {user} 1')
        Path('/proc/self/gid_map').write_text(f'{group} {group} 1')
        return user, group
    check(LIBC.unshare(spaces), 'unshare')
    start, _, length = map(int, Path('/proc/self/uid_map').read_text().split()[-3:])
    last = min(start + length, 2**31) - 2
    if length <= OTHER_USERS:
        return user, group  # such a root is one of a user namespace: limits hold for it
    return last - os.getpid() % OTHER_USERS, last - os.getpid() % OTHER_USERS


def mount(source: str, target: Path, kind: str | None, flags: int, options: str = '') -> None:
    result = LIBC.mount(
        source.encode(), str(target).encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    check(result, f'mount {source} on {target}')


def build(root: Path, python: str, *, room: int) -> None:
    """A small file system in memory that has the system's and Python's folders, read-only, and /tmp."""
    mount('none', Path('/'), None, RECURSIVE | PRIVATE)
    mount('tmpfs', root, 'tmpfs', NO_SUID | NO_DEV, f'size={room},nr_inodes=4096,mode=755')
    for name in (*SYSTEM, *DEVICES):
        show(Path('/') / name, root / name)
    show(Path(python).resolve(), root / python.lstrip('/'))
    for base in ('usr', 'usr/local', python.lstrip('/')):
        for pattern in NOT_THE_STANDARD_LIBRARY:
            for folder in (root / base).glob(pattern):
                cover(folder)
    cover(root / 'usr/share', but='zoneinfo')
    if not Path(python).is_relative_to('/usr/local'):
        cover(root / 'usr/local')
    for name in ('tmp', 'dev/shm'):
        (root / name).mkdir(exist_ok=True)  # Python may lie there
        (root / name).chmod(0o1777)
    os.chroot(root)
    os.chdir('/tmp')


def show(source: Path, target: Path) -> None:
    """`source` at `target` too, read-only."""
    if not source.exists() or target.exists():
        return  # not on this system, or within what is shown already
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink() and not source.is_file():
        target.symlink_to(source.readlink())  # /lib on most systems
        return
    if source.is_dir():
        target.mkdir()
    else:
        target.touch()
    mount(str(source), target, None, BIND | RECURSIVE)
    # Within a user namespace none of the flags that are set may be left out.
    kept = {
        os.ST_NOSUID: NO_SUID,
        os.ST_NODEV: NO_DEV,
        os.ST_NOEXEC: NO_EXEC,
        os.ST_NOATIME: NO_ATIME,
        os.ST_NODIRATIME: NO_DIR_ATIME,
        os.ST_RELATIME: RELATIVE_ATIME,
    }
    found = os.statvfs(target).f_flag
    flags = sum(flag for given, flag in kept.items() if found & given)
    mount('none', target, None, REMOUNT | BIND | READ_ONLY | NO_SUID | flags)


def cover(folder: Path, *, but: str = '') -> None:
    """Makes what `folder` holds invisible, except for its folder `but`."""
    if folder.is_symlink() or not folder.is_dir():
        return
    kept = Path('/') / folder.relative_to(MOUNT_POINT) / but
    mount('tmpfs', folder, 'tmpfs', NO_SUID | NO_DEV, 'size=4k,mode=755')
    if but:
        show(kept, folder / but)
    mount('none', folder, None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEV)


def give_up_rights(user: tuple[int, int], limits: dict[str, int]) -> None:
    if os.getuid() != user[0]:
        os.setgroups([])
        os.setresgid(user[1], user[1], user[1])
        os.setresuid(user[0], user[0], user[0])
    else:
        header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
        check(LIBC.capset(header, none), 'capset')
    check(LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), 'prctl')
    filter_calls()
    resource.setrlimit(resource.RLIMIT_CPU, (limits['cpu'], limits['cpu'] + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits['file'],) * 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (limits['processes'],) * 2)
    resource.setrlimit(resource.RLIMIT_AS, (limits['memory'],) * 2)


def filter_calls() -> None:
    """For good."""
    machine = os.uname().machine
    if machine not in CALLS:
        raise OSError(f'no numbers of system calls are known for {machine}')
    lines = filter_lines(machine)
    code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack('HP', len(lines), ctypes.addressof(code)))
    check(LIBC.prctl(SECCOMP, FILTER, program, 0, 0), 'prctl')


def filter_lines(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter as a program of the kernel's."""
    mark, socket, *calls = CALLS[machine]
    # Each: what to do, how many lines to skip if so, how many if not, with which number.
    lines = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, mark), (RETURN, 0, 0, KILLED), (LOAD, 0, 0, 0)]
    refused = len(lines) + 1 + len(calls) + 2 + len(FAMILIES)  # the line that says so; the last one allows
    lines.append((AT_LEAST, refused - len(lines) - 1, 0, OTHER_NUMBERING))
    for call in calls:
        lines.append((EQUAL, refused - len(lines) - 1, 0, call))
    lines += [(EQUAL, 0, refused - len(lines), socket), (LOAD, 0, 0, FIRST_ARGUMENT)]
    for family in FAMILIES:
        lines.append((EQUAL, refused - len(lines), 0, family))
    return [*lines, (RETURN, 0, 0, REFUSED), (RETURN, 0, 0, ALLOWED)]


def run(program: str, tell: Teller) -> NoReturn:
    """The end is told by functions that were looked up before the program could replace them."""
    leave, write, process, own, line = os._exit, os.write, os.getpid, os.getpid(), tell.line
    os.setsid()
    module: Any = types.ModuleType('solution')  # not `__main__`: what stands under that condition is no solution
    sys.modules['solution'], sys.argv = module, ['solution']
    try:
        exec(compile(program, 'solution.py', 'exec'), module.__dict__)
        end = line('passed', '')
    except AssertionError as error:
        end = line('failed', describe(error))
    except BaseException as error:
        end = line('error', describe(error))
    if process() == own:  # a copy of it may come here too
        write(tell.handle, end)
    leave(0)


def describe(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:
        text = ''
    return f'{type(error).__name__}: {text}'


if __name__ == '__main__':
    main()
