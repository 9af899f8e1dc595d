"""Rows of a run: the same for any number of hosts, workers and interruptions; every token once an epoch."""

import itertools
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_data import make, write_jsonl

from fbt_jax.batch import Batch
from fbt_jax.config import Config, default_config, from_config_dict
from fbt_jax.data import open_data, prepare_sources
from fbt_jax.data.documents import Prepared
from fbt_jax.data.packing import StreamRows
from fbt_jax.errors import UserError


def data_of(tmp_path: Path, **changes: Any) -> Any:
    rng = random.Random(0)
    for name, documents in (('a', 900), ('b', 60)):
        write_jsonl(
            tmp_path / f'{name}.jsonl', [f'{name} {rng.random()} ' * rng.randrange(6) + '.' for _ in range(documents)]
        )
    config = default_config()
    config.data.tokenizer, config.data.seq_len, config.data.batch_size = 'bytes', 32, 8
    config.data.source = {'a': f'jsonl:{tmp_path}/a.jsonl', 'b': f'jsonl:{tmp_path}/b.jsonl'}
    config.data.weights = ((0, {'a': 0.8, 'b': 0.2}), (100, {'a': 0.5, 'b': 0.5}))
    for key, value in changes.items():
        config.data[key] = value
    config.training.steps = 250
    ready: Config = from_config_dict(config)
    prepare_sources(ready.data, tmp_path / 'data')
    return open_data(ready, tmp_path / 'data')


def rows_of(data: Any, steps: range, parts: list[list[int]]) -> list[bytes]:
    """Each global row's bytes, put together from what each of several hosts reads of each step."""
    iterators = [data.train_iterator(part) for part in parts]
    for iterator in iterators:
        iterator.set_state({'next_index': steps.start})
    rows = []
    for _ in steps:
        batch: dict[int, bytes] = {}
        for part, iterator in zip(parts, iterators, strict=True):
            local: Batch = next(iterator)
            batch |= {row: b''.join(x[place].tobytes() for x in local) for place, row in enumerate(part)}
        rows += [batch[row] for row in range(data.batch_size)]
    for iterator in iterators:
        iterator.close()
    return rows


@pytest.mark.parametrize('packing', ['carry_over', 'best_fit'])
def test_two_thousand_rows_of_a_mixture_are_the_same_however_they_are_read(tmp_path: Path, packing: str) -> None:
    """1, 2, 4 hosts, 0, 1, 2 workers, over phases and epochs; then 20 interruptions, each continued by other hosts."""
    data = data_of(tmp_path, packing=packing)
    steps = range(250)
    expected = rows_of(data, steps, [list(range(8))])
    assert len(expected) == 2000
    assert len(set(expected)) > 1000
    epochs = data.read_so_far(250)
    assert epochs['epochs_b'] > 3, 'no epoch ends'
    for hosts in (1, 2, 4):
        for workers in (0, 1, 2):
            other = data_of(tmp_path, packing=packing, workers=workers)
            parts = [list(range(h * 8 // hosts, (h + 1) * 8 // hosts)) for h in range(hosts)]
            assert rows_of(other, steps, parts) == expected, (hosts, workers)
    scattered = [[0, 3, 6], [1, 2, 7], [4], [5]]
    assert rows_of(data, steps, scattered) == expected

    rng = random.Random(0)
    stops = [0, *sorted(rng.sample(range(1, 250), 20)), 250]
    found = []
    for start, stop in itertools.pairwise(stops):
        hosts = rng.choice((1, 2, 4))
        parts = [list(range(h * 8 // hosts, (h + 1) * 8 // hosts)) for h in range(hosts)]
        found += rows_of(data_of(tmp_path, packing=packing, workers=rng.choice((0, 1, 2))), range(start, stop), parts)
    assert found == expected


def test_fewer_documents_than_rows_and_hosts(tmp_path: Path) -> None:
    """One document of 8 tokens again and again: every row of 4 tokens is one half of it or the other."""
    write_jsonl(tmp_path / 'one.jsonl', ['abcdef'])
    data = data_of(tmp_path, source=f'jsonl:{tmp_path}/one.jsonl', weights=(), seq_len=4)
    rows = rows_of(data, range(5), [[row] for row in range(8)])
    assert set(rows[0::2]) == {rows[0]}
    assert set(rows[1::2]) == {rows[1]}
    assert np.frombuffer(rows[0], np.int32)[:4].tolist() == [256, 97, 98, 99]
    assert data.read_so_far(5) == {'epochs': 20.0}


def test_every_token_of_50_megabytes_comes_once_an_epoch(tmp_path: Path) -> None:
    """12.5M tokens (50 MB of uint32), each with an id of its own; lengths from 2 to beyond a shard's mean."""

    class Numbers:
        vocab_size = 2**24
        bos_id, eos_id = 2**24 - 1, 2**24 - 2
        fingerprint = 'numbers'
        token_bytes = np.zeros(2**24, np.int32)
        file = None

        def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
            return [np.arange(*map(int, text.split(':')), dtype=np.uint32) for text in texts]

    rng = np.random.default_rng(0)
    bounds = np.concatenate([[0], np.cumsum(np.minimum(rng.pareto(0.8, 8000) * 150 + 1, 10**6).astype(int))])
    total = 12_500_000
    bounds = np.append(bounds[bounds < total], total)
    write_jsonl(tmp_path / 'a.jsonl', [f'{a}:{b}' for a, b in itertools.pairwise(bounds)])
    make(f'jsonl:{tmp_path}/a.jsonl', tmp_path / 'out', tokenizer=Numbers(), shard_tokens=2**20)
    documents = Prepared(tmp_path / 'out')
    assert len(documents.documents_S) > 5
    rows = StreamRows(documents, seq_len=2048, seed=0)
    epoch = total + 2 * (len(bounds) - 1)
    counts = np.zeros(2**24, np.int64)
    last = -(-2 * epoch // 2048)
    for start in range(0, last, 64):
        batch = rows.batch(range(start, min(start + 64, last)))
        counted = batch.targets[batch.weights > 0]
        if start == 0:
            assert counted[0] != 0, 'not shuffled'
        if (start + 64) * 2048 > 2 * epoch:  # the third epoch has begun in the last rows
            flat = np.where(batch.weights > 0, batch.targets, -1).ravel()[: 2 * epoch - 1 - start * 2048]
            counted = flat[flat >= 0]
        counts += np.bincount(counted, minlength=2**24)
    assert (counts[:total] == 2).all()
    assert counts[Numbers.eos_id] == 2 * (len(bounds) - 1)
    assert counts[Numbers.bos_id] == 0


@pytest.mark.parametrize('workers', [0, 2])
def test_a_shard_that_goes_bad_in_mid_run_ends_the_run_and_its_threads(tmp_path: Path, workers: int) -> None:
    write_jsonl(tmp_path / 'b.jsonl', ['x' * 200] * 40)
    data = data_of(tmp_path, source=f'jsonl:{tmp_path}/b.jsonl', weights=(), workers=workers)
    data.train_rows.batch([0])  # opens the shard for all threads: one that opened it after the damage would say so
    before = set(threading.enumerate())
    iterator = data.train_iterator()
    next(iterator)
    shard = tmp_path / 'data' / 'train' / 'shard-00000.array_record'
    with shard.open('r+b') as file:  # of the same size, so that the open file shows it
        file.write(b'\xff' * shard.stat().st_size)
    with pytest.raises(UserError, match=r'shard-00000\.array_record is missing or damaged: records'):
        for _ in range(20):
            next(iterator)
    iterator.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)
        assert not thread.is_alive()
