"""Tokenised documents, read a part at a time: in memory, or from the shards that prepare.py writes.

A document is [BOS, its tokens, EOS]. Shards hold about as many tokens each, or documents if these are short; a document
is known by its shard and its number there. On disk a shard is an ArrayRecord file and the lengths of its documents
(shard-00000.npy); a document of n tokens is ceil(n / RECORD_TOKENS) records of them, little-endian uint16 or uint32.
Where targets are masked, the top bit of a token says that it counts for no loss. index.json is written last: without it
a folder is not complete.
S shards, D documents of a shard, P parts of documents.
"""

import functools
import hashlib
import io
import json
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from fbt_jax.errors import UserError

FORMAT = 'fbt_jax documents 1'
RECORD_TOKENS = 2**14  # what a row that starts in the middle of a long document reads in vain, at most
OPEN_SHARDS = 128


class Parts(NamedTuple):
    """Parts of documents: tokens [start, stop) of document `unit` of `shard`, arrays of shape (P,)."""

    shard: np.ndarray
    unit: np.ndarray
    start: np.ndarray
    stop: np.ndarray


class Documents(Protocol):
    """Documents of one source. Reading is thread-safe and repeatable."""

    documents_S: np.ndarray  # (S,) int64, documents of each shard
    tokens_S: np.ndarray  # (S,) int64, their tokens
    fingerprint: str  # sha256 (hex) of the documents, their order and the tokenizer
    masks: bool  # whether a token's top bit says that it is no target

    def lengths(self, shard: int) -> np.ndarray:
        """(D,) int64: the tokens of each of the shard's documents, BOS and EOS among them."""
        ...

    def read(self, parts: Parts) -> list[np.ndarray]:
        """The tokens of each part, unsigned integers."""
        ...


class InMemory:
    """Documents in one flat array: a single shard."""

    masks = False

    def __init__(self, tokens_N: np.ndarray, lengths_D: np.ndarray, fingerprint: str) -> None:
        self._tokens_N = tokens_N
        self._lengths_D = lengths_D
        self._starts_D = np.cumsum(lengths_D) - lengths_D
        self.documents_S = np.array([len(lengths_D)], np.int64)
        self.tokens_S = np.array([len(tokens_N)], np.int64)
        self.fingerprint = fingerprint

    def lengths(self, shard: int) -> np.ndarray:
        return self._lengths_D

    def read(self, parts: Parts) -> list[np.ndarray]:
        origin_P = self._starts_D[parts.unit]
        return [self._tokens_N[a:b] for a, b in zip(origin_P + parts.start, origin_P + parts.stop, strict=True)]


class Prepared:
    """The documents of a folder that `fbt data prepare` made.

    Raises:
      UserError: the folder is none such or not complete, a shard is missing or cut short; in reading, one is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.index = read_index(folder)
        self.documents_S = np.array([shard['documents'] for shard in self.index['shards']], np.int64)
        self.tokens_S = np.array([shard['tokens'] for shard in self.index['shards']], np.int64)
        self.fingerprint = self.index['fingerprint']
        self.masks = self.index['masks']
        self._dtype = np.dtype(self.index['dtype']).newbyteorder('<')
        self._lengths = functools.lru_cache(maxsize=OPEN_SHARDS)(self._load_lengths)
        self._reader = functools.lru_cache(maxsize=OPEN_SHARDS)(self._open_reader)
        _raise_file_limit()
        for shard, entry in enumerate(self.index['shards']):
            path = self.folder / f'{shard_name(shard)}.array_record'
            if not path.is_file() or path.stat().st_size != entry['size']:
                raise self._damaged(shard, f'must have {entry["size"]} bytes')

    def lengths(self, shard: int) -> np.ndarray:
        return self._lengths(shard)[0]

    def read(self, parts: Parts) -> list[np.ndarray]:
        out: list[Any] = [None] * len(parts.shard)
        for shard in np.unique(parts.shard).tolist():
            places = np.flatnonzero(parts.shard == shard)
            chosen = Parts(*(x[places] for x in parts))
            for place, tokens in zip(places.tolist(), self._read_shard(shard, chosen), strict=True):
                out[place] = tokens
        return out

    def _read_shard(self, shard: int, parts: Parts) -> list[np.ndarray]:
        first_record_D, reader = self._lengths(shard)[1], self._reader(shard)
        first_P = first_record_D[parts.unit]
        begin_P, end_P = first_P + parts.start // RECORD_TOKENS, first_P + (parts.stop - 1) // RECORD_TOKENS + 1
        numbers = np.unique(np.concatenate([np.arange(a, b) for a, b in zip(begin_P, end_P, strict=True)])).tolist()
        try:
            found = dict(zip(numbers, reader.read(numbers), strict=True))
        except (ValueError, RuntimeError, IndexError) as error:
            raise self._damaged(shard, f'records {numbers[0]} to {numbers[-1]}: {_brief(error)}') from None
        out = []
        for begin, end, start, stop in zip(begin_P, end_P, parts.start, parts.stop, strict=True):
            data = found[begin] if end == begin + 1 else b''.join(found[r] for r in range(begin, end))
            tokens = np.frombuffer(data, self._dtype)
            skip = start // RECORD_TOKENS * RECORD_TOKENS
            out.append(tokens[start - skip : stop - skip])
            if len(out[-1]) != stop - start:
                raise self._damaged(shard, f'record {begin} is shorter than its lengths say')
        return out

    def _load_lengths(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each document: its tokens, and its first record."""
        path = self.folder / f'{shard_name(shard)}.npy'
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise self._damaged(shard, f'{path.name} is not there') from None
        if hashlib.sha256(data).hexdigest() != self.index['shards'][shard]['lengths_sha256']:
            raise self._damaged(shard, f'{path.name} is not what index.json says')
        lengths_D = np.load(io.BytesIO(data)).astype(np.int64)
        records_D = -(-lengths_D // RECORD_TOKENS)
        return lengths_D, np.cumsum(records_D) - records_D

    def _open_reader(self, shard: int) -> Any:
        from array_record.python.array_record_module import ArrayRecordReader

        path = f'{self.folder / shard_name(shard)}.array_record'
        with open(path, 'rb'):  # whose own errors say what is wrong: no permission, too many open files  # noqa: PTH123
            pass
        try:
            # Reading ahead is for reading in order; what is read here is known beforehand.
            reader = ArrayRecordReader(path, 'readahead_buffer_size:0')
            records = reader.num_records()
        except (ValueError, RuntimeError) as error:
            raise self._damaged(shard, _brief(error)) from None
        lengths_D, first_record_D = self._lengths(shard)
        if records != first_record_D[-1] - (-lengths_D[-1] // RECORD_TOKENS):
            raise self._damaged(shard, 'it does not hold what index.json says')
        return reader

    def _damaged(self, shard: int, why: str) -> UserError:
        return UserError(f'{self.folder / shard_name(shard)}.array_record is missing or damaged: {why}')


_KEYS = {'shards', 'fingerprint', 'masks', 'dtype', 'tokenizer_fingerprint', 'path', 'source', 'skipped', 'bytes'}


def shard_name(shard: int) -> str:
    return f'shard-{shard:05d}'


def read_index(folder: str | Path) -> dict[str, Any]:
    """The index.json of a prepared folder; UserError if there is none that is whole."""
    path = Path(folder) / 'index.json'
    if not path.is_file():
        begun = (Path(folder) / 'progress.jsonl').is_file()
        what = 'not complete: the same `fbt data prepare` goes on with it' if begun else 'no prepared data (index.json)'
        raise UserError(f'{folder}: {what}')
    try:
        index = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f'{path} is not valid JSON: {error}') from None
    if not isinstance(index, dict) or index.get('format') != FORMAT or index.keys() < _KEYS:
        raise UserError(f'{path} is not an index of {FORMAT!r}')
    return index


def _raise_file_limit() -> None:
    """As many open files as the system allows: each source may hold OPEN_SHARDS, and shells begin with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _brief(error: Exception) -> str:
    return ' '.join(str(error).split())[:200] or type(error).__name__


def concatenated(pieces: Sequence[np.ndarray], fingerprint: str) -> InMemory:
    """Whole documents, each with its BOS and EOS, as one source in memory."""
    return InMemory(np.concatenate(pieces), np.array([len(p) for p in pieces], np.int64), fingerprint)
