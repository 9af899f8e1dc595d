"""What ends a command: a user's mistake, a signal. Imports nothing but the standard library."""

import signal

SIGNALLED = 128  # a command's exit status after a signal: this and its number
REPEAT_SECONDS = 2  # a signal that comes sooner after the first is the same once more, as Slurm sends SIGTERM


class UserError(ValueError):
    """A user's mistake, told in one line with what would be right. Commands exit with status 2."""


class Ended(KeyboardInterrupt):
    """A signal came that ends the command: whatever is on the way is cleaned up first."""

    def __init__(self, number: int) -> None:
        super().__init__(f'ended by {signal.Signals(number).name}')
        self.status = SIGNALLED + number


def require(ok: bool, key: str, value: object, allowed: str) -> None:
    """UserError that names the key, its value and what is allowed, unless `ok`."""
    if not ok:
        raise UserError(f'{key} = {value!r}: {allowed}')
