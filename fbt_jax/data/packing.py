"""Packed rows: fixed-length windows over an endless stream of whole documents. Row i is a pure function of (seed, i).

The stream is every document in a shuffled order (epoch 0), then again in another order (epoch 1), and so on; a
document is [BOS, its tokens, EOS]. Row i is stream[iT : iT + T + 1] (method.md section 6): its first T tokens are the
inputs, its last T the targets. So rows cut documents and epochs wherever they end, and nothing is dropped or repeated:
in each epoch every token but a BOS is a target once. A BOS never counts as a target: another document precedes it.
T is the row's length, N a number of tokens, D of documents.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fbt_jax.batch import Batch
from fbt_jax.data.tokenizer import Tokenizer

# What an endless source reports as its length: past every step a run could reach, within what len() may return.
ENDLESS = 2**62


class Documents(NamedTuple):
    """Tokenised documents in one flat array; document d goes from starts[d] to starts[d + 1] or the end."""

    tokens: np.ndarray  # (N,) uint16 or uint32, each document with its BOS and EOS
    starts: np.ndarray  # (D,) int64
    bos_id: int


def tokenise(texts: Sequence[str], tokenizer: Tokenizer) -> Documents:
    """`texts` as documents, in their order, BOS before and EOS after each."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    pieces = [np.array([bos, *ids, eos], dtype) for ids in tokenizer.encode_batch(texts)]
    lengths_D = np.array([len(piece) for piece in pieces], np.int64)
    return Documents(np.concatenate(pieces), np.cumsum(lengths_D) - lengths_D, bos)


def to_row(stream: np.ndarray, bos_id: int) -> Batch:
    """One unpadded row, arrays of shape (T,), from its T + 1 tokens of the stream."""
    tokens_T, targets_T = stream[:-1].astype(np.int32), stream[1:].astype(np.int32)
    index_T = np.arange(len(tokens_T), dtype=np.int32)
    starts_piece_T = tokens_T == bos_id
    starts_piece_T[0] = True  # the rest of a document that began in an earlier row is a piece of its own
    return Batch(
        tokens=tokens_T,
        targets=targets_T,
        weights=(targets_T != bos_id).astype(np.float32),
        segment_ids=np.cumsum(starts_piece_T, dtype=np.int32),
        positions=index_T - np.maximum.accumulate(np.where(starts_piece_T, index_T, 0)),
    )


def shuffled(count: int, *, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(count), int64, that depends on (seed, epoch) alone."""
    # Sorting raw bits rather than Generator.permutation: NumPy promises the bits of Philox for good, its methods not.
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(count)
    return np.argsort(bits, kind='stable')


class _Epoch(NamedTuple):
    ends: np.ndarray  # (D,), where the epoch's d-th document ends, from the epoch's start
    shift: np.ndarray  # (D,), added to a position in the epoch it gives the token's index in Documents.tokens


class PackedRows:
    """Endless training rows: a random-access source of `Batch`es of (T,) arrays, safe to read from several threads."""

    def __init__(self, documents: Documents, *, seq_len: int, seed: int) -> None:
        self._documents = documents
        self._seq_len = seq_len
        self._seed = seed
        self._epoch_tokens = len(documents.tokens)
        self._epoch = functools.lru_cache(maxsize=4)(self._shuffle)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < ENDLESS:
            raise IndexError(f'row {index} of an endless source')
        start = index * self._seq_len
        stop = start + self._seq_len + 1
        epochs = range(start // self._epoch_tokens, (stop - 1) // self._epoch_tokens + 1)
        stream = [self._read(epoch, start=start, stop=stop) for epoch in epochs]
        return to_row(stream[0] if len(stream) == 1 else np.concatenate(stream), self._documents.bos_id)

    def _shuffle(self, epoch: int) -> _Epoch:
        tokens_N, starts_D, _ = self._documents
        order_D = shuffled(len(starts_D), seed=self._seed, epoch=epoch)
        lengths_D = np.diff(starts_D, append=len(tokens_N))[order_D]
        ends_D = np.cumsum(lengths_D)
        return _Epoch(ends=ends_D, shift=starts_D[order_D] - (ends_D - lengths_D))

    def _read(self, epoch: int, *, start: int, stop: int) -> np.ndarray:
        """The part of stream[start:stop] that lies in `epoch`."""
        origin = epoch * self._epoch_tokens
        first, last = max(start - origin, 0), min(stop - origin, self._epoch_tokens) - 1
        ends_D, shift_D = self._epoch(epoch)
        position = np.arange(first, last + 1)
        begin, end = np.searchsorted(ends_D, (first, last), side='right')
        document = begin + np.searchsorted(ends_D[begin:end], position, side='right')
        return self._documents.tokens[position + shift_D[document]]


class ValidationRows:
    """Each document once, in order: a finite source of `Batch`es of (T,) arrays, the last row padded."""

    def __init__(self, documents: Documents, *, seq_len: int) -> None:
        self._documents = documents
        self._seq_len = seq_len

    def __len__(self) -> int:
        return -(-(len(self._documents.tokens) - 1) // self._seq_len)  # every token but the first is a target

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f'row {index} of {len(self)}')
        start = index * self._seq_len
        row = to_row(self._documents.tokens[start : start + self._seq_len + 1], self._documents.bos_id)
        return padded(row, self._seq_len)


def padding(seq_len: int) -> Batch:
    """A row of (T,) arrays that counts for nothing: weight 0, segment 0."""
    zeros_T = np.zeros(seq_len, np.int32)
    return Batch(
        tokens=zeros_T,
        targets=zeros_T,
        weights=np.zeros(seq_len, np.float32),
        segment_ids=zeros_T,
        positions=np.arange(seq_len, dtype=np.int32),
    )


def padded(row: Batch, seq_len: int) -> Batch:
    """`row` filled up to `seq_len` with padding, whose positions count from 0 too."""
    missing = seq_len - len(row.tokens)
    return row if missing == 0 else Batch(*map(np.concatenate, zip(row, padding(missing), strict=True)))
