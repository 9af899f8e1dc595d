"""Word problems of finite groups: rows on which depth fails and a recurrence succeeds (`configs/word_problem.py`).

The input is a word of random generators g_1 ... g_T of a permutation group, the identity among them, uniformly. The
target at t is the running product g_t o ... o g_1 (g_1 acts first) as its index among the group's permutations in
lexicographic order. Targets are ids 0..order-1, generators follow: an answer never appears in an input. One row is one
document; every position counts. A row is a pure function of (group, seed, split, index).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fbt_jax.batch import Batch
from fbt_jax.data.packing import ENDLESS, padding

Permutation = tuple[int, ...]  # p maps x to p[x]
VALIDATION_ROWS = 1024


class Group(NamedTuple):
    """A group by its generators (the identity, which leaves a product as it is, is the last of them)."""

    generators: tuple[Permutation, ...]
    product: tuple[tuple[int, ...], ...]  # product[g][i]: index of generator g after element i
    order: int

    @property
    def vocab_size(self) -> int:
        return self.order + len(self.generators)


def _group(*generators: Permutation) -> Group:
    identity = tuple(range(len(generators[0])))
    generators = (*generators, identity)
    elements, fresh = {identity}, {identity}
    while fresh:
        fresh = {_after(g, p) for g in generators for p in fresh} - elements
        elements |= fresh
    index = {p: i for i, p in enumerate(sorted(elements))}  # the identity comes first
    return Group(generators, tuple(tuple(index[_after(g, p)] for p in index) for g in generators), len(index))


def _after(g: Permutation, p: Permutation) -> Permutation:
    return tuple(g[x] for x in p)


# From the least to those that are not solvable (A5, S5), for which products are complete for NC1 (Barrington 1989).
GROUPS = {
    'Z2': _group((1, 0)),
    'S3': _group((1, 0, 2), (1, 2, 0)),
    'Z60': _group((1, 2, 0, 4, 5, 6, 3, 8, 9, 10, 11, 7)),  # cycles of 3, 4 and 5
    'S4': _group((1, 0, 2, 3), (1, 2, 3, 0)),
    'A5': _group((1, 2, 0, 3, 4), (1, 2, 3, 4, 0)),
    'S5': _group((1, 0, 2, 3, 4), (1, 2, 3, 4, 0)),
}


class WordProblemRows:
    """A random-access source of rows: endless for training, `VALIDATION_ROWS` for validation."""

    def __init__(self, group: str, *, seq_len: int, seed: int, validation: bool) -> None:
        self._group = GROUPS[group]
        self._seq_len = seq_len
        self._seed = seed
        self._validation = validation
        self.num_rows = VALIDATION_ROWS if validation else ENDLESS

    def batch(self, rows: Sequence[int]) -> Batch:
        """Those rows, (len(rows), T); rows past a finite source's end are padding."""
        return Batch(*map(np.stack, zip(*map(self._row, rows), strict=True)))

    def documents(self, rows: Sequence[int]) -> list[np.ndarray]:
        """A row's only segment is a document of its own."""
        return [np.array([row] if row < self.num_rows else [], np.int64) for row in rows]

    def _row(self, index: int) -> Batch:
        if index >= self.num_rows:
            return Batch(*(x[0] for x in padding(self._seq_len, 1)))
        # The splits lie at opposite ends of one counter, so no row of one shares its bits with a row of the other. The
        # bits are taken raw because NumPy promises them for good; 2^64 mod 3 is 1, a bias that nobody will see.
        key, counter = np.array([self._seed, index], np.uint64), np.array([0, 0, 0, self._validation], np.uint64)
        bits_T = np.random.Philox(key=key, counter=counter).random_raw(self._seq_len)
        generators_T = (bits_T % len(self._group.generators)).astype(np.int32)
        products = []
        state = 0  # the identity
        for g in generators_T.tolist():
            state = self._group.product[g][state]
            products.append(state)
        return Batch(
            tokens=generators_T + self._group.order,
            targets=np.array(products, np.int32),
            weights=np.ones(self._seq_len, np.float32),
            segment_ids=np.ones(self._seq_len, np.int32),
            positions=np.arange(self._seq_len, dtype=np.int32),
        )
