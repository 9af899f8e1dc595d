"""Keys and values of positions already read: one layer's part of decoding, for full and for windowed layers alike.

A layer's cache has S slots; position p lies in slot p mod S. A full layer has a slot for every position that a row may
come to; a windowed one has as many as its window, so that each new position takes the place of the one that has just
left the window: memory follows the window, and attention needs no mask for it.
Shapes: B rows, T positions of a prompt, S slots, N query heads, M key/value heads (G = N/M share one), H head width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fbt_jax.config import ModelConfig
from fbt_jax.sharding import constrain


class LayerCache(NamedTuple):
    """k, v: (B, S, M, H) in the compute dtype; with a leading axis where it stands for several layers."""

    k: jax.Array
    v: jax.Array


Cache = tuple[LayerCache, ...]  # one for each layer of a period, its arrays with a leading axis over the periods


def period(config: ModelConfig) -> int:
    """After how many layers the pattern of windows comes again."""
    return config.full_attention_every if config.window else 1


def empty(config: ModelConfig, *, rows: int, capacity: int, dtype: jnp.dtype) -> Cache:
    """Zeros for `rows` rows that come to at most `capacity` positions each."""
    periods = config.num_layers // period(config)

    def layer(window: int) -> LayerCache:
        slots = min(window, capacity) if window else capacity
        shape = (periods, rows, slots, config.num_kv_heads, config.head_dim)
        return LayerCache(*(_placed(jnp.zeros(shape, dtype)) for _ in range(2)))

    return tuple(layer(window) for window in config.layer_windows[: period(config)])


def num_bytes(config: ModelConfig, *, rows: int, capacity: int, itemsize: int) -> int:
    """Of `empty`, on paper: two arrays a layer."""
    slots = sum(min(w, capacity) if w else capacity for w in config.layer_windows)
    return 2 * rows * slots * config.num_kv_heads * config.head_dim * itemsize


def store_prompt(cache: LayerCache, k_BTMH: jax.Array, v_BTMH: jax.Array, lengths_B: jax.Array) -> LayerCache:
    """The cache after a prompt's positions 0..length-1; what lies behind a row's length is not stored."""
    slots = cache.k.shape[1]
    last_B1 = lengths_B[:, None] - 1
    # The latest position that belongs in each slot, negative where there is none yet.
    held_BS = last_B1 - (last_B1 - jnp.arange(slots)) % slots
    place_BS11 = jnp.maximum(held_BS, 0)[..., None, None]

    def take(x_BTMH: jax.Array) -> jax.Array:
        return _placed(jnp.take_along_axis(x_BTMH, place_BS11, axis=1))

    return LayerCache(take(k_BTMH), take(v_BTMH))


def store_one(cache: LayerCache, k_B1MH: jax.Array, v_B1MH: jax.Array, positions_B: jax.Array) -> LayerCache:
    """The cache with one more position in each row."""
    rows = jnp.arange(cache.k.shape[0])
    slots_B = positions_B % cache.k.shape[1]
    return LayerCache(*(_placed(c.at[rows, slots_B].set(x[:, 0])) for c, x in ((cache.k, k_B1MH), (cache.v, v_B1MH))))


def attend_one(q_B1NH: jax.Array, cache: LayerCache, positions_B: jax.Array) -> jax.Array:
    """Attention of one position a row, already stored, to all that its row's cache holds. (B, 1, N, H)."""
    batch, _, num_heads, width = q_B1NH.shape
    slots, kv_heads = cache.k.shape[1:3]
    q_BMGH = q_B1NH.reshape(batch, kv_heads, -1, width)
    dtype = jnp.promote_types(q_B1NH.dtype, jnp.float32)
    scores_BMGS = jnp.einsum('bmgh,bsmh->bmgs', q_BMGH, cache.k, preferred_element_type=dtype) * width**-0.5
    # Slot s holds position p = t - ((t - s) mod S), which is none as long as it is negative.
    t_B1 = positions_B[:, None]
    filled_BS = t_B1 >= (t_B1 - jnp.arange(slots)) % slots
    scores_BMGS = jnp.where(filled_BS[:, None, None], scores_BMGS, jnp.finfo(dtype).min)
    weights_BMGS = jax.nn.softmax(scores_BMGS, axis=-1).astype(cache.v.dtype)
    out_BMGH = jnp.einsum('bmgs,bsmh->bmgh', weights_BMGS, cache.v)
    return constrain(out_BMGH.reshape(batch, 1, num_heads, width), 'batch', None, 'heads', None)


def _placed(x: jax.Array) -> jax.Array:
    """Rows and heads split as the activations'; slots never are."""
    leading = (None,) * (x.ndim - 4)
    return constrain(x, *leading, 'batch', None, 'kv_heads', None)
