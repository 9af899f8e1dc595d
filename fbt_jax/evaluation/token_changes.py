"""Which tokens feedback makes cheaper: the loss of each validation token after passes 1..K, beside its text.

    difference = nll after pass K - nll after pass 1,  nats;   below 0 the token got cheaper

Shapes: K passes, B rows of a batch, T positions, N counted tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbt_jax.batch import Batch
from fbt_jax.evaluation.intervals import ratios
from fbt_jax.evaluation.report_figures import difference_histogram
from fbt_jax.evaluation.report_page import SHADES, Block, Passage, Shades, Table, Text, Token
from fbt_jax.losses import token_losses
from fbt_jax.model.transformer import head_table
from fbt_jax.passes import multi_pass
from fbt_jax.sharding import replicated

PASSAGES, PASSAGE_TOKENS = 4, 160
LEAST_OCCURRENCES = 50  # of a token, to be named among those that change most
NAMED = 10


class Losses(NamedTuple):
    """Numpy, of all rows."""

    nll_KBT: np.ndarray
    inputs_BT: np.ndarray
    targets_BT: np.ndarray
    counted_BT: np.ndarray
    segments_BT: np.ndarray

    @property
    def difference_N(self) -> np.ndarray:
        return (self.nll_KBT[-1] - self.nll_KBT[0])[self.counted_BT]


def make_token_losses(model: Any, *, num_passes: int) -> Callable[[Any, Batch], Any]:
    """Jitted (params, batch) -> nll (K, B, T) and the batch; every process gets all rows."""

    @jax.jit
    def losses_of(params: Any, batch: Batch) -> Any:
        def per_pass(hidden_BTD: jax.Array, _: jax.Array) -> jax.Array:
            return token_losses(
                hidden_BTD, head_table(params), batch.targets, vocab_size=model.config.vocab_size
            ).nll_BT

        yields = multi_pass(model, params, batch, num_passes=num_passes, per_pass=per_pass).yields
        return replicated((yields, batch.tokens, batch.targets, batch.weights > 0, jnp.asarray(batch.segment_ids)))

    return losses_of


def measure(losses_of: Callable[[Any, Batch], Any], params: Any, batches: Iterable[Batch]) -> Losses:
    parts = [[np.asarray(x) for x in losses_of(params, batch)] for batch in batches]
    nll, *others = zip(*parts, strict=True)
    return Losses(np.concatenate(nll, axis=1), *(np.concatenate(x) for x in others))


def change_blocks(losses: Losses, name_of: Callable[[int], str]) -> list[Block]:
    """Summary, histogram, the tokens that change most, passages. `name_of`: an id's text."""
    difference_N = losses.difference_N
    if not np.isfinite(difference_N).all():
        return [Text('Not every loss is finite.', 'missing')]
    passes, edge = len(losses.nll_KBT), SHADES[0]
    cheaper, dearer = difference_N <= -edge, difference_N >= edge

    def side(chosen_N: np.ndarray, told: str) -> str:
        by = f', by {abs(difference_N[chosen_N].mean()):.3f} nats on average' if chosen_N.any() else ''
        return f'{chosen_N.mean():.1%} of them got {told} by {edge} nats or more{by}'

    summary = (
        f'{len(difference_N):,} tokens of {len(losses.counted_BT)} validation rows, their loss after {passes} passes '
        f'less that after 1: {difference_N.mean():+z.4f} nats on average, {np.median(difference_N):+z.4f} in the '
        f'median. {side(cheaper, "cheaper")}; {side(dearer, "dearer")}.'
    )
    return [
        Text(summary),
        difference_histogram(difference_N, passes),
        *_named(losses, name_of),
        Text(f'Each token by its loss after {passes} passes less that after 1, in nats; grey: no loss is counted.'),
        Text('Hover, touch or arrow keys give the numbers.', 'hint'),
        Shades('cheaper', 'dearer'),
        *_passages(losses, name_of),
    ]


def _named(losses: Losses, name_of: Callable[[int], str]) -> list[Table]:
    """The ids whose mean changes most, on either side, among those that occur often enough."""
    ids_N, count_N = np.unique(losses.targets_BT[losses.counted_BT], return_inverse=True)
    occurrences = np.bincount(count_N)
    first, last = (np.bincount(count_N, losses.nll_KBT[k][losses.counted_BT]) / occurrences for k in (0, -1))
    change = np.round(last - first, 3)  # as it is shown
    often = np.flatnonzero(occurrences >= LEAST_OCCURRENCES)
    order = often[np.argsort(change[often], stable=True)]
    head = ('token', 'times', 'after pass 1', f'after {len(losses.nll_KBT)}', 'difference', '95 % interval')
    tables = []
    for told, chosen in (('cheapest', order[:NAMED]), ('dearest', order[::-1][:NAMED])):
        rows = [
            (
                repr(name_of(int(ids_N[i]))),
                f'{occurrences[i]:,}',
                f'{first[i]:.3f}',
                f'{last[i]:.3f}',
                f'{change[i]:+z.3f}',
                _interval(losses, int(ids_N[i])),
            )
            for i in chosen
            if (change[i] < 0 if told == 'cheapest' else change[i] > 0)
        ]
        if rows:
            side = 'cheaper' if told == 'cheapest' else 'dearer'
            caption = (
                f'Tokens that got {side} most, mean loss in nats, of the {len(often):,} that occur {LEAST_OCCURRENCES} '
                'times or more. Chosen as extremes: by themselves they would change less. Intervals over the '
                'pieces of documents in which a token occurs (a row holds pieces).'
            )
            tables.append(Table(caption, head, rows))
    return tables


def _interval(losses: Losses, id_: int) -> str:
    """Of the mean difference of one target, over those pieces of documents in which it occurs."""
    at_N = losses.targets_BT[losses.counted_BT] == id_
    rows_BT = np.broadcast_to(np.arange(len(losses.counted_BT))[:, None], losses.counted_BT.shape)
    pieces_N = np.stack([rows_BT, losses.segments_BT], -1)[losses.counted_BT][at_N]
    _, piece_N = np.unique(pieces_N, axis=0, return_inverse=True)
    found = ratios(np.bincount(piece_N, losses.difference_N[at_N])[None], np.bincount(piece_N))
    low, high = float(found.low_C[0]), float(found.high_C[0])
    return f'{low:+z.3f} to {high:+z.3f}' if low <= high else 'unknown, in one piece'


def _passages(losses: Losses, name_of: Callable[[int], str]) -> list[Passage]:
    """The beginnings of the longest pieces of some rows, evenly spread."""
    count = min(PASSAGES, len(losses.counted_BT))
    passages: list[Passage] = []
    for number in range(count):
        row = number * len(losses.counted_BT) // count
        segments_T = losses.segments_BT[row]
        if not segments_T.any():
            continue
        at = np.flatnonzero(segments_T == np.argmax(np.bincount(segments_T[segments_T > 0])))[:PASSAGE_TOKENS]
        first = int(losses.inputs_BT[row, at[0]])
        tokens, changes = [Token(name_of(first), first, ())], [0.0]
        for t in at:
            target = int(losses.targets_BT[row, t])
            if losses.counted_BT[row, t]:
                nll = losses.nll_KBT[:, row, t].tolist()
                tokens.append(Token(name_of(target), target, nll))
                changes.append(nll[-1] - nll[0])
            elif t + 1 in at:  # a prompt's, say; what follows the piece's last token is another document
                tokens.append(Token(name_of(target), target, ()))
        change = sum(changes) / max(1, len(changes) - 1)
        passages.append(Passage(f'Passage {len(passages) + 1}: {change:+z.3f} nats a token on average', tokens))
    return passages


def token_names(tokenizer: Any) -> Callable[[int], str]:
    """An id's text within a text, with the special tokens by name."""
    special: dict[int, str] = {getattr(tokenizer, f'{name}_id'): f'⟨{name}⟩' for name in ('bos', 'eos')}
    before = tokenizer.encode('a')
    return lambda id_: special.get(id_) or tokenizer.decode([id_], after=before)


def continuation_columns(found: Sequence[tuple[str, Any]], row: int) -> list[tuple[str, str, str]]:
    """(mode, text, remark) of the `row`-th of each mode's generations."""
    ends = {'eos': 'ended by itself', 'length': 'cut off', 'stop': 'stopped'}
    told = []
    for mode, result in found:
        log_probs = result.log_probs[row]
        loss = f'; {-sum(log_probs) / len(log_probs):.2f} nats per token' if log_probs else ''
        told.append((mode, result.texts[row], f'{len(result.tokens[row])} tokens, {ends[result.finished[row]]}{loss}'))
    return told
