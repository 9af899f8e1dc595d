"""One half of the headline experiment (method.md section 3), at tiny's size: 75 % of the steps one pass, 22 % two, 3
% three.

    fbt train --config=configs/stability_three_pass.py --workdir=runs/stability_three_pass
    fbt evaluate --workdir=runs/stability_three_pass --passes=1,2,3,5,10,30 --rows=64

Differs from `stability_two_pass.py` in the mixture alone. Hardware: 2 CPU cores, minutes. The paper reports that at
1B the map trained 75/25 diverges when iterated and the one trained 75/22/3 contracts; what a run shows at this size
is printed by its final table.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = runpy.run_path(str(Path(__file__).with_name('tiny.py')))['get_config']()
    config.passes.phases = 'constant_75_22_3'
    return config
