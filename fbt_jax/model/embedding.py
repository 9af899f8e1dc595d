"""Embedding lookup in a table that is split both ways, (V over `tensor`, D over `fsdp` and `context`).

XLA's partitioner would gather the whole table on every device. Instead the token ids, which are few bytes, are
gathered over the devices that split D; each looks up its slice of the width for all of them (rows of other `tensor`
shards give 0, summed over `tensor`), and one all-to-all gives every device the full width of its own tokens: the
bytes of the activations, not of the table. The transpose is the same way back, and the table's gradient never leaves
its shard.
"""

import jax
import jax.numpy as jnp

from fbt_jax.sharding import RULES, current_mesh, mesh_axes


def look_up(table_VD: jax.Array, tokens_BT: jax.Array, *, dtype: jnp.dtype) -> jax.Array:
    """table[tokens] in `dtype`, (B, T, D)."""
    if current_mesh() is None:
        return table_VD[tokens_BT].astype(dtype)
    return jax.shard_map(
        lambda table, tokens: _local(table, tokens, dtype),
        in_specs=(mesh_axes('vocab', 'embed'), mesh_axes('batch', 'length')),
        out_specs=mesh_axes('batch', 'length', 'state'),
        check_vma=False,
    )(table_VD, tokens_BT)


def _local(table_vd: jax.Array, tokens_bt: jax.Array, dtype: jnp.dtype) -> jax.Array:
    vocab, embed = RULES['vocab'], RULES['embed']
    tokens_gbt = jax.lax.all_gather(tokens_bt, embed)
    row_gbt = tokens_gbt - jax.lax.axis_index(vocab) * table_vd.shape[0]
    here_gbt = (row_gbt >= 0) & (row_gbt < table_vd.shape[0])
    x_gbtd = jnp.where(here_gbt[..., None], table_vd[jnp.where(here_gbt, row_gbt, 0)], 0).astype(dtype)
    x_gbtd = jax.lax.psum(x_gbtd, vocab)
    x_gbtd = jax.lax.all_to_all(x_gbtd, embed, split_axis=0, concat_axis=0, tiled=True)
    return jnp.moveaxis(x_gbtd, 0, -2).reshape(*tokens_bt.shape, -1)
