"""Diagnosis of the feedback map: sums by hand, planted contractions and expansions, singular values against numpy's."""

import re
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    VOCAB_SIZE,
    all_passes,
    jaxpr_sizes,
    make_batch,
    make_model,
    make_params,
    quick_jit,
    sequential_states,
    shifted,
)
from helpers_run import make_run

from fbt_jax.batch import Batch
from fbt_jax.errors import UserError
from fbt_jax.evaluation.contraction import Iterated, fit_range, iterate, judge, make_iteration
from fbt_jax.evaluation.one_token import largest_singular_values, prompts_of, rollout_norms, stretches
from fbt_jax.inference.generate import generate

PASSES = 12
BATCH = make_batch(((32,), (20, 12), (5, 25), (32,), (16, 16), (31,), (32,), (9, 23), (32,), (8, 24)) * 2, seq_len=32)


def iterated(model: Any, params: Any, *, passes: int = PASSES) -> Iterated:
    return iterate(make_iteration(model, num_passes=passes), params, [BATCH], passes=passes)


# Sums


def test_sums_by_hand() -> None:
    """Loss, update and state of the counted positions that have more than K tokens of their document before them."""
    model = make_model()
    params = make_params(model)
    states_KBTD = all_passes(model, params, BATCH, num_passes=PASSES).astype(np.float64)
    judged = (BATCH.weights > 0) & (BATCH.positions >= PASSES)
    assert 200 < judged.sum() < (BATCH.weights > 0).sum() - 80
    logits = states_KBTD @ np.asarray(params['embedding'], np.float64)[:VOCAB_SIZE].T
    target = np.take_along_axis(
        logits, np.broadcast_to(BATCH.targets[None, ..., None], (PASSES, *BATCH.tokens.shape, 1)), -1
    )
    nll = np.log(np.exp(logits).sum(-1)) - target[..., 0]
    found = iterated(model, params)
    np.testing.assert_allclose(found.loss_K, nll[:, judged].mean(-1), rtol=1e-5)
    update = np.diff(states_KBTD, axis=0)[:, judged]
    np.testing.assert_allclose(found.update_norm_K[1:], np.sqrt((update**2).mean((-1, -2))), rtol=1e-4)
    np.testing.assert_allclose(found.state_norm_K, np.sqrt((states_KBTD[:, judged] ** 2).mean((-1, -2))), rtol=1e-5)
    rows = judged.sum(1)
    assert found.judged_R.tolist() == rows[rows > 0].tolist()
    # Elsewhere nothing moves any more, whatever the map: these would have looked like a contraction.
    assert not np.diff(states_KBTD, axis=0)[-1][BATCH.positions < PASSES - 1].any()


def test_too_few_positions_are_refused() -> None:
    model = make_model()
    with pytest.raises(UserError, match=r'^--passes=32: only 0 positions in 0 rows .*; 200 in 8 rows are needed'):
        iterated(model, make_params(model), passes=32)


def test_a_pass_that_is_not_finite_is_told() -> None:
    zeros = np.zeros((PASSES, 8))
    update = zeros.copy()
    update[3:, 2] = np.inf
    parts = zeros, update, zeros, np.full(8, 100.0)
    with pytest.raises(RuntimeError, match='from pass 4 on, losses or states are not finite'):
        iterate(lambda *_: parts, None, [BATCH], passes=PASSES)


def test_memory_does_not_grow_with_the_passes() -> None:
    """No intermediate of 1000 passes is larger than the largest of 10."""
    model = make_model()
    params = make_params(model)
    most = [
        max(jaxpr_sizes(jax.make_jaxpr(make_iteration(model, num_passes=k))(params, BATCH).jaxpr)) for k in (10, 1000)
    ]
    assert most[0] == most[1]


# Planted maps


class Turning:
    """h_t = e_t + rate R h_(t-1), R a rotation: by construction each pass multiplies every update by the rate."""

    config = make_model().config

    def apply(self, variables: Any, tokens: Any, prev: Any, *, plain_BT: Any, **_: Any) -> Any:
        params = variables['params']
        return params['embedding'][tokens] + jnp.where(plain_BT[..., None], 0, prev @ params['turn'])

    def params(self, rate: float, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        embedding_VD = rng.normal(size=(VOCAB_SIZE, self.config.width))
        embedding_VD /= np.sqrt(np.mean(embedding_VD**2, axis=1, keepdims=True))
        turn_DD, _ = np.linalg.qr(rng.normal(size=[self.config.width] * 2))
        return {'embedding': jnp.asarray(embedding_VD, 'float32'), 'turn': jnp.asarray(rate * turn_DD, 'float32')}


@pytest.mark.parametrize(
    ('rate', 'verdict'), [(0.4, 'contracting'), (0.95, 'undecided'), (1.05, 'diverging'), (1.3, 'diverging')]
)
def test_a_planted_rate(rate: float, verdict: str) -> None:
    """Through the scan over passes, whatever the seed."""
    model = Turning()
    iteration = make_iteration(model, num_passes=PASSES)
    for seed in range(5):
        found = iterate(iteration, model.params(rate, seed), [BATCH], passes=PASSES)
        np.testing.assert_allclose(found.update_norm_K[1:], rate ** np.arange(1, PASSES), rtol=2e-3, atol=1e-6)
        judged = judge(found, trained_passes=3, dtype=jnp.float32)
        assert judged.verdict == verdict, judged
        assert judged.rate.value == pytest.approx(rate, rel=2e-3)


def test_a_planted_rate_in_the_model() -> None:
    """Layers that add nothing leave h = n(n(e) + s R h): a pass multiplies the update by about s / sqrt(1 + s^2), and
    where s is large by almost 1, so that nothing ever settles."""
    model = make_model(fusion='add', width=64)
    iteration = make_iteration(model, num_passes=PASSES)
    for seed in range(3):
        params = make_params(model, seed=seed)
        for norm in ('input_norm', 'final_norm'):
            params[norm]['scale'] = np.ones_like(params[norm]['scale'])
        for name in ('output', 'mlp_down'):
            params['layers'][name]['kernel'] *= 0
        turn_DD, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(64, 64)))
        for scale, verdict in ((0.5, 'contracting'), (30.0, 'diverging')):
            params['fusion']['state']['kernel'] = (scale * turn_DD).astype(np.float32)
            found = judge(iterate(iteration, params, [BATCH], passes=PASSES), trained_passes=3, dtype=jnp.float32)
            assert found.verdict == verdict, found
            assert found.rate.value == pytest.approx(scale / np.sqrt(1 + scale**2), rel=0.05)


# Verdicts from sums


def simulated(update_norm_K: np.ndarray, loss_K: Any = 3.0, rows: int = 64, noise: float = 0.05) -> Iterated:
    """Rows of 50 positions around these norms; the states have norm 1."""
    rng = np.random.default_rng(5)
    shape = (len(update_norm_K), rows)
    spread = np.exp(noise * rng.normal(size=shape) + 0.3 * rng.normal(size=rows))
    nll_KR = 50 * (np.broadcast_to(loss_K, shape[:1])[:, None] + 0.2 * rng.normal(size=rows))
    return Iterated(nll_KR, 50 * (update_norm_K[:, None] * spread) ** 2, np.full(shape, 50.0), np.full(rows, 50.0))


K30 = np.arange(1, 31)


@pytest.mark.parametrize(
    ('norms', 'loss', 'verdict', 'rate'),
    [
        (0.5 * 0.8**K30, 3.0, 'contracting', 0.8),
        (0.5 * 0.4**K30 + 0.01, 3.0, 'contracting', None),  # to a small plateau
        (np.where(K30 < 3, 0.3, 0.0), 3.0, 'contracting', None),  # at once, to exactly nothing
        (0.9 + 0.1 * (-1.0) ** K30, 3.0 + 0.1 * K30, 'diverging', 1.0),  # oscillates
        (1e-3 * 1.2**K30, 3.0, 'diverging', 1.2),
        (0.9 * 0.97**K30, 3.0, 'undecided', 0.97),  # on its way, but not there
        (0.5 * 0.8**K30, 3.0 + 0.01 * K30, 'undecided', 0.8),  # settles while the loss climbs
        (np.where(K30 < 6, 0.5**K30, 0.5**6 * 1.05 ** (K30 - 6)), 3.0, 'undecided', 0.5),  # falls, then grows
        (np.where(K30 < 16, 0.3**K30, 1e-7 * 1.05 ** (K30 - 16)), 3.0, 'contracting', None),  # rounding grows
        (np.where(K30 < 16, 0.3**K30, 1e-5 * 1.2 ** (K30 - 16)), 3.0, 'undecided', None),  # above rounding
    ],
)
def test_verdicts(norms: np.ndarray, loss: Any, verdict: str, rate: float | None) -> None:
    found = judge(simulated(norms, loss), trained_passes=3, dtype=jnp.float32)
    assert found.verdict == verdict, found
    if rate is not None:
        assert found.rate.low - 0.003 < rate < found.rate.high + 0.003
        assert found.rate.value == pytest.approx(rate, abs=0.01)


def test_the_evidence_in_words() -> None:
    """A large update isn't called small, a rate that rounding makes is none, and there is no minus before zero."""
    settings: Any = {'trained_passes': 3, 'dtype': jnp.float32}
    large = judge(simulated(0.9 * 0.99**K30), **settings).evidence
    assert re.fullmatch(r'at the end the update is 0\.\d+ of the state; below 0\.1 counts as small', large[2])
    assert large[1].startswith('over passes 15 to 30 alone, by 0.9')
    assert large[1].endswith(')')
    regrown = judge(simulated(np.where(K30 < 6, 0.5**K30, 0.5**6 * 1.05 ** (K30 - 6))), **settings).evidence
    assert re.fullmatch(
        r'over passes 15 to 30 alone, by 1\.0\d+ \(1\.0\d+ to 1\.0\d+\): there it grows, so it is not seen to settle, '
        'however small it is',
        regrown[1],
    )
    still = simulated(np.where(K30 < 3, 0.3, 0.0))
    still.nll_KR[:] = still.nll_KR[0] - 1e-7 * K30[:, None]
    told = judge(still, **settings).evidence
    assert told[1].endswith(
        'no measure of the map: by the end the update is at the floor of rounding and cannot be seen to fall on'
    )
    assert told[3].startswith('the loss moves by 0.0000 (0.0000 to 0.0000) nats per token')


def test_the_rate_is_the_slope_of_the_logarithm() -> None:
    """Against numpy's least squares, over the passes that the fit names; more rows narrow the interval."""
    found = simulated(0.5 * 0.8**K30, noise=0.2)
    verdict = judge(found, trained_passes=3, dtype=jnp.float32)
    first, last = verdict.fitted
    slope = np.polyfit(np.arange(first, last + 1), np.log(found.update_norm_K[first - 1 : last]), 1)[0]
    assert verdict.rate.value == pytest.approx(np.exp(slope), rel=1e-9)
    more = judge(simulated(0.5 * 0.8**K30, noise=0.2, rows=1024), trained_passes=3, dtype=jnp.float32)
    assert (more.rate.high - more.rate.low) < 0.4 * (verdict.rate.high - verdict.rate.low)


def test_judging_takes_no_more_memory_for_more_passes() -> None:
    """Resamples of half of 1000 passes, all held at a time, would take 480 MiB."""
    found = simulated(0.5 * 0.8 ** np.arange(1, 1001))
    tracemalloc.start()
    judge(found, trained_passes=3, dtype=jnp.float32)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20


@pytest.mark.parametrize(
    ('norms', 'fitted'),
    [
        ([9, 1, 0.1, 0.01, 0.001, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4], (2, 6)),
        ([9, 1, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9], (2, 3)),
        ([9, 1, 1, 1, 1, 1, 1, 1], (2, 8)),
        ([9, 0.1, 0.2, 0.4, 0.8, 1, 1, 1], (2, 8)),
    ],
)
def test_the_fit_ends_at_the_plateau(norms: list[float], fitted: tuple[int, int]) -> None:
    assert fit_range(np.array(norms), 1e-6) == fitted


# The one-token map


def test_singular_values_of_known_maps() -> None:
    rng = np.random.default_rng(2)
    maps_BDD, x_BD = rng.normal(size=(5, 12, 12)).astype(np.float32), rng.normal(size=(5, 12)).astype(np.float32)
    maps_BDD[3] = 0
    found = largest_singular_values(lambda x: jnp.einsum('bij,bj->bi', maps_BDD, x), x_BD)
    np.testing.assert_allclose(found.sigma_B, np.linalg.svd(maps_BDD, compute_uv=False)[:, 0], rtol=2e-3)
    # A function that bends: J = diag(1 - tanh^2) A at x.
    bent = largest_singular_values(lambda x: jnp.tanh(jnp.einsum('bij,bj->bi', maps_BDD, x)), 0.1 * x_BD)
    slopes_BD = 1 - np.tanh(np.einsum('bij,bj->bi', maps_BDD, 0.1 * x_BD)) ** 2
    expected_B = np.linalg.svd(slopes_BD[..., None] * maps_BDD, compute_uv=False)[:, 0]
    np.testing.assert_allclose(bent.sigma_B, expected_B, rtol=2e-3)
    # An orthogonal matrix stretches everything alike, so the residual is nothing.
    turned = largest_singular_values(lambda x: 3 * x[:, ::-1], x_BD)
    np.testing.assert_allclose(turned.sigma_B, np.full(5, 3.0), rtol=1e-5)
    assert np.max(turned.residual_B) < 1e-5


@pytest.mark.slow
def test_singular_values_of_the_model() -> None:
    """Of the cached step, against the whole Jacobian of an uncached pass in which one fed state varies."""
    run = make_run(seq_len=32)
    rng = np.random.default_rng(0)
    tokens_BT = rng.integers(256, size=(2, 12), dtype=np.int32)
    lengths = [6, 11]
    found = stretches(run.model, run.params, prompts_of(tokens_BT, lengths, context=32), num_passes=3)
    ones, positions = np.ones_like(tokens_BT), np.tile(np.arange(12, dtype=np.int32), (2, 1))
    batch = Batch(tokens_BT, ones, ones, ones, positions)
    _, second, third = map(shifted, all_passes(run.model, run.params, batch, num_passes=3))

    @quick_jit
    def jacobian(row: int, t: int) -> jax.Array:
        def state(fed_D: jax.Array) -> jax.Array:
            return run.model.apply({'params': run.params}, tokens_BT, second.at[row, t].set(fed_D))[row, t]

        return jax.jacrev(state)(third[row, t])

    for row, t in enumerate(lengths):
        assert found.sigma_B[row] == pytest.approx(np.linalg.svd(jacobian(row, t), compute_uv=False)[0], rel=5e-3)


def test_rollouts_are_those_of_soft_decoding() -> None:
    """Norms by the exact recurrence over the tokens that `generate` draws."""
    run = make_run(seq_len=32)
    prompt = [3, 50, 60, 70, 80]
    tokens = generate(run, [prompt], mode='soft', temperature=1.0, max_tokens=6).tokens[0]
    assert len(tokens) == 6
    norms_NB = rollout_norms(
        run.model, run.params, prompts_of([np.array([*prompt, 0])], [5], context=32), tokens=6, context=32
    )
    row = np.array([[*prompt, *tokens[:-1]]], np.int32)
    ones, positions = np.ones_like(row), np.arange(10, dtype=np.int32)[None]
    states = sequential_states(run.model, run.params, Batch(row, ones, ones, ones, positions), positions < 5)
    np.testing.assert_allclose(norms_NB[:, 0], np.sqrt((states[0, 4:] ** 2).mean(-1)), rtol=1e-4)
