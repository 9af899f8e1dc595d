"""SIGTERM, SIGINT and SIGHUP: remembered when they come, acted on where the run can save. A later one acts at once, but
not one that comes within REPEAT_SECONDS: Slurm sends SIGTERM twice within milliseconds.

With several processes JAX's preemption service takes the SIGTERM that any of them gets, and makes all stop at the same
poll, so that they save the same step; SIGINT and SIGHUP count as SIGTERM then. Every process must poll equally often.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils

from fbt_jax.errors import REPEAT_SECONDS, SIGNALLED


class Stopped(Exception):
    """The run was told to stop; `status` is the command's exit status."""

    def __init__(self, number: int) -> None:
        super().__init__(f'stopped by {signal.Signals(number).name}')
        self.status = SIGNALLED + number


class StopSignals:
    """Context manager. `poll()` raises `Stopped` once a signal has come."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._previous: dict[int, Any] = {}
        self._polls = 0
        self._since = 0.0

    def __enter__(self) -> 'StopSignals':
        # Under nohup SIGHUP is ignored, and stays so.
        hang_up = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
        if jax.process_count() > 1:
            for number in (signal.SIGINT, *hang_up):
                self._previous[number] = signal.signal(number, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        elif threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, *hang_up):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._number is None:
            self._number, self._since = number, now
        elif now - self._since > REPEAT_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def poll(self) -> None:
        if jax.process_count() > 1:
            self._polls += 1
            if multihost_utils.reached_preemption_sync_point(self._polls):
                raise Stopped(signal.SIGTERM)
        if self._number is not None:
            raise Stopped(self._number)

    def wait_for(self, work: Callable[[], Any]) -> Any:
        """`work()` in a thread of its own, so that a signal is noticed while XLA compiles; raises `Stopped` then.

        The thread can't be ended: whoever catches `Stopped` must leave the process without waiting for it.
        """
        result: list[Any] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                result.append(work())
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(timeout=0.1)
            if jax.process_count() == 1:  # processes compile for different times, so they can't poll equally often
                self.poll()
        if failure:
            raise failure[0]
        return result[0]
