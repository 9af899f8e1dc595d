"""From verdicts on the items of a task to its scores.

    pass@k = mean over items of 1 - C(n - c, k) / C(n, k)        n samples, c of them right: unbiased for one set of k
    McNemar: of the items that one mode got right and the other wrong, b and c, min(b, c) under a fair coin, two-sided

Shapes: I items. Intervals of 95 %: Wilson's where all items score 0 or 1, else a bootstrap over items.
"""

import collections
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fbt_jax.evaluation.intervals import LEVEL, Ends, ends_of, ratios

SIZES = (1, 3, 5, 10, 100)  # of k, as far as there are samples


class Estimate(NamedTuple):
    value: float
    interval: Ends


class Paired(NamedTuple):
    """Of one mode against another on the same items; None where items score more than right or wrong."""

    only_first: int | None  # items that the first alone got right
    only_second: int | None
    p_value: float | None


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that of k out of `samples`, drawn without replacement, at least one is among the `right`."""
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f'{right} of {samples} right, k = {k}: makes no sense')
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def sizes(samples: int) -> list[int]:
    return [k for k in SIZES if k <= samples]


def estimate(scores_I: Sequence[float]) -> Estimate:
    """Their mean. No interval where all are the same, unless 0 or 1: a bootstrap knows of no others."""
    from scipy import stats

    scores = np.asarray(scores_I, np.float64)
    if np.isin(scores, (0, 1)).all():
        ends = stats.binomtest(int(scores.sum()), len(scores)).proportion_ci(LEVEL, 'wilson')
        return Estimate(float(scores.mean()), ends_of(ends.low, ends.high))
    return _bootstrapped(scores)


def difference(first_I: Sequence[float], second_I: Sequence[float]) -> Estimate:
    """The mean of first - second, paired: the same items are drawn for both. No interval where all items agree."""
    return _bootstrapped(np.subtract(first_I, second_I))


def _bootstrapped(values: np.ndarray) -> Estimate:
    found = ratios(values[None], np.ones(len(values)))
    told = np.ptp(values) > 0
    return Estimate(float(found.value_C[0]), ends_of(found.low_C[0], found.high_C[0]) if told else None)


def mcnemar(first_I: Sequence[float], second_I: Sequence[float]) -> Paired:
    """The exact test of two modes' verdicts, 0 or 1, on the same items."""
    from scipy import stats

    first, second = np.asarray(first_I, bool), np.asarray(second_I, bool)
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    count = only_first + only_second
    p_value = float(stats.binomtest(only_first, count).pvalue) if count else 1.0
    return Paired(only_first, only_second, p_value)


def generative_scores(
    found: dict[str, dict[float, list[dict[str, Any]]]], items: Sequence[str], samples: int
) -> dict[str, Any]:
    """Scores by mode and temperature, the best temperature of each mode, and the modes in pairs at it.

    found: records by mode and temperature. An item without records (its prompt is too long) counts as wrong.
    """
    scores = {m: {f'{t:g}': _scores(r, items, samples) for t, r in by_t.items()} for m, by_t in found.items()}
    best = {mode: max(by_t, key=lambda t: (_quality(by_t[t]), -float(t))) for mode, by_t in scores.items()}
    right = {m: _right(next(r for t, r in found[m].items() if f'{t:g}' == best[m]), items) for m in scores}
    pairs = []
    for a, b in itertools.combinations(scores, 2):
        paired = mcnemar(*([0 in right[m][item] for item in items] for m in (a, b)))
        differences = {}
        for k in sizes(samples):
            passed_a, passed_b = ([pass_at_k(samples, len(right[m][i]), k) for i in items] for m in (a, b))
            differences[str(k)] = difference(passed_b, passed_a)._asdict()
        pairs.append({'first': a, 'second': b} | paired._asdict() | {'second_less_first': differences})
    return {'scores': scores, 'best_temperature': best, 'pairs': pairs}


def _right(records: list[dict[str, Any]], items: Sequence[str]) -> dict[str, set[int]]:
    """Of each item, which samples are correct."""
    right: dict[str, set[int]] = {item: set() for item in items}
    for record in records:
        if record['verdict'] == 'correct':
            right[record['item']].add(record['sample'])
    return right


def _scores(records: list[dict[str, Any]], items: Sequence[str], samples: int) -> dict[str, Any]:
    right = _right(records, items)
    passed = {
        str(k): estimate([pass_at_k(samples, len(right[item]), k) for item in items])._asdict() for k in sizes(samples)
    }
    tokens = [record['tokens'] for record in records]
    return {
        'pass': passed,
        'verdicts': dict(collections.Counter(record['verdict'] for record in records)),
        'median_tokens': float(np.median(tokens)),
        'mean_tokens': float(np.mean(tokens)),
        'at_limit': sum(record['finished'] == 'length' for record in records) / len(records),
    }


def _quality(scores: dict[str, Any]) -> float:
    """By which the temperature is picked: pass@3, as the paper reports, or pass@1 of fewer samples."""
    passed = scores['pass']
    return passed.get('3', passed['1'])['value']


def harness_scores(by_mode: dict[str, dict[Any, dict[str, float]]]) -> dict[str, Any]:
    """Means of what lm-evaluation-harness scored item by item, by mode and metric, and the modes in pairs.

    Tasks of a group may have different metrics: each is over the items that have it.
    """
    some = next(iter(by_mode.values()))
    metrics = list(dict.fromkeys(name for scores in some.values() for name in scores))
    values = {
        mode: {m: [of[item][m] for item in some if m in some[item]] for m in metrics} for mode, of in by_mode.items()
    }
    scores = {mode: {m: estimate(own[m])._asdict() for m in metrics} for mode, own in values.items()}
    pairs = []
    for a, b in itertools.combinations(by_mode, 2):
        both = [*values[a].get('acc', [0.5]), *values[b].get('acc', [0.5])]
        paired = (
            mcnemar(values[a]['acc'], values[b]['acc']) if np.isin(both, (0, 1)).all() else Paired(None, None, None)
        )
        differences = {m: difference(values[b][m], values[a][m])._asdict() for m in metrics}
        pairs.append({'first': a, 'second': b} | paired._asdict() | {'second_less_first': differences})
    return {'items': len(some), 'scores': scores, 'pairs': pairs}
