"""Packed rows of T tokens from documents. Row i is a pure function of (documents, seed, i).

`carry_over`: the stream is every document in a shuffled order (epoch 0), then in another (epoch 1), and so on; row i is
stream[iT : iT + T + 1] (method.md section 6), its first T tokens the inputs, its last T the targets. Rows cut documents
and epochs wherever they end; in each epoch every token but a BOS is a target once. `best_fit`: a document is cut into
pieces of T targets, and what is left at its end goes into the fullest row that has room for it; rows are filled up with
padding. Nothing is dropped here either, and the composition of the rows is the same in every epoch, their order isn't.
Either way each piece starts anew: a segment of its own, positions from 0.
N is a number of tokens, R of rows, P of pieces.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fbt_jax.batch import Batch
from fbt_jax.data.documents import Documents, Parts
from fbt_jax.data.order import Order

# What an endless source reports as its length: past every step a run could reach, within what len() may return.
ENDLESS = 2**62


class StreamRows:
    """Rows cut from the stream of documents: endless with a seed, else each document once, in order, then padding."""

    def __init__(self, documents: Documents, *, seq_len: int, seed: int | None) -> None:
        self._documents, self._seq_len = documents, seq_len
        self._order = Order(documents.documents_S, documents.tokens_S, documents.lengths, seed=seed)
        tokens = self._order.epoch_length
        self._end = ENDLESS * seq_len if seed is not None else tokens
        self.num_rows = ENDLESS if seed is not None else -(-(tokens - 1) // seq_len)  # all but the first are targets
        self.epoch_rows = (tokens - 1) // seq_len  # rows that lie whole in the first epoch

    def batch(self, rows: Sequence[int]) -> Batch:
        """Those rows, (len(rows), T); rows past a finite source's end are padding."""
        runs = [self._read(run) for run in consecutive(rows)]
        return runs[0] if len(runs) == 1 else Batch(*map(np.concatenate, zip(*runs, strict=True)))

    def documents(self, rows: Sequence[int]) -> list[np.ndarray]:
        """Which document of the source each segment of those rows belongs to, in order; for finite sources.

        All pieces of a document, in whatever rows, have its number.
        """
        before_S = np.cumsum(self._documents.documents_S) - self._documents.documents_S
        found = []
        for row in rows:
            start, stop = row * self._seq_len, min((row + 1) * self._seq_len, self._end - 1)
            parts = self._order.parts(start, stop) if start < stop else NO_PARTS
            found.append(before_S[parts.shard] + parts.unit)
        return found

    def epochs(self, rows: int) -> float:
        """How often the source has been read after so many rows."""
        return rows * self._seq_len / self._order.epoch_length

    def _read(self, run: range) -> Batch:
        seq_len = self._seq_len
        start, stop = run.start * seq_len, run.stop * seq_len + 1
        parts = self._order.parts(start, min(stop, self._end)) if start < self._end else NO_PARTS
        pieces = self._documents.read(parts)
        stream_N = np.concatenate(pieces) if pieces else np.zeros(0, np.uint16)
        counts_N, ids_N = unmasked(stream_N, self._documents.masks)
        ends_P = np.cumsum(parts.stop - parts.start)
        document_starts = (ends_P - (parts.stop - parts.start))[parts.start == 0]
        counts_N[document_starts] = False  # another document precedes a BOS

        missing = stop - start - len(ids_N)
        ids_N = np.concatenate([ids_N, np.zeros(missing, np.int32)])
        counts_N = np.concatenate([counts_N, np.zeros(missing, bool)])
        begins_N = np.zeros(len(ids_N), bool)
        begins_N[document_starts] = True
        shape = (len(run), seq_len)
        begins_RT = begins_N[:-1].reshape(shape)
        begins_RT[:, 0] = True  # the rest of a document that began in an earlier row is a piece of its own
        # A token whose successor is beyond the end predicts nothing: it is padding, as all after it.
        real_RT = (np.arange(len(ids_N) - 1) < len(ids_N) - missing - 1).reshape(shape)
        begins_RT |= np.diff(real_RT, axis=1, prepend=True)
        index_T = np.arange(seq_len, dtype=np.int32)
        return Batch(
            tokens=np.where(real_RT, ids_N[:-1].reshape(shape), 0),
            targets=np.where(real_RT, ids_N[1:].reshape(shape), 0),
            weights=counts_N[1:].reshape(shape).astype(np.float32),
            segment_ids=np.where(real_RT, np.cumsum(begins_RT, axis=1, dtype=np.int32), 0),
            positions=index_T - np.maximum.accumulate(np.where(begins_RT, index_T, 0), axis=1),
        )


class BestFitRows:
    """Endless rows of whole documents, or of pieces of those that are longer than a row, padded."""

    def __init__(self, documents: Documents, *, seq_len: int, seed: int) -> None:
        self._documents, self._seq_len = documents, seq_len
        self._layout = functools.lru_cache(maxsize=256)(self._make_layout)
        rows_S = np.array([self._layout(shard).num_rows for shard in range(len(documents.documents_S))], np.int64)
        self._order = Order(rows_S, rows_S, None, seed=seed)
        self.num_rows = ENDLESS
        self.epoch_rows = self._order.epoch_length
        targets = int(documents.tokens_S.sum() - documents.documents_S.sum())
        self.padding = 1 - targets / (self.epoch_rows * seq_len)  # share of the positions

    def batch(self, rows: Sequence[int]) -> Batch:
        """Those rows, (len(rows), T)."""
        found = [self._order.parts(run.start, run.stop) for run in consecutive(rows)]
        layouts = [
            self._layout(int(shard)).row(int(shard), int(row))
            for parts in found
            for shard, row in zip(parts.shard, parts.unit, strict=True)
        ]
        pieces = iter(self._documents.read(Parts(*map(np.concatenate, zip(*layouts, strict=True)))))
        out = padding(self._seq_len, len(layouts))
        for number, parts in enumerate(layouts):
            place = 0
            for segment, tokens in enumerate(itertools.islice(pieces, len(parts.unit)), start=1):
                counts_N, ids_N = unmasked(tokens, self._documents.masks)
                here = (number, slice(place, place + len(tokens) - 1))
                out.tokens[here], out.targets[here], out.weights[here] = ids_N[:-1], ids_N[1:], counts_N[1:]
                out.segment_ids[here], out.positions[here] = segment, np.arange(len(tokens) - 1)
                place += len(tokens) - 1
            out.positions[number, place:] = np.arange(self._seq_len - place)
        return out

    def epochs(self, rows: int) -> float:
        return rows / self.epoch_rows

    def _make_layout(self, shard: int) -> '_Layout':
        return best_fit(self._documents.lengths(shard), self._seq_len)


class _Layout(NamedTuple):
    """Pieces of a shard's documents sorted by row; row r has those from bounds[r] to bounds[r + 1]."""

    unit_P: np.ndarray
    start_P: np.ndarray
    stop_P: np.ndarray
    bounds: np.ndarray  # (R + 1,)

    @property
    def num_rows(self) -> int:
        return len(self.bounds) - 1

    def row(self, shard: int, row: int) -> Parts:
        chosen = slice(self.bounds[row], self.bounds[row + 1])
        unit = self.unit_P[chosen]
        return Parts(np.full(len(unit), shard), unit, self.start_P[chosen], self.stop_P[chosen])


def best_fit(lengths_D: np.ndarray, seq_len: int) -> _Layout:
    """Documents of these lengths (BOS and EOS counted) in rows of `seq_len`, best-fit decreasing.

    A piece of n + 1 tokens takes n positions: its last token is a target only.
    """
    pieces_D = -(-(lengths_D - 1) // seq_len)
    unit_P = np.repeat(np.arange(len(lengths_D)), pieces_D)
    number_P = np.arange(len(unit_P)) - np.repeat(np.cumsum(pieces_D) - pieces_D, pieces_D)
    start_P = number_P * seq_len
    stop_P = np.minimum(start_P + seq_len, lengths_D[unit_P] - 1) + 1
    size_P = stop_P - 1 - start_P
    row_P = np.empty(len(unit_P), np.int64)
    # Open rows by the room they have; the bits of `rooms` say which rooms there are, so that the least that is
    # enough is found by arithmetic on one integer.
    by_room: list[list[int]] = [[] for _ in range(seq_len + 1)]
    rooms = rows = 0
    for piece in np.argsort(-size_P, kind='stable').tolist():
        size = int(size_P[piece])
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, row = seq_len, rows
            rows += 1
        row_P[piece] = row
        if room > size:
            by_room[room - size].append(row)
            rooms |= 1 << (room - size)
    order_P = np.argsort(row_P, kind='stable')
    bounds = np.searchsorted(row_P[order_P], np.arange(rows + 1))
    return _Layout(unit_P[order_P], start_P[order_P], stop_P[order_P], bounds)


NO_PARTS = Parts(*(np.zeros(0, np.int64),) * 4)


def consecutive(rows: Sequence[int]) -> Iterator[range]:
    """`rows` as ranges of numbers that follow one another."""
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            yield range(rows[start], rows[i - 1] + 1)
            start = i


def unmasked(tokens_N: np.ndarray, masks: bool) -> tuple[np.ndarray, np.ndarray]:
    """(which tokens count as targets, the ids as int32) of tokens as they are stored, see documents.py."""
    if not masks:
        return np.ones(len(tokens_N), bool), tokens_N.astype(np.int32)
    top = tokens_N.dtype.type(1 << (8 * tokens_N.dtype.itemsize - 1))
    return tokens_N < top, (tokens_N & ~top).astype(np.int32)


def padding(seq_len: int, rows: int) -> Batch:
    """Rows that count for nothing, (rows, T): weight 0, segment 0."""
    return Batch(
        tokens=np.zeros((rows, seq_len), np.int32),
        targets=np.zeros((rows, seq_len), np.int32),
        weights=np.zeros((rows, seq_len), np.float32),
        segment_ids=np.zeros((rows, seq_len), np.int32),
        positions=np.tile(np.arange(seq_len, dtype=np.int32), (rows, 1)),
    )
