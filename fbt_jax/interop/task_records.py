"""What a task's items came to, one JSON object a line, as soon as it is known; read again by whoever goes on.

    OUT/TASK.json            what the records depend on besides their keys; other settings don't go on from them
    OUT/TASK-fused.json      what those of mode fused alone depend on
    OUT/TASK-MODE[-tX].jsonl one record an item and sample: prompt, output, tokens used, answer, verdict

A kill may leave a torn last line: it is cut off, and that item is done again.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fbt_jax.errors import UserError
from fbt_jax.files import replace, to_json
from fbt_jax.inference.decode import MODES

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
        if self._path.is_dir():
            raise UserError(f'{self._path}: is a folder; remove it')
        content = self._path.read_bytes()
        whole = content[: content.rfind(b'\n') + 1]
        if len(whole) < len(content):
            os.truncate(self._path, len(whole))
        found = {}
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                record = json.loads(line)
                _ = record['verdict'], 'scores' in record or (record['tokens'] + 0, record['finished'])
                found[record['item'], record['sample']] = record
            except (ValueError, TypeError, KeyError):
                raise UserError(f'{self._path}, line {number}: is damaged, no record; remove the file') from None
        return found

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        with self._path.open('a') as file:
            file.write(''.join(to_json(record) + '\n' for record in records))
            file.flush()
            os.fsync(file.fileno())

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        """All of them at once, or, after a kill, none."""
        replace(self._path, ''.join(to_json(record) + '\n' for record in records))


def require_settings(out: Path, task: str, settings: dict[str, Any], *, fused_passes: int | None) -> None:
    """Notes down what the records of `task` depend on; fused_passes: None where mode fused is not among them.

    Raises:
      UserError: there are records made with other settings (names them).
    """
    _require(out / f'{task}.json', MODES, task, settings)
    if fused_passes is not None:
        told = f'{task} in mode fused'
        _require(out / f'{task}-fused.json', ('',), told, {'fused_passes': fused_passes})


def _require(path: Path, modes: tuple[str, ...], what: str, settings: dict[str, Any]) -> None:
    settings = json.loads(json.dumps(settings))
    stems = [f'{path.stem}-{mode}' if mode else path.stem for mode in modes]
    there = any(any(path.parent.glob(f'{stem}{rest}.jsonl')) for stem in stems for rest in ('', '-t*'))
    if not there and not path.is_dir():
        replace(path, json.dumps(settings, indent=2) + '\n')
        return
    try:
        old = json.loads(path.read_text())
    except (OSError, ValueError):
        old = None
    if not isinstance(old, dict):
        state = 'is damaged' if path.exists() else 'is missing'
        raise UserError(f'{path}: {state}, so what the records of {what} depend on is not known. Use another --out')
    changed = [
        f'{k} was {old.get(k)!r}, now {settings.get(k)!r}'
        for k in sorted(old.keys() | settings.keys())
        if old.get(k) != settings.get(k)
    ]
    if changed:
        told = '; '.join(changed)
        raise UserError(f'{path.parent} holds records of {what} made otherwise: {told}. Use another --out')
