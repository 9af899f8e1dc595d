"""The word problem of S5: rows on which depth fails and a recurrence succeeds (`configs/word_problem.py`).

The input is a word of random generators g_1 ... g_T, each a transposition, a 5-cycle or the identity, uniformly. The
target at t is the running product g_t o ... o g_1 (g_1 acts first) as its index among the 120 permutations of five
things in lexicographic order. Targets are ids 0..119, generators 120..122: an answer never appears in an input. One row
is one document; every position counts. A row is a pure function of (seed, split, index).
"""

import itertools
from collections.abc import Sequence

import numpy as np

from fbt_jax.batch import Batch
from fbt_jax.data.packing import ENDLESS, padding

PERMUTATIONS = tuple(itertools.permutations(range(5)))  # p maps x to p[x]
GENERATORS = ((1, 0, 2, 3, 4), (1, 2, 3, 4, 0), (0, 1, 2, 3, 4))
FIRST_GENERATOR = len(PERMUTATIONS)
VOCAB_SIZE = FIRST_GENERATOR + len(GENERATORS)
VALIDATION_ROWS = 1024

_INDEX = {p: i for i, p in enumerate(PERMUTATIONS)}
# _PRODUCT[g][i] is the index of generator g after permutation i.
_PRODUCT = [[_INDEX[tuple(g[x] for x in p)] for p in PERMUTATIONS] for g in GENERATORS]


class WordProblemRows:
    """A random-access source of rows: endless for training, `VALIDATION_ROWS` for validation."""

    def __init__(self, *, seq_len: int, seed: int, validation: bool) -> None:
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
        # bits are taken raw because NumPy promises them for good; 2^64 = 1 mod 3, a bias that nobody will see.
        key, counter = np.array([self._seed, index], np.uint64), np.array([0, 0, 0, self._validation], np.uint64)
        generators_T = (np.random.Philox(key=key, counter=counter).random_raw(self._seq_len) % 3).astype(np.int32)
        products = []
        state = 0  # the identity is the first in lexicographic order
        for g in generators_T.tolist():
            state = _PRODUCT[g][state]
            products.append(state)
        return Batch(
            tokens=generators_T + FIRST_GENERATOR,
            targets=np.array(products, np.int32),
            weights=np.ones(self._seq_len, np.float32),
            segment_ids=np.ones(self._seq_len, np.int32),
            positions=np.arange(self._seq_len, dtype=np.int32),
        )
