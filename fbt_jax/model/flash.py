"""Attention whose memory is linear in the row, forward and backward, in plain JAX: it runs on every platform.

For each block of queries a loop goes over the blocks of keys that any of them sees (causality, window and documents
give its bounds, at run time) with the running maximum and sum of the softmax (Dao et al., FlashAttention, 2022). The
backward pass recomputes the weights from the saved log-sum-exp.

Shapes: B rows, T query and S key positions, M key/value heads, G queries per key head, H head width; I blocks of Q
queries, J blocks of K keys, R = Q * G scores' rows per block, query by query.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

# On CPU a block's scores should stay in the cache: 2 MiB of float32 was fastest or close to it for B*N = 8..64.
CPU_SCORES, CPU_BLOCKS = 2**19, (64, 128, 256)
OTHER_BLOCK = 512  # elsewhere few large steps: each of them starts a handful of kernels


class Blocks(NamedTuple):
    """Arguments cut into blocks, the loop's axis first."""

    q_IBMRH: jax.Array
    k_JBMKH: jax.Array
    v_JBMKH: jax.Array
    first_IBQ: jax.Array


def seen(first_BT: jax.Array, query_T: jax.Array, key_S: jax.Array) -> jax.Array:
    """(B, T, S) bool: the key's position lies in the query's interval, from `first_BT` to itself."""
    return (first_BT[:, :, None] <= key_S) & (key_S <= query_T[:, None])


@jax.custom_vjp
def attend(
    q_BTNH: jax.Array, k_BSMH: jax.Array, v_BSMH: jax.Array, first_BT: jax.Array, offset: jax.Array
) -> jax.Array:
    """Attention of the queries at offset..offset+T-1 to the keys first..their own: (B, T, N, H) in the dtype of q."""
    return _attend_forward(q_BTNH, k_BSMH, v_BSMH, first_BT, offset)[0]


def _attend_forward(*args: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out_BTNH, lse_BTN = _by_platform(_forward, *args)
    return out_BTNH, (*args, out_BTNH, lse_BTN)


def _attend_backward(saved: tuple[jax.Array, ...], dout_BTNH: jax.Array) -> tuple[jax.Array | None, ...]:
    return *_by_platform(_backward, *saved, dout_BTNH), None, None


attend.defvjp(_attend_forward, _attend_backward)


def _by_platform(function: Callable[..., tuple[jax.Array, ...]], *args: jax.Array) -> tuple[jax.Array, ...]:
    """`function` with the block lengths of the platform that the program is lowered for."""
    q_BTNH, k_BSMH = args[:2]
    batch, queries, heads, _ = q_BTNH.shape
    cpu = max([n for n in CPU_BLOCKS if batch * heads * n * n <= CPU_SCORES], default=CPU_BLOCKS[0])
    lengths = [tuple(block_length(n, limit) for n in (queries, k_BSMH.shape[1])) for limit in (cpu, OTHER_BLOCK)]
    if lengths[0] == lengths[1]:
        return function(*args, lengths=lengths[0])
    return jax.lax.platform_dependent(
        *args, cpu=partial(function, lengths=lengths[0]), default=partial(function, lengths=lengths[1])
    )


def block_length(length: int, limit: int) -> int:
    """Of the fewest blocks of at most `limit` that cover `length` evenly, in whole vectors of 8."""
    blocks = -(-length // limit)
    return min(length, -(-length // (8 * blocks)) * 8)


def _forward(
    q_BTNH: jax.Array,
    k_BSMH: jax.Array,
    v_BSMH: jax.Array,
    first_BT: jax.Array,
    offset: jax.Array,
    *,
    lengths: tuple[int, int],
) -> tuple[jax.Array, jax.Array]:
    """The result and the log-sum-exp of the scores, (B, T, N) in the softmax's dtype."""
    blocks = _cut(q_BTNH, k_BSMH, v_BSMH, first_BT, lengths)
    dtype, width = jnp.promote_types(q_BTNH.dtype, jnp.float32), q_BTNH.shape[-1]
    rows = blocks.q_IBMRH.shape[1:-1]

    def query_block(carry: None, i: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        q_BMRH = blocks.q_IBMRH[i]

        def key_block(
            j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            max_BMR, sum_BMR, out_BMRH = carry
            scores_BMRK = _scores(blocks, q_BMRH, offset, i, j)
            new_BMR = jnp.maximum(max_BMR, scores_BMRK.max(axis=-1))
            weights_BMRK = jnp.exp(scores_BMRK - new_BMR[..., None])
            shrink_BMR = jnp.exp(max_BMR - new_BMR)
            part_BMRH = jnp.einsum(
                'bmrk,bmkh->bmrh', weights_BMRK.astype(v_BSMH.dtype), blocks.v_JBMKH[j], preferred_element_type=dtype
            )
            sum_BMR = sum_BMR * shrink_BMR + weights_BMRK.sum(axis=-1)
            return new_BMR, sum_BMR, out_BMRH * shrink_BMR[..., None] + part_BMRH

        # What a row wholly masked in its first blocks adds there is multiplied by exp(min - max) = 0 later on.
        start = jnp.full(rows, jnp.finfo(dtype).min, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, width), dtype)
        max_BMR, sum_BMR, out_BMRH = jax.lax.fori_loop(*_bounds(blocks, offset, i), key_block, start)
        return None, ((out_BMRH / sum_BMR[..., None]).astype(q_BTNH.dtype), max_BMR + jnp.log(sum_BMR))

    _, (out_IBMRH, lse_IBMR) = jax.lax.scan(query_block, None, jnp.arange(blocks.q_IBMRH.shape[0], dtype=jnp.int32))
    return _join_queries(out_IBMRH, q_BTNH.shape), _join_queries(lse_IBMR[..., None], (*q_BTNH.shape[:3], 1))[..., 0]


def _backward(
    q_BTNH: jax.Array,
    k_BSMH: jax.Array,
    v_BSMH: jax.Array,
    first_BT: jax.Array,
    offset: jax.Array,
    out_BTNH: jax.Array,
    lse_BTN: jax.Array,
    dout_BTNH: jax.Array,
    *,
    lengths: tuple[int, int],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v: with weights p = exp(scores - lse), d scores = p (dout v - sum(dout out))."""
    blocks = _cut(q_BTNH, k_BSMH, v_BSMH, first_BT, lengths)
    dtype, scale, kv_heads = lse_BTN.dtype, q_BTNH.shape[-1] ** -0.5, k_BSMH.shape[2]
    cut = partial(_cut_queries, length=lengths[0], kv_heads=kv_heads)
    inner_BTN = jnp.sum(dout_BTNH.astype(dtype) * out_BTNH.astype(dtype), axis=-1)
    dout_IBMRH, lse_IBMR1, inner_IBMR1 = cut(dout_BTNH), cut(lse_BTN[..., None]), cut(inner_BTN[..., None])
    product = partial(jnp.einsum, preferred_element_type=dtype)

    def query_block(carry: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        q_BMRH, dout_BMRH = blocks.q_IBMRH[i], dout_IBMRH[i]

        def key_block(
            j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            dq_BMRH, dk_JBMKH, dv_JBMKH = carry
            weights_BMRK = jnp.exp(_scores(blocks, q_BMRH, offset, i, j) - lse_IBMR1[i])
            dweights_BMRK = product('bmrh,bmkh->bmrk', dout_BMRH, blocks.v_JBMKH[j])
            dscores_BMRK = (weights_BMRK * (dweights_BMRK - inner_IBMR1[i])).astype(q_BTNH.dtype)
            dq_BMRH += product('bmrk,bmkh->bmrh', dscores_BMRK, blocks.k_JBMKH[j])
            dk_BMKH = product('bmrk,bmrh->bmkh', dscores_BMRK, q_BMRH)
            dv_BMKH = product('bmrk,bmrh->bmkh', weights_BMRK.astype(q_BTNH.dtype), dout_BMRH)
            return dq_BMRH, dk_JBMKH.at[j].add(dk_BMKH), dv_JBMKH.at[j].add(dv_BMKH)

        start = jnp.zeros(q_BMRH.shape, dtype), *carry
        dq_BMRH, dk_JBMKH, dv_JBMKH = jax.lax.fori_loop(*_bounds(blocks, offset, i), key_block, start)
        return (dk_JBMKH, dv_JBMKH), (dq_BMRH * scale).astype(q_BTNH.dtype)

    zeros = jnp.zeros(blocks.k_JBMKH.shape, dtype), jnp.zeros(blocks.v_JBMKH.shape, dtype)
    (dk_JBMKH, dv_JBMKH), dq_IBMRH = jax.lax.scan(
        query_block, zeros, jnp.arange(blocks.q_IBMRH.shape[0], dtype=jnp.int32)
    )
    return (
        _join_queries(dq_IBMRH, q_BTNH.shape),
        _join_keys(dk_JBMKH * scale, k_BSMH),
        _join_keys(dv_JBMKH, v_BSMH),
    )


def _bounds(blocks: Blocks, offset: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The blocks of keys, from and up to, that some query of block i sees in some row."""
    queries, keys = blocks.first_IBQ.shape[2], blocks.k_JBMKH.shape[3]
    last = (offset + (i + 1) * queries - 1) // keys
    return jnp.min(blocks.first_IBQ[i]) // keys, jnp.minimum(last + 1, blocks.k_JBMKH.shape[0])


def _scores(blocks: Blocks, q_BMRH: jax.Array, offset: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """(B, M, R, K), scaled and masked."""
    dtype = jnp.promote_types(q_BMRH.dtype, jnp.float32)
    queries, keys = blocks.first_IBQ.shape[2], blocks.k_JBMKH.shape[3]
    seen_BQK = seen(blocks.first_IBQ[i], offset + i * queries + jnp.arange(queries), j * keys + jnp.arange(keys))
    seen_BRK = jnp.repeat(seen_BQK, q_BMRH.shape[2] // queries, axis=1)
    scores_BMRK = jnp.einsum('bmrh,bmkh->bmrk', q_BMRH, blocks.k_JBMKH[j], preferred_element_type=dtype)
    return jnp.where(seen_BRK[:, None], scores_BMRK * q_BMRH.shape[-1] ** -0.5, jnp.finfo(dtype).min)


# Between rows and blocks. Padding at the end: keys that no query sees, queries whose results are dropped.


def _cut(
    q_BTNH: jax.Array, k_BSMH: jax.Array, v_BSMH: jax.Array, first_BT: jax.Array, lengths: tuple[int, int]
) -> Blocks:
    queries, keys = lengths
    batch, seq_len, kv_heads, _ = k_BSMH.shape
    # Queries that only pad begin at the last key: they must not widen the loop over keys.
    first_BT = jnp.pad(first_BT, ((0, 0), (0, -first_BT.shape[1] % queries)), constant_values=seq_len - 1)
    return Blocks(
        _cut_queries(q_BTNH, length=queries, kv_heads=kv_heads),
        _cut_keys(k_BSMH, length=keys),
        _cut_keys(v_BSMH, length=keys),
        first_BT.reshape(batch, -1, queries).transpose(1, 0, 2),
    )


def _padded(x_BTNH: jax.Array, length: int) -> jax.Array:
    return jnp.pad(x_BTNH, ((0, 0), (0, -x_BTNH.shape[1] % length), (0, 0), (0, 0)))


def _cut_queries(x_BTNH: jax.Array, *, length: int, kv_heads: int) -> jax.Array:
    """(I, B, M, R, H)."""
    batch, _, heads, width = x_BTNH.shape
    x_BIQMGH = _padded(x_BTNH, length).reshape(batch, -1, length, kv_heads, heads // kv_heads, width)
    return x_BIQMGH.transpose(1, 0, 3, 2, 4, 5).reshape(-1, batch, kv_heads, length * heads // kv_heads, width)


def _cut_keys(x_BSMH: jax.Array, *, length: int) -> jax.Array:
    """(J, B, M, K, H)."""
    x_BJKMH = _padded(x_BSMH, length).reshape(x_BSMH.shape[0], -1, length, *x_BSMH.shape[2:])
    return x_BJKMH.transpose(1, 0, 3, 2, 4)


def _join_queries(x_IBMRH: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_cut_queries`, of this shape (B, T, N, H)."""
    blocks, batch, kv_heads, _, width = x_IBMRH.shape
    x_IBMQGH = x_IBMRH.reshape(blocks, batch, kv_heads, -1, shape[2] // kv_heads, width)
    return x_IBMQGH.transpose(1, 0, 3, 2, 4, 5).reshape(batch, -1, *shape[2:])[:, : shape[1]]


def _join_keys(x_JBMKH: jax.Array, like_BSMH: jax.Array) -> jax.Array:
    x_BJKMH = x_JBMKH.transpose(1, 0, 3, 2, 4)
    batch, _, _, *heads = x_BJKMH.shape
    return x_BJKMH.reshape(batch, -1, *heads)[:, : like_BSMH.shape[1]].astype(like_BSMH.dtype)
