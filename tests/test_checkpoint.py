"""Checkpoints: what is kept, what a failed or killed save leaves, damaged and unfitting ones, exact round trips."""

import re
import resource
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fbt_jax.training import checkpoint, integrity
from fbt_jax.training.checkpoint import CheckpointError, Checkpoints, load_tree, named_leaves


class TrainState(NamedTuple):
    params: Any
    opt_state: Any
    step: jax.Array


def make_state(seed=0, layers=3):
    """A state with every kind of node optax has (chains, masks, empty states) and several dtypes."""
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        'embedding': jax.random.normal(keys[0], (40, 16)),
        'layers': {'w': jax.random.normal(keys[1], (layers, 16, 16)), 'scale': jnp.ones((layers, 16), jnp.bfloat16)},
    }
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.multi_transform(
            {'adam': optax.adam(optax.linear_schedule(1.0, 0.0, 9)), 'sgd': optax.sgd(0.1, momentum=0.9)},
            {'embedding': 'adam', 'layers': {'w': 'sgd', 'scale': 'adam'}},
        ),
    )
    opt_state = optimizer.init(params)
    opt_state = jax.tree.map(lambda x: x + jax.random.normal(keys[2], x.shape).astype(x.dtype), opt_state)
    return TrainState(params, opt_state, jnp.int32(seed))


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def make_iterator():
    return iter(grain.MapDataset.range(1000).shuffle(seed=3).repeat().to_iter_dataset().batch(4))


def bits(tree):
    return {name: (x.dtype.name, np.asarray(x).tobytes()) for name, x in named_leaves(tree).items()}


def folders(workdir):
    return sorted(int(p.name) for p in (Path(workdir) / 'checkpoints').iterdir() if p.name.isdigit())


def save_steps(workdir, steps, keep=10, losses=None):
    """Saves make_state(step) for each of `steps`, the iterator one batch further each time."""
    iterator = make_iterator()
    with Checkpoints(workdir, keep) as checkpoints:
        for step in steps:
            next(iterator)
            metrics = {'loss_pass_1': losses[step]} if losses and step in losses else None
            state = make_state(step)
            assert checkpoints.save(step, state, data_iterator=iterator, meta={'at': step}, metrics=metrics)
            checkpoints.check()


def restore(workdir, state=None, keep=10, iterator=None):
    """(Restored or None, what was said)."""
    said = []
    with Checkpoints(workdir, keep) as checkpoints:
        target = abstract(make_state() if state is None else state)
        return checkpoints.restore_latest(target, iterator or make_iterator(), say=said.append), said


@pytest.fixture
def workdir(tmp_path):
    return str(tmp_path / 'run')


@pytest.fixture(scope='module')
def two_saved(tmp_path_factory):
    """Copied by those who damage it."""
    folder = tmp_path_factory.mktemp('saved') / 'run'
    save_steps(str(folder), (10, 20))
    return folder


def test_round_trip_is_exact(two_saved):
    state = make_state(20)
    restored, said = restore(str(two_saved), state)
    assert (restored.step, restored.meta, said) == (20, {'at': 20}, [])
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    assert bits(restored.state) == bits(state)


def test_no_checkpoint_is_none(workdir):
    assert restore(workdir) == (None, [])


def test_iterator_position_is_that_of_the_call(workdir):
    unbroken = make_iterator()
    batches = [next(unbroken) for _ in range(12)]
    iterator = make_iterator()
    with Checkpoints(workdir, 3) as checkpoints:
        for _ in range(5):
            next(iterator)
        checkpoints.save(5, make_state(), data_iterator=iterator, meta={})
        for _ in range(3):  # training goes on while the save runs
            next(iterator)
    resumed = make_iterator()
    restore(workdir, iterator=resumed)
    for batch in batches[5:]:
        np.testing.assert_array_equal(next(resumed), batch)


def test_donated_state_is_saved_as_it_was(workdir):
    state = {'params': {'w': jnp.arange(2_000_000, dtype=jnp.float32)}, 'step': jnp.int32(0)}
    target = abstract(state)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: -x - 1, s), donate_argnums=0)
    with Checkpoints(workdir, 3) as checkpoints:
        checkpoints.save(1, state, data_iterator=make_iterator(), meta={})
        for _ in range(9):
            state = overwrite(state)
        checkpoints.wait()
        restored = checkpoints.restore_latest(target, make_iterator(), say=pytest.fail)
    np.testing.assert_array_equal(restored.state['params']['w'], np.arange(2_000_000, dtype=np.float32))


def test_dtypes_are_those_asked_for(two_saved):
    target = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, make_state(20))
    restored, _ = restore(str(two_saved), target)
    assert bits(restored.state) == bits(target)


@pytest.mark.parametrize(
    ('losses', 'kept'),
    [
        ({10: 3.0, 20: 1.0, 30: 2.0, 40: 2.5, 50: 2.0, 60: 1.5}, [20, 50, 60]),  # the best is older than the newest two
        ({10: 3.0, 20: 2.0, 50: 1.0, 60: 1.5}, [50, 60]),  # the best is among them; 30 and 40 were not evaluated
        ({}, [50, 60]),
        ({10: float('nan'), 20: 2.0, 30: float('inf'), 60: float('nan')}, [20, 50, 60]),
        ({10: 2.0, 30: 2.0, 40: 3.0, 60: 3.0}, [30, 50, 60]),  # the newer of equals
    ],
)
def test_retention_keeps_the_newest_and_the_best(workdir, losses, kept):
    # Two sessions: what is best must survive a restart.
    save_steps(workdir, (10, 20, 30), keep=2, losses=losses)
    save_steps(workdir, (40, 50, 60), keep=2, losses=losses)
    assert folders(workdir) == kept
    with Checkpoints(workdir, 2) as checkpoints:
        assert checkpoints.steps() == kept
        finite = {s: loss for s, loss in losses.items() if np.isfinite(loss)}
        assert checkpoints.best_step() == (min(finite, key=lambda s: (finite[s], -s)) if finite else None)


def test_saving_a_complete_step_again_does_nothing(workdir):
    iterator = make_iterator()
    with Checkpoints(workdir, 3) as checkpoints:
        assert checkpoints.save(5, make_state(1), data_iterator=iterator, meta={'n': 1})
        assert not checkpoints.save(5, make_state(2), data_iterator=iterator, meta={'n': 2})
    restored, _ = restore(workdir)
    assert restored.meta == {'n': 1} and bits(restored.state) == bits(make_state(1))


def test_failed_background_save_raises_and_never_counts(workdir):
    """A real failure of the file system: files may not grow past 64 KiB, as on a full disk."""
    state = {'params': {'w': jax.random.normal(jax.random.key(0), (1000, 1000))}}
    checkpoints = Checkpoints(workdir, 1)
    checkpoints.save(10, state, data_iterator=make_iterator(), meta={})
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        assert checkpoints.save(20, state, data_iterator=make_iterator(), meta={})
        with pytest.raises(CheckpointError, match=r'saving the checkpoint .*20 failed') as first:
            for _ in range(500):  # steps of training
                checkpoints.check()
                time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    save_30 = partial(checkpoints.save, 30, state, data_iterator=make_iterator(), meta={})
    for again in (checkpoints.check, checkpoints.wait, save_30, checkpoints.close):
        with pytest.raises(CheckpointError) as later:
            again()
        assert later.value is first.value
    # keep = 1: the only good one must not have made room for the one that failed.
    assert folders(workdir) == [10]
    restored, said = restore(workdir, state, keep=1)
    assert (restored.step, said) == (10, [])


def test_save_that_fails_at_once_raises(workdir):
    checkpoints = Checkpoints(workdir, 3)
    shutil.rmtree(Path(workdir) / 'checkpoints')
    (Path(workdir) / 'checkpoints').write_text('a file where the folder was')
    with pytest.raises(CheckpointError, match=r'saving the checkpoint .*10 failed'):
        checkpoints.save(10, make_state(), data_iterator=make_iterator(), meta={})
        checkpoints.wait()
    with pytest.raises(CheckpointError, match='10 failed'):
        checkpoints.close()


def test_save_that_vanishes_raises(workdir):
    """Orbax takes some ends of its writer, a cancelled one for instance, for a success."""
    checkpoints = Checkpoints(workdir, 3)
    checkpoints.save(10, make_state(), data_iterator=make_iterator(), meta={})
    checkpoints._manager.wait_until_finished()
    shutil.rmtree(Path(workdir) / 'checkpoints' / '10')
    with pytest.raises(CheckpointError, match=r'saving the checkpoint .*10 failed: its folder is missing'):
        checkpoints.check()
    with pytest.raises(CheckpointError, match='10 failed'):
        checkpoints.close()


def largest(folder):
    return max((p for p in Path(folder).rglob('*') if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change_position(path):
    """One digit of the data position, so that what is left is still JSON of the right form."""
    text = path.read_text()
    at = re.search(r'data_position.*?(\d)', text).start(1)
    path.write_text(f'{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}')


DAMAGES = {
    'array bytes flipped': lambda step: flip(largest(step / 'state')),
    'array bytes cut': lambda step: truncate(largest(step / 'state')),
    'arrays gone': lambda step: largest(step / 'state').unlink(),
    'tree flipped': lambda step: flip(step / 'state' / '_METADATA'),
    'data position changed': lambda step: change_position(step / 'meta' / 'metadata'),
    'meta gone': lambda step: shutil.rmtree(step / 'meta'),
    'meta flipped': lambda step: flip(step / 'meta' / 'metadata'),
    'meta cut': lambda step: truncate(step / 'meta' / 'metadata'),
    'empty folder': lambda step: [shutil.rmtree(p) for p in step.iterdir() if p.is_dir()],
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_damaged_step_is_passed_over(workdir, two_saved, damage, capfd):
    shutil.copytree(two_saved, workdir)
    DAMAGES[damage](Path(workdir) / 'checkpoints' / '20')
    iterator = make_iterator()
    restored, said = restore(workdir, iterator=iterator)
    assert restored.step == 10 and bits(restored.state) == bits(make_state(10)) and restored.meta == {'at': 10}
    (line,) = said
    assert 'checkpoint 20 cannot be read' in line and 'going on from step 10' in line and '\n' not in line
    assert folders(workdir) == [10]
    assert (Path(workdir) / 'corrupt_checkpoints' / '20').is_dir()
    # The step can be saved again, damaged again, and the first folder isn't overwritten.
    save_steps(workdir, (20,))
    DAMAGES[damage](Path(workdir) / 'checkpoints' / '20')
    assert restore(workdir)[0].step == 10
    assert sorted(p.name for p in (Path(workdir) / 'corrupt_checkpoints').iterdir()) == ['20', '20.1']
    assert capfd.readouterr() == ('', '')


def test_the_damaged_step_left_the_iterator_alone(workdir, two_saved):
    shutil.copytree(two_saved, workdir)
    flip(largest(Path(workdir) / 'checkpoints' / '20' / 'state'))
    iterator, unbroken = make_iterator(), make_iterator()
    restore(workdir, iterator=iterator)
    next(unbroken)
    np.testing.assert_array_equal(next(iterator), next(unbroken))


def test_nothing_readable_is_an_error_again_and_again(workdir, two_saved):
    shutil.copytree(two_saved, workdir)
    for step in ('10', '20'):
        flip(largest(Path(workdir) / 'checkpoints' / step / 'state'))
    for _ in range(2):  # were they moved aside, the second start would be a silent fresh one
        with pytest.raises(CheckpointError, match=r'none of the checkpoints .* can be read'):
            restore(workdir)
    assert folders(workdir) == [10, 20]


def test_what_is_not_damage_moves_nothing(workdir, two_saved, monkeypatch):
    shutil.copytree(two_saved, workdir)

    def out_of_memory(*_):
        raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: out of memory')

    monkeypatch.setattr(checkpoint, 'require_digests', out_of_memory)
    with pytest.raises(jax.errors.JaxRuntimeError):
        restore(workdir)
    assert folders(workdir) == [10, 20]


def test_another_model_is_refused_with_a_list(workdir, two_saved):
    shutil.copytree(two_saved, workdir)
    wanted = make_state(layers=4)
    wanted = wanted._replace(params={**wanted.params, 'fusion': jnp.ones((2, 2))})
    del wanted.params['embedding']
    with pytest.raises(ValueError, match='checkpoint 20') as info:
        restore(workdir, wanted)
    text = str(info.value)
    assert 'missing in the checkpoint: params/fusion;' in text
    assert 'extra in the checkpoint: params/embedding;' in text
    mismatched = text.split('mismatched: ')[1]
    assert 'params/layers/w (saved (3, 16, 16), wanted (4, 16, 16))' in mismatched
    assert 'params/layers/scale (saved (3, 16), wanted (4, 16))' in mismatched
    assert 'trace/layers/w' in mismatched and 'embedding' not in mismatched
    assert folders(workdir) == [10, 20]


def test_pipeline_that_refuses_the_position_is_no_damage(workdir, two_saved):
    shutil.copytree(two_saved, workdir)
    other = grain.experimental.ConcatThenSplitIterDataset(
        grain.MapDataset.source([{'x': np.arange(3)}] * 5).repeat().to_iter_dataset(), length_struct={'x': 4}
    )
    with pytest.raises(ValueError, match='does not take the saved position'):
        restore(workdir, iterator=iter(other))
    assert folders(workdir) == [10, 20]


def test_load_tree_needs_no_template(two_saved):
    state = make_state(20)
    loaded = load_tree(str(two_saved))
    assert (loaded.step, loaded.meta, list(loaded.tree)) == (20, {'at': 20}, ['params'])
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(loaded.tree))
    assert bits(loaded.tree['params']) == bits(state.params)
    with_optimizer = load_tree(str(two_saved), 10, what='params+opt_state')
    assert with_optimizer.step == 10 and bits(with_optimizer.tree['params']) == bits(make_state(10).params)
    # The names are those of the optimizer's own tree, so that init.from can match them leaf by leaf.
    assert bits(with_optimizer.tree['opt_state']) == bits(make_state(10).opt_state)


def test_load_tree_says_what_is_wrong(workdir, two_saved, tmp_path, capfd):
    with pytest.raises(ValueError, match='holds no checkpoints'):
        load_tree(str(tmp_path))
    with pytest.raises(ValueError, match=r'step = 15: .* 10, 20'):
        load_tree(str(two_saved), 15)
    with pytest.raises(ValueError, match='must be one of params, params\\+opt_state'):
        load_tree(str(two_saved), what='everything')
    shutil.copytree(two_saved, workdir)
    truncate(largest(Path(workdir) / 'checkpoints' / '20' / 'state'))
    before = sorted(p for p in Path(workdir).rglob('*'))
    with pytest.raises(CheckpointError, match=r'checkpoint 20 .* cannot be read .*; other steps: 10'):
        load_tree(workdir, what='params+opt_state')
    assert sorted(p for p in Path(workdir).rglob('*')) == before
    assert capfd.readouterr() == ('', '')


def test_only_the_complaints_of_abandoned_reads_are_hidden(monkeypatch):
    class Complains:
        def __init__(self, error):
            self.error = error

        def __del__(self):
            raise self.error

    shown = []
    monkeypatch.setattr(sys, 'unraisablehook', lambda info: shown.append(str(info.exc_value)))
    with integrity.quiet_failures():
        Complains(RuntimeError('Event loop is closed'))
        Complains(ValueError('something else'))
    Complains(RuntimeError('Event loop is closed'))  # a read that ends later than the error it is part of
    Complains(RuntimeError('another'))
    with integrity.quiet_failures():
        Complains(RuntimeError('another'))
    assert shown == ['something else', 'another', 'another']


def test_relative_folder(workdir, monkeypatch):
    Path(workdir).mkdir()
    monkeypatch.chdir(workdir)
    save_steps('here', (10,))
    assert load_tree('here').step == 10


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'int8', 'uint32', 'float16', 'bool', 'float64'])
def test_digest_finds_every_flipped_bit(dtype):
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 2 if dtype == 'bool' else 256, (3, 5, jnp.dtype(dtype).itemsize), dtype=np.uint8)
    array = raw.view(jnp.dtype(dtype))[..., 0]
    digests = {integrity.digests({'x': array})['x']}
    for position in range(raw.size):
        for bit in range(1 if dtype == 'bool' else 8):
            raw.reshape(-1)[position] ^= 1 << bit
            digests.add(integrity.digests({'x': array})['x'])
            raw.reshape(-1)[position] ^= 1 << bit
    assert len(digests) == 1 + raw.size * (1 if dtype == 'bool' else 8)


def test_digest_sees_exchanged_values():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    variants = {'x': x, 'rows': x[::-1], 'columns': x[:, ::-1], 'shape': x.T, 'flat': x.reshape(-1), 'zero': x * 0}
    assert len(set(integrity.digests({k: np.ascontiguousarray(v) for k, v in variants.items()}).values())) == 6
