"""Choosing the next token from logits: greedy, temperature, top-k, top-p; each row with noise of its own.

The noise of a row follows from (seed, the row's number in the request, step) alone, so a row draws the same whatever
else is decoded beside it. B rows, V padded vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

KINDS = ('greedy', 'free', 'restricted')  # what is compiled; the numbers below are only read by the last two


class Sampling(NamedTuple):
    """Applied in this order. Scalars, so that another value needs no other program."""

    temperature: jax.Array | float = 1.0
    top_k: jax.Array | int = 0  # 0: off
    top_p: jax.Array | float = 1.0


class Choice(NamedTuple):
    token_B: jax.Array  # int32
    log_prob_B: jax.Array  # float32: of the token by the model itself, before temperature, top-k and top-p


def choose(
    logits_BV: jax.Array, sampling: Sampling, *, kind: str, key: jax.Array, rows_B: jax.Array, step: jax.Array
) -> Choice:
    """The next token of each row. `kind` (static) is one of KINDS; padded logits must be hugely negative."""
    log_probs_BV = jax.nn.log_softmax(logits_BV.astype(jnp.promote_types(logits_BV.dtype, jnp.float32)))
    if kind == 'greedy':
        token_B = jnp.argmax(logits_BV, axis=-1)
    else:
        keys_B = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), step))(rows_B)
        allowed_BV = log_probs_BV / sampling.temperature
        if kind == 'restricted':
            allowed_BV = restrict(allowed_BV, top_k=sampling.top_k, top_p=sampling.top_p)
        token_B = jax.vmap(jax.random.categorical)(keys_B, allowed_BV)
    token_B = token_B.astype(jnp.int32)
    return Choice(token_B, jnp.take_along_axis(log_probs_BV, token_B[:, None], axis=-1)[:, 0].astype(jnp.float32))


def restrict(logits_BV: jax.Array, *, top_k: jax.Array | int, top_p: jax.Array | float) -> jax.Array:
    """`logits_BV` with -inf where a token may not be drawn.

    top_k: only the k largest. top_p: only the fewest tokens, largest first, whose probabilities among those that top-k
    leaves come to at least p; the largest always stays.
    """
    order_BV = jnp.argsort(-logits_BV, axis=-1)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    rank_V = jnp.arange(logits_BV.shape[-1])
    allowed_BV = jnp.broadcast_to((rank_V < top_k) | (jnp.asarray(top_k) == 0), sorted_BV.shape)
    probs_BV = jax.nn.softmax(jnp.where(allowed_BV, sorted_BV, -jnp.inf), axis=-1)
    # What comes before a token does not suffice without it.
    allowed_BV &= (jnp.cumsum(probs_BV, axis=-1) - probs_BV < top_p) | (rank_V == 0)
    rows_B1 = jnp.arange(logits_BV.shape[0])[:, None]
    return jnp.where(jnp.zeros_like(allowed_BV).at[rows_B1, order_BV].set(allowed_BV), logits_BV, -jnp.inf)
