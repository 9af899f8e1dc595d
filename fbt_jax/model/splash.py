"""Attention by the Pallas TPU kernel that comes with jax (splash attention): causality and window as a mask known at
compile time, which lets it skip blocks; documents as segment ids.

Head widths 64, 96 and 128 compile for v5e as they are. The kernel's mask is cut over the mesh with the queries, so
that one kernel serves all shards of a row. Shapes: B rows, T query and S key positions, N query heads, M key/value
heads, H head width.
"""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention

from fbt_jax.errors import UserError

Kernel: TypeAlias = Any  # splash_attention's class, which is not public
LANES = 128  # the kernel's blocks are multiples of this many positions
BLOCKS = (512, 256, 128)
# The fused backward kernel keeps a part of dq for every block of keys, so that blocks grow with the row: no more than
# eight parts from 4096 to 16,384 keys. Not timed on a TPU.
KEY_BLOCKS_BACKWARD = (2048, 1024, *BLOCKS)


def check(q_BTNH: jax.Array, *, shards: int) -> None:
    """Raises UserError where the kernel can't take such queries, their length split over `shards` devices."""
    seq_len, dtype = q_BTNH.shape[1], q_BTNH.dtype
    if shards > 1 and seq_len % (shards * LANES):
        raise UserError(
            f"model.attention = 'splash': with mesh.context = {shards}, data.seq_len = {seq_len} must be divisible by "
            f'{shards} x {LANES}'
        )
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise UserError(f"model.attention = 'splash': model.dtype must be bfloat16 or float32, not {dtype.name}")


def make_kernel(
    queries: int,
    keys: int,
    *,
    num_heads: int,
    window: int,
    interpret: bool,
    head_shards: int = 1,
    length_shards: int = 1,
) -> Kernel:
    """The kernel for rows whose `queries` are the last of the `keys`, both padded to LANES. `window` 0: full."""
    shape = padded_length(queries), padded_length(keys)
    mask: Any
    if window:
        mask = splash_attention.LocalMask(shape, (window - 1, 0), keys - queries)
    else:
        mask = splash_attention.CausalMask(shape, keys - queries)
    block_q = next(n for n in BLOCKS if shape[0] // length_shards % n == 0)
    block = next(n for n in BLOCKS if shape[1] % n == 0)
    backward_keys = next(n for n in KEY_BLOCKS_BACKWARD if shape[1] % n == 0 and n <= max(BLOCKS[0], shape[1] // 8))
    return splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([mask] * num_heads),
        block_sizes=splash_attention.BlockSizes(
            block_q=block_q,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block_q,
            block_kv_dkv=backward_keys,
            block_kv_dkv_compute=min(block, backward_keys),
            use_fused_bwd_kernel=True,
        ),
        head_shards=head_shards,
        q_seq_shards=length_shards,
        interpret=interpret,
    )


def padded_length(seq_len: int) -> int:
    return -(-seq_len // LANES) * LANES


def attend(
    kernel: Kernel,
    q_BTNH: jax.Array,
    k_BSMH: jax.Array,
    v_BSMH: jax.Array,
    segment_ids_BT: jax.Array,
    segment_ids_BS: jax.Array,
) -> jax.Array:
    """(B, T, N, H) in the dtype of q. Positions are padded at the end, where causality hides them."""

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, padded_length(x.shape[1]) - x.shape[1]), *((0, 0),) * (x.ndim - 2)))

    def one_row(q_TNH: jax.Array, k_SMH: jax.Array, v_SMH: jax.Array, ids_T: jax.Array, ids_S: jax.Array) -> jax.Array:
        heads_first = (x.swapaxes(0, 1) for x in (q_TNH, k_SMH, v_SMH))
        return kernel(*heads_first, segment_ids=splash_attention.SegmentIds(ids_T, ids_S)).swapaxes(0, 1)

    scaled_BTNH = q_BTNH * q_BTNH.shape[-1] ** -0.5
    arrays = (scaled_BTNH, k_BSMH, v_BSMH, segment_ids_BT.astype(jnp.int32), segment_ids_BS.astype(jnp.int32))
    return jax.vmap(one_row)(*map(padded, arrays))[:, : q_BTNH.shape[1]]
