"""Causal self-attention over packed rows, with sliding windows and grouped queries (method.md section 6).

    attn: q, k = rope(n_q(W_q y)), rope(n_k(W_k y)) per head; softmax(q k / sqrt(H)) v; each head times sigmoid(W_g
    y)_head

Shapes: B rows, T query and S key positions (S = T), N query heads, M key/value heads (N/M queries share one), H head
width. A window of w lets position t see keys t-w+1..t, itself included, within its own segment.
"""

import jax
import jax.numpy as jnp


def rope(x_BTNH: jax.Array, positions_BT: jax.Array, *, theta: float) -> jax.Array:
    """Rotates each pair (i, i + H/2) by positions * theta^(-2i/H) radians, in float32 at least; keeps x's dtype."""
    half = x_BTNH.shape[-1] // 2
    dtype = jnp.promote_types(x_BTNH.dtype, jnp.float32)
    frequency_h = theta ** (-jnp.arange(half, dtype=dtype) / half)
    angle_BT1h = positions_BT[:, :, None, None].astype(dtype) * frequency_h
    cos, sin = jnp.cos(angle_BT1h), jnp.sin(angle_BT1h)
    first, second = jnp.split(x_BTNH.astype(dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTNH.dtype)


def causal_mask(segment_ids_BT: jax.Array) -> jax.Array:
    """(B, T, S) bool: key s is not after query t and belongs to the same segment."""
    index_T = jnp.arange(segment_ids_BT.shape[1])
    same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    return same_BTS & (index_T[:, None] >= index_T[None, :])


def attention(
    q_BTNH: jax.Array, k_BSMH: jax.Array, v_BSMH: jax.Array, *, causal_BTS: jax.Array, window: jax.Array
) -> jax.Array:
    """softmax(q k / sqrt(H)) v within the mask and the window.

    Args:
      q_BTNH, k_BSMH, v_BSMH: queries, keys, values; one dtype. Query head n reads key head n // (N/M).
      causal_BTS: True where the key may be seen at all, see `causal_mask`.
      window: int32 scalar, the number of keys seen, itself included. A traced value, so that one scan over layers holds
        windowed and full layers.

    Returns:
      (B, T, N, H) in the dtype of q; the softmax is computed in promote_types(dtype, float32).
    """
    batch, seq_len, num_heads, width = q_BTNH.shape
    grouped_BTMGH = q_BTNH.reshape(batch, seq_len, k_BSMH.shape[2], -1, width)
    index_T = jnp.arange(seq_len)
    seen_BTS = causal_BTS & (index_T[:, None] - index_T[None, :] < window)
    # Not jax.nn.dot_product_attention: its softmax is float32 for float64 inputs too (jax 0.10 and 0.12).
    dtype = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    scores_BMGTS = jnp.einsum('btmgh,bsmh->bmgts', grouped_BTMGH, k_BSMH, preferred_element_type=dtype) * width**-0.5
    scores_BMGTS = jnp.where(seen_BTS[:, None, None], scores_BMGTS, jnp.finfo(dtype).min)
    weights_BMGTS = jax.nn.softmax(scores_BMGTS, axis=-1).astype(v_BSMH.dtype)
    return jnp.einsum('bmgts,bsmh->btmgh', weights_BMGTS, v_BSMH).reshape(batch, seq_len, num_heads, width)
