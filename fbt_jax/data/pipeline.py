"""From a config to batches: `open_data` gives a run its training iterator, validation batches and what identifies them.

Training goes through Grain: rows (a random-access source in which row i is a pure function of the config and i) ->
global batches -> an iterator whose state is the next batch's number. Row i of the stream is row i % B of step i // B
(counted from 0), so a batch depends on the config and the step alone: not on hosts, prefetching or restarts. A new
source is an entry in `_SOURCES`. B rows, T positions. Grain is imported when training begins: it is slow to load.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from fbt_jax.batch import Batch
from fbt_jax.config import Config, DataConfig
from fbt_jax.data import corpus, word_problem
from fbt_jax.data.packing import Documents, PackedRows, ValidationRows, padding, tokenise
from fbt_jax.data.tokenizer import Tokenizer, tokenizer

if TYPE_CHECKING:
    import grain


class Rows(Protocol):
    """A random-access source of rows: `Batch`es of (T,) numpy arrays. Reading is thread-safe and repeatable."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Batch: ...


class _RowsOfEachBatch:
    """The rows `rows` of batch 0, then those of batch 1, and so on: what one process reads of an endless source."""

    def __init__(self, source: Rows, rows: Sequence[int], batch_size: int) -> None:
        self._source, self._rows, self._batch_size = source, rows, batch_size

    def __len__(self) -> int:
        return len(self._source) // self._batch_size * len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        batch, place = divmod(index, len(self._rows))
        return self._source[batch * self._batch_size + self._rows[place]]


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run reads. `tokenizer` and `token_bytes` are None where the rows aren't text."""

    vocab_size: int
    tokenizer: Tokenizer | None
    fingerprint: str  # sha256 (hex) of source, documents, tokenizer and row length; the seed is apart, in the config
    train_rows: Rows  # endless
    validation_rows: Rows
    seq_len: int
    batch_size: int

    @property
    def token_bytes(self) -> np.ndarray | None:
        """(vocab_size,) int32, bytes of text that each id stands for: what turns nats per token into nats per byte."""
        return None if self.tokenizer is None else self.tokenizer.token_bytes

    @property
    def num_validation_rows(self) -> int:
        return len(self.validation_rows)

    def train_iterator(self, rows: Sequence[int] | None = None) -> 'grain.DatasetIterator[Batch]':
        """Batches without end, `Batch`es of (len(rows), T) numpy arrays, from step 0.

        rows: which of the global batch's rows to read, for a process that needs no others (default: all).
        `get_state()` is {'next_index': the next step}, whatever the rows; `set_state` continues exactly there. Call
        `close()` when done.
        """
        import grain

        rows = range(self.batch_size) if rows is None else rows
        chosen = grain.MapDataset.source(_RowsOfEachBatch(self.train_rows, rows, self.batch_size))
        batches = chosen.batch(len(rows), drop_remainder=True)
        # Grain's defaults, 16 threads and 500 elements ahead, would hold gigabytes of batches.
        return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))

    def validation_batches(
        self, batch_size: int, *, max_rows: int = 0, rows: Sequence[int] | None = None
    ) -> Iterator[Batch]:
        """The validation rows in order as batches of `batch_size`; padding rows fill up the last.

        `max_rows` > 0 takes that many rows at even distances instead of all, so that a part still sees all documents.
        Yields `Batch`es of (len(rows), T): those rows of each batch (default: all).
        """
        total = self.num_validation_rows
        count = min(max_rows, total) if max_rows > 0 else total
        chosen = [i * total // count for i in range(count)]
        for start in range(0, count, batch_size):
            numbers = [start + row for row in (range(batch_size) if rows is None else rows)]
            batch = [self.validation_rows[chosen[n]] if n < count else padding(self.seq_len) for n in numbers]
            yield Batch(*map(np.stack, zip(*batch, strict=True)))


class _Source(NamedTuple):
    open: Callable[[Config], Data]
    is_text: bool


def open_data(config: Config) -> Data:
    """The data of `config.data`, shuffled by `config.seed`. Text is tokenised once in a process (about a second)."""
    return _SOURCES[config.data.source].open(config)


def load_tokenizer(data: DataConfig) -> Tokenizer | None:
    """The tokenizer of `data` alone, without its documents; None where the rows aren't text."""
    return tokenizer(data.tokenizer) if _SOURCES[data.source].is_text else None


def _open_austen(config: Config) -> Data:
    encoding = tokenizer(config.data.tokenizer)
    train, validation = _austen_documents(config.data.tokenizer)
    return Data(
        vocab_size=encoding.vocab_size,
        tokenizer=encoding,
        fingerprint=_fingerprint(
            config.data, encoding.fingerprint, *corpus.split().train, '', *corpus.split().validation
        ),
        train_rows=PackedRows(train, seq_len=config.data.seq_len, seed=config.seed),
        validation_rows=ValidationRows(validation, seq_len=config.data.seq_len),
        seq_len=config.data.seq_len,
        batch_size=config.data.batch_size,
    )


@functools.cache
def _austen_documents(tokenizer_name: str) -> tuple[Documents, Documents]:
    encoding = tokenizer(tokenizer_name)
    return tokenise(corpus.split().train, encoding), tokenise(corpus.split().validation, encoding)


def _open_word_problem(config: Config) -> Data:
    def rows(validation: bool) -> Rows:
        return word_problem.WordProblemRows(seq_len=config.data.seq_len, seed=config.seed, validation=validation)

    return Data(
        vocab_size=word_problem.VOCAB_SIZE,
        tokenizer=None,
        fingerprint=_fingerprint(config.data, repr(word_problem.GENERATORS)),
        train_rows=rows(validation=False),
        validation_rows=rows(validation=True),
        seq_len=config.data.seq_len,
        batch_size=config.data.batch_size,
    )


def _fingerprint(data: DataConfig, *parts: str) -> str:
    digest = hashlib.sha256()
    for part in (data.source, str(data.seq_len), *parts):
        digest.update(f'{len(part)}:{part}'.encode())  # with its length, so that no two lists of parts look alike
    return digest.hexdigest()


_SOURCES = {
    'austen': _Source(_open_austen, is_text=True),
    'word_problem': _Source(_open_word_problem, is_text=False),
}
