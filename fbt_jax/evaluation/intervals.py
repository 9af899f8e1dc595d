"""How sure a score is: percentile bootstrap over documents of a ratio of sums, by SciPy.

    theta = sum over documents of x_u / sum over documents of n_u,   x nats or a difference of nats, n tokens or bytes

Documents are drawn with replacement, whole: tokens of one document are not independent of each other. The same draws
serve all rows of `sums_CU`, and x and n of a document stay together; a difference is one x, so it is paired.
Shapes: C scores, U documents. With few documents (FEW) such intervals are known to be too narrow.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fbt_jax.evaluation.per_pass import DocumentSums, places

LEVEL = 0.95
RESAMPLES = 2000
SEED = 0
FEW = 30
BATCH_ELEMENTS = 2**21  # of the resamples that are held at a time, of all arrays together


Ends = list[float] | None  # None: of a single document nothing is known


class Ratios(NamedTuple):
    """value_C within [low_C, high_C]; the ends are NaN where there is a single document."""

    value_C: np.ndarray
    low_C: np.ndarray
    high_C: np.ndarray


def ratios(sums_CU: np.ndarray, counts_U: np.ndarray) -> Ratios:
    """sum_u sums_cu / sum_u counts_u of each score, and its interval. Counts may be (C, U) too."""

    def ratio(sums: np.ndarray, counts: np.ndarray, axis: int = -1) -> np.ndarray:
        return sums.sum(axis) / counts.sum(axis)

    value_C = ratio(sums_CU, counts_U)
    if sums_CU.shape[-1] < 2:
        unknown_C = np.full_like(value_C, np.nan)
        return Ratios(value_C, unknown_C, unknown_C)
    return Ratios(value_C, *bootstrap((sums_CU, np.broadcast_to(counts_U, sums_CU.shape)), ratio))


def ends_of(low: float, high: float) -> Ends:
    return [float(low), float(high)] if low <= high else None


def bootstrap(data: tuple[np.ndarray, ...], statistic: Callable[..., np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the interval of `statistic(*data, axis=-1)`, in which the last axis of all arrays is drawn together."""
    from scipy import stats

    interval = stats.bootstrap(
        data,
        statistic,
        paired=True,
        vectorized=True,
        axis=-1,
        confidence_level=LEVEL,
        n_resamples=RESAMPLES,
        batch=max(1, BATCH_ELEMENTS // sum(x.size for x in data)),
        method='percentile',
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return interval.low, interval.high


def pass_intervals(documents: DocumentSums, passes: Sequence[int], *, soft: bool = False) -> dict[str, Any]:
    """Intervals of loss, perplexity, bits per byte and of the paired difference from pass 1, by number of passes.

    soft: the sums' last entry is the exact recurrence's.
    """
    entries = places(passes, soft)
    names, chosen = list(entries), list(entries.values())
    nll_KU, differences_KU = documents.nll_KU[chosen], documents.nll_KU[chosen] - documents.nll_KU[:1]
    loss = ratios(np.concatenate([nll_KU, differences_KU]), documents.tokens_U)
    count = len(chosen)

    def ends(found: Ratios, first: int, change: Callable[[Any], Any] = lambda x: x) -> dict[str, Ends]:
        low_K, high_K = (change(x)[first : first + count].tolist() for x in (found.low_C, found.high_C))
        return {name: ends_of(low, high) for name, low, high in zip(names, low_K, high_K, strict=True)}

    found: dict[str, Any] = {
        'unit': 'document',
        'documents': len(documents.tokens_U),
        'level': LEVEL,
        'resamples': RESAMPLES,
        'loss': ends(loss, 0),
        'perplexity': ends(loss, 0, np.exp),
    }
    if documents.bytes_U is not None:
        found['bits_per_byte'] = ends(ratios(nll_KU / math.log(2), documents.bytes_U), 0)
    values, intervals = loss.value_C[count:].tolist(), ends(loss, count).values()
    found['difference_from_pass_1'] = {
        name: {'loss': value, 'interval': interval}
        for name, value, interval in zip(names, values, intervals, strict=True)
        if name != '1'
    }
    return found
