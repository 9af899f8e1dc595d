"""Rows and their files: the contract's field names, and one row per step and split whatever kills the run."""

import json
import math
import os
import struct

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from fbt_jax.training import metrics

TRAIN = {
    'loss': 2.5,
    'grad_norm': 0.7,
    'learning_rate': 1e-3,
    'tokens': 2048,
    'token_passes': 6144,
    'tokens_per_second': 1e4,
    'step_seconds': 0.2,
}


def train_row(step, **changes):
    return metrics.train_row(**({'step': step, 'pass_losses': [2.0, 1.5]} | TRAIN | changes))


def validation_row(step):
    return metrics.validation_row(step=step, pass_losses=[2.0, 1.5], update_norms=[0.1])


def shown_by_tensorboard(folder):
    """{tag: [(step, value), ...]} by TensorBoard's own rule: a session's start drops what came before from its step on.

    The files are TFRecords: length (8 bytes), checksum (4), event, checksum (4).
    """
    shown = []
    for path in sorted(folder.glob('*tfevents*')):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack('<Q', data[:8])
            event, data = Event.FromString(data[12 : 12 + length]), data[16 + length :]
            if event.session_log.status == SessionLog.START:
                shown = [(tag, step, value) for tag, step, value in shown if step < event.step]
            shown += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return {tag: [(s, v) for t, s, v in shown if t == tag] for tag, _, _ in shown}


def test_train_row_has_the_contract_fields():
    row = train_row(7, pass_losses=np.array([2.25, 2.0, 1.75], np.float32), z_loss=0.01, mfu=0.4)
    expected = 'step split passes loss loss_pass_1 loss_pass_2 loss_pass_3 z_loss grad_norm learning_rate tokens'
    assert list(row) == [*expected.split(), 'token_passes', 'tokens_per_second', 'step_seconds', 'mfu']
    assert (row['step'], row['split'], row['passes']) == (7, 'train', 3)
    assert [row[f'loss_pass_{i}'] for i in (1, 2, 3)] == [2.25, 2.0, 1.75]
    assert {'z_loss', 'mfu'}.isdisjoint(train_row(7))


def test_validation_row_has_the_contract_fields():
    row = metrics.validation_row(step=7, pass_losses=[math.log(8), 0.0], update_norms=[0.25], bytes_per_token=4.0)
    names = 'loss_pass_1 loss_pass_2 perplexity_pass_1 perplexity_pass_2 bits_per_byte_pass_1 bits_per_byte_pass_2'
    assert list(row) == ['step', 'split', 'passes', *names.split(), 'update_norm_2']
    # log(8) nats per token: perplexity 8, three bits per token, over four bytes.
    assert row['perplexity_pass_1'] == pytest.approx(8, rel=1e-6)
    assert row['bits_per_byte_pass_1'] == pytest.approx(0.75, rel=1e-6)
    assert (row['perplexity_pass_2'], row['bits_per_byte_pass_2'], row['update_norm_2']) == (1.0, 0.0, 0.25)
    assert not [name for name in validation_row(7) if 'bits' in name]
    with pytest.raises(ValueError, match='2 update norms for 2 passes'):
        metrics.validation_row(step=7, pass_losses=[1.0, 1.0], update_norms=[0.1, 0.2])


def test_numbers_survive_json_as_float32(tmp_path):
    value = np.float32(1) / np.float32(3)
    with metrics.MetricsWriter(str(tmp_path), None) as writer:
        writer.write(train_row(1, loss=value))
    (row,) = metrics.read_rows(tmp_path / 'metrics.jsonl')
    assert np.float32(row['loss']) == value and row['loss'] == float(value)


def test_not_finite_is_null_in_strict_json(tmp_path):
    with metrics.MetricsWriter(str(tmp_path), None) as writer:
        writer.write(train_row(1, loss=math.nan, grad_norm=math.inf))
        writer.write(metrics.validation_row(step=1, pass_losses=[1e4], update_norms=[]))
    lines = (tmp_path / 'metrics.jsonl').read_text().splitlines()
    train, validation = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert train['loss'] is None and train['grad_norm'] is None and train['loss_pass_1'] == 2.0
    assert validation['perplexity_pass_1'] is None


def test_a_second_row_of_a_step_and_split_is_refused(tmp_path):
    with metrics.MetricsWriter(str(tmp_path), None) as writer:
        writer.write(train_row(1))
        writer.write(validation_row(1))
        for row in (train_row(1), validation_row(1), train_row(0)):
            with pytest.raises(ValueError, match='row of step'):
                writer.write(row)
    with metrics.MetricsWriter(str(tmp_path), 1) as writer, pytest.raises(ValueError, match='row of step'):
        writer.write(validation_row(1))
    assert len(metrics.read_rows(tmp_path / 'metrics.jsonl')) == 2


def test_resuming_twice_leaves_one_row_for_each_step_and_split(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    # (restored step, steps trained): killed at 5 before any checkpoint, then with checkpoints 4 and, twice, 6.
    for resume, last in ((None, 5), (None, 5), (4, 9), (6, 8), (6, 10)):
        writer = metrics.MetricsWriter(str(tmp_path), resume)
        for step in range((resume or 0) + 1, last + 1):
            writer.write(train_row(step, loss=100 * last + step))
            if step % 2 == 0:
                writer.write(validation_row(step))
        writer.close()
        with path.open('a') as file:
            file.write('{"step": 999, "split": "tr')  # the kill tore a line
        assert len(metrics.read_rows(path)) == last + last // 2
    rows = metrics.read_rows(path)
    assert [r['step'] for r in rows if r['split'] == 'train'] == list(range(1, 11))
    assert [r['step'] for r in rows if r['split'] == 'validation'] == [2, 4, 6, 8, 10]
    assert [r['loss'] for r in rows if r['split'] == 'train'] == [501, 502, 503, 504, 905, 906, 1007, 1008, 1009, 1010]

    board = shown_by_tensorboard(tmp_path / 'tensorboard')
    assert board['train/loss'] == [(r['step'], r['loss']) for r in rows if r['split'] == 'train']
    fields = {f'{r["split"]}/{name}' for r in rows for name in r} - {'train/step', 'train/split'}
    assert set(board) == fields - {'validation/step', 'validation/split'}


def test_rewriting_is_atomic(tmp_path, monkeypatch):
    path = tmp_path / 'metrics.jsonl'
    with metrics.MetricsWriter(str(tmp_path), None) as writer:
        for step in (1, 2, 3):
            writer.write(train_row(step))
    before = path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, 'fsync', killed)  # the moment just before the new file takes the old one's place
    with pytest.raises(KeyboardInterrupt):
        metrics.MetricsWriter(str(tmp_path), 1)
    assert path.read_bytes() == before


def test_flush_puts_rows_on_disk(tmp_path, monkeypatch):
    synced = []
    writer = metrics.MetricsWriter(str(tmp_path), None)
    monkeypatch.setattr(os, 'fsync', lambda fd: synced.append(os.fstat(fd).st_size))
    writer.write(train_row(1))
    writer.flush()
    assert synced[0] == (tmp_path / 'metrics.jsonl').stat().st_size > 100  # tensorboardX syncs its own file after it
    writer.close()


def test_a_broken_line_inside_is_an_error(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    first, second, third = (json.dumps(train_row(step)) for step in (1, 2, 3))
    path.write_text(f'{first}\n{second[:30]}\n{third}\n')
    with pytest.raises(ValueError, match='line 2 is not a row'):
        metrics.read_rows(path)
    path.write_text(f'{first}\n{second[:30]}')
    assert metrics.read_rows(path) == [train_row(1)]


@pytest.mark.parametrize(
    ('change', 'told'),
    [
        ({'step': '2'}, 'is not a row'),
        ({'loss_pass_1': 'abc'}, 'is not a row'),
        ({'tokens': None}, 'is not a row'),
        ({'passes': 9}, 'is not a row'),
        ({'split': 'test'}, 'is not a row'),
        ({'split': 3}, 'is not a row'),
        ({'step': 1}, 'step 1 of train comes after a later one, or again'),
    ],
)
def test_a_row_that_readers_would_stumble_over_is_named(tmp_path, change, told):
    path = tmp_path / 'metrics.jsonl'
    path.write_text(''.join(json.dumps(row) + '\n' for row in (train_row(1), train_row(2) | change)))
    with pytest.raises(ValueError, match=f'line 2:? {told}'):
        metrics.read_rows(path)
