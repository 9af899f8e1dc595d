"""Scores of tasks: pass@k, McNemar and intervals, from closed forms and by counting."""

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from helpers_tasks import record

from fbt_jax.evaluation.task_scores import estimate, generative_scores, mcnemar, pass_at_k


@pytest.mark.parametrize('samples', range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples: int) -> None:
    for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        subsets = list(itertools.combinations([n < right for n in range(samples)], k))
        share = Fraction(sum(map(any, subsets)), len(subsets))
        assert pass_at_k(samples, right, k) == pytest.approx(float(share), abs=1e-12)


def test_pass_at_k_is_that_of_the_product_form() -> None:
    """As HumanEval's own code computes it: 1 - prod over i of 1 - k / i."""
    for samples, right, k in [(10, 3, 3), (200, 17, 100), (100, 1, 10), (10, 10, 1), (10, 8, 3)]:
        rest = samples - right
        product = 1.0 if rest < k else 1 - np.prod(1 - k / np.arange(rest + 1, samples + 1))
        assert pass_at_k(samples, right, k) == pytest.approx(product, abs=1e-12)
    for wrong in [(3, 4, 1), (3, 1, 4), (3, 1, 0), (3, -1, 1)]:
        with pytest.raises(ValueError, match='makes no sense'):
            pass_at_k(*wrong)


def test_mcnemar_is_the_closed_form() -> None:
    for b, c in itertools.product(range(5), range(5)):
        first = [1] * b + [0] * c + [1] * 5 + [0] * 4
        second = [0] * b + [1] * c + [1] * 5 + [0] * 4
        tail = sum(math.comb(b + c, i) for i in range(min(b, c) + 1)) / 2 ** (b + c)
        found = mcnemar(first, second)
        assert found[:2] == (b, c)
        assert found.p_value == pytest.approx(min(1, 2 * tail), abs=1e-12)


def test_intervals_of_scores() -> None:
    z, n, right = 1.959963984540054, 40, 13
    centre = (right + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(right * (n - right) / n + z * z / 4)
    found = estimate([1] * right + [0] * (n - right))
    assert found.value == right / n
    assert found.interval == pytest.approx([centre - half, centre + half], abs=1e-9)
    assert estimate([0] * 9).interval == pytest.approx([0, z * z / (9 + z * z)], abs=1e-9)
    assert estimate([0.5] * 10) == (0.5, None)
    shares = np.random.default_rng(0).choice([0, 0.3, 1], 400)
    low, high = estimate(shares).interval or [0, 0]
    normal = 1.96 * shares.std() / 20
    assert [low, high] == pytest.approx([shares.mean() - normal, shares.mean() + normal], abs=0.005)


def test_scores_of_a_grid() -> None:
    """Three items of which one has no records, two samples; by hand."""

    def of(verdicts: str, tokens: int) -> list[dict[str, Any]]:
        names = {'+': 'correct', '-': 'wrong', '?': 'no answer'}
        return [
            record('ab'[n // 2], n % 2, names[v], tokens + n, 'length' if n == 3 else 'eos')
            for n, v in enumerate(verdicts)
        ]

    found = generative_scores(
        {'standard': {0.3: of('+---', 4), 0.7: of('++-?', 10)}, 'soft': {0.3: of('---+', 1), 0.7: of('++++', 1)}},
        ['a', 'b', 'c'],
        2,
    )
    scores = found['scores']['standard']
    assert scores['0.3']['pass']['1']['value'] == pytest.approx(0.5 / 3)
    assert scores['0.7']['pass']['1']['value'] == pytest.approx(1 / 3)
    assert scores['0.7']['verdicts'] == {'correct': 2, 'wrong': 1, 'no answer': 1}
    assert (scores['0.3']['median_tokens'], scores['0.7']['mean_tokens'], scores['0.3']['at_limit']) == (
        5.5,
        11.5,
        0.25,
    )
    assert found['best_temperature'] == {'standard': '0.7', 'soft': '0.7'}
    (pair,) = found['pairs']
    assert (pair['only_first'], pair['only_second'], pair['p_value']) == (0, 1, 1.0)
    assert pair['second_less_first']['1']['value'] == pytest.approx(1 / 3)


def test_the_temperature_is_picked_by_pass_at_3() -> None:
    """One item always right beats three that are right once in three by pass@1, not by pass@3."""
    steady = [record(i, s, 'correct' if i == 'a' else 'wrong') for i in 'abc' for s in range(3)]
    lucky = [record(i, s, 'correct' if s == 0 and i != 'c' else 'wrong') for i in 'abc' for s in range(3)]
    found = generative_scores({'soft': {0.3: steady, 0.5: lucky}}, list('abc'), 3)
    assert found['scores']['soft']['0.3']['pass']['1']['value'] > found['scores']['soft']['0.5']['pass']['1']['value']
    assert found['best_temperature'] == {'soft': '0.5'}
    assert generative_scores({'soft': {0.5: lucky, 0.3: lucky}}, list('abc'), 3)['best_temperature'] == {'soft': '0.3'}
