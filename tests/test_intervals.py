"""Intervals over documents: they hold as often as they say, and small cases come out as on paper."""

import math

import numpy as np
import pytest
from scipy import stats

from fbt_jax.evaluation.intervals import pass_intervals, ratios
from fbt_jax.evaluation.per_pass import DocumentSums


def test_intervals_hold_as_often_as_they_say() -> None:
    """1500 corpora of 150 documents whose lengths and losses per token both vary: 93 to 97 % of the intervals hold
    the truth; and so does that of a paired difference."""
    rng = np.random.default_rng(7)
    shape = (1500, 150)
    tokens = rng.geometric(1 / 60, shape) + 5.0
    hardness = rng.gamma(9, 1 / 3, shape)  # nats per token of each document, mean 3
    first = tokens * hardness
    gain = tokens * rng.normal(0.05, 0.2, shape)
    for sums, truth in ((first, 3.0), (gain, 0.05)):
        found = ratios(sums, tokens)
        assert 0.93 < np.mean((found.low_C <= truth) & (truth <= found.high_C)) < 0.97
        # Tails are even: a one-sided shift would hide in the sum of both.
        assert 0.01 < np.mean(truth < found.low_C) < 0.045
        assert 0.01 < np.mean(truth > found.high_C) < 0.045


def test_pairing_takes_out_what_documents_share() -> None:
    """Documents differ by far more than passes do; a constant gain per token has an interval of no width."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(10, 90, 40).astype(float)
    first = tokens * rng.gamma(4, 1, 40)
    found = pass_intervals(DocumentSums(np.stack([first, first - 0.25 * tokens]), tokens, None), [1, 2])
    assert found['difference_from_pass_1'] == {
        '2': {'loss': pytest.approx(-0.25), 'interval': pytest.approx([-0.25] * 2)}
    }
    low, high = found['loss']['1']
    assert high - low > 0.5
    assert 'bits_per_byte' not in found


def test_two_documents_on_paper() -> None:
    """Draws with replacement of (a, b): aa with probability 1/4, ab 1/2, bb 1/4; so the interval is [a, b]."""
    sums = DocumentSums(
        np.array([[10.0, 90.0], [8.0, 60.0], [9.0, 99.0]]), np.array([10.0, 30.0]), np.array([20.0, 40.0])
    )
    found = pass_intervals(sums, [1, 3])
    assert (found['documents'], found['level'], found['unit']) == (2, 0.95, 'document')
    assert found['loss'] == {'1': pytest.approx([1, 3]), '3': pytest.approx([0.9, 3.3])}
    assert found['perplexity']['1'] == pytest.approx([math.e, math.e**3])
    assert found['bits_per_byte']['3'] == pytest.approx([0.45 / math.log(2), 99 / 40 / math.log(2)])
    # (9 - 10 + 99 - 90) / 40 = 0.2; document by document -0.1 and 0.3.
    assert found['difference_from_pass_1'] == {
        '3': {'loss': pytest.approx(0.2), 'interval': pytest.approx([-0.1, 0.3])}
    }


def test_many_equal_documents_give_the_interval_of_a_mean() -> None:
    """Of equal lengths the ratio is a mean, whose interval for 2000 documents is the normal one."""
    values = np.random.default_rng(1).normal(2, 0.5, 2000)
    found = ratios(values[None] * 50, np.full(2000, 50.0))
    half = stats.norm.ppf(0.975) * values.std() / math.sqrt(2000)
    assert found.value_C[0] == pytest.approx(values.mean())
    np.testing.assert_allclose(
        [found.low_C[0], found.high_C[0]], values.mean() + np.array([-half, half]), atol=0.1 * half
    )


def test_one_document_says_nothing_about_others() -> None:
    found = pass_intervals(DocumentSums(np.array([[3.0], [4.0]]), np.array([2.0]), None), [1, 2])
    assert found['loss'] == {'1': None, '2': None}
    assert found['difference_from_pass_1'] == {'2': {'loss': 0.5, 'interval': None}}
