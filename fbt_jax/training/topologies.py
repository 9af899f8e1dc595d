"""Accelerators that are not there: device topologies to compile for ahead of time, by name.

`v5e:8x8` is a TPU slice by the shape of its torus (libtpu compiles for it on a machine without TPU; `pip install
-e '.[plan]'`), `h100:8` eight GPUs, up to eight of them in one host (the CUDA plugin compiles for a described GPU;
`.[plan-gpu]`).
"""

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from fbt_jax.errors import UserError
from fbt_jax.training.chips import CHIPS

_FLAT = ('2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
_CUBES = ('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x8x8', '8x8x8', '8x8x16', '8x16x16', '16x16x16')
TPU_SHAPES = {'v4': _CUBES, 'v5e': _FLAT, 'v5p': _CUBES, 'v6e': _FLAT, 'tpu7x': _CUBES}
GPUS = ('h100', 'h200')
GPUS_PER_HOST = 8
_QUIET = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_WORKER_ID': '0',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-8',
    'TPU_STDERR_LOG_LEVEL': '3',
    'TPU_MIN_LOG_LEVEL': '3',
    'TF_CPP_MIN_LOG_LEVEL': '3',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}


def chip_name(topology: str) -> str:
    """The key of `CHIPS` of a topology's name; UserError lists the known names if it is none."""
    chip, _, shape = topology.partition(':')
    if (chip in TPU_SHAPES and shape in TPU_SHAPES[chip]) or (chip in GPUS and re.fullmatch(r'[1-9]\d{0,4}', shape)):
        return chip
    known = [f'{name}:{{{", ".join(shapes)}}}' for name, shapes in TPU_SHAPES.items()]
    known += [f'{name}:N for N GPUs' for name in GPUS]
    raise UserError(f'--topology={topology}: must be one of {"; ".join(known)}')


def devices_of(topology: str, slices: int) -> Sequence[Any]:
    """Descriptions of the devices of `slices` slices, which programs can be compiled for but not run on.

    Raises:
      UserError: no such topology, or what compiles for it isn't installed.
    """
    chip = chip_name(topology)
    jax.config.update('jax_platforms', 'cpu')
    try:
        if chip in TPU_SHAPES:
            os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
            return topologies.get_topology_desc(topology_name=topology, platform='tpu', num_slices=slices).devices
        count = int(topology.partition(':')[2]) * slices
        hosts = -(-count // GPUS_PER_HOST)
        if count % hosts:
            raise UserError(f'--topology={topology}: beyond {GPUS_PER_HOST} GPUs it must be whole hosts')
        _find_ptxas()
        os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_gpu_autotune_level=0'.strip()
        shape = f'1x{hosts}x{count // hosts}'
        described = topologies.get_topology_desc(
            chip, platform='cuda', target_config=_GPU.format(memory=int(CHIPS[chip].memory)), topology=shape
        )
        return described.devices
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        extra = 'plan' if chip in TPU_SHAPES else 'plan-gpu'
        text = str(error).splitlines()[0][:300]
        raise UserError(
            f"--topology={topology}: cannot compile for it (pip install -e '.[{extra}]'?): {text}"
        ) from error


def _find_ptxas() -> None:
    """XLA looks for NVIDIA's assembler on PATH; pip puts it beside its libraries."""
    spec = importlib.util.find_spec('nvidia')
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for found in Path(folder).glob('*/bin/ptxas'):
            os.environ['PATH'] = f'{found.parent}{os.pathsep}{os.environ["PATH"]}'


# What XLA asks about a Hopper GPU, from NVIDIA's data sheet and CUDA programming guide (compute capability 9.0).
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3350000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "NVIDIA H100 80GB HBM3"
"""
