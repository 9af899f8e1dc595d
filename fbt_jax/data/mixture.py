"""Rows from several sources in given shares: which source row i comes from is arithmetic on i, nothing is drawn.

After n rows of a phase each source has given its share of n, to within half a row for itself and for each source before
it. Row i of the mixture is the next unread row of its source, so `counts(i)`, the rows that each source has given
before it, is all the state there is. M sources.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fbt_jax.batch import Batch
from fbt_jax.data.packing import ENDLESS


class Rows(Protocol):
    """A random-access source of rows. Reading is thread-safe and repeatable."""

    num_rows: int

    def batch(self, rows: Sequence[int]) -> Batch:
        """Those rows, arrays of shape (len(rows), T)."""
        ...


class HeldOutRows(Rows, Protocol):
    """A finite source that is read in order."""

    def documents(self, rows: Sequence[int]) -> list[np.ndarray]:
        """The document that each segment of those rows belongs to, int64; none for rows past the end."""
        ...


class Mixture:
    """`phases`: ((first row, share of each member), ...), first rows going up from 0, shares summing to 1."""

    def __init__(self, members: Sequence[Rows], phases: Sequence[tuple[int, Sequence[float]]]) -> None:
        self._members = members
        self.num_rows = ENDLESS
        # (first row, rows given before it by each, shares in whole numbers so that no rounding can lose a row)
        self._phases: list[tuple[int, np.ndarray, list[int]]] = []
        for first, shares in phases:
            counts = self.counts(first) if self._phases else np.zeros(len(members), np.int64)
            self._phases.append((first, counts, [round(share * 2**40) for share in shares]))

    def counts(self, row: int) -> np.ndarray:
        """(M,) int64: how many of the rows before `row` come from each member."""
        first, before, shares = next(phase for phase in reversed(self._phases) if phase[0] <= row)
        return before + np.array(_split(row - first, shares), np.int64)

    def find(self, row: int) -> tuple[int, int]:
        """The member that `row` comes from, and the number that it has there."""
        counts = self.counts(row)
        member = int(np.argmax(self.counts(row + 1) - counts))
        return member, int(counts[member])

    def batch(self, rows: Sequence[int]) -> Batch:
        """Those rows of the mixture, (len(rows), T)."""
        member_of, number_of = zip(*map(self.find, rows), strict=True)
        out: Batch | None = None
        for member in sorted(set(member_of)):
            places = [i for i, m in enumerate(member_of) if m == member]
            part = self._members[member].batch([number_of[i] for i in places])
            if out is None:
                out = Batch(*(np.empty((len(rows), x.shape[1]), x.dtype) for x in part))
            for whole, x in zip(out, part, strict=True):
                whole[places] = x
        assert out is not None, 'a batch has at least one row'
        return out


def _split(rows: int, shares: list[int]) -> list[int]:
    """`rows` in parts as `shares` say. Growing `rows` by one grows exactly one part, by one."""
    parts = []
    left, share_left = rows, sum(shares)
    for share in shares:
        # Rounded; each source takes its share of what those before it have left.
        part = (2 * left * share + share_left) // (2 * share_left) if share_left else 0
        parts.append(part)
        left, share_left = left - part, share_left - share
    return parts
