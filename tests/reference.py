"""The model and the multi-pass loss in plain numpy, from method.md's equations alone: what the package is checked with.

Loops over heads and positions keep each equation in sight; nothing here is fast. States and log-probabilities have
the dtype of the parameters (float64 in tests). Weights are (in, out): y = x @ W. No function changes its arguments.
Shapes: B batch, T positions, D width, L layers, N query heads, M key/value heads, H head width, F MLP width,
V padded vocabulary, K passes.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fbt_jax.batch import Batch
    from fbt_jax.config_model import ModelConfig

Array = np.ndarray
Params = dict[str, Any]


def sigmoid(x: Array) -> Array:
    return (1 + np.tanh(x / 2)) / 2


def rms_norm(x: Array, scale: Array, epsilon: float = 1e-6) -> Array:
    """g * x / sqrt(mean(x^2) + epsilon) over the last axis, in at least float32."""
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    return (scale * wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


def rope(x_BTH: Array, positions_BT: Array, theta: float, scaling: tuple[float, ...] = ()) -> Array:
    """Turns each plane (i, i + H/2) by the angle position * theta^(-2i / H), or that divided by scaling's factor."""
    half = x_BTH.shape[-1] // 2
    turned_BTH = np.empty_like(x_BTH)
    for i in range(half):
        angle_BT = positions_BT * theta ** (-2 * i / x_BTH.shape[-1]) / (scaling[0] if scaling else 1)
        cos_BT, sin_BT = np.cos(angle_BT).astype(x_BTH.dtype), np.sin(angle_BT).astype(x_BTH.dtype)
        turned_BTH[..., i] = cos_BT * x_BTH[..., i] - sin_BT * x_BTH[..., i + half]
        turned_BTH[..., i + half] = sin_BT * x_BTH[..., i] + cos_BT * x_BTH[..., i + half]
    return turned_BTH


def visible_keys(t: int, segment_ids_T: Array, window: int) -> list[int]:
    """The positions that t attends to: its own document's, up to itself, the last `window` of them (0 = all)."""
    return [s for s in range(t + 1) if segment_ids_T[s] == segment_ids_T[t] and (window == 0 or s >= t - window + 1)]


def linear(layer: Params, name: str, x: Array) -> Array:
    return x @ layer[name] + layer.get(f'{name}_bias', 0)


def attention(
    layer: Params, model_config: 'ModelConfig', y_BTD: Array, positions_BT: Array, segment_ids_BT: Array, window: int
) -> Array:
    c = model_config
    num_heads, width = c.num_heads, c.head_dim
    group = num_heads // c.num_kv_heads
    q_BTn, k_BTm, v_BTm = (linear(layer, name, y_BTD) for name in ('query', 'key', 'value'))
    heads = []
    for n in range(num_heads):
        m = n // group
        query_columns, key_columns = slice(n * width, (n + 1) * width), slice(m * width, (m + 1) * width)
        q_BTH, k_BTH, v_BTH = q_BTn[..., query_columns], k_BTm[..., key_columns], v_BTm[..., key_columns]
        if c.qk_norm:
            q_BTH = rms_norm(q_BTH, layer['query_norm'], c.norm_epsilon)
            k_BTH = rms_norm(k_BTH, layer['key_norm'], c.norm_epsilon)
        q_BTH, k_BTH = (rope(x, positions_BT, c.rope_theta, c.rope_scaling) for x in (q_BTH, k_BTH))
        head_BTH = np.empty_like(v_BTH)
        for b, t in np.ndindex(positions_BT.shape):
            keys = visible_keys(t, segment_ids_BT[b], window)
            scores = k_BTH[b, keys] @ q_BTH[b, t] / math.sqrt(width)
            probabilities = np.exp(scores - np.max(scores))
            probabilities /= np.sum(probabilities)
            head_BTH[b, t] = probabilities @ v_BTH[b, keys]
        heads.append(head_BTH * sigmoid(y_BTD @ layer['head_gate'][:, n : n + 1]) if c.head_gate else head_BTH)
    return linear(layer, 'output', np.concatenate(heads, axis=-1))


def mlp(layer: Params, y_BTD: Array) -> Array:
    gate_BTF = linear(layer, 'mlp_gate', y_BTD)
    return linear(layer, 'mlp_down', gate_BTF * sigmoid(gate_BTF) * linear(layer, 'mlp_up', y_BTD))


def fuse(params: Params, fusion: str, token_BTD: Array, prev_BTD: Array) -> Array:
    """Equation 4 and its ablations, of normed embeddings, before the norm of the stack's input."""
    if fusion == 'gated':
        return (prev_BTD @ params['fusion']['state']) * sigmoid(token_BTD @ params['fusion']['gate'])
    if fusion == 'add':
        return token_BTD + prev_BTD @ params['fusion']['state']
    if fusion == 'concat':
        return np.concatenate([token_BTD, prev_BTD], axis=-1) @ params['fusion']['joint']
    raise ValueError(f'fusion = {fusion!r} fuses nothing: every position must be plain')


def states(
    params: Params,
    model_config: 'ModelConfig',
    tokens_BT: Array,
    prev_BTD: Array,
    plain_BT: Array,
    positions_BT: Array,
    segment_ids_BT: Array,
    depths: list[Array] | None = None,
) -> Array:
    """One pass: hidden_BTD after the final norm. `depths` takes up the stack's input and what each layer gives.

    `prev_BTD` are the previous pass's states, shifted by one (and jittered); they are read where `plain_BT` is False.
    """
    c = model_config

    def input_norm(x: Array) -> Array:
        return rms_norm(x, params['input_norm'], c.norm_epsilon)

    embedded_BTD = params['embedding'][tokens_BT]
    x_BTD = input_norm(embedded_BTD) if c.input_norm == 'all' else embedded_BTD
    if not np.all(plain_BT):
        fused_BTD = fuse(params, c.fusion, input_norm(embedded_BTD), prev_BTD)
        x_BTD = np.where(plain_BT[..., None], x_BTD, input_norm(fused_BTD))
    branch_scale = 1 / math.sqrt(c.num_layers) if c.depth_scaling else 1

    def add(x_BTD: Array, branch_BTD: Array, layer: Params, norm: str) -> Array:
        return x_BTD + branch_scale * (
            rms_norm(branch_BTD, layer[norm], c.norm_epsilon) if c.post_norms else branch_BTD
        )

    depths = [] if depths is None else depths
    depths.append(x_BTD)
    for i in range(c.num_layers):
        layer = {name: stacked[i] for name, stacked in params['layers'].items()}
        y_BTD = rms_norm(x_BTD, layer['attention_norm'], c.norm_epsilon)
        y_BTD = attention(layer, c, y_BTD, positions_BT, segment_ids_BT, c.layer_windows[i])
        x_BTD = add(x_BTD, y_BTD, layer, 'attention_post_norm')
        y_BTD = mlp(layer, rms_norm(x_BTD, layer['mlp_norm'], c.norm_epsilon))
        x_BTD = add(x_BTD, y_BTD, layer, 'mlp_post_norm')
        depths.append(x_BTD)
    return rms_norm(x_BTD, params['final_norm'], c.norm_epsilon)


def _log_probs_and_log_z(params: Params, model_config: 'ModelConfig', hidden: Array) -> tuple[Array, Array]:
    assert model_config.vocab_size is not None
    logits = hidden @ (params['embedding'] if model_config.tied_embedding else params['head']).T
    logits[..., model_config.vocab_size :] = -np.inf
    top = np.max(logits, axis=-1, keepdims=True)
    log_z = top + np.log(np.sum(np.exp(logits - top), axis=-1, keepdims=True))
    return logits - log_z, log_z[..., 0]


def log_probs(params: Params, model_config: 'ModelConfig', hidden: Array) -> Array:
    """(..., D) to (..., V): log-softmax over the real vocabulary; -inf in the padded columns."""
    return _log_probs_and_log_z(params, model_config, hidden)[0]


def shift(hidden_BTD: Array) -> Array:
    """The state of t - 1 at t; zeros at t = 0."""
    return np.concatenate([np.zeros_like(hidden_BTD[:, :1]), hidden_BTD[:, :-1]], axis=1)


def multi_pass_loss(
    params: Params,
    model_config: 'ModelConfig',
    batch: 'Batch',
    *,
    num_passes: int,
    plain_KBT: Array,
    noise_KBTD: Array,
    loss_weight: float,
    z_loss: float,
) -> tuple[float, Array, Array]:
    """(objective, NLL of each pass, mean (log Z)^2 of each pass), both means over the batch weighted by its weights.

    `plain_KBT[k - 1]` and `noise_KBTD[k - 1]` belong to pass k; pass 1 and all document starts must be plain.
    """
    assert np.all(plain_KBT[0]), 'pass 1 is plain everywhere'
    starts_BT = (batch.positions == 0) & (batch.segment_ids != 0)
    assert np.all(plain_KBT[:num_passes, starts_BT]), 'document starts are plain in every pass'
    prev_BTD = np.zeros_like(params['embedding'][batch.tokens])
    nll_K, z_K = [], []
    for k in range(num_passes):
        hidden_BTD = states(
            params, model_config, batch.tokens, prev_BTD, plain_KBT[k], batch.positions, batch.segment_ids
        )
        log_probs_BTV, log_z_BT = _log_probs_and_log_z(params, model_config, hidden_BTD)
        nll, z, total = 0.0, 0.0, 0.0
        for b, t in np.ndindex(batch.tokens.shape):
            weight = batch.weights[b, t]
            if weight > 0:  # elsewhere the target may be any value
                nll += weight * -log_probs_BTV[b, t, batch.targets[b, t]]
                z += weight * log_z_BT[b, t] ** 2
                total += weight
        nll_K.append(nll / total)
        z_K.append(z / total)
        if k + 1 < num_passes:
            prev_BTD = shift(hidden_BTD) + noise_KBTD[k + 1]
    pass_weights_K = [1.0] + [loss_weight / max(num_passes - 1, 1)] * (num_passes - 1)
    objective = sum(w * (nll + z_loss * z) for w, nll, z in zip(pass_weights_K, nll_K, z_K, strict=True))
    return float(objective), np.array(nll_K), np.array(z_K)


def sequential_states(
    params: Params, model_config: 'ModelConfig', tokens_BT: Array, positions_BT: Array, segment_ids_BT: Array
) -> Array:
    """The exact recurrence u_t = fuse(e_t, h_{t-1}), plain at document starts: the prefix grows token by token."""
    zeros_B1D = np.zeros_like(params['embedding'][tokens_BT[:, :1]])
    hidden_BTD = zeros_B1D[:, :0]
    for t in range(tokens_BT.shape[1]):
        prev_BTD = np.concatenate([zeros_B1D, hidden_BTD], axis=1)
        tokens, positions, segment_ids = (a[:, : t + 1] for a in (tokens_BT, positions_BT, segment_ids_BT))
        prefix_BTD = states(params, model_config, tokens, prev_BTD, positions == 0, positions, segment_ids)
        hidden_BTD = np.concatenate([hidden_BTD, prefix_BTD[:, -1:]], axis=1)
    return hidden_BTD
