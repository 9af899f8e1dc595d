"""Cross-entropy that never holds all logits, as sums and counts (never means: those are divided once, globally).

    nll = log Z - logit[target],   log Z = logsumexp over the real vocabulary of h E^T

The logits exist for one chunk of the vocabulary at a time, (B, T, C), forward (a running maximum and sum) and
backward, which recomputes them from the states and log Z. So a table that is split over devices is never gathered
whole, and its gradient leaves each chunk once. Everything accumulates in promote_types(dtype, float32). z-loss
(method.md section 9) needs no code of its own: log Z is an output, differentiable like nll.
Shapes: B rows, T positions, D width, V padded vocabulary, C = V / n of n chunks; chunk j has the rows j, j + n, ...,
so that each shard of a table split over V gives every chunk its part.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbt_jax.model.transformer import MASKED_LOGIT
from fbt_jax.sharding import RULES, axis_size, constrain

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
      embedding_VD: the tied embedding, rows padded beyond `vocab_size`.
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
    """(n, C, D) in the compute dtype, still split over the devices as the table is."""
    parts_nCD = jnp.moveaxis(embedding_VD.astype(dtype).reshape(-1, chunks, embedding_VD.shape[1]), 1, 0)
    return constrain(parts_nCD, None, 'vocab', 'embed')


def _chunk_logits(
    hidden_BTD: jax.Array, part_CD: jax.Array, j: jax.Array, chunks: int, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """Logits of chunk j, (B, T, C), padding masked; and the ids of its rows, (C,)."""
    ids_C = jnp.arange(part_CD.shape[0]) * chunks + j
    part_CD = constrain(part_CD, 'vocab', 'state')  # gathers this chunk's rows, no more
    dtype = jnp.promote_types(hidden_BTD.dtype, jnp.float32)
    logits_BTC = jnp.einsum('btd,cd->btc', hidden_BTD, part_CD, preferred_element_type=dtype)
    logits_BTC = constrain(logits_BTC, 'batch', 'length', 'vocab')
    # Added, not chosen by jnp.where, which would make a (B, T, C) condition that the scan over passes keeps.
    return logits_BTC + jnp.where(ids_C < vocab_size, 0, MASKED_LOGIT).astype(dtype), ids_C


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _token_losses(
    hidden_BTD: jax.Array, embedding_VD: jax.Array, targets_BT: jax.Array, vocab_size: int, chunks: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    dtype = jnp.promote_types(hidden_BTD.dtype, jnp.float32)
    targets_BT = _tied(targets_BT, hidden_BTD)

    def one_chunk(carry: Any, xs: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        top_BT, sum_BT, target_BT = carry
        j, part_CD = xs
        logits_BTC, ids_C = _chunk_logits(hidden_BTD, part_CD, j, chunks, vocab_size)
        new_top_BT = jnp.maximum(top_BT, jnp.max(logits_BTC, axis=-1))
        part_sum_BT = jnp.sum(jnp.exp(logits_BTC - new_top_BT[..., None]), axis=-1)
        # A masked sum, not a gather: that would collect the logits of a vocabulary split over devices.
        target_BT += jnp.sum(jnp.where(ids_C == targets_BT[..., None], logits_BTC, 0), axis=-1)
        return (new_top_BT, sum_BT * jnp.exp(top_BT - new_top_BT) + part_sum_BT, target_BT), None

    zeros_BT = constrain(jnp.zeros(targets_BT.shape, dtype), 'batch', 'length')
    parts_nCD = _chunks(embedding_VD, chunks, hidden_BTD.dtype)
    first = (zeros_BT + MASKED_LOGIT, zeros_BT, zeros_BT)
    (top_BT, sum_BT, target_BT), _ = jax.lax.scan(one_chunk, first, (jnp.arange(chunks), parts_nCD))
    log_z_BT = top_BT + jnp.log(sum_BT)
    return log_z_BT - target_BT, log_z_BT, (target_BT >= top_BT).astype(dtype)


def _forward(hidden_BTD, embedding_VD, targets_BT, vocab_size, chunks):  # type: ignore[no-untyped-def]
    out = _token_losses(hidden_BTD, embedding_VD, targets_BT, vocab_size, chunks)
    return out, (hidden_BTD, embedding_VD, targets_BT, out[1])


def _backward(vocab_size, chunks, residuals, cotangents):  # type: ignore[no-untyped-def]
    """d nll / d logits = softmax - onehot(target);  d log Z / d logits = softmax."""
    hidden_BTD, embedding_VD, targets_BT, log_z_BT = residuals
    d_nll_BT, d_log_z_BT, _ = cotangents
    dtype = log_z_BT.dtype
    targets_BT = _tied(targets_BT, hidden_BTD)

    def one_chunk(d_hidden_BTD, xs):  # type: ignore[no-untyped-def]
        j, part_CD = xs
        logits_BTC, ids_C = _chunk_logits(hidden_BTD, part_CD, j, chunks, vocab_size)
        softmax_BTC = jnp.exp(logits_BTC - log_z_BT[..., None])
        is_target_BTC = ids_C == targets_BT[..., None]
        d_logits_BTC = (d_nll_BT + d_log_z_BT)[..., None] * softmax_BTC - jnp.where(
            is_target_BTC, d_nll_BT[..., None], 0.0
        )
        d_logits_BTC = d_logits_BTC.astype(hidden_BTD.dtype)
        part_CD = constrain(part_CD, 'vocab', 'state')
        d_hidden_BTD += jnp.einsum('btc,cd->btd', d_logits_BTC, part_CD, preferred_element_type=dtype)
        d_part_CD = jnp.einsum('btc,btd->cd', d_logits_BTC, hidden_BTD, preferred_element_type=dtype)
        return constrain(d_hidden_BTD, 'batch', 'length', 'state'), constrain(d_part_CD, 'vocab', 'embed')

    parts_nCD = _chunks(embedding_VD, chunks, hidden_BTD.dtype)
    zeros_BTD = constrain(jnp.zeros(hidden_BTD.shape, dtype), 'batch', 'length', 'state')
    d_hidden_BTD, d_parts_nCD = jax.lax.scan(one_chunk, zeros_BTD, (jnp.arange(chunks), parts_nCD))
    d_embedding_VD = jnp.moveaxis(constrain(d_parts_nCD, None, 'vocab', 'embed'), 0, 1).reshape(embedding_VD.shape)
    d_targets = np.zeros(targets_BT.shape, jax.dtypes.float0)
    return d_hidden_BTD.astype(hidden_BTD.dtype), d_embedding_VD.astype(embedding_VD.dtype), d_targets


_token_losses.defvjp(_forward, _backward)
