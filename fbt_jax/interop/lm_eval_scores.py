"""Losses of continuations, as lm_eval_model.py gives them to lm-evaluation-harness (method.md section 5):

    standard   one plain pass over context and continuation
    fused      the last of 1 + fused_passes passes over context and continuation
    soft       one plain pass over the context, then each token of the continuation fused with the state before it

Shapes: B rows, T inputs, P of them prompt, N tokens of a continuation, D width.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fbt_jax.batch import Batch
from fbt_jax.inference.decode import read_prompts
from fbt_jax.losses import TokenLosses, token_losses
from fbt_jax.model.transformer import head_table
from fbt_jax.passes import multi_pass
from fbt_jax.sharding import constrain, replicated


@partial(jax.jit, static_argnames=('model', 'num_passes'))
def score_passes(
    model: Any,
    params: Any,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    *,
    context_B: jax.Array,
    continuation_BN: jax.Array,
    num_passes: int,
) -> TokenLosses:
    """(B, N) losses of continuations that follow the first `context_B` inputs, in the last of `num_passes` passes."""
    index_T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    batch = Batch(
        tokens=tokens_BT,
        targets=None,
        weights=None,
        segment_ids=(index_T < lengths_B[:, None]).astype(jnp.int32),
        positions=jnp.broadcast_to(index_T, tokens_BT.shape),
    )
    hidden_BTD = multi_pass(model, params, batch, num_passes=num_passes, per_pass=lambda *_: None).hidden_BTD
    place_BN = context_B[:, None] - 1 + jnp.arange(continuation_BN.shape[1])
    place_BN = jnp.minimum(place_BN, tokens_BT.shape[1] - 1)
    hidden_BND = jnp.take_along_axis(hidden_BTD, place_BN[..., None], axis=1)
    return _losses(model, params, hidden_BND, continuation_BN)


@partial(jax.jit, static_argnames=('model', 'capacity'))
def score_soft(
    model: Any, params: Any, tokens_BP: jax.Array, lengths_B: jax.Array, *, continuation_BN: jax.Array, capacity: int
) -> TokenLosses:
    """(B, N) losses of continuations fed token by token, each fused with the state before it; prompts read plainly.

    capacity: positions that a prompt and its continuation come to. What is fed past a row's continuation is not read.
    """
    read = read_prompts(model, params, tokens_BP, lengths_B, num_passes=1, capacity=capacity)

    def step(carry: tuple[Any, jax.Array, jax.Array], token_B: jax.Array) -> tuple[Any, jax.Array]:
        cache, hidden_BD, position_B = carry
        fed_B1D, cache = model.apply(
            {'params': params},
            token_B[:, None],
            hidden_BD[:, None],
            plain_BT=jnp.zeros_like(token_B[:, None], bool),
            positions_BT=position_B[:, None],
            cache=cache,
        )
        return (cache, fed_B1D[:, 0], position_B + 1), hidden_BD

    first = (read.cache, constrain(read.hidden_BD, 'batch', None), lengths_B)
    _, hidden_NBD = jax.lax.scan(step, first, continuation_BN.T)
    return _losses(model, params, jnp.moveaxis(hidden_NBD, 0, 1), continuation_BN)


def _losses(model: Any, params: Any, hidden_BND: jax.Array, continuation_BN: jax.Array) -> TokenLosses:
    hidden_BND = constrain(hidden_BND, 'batch', 'length', 'state')
    vocab_size = model.config.vocab_size
    return replicated(token_losses(hidden_BND, head_table(params), continuation_BN, vocab_size=vocab_size))
