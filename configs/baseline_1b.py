"""The 1B model without feedback: what `fbt_1b.py` is compared with, and what a run with feedback can start from
(`init.from`).

    fbt train --config=configs/baseline_1b.py --workdir=runs/baseline_1b

Hardware: as `fbt_1b.py`. Not yet run; shapes and parameter counts are tested.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = runpy.run_path(str(Path(__file__).with_name('fbt_1b.py')))['get_config']()
    config.model.fusion = 'none'
    config.passes.phases = 'one_pass'
    return config
