"""Files and folders that several processes may reach for. Imports nothing heavy."""

import fcntl
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fbt_jax.errors import UserError


def hold(folder: str | Path, name: str, busy: str) -> int:
    """Creates `folder` and locks it for this process, until the returned descriptor is closed or the process ends.

    Raises:
      UserError: '{name}: {busy}' if another process holds it, or why it can't be made.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise UserError(f'{name}: {busy}') from None
    except OSError as error:
        raise UserError(f'{name}: {error.strerror}') from None
    return handle


@contextmanager
def held(folder: str | Path, name: str, busy: str) -> Iterator[None]:
    """`hold` around a block."""
    handle = hold(folder, name, busy)
    try:
        yield
    finally:
        os.close(handle)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Null stands for what is not finite: JSON has no number for it."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def replace(path: str | Path, content: str | bytes) -> None:
    """Writes `path` so that whoever reads it, also after a crash, sees the old content or the new, never a part."""
    path = Path(path)
    temporary = path.with_name(path.name + '.tmp')
    with temporary.open('wb') as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
