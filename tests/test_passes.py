"""Parallel passes against token-by-token evaluation, the scan against a loop, the objective against numpy.

Shapes: B batch, T positions, D width, K passes, V padded vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax.errors import ScopeParamNotFoundError
from helpers import (
    LENGTHS,
    SEQ_LEN,
    VOCAB_SIZE,
    all_passes,
    apply,
    flat_params,
    float64,
    jaxpr_sizes,
    make_batch,
    make_model,
    make_params,
    on_devices,
    quick_jit,
    run_passes,
    sequential_states,
    shifted,
)

from fbt_jax import losses
from fbt_jax.batch import Batch
from fbt_jax.config import Config, MeshConfig, PassesConfig
from fbt_jax.losses import loss_sums, token_losses
from fbt_jax.passes import (
    PURPOSE_JITTER,
    PURPOSE_PREFIX,
    Noise,
    jittered,
    multi_pass,
    prefix_mask,
    shift,
    step_key,
)
from fbt_jax.sharding import batch_sharding, make_mesh, mesh_axes
from fbt_jax.training.step import batch_gradients

Array = np.ndarray

RECURRENCES: dict[str, dict[str, Any]] = {
    'gated, window 3': {},
    'gated, full attention': {'window': 0},
    'add, window 2, four layers': {'fusion': 'add', 'window': 2, 'num_layers': 4},
    'concat, window 3': {'fusion': 'concat', 'num_kv_heads': 4},
}
ROWS_B = np.arange(2, dtype=np.int32)


def make_noise(
    seed: int = 0, step: int = 5, rows_B: Array = ROWS_B, *, mixin: bool = True, jitter: float = 0.02
) -> Noise:
    return Noise(step_key(seed, jnp.int32(step)), rows_B, mixin, jitter)


def pass_noise(noise: Noise, batch: Batch, width: int, num_passes: int) -> tuple[Array, Array]:
    """(plain_KBT, noise_KBTD) of each pass, the keys built here from (seed, step, purpose, pass, row)."""
    plain_KBT = np.ones((num_passes, *batch.tokens.shape), bool)
    noise_KBTD = np.zeros((num_passes, *batch.tokens.shape, width))
    for k in range(2, num_passes + 1):
        prefix_key, jitter_key = (
            jax.random.fold_in(jax.random.fold_in(noise.key, purpose), k)
            for purpose in (PURPOSE_PREFIX, PURPOSE_JITTER)
        )
        plain_KBT[k - 1] = prefix_mask(prefix_key, batch, noise.rows_B)
        zeros_BTD = jnp.zeros(noise_KBTD.shape[1:], jnp.result_type(float))
        noise_KBTD[k - 1] = jittered(jitter_key, zeros_BTD, noise.rows_B, half_width=noise.jitter)
    return plain_KBT, noise_KBTD


# The recurrence


@pytest.mark.parametrize('name', RECURRENCES)
@float64
def test_first_k_positions_after_k_passes_equal_sequential_evaluation(name: str) -> None:
    model, batch = make_model(dtype='float64', **RECURRENCES[name]), make_batch()
    params = make_params(model)
    hidden_KBTD = all_passes(model, params, batch, num_passes=SEQ_LEN)
    exact_BTD = sequential_states(model, params, batch)
    real_BT = batch.segment_ids > 0
    error_KBT = np.max(np.abs(hidden_KBTD - exact_BTD), axis=-1)
    for k in range(1, SEQ_LEN + 1):
        assert np.max(error_KBT[k - 1][real_BT & (batch.positions < k)]) < 1e-9
        assert np.all(error_KBT[k - 1][real_BT & (batch.positions == k)] > 1e-3)  # the next one isn't there yet
    assert np.max(error_KBT[-1][real_BT]) < 1e-9  # K = T


@float64
def test_sequential_evaluation_is_that_of_a_growing_prefix() -> None:
    """The helper's fixed-shape steps, against the model on inputs that really end at the current token."""
    model, batch = make_model(dtype='float64'), make_batch(lengths=((3, 1), (2, 2)), seq_len=4)
    params = make_params(model)
    hidden_BTD = jnp.zeros((2, 0, 16))
    for t in range(4):
        prefix = Batch(*(x[:, : t + 1] for x in batch))
        prev_BTD = jnp.concatenate([jnp.zeros((2, 1, 16)), hidden_BTD], axis=1)
        hidden_BTD = jnp.concatenate([hidden_BTD, apply(model, params, prefix, prev_BTD)[:, -1:]], axis=1)
    np.testing.assert_allclose(sequential_states(model, params, batch), hidden_BTD, rtol=0, atol=1e-9)


@float64
def test_behind_a_fixed_prefix_each_pass_makes_one_more_position_exact() -> None:
    """Positions t <= p + k - 1 (1-based), the prompt plain in every pass."""
    model, batch = make_model(dtype='float64'), make_batch()
    params = make_params(model)
    prefix_BT = np.array([[3] * 5 + [2] * 4 + [1] * 3, [4] * 8 + [1] * 4])
    plain_BT = batch.positions < prefix_BT
    exact_BTD = sequential_states(model, params, batch, plain_BT)
    real_BT = batch.segment_ids > 0
    hidden_BTD = apply(model, params, batch)
    for k in range(1, 8):
        if k > 1:
            hidden_BTD = apply(model, params, batch, shifted(hidden_BTD), plain_BT)
        error_BT = np.max(np.abs(hidden_BTD - exact_BTD), axis=-1)
        position_BT = batch.positions + 1
        assert np.max(error_BT[real_BT & (position_BT <= prefix_BT + k - 1)]) < 1e-9
        assert np.all(error_BT[real_BT & (position_BT == prefix_BT + k)] > 1e-3)
    assert np.max(error_BT[real_BT]) < 1e-9


# What a pass may depend on


@pytest.mark.parametrize('noise', [None, make_noise()], ids=['evaluation', 'training'])
def test_in_every_pass_a_token_moves_only_what_follows_in_its_document(noise: Noise | None) -> None:
    """Causality and isolation, bit for bit; feedback does not cross documents either (known failure 21)."""
    model, batch = make_model(), make_batch()
    params = make_params(model)
    num_passes = 4
    hidden_KBTD = all_passes(model, params, batch, num_passes=num_passes, noise=noise)
    for b, t in np.ndindex(batch.tokens.shape):
        tokens_BT = batch.tokens.copy()
        tokens_BT[b, t] = (tokens_BT[b, t] + 1) % VOCAB_SIZE
        moved_KBTD = all_passes(model, params, batch._replace(tokens=tokens_BT), num_passes=num_passes, noise=noise)
        moved_KBT = np.any(moved_KBTD != hidden_KBTD, axis=-1)
        may_T = (batch.segment_ids[b] == batch.segment_ids[b, t]) & (np.arange(SEQ_LEN) >= t)
        assert not np.any(moved_KBT[:, 1 - b])
        # One layer sees everything, so all that follows does move.
        np.testing.assert_array_equal(moved_KBT[:, b], np.broadcast_to(may_T, (num_passes, SEQ_LEN)))


@float64
def test_in_every_pass_a_packed_document_is_as_it_is_alone() -> None:
    model, batch = make_model(dtype='float64'), make_batch()
    params = make_params(model)
    hidden_KBTD = all_passes(model, params, batch, num_passes=SEQ_LEN)
    for (b, segment), (c, other) in (((0, 1), (1, 2)), ((0, 2), (1, 1)), ((0, 3), (0, 3))):
        lengths = LENGTHS[b][segment - 1], LENGTHS[c][other - 1]
        alone = make_batch(lengths=((lengths[0],), (lengths[1],)))
        where = batch.segment_ids[b] == segment, batch.segment_ids[c] == other
        for row, source, where_T in zip((0, 1), (b, c), where, strict=True):
            alone.tokens[row, : lengths[row]] = batch.tokens[source, where_T]
        alone_KBTD = all_passes(model, params, alone, num_passes=SEQ_LEN)
        for row, source, where_T in zip((0, 1), (b, c), where, strict=True):
            np.testing.assert_allclose(
                alone_KBTD[:, row, : lengths[row]], hidden_KBTD[:, source, where_T], rtol=0, atol=1e-11
            )


def test_each_pass_is_told_its_own_states_and_the_last_pass_s() -> None:
    model, batch = make_model(), make_batch()
    params = make_params(model)
    hidden_BTD, (hidden_KBTD, last_KBTD) = run_passes(model, params, batch, num_passes=4)
    np.testing.assert_array_equal(hidden_BTD, hidden_KBTD[-1])
    np.testing.assert_array_equal(last_KBTD[1:], hidden_KBTD[:-1])
    assert not np.any(last_KBTD[0])
    np.testing.assert_allclose(hidden_KBTD[0], apply(model, params, batch), rtol=0, atol=1e-5)  # an ordinary pass


def test_a_pass_whose_prefixes_are_whole_documents_is_pass_1() -> None:
    model, batch = make_model(), make_batch(lengths=((1,) * SEQ_LEN, (1,) * 5))
    params = make_params(model)
    hidden_KBTD = all_passes(model, params, batch, num_passes=4, noise=make_noise())
    for k in range(4):
        np.testing.assert_array_equal(hidden_KBTD[k], hidden_KBTD[0])
    np.testing.assert_allclose(hidden_KBTD[0], apply(model, params, batch), rtol=0, atol=1e-6)


@pytest.mark.parametrize('fusion', ['none', 'gated'])
def test_one_pass_does_not_compute_the_fusion(fusion: str) -> None:
    """Not even with noise: a step of one pass costs what plain training costs."""
    model, batch = make_model(fusion=fusion), make_batch()
    params = {name: value for name, value in make_params(model).items() if name != 'fusion'}

    def run(num_passes: int) -> Any:
        return jax.eval_shape(
            lambda: multi_pass(model, params, batch, num_passes=num_passes, per_pass=lambda *_: (), noise=make_noise())
        )

    assert run(1).hidden_BTD.shape == (2, SEQ_LEN, 16)
    with pytest.raises((ValueError, ScopeParamNotFoundError)):
        run(2)


# The scan against a loop


def loop(model: Any, params: Any, batch: Batch, num_passes: int, noise: Noise | None) -> Array:
    """States of every pass, (K, B, T, D), from `model.apply` alone."""
    starts_BT = batch.positions == 0
    plain_KBT, noise_KBTD = np.broadcast_to(starts_BT, (num_passes, *starts_BT.shape)), np.zeros(num_passes)
    if noise is not None:
        plain_KBT, noise_KBTD = pass_noise(noise, batch, model.config.width, num_passes)
    hidden_KBTD = [apply(model, params, batch)]
    for k in range(1, num_passes):
        hidden_KBTD.append(apply(model, params, batch, shifted(hidden_KBTD[-1]) + noise_KBTD[k], plain_KBT[k]))
    return jnp.stack(hidden_KBTD)


@pytest.mark.parametrize('num_passes', [1, 2, 3])
@float64
def test_scan_equals_a_loop_in_values_and_gradients(num_passes: int) -> None:
    """Also: gradients are not stopped between passes, since the loop's are not."""
    model, batch = make_model(dtype='float64'), make_batch()
    params = make_params(model)
    noise = None if num_passes == 1 else make_noise()
    direction_KBTD = np.random.default_rng(5).normal(size=(num_passes, *batch.tokens.shape, 16))

    def scan_objective(params: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        with_key = None if noise is None else noise._replace(key=key)
        hidden_KBTD = multi_pass(
            model, params, batch, num_passes=num_passes, per_pass=lambda h, _: h, noise=with_key
        ).yields
        return jnp.sum(direction_KBTD * hidden_KBTD), hidden_KBTD

    def loop_objective(params: Any) -> tuple[jax.Array, jax.Array]:
        hidden_KBTD = loop(model, params, batch, num_passes, noise)
        return jnp.sum(direction_KBTD * hidden_KBTD), hidden_KBTD

    grads, hidden_KBTD = quick_jit(jax.grad(scan_objective, has_aux=True))(params, make_noise().key)
    expected_grads, expected_KBTD = jax.grad(loop_objective, has_aux=True)(params)
    np.testing.assert_allclose(hidden_KBTD, expected_KBTD, rtol=0, atol=1e-11)
    for actual, expected in zip(*map(jax.tree.leaves, (grads, expected_grads)), strict=True):
        assert actual.dtype == np.float64
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10 * max(1.0, np.abs(expected).max()))
    # In one pass exactly zero, so that the optimizer can tell (known failure 43).
    assert [np.any(x) for x in jax.tree.leaves(grads['fusion'])] == [num_passes > 1] * 2


def test_the_last_pass_s_loss_reaches_k_tokens_back_through_the_passes() -> None:
    """With attention switched off, only feedback carries anything: pass K at t depends on tokens t-K+1..t."""
    model = make_model(num_layers=1, full_attention_every=1, window=0)
    batch = make_batch(lengths=((SEQ_LEN,),))
    params = make_params(model)
    params['layers']['attention_post_norm']['scale'][:] = 0
    batch.tokens[0] = np.arange(SEQ_LEN)  # so that the gradient's row is the position

    @quick_jit
    @jax.grad
    def gradient(embedding_VD: jax.Array) -> jax.Array:
        hidden_BTD = multi_pass(
            model, params | {'embedding': embedding_VD}, batch, num_passes=3, per_pass=lambda *_: ()
        ).hidden_BTD
        return jnp.sum(hidden_BTD[0, 7] ** 3)

    reached_V = np.any(np.abs(gradient(params['embedding'])) > 1e-4, axis=-1)
    assert np.flatnonzero(reached_V).tolist() == [5, 6, 7]


# The objective


@partial(quick_jit, static_argnums=(0, 1))
def gradients(config: Config, model: Any, params: Any, batch: Batch, key: jax.Array, z_loss: float) -> Any:
    return batch_gradients(config, model, params, batch, key=key, num_passes=3, z_loss=jnp.asarray(z_loss))


def three_passes(model: Any, **changes: Any) -> Config:
    passes = PassesConfig(phases=((0, (0.0, 0.0, 1.0)),), loss_weight=0.7, **changes)
    return Config(model=model.config, passes=passes)


def expected_losses(model: Any, params: Any, batch: Batch, noise: Noise, z_loss: float) -> tuple[float, Array, Array]:
    plain_KBT, noise_KBTD = pass_noise(noise, batch, model.config.width, 3)
    return reference.multi_pass_loss(
        flat_params(params),
        model.config,
        batch._replace(weights=batch.weights.astype(np.float64)),  # else their sum is rounded to float32
        num_passes=3,
        plain_KBT=plain_KBT,
        noise_KBTD=noise_KBTD,
        loss_weight=0.7,
        z_loss=z_loss,
    )


@pytest.mark.parametrize(
    'changes',
    [{'window': 4, 'num_layers': 4, 'num_kv_heads': 1}, {'fusion': 'concat', 'num_heads': 2, 'width': 24}],
    ids=['gated', 'concat'],
)
def test_three_noisy_passes_give_the_reference_s_losses(changes: dict[str, Any]) -> None:
    model, batch = make_model(**changes), make_batch(seed=8)
    params, noise = make_params(model, seed=9), make_noise(seed=3, step=70)

    @quick_jit
    def run(params: Any, noise_arrays: Any) -> Any:
        def per_pass(hidden_BTD: jax.Array, _: jax.Array) -> Any:
            per_token = token_losses(hidden_BTD, params['embedding'], batch.targets, vocab_size=VOCAB_SIZE)
            return loss_sums(per_token, batch.weights)

        with_key = Noise(*noise_arrays, True, 0.02)
        return multi_pass(model, params, batch, num_passes=3, per_pass=per_pass, noise=with_key).yields

    sums_K = run(params, noise[:2])
    assert {x.dtype for x in sums_K} == {jnp.dtype('float32')}
    _, nll_K, z_K = expected_losses(model, params, batch, noise, 0.01)
    count = batch.weights.sum(dtype=np.float64)
    np.testing.assert_allclose(sums_K.nll / count, nll_K, rtol=2e-5)
    np.testing.assert_allclose(sums_K.squared_log_z / count, z_K, rtol=2e-5)
    assert np.ptp(nll_K) > 1e-2


@pytest.mark.parametrize('fusion', ['gated', 'add'])
@float64
def test_gradients_are_those_of_the_reference_s_objective(fusion: str) -> None:
    """Along random directions, by differences in numpy: pass weights, counts, z-loss and noise included."""
    model, batch, z_loss = make_model(fusion=fusion, dtype='float64'), make_batch(seed=8), 0.1
    params, noise = make_params(model, seed=9), make_noise(seed=3, step=70)
    grads, sums_K = gradients(three_passes(model), model, params, batch, noise.key, z_loss)
    assert {x.dtype for x in jax.tree.leaves((grads, sums_K))} == {jnp.dtype('float64')}
    _, nll_K, z_K = expected_losses(model, params, batch, noise, z_loss)
    count = batch.weights.sum(dtype=np.float64)
    np.testing.assert_allclose(sums_K.nll / count, nll_K, rtol=1e-11)
    np.testing.assert_allclose(sums_K.squared_log_z / count, z_K, rtol=1e-11)

    def slope(direction: Any) -> float:
        """To fourth order in the step."""

        def moved(step: float) -> float:
            there = jax.tree.map(lambda x, d: x + step * d, params, direction)
            return expected_losses(model, there, batch, noise, z_loss)[0]

        h = 3e-5
        return (8 * (moved(h) - moved(-h)) - (moved(2 * h) - moved(-2 * h))) / (12 * h)

    rng = np.random.default_rng(0)
    everywhere = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
    zeros = jax.tree.map(np.zeros_like, params)
    fusion_only = zeros | {'fusion': everywhere['fusion']}
    for direction in (everywhere, fusion_only):
        along = sum(jax.tree.leaves(jax.tree.map(lambda g, d: np.sum(g * d), grads, direction)))
        np.testing.assert_allclose(along, slope(direction), rtol=1e-6)
    assert not np.any(grads['embedding'][VOCAB_SIZE:]), 'padded rows'
    assert np.all(np.any(grads['embedding'][:VOCAB_SIZE] != 0, axis=-1))


def test_bfloat16_passes_keep_float32_losses_and_gradients() -> None:
    model, batch = make_model(dtype='bfloat16'), make_batch(seed=8)
    params, noise = make_params(model, seed=9), make_noise(seed=3, step=70)
    grads, sums_K = gradients(three_passes(model), model, params, batch, noise.key, 0.01)
    assert {x.dtype for x in jax.tree.leaves((grads, sums_K))} == {jnp.dtype('float32')}
    assert all(np.all(np.isfinite(x)) and np.any(x) for x in jax.tree.leaves(grads))
    _, nll_K, z_K = expected_losses(model, params, batch, noise, 0.01)
    count = batch.weights.sum()
    np.testing.assert_allclose(sums_K.nll / count, nll_K, rtol=0.02)
    np.testing.assert_allclose(sums_K.squared_log_z / count, z_K, rtol=0.02)


def test_no_pass_s_logits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does any one pass's exist at a time, in the gradient of the whole objective."""
    batch_size, seq_len, vocab = 2, 64, 4096
    monkeypatch.setattr(losses, 'CHUNK_ELEMENTS', batch_size * 4 * vocab)
    model = make_model(vocab_size=vocab, remat='per_layer')
    batch = make_batch(lengths=((64,), (40, 24)), seq_len=seq_len)
    traced = gradients.trace(three_passes(model), model, make_params(model), batch, make_noise().key, 0.01)
    assert max(jaxpr_sizes(traced.jaxpr.jaxpr)) < batch_size * seq_len * vocab


# Prefixes and jitter


def one_layout(rows: int, lengths: tuple[int, ...] = (7, 5, 1), seq_len: int = 16) -> Batch:
    return make_batch(lengths=(lengths,) * rows, seq_len=seq_len)


def prefix_lengths(mask_BT: Any, batch: Batch, segment: int) -> Array:
    """(B,), and that the plain positions of the document are its first ones."""
    where_T = batch.segment_ids[0] == segment
    mask_BT = np.asarray(mask_BT)[:, where_T]
    assert np.all(np.diff(mask_BT.astype(int), axis=1) <= 0)
    return mask_BT.sum(1)


def chi_square(counts: Array, expected: Array | float) -> float:
    return float(np.sum((counts - expected) ** 2 / expected))


def dependence(a_B: Array, b_B: Array) -> float:
    """Chi-square of the contingency table, of (max a - 1) (max b - 1) degrees of freedom."""
    counts = np.zeros((a_B.max(), b_B.max()))
    np.add.at(counts, (a_B - 1, b_B - 1), 1)
    return chi_square(counts, counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / len(a_B))


# 99.9 % quantiles of chi-square by degrees of freedom.
CHI_SQUARE_999 = {4: 18.47, 6: 22.46, 24: 51.18, 36: 67.99}


def test_prefixes_are_uniform_and_independent_between_documents_and_passes() -> None:
    rows, batch = 7000, one_layout(7000)
    key = jax.random.fold_in(step_key(0, jnp.int32(3)), PURPOSE_PREFIX)
    draw = jax.jit(lambda k: prefix_mask(jax.random.fold_in(key, k), batch, jnp.arange(rows)))
    p7_B, p5_B, p1_B = (prefix_lengths(draw(2), batch, segment) for segment in (1, 2, 3))
    assert set(p7_B) == set(range(1, 8)) and set(p5_B) == set(range(1, 6)) and set(p1_B) == {1}
    assert chi_square(np.bincount(p7_B)[1:], rows / 7) < CHI_SQUARE_999[6]
    assert chi_square(np.bincount(p5_B)[1:], rows / 5) < CHI_SQUARE_999[4]
    assert dependence(p7_B, p5_B) < CHI_SQUARE_999[24]
    assert dependence(p7_B, prefix_lengths(draw(3), batch, 1)) < CHI_SQUARE_999[36]
    assert dependence(p7_B[:-1], p7_B[1:]) < CHI_SQUARE_999[36], 'neighbouring rows'


@quick_jit
def draws_at(seed: int, step: int, k: int, batch: Batch, rows_B: Array) -> tuple[jax.Array, jax.Array]:
    """(prefix mask, jitter) of pass k."""
    key = jax.random.fold_in(step_key(seed, step), k)
    zeros_BTD = jnp.zeros((*batch.tokens.shape, 8))
    return prefix_mask(key, batch, rows_B), jittered(key, zeros_BTD, rows_B, half_width=0.02)


def test_noise_is_a_function_of_seed_step_pass_and_row() -> None:
    batch = one_layout(20, lengths=(16,))
    rows_B = np.arange(20, dtype=np.int32)
    drawn = jax.tree.map(np.asarray, draws_at(1, 2, 3, batch, rows_B))
    jax.tree.map(np.testing.assert_array_equal, draws_at(1, 2, 3, batch, rows_B), drawn)
    for seed, step, k, rows in ((9, 2, 3, rows_B), (1, 9, 3, rows_B), (1, 2, 9, rows_B), (1, 2, 3, rows_B + 20)):
        other = draws_at(seed, step, k, batch, rows)
        assert np.mean(np.any(other[0] != drawn[0], axis=1)) > 0.7  # 15 of 16 on average
        assert np.mean(other[1] != drawn[1]) > 0.99
    # Within a batch, no two rows and no two positions share their jitter.
    assert len(np.unique(drawn[1])) > 0.99 * drawn[1].size


def test_a_row_draws_the_same_noise_wherever_it_stands() -> None:
    """Micro-batches and meshes change nothing: rows are known by their index in the global batch."""
    batch, rows_B = (
        make_batch(lengths=((5, 4, 1), (8, 3), (12,), (2, 2, 2), (6, 6), (11,))),
        np.arange(6, dtype=np.int32),
    )
    mask_BT, jitter_BTD = map(np.asarray, draws_at(1, 2, 3, batch, rows_B))
    for rows in ([4], [3, 0, 2]):
        part = Batch(*(x[rows] for x in batch))
        part_mask_BT, part_jitter_BTD = draws_at(1, 2, 3, part, rows_B[rows])
        np.testing.assert_array_equal(part_mask_BT, mask_BT[rows])
        np.testing.assert_array_equal(part_jitter_BTD, jitter_BTD[rows])

    model, batch = make_model(), make_batch()
    params = make_params(model)
    run: Callable[..., Array] = partial(all_passes, model, params, num_passes=4)
    hidden_KBTD = run(batch, noise=make_noise())
    swapped = Batch(*(x[::-1] for x in batch))
    np.testing.assert_allclose(
        run(swapped, noise=make_noise(rows_B=ROWS_B[::-1]))[:, ::-1], hidden_KBTD, rtol=0, atol=1e-5
    )
    assert np.max(np.abs(run(swapped, noise=make_noise())[:, ::-1] - hidden_KBTD)) > 0.01


def test_jitter_is_uniform_within_its_bounds() -> None:
    prev_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(4, 100, 100)), jnp.float32)
    noise_BTD = np.asarray(jittered(jax.random.key(0), prev_BTD, jnp.arange(4), half_width=0.02) - prev_BTD)
    assert 0.0199 < noise_BTD.max() < 0.02 + 1e-6 and -0.02 - 1e-6 < noise_BTD.min() < -0.0199
    np.testing.assert_allclose(noise_BTD.var(), 0.02**2 / 3, rtol=0.02)
    assert abs(noise_BTD.mean()) < 5 * 0.02 / 3**0.5 / noise_BTD.size**0.5
    counts, _ = np.histogram(noise_BTD, bins=7, range=(-0.02, 0.02))
    assert chi_square(counts, noise_BTD.size / 7) < CHI_SQUARE_999[6]
    assert (
        jittered(jax.random.key(0), prev_BTD.astype(jnp.bfloat16), jnp.arange(4), half_width=0.02).dtype == jnp.bfloat16
    )


def test_noise_touches_only_later_passes_and_only_if_asked() -> None:
    model, batch = make_model(), make_batch()
    params = make_params(model)
    run: Callable[..., Array] = partial(all_passes, model, params, batch, num_passes=4)
    quiet_KBTD = run()
    np.testing.assert_array_equal(run(noise=make_noise(mixin=False, jitter=0.0)), quiet_KBTD)
    noisy_KBTD = run(noise=make_noise())
    np.testing.assert_allclose(noisy_KBTD[0], quiet_KBTD[0], rtol=0, atol=1e-6)
    assert np.all(np.max(np.abs(noisy_KBTD - quiet_KBTD), axis=(1, 2, 3))[1:] > 1e-2)
    jitter_only_KBTD = run(noise=make_noise(mixin=False))
    starts_BT = (batch.positions == 0) & (batch.segment_ids > 0)
    np.testing.assert_allclose(jitter_only_KBTD[:, starts_BT], quiet_KBTD[:, starts_BT], rtol=0, atol=1e-6)
    moved = np.abs(jitter_only_KBTD - quiet_KBTD)[1:, (batch.positions == 1)]
    assert np.all(np.max(moved, axis=-1) > 1e-3)


# Rematerialisation


@pytest.mark.slow
def test_remat_changes_memory_and_nothing_else() -> None:
    """The policy works inside the scans, at 1, 2 and 3 passes (known failure 33)."""
    batch = make_batch(lengths=((64,), (40, 24)), seq_len=64)

    def value_and_gradients(remat: str, num_passes: int) -> tuple[int, Any]:
        """(bytes of temporaries, (value, gradients))."""
        model = make_model(num_layers=8, mlp_width=64, window=16, remat=remat)
        params = make_params(model)

        def objective(params: Any) -> jax.Array:
            return jnp.sum(
                multi_pass(
                    model, params, batch, num_passes=num_passes, per_pass=lambda hidden_BTD, _: jnp.mean(hidden_BTD**3)
                ).yields
            )

        compiled = quick_jit(jax.value_and_grad(objective)).lower(params).compile()
        return compiled.memory_analysis().temp_size_in_bytes, compiled(params)

    for num_passes in (1, 2, 3):
        most, expected = value_and_gradients('nothing', num_passes)
        for remat in ('per_layer', 'dots')[: 2 if num_passes == 2 else 1]:
            bytes_used, actual = value_and_gradients(remat, num_passes)
            assert bytes_used < (0.5 if remat == 'per_layer' else 0.9) * most
            for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
                np.testing.assert_allclose(a, e, rtol=0, atol=1e-5 * np.abs(e).max())


# A row split over devices

SPLIT = MeshConfig(data=1, fsdp=2, tensor=1, context=4)  # 8 devices, 16 positions of a row in 4 parts


def facts_of_split_rows() -> dict[str, bool]:
    """On 8 fake devices: what is, to the bit, as on one."""
    mesh = make_mesh(SPLIT)
    rng = np.random.default_rng(0)
    sharding = jax.sharding.NamedSharding(mesh, mesh_axes('batch', 'length', 'state'))

    def same(split: Any, whole: Any) -> bool:
        return np.asarray(split).tobytes() == np.asarray(whole).tobytes()

    facts = {}
    hidden_BTD, cotangent_BTD = (rng.normal(size=(2, 16, 4)).astype(np.float32) for _ in range(2))
    with jax.set_mesh(mesh):
        backward = jax.jit(lambda x, ct: jax.vjp(shift, x)[1](ct)[0])
        split_BTD, split_ct_BTD = jax.device_put((hidden_BTD, cotangent_BTD), sharding)
        forward_BTD = jax.jit(shift, out_shardings=sharding)(split_BTD)
        facts['shift stays split'] = forward_BTD.sharding.is_equivalent_to(sharding, 3)
        facts['shift'] = same(forward_BTD, shifted(hidden_BTD))
        # d shift / d x, transposed: the cotangent of t + 1 at t; nothing comes back to the last position.
        expected_BTD = np.concatenate([cotangent_BTD[:, 1:], np.zeros((2, 1, 4), np.float32)], axis=1)
        facts['gradient of shift'] = same(backward(split_BTD, split_ct_BTD), expected_BTD)

    batch, rows_B = make_batch(lengths=((7, 5, 1), (3, 11)), seq_len=16), np.arange(2, dtype=np.int32)
    split_batch = jax.device_put(batch, batch_sharding(mesh))
    key = step_key(3, jnp.int32(7))
    zeros_BTD = np.zeros((2, 16, 4), np.float32)
    noise = partial(jittered, half_width=0.02)
    masks = [jax.jit(prefix_mask)(key, batch, rows_B), jax.jit(noise)(key, zeros_BTD, rows_B)]
    with jax.set_mesh(mesh):
        facts['prefix masks'] = same(jax.jit(prefix_mask)(key, split_batch, rows_B), masks[0])
        facts['jitter'] = same(jax.jit(noise)(key, jax.device_put(zeros_BTD, sharding), rows_B), masks[1])

    # The middle document of row 0 and its start lie on devices 1 to 2 of the row, the first on 0 and 1.
    model = make_model(vocab_size=128)
    params = make_params(model)

    @quick_jit
    def states(params: Any, batch: Batch) -> Any:
        keyed = Noise(key, rows_B, True, 0.02)
        return multi_pass(model, params, batch, num_passes=3, per_pass=lambda h, _: h, noise=keyed).yields

    changed = batch._replace(tokens=np.where(batch.segment_ids == 1, (batch.tokens + 1) % VOCAB_SIZE, batch.tokens))
    with jax.set_mesh(mesh):
        before, after = (np.asarray(states(params, jax.device_put(b, batch_sharding(mesh)))) for b in (batch, changed))
    other_BT = np.asarray(batch.segment_ids > 1)
    facts['other documents unchanged'] = same(before[:, other_BT], after[:, other_BT])
    first_BT = np.asarray(batch.segment_ids == 1)
    facts['the changed one changed'] = bool(np.all(np.any(before[:, first_BT] != after[:, first_BT], axis=-1)))
    alone = np.asarray(states(params, batch))
    real_BT = np.asarray(batch.segment_ids > 0)
    facts['as on one device'] = bool(np.max(np.abs(before - alone)[:, real_BT]) < 2e-5)
    return facts


def test_rows_split_over_context_are_as_whole_ones() -> None:
    """Shift, its gradient and all noise to the bit; and no document hears of another across the devices."""
    facts = on_devices(facts_of_split_rows)
    assert len(facts) == 8
    assert all(facts.values()), facts
