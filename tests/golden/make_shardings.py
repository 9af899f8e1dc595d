"""Writes shardings.json: how parameters and optimizer state of configs/fbt_1b.py lie on two meshes of 64 devices.

python tests/golden/make_shardings.py       # then read the difference before you commit it
"""

import json
import runpy
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from fbt_jax.config import Config, from_config_dict
from fbt_jax.model.transformer import Transformer, for_platform, param_specs
from fbt_jax.sharding import MESH_AXES, state_specs
from fbt_jax.training.compiler import make_init
from fbt_jax.training.integrity import named_leaves
from fbt_jax.training.optimizer import make_optimizer

HERE = Path(__file__).parent
MESHES = ((1, 32, 1, 2), (1, 32, 2, 1))


def fbt_1b() -> Config:
    return from_config_dict(runpy.run_path(str(HERE.parents[1] / 'configs' / 'fbt_1b.py'))['get_config']())


def state_and_specs(config: Config) -> tuple[Any, Any]:
    """Shapes of the whole train state, and its PartitionSpecs; nothing is compiled."""
    model = Transformer(for_platform(config.model, 'tpu'))
    specs = param_specs(model)
    state = jax.eval_shape(make_init(config, model, make_optimizer(config.optimizer, config.training.steps, specs)))
    return state, state_specs(state, state.params, specs)


def shardings() -> dict[str, dict[str, dict[str, Any]]]:
    """{mesh: {leaf: shape, spec and the shape of a device's part}}."""
    state, specs = state_and_specs(fbt_1b())
    leaves = named_leaves(state)
    spec_of = dict(zip(leaves, jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)), strict=True))
    found = {}
    for sizes in MESHES:
        mesh = AbstractMesh(sizes, MESH_AXES)
        found[','.join(map(str, sizes))] = {
            name: {
                'shape': list(leaf.shape),
                'spec': [list(entry) if isinstance(entry, tuple) else entry for entry in spec_of[name]],
                'shard': list(NamedSharding(mesh, spec_of[name]).shard_shape(leaf.shape)),
            }
            for name, leaf in leaves.items()
        }
    return found


if __name__ == '__main__':
    text = json.dumps(shardings(), indent=1, sort_keys=True)
    (HERE / 'shardings.json').write_text(text + '\n')
