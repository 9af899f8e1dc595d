"""Causal self-attention over packed rows, with sliding windows and grouped queries (method.md section 6).

    attn: q, k = rope(n_q(W_q y)), rope(n_k(W_k y)) per head; softmax(q k / sqrt(H)) v; each head times sigmoid(W_g
    y)_head

Documents lie in one piece, so position t sees an interval of keys, [max(start of its document, t - w + 1), t].
'plain' holds T x S scores (the reference), 'blockwise' (flash.py) runs on any platform, 'splash' (splash.py) on TPU.
CPU, 2 cores, forward and backward: blockwise takes 0.7 of plain's time at T = 128, 0.3 at 512, 0.2 at 2048. On GPU
there is no fused kernel: jax.nn's cuDNN takes no segment ids, tokamax 0.0.12 none in public but as a T x S mask.
On a mesh each device attends its queries to the keys that it fetches along `context`; see `_shard_map`.

Shapes: B rows, T query and S key positions (S = T but on a device that has a part of the row), N query heads, M
key/value heads (G = N/M queries share one), H head width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from fbt_jax.config_model import ATTENTION
from fbt_jax.errors import UserError
from fbt_jax.model import flash, splash
from fbt_jax.sharding import RULES, axis_size, current_mesh, mesh_axes

ONE_BLOCK = 64  # up to this length 'blockwise' is computed as 'plain': loops of one turn only cost time


def rope_frequencies(half: int, *, theta: float, scaling: tuple[float, ...] = ()) -> np.ndarray:
    """Radians a position, (H/2,) float64: theta^(-2i/H), then scaled.

    (factor,): all divided by it. (factor, low, high, length), Llama 3.1's: those that turn fewer than `low` times
    within `length` positions are divided by factor, those that turn more than `high` times are kept, and between them
    the share that is kept grows linearly with the number of turns.
    """
    frequency_h = theta ** (-np.arange(half) / half)
    if not scaling:
        return frequency_h
    factor, *band = scaling
    kept_h: Any = 0.0
    if band:
        low, high, length = band
        kept_h = np.clip((length * frequency_h / (2 * np.pi) - low) / (high - low), 0, 1)
    return frequency_h * (kept_h + (1 - kept_h) / factor)


def rope(x_BTNH: jax.Array, positions_BT: jax.Array, *, theta: float, scaling: tuple[float, ...] = ()) -> jax.Array:
    """Rotates each pair (i, i + H/2) by positions * frequency_i radians, in float32 at least; keeps x's dtype."""
    dtype = jnp.promote_types(x_BTNH.dtype, jnp.float32)
    frequency_h = jnp.asarray(rope_frequencies(x_BTNH.shape[-1] // 2, theta=theta, scaling=scaling), dtype)
    angle_BT1h = positions_BT[:, :, None, None].astype(dtype) * frequency_h
    cos, sin = jnp.cos(angle_BT1h), jnp.sin(angle_BT1h)
    first, second = jnp.split(x_BTNH.astype(dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTNH.dtype)


def resolve_implementation(name: str, platform: str) -> str:
    """The implementation that `model.attention` = `name` means for programs compiled for `platform`.

    Call it at set-up and keep the answer: when a program is compiled ahead of time for a TPU, the default backend is
    the CPU. `platform` is jax's name: 'cpu', 'tpu', 'gpu', ...

    Raises:
      UserError: there is no such implementation, or not for this platform.
    """
    if name not in ATTENTION:
        raise UserError(f'model.attention = {name!r}: must be one of {", ".join(ATTENTION)}')
    if name == 'auto':
        return 'splash' if platform == 'tpu' else 'blockwise'
    if name == 'splash' and platform != 'tpu':
        raise UserError(f"model.attention = 'splash': runs on TPU only, use auto, blockwise or plain on {platform}")
    return name


def attention(
    q_BTNH: jax.Array,
    k_BSMH: jax.Array,
    v_BSMH: jax.Array,
    *,
    segment_ids_BT: jax.Array,
    window: int,
    implementation: str,
    interpret: bool = False,
) -> jax.Array:
    """softmax(q k / sqrt(H)) v over the keys of the same document that are neither ahead nor out of the window.

    Within `jax.set_mesh` the arguments are laid out as the table in sharding.py says, and so is the result; every split
    dimension must divide.

    Args:
      q_BTNH, k_BSMH, v_BSMH: queries, keys, values; one dtype, S = T. Query head n reads key head n // (N/M).
      segment_ids_BT: int, the document of each position; equal ids are neighbours. Padding (0) is a document too.
      window: how many keys a position sees, itself included; 0: all.
      implementation: one of config_model.ATTENTION. 'auto' goes by the default backend, see `resolve_implementation`.
      interpret: run the splash kernel in Pallas' interpreter, on any platform: for tests.

    Returns:
      (B, T, N, H) in the dtype of q. The softmax is computed in promote_types(dtype, float32).

    Raises:
      UserError: splash can't take these shapes or this dtype. Whether an implementation is there for the platform is
        only known to `resolve_implementation`.
    """
    if implementation == 'auto':
        implementation = resolve_implementation('auto', jax.default_backend())
    if window >= q_BTNH.shape[1]:
        window = 0
    if implementation == 'splash':
        return _splash_attention(q_BTNH, k_BSMH, v_BSMH, segment_ids_BT, window=window, interpret=interpret)
    kernel = plain if implementation == 'plain' or q_BTNH.shape[1] <= ONE_BLOCK else flash.attend
    if implementation == 'plain' or current_mesh() is None:
        first_BT = first_visible(segment_ids_BT, window)
        return kernel(q_BTNH, k_BSMH, v_BSMH, first_BT, jnp.int32(0))

    def on_device(q_BTNH: jax.Array, keys: Keys) -> jax.Array:
        first_BT = _of_queries(first_visible(keys.segment_ids_BS, window), q_BTNH, keys)
        return kernel(q_BTNH, keys.k_BSMH, keys.v_BSMH, first_BT, keys.offset)

    return _shard_map(on_device, window)(q_BTNH, k_BSMH, v_BSMH, segment_ids_BT)


def _splash_attention(
    q_BTNH: jax.Array,
    k_BSMH: jax.Array,
    v_BSMH: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    window: int,
    interpret: bool,
) -> jax.Array:
    _, seq_len, heads, _ = q_BTNH.shape
    mesh, shards = current_mesh(), axis_size(*RULES['length'])
    splash.check(q_BTNH, shards=shards)
    make = partial(splash.make_kernel, num_heads=heads, window=window, interpret=interpret)
    if mesh is None:
        return splash.attend(make(seq_len, seq_len), q_BTNH, k_BSMH, v_BSMH, segment_ids_BT, segment_ids_BT)
    behind = _devices_behind(window, seq_len // shards)
    make = partial(make, head_shards=axis_size(*RULES['heads']))
    if behind == shards - 1:  # the mask is cut with the queries, so that one kernel serves all shards
        kernel, axes = make(seq_len, seq_len, length_shards=shards), mesh_axes('heads', 'length')
    else:  # every shard has the same mask
        kernel, axes = make(seq_len // shards, (1 + behind) * seq_len // shards), mesh_axes('heads', None)

    def on_device(q_BTNH: jax.Array, keys: Keys, kernel: splash.Kernel) -> jax.Array:
        segment_ids_BT = _of_queries(keys.segment_ids_BS, q_BTNH, keys)
        return splash.attend(kernel, q_BTNH, keys.k_BSMH, keys.v_BSMH, segment_ids_BT, keys.segment_ids_BS)

    kernel_spec = kernel.manual_sharding_spec(NamedSharding(mesh, axes))
    return _shard_map(on_device, window, kernel_spec)(q_BTNH, k_BSMH, v_BSMH, segment_ids_BT, kernel)


class Keys(NamedTuple):
    """What a device has fetched: keys, values and documents of S positions, its queries' first position among them."""

    k_BSMH: jax.Array
    v_BSMH: jax.Array
    segment_ids_BS: jax.Array
    offset: jax.Array


def _of_queries(x_BS: jax.Array, q_BTNH: jax.Array, keys: Keys) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x_BS, keys.offset, q_BTNH.shape[1], axis=1)


def _devices_behind(window: int, seq_len: int) -> int:
    """How many devices before its own along `length`, each with `seq_len` positions, hold keys that a query sees."""
    others = axis_size(*RULES['length']) - 1
    return min(others, -(-(window - 1) // seq_len)) if window else others


def _shard_map(on_device: Callable[..., jax.Array], window: int, *more_specs: object) -> Callable[..., jax.Array]:
    """`on_device` over the current mesh, with its part of the queries and the keys that they may see, of its heads.

    Keys come from all devices of the row (all-gather; its transpose is a reduce-scatter, so that gradients come back
    split) or, where the window is short enough, only from the nearest ones before. tests/benchmarks/context_cost.py: a
    ring of keys receives 1.1 to 1.5 times the bytes and takes 1 to 1.4 times as long; for rows of 8192 without a window
    over 8 devices it would need 72 MiB where this needs 153.
    """

    def local(q_BTNH: jax.Array, k_BSMH: jax.Array, v_BSMH: jax.Array, ids_BS: jax.Array, *rest: Any) -> jax.Array:
        axis, seq_len = RULES['length'], q_BTNH.shape[1]
        devices, behind = axis_size(*axis), _devices_behind(window, seq_len)
        # What the first devices fetch from none is 0: with documents counted from 1, no document of the row.
        arrays = [k_BSMH, v_BSMH, ids_BS + 1]
        if behind == devices - 1 > 0:
            arrays = [jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in arrays]
            offset = jax.lax.axis_index(axis) * seq_len
        else:
            hops = [[(i, i + n) for i in range(devices - n)] for n in range(behind, 0, -1)]
            arrays = [jnp.concatenate([*(jax.lax.ppermute(x, axis, h) for h in hops), x], axis=1) for x in arrays]
            offset = jnp.int32(behind * seq_len)
        k_BSMH, v_BSMH, ids_BS = arrays
        return on_device(q_BTNH, Keys(k_BSMH, v_BSMH, ids_BS, offset), *rest)

    q_spec = mesh_axes('batch', 'length', 'heads', None)
    kv_spec = mesh_axes('batch', 'length', 'kv_heads', None)
    in_specs = (q_spec, kv_spec, kv_spec, mesh_axes('batch', 'length'), *more_specs)
    return jax.shard_map(local, in_specs=in_specs, out_specs=q_spec, check_vma=False)


def first_visible(segment_ids_BT: jax.Array, window: int) -> jax.Array:
    """(B, T) int32: the first key that each position sees; the last is itself. `window` 0: none."""
    index_T = jnp.arange(segment_ids_BT.shape[1], dtype=jnp.int32)
    starts_BT = jnp.diff(segment_ids_BT, axis=1, prepend=segment_ids_BT[:, :1]) != 0
    first_BT = jax.lax.cummax(jnp.where(starts_BT, index_T, 0), axis=1)
    return jnp.maximum(first_BT, index_T - window + 1) if window else first_BT


def plain(q_BTNH: jax.Array, k_BSMH: jax.Array, v_BSMH: jax.Array, first_BT: jax.Array, offset: jax.Array) -> jax.Array:
    """Attention of the queries at offset..offset+T-1 to the keys first..their own, by way of all T x S scores."""
    batch, seq_len, num_heads, width = q_BTNH.shape
    grouped_BTMGH = q_BTNH.reshape(batch, seq_len, k_BSMH.shape[2], -1, width)
    seen_BTS = flash.seen(first_BT, offset + jnp.arange(seq_len), jnp.arange(k_BSMH.shape[1]))
    # Not jax.nn.dot_product_attention: its softmax is float32 for float64 inputs too (jax 0.10 and 0.12).
    dtype = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    scores_BMGTS = jnp.einsum('btmgh,bsmh->bmgts', grouped_BTMGH, k_BSMH, preferred_element_type=dtype) * width**-0.5
    scores_BMGTS = jnp.where(seen_BTS[:, None, None], scores_BMGTS, jnp.finfo(dtype).min)
    weights_BMGTS = jax.nn.softmax(scores_BMGTS, axis=-1).astype(v_BSMH.dtype)
    return jnp.einsum('bmgts,bsmh->btmgh', weights_BMGTS, v_BSMH).reshape(batch, seq_len, num_heads, width)
