"""Runs Python programs that a model wrote, where they can do no harm, and tells whether they came to their end.

Each program gets a fresh interpreter (sandbox_child.py) in namespaces of its own: no network, no processes and no files
but its own and, read-only, the system's and Python's; the standard library alone; limits on processor time, clock time,
memory of a process and, looked at 20 times a second, of all together, number of processes, size of files; no shared
memory outside them (System V's, memfd), no sockets but of the network it has not, none of the caller's keys. Where the
system refuses any of it, nothing runs.

No protection against: a hole in the kernel (few system calls are filtered); code that looks for the nonce in its own
interpreter in order to fake a verdict, which tests in the same interpreter can't prevent. Printing, exiting early or
replacing functions of the library fake none.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fbt_jax.errors import UserError

CPU_SECONDS = 5  # of one process: unlike clock time hardly longer on a busy machine
CLOCK_SECONDS = 30
MEMORY_BYTES = 2**30  # addresses of one process, and what all hold together
FILE_BYTES = 2**24  # of one file; all together may have four times as much
PROCESSES = 16  # and threads
_MESSAGE_BYTES = 2000
_END_SECONDS = 10
_CHILD = Path(__file__).with_name('sandbox_child.py')
# A thread pool of a numerical library must not run into the limit of PROCESSES.
_ENVIRONMENT = {'PATH': '/usr/bin:/bin', 'HOME': '/tmp', 'TMPDIR': '/tmp', 'LANG': 'C.UTF-8', 'PYTHONHASHSEED': '0'}


_running: set[subprocess.Popen[Any]] = set()


class Outcome(NamedTuple):
    status: str  # 'passed', 'failed' (an assertion), 'error' (another exception, or an early end) or 'timeout'
    message: str  # what was raised


def run_program(
    program: str,
    *,
    cpu_seconds: int = CPU_SECONDS,
    clock_seconds: float = CLOCK_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
) -> Outcome:
    """Whether `program` runs to its end.

    Raises:
      UserError: this system lets no sandbox be made.
    """
    nonce = os.urandom(16).hex()
    limits = {'cpu': cpu_seconds, 'memory': memory_bytes, 'file': FILE_BYTES, 'processes': PROCESSES}
    task = {'program': program, 'nonce': nonce, 'limits': limits, 'python': sys.base_prefix, 'parent': os.getpid()}
    with tempfile.TemporaryFile() as given:
        given.write(json.dumps(task).encode())
        given.seek(0)
        # No `site`: what is installed beside us, data of benchmarks among it, is none of the program's business.
        child = subprocess.Popen(
            [sys.executable, '-S', '-s', '-P', '-B', str(_CHILD)],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd='/',
            env=_ENVIRONMENT,
            start_new_session=True,
        )
        _running.add(child)
        try:
            told = _read(child, time.monotonic() + clock_seconds)
        finally:
            assert child.stdout is not None
            child.stdout.close()
            child.terminate()  # it ends when all are dead
            try:
                child.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            _running.discard(child)
    if told is None:
        return Outcome('timeout', f'{clock_seconds:g} s of clock time')
    mark, status, message, *_ = [*told.decode(errors='replace').split('\n')[0].split(' ', 2), '', '']
    if mark != nonce or status not in ('passed', 'failed', 'error', 'timeout', 'refused'):
        return Outcome('error', 'ended without a verdict')
    if status == 'refused':
        raise UserError(f'programs of a model are only run in a sandbox, and this system allows none: {message}')
    return Outcome(status, message)


def end_all() -> None:
    """Ends the programs that run in other threads; they count as ended without a verdict."""
    for child in list(_running):
        child.terminate()


def require_sandbox(run: Callable[..., Outcome] = run_program) -> None:
    """Raises UserError unless programs can be run here."""
    if not sys.platform.startswith('linux'):
        raise UserError('programs of a model are only run in a sandbox, for which it takes Linux')
    outcome = run('pass')
    if outcome.status != 'passed':
        raise UserError(f'the sandbox does not work here: an empty program ends with {outcome}')


def _read(child: subprocess.Popen[Any], deadline: float) -> bytes | None:
    """What comes out of it, cut off; None where it has not ended in time."""
    assert child.stdout is not None
    told = b''
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            new = os.read(child.stdout.fileno(), 4096)
            told += new
            if not new or len(told) > _MESSAGE_BYTES:
                return told[:_MESSAGE_BYTES]
    return None
