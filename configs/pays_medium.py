"""Does feedback pay? The middle of three sizes, tiny's 1.09M parameters (`launch/pays.sh`).

    launch/pays.sh medium        or        fbt train --config=configs/pays_medium.py --workdir=runs/pays_medium

Differs from `pays_small.py` in the model alone. Hardware: 2 CPU cores, minutes a run. Expected: see the README.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = runpy.run_path(str(Path(__file__).with_name('pays_small.py')))['get_config']()
    config.model.width = 128
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.mlp_width = 384
    return config
