"""The word problem with and without feedback: what `make demo` runs.

    python launch/word_problem.py --workdir=runs/demo                # one seed
    python launch/word_problem.py --workdir=runs/demo --seeds=0,1,2  # the picture in the README

Trains `configs/word_problem.py` and, as the baseline, the same model without feedback for as many token-passes (four
times the steps, since each feedback step makes four passes); evaluates both by position and draws
DIR/accuracy_by_position.png. Started again, it goes on where it was. Its exit status is that of the first command
that failed.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from fbt_jax.config_file import load_config_file
from fbt_jax.evaluation.plots import Panel, draw_panels

CONFIG = Path(__file__).parents[1] / 'configs' / 'word_problem.py'
READ_AFTER = 12  # passes: three times as many as it was trained with


def fbt(*arguments: str) -> None:
    status = subprocess.run([sys.executable, '-m', 'fbt_jax', *arguments], check=False).returncode
    if status:
        sys.exit(status)


def accuracy_KP(workdir: Path, passes: list[int]) -> dict[int, np.ndarray]:
    figures = workdir / 'by_position.json'
    fbt('evaluate', f'--workdir={workdir}', f'--passes={",".join(map(str, passes))}', f'--json={figures}')
    by_passes = json.loads(figures.read_text())['accuracy_by_position']
    return {k: np.array(by_passes[str(k)]) for k in passes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--workdir', default='runs/demo')
    parser.add_argument('--seeds', default='0')
    args = parser.parse_args()
    if not all(seed.isdigit() for seed in args.seeds.split(',')):
        parser.error(f'--seeds={args.seeds}: must be whole numbers, as 0,1,2')
    out = Path(args.workdir)
    config = load_config_file(str(CONFIG), {})
    plain = [
        '--config.model.fusion=none',
        '--config.passes.phases=one_pass',
        f'--config.training.steps={config.training.steps * config.passes.max_passes}',
        f'--config.training.eval_every={config.training.eval_every * config.passes.max_passes}',
        f'--config.training.checkpoint_every={config.training.checkpoint_every * config.passes.max_passes}',
    ]
    curves: dict[str, list[np.ndarray]] = {}
    for seed in args.seeds.split(','):
        runs = {'feedback': ([], [config.passes.max_passes, READ_AFTER]), 'plain': (plain, [1])}
        for name, (overrides, passes) in runs.items():
            workdir = out / f'{name}_seed{seed}'
            fbt('train', f'--config={CONFIG}', f'--workdir={workdir}', f'--config.seed={seed}', *overrides)
            for k, accuracy_P in accuracy_KP(workdir, passes).items():
                label = f'with feedback, {k} passes' if name == 'feedback' else 'without feedback, same token-passes'
                curves.setdefault(label, []).append(accuracy_P)
    picture = out / 'accuracy_by_position.png'
    positions = range(1, 1 + config.data.seq_len)
    draw_panels(str(picture), [Panel('Running products in S5, one layer', 'position', positions, curves)])
    for label, runs_ in curves.items():
        last = ', '.join(f'{run[-1]:.3f}' for run in runs_)
        print(f'{label}: accuracy at position {len(runs_[0])}: {last}')
    print(f'picture: {picture}')


if __name__ == '__main__':
    main()
