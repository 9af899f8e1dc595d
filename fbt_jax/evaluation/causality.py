"""Whether losses before a token depend on it: they must not, in any pass, or every score is too good.

Row b keeps its tokens before a cut c_b, those from it on become others, and targets stay: nll at t < c_b must not move.
The cuts of a batch are spread evenly over the rows' length. Shapes: K passes, B rows, T positions.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fbt_jax.batch import Batch
from fbt_jax.losses import token_losses
from fbt_jax.model.transformer import head_table
from fbt_jax.passes import multi_pass
from fbt_jax.sharding import replicated

TOLERANCE = 1e-5  # nats; on CPU nothing moves at all, elsewhere a kernel may round differently


def require_causal(model: Any, params: Any, batch: Batch, *, num_passes: int) -> None:
    """Raises RuntimeError, one line, if losses before the cut move. Call it within the mesh of the arguments."""
    change_K = loss_changes(model, params, batch, num_passes=num_passes)
    for k, change in enumerate(change_K.tolist(), start=1):
        if change > TOLERANCE:
            raise RuntimeError(
                f'the model sees tokens that it must predict: in pass {k} of {num_passes}, losses before a changed '
                f'token move by up to {change:.3g} nats (allowed: {TOLERANCE:g})'
            )


@partial(jax.jit, static_argnames=('model', 'num_passes'))
def loss_changes(model: Any, params: Any, batch: Batch, *, num_passes: int) -> jax.Array:
    """(K,): by how much the losses of each pass move at most, in nats."""
    rows, seq_len = batch.tokens.shape
    cuts_B1 = 1 + (jnp.arange(rows)[:, None] * 2 + 1) * (seq_len - 1) // (2 * rows)
    before_BT = (jnp.arange(seq_len) < cuts_B1) & (batch.segment_ids > 0)
    others_BT = jnp.where(before_BT, batch.tokens, (batch.tokens + 1) % model.config.vocab_size)

    def nll_of(hidden_BTD: jax.Array, _: jax.Array) -> jax.Array:
        return token_losses(hidden_BTD, head_table(params), batch.targets, vocab_size=model.config.vocab_size).nll_BT

    def losses(tokens_BT: jax.Array) -> jax.Array:
        changed = batch._replace(tokens=tokens_BT)
        return multi_pass(model, params, changed, num_passes=num_passes, per_pass=nll_of).yields

    # One program run twice, so that equal inputs give equal bits.
    original_KBT, other_KBT = jax.lax.map(losses, jnp.stack([batch.tokens, others_BT]))
    same_KBT = (original_KBT == other_KBT) | (jnp.isnan(original_KBT) & jnp.isnan(other_KBT))
    change_KBT = jnp.where(same_KBT | ~before_BT, 0.0, jnp.abs(original_KBT - other_KBT))
    # A number on one side only is a leak too.
    return replicated(jnp.max(jnp.where(jnp.isnan(change_KBT), jnp.inf, change_KBT), axis=(1, 2)))
