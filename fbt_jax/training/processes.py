"""Several processes as one run: joining, agreeing, failing together and leaving together, over `jax.distributed`.

Every process runs the same program on its own devices; XLA's collectives join them. Process 0, the primary, also owns
what exists once: metrics, config.json, the terminal. A process that fails leaves at once, without clean-up that would
wait for peers; the others see a broken collective or, where they wait for something else, the missing heartbeat, and
end with a non-zero status within HEARTBEAT_SECONDS and a few more.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from fbt_jax.errors import UserError

HEARTBEAT_SECONDS = 30
START_SECONDS = 300  # for all processes to appear
MEET_SECONDS = 3600
_BY_HAND = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
_MESSAGE_BYTES = 4096


def settle_platform() -> None:
    """With libtpu installed (for `fbt plan`) but neither TPU nor GPU, JAX would look for a TPU, loudly: use the CPU."""
    accelerated = _tpu_here() or Path('/dev/nvidia0').exists()
    if find_spec('libtpu') and not accelerated and not jax.config.jax_platforms:  # type: ignore[attr-defined]
        jax.config.update('jax_platforms', 'cpu')


def _tpu_here() -> bool:
    return any(Path(p).exists() for p in ('/dev/accel0', '/dev/vfio/0'))


def join() -> None:
    """Joins the run that the environment describes; does nothing for a single process. Call it before any other JAX.

    By hand: JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID. Under `srun` with several tasks
    and on TPU machines JAX finds the same out itself. FBT_START_SECONDS (default 300): how long to wait for the others.

    If they don't appear in time, the process says so in one line and ends with status 1.

    Raises:
      UserError: only some of the three are set, or they are no numbers.
    """
    settle_platform()
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
    elif find_spec('libtpu') and _tpu_here():
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
    # It waits where no Python handler is called. The service that it starts takes SIGTERM over, for good.
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, signal.SIG_DFL)
    try:
        jax.distributed.initialize(
            **arguments,  # type: ignore[arg-type]
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            initialization_timeout=2 * seconds + 60,
        )
    finally:
        alarm.cancel()
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, before[number])


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
    kind = '' if failure is None else 'user' if isinstance(failure, UserError) else 'run'
    kind, _, message = from_primary(f'{kind} {failure or ""}').partition(' ')
    if kind:
        raise UserError(message) if kind == 'user' else RuntimeError(message)


def agree(settings: dict[str, Any]) -> None:
    """Raises UserError on all processes, naming the keys, unless each was given the same settings (flat, JSON)."""
    if jax.process_count() == 1:
        return
    ours = json.dumps(settings)
    theirs = json.loads(from_primary(ours))
    different = [
        f'{key} = {value!r}, but {theirs.get(key)!r} on process 0'
        for key, value in json.loads(ours).items()
        if value != theirs.get(key)
    ]
    text = f'process {jax.process_index()} was started with {"; ".join(different[:3])}' if different else ''
    told = [t for t in (_decoded(row) for row in multihost_utils.process_allgather(_encoded(text))) if t]
    if told:
        raise UserError(told[0])


def from_primary(text: str) -> str:
    """The primary's `text`, on all."""
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text.encode()))))
    return _decoded(multihost_utils.broadcast_one_to_all(_encoded(text, length)))


def meet(name: str) -> None:
    """Waits for all processes, up to MEET_SECONDS: a collective on CPUs gives up after 30 s. Each name serves once."""
    if jax.process_count() > 1:
        multihost.get_barrier_sync_fn()(key=name, timeout_ms=1000 * MEET_SECONDS)


def _encoded(text: str, length: int = _MESSAGE_BYTES) -> np.ndarray:
    """`length` bytes, filled up with zeros: what processes exchange must have one size."""
    return np.frombuffer(text.encode()[:length].ljust(length, b'\0'), np.uint8)


def _decoded(data: Any) -> str:
    return np.asarray(data, np.uint8).tobytes().rstrip(b'\0').decode(errors='replace')


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
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # of a terminal that has hung up
            stream.flush()
    os._exit(status)
