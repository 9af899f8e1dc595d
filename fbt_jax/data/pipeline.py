"""From a config to batches: `open_data` gives a run its training iterator, validation batches and what identifies them.

Rows are a pure function of (config, row number), from packing.py and mixture.py. Row i of the stream is row i % B of
step i // B (counted from 0), so a batch depends on the config and the step alone: not on hosts, workers, prefetching or
restarts, and the state of the iterator, which is Grain's, is the next step's number. A source of raw text is first
tokenised into a folder of its own (`prepare_sources`): only tokenised documents have rows that can be found by number.
B rows, T positions. Grain is imported when training begins: it is slow to load.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fbt_jax.batch import Batch
from fbt_jax.config import Config
from fbt_jax.config_data import BUILT_IN, DataConfig, Source, parse_source
from fbt_jax.data import corpus, word_problem
from fbt_jax.data.documents import Documents, InMemory, Prepared, concatenated
from fbt_jax.data.mixture import HeldOutRows, Mixture, Rows
from fbt_jax.data.packing import BestFitRows, StreamRows
from fbt_jax.data.prepare import prepare
from fbt_jax.data.tokenizer import Tokenizer, open_tokenizer
from fbt_jax.errors import UserError

if TYPE_CHECKING:
    import grain

AHEAD = 4  # batches that the workers hold ready; Grain's 500 would be gigabytes


class _Batches:
    """Step s -> the rows `rows` of its batch: what one process reads of an endless source."""

    def __init__(self, source: Rows, rows: Sequence[int], batch_size: int) -> None:
        self._source, self._rows, self._batch_size = source, rows, batch_size

    def __len__(self) -> int:
        return self._source.num_rows // self._batch_size

    def __getitem__(self, step: int) -> Batch:
        return self._source.batch([step * self._batch_size + row for row in self._rows])


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run reads. `tokenizer` and `token_bytes` are None where the rows aren't text."""

    vocab_size: int
    tokenizer: Tokenizer | None
    fingerprint: str  # sha256 (hex) of documents, tokenizer, row length, packing; seed and weights are in the config
    record: Mapping[str, Any]  # documents, tokens and files of each source, for config.json
    train_rows: Rows  # endless
    members: Mapping[str, Any]  # the rows of each source of a mixture, or of the only one; none for rows without epochs
    validation: Mapping[str, HeldOutRows]  # finite; none: nothing is held out
    seq_len: int
    batch_size: int
    workers: int

    @property
    def token_bytes(self) -> np.ndarray | None:
        """(vocab_size,) int32, bytes of text that each id stands for: what turns nats per token into nats per byte."""
        return None if self.tokenizer is None else self.tokenizer.token_bytes

    def train_iterator(self, rows: Sequence[int] | None = None) -> 'grain.DatasetIterator[Batch]':
        """Batches without end, `Batch`es of (len(rows), T) numpy arrays, from step 0.

        rows: which of the global batch's rows to read, for a process that needs no others (default: all).
        `get_state()` is {'next_index': the next step}, whatever the rows; `set_state` continues exactly there. Call
        `close()` when done.
        """
        import grain

        rows = range(self.batch_size) if rows is None else rows
        steps = grain.MapDataset.source(_Batches(self.train_rows, rows, self.batch_size))
        options = grain.ReadOptions(num_threads=self.workers, prefetch_buffer_size=AHEAD if self.workers else 0)
        return iter(steps.to_iter_dataset(options))

    def validation_batches(
        self, name: str, batch_size: int, *, max_rows: int = 0, rows: Sequence[int] | None = None
    ) -> Iterator[Batch]:
        """The rows of one validation set in order as batches of `batch_size`; padding rows fill up the last.

        `max_rows` > 0 takes that many rows at even distances instead of all, so that a part still sees all documents.
        Yields `Batch`es of (len(rows), T): those rows of each batch (default: all).
        """
        for numbers in self._validation_rows(name, batch_size, max_rows):
            chosen = numbers if rows is None else [numbers[row] for row in rows]
            yield self.validation[name].batch(chosen)

    def validation_documents(self, name: str, batch_size: int, *, max_rows: int = 0) -> Iterator[list[np.ndarray]]:
        """Of the batches of `validation_batches`, for each row the documents of its segments; no text is read."""
        for numbers in self._validation_rows(name, batch_size, max_rows):
            yield self.validation[name].documents(numbers)

    def _validation_rows(self, name: str, batch_size: int, max_rows: int) -> Iterator[list[int]]:
        """The numbers of the rows of each batch; those past the end are padding."""
        total = self.validation[name].num_rows
        count = min(max_rows, total) if max_rows > 0 else total
        for start in range(0, count, batch_size):
            yield [n * total // count if n < count else total + n for n in range(start, start + batch_size)]

    def read_so_far(self, steps: int) -> dict[str, float]:
        """What the first `steps` steps have read: epochs of each source and, of several, their shares of the rows."""
        rows = steps * self.batch_size
        if not self.members:
            return {}
        if not isinstance(self.train_rows, Mixture):
            return {'epochs': next(iter(self.members.values())).epochs(rows)}
        counts = self.train_rows.counts(rows).tolist()
        named = dict(zip(self.members, counts, strict=True))
        epochs = {f'epochs_{name}': self.members[name].epochs(count) for name, count in named.items()}
        return epochs | {f'share_{name}': count / rows for name, count in named.items()}

    def source_of(self, row: int) -> str:
        """Of a mixture's row: which source it comes from, and its number there; '' where there is but one."""
        if not isinstance(self.train_rows, Mixture):
            return ''
        member, number = self.train_rows.find(row)
        return f'{list(self.members)[member]} {number}'

    def steps_in_one_epoch(self, at_most: int) -> tuple[int, str]:
        """How many whole steps, up to `at_most`, no source has to be read twice for, and the source that ends first."""

        def exhausted(steps: int) -> str:
            rows = steps * self.batch_size
            counts = self.train_rows.counts(rows) if isinstance(self.train_rows, Mixture) else [rows]
            over = [name for name, n in zip(self.members, counts, strict=True) if n > self.members[name].epoch_rows]
            return over[0] if over else ''

        low, high = 0, at_most + 1  # `low` steps are fine; of `high` nothing is known, or they are too many
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if exhausted(middle) else (middle, high)
        return low, exhausted(low + 1)


def open_data(config: Config, folder: str | Path | None = None, *, held_out_only: bool = False) -> Data:
    """The data of `config.data`, shuffled by `config.seed`. The embedded text is tokenised once in a process.

    folder: where `prepare_sources` has put what is tokenised from raw text, and a run keeps its tokenizer's file.
    held_out_only: for evaluation, which needs no training data; there are no `members` then, and no rows to train on.
    """
    data = config.data
    if _word_group(data):
        return _open_word_problem(config)
    tokenizer = load_tokenizer(data, folder)
    assert tokenizer is not None, 'only the word problem has no tokenizer'
    names = [] if held_out_only else [name for name, _ in data.sources]
    documents = {name: _documents(_label('train', name), data, tokenizer, folder) for name in names}
    if data.source == 'austen':
        held_out: dict[str, Documents] = {'validation': _austen(tokenizer)[1]}
    else:
        names = [name for name, _ in data.validation_sources]
        held_out = {name: _documents(_label('validation', name), data, tokenizer, folder) for name in names}
    members = {
        name: _PACKINGS[data.packing](found, seq_len=data.seq_len, seed=config.seed)
        for name, found in documents.items()
    }
    phases = [(step * data.batch_size, shares) for step, shares in data.weight_phases(config.training.steps) if members]
    return Data(
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
        fingerprint=_fingerprint(
            [str(data.seq_len), data.packing, tokenizer.fingerprint],
            *([name, found.fingerprint] for name, found in documents.items()),
            ['held out'],
            *([name, found.fingerprint] for name, found in held_out.items()),
        ),
        record={
            _label(split, name): _recorded(found)
            for split, named in (('train', documents), ('validation', held_out))
            for name, found in named.items()
        },
        train_rows=next(iter(members.values())) if len(members) == 1 else Mixture(list(members.values()), phases),
        members=members,
        validation={n: StreamRows(found, seq_len=data.seq_len, seed=None) for n, found in held_out.items()},
        seq_len=data.seq_len,
        batch_size=data.batch_size,
        workers=data.workers,
    )


_PACKINGS: dict[str, Callable[..., Any]] = {'carry_over': StreamRows, 'best_fit': BestFitRows}


def load_tokenizer(data: DataConfig, folder: str | Path | None = None) -> Tokenizer | None:
    """The tokenizer of `data` alone, from the copy in `folder` if there is one; None where the rows aren't text."""
    return None if data.tokenizer == 'none' else open_tokenizer(data, None if folder is None else Path(folder))


def vocab_size(data: DataConfig, folder: str | Path | None = None) -> int:
    """How many ids the rows of `data` have, known without its documents."""
    tokenizer = load_tokenizer(data, folder)
    return word_problem.GROUPS[_word_group(data)].vocab_size if tokenizer is None else tokenizer.vocab_size


def prepare_sources(data: DataConfig, folder: str | Path, *, poll: Callable[[], None] = lambda: None) -> None:
    """Tokenises what is raw text into `folder`, a folder for each source, or goes on with it."""
    for label, source in _raw_sources(data).items():
        tokenizer = load_tokenizer(data, folder)
        assert tokenizer is not None, 'raw text has a tokenizer'
        prepare(source, tokenizer, Path(folder) / label, poll=poll)


def is_prepared(data: DataConfig, folder: str | Path) -> bool | None:
    """Whether `folder` has all that `prepare_sources` makes; None if there is nothing to make."""
    raw = _raw_sources(data)
    return all((Path(folder) / label / 'index.json').is_file() for label in raw) if raw else None


def _raw_sources(data: DataConfig) -> dict[str, Source]:
    return {label: source for label, source in _sources(data).items() if source.format not in (*BUILT_IN, 'prepared')}


def _sources(data: DataConfig) -> dict[str, Source]:
    """All sources, held-out ones too, under names that are theirs alone."""
    found = {_label('train', name): spec for name, spec in data.sources}
    found |= {_label('validation', name): spec for name, spec in data.validation_sources}
    return {label: parse_source(spec) for label, spec in found.items()}


def _label(split: str, name: str) -> str:
    return split if name == split else f'{split}-{name}'


def _documents(label: str, data: DataConfig, tokenizer: Tokenizer, folder: str | Path | None) -> Documents:
    source = _sources(data)[label]
    if source.format == 'austen':
        return _austen(tokenizer)[0]
    if source.format == 'prepared':
        found = Prepared(source.path)
    elif folder is not None:
        found = Prepared(Path(folder) / label)
    else:
        told = '`fbt data prepare` it and give prepared:FOLDER, or name the run that has done so'
        raise UserError(f'{source.path} is not tokenised yet: {told}')
    if found.index['tokenizer_fingerprint'] != tokenizer.fingerprint:
        raise UserError(f'{found.folder} was made with another tokenizer than data.tokenizer = {data.tokenizer!r}')
    return found


def _austen(tokenizer: Tokenizer) -> tuple[InMemory, InMemory]:
    """Training and validation documents of the embedded corpus."""
    train, validation = corpus.split()
    return _in_memory(tokenizer, train), _in_memory(tokenizer, validation)


@functools.cache  # of the tokenizer as an object: `open_tokenizer` gives the same one each time
def _in_memory(tokenizer: Any, texts: tuple[str, ...]) -> InMemory:
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    bos, eos = np.array([tokenizer.bos_id], dtype), np.array([tokenizer.eos_id], dtype)
    pieces = [np.concatenate([bos, ids.astype(dtype), eos]) for ids in tokenizer.encode_batch(texts)]
    return concatenated(pieces, _fingerprint([tokenizer.fingerprint, *texts]))


def _word_group(data: DataConfig) -> str:
    """The group whose words are the rows; '' where they are text."""
    source = parse_source(data.sources[0][1])
    return source.path if source.format == 'word_problem' else ''


def _open_word_problem(config: Config) -> Data:
    name = _word_group(config.data)
    group = word_problem.GROUPS[name]

    def rows(validation: bool) -> word_problem.WordProblemRows:
        return word_problem.WordProblemRows(name, seq_len=config.data.seq_len, seed=config.seed, validation=validation)

    fingerprint = _fingerprint(['word_problem', str(config.data.seq_len), repr(group.generators)])

    return Data(
        vocab_size=group.vocab_size,
        tokenizer=None,
        fingerprint=fingerprint,
        record={split: {'fingerprint': fingerprint} for split in ('train', 'validation')},
        train_rows=rows(validation=False),
        members={},
        validation={'validation': rows(validation=True)},
        seq_len=config.data.seq_len,
        batch_size=config.data.batch_size,
        workers=config.data.workers,
    )


def _recorded(documents: Documents) -> dict[str, Any]:
    record: dict[str, Any] = {
        'documents': int(documents.documents_S.sum()),
        'tokens': int(documents.tokens_S.sum()),
        'fingerprint': documents.fingerprint,
    }
    if isinstance(documents, Prepared):
        record |= {name: documents.index[name] for name in ('bytes', 'skipped', 'path', 'source')}
    return record


def _fingerprint(*parts: list[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
