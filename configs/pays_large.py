"""Does feedback pay? The greatest of three sizes, 3.81M parameters (`launch/pays.sh`).

    launch/pays.sh large        or        fbt train --config=configs/pays_large.py --workdir=runs/pays_large

Differs from `pays_small.py` in the model alone. Hardware: 2 CPU cores, the greater part of an hour a run, or a GPU.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = runpy.run_path(str(Path(__file__).with_name('pays_small.py')))['get_config']()
    config.model.width = 256
    config.model.num_heads = 8
    config.model.num_kv_heads = 4
    config.model.mlp_width = 768
    return config
