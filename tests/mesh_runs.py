"""Trains one small model on several meshes of 8 fake CPU devices and prints what came out as JSON; see test_mesh.py.

python tests/mesh_runs.py 8,1,1,1 1,2,2,2 ...        # sizes of data, fsdp, tensor, context; 1,1,1,1 is one device

One compilation a mesh: the gradient is read from the moments after step 1, which draws three passes. Moments begin at
zero, so each is a multiple of the (clipped) gradient, and differences are told relative to a leaf's largest entry.
"""

import dataclasses
import hashlib
import json
import os
import sys
from typing import Any

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
from fbt_jax.sharding import local_rows, make_mesh, place, require_divisible
from fbt_jax.training.compiler import make_setup
from fbt_jax.training.integrity import named_leaves

STEPS = 20
CONFIG = Config(
    seed=9,
    data=DataConfig(source='austen', tokenizer='bytes', seq_len=64, batch_size=8),
    model=ModelConfig(
        vocab_size=384, width=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=64, window=24,
        full_attention_every=2, remat='per_layer',
    ),
    passes=PassesConfig(phases=((0, (0.4, 0.3, 0.3)),)),
    optimizer=OptimizerConfig(matrix_learning_rate=0.01, adam_learning_rate=2e-3, warmup_steps=4),
    training=TrainingConfig(steps=STEPS),
)  # fmt: skip


def run(sizes: tuple[int, ...]) -> dict[str, Any]:
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(1, *sizes))
    mesh = make_mesh(config.mesh, jax.devices()[: int(np.prod(sizes))])
    require_divisible(config, mesh)
    setup = make_setup(config, mesh)
    rows = local_rows(mesh, config.data.batch_size)
    iterator = open_data(config).train_iterator(rows)
    compiled = setup.lower(config).compile(compiler_options={'xla_backend_optimization_level': 0})
    state = setup.init()
    found: dict[str, Any] = {'losses': [], 'passes': [], 'norms': [], 'hashes': []}
    with jax.set_mesh(mesh):
        for step in range(STEPS):
            batch = place(next(iterator), mesh, rows=rows, num_rows=config.data.batch_size)
            found['hashes'].append(hashlib.sha256(b''.join(np.asarray(x).tobytes() for x in batch)).hexdigest()[:16])
            state, metrics = compiled(state, batch)
            found['losses'].append(float(metrics.loss))
            found['passes'].append(int(metrics.passes))
            found['norms'].append(float(metrics.grad_norm))
            if step == 0:
                found['moments'] = moments(state.opt_state)
    iterator.close()
    return found


def moments(opt_state: Any) -> dict[str, np.ndarray]:
    """First moments by parameter: NorMuon's `ema` and Adam's `mu`."""
    leaves = named_leaves(opt_state)
    return {
        name.split(f'/{moment}/')[1]: np.asarray(leaf)
        for name, leaf in leaves.items()
        for moment in ('ema', 'mu')
        if f'/{moment}/' in name
    }


def main() -> None:
    alone = run((1, 1, 1, 1))
    out: dict[str, Any] = {name: alone[name] for name in ('losses', 'passes', 'norms', 'hashes')}
    out['leaves'], out['meshes'] = sorted(alone['moments']), {}
    for text in sys.argv[1:]:
        got = run(tuple(int(n) for n in text.split(',')))
        out['meshes'][text] = {name: got[name] for name in ('losses', 'passes', 'norms', 'hashes')} | {
            'gradients': {
                name: float(np.max(np.abs(got['moments'][name] - moment)) / np.max(np.abs(moment)))
                for name, moment in alone['moments'].items()
            },
        }
    print(json.dumps(out))


if __name__ == '__main__':
    main()
