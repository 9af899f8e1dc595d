"""Does feedback pay? The least of three sizes, 0.34M parameters (`launch/pays.sh`; baselines are overrides there).

    launch/pays.sh small        or        fbt train --config=configs/pays_small.py --workdir=runs/pays_small

As `tiny.py`, two epochs of the embedded novels: 2.3M tokens, 4.7M token-passes. Rates are tiny's, not tuned for each
size. Hardware: 2 CPU cores, minutes a run. Expected: see the README.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = runpy.run_path(str(Path(__file__).with_name('tiny.py')))['get_config']()
    config.model.width = 64
    config.model.num_heads = 2
    config.model.num_kv_heads = 1
    config.model.mlp_width = 192

    config.training.steps = 1140
    config.training.eval_every = 95
    config.training.eval_rows = 0  # all, for the intervals
    config.training.checkpoint_every = 380
    return config
