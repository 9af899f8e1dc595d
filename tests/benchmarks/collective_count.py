"""Weak scaling on fake CPU devices: how many collectives a step runs and how many bytes each device receives, as
devices and rows grow together. Counts only: fake devices share the cores, so their time says nothing.

    python tests/benchmarks/collective_count.py
"""

import dataclasses
import os

os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'
os.environ['JAX_PLATFORMS'] = 'cpu'

from pathlib import Path

import jax

from fbt_jax.config import MeshConfig, PassesConfig
from fbt_jax.config_file import load_config_file
from fbt_jax.sharding import make_mesh
from fbt_jax.training.collectives import KINDS, in_program, on_paper
from fbt_jax.training.compiler import make_setup

ROOT = Path(__file__).parents[2]


def main() -> None:
    tiny = load_config_file(str(ROOT / 'configs/tiny.py'), {'model.vocab_size': '2048', 'model.window': '0'})
    tiny = dataclasses.replace(tiny, passes=PassesConfig(phases=((0, (0.0, 1.0)),)))
    print(f'{"mesh":28} {"MB":>7} {"paper":>7}  executions of {", ".join(KINDS)}')
    for axis in ('data', 'fsdp', 'tensor', 'context'):
        for devices in (1, 2, 4):
            if axis == 'tensor' and devices == 4:
                continue  # two key heads
            sizes = {'data': 1, 'fsdp': 1, 'tensor': 1, 'context': 1} | {axis: devices}
            data = dataclasses.replace(tiny.data, batch_size=8 * devices)
            config = dataclasses.replace(tiny, data=data, mesh=MeshConfig(1, **sizes))
            mesh = make_mesh(config.mesh, jax.devices()[:devices])
            text = make_setup(config, mesh).compile(config).as_text()
            found = in_program(text, branch_shares=lambda _, n: [*[0.0] * (n - 1), 1.0], devices_per_slice=devices)
            runs = [sum(c.executions for c in found if c.kind == kind) for kind in KINDS]
            paper = sum(on_paper(config, sizes, passes=2, element_bytes=4).values())
            moved = sum(c.bytes for c in found)
            name = f'{axis}={devices}, {8 * devices} rows'
            print(f'{name:28} {moved / 1e6:7.2f} {paper / 1e6:7.2f}  {", ".join(f"{r:.0f}" for r in runs)}', flush=True)


if __name__ == '__main__':
    main()
