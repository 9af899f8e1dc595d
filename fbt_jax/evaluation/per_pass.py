"""Loss, accuracy and update norm after each number of passes, as exact sums over validation rows.

    update_norm_k = sqrt(mean over counted positions and width of (h^k - h^{k-1})^2),  k >= 2

Prefix mixin and jitter are off: only a document's first token is plain. Sums are kept by position within the
document's piece, so that a table by position needs no second run; and, if asked, by document, for intervals: all
pieces of a document, in whatever rows packing put them, are one. Shapes: K passes, P = T positions within a document, B
rows, S = T + 1 segments of a row (0 is padding), U documents. Sums on the device are float32 over one batch (by
document over one piece), float64 beyond.
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
from fbt_jax.inference.recurrence import recurrent_states
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


class SegmentSums(NamedTuple):
    nll_KBS: Any
    tokens_BS: Any
    bytes_BS: Any  # None where tokens aren't text


class DocumentSums(NamedTuple):
    """Of the documents with tokens that count, float64 numpy."""

    nll_KU: np.ndarray
    tokens_U: np.ndarray
    bytes_U: np.ndarray | None


class PassResults(NamedTuple):
    """Over all rows."""

    sums: BatchSums  # float64 numpy
    documents: DocumentSums | None = None  # where asked for

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


EvalStep = Callable[[Any, Batch], tuple[BatchSums, SegmentSums | None]]


def make_eval_step(
    model: Any,
    *,
    num_passes: int,
    token_bytes: np.ndarray | None = None,
    by_segment: bool = False,
    soft: bool = False,
) -> EvalStep:
    """Jitted (params, batch) -> sums of one batch, for passes 1..num_passes in one scan.

    token_bytes: (vocab_size,) int32, bytes of text of each id, where tokens are text. by_segment: give sums by segment
    too. soft: behind the passes comes one entry more, the exact recurrence (its update is from the last pass's states);
    positions must lie undivided then. Call the step within the `jax.set_mesh` of its arguments; every process gets the
    sums over all rows.
    """

    def eval_step(params: Any, batch: Batch) -> tuple[BatchSums, SegmentSums | None]:
        seq_len = batch.tokens.shape[1]
        counted_BT = batch.weights > 0

        def by_position(values_BT: jax.Array) -> jax.Array:
            return jnp.zeros(seq_len, values_BT.dtype).at[batch.positions].add(jnp.where(counted_BT, values_BT, 0.0))

        def in_segments(values_BT: jax.Array) -> jax.Array:
            shape, rows_B1 = (len(values_BT), seq_len + 1), jnp.arange(len(values_BT))[:, None]
            return (
                jnp.zeros(shape, values_BT.dtype)
                .at[rows_B1, batch.segment_ids]
                .add(jnp.where(counted_BT, values_BT, 0))
            )

        def per_pass(hidden_BTD: jax.Array, last_BTD: jax.Array) -> tuple[Any, ...]:
            losses = token_losses(hidden_BTD, head_table(params), batch.targets, vocab_size=model.config.vocab_size)
            update_BTD = (hidden_BTD - last_BTD).astype(jnp.promote_types(hidden_BTD.dtype, jnp.float32))
            return (
                by_position(losses.nll_BT),
                by_position(losses.correct_BT),
                by_position(jnp.mean(jnp.square(update_BTD), axis=-1)),
                in_segments(losses.nll_BT) if by_segment else None,
            )

        last_BTD, yields = multi_pass(model, params, batch, num_passes=num_passes, per_pass=per_pass)
        if soft:
            exact = per_pass(recurrent_states(model, params, batch), last_BTD)
            yields = jax.tree.map(lambda passes, one: jnp.concatenate([passes, one[None]]), yields, exact)
        nll_KP, correct_KP, squared_update_KP, nll_KBS = yields
        ones_BT = jnp.ones_like(batch.weights)
        bytes_BT = None if token_bytes is None else jnp.asarray(token_bytes)[batch.targets]
        text = None if bytes_BT is None else jnp.sum(jnp.where(counted_BT, bytes_BT, 0))
        sums = BatchSums(nll_KP, correct_KP, squared_update_KP, by_position(ones_BT), text)
        if not by_segment:
            return replicated(sums), None
        bytes_BS = None if bytes_BT is None else in_segments(bytes_BT)
        return replicated((sums, SegmentSums(nll_KBS, in_segments(ones_BT), bytes_BS)))

    return jax.jit(eval_step)


def evaluate_passes(
    eval_step: EvalStep,
    params: Any,
    batches: Iterable[Batch],
    *,
    documents: Iterable[list[np.ndarray]] | None = None,
    poll: Callable[[], None] = lambda: None,
) -> PassResults:
    """Runs `eval_step` over all batches; `poll` is called between them and may raise to leave early.

    documents: of each batch and each of its rows, which document each segment belongs to; for sums by document.
    """
    sums: BatchSums | None = None
    pieces: list[tuple[np.ndarray, DocumentSums]] = []
    of_batch = None if documents is None else iter(documents)
    for batch in batches:
        poll()
        part, segments = jax.tree.map(lambda x: np.asarray(x, np.float64), eval_step(params, batch))
        sums = part if sums is None else jax.tree.map(np.add, sums, part)
        if of_batch is not None:
            pieces.append(_pieces(segments, next(of_batch)))
    if sums is None:
        raise ValueError('no validation rows to evaluate')
    if not sums.tokens_P.any():
        raise UserError('the validation rows have no target that counts')
    return PassResults(sums, _by_document(pieces) if pieces else None)


def _pieces(segments: SegmentSums, documents: list[np.ndarray]) -> tuple[np.ndarray, DocumentSums]:
    """The documents of a batch's pieces, and the sums of each piece."""
    row = np.repeat(np.arange(len(documents)), [len(numbers) for numbers in documents])
    segment = np.concatenate([1 + np.arange(len(numbers)) for numbers in documents])
    nll_KP, tokens_P, bytes_P = jax.tree.map(lambda x: x[..., row, segment], tuple(segments))
    return np.concatenate(documents), DocumentSums(nll_KP, tokens_P, bytes_P)


def _by_document(pieces: list[tuple[np.ndarray, DocumentSums]]) -> DocumentSums:
    known, place = np.unique(np.concatenate([numbers for numbers, _ in pieces]), return_inverse=True)

    def add(*parts: np.ndarray) -> np.ndarray:
        whole = np.concatenate(parts, axis=-1)
        out = np.zeros((len(known), *whole.shape[:-1]))
        np.add.at(out, place, np.moveaxis(whole, -1, 0))
        return np.moveaxis(out, 0, -1)

    sums: DocumentSums = jax.tree.map(add, *(part for _, part in pieces))
    return jax.tree.map(lambda x: x[..., sums.tokens_U > 0], sums)


def places(passes: Iterable[int], soft: bool = False) -> dict[str, int]:
    """By name, where a result's entries stand: those of numbers of passes, and of the recurrence behind all passes."""
    return {str(k): k - 1 for k in passes} | ({'soft': -1} if soft else {})


def together(results: Iterable[PassResults]) -> PassResults:
    """Over the rows of all of them, each token counted once; documents of different sets are different ones."""
    results = list(results)
    sums = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), (r.sums for r in results))
    documents = [r.documents for r in results if r.documents is not None]
    if len(documents) < len(results):
        return PassResults(sums)
    return PassResults(sums, jax.tree.map(lambda *parts: np.concatenate(parts, axis=-1), *documents))
