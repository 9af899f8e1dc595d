"""From a config to global batches: completeness over steps, exact states, checkpoints, validation, fingerprints."""

import dataclasses
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Iterable, Sequence

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest

from fbt_jax import config as config_lib
from fbt_jax.batch import Batch
from fbt_jax.data import Data, corpus, load_tokenizer, open_data
from fbt_jax.data.documents import concatenated
from fbt_jax.data.packing import StreamRows
from fbt_jax.data.tokenizer import ByteTokenizer


def config(
    *, source: str = 'austen', tokenizer: str = 'bytes', seq_len: int = 64, batch_size: int = 4, seed: int = 0
) -> config_lib.Config:
    data = config_lib.DataConfig(source=source, tokenizer=tokenizer, seq_len=seq_len, batch_size=batch_size)
    return config_lib.Config(seed=seed, data=data)


def tiny_data(*, seq_len: int = 5, batch_size: int = 3) -> Data:
    """31 tokens an epoch, so that epochs end within a few steps and within rows."""
    texts = ('one', '', 'twelve', 'three hundreds')
    documents = concatenated([np.array([256, *text.encode(), 257], np.uint16) for text in texts], '')
    rows = StreamRows(documents, seq_len=seq_len, seed=0)
    encoding = ByteTokenizer()
    return Data(
        vocab_size=encoding.vocab_size,
        tokenizer=encoding,
        fingerprint='',
        record={},
        train_rows=rows,
        members={'train': rows},
        validation={'validation': StreamRows(documents, seq_len=seq_len, seed=None)},
        seq_len=seq_len,
        batch_size=batch_size,
        workers=1,
    )


DATA = {
    'austen': lambda: open_data(config()),
    'tiny': tiny_data,
    'word_problem': lambda: open_data(config(source='word_problem', tokenizer='none', seq_len=12)),
}


def digest(batch: Batch) -> str:
    return hashlib.sha256(b''.join(array.tobytes() for array in batch)).hexdigest()


def digests(batches: Iterable[Batch], count: int) -> list[str]:
    return [digest(batch) for batch in itertools.islice(batches, count)]


def take(data: Data, count: int) -> list[Batch]:
    iterator = data.train_iterator()
    batches = list(itertools.islice(iterator, count))
    iterator.close()
    return batches


def as_sorted_bytes(pieces: Iterable[Sequence[int]]) -> list[bytes]:
    return sorted(np.asarray(piece, np.uint16).tobytes() for piece in pieces)


@pytest.mark.parametrize('name', DATA)
def test_a_batch_is_rows_of_the_stream_in_order(name):
    data = DATA[name]()
    for step, batch in enumerate(take(data, 6)):
        assert isinstance(batch, Batch)
        assert [a.shape for a in batch] == [(data.batch_size, data.seq_len)] * 5
        assert [a.dtype for a in batch] == [np.int32, np.int32, np.float32, np.int32, np.int32]
        for b in range(data.batch_size):
            row = data.train_rows.batch([step * data.batch_size + b])
            for of_batch, of_row in zip(batch, row, strict=True):
                np.testing.assert_array_equal(of_batch[b], of_row[0])


def test_the_batch_size_only_groups_the_stream():
    four, six = (take(open_data(config(batch_size=b)), 12 // b) for b in (4, 6))
    np.testing.assert_array_equal(np.concatenate([b.tokens for b in four]), np.concatenate([b.tokens for b in six]))


def test_no_token_is_lost_or_doubled_over_an_epoch_of_the_corpus():
    data = open_data(config(seq_len=997, batch_size=64))
    texts = [[256, *text.encode(), 257] for text in corpus.split().train]
    total = sum(map(len, texts))
    tokens = np.concatenate([b.tokens.ravel() for b in take(data, -(-total // (997 * 64)))])[:total]
    pieces = np.split(tokens, np.flatnonzero(tokens == 256)[1:])
    assert as_sorted_bytes(pieces) == as_sorted_bytes(texts)


def test_seeds_give_other_orders():
    first, second = (digest(take(open_data(config(seed=seed)), 1)[0]) for seed in (0, 1))
    assert first != second


@pytest.mark.parametrize('name', DATA)
@pytest.mark.parametrize('steps', [0, 1, 3, 7])
def test_a_state_continues_exactly(name, steps):
    unbroken = digests(DATA[name]().train_iterator(), steps + 8)
    iterator = DATA[name]().train_iterator()
    assert digests(iterator, steps) == unbroken[:steps]
    state = json.loads(json.dumps(iterator.get_state()))
    assert state == {'next_index': steps}
    fresh = DATA[name]().train_iterator()
    digests(fresh, 3)  # whatever a fresh iterator has read or prefetched must not show
    fresh.set_state(state)
    assert digests(fresh, 8) == unbroken[steps:]
    iterator.set_state({'next_index': 0})
    assert digests(iterator, steps + 8) == unbroken


def test_the_states_tried_lie_inside_documents_and_epochs():
    for step in (3, 7):
        assert DATA['austen']().train_rows.batch([4 * step]).tokens[0, 0] != 256
        assert tiny_data().train_rows.batch([3 * step]).tokens[0, 0] != 256
    assert 2 * 15 < 31 < 3 * 15, 'the first epoch ends within the third step'


def test_checkpoints_restore_the_position(tmp_path):
    unbroken = digests(open_data(config()).train_iterator(), 12)
    iterator = open_data(config()).train_iterator()
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in range(1, 7):
            next(iterator)
            if step in (3, 6):
                manager.save(step, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(iterator)))
        manager.wait_until_finished()
    for step in (3, 6):
        fresh = open_data(config()).train_iterator()
        with ocp.CheckpointManager(tmp_path) as manager:
            manager.restore(step, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(fresh)))
        assert digests(fresh, 6) == unbroken[step : step + 6]


def test_reading_ahead_is_bounded_and_its_thread_ends():
    read = []

    class Counted:
        def __init__(self, rows: StreamRows) -> None:
            self.rows, self.num_rows = rows, rows.num_rows

        def batch(self, rows: Sequence[int]) -> Batch:
            read.extend(rows)
            return self.rows.batch(rows)

    data = tiny_data()
    data = dataclasses.replace(data, train_rows=Counted(data.train_rows))
    before = set(threading.enumerate())
    iterator = data.train_iterator()
    for _ in range(10):
        next(iterator)
    time.sleep(0.1)
    assert 10 * data.batch_size <= len(read) <= (10 + 4 + 1) * data.batch_size
    iterator.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)
        assert not thread.is_alive()


@pytest.mark.parametrize('batch_size', [1, 3, 4, 100])
def test_validation_batches_hold_every_row_once_and_fill_up(batch_size):
    data = tiny_data()
    assert data.validation['validation'].num_rows == 6  # 30 targets
    rows = data.validation['validation'].batch(range(6))
    batches = list(data.validation_batches('validation', batch_size))
    assert [b.tokens.shape for b in batches] == [(batch_size, 5)] * -(-6 // batch_size)
    for field in Batch._fields:
        joined = np.concatenate([getattr(b, field) for b in batches])
        np.testing.assert_array_equal(joined[:6], getattr(rows, field))
    filling = [np.concatenate(arrays)[6:] for arrays in zip(*batches, strict=True)]
    assert not Batch(*filling).weights.any()
    assert not Batch(*filling).segment_ids.any()
    assert (Batch(*filling).positions == np.arange(5)).all()


def test_a_capped_validation_is_spread_over_all_rows():
    data = tiny_data()
    (batch,) = data.validation_batches('validation', 4, max_rows=3)
    expected = data.validation['validation'].batch([0, 2, 4])
    np.testing.assert_array_equal(batch.tokens[:3], expected.tokens)
    assert not batch.weights[3].any()
    assert len(list(data.validation_batches('validation', 4, max_rows=100))) == 2


def test_validation_of_the_corpus_counts_every_byte():
    for name in ('bytes', 'bpe'):
        data = open_data(config(tokenizer=name, seq_len=512))
        counted = 0
        for batch in data.validation_batches('validation', 16):
            counted += (data.token_bytes[batch.targets] * batch.weights).sum()
        assert counted == sum(len(text.encode()) for text in corpus.split().validation)


def test_what_open_data_says_of_each_source():
    text = open_data(config(tokenizer='bpe'))
    assert text.vocab_size == text.tokenizer.vocab_size == len(text.token_bytes) == 2048
    words = open_data(config(source='word_problem', tokenizer='none', seq_len=12))
    assert (words.vocab_size, words.tokenizer, words.token_bytes) == (123, None, None)
    assert words.validation['validation'].num_rows == 1024


def test_fingerprints_change_with_what_rows_are_made_of_and_with_nothing_else(monkeypatch):
    base = open_data(config()).fingerprint
    assert len(base) == 64
    assert open_data(config(seed=1, batch_size=8)).fingerprint == base
    others = [
        open_data(config(tokenizer='bpe')).fingerprint,
        open_data(config(seq_len=65)).fingerprint,
        open_data(config(source='word_problem', tokenizer='none')).fingerprint,
    ]
    train, validation = corpus.split()
    for split in (
        corpus.Split((*train[:-1], train[-1] + '.'), validation),
        corpus.Split(train[:-1], (train[-1], *validation)),
    ):
        monkeypatch.setattr(corpus, 'split', lambda split=split: split)
        others.append(open_data(config()).fingerprint)
    assert len({base, *others}) == 6


def test_the_tokenizer_loads_without_the_documents(monkeypatch):
    monkeypatch.setattr(corpus, 'split', None)
    monkeypatch.setattr(corpus, 'text', None)
    assert load_tokenizer(config(tokenizer='bpe').data).vocab_size == 2048
    assert load_tokenizer(config(source='word_problem', tokenizer='none').data) is None
