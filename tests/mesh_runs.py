"""Trains one small model on several meshes of 8 fake CPU devices and prints what came out as JSON; see test_mesh.py.

python tests/mesh_runs.py 8,1,1,1 1,2,2,2 ...        # sizes of data, fsdp, tensor, context; 1,1,1,1 is one device
"""

import dataclasses
import hashlib
import json
import os
import sys

os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import numpy as np

from fbt_jax.config import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PassesConfig,
    TrainingConfig,
)
from fbt_jax.data import open_data
from fbt_jax.passes import step_key
from fbt_jax.sharding import local_rows, make_mesh, place, require_divisible
from fbt_jax.training.compiler import make_setup
from fbt_jax.training.step import batch_gradients

STEPS = 20
CONFIG = Config(
    seed=5,
    data=DataConfig(source='austen', tokenizer='bytes', seq_len=64, batch_size=8),
    model=ModelConfig(
        vocab_size=384, width=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=64, window=24,
        full_attention_every=2, remat='per_layer',
    ),
    passes=PassesConfig(phases=((0, (0.4, 0.3, 0.3)),)),
    optimizer=OptimizerConfig(matrix_learning_rate=0.01, adam_learning_rate=2e-3, warmup_steps=4),
    training=TrainingConfig(steps=STEPS),
)  # fmt: skip


def run(sizes: tuple[int, int, int, int]) -> dict:
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(1, *sizes))
    mesh = make_mesh(config.mesh, jax.devices()[: int(np.prod(sizes))])
    require_divisible(config, mesh)
    setup = make_setup(config, mesh)
    data = open_data(config)
    rows = local_rows(mesh, config.data.batch_size)
    iterator = data.train_iterator(rows)
    compiled = setup.lower(config).compile(compiler_options={'xla_backend_optimization_level': 0})
    state = setup.init()
    first = place(next(iterator), mesh, rows=rows, num_rows=config.data.batch_size)
    iterator.set_state({'next_index': 0})

    def gradients(params, batch):
        key = step_key(config.seed, jax.numpy.int32(0))
        return batch_gradients(config, setup.model, params, batch, key=key, num_passes=3, z_loss=1e-4).grads

    with jax.set_mesh(mesh):
        run_gradients = jax.jit(gradients, compiler_options={'xla_backend_optimization_level': 0})
        grads = {jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(x)
                 for path, x in jax.tree_util.tree_leaves_with_path(run_gradients(state.params, first))}  # fmt: skip
        losses, passes, norms, hashes = [], [], [], []
        for _ in range(STEPS):
            batch = place(next(iterator), mesh, rows=rows, num_rows=config.data.batch_size)
            hashes.append(hashlib.sha256(b''.join(np.asarray(x).tobytes() for x in batch)).hexdigest()[:16])
            state, metrics = compiled(state, batch)
            losses.append(float(metrics.loss))
            passes.append(int(metrics.passes))
            norms.append(float(metrics.grad_norm))
    return {'grads': grads, 'losses': losses, 'passes': passes, 'norms': norms, 'hashes': hashes}


def main() -> None:
    meshes = [tuple(int(n) for n in text.split(',')) for text in sys.argv[1:]]
    alone = run((1, 1, 1, 1))
    out = {'losses': alone['losses'], 'passes': alone['passes'], 'meshes': {}}
    for sizes in meshes:
        got = run(sizes)
        out['meshes'][','.join(map(str, sizes))] = {
            'loss': max(abs(a - b) for a, b in zip(got['losses'], alone['losses'], strict=True)),
            'passes': got['passes'] == alone['passes'],
            'hashes': got['hashes'] == alone['hashes'],
            'grads': {
                name: float(np.max(np.abs(got['grads'][name] - g)) / np.max(np.abs(g)))
                for name, g in alone['grads'].items()
            },
        }
    print(json.dumps(out))


main()
