"""Processes killed while they save or prune checkpoints: what is left is complete, and read without a word."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from test_checkpoint import folders, restore, save_steps

from fbt_jax.training.checkpoint import load_tree

ROOT = Path(__file__).parents[1]


@pytest.fixture
def workdir(tmp_path):
    return str(tmp_path / 'run')


# Runs in a process of its own, on four devices: saves step 10, restores it on another mesh, reads it with no template,
# reads a damaged copy, then is killed while it saves 200 MB as step 20; or, with `prune`, saves one step after the
# other, keeping one. Its stderr must stay empty, which pytest's own handlers and hooks would hide in this process.
CHILD = """
import os, pathlib, shutil, sys
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'
import grain, jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from fbt_jax.training.checkpoint import CheckpointError, Checkpoints, load_tree
workdir, mode = sys.argv[1:]
iterator = iter(grain.MapDataset.range(1000).shuffle(seed=3).repeat().to_iter_dataset().batch(4))
def state(shape, names, rows):
    sharding = NamedSharding(jax.make_mesh(shape, names), P(*names))
    w = jax.device_put(np.random.default_rng(0).standard_normal((rows, 1024), np.float32), sharding)
    return {'params': {'w': w}, 'step': jnp.int32(7)}
if mode == 'kill':
    checkpoints = Checkpoints(workdir, 3)
    checkpoints.save(10, state((4,), ('a',), 64), data_iterator=iterator, meta={})
    other = state((2, 2), ('a', 'b'), 64)
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), other)
    checkpoints.wait()
    restored = checkpoints.restore_latest(target, iterator, say=print)
    assert restored.state['params']['w'].sharding == other['params']['w'].sharding
    np.testing.assert_array_equal(restored.state['params']['w'], other['params']['w'])
    load_tree(workdir)
    damaged = shutil.copytree(workdir, workdir + '-damaged')
    longest = max(pathlib.Path(damaged).rglob('d/*'), key=lambda p: p.stat().st_size)
    longest.write_bytes(longest.read_bytes()[:99])
    with Checkpoints(damaged, 3) as broken:
        for read in (lambda: load_tree(damaged), lambda: broken.restore_latest(target, iterator, say=print)):
            try:
                read()
            except CheckpointError:
                continue
            sys.exit('a damaged checkpoint was read')
    large = state((4,), ('a',), 50_000)
    checkpoints.save(20, large, data_iterator=iterator, meta={})
    print('saving', flush=True)
    checkpoints.wait()
    print('saved', flush=True)
else:
    small = state((4,), ('a',), 4)
    checkpoints = Checkpoints(workdir, 1)
    for step in range(1, 100_000):
        checkpoints.save(step, small, data_iterator=iterator, meta={})
        print('saving', flush=True)
"""


def start_child(workdir, mode):
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
    return subprocess.Popen(
        [sys.executable, '-c', CHILD, workdir, mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def kill(child):
    child.send_signal(signal.SIGKILL)
    out, err = child.communicate()
    assert err == ''  # and normal use is silent
    return out


def small_sharded_target():
    state = {'params': {'w': jnp.zeros((64, 1024))}, 'step': jnp.int32(0)}
    return state, np.random.default_rng(0).standard_normal((64, 1024), np.float32)


def test_killed_in_mid_save(workdir):
    child = start_child(workdir, 'kill')
    first = child.stdout.readline()
    assert first == 'saving\n', child.communicate()[1]
    assert 'saved' not in kill(child)
    assert folders(workdir) == [10]
    leftovers = [p for p in (Path(workdir) / 'checkpoints').iterdir() if p.name != '10']
    assert leftovers, 'the kill was meant to hit a save'
    state, w = small_sharded_target()
    # Saved from four devices, read on one, by both readers.
    np.testing.assert_array_equal(load_tree(workdir).tree['params']['w'], w)
    restored, said = restore(workdir, state)
    assert (restored.step, said) == (10, [])
    np.testing.assert_array_equal(restored.state['params']['w'], w)
    save_steps(workdir, (30,))
    assert sorted(p.name for p in (Path(workdir) / 'checkpoints').iterdir()) == ['10', '30']
    save_steps(workdir, (20,))
    assert folders(workdir) == [10, 20, 30]


def test_killed_while_pruning_leaves_a_complete_one(workdir):
    state = {'params': {'w': jnp.zeros((4, 1024))}, 'step': jnp.int32(0)}
    child = start_child(workdir, 'prune')
    for _ in range(8):
        assert child.stdout.readline() == 'saving\n'
    time.sleep(np.random.default_rng().uniform(0, 0.1))
    saves = 8 + kill(child).count('saving\n')
    restored, said = restore(workdir, state, keep=1)
    assert restored.step in (saves - 1, saves, saves + 1) and said == []
