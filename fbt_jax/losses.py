"""Cross-entropy that never holds all logits, as sums and counts (never means: those are divided once, globally).

    nll = log Z - logit[target],   log Z = logsumexp over the real vocabulary of h E^T

The logits exist for one chunk of the vocabulary at a time, (B, T, C), forward (a running maximum and sum) and
backward, which recomputes them from the states and log Z. On a mesh each device works on its own tokens; of a table
that is split over devices only a chunk is gathered at a time, and the chunk's gradient leaves by a reduce-scatter.
Everything accumulates in promote_types(dtype, float32). z-loss (method.md section 9) needs no code of its own: log Z
is an output, differentiable like nll.
Shapes: B rows, T positions, D width, V padded vocabulary, C = V / n of n chunks; chunk j has the rows j, j + n, ...,
so that each shard of a table split over V gives every chunk its part.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbt_jax.model.transformer import MASKED_LOGIT
from fbt_jax.sharding import RULES, axis_size, current_mesh, mesh_axes, reduce_scatter

# Logits held at a time by a device. With bfloat16 states (accelerators) 128 MiB, which keeps their matrix units busy;
# otherwise (CPU) what a cache holds, see benchmarks/loss_cost.py.
CHUNK_ELEMENTS, CHUNK_ELEMENTS_BFLOAT16 = 2**20, 2**25
MIN_CHUNK_ROWS = 128  # of the vocabulary


class TokenLosses(NamedTuple):
    """Per position, (B, T), float32 or wider."""

    nll_BT: jax.Array  # nats
    log_z_BT: jax.Array
    correct_BT: jax.Array  # 1.0 where the target has the highest logit; no gradient


class LossSums(NamedTuple):
    """Sums over counted tokens, float32 scalars; divide by the global count once."""

    nll: jax.Array
    squared_log_z: jax.Array
    correct: jax.Array


def chunk_count(hidden_BTD: jax.Array, vocab: int) -> int:
    """The fewest equal chunks of V whose logits stay within CHUNK_ELEMENTS on a device.

    A chunk keeps MIN_CHUNK_ROWS rows at least, so a very long batch may exceed it.
    """
    batch, seq_len, _ = hidden_BTD.shape
    elements = CHUNK_ELEMENTS_BFLOAT16 if hidden_BTD.dtype == jnp.bfloat16 else CHUNK_ELEMENTS
    tokens = batch * seq_len // axis_size(*RULES['batch'], *RULES['length'])
    rows = vocab // axis_size(*RULES['vocab'])
    counts = [n for n in range(1, rows + 1) if rows % n == 0 and (n == 1 or rows // n >= MIN_CHUNK_ROWS)]
    return next((n for n in counts if tokens * (rows // n) <= elements), counts[-1])


def token_losses(
    hidden_BTD: jax.Array, embedding_VD: jax.Array, targets_BT: jax.Array, *, vocab_size: int, chunks: int | None = None
) -> TokenLosses:
    """Negative log-likelihood and log Z of every position.

    Args:
      hidden_BTD: states after the final norm.
      embedding_VD: the head's table (`head_table`), rows padded beyond `vocab_size`.
      targets_BT: int, in 0..vocab_size-1.
      chunks: in how many parts the vocabulary is taken; must divide V. Default: `chunk_count`.
    """
    vocab = embedding_VD.shape[0]
    chunks = chunks or chunk_count(hidden_BTD, vocab)
    if vocab % chunks:
        raise ValueError(f'chunks = {chunks} does not divide the {vocab} rows of the vocabulary')
    return TokenLosses(*_token_losses(hidden_BTD, embedding_VD, targets_BT, vocab_size, chunks))


def loss_sums(losses: TokenLosses, weights_BT: jax.Array) -> LossSums:
    """Weighted sums over all positions; weight 0 counts for nothing, whatever the value there."""

    def total(values_BT: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(weights_BT > 0, weights_BT * values_BT, 0.0))

    return LossSums(total(losses.nll_BT), total(losses.log_z_BT**2), total(losses.correct_BT))


def _tied(targets_BT: jax.Array, hidden_BTD: jax.Array) -> jax.Array:
    """The targets, but in JAX's eyes a function of the states.

    They don't change over the passes, so differentiating the scan over passes would compare them with the ids of all
    chunks once, outside of it, and keep (n, B, T, C) booleans.
    """
    return targets_BT + 0 * jnp.isnan(hidden_BTD[..., 0]).astype(targets_BT.dtype)


def _chunks(embedding_VD: jax.Array, chunks: int, dtype: jnp.dtype) -> jax.Array:
    """(n, C, D) in the compute dtype: a device's part of every chunk, when called with its part of the table."""
    return jnp.moveaxis(embedding_VD.astype(dtype).reshape(-1, chunks, embedding_VD.shape[1]), 1, 0)


def _chunk_logits(
    hidden_BTD: jax.Array, part_CD: jax.Array, j: jax.Array, chunks: int, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """Logits of chunk j, (B, T, C), padding masked; and the ids of its rows, (C,)."""
    first = 0 if current_mesh() is None else jax.lax.axis_index(RULES['vocab']) * part_CD.shape[0]
    ids_C = (first + jnp.arange(part_CD.shape[0])) * chunks + j
    dtype = jnp.promote_types(hidden_BTD.dtype, jnp.float32)
    logits_BTC = jnp.einsum('btd,cd->btc', hidden_BTD, part_CD, preferred_element_type=dtype)
    # Added, not chosen by jnp.where, which would make a (B, T, C) condition that the scan over passes keeps.
    return logits_BTC + jnp.where(ids_C < vocab_size, 0, MASKED_LOGIT).astype(dtype), ids_C


def _gathered(part_Cd: jax.Array) -> jax.Array:
    """The whole width of a chunk's rows."""
    return part_Cd if current_mesh() is None else jax.lax.all_gather(part_Cd, RULES['embed'], axis=1, tiled=True)


def _over_vocab(reduce: Any, x: jax.Array) -> jax.Array:
    return x if current_mesh() is None else reduce(x, RULES['vocab'])


def _on_each_device(function: Any, in_axes: Any, out_axes: Any) -> Any:
    """`function` of each device's part of the arrays with these logical axes; itself where there is no mesh."""
    if current_mesh() is None:
        return function
    in_specs, out_specs = (tuple(mesh_axes(*names) for names in axes) for axes in (in_axes, out_axes))
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


_STATES, _TABLE, _TOKENS = ('batch', 'length', 'state'), ('vocab', 'embed'), ('batch', 'length')


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _token_losses(
    hidden_BTD: jax.Array, embedding_VD: jax.Array, targets_BT: jax.Array, vocab_size: int, chunks: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def local(hidden_BTD: jax.Array, embedding_Vd: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, ...]:
        dtype = jnp.promote_types(hidden_BTD.dtype, jnp.float32)

        def one_chunk(carry: Any, xs: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            top_BT, sum_BT, target_BT = carry
            j, part_Cd = xs
            logits_BTC, ids_C = _chunk_logits(hidden_BTD, _gathered(part_Cd), j, chunks, vocab_size)
            new_top_BT = jnp.maximum(top_BT, jnp.max(logits_BTC, axis=-1))
            part_sum_BT = jnp.sum(jnp.exp(logits_BTC - new_top_BT[..., None]), axis=-1)
            # A masked sum, not an index: the target's row may be on another device.
            target_BT += jnp.sum(jnp.where(ids_C == targets_BT[..., None], logits_BTC, 0), axis=-1)
            return (new_top_BT, sum_BT * jnp.exp(top_BT - new_top_BT) + part_sum_BT, target_BT), None

        targets_BT = _tied(targets_BT, hidden_BTD)
        zeros_BT = jnp.zeros(targets_BT.shape, dtype)
        xs = (jnp.arange(chunks), _chunks(embedding_Vd, chunks, hidden_BTD.dtype))
        first = (zeros_BT + MASKED_LOGIT, zeros_BT, zeros_BT)
        (top_BT, sum_BT, target_BT), _ = jax.lax.scan(one_chunk, first, xs)
        whole_top_BT = _over_vocab(jax.lax.pmax, top_BT)
        log_z_BT = whole_top_BT + jnp.log(_over_vocab(jax.lax.psum, sum_BT * jnp.exp(top_BT - whole_top_BT)))
        target_BT = _over_vocab(jax.lax.psum, target_BT)
        return log_z_BT - target_BT, log_z_BT, (target_BT >= whole_top_BT).astype(dtype)

    return _on_each_device(local, (_STATES, _TABLE, _TOKENS), (_TOKENS,) * 3)(hidden_BTD, embedding_VD, targets_BT)


def _forward(hidden_BTD, embedding_VD, targets_BT, vocab_size, chunks):  # type: ignore[no-untyped-def]
    out = _token_losses(hidden_BTD, embedding_VD, targets_BT, vocab_size, chunks)
    return out, (hidden_BTD, embedding_VD, targets_BT, out[1])


def _backward(vocab_size, chunks, residuals, cotangents):  # type: ignore[no-untyped-def]
    """d nll / d logits = softmax - onehot(target);  d log Z / d logits = softmax."""

    def local(hidden_BTD, embedding_Vd, targets_BT, log_z_BT, d_nll_BT, d_log_z_BT):  # type: ignore[no-untyped-def]
        dtype = log_z_BT.dtype

        def one_chunk(d_hidden_BTD, xs):  # type: ignore[no-untyped-def]
            j, part_Cd = xs
            part_CD = _gathered(part_Cd)
            logits_BTC, ids_C = _chunk_logits(hidden_BTD, part_CD, j, chunks, vocab_size)
            softmax_BTC = jnp.exp(logits_BTC - log_z_BT[..., None])
            is_target_BTC = ids_C == targets_BT[..., None]
            d_logits_BTC = (d_nll_BT + d_log_z_BT)[..., None] * softmax_BTC - jnp.where(
                is_target_BTC, d_nll_BT[..., None], 0.0
            )
            d_logits_BTC = d_logits_BTC.astype(hidden_BTD.dtype)
            d_hidden_BTD += jnp.einsum('btc,cd->btd', d_logits_BTC, part_CD, preferred_element_type=dtype)
            d_part_CD = jnp.einsum('btc,btd->cd', d_logits_BTC, hidden_BTD, preferred_element_type=dtype)
            if current_mesh() is not None:
                d_part_CD = reduce_scatter(d_part_CD, RULES['embed'], dimension=1)
            return d_hidden_BTD, d_part_CD

        targets_BT = _tied(targets_BT, hidden_BTD)
        xs = (jnp.arange(chunks), _chunks(embedding_Vd, chunks, hidden_BTD.dtype))
        d_hidden_BTD, d_parts_nCd = jax.lax.scan(one_chunk, jnp.zeros(hidden_BTD.shape, dtype), xs)
        d_embedding_Vd = jnp.moveaxis(d_parts_nCd, 0, 1).reshape(embedding_Vd.shape)
        if current_mesh() is not None:
            copies = tuple(axis for axis in RULES['batch'] if axis not in RULES['embed'])
            d_embedding_Vd = jax.lax.psum(d_embedding_Vd, copies)
        d_hidden_BTD = _over_vocab(jax.lax.psum, d_hidden_BTD)
        return d_hidden_BTD.astype(hidden_BTD.dtype), d_embedding_Vd.astype(embedding_Vd.dtype)

    hidden_BTD, embedding_VD, targets_BT, log_z_BT = residuals
    d_nll_BT, d_log_z_BT, _ = cotangents
    in_axes, out_axes = (_STATES, _TABLE, *(_TOKENS,) * 4), (_STATES, _TABLE)
    d_hidden_BTD, d_embedding_VD = _on_each_device(local, in_axes, out_axes)(
        hidden_BTD, embedding_VD, targets_BT, log_z_BT, d_nll_BT, d_log_z_BT
    )
    return d_hidden_BTD, d_embedding_VD, np.zeros(targets_BT.shape, jax.dtypes.float0)


_token_losses.defvjp(_forward, _backward)
