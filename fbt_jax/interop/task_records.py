"""What a task's items came to, one JSON object a line, as soon as it is known; read again by whoever goes on.

    OUT/TASK.json            what the records depend on besides their keys; other settings don't go on from them
    OUT/TASK-MODE[-tX].jsonl one record an item and sample: prompt, output, tokens used, answer, verdict

A kill may leave a torn last line: it is cut off, and that item is done again.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fbt_jax.errors import UserError
from fbt_jax.files import replace

Key = tuple[str, int]  # item, sample


class Records:
    """Of one task in one mode at one temperature (None: nothing is sampled)."""

    def __init__(self, out: Path, task: str, mode: str, temperature: float | None = None) -> None:
        self._path = out / f'{task}-{mode}{"" if temperature is None else f"-t{temperature:g}"}.jsonl'

    def read(self) -> dict[Key, dict[str, Any]]:
        """All that are there.

        Raises:
          UserError: a line before the last is no record.
        """
        if not self._path.exists():
            return {}
        content = self._path.read_bytes()
        whole = content[: content.rfind(b'\n') + 1]
        if len(whole) < len(content):
            os.truncate(self._path, len(whole))
        found = {}
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                record = json.loads(line)
                found[record['item'], record['sample']] = record
            except (ValueError, TypeError, KeyError):
                raise UserError(f'{self._path}, line {number}: is no record; remove the file') from None
        return found

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        with self._path.open('a') as file:
            file.write(''.join(json.dumps(record) + '\n' for record in records))
            file.flush()
            os.fsync(file.fileno())

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        """All of them at once, or, after a kill, none."""
        replace(self._path, ''.join(json.dumps(record) + '\n' for record in records))


def require_settings(out: Path, task: str, settings: dict[str, Any]) -> None:
    """Notes down what the records of `task` depend on.

    Raises:
      UserError: there are records made with other settings (names them).
    """
    path = out / f'{task}.json'
    settings = json.loads(json.dumps(settings))
    if path.exists():
        try:
            old = json.loads(path.read_text())
        except ValueError:
            old = {}
        changed = [
            f'{k} was {old.get(k)!r}, now {settings.get(k)!r}'
            for k in sorted(old.keys() | settings.keys())
            if old.get(k) != settings.get(k)
        ]
        if changed:
            raise UserError(f'{out} holds records of {task} made otherwise: {"; ".join(changed)}. Use another --out')
        return
    replace(path, json.dumps(settings, indent=2) + '\n')
