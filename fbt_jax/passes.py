"""Multi-pass evaluation of the feedback recurrence: the one place where a pass is defined (method.md section 3).

    pass 1:  u^1_t = e_t
    pass k:  u^k_t = fuse(e_t, h^{k-1}_{t-1}),  plain at t <= p of each document;   h^k = stack(n(u^k))

One `lax.scan` over the passes, whose body serves pass 1 too (there every position is plain). What a pass yields
(losses, update norms) is computed inside it, so nothing of shape (K, B, T, ...) is kept except what the gradient
needs. Shapes: K passes, B rows, T positions, D width. Training, evaluation and diagnosis call `multi_pass`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fbt_jax.batch import Batch
from fbt_jax.model.transformer import compute_dtype
from fbt_jax.sharding import constrain

# Purposes of random keys: every key is fold_in of (seed, step, purpose, pass, row), so nothing random is ever stored
# and neither accumulation nor the mesh changes what a row draws.
PURPOSE_PASS_COUNT, PURPOSE_PREFIX, PURPOSE_JITTER, PURPOSE_INIT = range(4)


class Noise(NamedTuple):
    """What training adds to passes k >= 2; evaluation passes None instead."""

    key: jax.Array  # of (seed, step), see `step_key`
    rows_B: jax.Array  # int32, each row's index in the global batch
    prefix_mixin: bool
    jitter: float  # half-width of the uniform distribution


class MultiPass(NamedTuple):
    """`yields` has a leading axis K; `hidden_BTD` is the last pass's state."""

    hidden_BTD: jax.Array
    yields: Any


def step_key(seed: int, step: jax.Array) -> jax.Array:
    """The key that everything random in an optimizer step derives from. `step` is 0-based."""
    return jax.random.fold_in(jax.random.key(seed), step)


def shift(hidden_BTD: jax.Array) -> jax.Array:
    """prev[:, t] = hidden[:, t-1], zeros at t = 0."""
    return jnp.pad(hidden_BTD[:, :-1], ((0, 0), (1, 0), (0, 0)))


def prefix_mask(key: jax.Array, batch: Batch, rows_B: jax.Array) -> jax.Array:
    """(B, T) bool: the positions t <= p of each document's piece, p uniform on 1..n, n its length."""
    seq_len = batch.tokens.shape[1]

    def one_row(row: jax.Array, segment_ids_T: jax.Array, positions_T: jax.Array) -> jax.Array:
        length_S = jnp.zeros(seq_len + 1, jnp.int32).at[segment_ids_T].add(1)
        p_S = 1 + jax.random.randint(jax.random.fold_in(key, row), (seq_len + 1,), 0, jnp.maximum(length_S, 1))
        return positions_T < p_S[segment_ids_T]

    return jax.vmap(one_row)(rows_B, batch.segment_ids, batch.positions)


def plain_positions(batch: Batch, k: jax.Array | int, noise: Noise | None = None) -> jax.Array:
    """(B, T) bool: where pass k takes the embedding alone: everywhere in pass 1, then a prefix of each document."""
    if noise is not None and noise.prefix_mixin:
        plain_BT = prefix_mask(_pass_key(noise, PURPOSE_PREFIX, k), batch, noise.rows_B)
    else:
        plain_BT = batch.positions == 0
    return plain_BT | (k == 1)


def jittered(key: jax.Array, prev_BTD: jax.Array, rows_B: jax.Array, *, half_width: float) -> jax.Array:
    """prev + eps, eps ~ Uniform[-half_width, half_width] per element."""
    noise_BTD = jax.vmap(
        lambda row: jax.random.uniform(
            jax.random.fold_in(key, row), prev_BTD.shape[1:], minval=-half_width, maxval=half_width
        )
    )(rows_B)
    return prev_BTD + noise_BTD.astype(prev_BTD.dtype)


def multi_pass(
    model: Any,
    params: Any,
    batch: Batch,
    *,
    num_passes: int,
    per_pass: Callable[[jax.Array, jax.Array], Any],
    noise: Noise | None = None,
) -> MultiPass:
    """Iterates the feedback map for `num_passes` passes over the whole rows; gradients run through all of them.

    With `noise` None and p the document's first token, the first k positions of each document after k passes are
    exactly those of the sequential recurrence.

    Args:
      model: the `Transformer`; `params` its parameters.
      batch: tokens, positions and segment ids of (B, T); see `batch.py`.
      num_passes: K >= 1. K = 1 is the ordinary forward pass: the fusion isn't computed.
      per_pass: (h^k, h^{k-1}), both (B, T, D) and unshifted (h^0 = 0) -> what to keep of the pass, a pytree.
      noise: prefix mixin and jitter, in training.

    Returns:
      The last states, and what `per_pass` gave, stacked over passes.
    """
    shape = (*batch.tokens.shape, model.config.width)

    def one_pass(last_BTD: jax.Array, k: jax.Array) -> tuple[jax.Array, Any]:
        prev_BTD, plain_BT = None, None
        if num_passes > 1:
            prev_BTD, plain_BT = shift(last_BTD), plain_positions(batch, k, noise)
            if noise is not None and noise.jitter > 0:
                key = _pass_key(noise, PURPOSE_JITTER, k)
                prev_BTD = jittered(key, prev_BTD, noise.rows_B, half_width=noise.jitter)
        hidden_BTD = _apply(model, params, batch, prev_BTD, plain_BT)
        return hidden_BTD, per_pass(hidden_BTD, last_BTD)

    if model.config.remat == 'per_pass':
        one_pass = jax.checkpoint(one_pass, prevent_cse=False)
    before_BTD = constrain(jnp.zeros(shape, compute_dtype(model.config)), 'batch', 'length', 'state')
    return MultiPass(*jax.lax.scan(one_pass, before_BTD, jnp.arange(1, num_passes + 1)))


def prefill(model: Any, params: Any, batch: Batch, *, num_passes: int, cache: Any) -> tuple[jax.Array, Any]:
    """The last of `num_passes` passes over prompts, with a cache filled by it from position 0 on (method.md section 5).

    batch: prompts padded at their ends (segment 0); targets and weights aren't read. Returns (B, T, D) states, cache.
    """
    prev_BTD, plain_BT = None, None
    if num_passes > 1:
        earlier = multi_pass(model, params, batch, num_passes=num_passes - 1, per_pass=lambda *_: None)
        prev_BTD, plain_BT = shift(earlier.hidden_BTD), plain_positions(batch, num_passes)
    return _apply(model, params, batch, prev_BTD, plain_BT, cache=cache)


def _apply(model: Any, params: Any, batch: Batch, prev_BTD: Any, plain_BT: Any, **more: Any) -> Any:
    return model.apply(
        {'params': params},
        batch.tokens,
        prev_BTD,
        plain_BT=plain_BT,
        positions_BT=batch.positions,
        segment_ids_BT=batch.segment_ids,
        **more,
    )


def _pass_key(noise: Noise, purpose: int, k: jax.Array | int) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(noise.key, purpose), k)
