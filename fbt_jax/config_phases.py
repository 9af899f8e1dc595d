"""Phases of a run, which the passes' mixture and the data's weights share. Imports nothing heavy.

Each phase is (start, what holds from there on); start is a fraction of the run's steps if a float below 1, a step if an
int.
"""

from collections.abc import Sequence
from typing import Any

from fbt_jax.errors import UserError


def is_start(value: Any) -> bool:
    """Whether `value` may be the start of a phase."""
    if isinstance(value, float):
        return 0 <= value < 1
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def first_steps(phases: Sequence[tuple[float | int, Any]], total_steps: int, key: str) -> list[int]:
    """The first step (0-based) of each phase in a run of `total_steps`; UserError that names `key` if they go down."""
    steps = [round(start * total_steps) if isinstance(start, float) else start for start, _ in phases]
    if steps != sorted(steps):
        raise UserError(
            f'{key} = {phases!r}: starts must not go down; for training.steps = {total_steps} they are {steps}'
        )
    return steps
