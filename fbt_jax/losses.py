"""Cross-entropy that never holds all logits, as sums and counts (never means: those are divided once, globally).

    nll = log Z - logit[target],   log Z = logsumexp over the real vocabulary of h E^T

The logits exist for one chunk of positions at a time, (B, C, V), forward and backward; the backward pass recomputes
them from the states and log Z. Everything accumulates in promote_types(dtype, float32). z-loss (method.md section 9)
needs no code of its own: log Z is an output, differentiable like nll.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbt_jax.model.transformer import logits

CHUNK_ELEMENTS = 2**23  # logits held at a time, 32 MiB in float32: the fastest size in benchmarks/loss_cost.py


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


def chunk_length(batch: int, seq_len: int, vocab: int) -> int:
    """The largest divisor of `seq_len` whose logits stay within CHUNK_ELEMENTS (at least 1)."""
    return max(c for c in range(1, seq_len + 1) if seq_len % c == 0 and (c == 1 or batch * c * vocab <= CHUNK_ELEMENTS))


def token_losses(
    hidden_BTD: jax.Array, embedding_VD: jax.Array, targets_BT: jax.Array, *, vocab_size: int, chunk: int | None = None
) -> TokenLosses:
    """Negative log-likelihood and log Z of every position.

    Args:
      hidden_BTD: states after the final norm.
      embedding_VD: the tied embedding, rows padded beyond `vocab_size`.
      targets_BT: int, in 0..vocab_size-1.
      chunk: positions whose logits are held at once; must divide T. Default: `chunk_length`.
    """
    batch, seq_len, _ = hidden_BTD.shape
    chunk = chunk or chunk_length(batch, seq_len, embedding_VD.shape[0])
    if seq_len % chunk:
        raise ValueError(f'chunk = {chunk} does not divide the {seq_len} positions')
    return TokenLosses(*_token_losses(hidden_BTD, embedding_VD, targets_BT, vocab_size, chunk))


def loss_sums(losses: TokenLosses, weights_BT: jax.Array) -> LossSums:
    """Weighted sums over all positions; weight 0 counts for nothing, whatever the value there."""

    def total(values_BT: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(weights_BT > 0, weights_BT * values_BT, 0.0))

    return LossSums(total(losses.nll_BT), total(losses.log_z_BT**2), total(losses.correct_BT))


def _to_chunks(x_BTx: jax.Array, chunk: int) -> jax.Array:
    """(B, T, ...) -> (T/C, B, C, ...)."""
    batch, seq_len, *rest = x_BTx.shape
    return jnp.moveaxis(x_BTx.reshape(batch, seq_len // chunk, chunk, *rest), 1, 0)


def _from_chunks(x_nBCx: jax.Array) -> jax.Array:
    n, batch, chunk, *rest = x_nBCx.shape
    return jnp.moveaxis(x_nBCx, 0, 1).reshape(batch, n * chunk, *rest)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _token_losses(
    hidden_BTD: jax.Array, embedding_VD: jax.Array, targets_BT: jax.Array, vocab_size: int, chunk: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def one_chunk(xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        hidden_BCD, targets_BC = xs
        logits_BCV = logits(hidden_BCD, embedding_VD, vocab_size=vocab_size)
        top_BC = jnp.max(logits_BCV, axis=-1)
        log_z_BC = top_BC + jnp.log(jnp.sum(jnp.exp(logits_BCV - top_BC[..., None]), axis=-1))
        target_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], axis=-1)[..., 0]
        return log_z_BC - target_BC, log_z_BC, (target_BC >= top_BC).astype(log_z_BC.dtype)

    out = jax.lax.map(one_chunk, (_to_chunks(hidden_BTD, chunk), _to_chunks(targets_BT, chunk)))
    nll_BT, log_z_BT, correct_BT = (_from_chunks(x) for x in out)
    return nll_BT, log_z_BT, correct_BT


def _forward(hidden_BTD, embedding_VD, targets_BT, vocab_size, chunk):  # type: ignore[no-untyped-def]
    out = _token_losses(hidden_BTD, embedding_VD, targets_BT, vocab_size, chunk)
    return out, (hidden_BTD, embedding_VD, targets_BT, out[1])


def _backward(vocab_size, chunk, residuals, cotangents):  # type: ignore[no-untyped-def]
    """d nll / d logits = softmax - onehot(target);  d log Z / d logits = softmax."""
    hidden_BTD, embedding_VD, targets_BT, log_z_BT = residuals
    d_nll_BT, d_log_z_BT, _ = cotangents
    dtype = log_z_BT.dtype

    def one_chunk(d_embedding_VD, xs):  # type: ignore[no-untyped-def]
        hidden_BCD, targets_BC, log_z_BC, d_nll_BC, d_log_z_BC = xs
        logits_BCV = logits(hidden_BCD, embedding_VD, vocab_size=vocab_size)
        softmax_BCV = jnp.exp(logits_BCV - log_z_BC[..., None])
        is_target_BCV = jnp.arange(embedding_VD.shape[0]) == targets_BC[..., None]
        d_logits_BCV = (d_nll_BC + d_log_z_BC)[..., None] * softmax_BCV - jnp.where(
            is_target_BCV, d_nll_BC[..., None], 0.0
        )
        d_logits_BCV = d_logits_BCV.astype(hidden_BCD.dtype)
        d_hidden_BCD = jnp.einsum('bcv,vd->bcd', d_logits_BCV, embedding_VD.astype(hidden_BCD.dtype))
        d_embedding_VD += jnp.einsum('bcv,bcd->vd', d_logits_BCV, hidden_BCD, preferred_element_type=dtype)
        return d_embedding_VD, d_hidden_BCD

    xs = tuple(_to_chunks(x, chunk) for x in (hidden_BTD, targets_BT, log_z_BT, d_nll_BT, d_log_z_BT))
    d_embedding_VD, d_hidden = jax.lax.scan(one_chunk, jnp.zeros(embedding_VD.shape, dtype), xs)
    d_targets = np.zeros(targets_BT.shape, jax.dtypes.float0)
    return _from_chunks(d_hidden), d_embedding_VD.astype(embedding_VD.dtype), d_targets


_token_losses.defvjp(_forward, _backward)
