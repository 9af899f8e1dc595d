"""Several processes as one run: joining, agreeing, failing together and leaving together, over `jax.distributed`.

Every process runs the same program on its own devices; XLA's collectives join them. Process 0, the primary, also owns
what exists once: metrics, config.json, the terminal. A process that fails leaves at once, without clean-up that would
wait for peers; the others see a broken collective or, where they wait for something else, the missing heartbeat, and
end with a non-zero status within HEARTBEAT_SECONDS and a few more.
"""

import os
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from fbt_jax.config import UserError

HEARTBEAT_SECONDS = 30
START_SECONDS = 300  # for all processes to appear
_BY_HAND = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
_MESSAGE_BYTES = 4096

T = TypeVar('T')


def join() -> None:
    """Joins the run that the environment describes; does nothing for a single process. Call it before any other JAX.

    By hand: JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID. Under `srun` with several tasks
    and on TPU machines JAX finds the same out itself. FBT_START_SECONDS (default 300): how long to wait for the others.

    If they don't appear in time, the process says so in one line and ends with status 1.

    Raises:
      UserError: only some of the three are set, or they are no numbers.
    """
    given = [name for name in _BY_HAND if os.environ.get(name)]
    seconds = int(os.environ.get('FBT_START_SECONDS', START_SECONDS))
    if given:
        if len(given) < len(_BY_HAND):
            raise UserError(f'{", ".join(given)} set, but not {", ".join(n for n in _BY_HAND if n not in given)}')
        try:
            count, index = (int(os.environ[name]) for name in _BY_HAND[1:])
        except ValueError:
            raise UserError('JAX_NUM_PROCESSES and JAX_PROCESS_ID must be numbers') from None
        if not 0 <= index < count:
            raise UserError(f'JAX_PROCESS_ID = {index}: must lie in 0..{count - 1} (JAX_NUM_PROCESSES = {count})')
        where, what = os.environ[_BY_HAND[0]], f'{count} processes (JAX_NUM_PROCESSES)'
        arguments = {'num_processes': count, 'process_id': index, 'cluster_detection_method': 'deactivate'}
    elif int(os.environ.get('SLURM_STEP_NUM_TASKS', 1)) > 1:
        where, what, arguments = 'the first Slurm node', f'{os.environ["SLURM_STEP_NUM_TASKS"]} Slurm tasks', {}
    elif find_spec('libtpu') and any(Path(p).exists() for p in ('/dev/accel0', '/dev/vfio/0')):
        where, what, arguments = 'the first TPU host', 'all hosts of the TPU slice', {}
    else:
        return
    missing = (
        f'fbt: not all of {what} met at {where} within {seconds} s; look whether each was started and can reach it'
    )
    # Not left to `initialize`: when its own time is up, XLA aborts the process with a C++ stack trace.
    alarm = threading.Timer(seconds, _give_up, [missing])
    alarm.daemon = True
    alarm.start()
    try:
        jax.distributed.initialize(
            **arguments,  # type: ignore[arg-type]
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            initialization_timeout=2 * seconds + 60,
        )
    finally:
        alarm.cancel()


def _give_up(line: str) -> NoReturn:
    print(line, file=sys.stderr)
    exit_now(1)


def is_primary() -> bool:
    """Whether this process is the one that writes and prints."""
    return jax.process_index() == 0


def on_primary(work: Callable[[], None]) -> None:
    """`work()` on the primary alone, while the others wait; a UserError or RuntimeError of it is raised on all."""
    if jax.process_count() == 1:
        return work()
    failure: UserError | RuntimeError | None = None
    if is_primary():
        try:
            work()
        except (UserError, RuntimeError) as error:
            failure = error
    kind = 0 if failure is None else 1 if isinstance(failure, UserError) else 2
    text = str(failure or '').encode()[: _MESSAGE_BYTES - 1]
    sent = np.zeros(_MESSAGE_BYTES, np.uint8)
    sent[: len(text) + 1] = np.frombuffer(bytes([kind]) + text, np.uint8)
    got = bytes(np.asarray(multihost_utils.broadcast_one_to_all(sent)).tobytes())
    if got[0]:
        message = got[1:].rstrip(b'\0').decode(errors='replace')
        raise UserError(message) if got[0] == 1 else RuntimeError(message)


def everywhere(ok: bool) -> bool:
    """Whether `ok` holds on all processes."""
    if jax.process_count() == 1:
        return ok
    return bool(np.all(multihost_utils.process_allgather(np.array(ok))))


def prefix() -> str:
    """What a line of this process begins with, '' where there is but one."""
    return f'[process {jax.process_index()}] ' if jax.process_count() > 1 else ''


def count() -> int:
    return jax.process_count()


def leave(status: int) -> None:
    """At the end of a command that all processes finished alike: waits for them, so that none is cut off."""
    if jax.process_count() > 1:
        jax.distributed.shutdown()
        exit_now(status)


def exit_now(status: int) -> NoReturn:
    """Ends the process without its exit handlers, which would wait for peers or for a thread that compiles."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
