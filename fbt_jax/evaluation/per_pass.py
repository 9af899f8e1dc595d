"""Loss, accuracy and update norm after each number of passes, as exact sums over validation rows.

    update_norm_k = sqrt(mean over counted positions and width of (h^k - h^{k-1})^2),  k >= 2

Prefix mixin and jitter are off: only a document's first token is plain. Sums are kept by position within the
document's piece, so that a table by position needs no second run. Shapes: K passes, P = T positions within a
document. Sums on the device are float32 over one batch, float64 over batches.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbt_jax.batch import Batch
from fbt_jax.errors import UserError
from fbt_jax.losses import token_losses
from fbt_jax.model.transformer import head_table
from fbt_jax.passes import multi_pass
from fbt_jax.sharding import replicated


class BatchSums(NamedTuple):
    nll_KP: Any
    correct_KP: Any
    squared_update_KP: Any  # of h^k - h^{k-1}, mean over the width; entry 0 is against h^0 = 0
    tokens_P: Any
    bytes: Any  # of text that the counted targets stand for; None where tokens aren't text


class PassResults(NamedTuple):
    """Over all rows."""

    sums: BatchSums  # float64 numpy

    @property
    def bytes(self) -> int | None:
        return None if self.sums.bytes is None else int(self.sums.bytes)

    @property
    def tokens(self) -> float:
        return float(self.sums.tokens_P.sum())

    @property
    def loss_K(self) -> np.ndarray:
        """Nats per token."""
        return self.sums.nll_KP.sum(-1) / self.tokens

    @property
    def nats_per_byte_K(self) -> np.ndarray | None:
        return self.sums.nll_KP.sum(-1) / self.bytes if self.bytes else None

    @property
    def bits_per_byte_K(self) -> np.ndarray | None:
        return None if self.nats_per_byte_K is None else self.nats_per_byte_K / math.log(2)

    @property
    def update_norm_K(self) -> np.ndarray:
        return np.sqrt(self.sums.squared_update_KP.sum(-1) / self.tokens)

    @property
    def accuracy_K(self) -> np.ndarray:
        return self.sums.correct_KP.sum(-1) / self.tokens

    @property
    def accuracy_KP(self) -> np.ndarray:
        """By position within the document; NaN where no token was counted."""
        with np.errstate(invalid='ignore'):
            return self.sums.correct_KP / self.sums.tokens_P


def make_eval_step(
    model: Any, *, num_passes: int, token_bytes: np.ndarray | None = None
) -> Callable[[Any, Batch], BatchSums]:
    """Jitted (params, batch) -> sums of one batch, for passes 1..num_passes in one scan.

    token_bytes: (vocab_size,) int32, bytes of text of each id, where tokens are text. Call the step within the
    `jax.set_mesh` of its arguments; every process gets the sums over all rows.
    """

    def eval_step(params: Any, batch: Batch) -> BatchSums:
        seq_len = batch.tokens.shape[1]
        counted_BT = batch.weights > 0

        def by_position(values_BT: jax.Array) -> jax.Array:
            return jnp.zeros(seq_len, values_BT.dtype).at[batch.positions].add(jnp.where(counted_BT, values_BT, 0.0))

        def per_pass(hidden_BTD: jax.Array, last_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            losses = token_losses(hidden_BTD, head_table(params), batch.targets, vocab_size=model.config.vocab_size)
            update_BTD = (hidden_BTD - last_BTD).astype(jnp.promote_types(hidden_BTD.dtype, jnp.float32))
            return (
                by_position(losses.nll_BT),
                by_position(losses.correct_BT),
                by_position(jnp.mean(jnp.square(update_BTD), axis=-1)),
            )

        yields = multi_pass(model, params, batch, num_passes=num_passes, per_pass=per_pass).yields
        nll_KP, correct_KP, squared_update_KP = yields
        tokens_P = by_position(jnp.ones_like(batch.weights))
        text = (
            None if token_bytes is None else jnp.sum(jnp.where(counted_BT, jnp.asarray(token_bytes)[batch.targets], 0))
        )
        return replicated(BatchSums(nll_KP, correct_KP, squared_update_KP, tokens_P, text))

    return jax.jit(eval_step)


def evaluate_passes(
    eval_step: Callable[[Any, Batch], BatchSums],
    params: Any,
    batches: Iterable[Batch],
    *,
    poll: Callable[[], None] = lambda: None,
) -> PassResults:
    """Runs `eval_step` over all batches; `poll` is called between them and may raise to leave early."""
    sums: BatchSums | None = None
    for batch in batches:
        poll()
        part = jax.tree.map(lambda x: np.asarray(x, np.float64), eval_step(params, batch))
        sums = part if sums is None else jax.tree.map(np.add, sums, part)
    if sums is None:
        raise ValueError('no validation rows to evaluate')
    if not sums.tokens_P.any():
        raise UserError('the validation rows have no target that counts')
    return PassResults(sums)


def together(results: Iterable[PassResults]) -> PassResults:
    """Over the rows of all of them, each token counted once."""
    return PassResults(functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), (r.sums for r in results)))
