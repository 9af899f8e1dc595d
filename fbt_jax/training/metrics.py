"""Metric rows: the one definition of their names, and the files they go to.

A row is a plain dict with the fields of contract.md: losses in nats per token, `tokens` and `token_passes` cumulative
with padding not counted, `update_norm_i` = sqrt(mean (h^i - h^(i-1))^2) from i = 2 on (method.md section 5).
DIR/metrics.jsonl has one JSON object a line, non-finite numbers as null, never two rows of one step and split;
DIR/tensorboard has the same names under `train/` and `validation/`.
"""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from fbt_jax.files import to_json

Row = dict[str, Any]
Scalar = float | np.ndarray | jax.Array
Scalars = Sequence[float] | np.ndarray | jax.Array


def train_row(
    *,
    step: int,
    loss: Scalar,
    pass_losses: Scalars,
    grad_norm: Scalar,
    learning_rate: Scalar,
    tokens: int,
    token_passes: int,
    tokens_per_second: float,
    step_seconds: float,
    z_loss: Scalar | None = None,
    mfu: float | None = None,
    read_so_far: Mapping[str, float] | None = None,
) -> Row:
    """The row of one update; `step` is 1 after the first. pass_losses: nats per token of passes 1..K (K = its length).

    `z_loss` None where it is off, `mfu` None where the device's peak is unknown: then the row has no such field.
    `read_so_far`: `epochs` of the data, or `epochs_NAME` and `share_NAME` of each source of a mixture.
    """
    row: Row = {'step': int(step), 'split': 'train', 'passes': len(pass_losses), 'loss': _float32(loss)}
    row |= _numbered('loss_pass', pass_losses)
    if z_loss is not None:
        row['z_loss'] = _float32(z_loss)
    row |= {
        'grad_norm': _float32(grad_norm),
        'learning_rate': _float32(learning_rate),
        'tokens': int(tokens),
        'token_passes': int(token_passes),
        'tokens_per_second': _float32(tokens_per_second),
        'step_seconds': _float32(step_seconds),
    }
    if mfu is not None:
        row['mfu'] = _float32(mfu)
    return row | {name: _float32(value) for name, value in (read_so_far or {}).items()}


def validation_row(
    *,
    step: int,
    pass_losses: Scalars,
    update_norms: Scalars,
    bytes_per_token: float | None = None,
    split: str = 'validation',
) -> Row:
    """The row of one evaluation with K = len(pass_losses) passes.

    pass_losses: nats per token of passes 1..K. update_norms: those of passes 2..K. bytes_per_token: bytes of text over
    counted tokens; None where the data are not text, and then the row has no `bits_per_byte_pass_i`. split: of one of
    several sets `validation/NAME`; `validation` is all of them.
    """
    if len(update_norms) != len(pass_losses) - 1:
        raise ValueError(
            f'{len(update_norms)} update norms for {len(pass_losses)} passes: must be one for each but the first'
        )
    losses = [_float32(loss) for loss in pass_losses]
    row: Row = {'step': int(step), 'split': split, 'passes': len(losses)}
    row |= _numbered('loss_pass', losses)
    row |= _numbered('perplexity_pass', [_exp(loss) for loss in losses])
    if bytes_per_token is not None:
        row |= _numbered('bits_per_byte_pass', [loss / math.log(2) / bytes_per_token for loss in losses])
    return row | _numbered('update_norm', update_norms, first=2)


def _numbered(name: str, values: Scalars, *, first: int = 1) -> Row:
    return {f'{name}_{i}': _float32(value) for i, value in enumerate(values, start=first)}


def _float32(value: Any) -> float:
    """The float32 value as a Python float: JSON then gives it back exactly."""
    with np.errstate(over='ignore'):
        return float(np.float32(value))


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


class MetricsWriter:
    """Appends rows to DIR/metrics.jsonl and DIR/tensorboard.

    `resume_step` is the step of the restored checkpoint, None if there is none: rows past it, which the run is about to
    write again, are dropped at the start, and so is a last line that a kill has torn.
    """

    def __init__(self, workdir: str, resume_step: int | None) -> None:
        from tensorboardX.event_file_writer import EventsWriter  # here, because readers of rows don't need it
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._path = Path(workdir) / 'metrics.jsonl'
        self._path.parent.mkdir(parents=True, exist_ok=True)
        old = read_rows(self._path) if resume_step is not None and self._path.exists() else []
        kept = [row for row in old if row['step'] <= resume_step]
        _replace_file(self._path, kept)
        self._last_steps: dict[str, int] = {}
        for row in kept:
            self._require_next(row)
        self._file: TextIO = self._path.open('a', encoding='utf-8')
        folder = Path(workdir) / 'tensorboard'
        # TensorBoard names files by the second; two attempts in one second must not share, and so erase, a file.
        attempt = len(list(folder.glob('*tfevents*'))) if folder.exists() else 0
        folder.mkdir(exist_ok=True)
        # Not SummaryWriter: what its thread has not taken up yet is lost in a kill, flushed or not.
        self._board = EventsWriter(str(folder / 'events'), filename_suffix=f'.{attempt}')
        purged_from = 0 if resume_step is None else resume_step + 1
        self._event = Event
        start = SessionLog(status=SessionLog.START)
        self._board.write_event(Event(wall_time=time.time(), step=purged_from, session_log=start))

    def __enter__(self) -> 'MetricsWriter':
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def write(self, row: Row) -> None:
        """Appends `row`; ValueError if its split has a row of this or a later step already."""
        self._require_next(row)
        self._file.write(_line(row))
        self._file.flush()
        event = self._event(wall_time=time.time(), step=row['step'])
        for name, value in row.items():
            if name not in ('step', 'split') and math.isfinite(value):
                event.summary.value.add(tag=f'{row["split"]}/{name}', simple_value=value)
        self._board.write_event(event)

    def last_step(self, split: str) -> int | None:
        """The step of the newest row of `split`, None if it has none."""
        return self._last_steps.get(split)

    def flush(self) -> None:
        """Puts every row written so far on disk. Call it before a checkpoint is saved: the rows up to it then exist."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._board.flush()

    def close(self) -> None:
        self.flush()
        self._file.close()
        self._board.close()

    def _require_next(self, row: Row) -> None:
        last = self._last_steps.get(row['split'])
        if last is not None and row['step'] <= last:
            raise ValueError(f'{self._path}: a {row["split"]} row of step {row["step"]} after one of step {last}')
        self._last_steps[row['split']] = row['step']


class NoWriter:
    """The `MetricsWriter` of every process but the primary: writes nothing."""

    def __enter__(self) -> 'NoWriter':
        return self

    def __exit__(self, *exc_info: object) -> None: ...

    def write(self, row: Row) -> None: ...

    def flush(self) -> None: ...


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a metrics.jsonl, in order; null for numbers that weren't finite.

    A torn last line (a kill in mid-write, a run that is writing now) is left out; ValueError names any other bad line.
    """
    lines = Path(path).read_text(encoding='utf-8', errors='replace').split('\n')
    *whole, _ = lines  # a whole line ends in a newline, so what follows the last one is empty or torn
    rows: list[Row] = []
    last: dict[str, int] = {}
    for number, line in enumerate(whole, start=1):
        try:
            row = json.loads(line)
            fine = _is_row(row)
        except (ValueError, KeyError, TypeError, AttributeError):
            fine = False
        if not fine:
            raise ValueError(f'{path}: line {number} is not a row of metrics: {line[:80]!r}')
        if row['step'] <= last.get(row['split'], -1):
            raise ValueError(
                f'{path}: line {number}: step {row["step"]} of {row["split"]} comes after a later one, or again'
            )
        last[row['split']] = row['step']
        rows.append(row)
    return rows


def _is_row(row: Any) -> bool:
    """Whether it has what its readers take for granted. KeyError, TypeError, AttributeError: no."""
    kind = row['split'].split('/')[0]
    counts = ['step', 'passes', *(('tokens', 'token_passes') if kind == 'train' else ())]
    losses = [row[f'loss_pass_{k}'] for k in range(1, row['passes'] + 1)]
    numbers = all(loss is None or isinstance(loss, int | float) for loss in losses)
    return kind in ('train', 'validation') and all(type(row[name]) is int for name in counts) and numbers


def _line(row: Row) -> str:
    return to_json(row) + '\n'


def _replace_file(path: Path, rows: Sequence[Row]) -> None:
    """Rewrites `path` in one step: a kill leaves the old rows or the new ones, never part of them."""
    temporary = path.with_name(path.name + '.tmp')
    with temporary.open('w', encoding='utf-8') as file:
        file.writelines(_line(row) for row in rows)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # else the rename itself may be lost with the power
    finally:
        os.close(folder)
