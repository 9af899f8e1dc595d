"""The numpy reference against what is known in closed form: rotations, windows, isolation, the induction of section 3.

Numpy only, so that these hold wherever the reference is read. Shapes: B batch, T positions, D width, L layers,
N query heads, M key/value heads, H head width, F MLP width, V padded vocabulary, K passes.
"""

import types
from typing import Any

import numpy as np
import pytest
import reference

Array = np.ndarray

VOCAB_SIZE, PADDED_VOCAB_SIZE = 13, 16
LENGTHS = ((5, 4, 2, 1), (8, 3))  # documents of each row; the rest of 12 positions is padding
FUSED = ('gated', 'add', 'concat')


def make_config(fusion: str = 'gated', layer_windows: tuple[int, ...] = (3, 0), num_kv_heads: int = 2) -> Any:
    """The fields of ModelConfig that the reference reads; windows are free here, the last layer need not be full."""
    return types.SimpleNamespace(
        vocab_size=VOCAB_SIZE,
        num_layers=len(layer_windows),
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_dim=4,
        rope_theta=100.0,
        fusion=fusion,
        layer_windows=layer_windows,
        head_gate=True,
        qk_norm=True,
        post_norms=True,
        depth_scaling=True,
        tied_embedding=True,
        input_norm='all',
        norm_epsilon=1e-6,
        rope_scaling=(),
    )


def make_params(config: Any, seed: int = 0) -> dict[str, Any]:
    """Random parameters, scales away from 1 so that a forgotten one shows."""
    rng = np.random.default_rng(seed)
    layers, heads, width = config.num_layers, config.num_heads, config.num_heads * config.head_dim
    kv_width, mlp_width = config.num_kv_heads * config.head_dim, 24

    def matrix(*shape: int) -> Array:
        return rng.normal(size=shape) * shape[-2] ** -0.5

    def scale(*shape: int) -> Array:
        return rng.uniform(0.5, 1.5, size=shape)

    params: dict[str, Any] = {
        'embedding': rng.normal(size=(PADDED_VOCAB_SIZE, width)) * width**-0.5,
        'input_norm': scale(width),
        'layers': {
            'attention_norm': scale(layers, width),
            'query': matrix(layers, width, width),
            'key': matrix(layers, width, kv_width),
            'value': matrix(layers, width, kv_width),
            'query_norm': scale(layers, config.head_dim),
            'key_norm': scale(layers, config.head_dim),
            'head_gate': matrix(layers, width, heads),
            'output': matrix(layers, width, width),
            'attention_post_norm': scale(layers, width),
            'mlp_norm': scale(layers, width),
            'mlp_gate': matrix(layers, width, mlp_width),
            'mlp_up': matrix(layers, width, mlp_width),
            'mlp_down': matrix(layers, mlp_width, width),
            'mlp_post_norm': scale(layers, width),
        },
        'final_norm': scale(width),
    }
    if config.fusion == 'concat':
        params['fusion'] = {'joint': matrix(2 * width, width)}
    elif config.fusion != 'none':
        names = ('state', 'gate') if config.fusion == 'gated' else ('state',)
        params['fusion'] = {name: matrix(width, width) for name in names}
    return params


def make_batch(seed: int = 1, lengths: tuple[tuple[int, ...], ...] = LENGTHS, seq_len: int = 12) -> Any:
    rng = np.random.default_rng(seed)
    shape = (len(lengths), seq_len)
    positions_BT, segment_ids_BT = np.zeros(shape, int), np.zeros(shape, int)
    for b, row in enumerate(lengths):
        start = 0
        for number, length in enumerate(row, start=1):
            positions_BT[b, start : start + length] = np.arange(length)
            segment_ids_BT[b, start : start + length] = number
            start += length
    weights_BT = rng.uniform(0.5, 2, size=shape) * (segment_ids_BT > 0) * (rng.random(shape) < 0.8)
    return types.SimpleNamespace(
        tokens=rng.integers(VOCAB_SIZE, size=shape),
        targets=rng.integers(VOCAB_SIZE, size=shape),
        weights=weights_BT,
        segment_ids=segment_ids_BT,
        positions=positions_BT,
    )


def plain_states(params: dict[str, Any], config: Any, batch: Any) -> Array:
    zeros_BTD = np.zeros_like(params['embedding'][batch.tokens])
    plain_BT = np.ones(batch.tokens.shape, bool)
    return reference.states(params, config, batch.tokens, zeros_BTD, plain_BT, batch.positions, batch.segment_ids)


def next_states(params: dict[str, Any], config: Any, batch: Any, hidden_BTD: Array) -> Array:
    prev_BTD = reference.shift(hidden_BTD)
    plain_BT = batch.positions == 0
    return reference.states(params, config, batch.tokens, prev_BTD, plain_BT, batch.positions, batch.segment_ids)


def loss(
    params: dict[str, Any], config: Any, batch: Any, num_passes: int, **changes: Any
) -> tuple[float, Array, Array]:
    """The multi-pass loss with document starts plain and no jitter, unless `changes` says otherwise."""
    plain_KBT = np.broadcast_to(batch.positions == 0, (num_passes, *batch.positions.shape)).copy()
    plain_KBT[0] = True
    noise_KBTD = np.zeros((num_passes, *params['embedding'][batch.tokens].shape))
    settings: dict[str, Any] = {'plain_KBT': plain_KBT, 'noise_KBTD': noise_KBTD, 'loss_weight': 1.0, 'z_loss': 0.0}
    return reference.multi_pass_loss(params, config, batch, num_passes=num_passes, **(settings | changes))


def test_rms_norm_gives_the_scale_as_rms() -> None:
    x_TD = np.random.default_rng(0).normal(size=(5, 64)) * 30
    normed_TD = reference.rms_norm(x_TD, np.full(64, 1.5))
    np.testing.assert_allclose(np.sqrt(np.mean(normed_TD**2, axis=-1)), 1.5, rtol=1e-6)


def test_rope_keeps_norms_and_depends_on_relative_position() -> None:
    rng = np.random.default_rng(0)
    q_BTH, k_BTH = rng.normal(size=(2, 1, 1, 8))

    def turned(x_BTH: Array, position: int) -> Array:
        return reference.rope(x_BTH, np.array([[position]]), 100.0)

    def score(query_position: int, key_position: int) -> float:
        return float(np.sum(turned(q_BTH, query_position) * turned(k_BTH, key_position)))

    np.testing.assert_array_equal(turned(q_BTH, 0), q_BTH)
    assert np.linalg.norm(turned(q_BTH, 37)) == pytest.approx(np.linalg.norm(q_BTH), rel=1e-12)
    assert score(9, 4) == pytest.approx(score(1009, 1004), rel=1e-9)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-3)


def test_rope_pairs_dimension_i_with_i_plus_half() -> None:
    for i in range(4):
        unit_BTH = np.eye(8)[None, None, i]
        angle = 5 * 100.0 ** (-i / 4)
        expected_H = np.cos(angle) * np.eye(8)[i] + np.sin(angle) * np.eye(8)[i + 4]
        np.testing.assert_allclose(reference.rope(unit_BTH, np.array([[5]]), 100.0)[0, 0], expected_H, atol=1e-15)


@pytest.mark.parametrize('window', [0, 1, 3])
def test_window_sees_exactly_that_many_keys_itself_included(window: int) -> None:
    config = make_config(layer_windows=(window,))
    params, batch = make_params(config), make_batch(lengths=((8,),), seq_len=8)
    hidden_TD = plain_states(params, config, batch)[0]
    seen_TT = np.zeros((8, 8), bool)
    for s in range(8):
        changed = types.SimpleNamespace(**vars(batch))
        changed.tokens = batch.tokens.copy()
        changed.tokens[0, s] = (batch.tokens[0, s] + 1) % VOCAB_SIZE
        seen_TT[:, s] = np.any(plain_states(params, config, changed)[0] != hidden_TD, axis=-1)
    distance_TT = np.arange(8)[:, None] - np.arange(8)
    np.testing.assert_array_equal(seen_TT, (distance_TT >= 0) & (distance_TT < (window or 8)))


@pytest.mark.parametrize('fusion', FUSED)
def test_documents_are_isolated(fusion: str) -> None:
    """A document in a packed row has the states that it has alone, in plain and in fused passes."""
    config = make_config(fusion)
    params, batch = make_params(config), make_batch()
    packed_KBTD = [plain_states(params, config, batch)]
    for _ in range(2):
        packed_KBTD.append(next_states(params, config, batch, packed_KBTD[-1]))
    for b, row in enumerate(LENGTHS):
        ends = np.cumsum(row)
        for start, end in zip(ends - row, ends, strict=True):
            alone = make_batch(lengths=((end - start,),), seq_len=end - start)
            alone.tokens = batch.tokens[b : b + 1, start:end]
            hidden_BTD = plain_states(params, config, alone)
            np.testing.assert_allclose(packed_KBTD[0][b, start:end], hidden_BTD[0], atol=1e-12)
            for packed_BTD in packed_KBTD[1:]:
                hidden_BTD = next_states(params, config, alone, hidden_BTD)
                np.testing.assert_allclose(packed_BTD[b, start:end], hidden_BTD[0], atol=1e-12)


@pytest.mark.parametrize('fusion', FUSED)
def test_k_passes_equal_the_recurrence_on_the_first_k_positions(fusion: str) -> None:
    config = make_config(fusion)
    params, batch = make_params(config), make_batch()
    exact_BTD = reference.sequential_states(params, config, batch.tokens, batch.positions, batch.segment_ids)
    hidden_BTD = plain_states(params, config, batch)
    for k in range(1, max(map(max, LENGTHS)) + 1):
        if k > 1:
            hidden_BTD = next_states(params, config, batch, hidden_BTD)
        error_BT = np.max(np.abs(hidden_BTD - exact_BTD), axis=-1)
        assert np.max(error_BT[(batch.segment_ids > 0) & (batch.positions < k)]) < 1e-9
        next_error = error_BT[(batch.segment_ids > 0) & (batch.positions == k)]
        assert np.all(next_error > 1e-6), 'the next position has not had its feedback yet'


def test_a_single_token_in_closed_form() -> None:
    """One key has probability 1, so attention is the gated value: no softmax, RoPE or query left."""
    config = make_config()
    params, batch = make_params(config), make_batch(lengths=((1,),), seq_len=1)

    def norm(x_D: Array, scale_D: Array) -> Array:
        return scale_D * x_D / np.sqrt(np.mean(x_D**2) + 1e-6)

    def sigmoid(x: Array) -> Array:
        return 1 / (1 + np.exp(-x))

    x_D = norm(params['embedding'][batch.tokens[0, 0]], params['input_norm'])
    for i in range(2):
        layer = {name: stacked[i] for name, stacked in params['layers'].items()}
        y_D = norm(x_D, layer['attention_norm'])
        value_NH = np.repeat((y_D @ layer['value']).reshape(2, 4), 2, axis=0)
        heads_NH = value_NH * sigmoid(y_D @ layer['head_gate'])[:, None]
        x_D = x_D + 2**-0.5 * norm(heads_NH.reshape(16) @ layer['output'], layer['attention_post_norm'])
        y_D = norm(x_D, layer['mlp_norm'])
        gate_F, up_F = y_D @ layer['mlp_gate'], y_D @ layer['mlp_up']
        x_D = x_D + 2**-0.5 * norm((gate_F * sigmoid(gate_F) * up_F) @ layer['mlp_down'], layer['mlp_post_norm'])
    expected_D = norm(x_D, params['final_norm'])
    np.testing.assert_allclose(plain_states(params, config, batch)[0, 0], expected_D, atol=1e-12)


def test_scores_are_divided_by_the_root_of_the_head_width() -> None:
    """Two orthogonal tokens, normed to length sqrt(H): scores 0 and sqrt(H), weights 1 : e^sqrt(H), gates 1/2."""
    config = make_config(num_kv_heads=1)
    config.num_heads = 1
    layer: dict[str, Array] = {name: np.eye(4) for name in ('query', 'key', 'value', 'output')}
    layer |= {'query_norm': np.ones(4), 'key_norm': np.ones(4), 'head_gate': np.zeros((4, 1))}
    y_BTD = np.eye(4)[None, :2]
    attended_BTD = reference.attention(layer, config, y_BTD, np.zeros((1, 2)), np.ones((1, 2)), 0)
    expected_D = np.array([1, np.exp(2), 0, 0]) / (1 + np.exp(2)) / 2
    np.testing.assert_allclose(attended_BTD[0, 1], expected_D, atol=1e-5)


def test_only_relative_positions_matter_to_the_stack() -> None:
    config = make_config()
    params, batch = make_params(config), make_batch(lengths=((8,),), seq_len=8)
    hidden_BTD = plain_states(params, config, batch)
    batch.positions = batch.positions + 100
    np.testing.assert_allclose(plain_states(params, config, batch), hidden_BTD, atol=1e-10)
    batch.positions = batch.positions * 2
    assert np.max(np.abs(plain_states(params, config, batch) - hidden_BTD)) > 1e-3


def test_gated_fusion_of_a_zero_state_is_zero_and_the_others_keep_the_token() -> None:
    for fusion in FUSED:
        config = make_config(fusion)
        params = make_params(config)
        embedded_BTD = params['embedding'][make_batch().tokens]
        fused_BTD = reference.fuse(params, fusion, embedded_BTD, np.zeros_like(embedded_BTD))
        assert np.any(fused_BTD != 0) == (fusion != 'gated')


def test_shared_kv_heads_equal_repeated_ones() -> None:
    """Query head n reads key/value head n // (N / M): repeating each of M heads N / M times changes nothing."""
    grouped, full = make_config(num_kv_heads=2), make_config(num_kv_heads=4)
    params, batch = make_params(grouped), make_batch()
    repeated = params | {'layers': dict(params['layers'])}
    for name in ('key', 'value'):
        heads = np.split(params['layers'][name], 2, axis=-1)
        repeated['layers'][name] = np.concatenate([heads[0], heads[0], heads[1], heads[1]], axis=-1)
    expected_BTD = plain_states(params, grouped, batch)
    np.testing.assert_allclose(plain_states(repeated, full, batch), expected_BTD, atol=1e-12)


def test_log_probs_normalise_over_the_real_vocabulary() -> None:
    config = make_config()
    params = make_params(config)
    hidden_BTD = np.random.default_rng(2).normal(size=(2, 3, 16)) * 10
    log_probs_BTV = reference.log_probs(params, config, hidden_BTD)
    np.testing.assert_allclose(np.sum(np.exp(log_probs_BTV[..., :VOCAB_SIZE]), axis=-1), 1, rtol=1e-12)
    assert np.all(log_probs_BTV[..., VOCAB_SIZE:] == -np.inf)
    params['embedding'][VOCAB_SIZE:] *= 1000
    np.testing.assert_array_equal(reference.log_probs(params, config, hidden_BTD), log_probs_BTV)


@pytest.mark.parametrize('num_passes', [1, 2, 3])
def test_loss_of_a_uniform_model(num_passes: int) -> None:
    """With E = 0 every NLL is log V and every log Z is log V, so the pass weights can be read off."""
    config = make_config()
    params, batch = make_params(config), make_batch()
    params['embedding'][:] = 0
    objective, nll_K, z_K = loss(params, config, batch, num_passes, loss_weight=0.7, z_loss=0.1)
    log_v = np.log(VOCAB_SIZE)
    np.testing.assert_allclose(nll_K, [log_v] * num_passes)
    np.testing.assert_allclose(z_K, [log_v**2] * num_passes)
    assert objective == pytest.approx((1.7 if num_passes > 1 else 1.0) * (log_v + 0.1 * log_v**2))


def test_loss_is_the_weighted_mean_and_passes_are_weighted() -> None:
    config = make_config()
    params, batch = make_params(config), make_batch()
    batch.targets[batch.weights == 0] = -(10**6)
    objective, nll_K, z_K = loss(params, config, batch, 3, loss_weight=0.5, z_loss=0.1)
    terms_K = nll_K + 0.1 * z_K
    assert objective == pytest.approx(terms_K[0] + 0.25 * terms_K[1] + 0.25 * terms_K[2])
    targets_BT1 = np.where(batch.weights > 0, batch.targets, 0)[..., None]
    hidden_BTD = plain_states(params, config, batch)
    for k in range(3):
        log_probs_BTV = reference.log_probs(params, config, hidden_BTD)
        nll_BT = -np.take_along_axis(log_probs_BTV, targets_BT1, axis=-1)[..., 0]
        assert nll_K[k] == pytest.approx(np.average(nll_BT, weights=batch.weights), rel=1e-12)
        hidden_BTD = next_states(params, config, batch, hidden_BTD)


def test_plain_masks_and_jitter_belong_to_their_pass() -> None:
    config = make_config()
    params, batch = make_params(config), make_batch()
    _, nll_K, _ = loss(params, config, batch, 3)
    assert len(set(nll_K)) == 3

    plain_KBT = np.broadcast_to(batch.positions == 0, (3, *batch.positions.shape)).copy()
    plain_KBT[:2] = True  # pass 2 is pass 1 again, so pass 3 is what pass 2 was
    _, repeated_K, _ = loss(params, config, batch, 3, plain_KBT=plain_KBT)
    np.testing.assert_array_equal(repeated_K, [nll_K[0], nll_K[0], nll_K[1]])

    for k, unchanged in enumerate(((0, 1, 2), (0,), (0, 1))):  # jitter of pass 1 is never read
        noise_KBTD = np.zeros((3, *params['embedding'][batch.tokens].shape))
        noise_KBTD[k] = np.random.default_rng(3).uniform(-0.02, 0.02, size=noise_KBTD.shape[1:])
        _, jittered_K, _ = loss(params, config, batch, 3, noise_KBTD=noise_KBTD)
        assert tuple(np.flatnonzero(jittered_K == nll_K)) == unchanged


def test_no_fusion_has_one_pass() -> None:
    config = make_config('none')
    params, batch = make_params(config), make_batch()
    assert 'fusion' not in params
    assert np.isfinite(loss(params, config, batch, 1)[0])
    with pytest.raises(ValueError, match='none'):
        loss(params, config, batch, 2)


def test_results_have_the_dtype_of_the_parameters() -> None:
    def cast(tree: dict[str, Any]) -> dict[str, Any]:
        return {k: cast(v) if isinstance(v, dict) else v.astype(np.float32) for k, v in tree.items()}

    config = make_config()
    params, batch = make_params(config), make_batch()
    narrow_BTD = next_states(cast(params), config, batch, plain_states(cast(params), config, batch))
    wide_BTD = next_states(params, config, batch, plain_states(params, config, batch))
    assert (narrow_BTD.dtype, wide_BTD.dtype) == (np.float32, np.float64)
    assert reference.log_probs(cast(params), config, narrow_BTD).dtype == np.float32
    np.testing.assert_allclose(narrow_BTD, wide_BTD, atol=1e-4)
