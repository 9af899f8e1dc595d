"""What latent feedback learns of word problems, setting by setting: the picture and tables in the README.

    python launch/word_problem_study.py --workdir=runs/study                     # one seed: hours on two CPU cores
    python launch/word_problem_study.py --workdir=runs/study --seeds=0,1,2
    python launch/word_problem_study.py --workdir=runs/study --only=groups       # one part of it

Each setting is configs/word_problem.py with the overrides below, trained for as many token-passes: 6000 steps of one
pass, 1500 of four. Read on rows of 48, four times the trained length, after 1, 2, 3, 4 and 48 passes; 48 passes over
48 positions are soft decoding (tests/test_decode.py holds it). Started again, it goes on where it was; settings of
several parts train once. Writes DIR/study.json and DIR/study.png. Its exit status is that of the first command that
failed.
"""

import argparse
import dataclasses
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from fbt_jax.config import Config
from fbt_jax.config_file import load_config_file
from fbt_jax.evaluation.plots import Panel, draw_panels
from fbt_jax.files import replace

CONFIG = Path(__file__).parents[1] / 'configs' / 'word_problem.py'
TRAINED, READ, ROWS = 12, 48, 512  # positions; rows of validation data
PASSES = (1, 2, 3, 4, READ)
TOKEN_PASSES = 6000  # steps times passes

PLAIN = {'model.fusion': 'none', 'passes.phases': 'one_pass'}
WINDOWED = {'model.window': 4, 'model.full_attention_every': 0}


def constant(passes: int) -> dict[str, object]:
    """`passes` in every step; four is what the config has."""
    return {4: {}, 1: PLAIN}.get(passes, {'passes.phases': ((0, (*[0.0] * (passes - 1), 1.0)),)})


# Part -> label -> overrides.
STUDY: dict[str, dict[str, dict[str, object]]] = {
    'passes': {f'{k}': constant(k) for k in (1, 2, 3, 4)},
    'mixtures': {
        'four passes': {},
        '75/22/3, constant': {'passes.phases': 'constant_75_22_3'},
        '75/22/3, progressive': {'passes.phases': 'progressive_75_22_3'},
        '75/22/3, late': {'passes.phases': 'late_75_22_3'},
        'one to four, equal shares': {'passes.phases': ((0, (0.25, 0.25, 0.25, 0.25)),)},
    },
    'layers': {
        f'{n}{without}': ({'model.num_layers': n} if n > 1 else {}) | overrides
        for n in (1, 2, 3, 4)
        for without, overrides in (('', {}), (' plain', PLAIN))
    },
    'groups': {
        f'{g}{without}': ({'data.source': f'word_problem:{g}'} if g != 'S5' else {}) | overrides
        for g in ('Z2', 'S3', 'Z60', 'S4', 'A5', 'S5')
        for without, overrides in (('', {}), (' plain', PLAIN))
    },
    'attention': {
        'full': {},
        'window of 4': WINDOWED,
        'full, prefix mixin': {'passes.prefix_mixin': True},
        'window of 4, prefix mixin': WINDOWED | {'passes.prefix_mixin': True},
    },
}


# Of one part: label -> for each seed the accuracy by passes and position.
Found = dict[str, list[dict[str, list[float]]]]


def flags(overrides: dict[str, object]) -> list[str]:
    return [f'--config.{key}={value}' for key, value in overrides.items()]


def train(workdir: Path, overrides: dict[str, object]) -> None:
    command = [sys.executable, '-m', 'fbt_jax', 'train', f'--config={CONFIG}', f'--workdir={workdir}']
    status = subprocess.run([*command, *flags(overrides)], check=False).returncode
    if status:
        sys.exit(status)


def steps_of(config: Config) -> int:
    """As many as make TOKEN_PASSES passes, in expectation."""
    starts = [step for step, _ in config.passes.phase_steps(10**6)] + [10**6]
    shares = [p for _, p in config.passes.phase_steps(10**6)]
    means = [sum(k * x for k, x in zip(config.passes.pass_counts, p, strict=True)) for p in shares]
    mean = sum((b - a) * m for (a, b), m in zip(itertools.pairwise(starts), means, strict=True)) / 10**6
    return round(TOKEN_PASSES / mean)


def accuracy(workdir: Path) -> dict[str, list[float]]:
    """By position 1..READ, after each of PASSES passes (without feedback of one); kept in the run's folder."""
    kept = workdir / 'accuracy.json'
    if not kept.exists():
        from fbt_jax.data import open_data
        from fbt_jax.evaluation.per_pass import evaluate_passes, make_eval_step
        from fbt_jax.training.run_folder import load_run

        run = load_run(str(workdir))
        passes = PASSES if run.trained_feedback else PASSES[:1]
        data = dataclasses.replace(run.config.data, seq_len=READ)
        rows = open_data(dataclasses.replace(run.config, data=data)).validation['validation']
        batches = [rows.batch(range(i, i + 128)) for i in range(0, ROWS, 128)]
        results = evaluate_passes(make_eval_step(run.model, num_passes=passes[-1]), run.params, batches)
        replace(kept, json.dumps({str(k): results.accuracy_KP[k - 1].tolist() for k in passes}))
    return json.loads(kept.read_text())


def run_study(out: Path, parts: list[str], seeds: list[int]) -> dict[str, Found]:
    found: dict[str, Found] = {part: {} for part in parts}
    for seed in seeds:
        for part in parts:
            for label, overrides in STUDY[part].items():
                config = load_config_file(str(CONFIG), {key: str(value) for key, value in overrides.items()})
                steps = steps_of(config)
                name = '_'.join(f'{key.split(".")[-1]}={value}' for key, value in overrides.items()) or 'default'
                workdir = out / (re.sub(r'[^\w=.]+', '-', name) + f'_seed{seed}')
                rest = {'seed': seed, 'training.steps': steps, 'training.eval_every': steps}
                train(workdir, overrides | rest | {'training.checkpoint_every': steps})
                found[part].setdefault(label, []).append(accuracy(workdir))
    return found


def at(runs: list[dict[str, list[float]]], passes: int, positions: int) -> list[np.ndarray]:
    """Of each seed, after `passes` passes, or the one pass of a model without feedback."""
    return [np.array(run.get(str(passes), run['1']))[:positions] for run in runs]


def by_position(found: Found, title: str, passes: int, positions: int, label: str = '{}') -> list[Panel]:
    curves = {label.format(name): at(runs, passes, positions) for name, runs in found.items()}
    return [Panel(title, 'position', list(range(1, positions + 1)), curves)]


def by_name(found: Found, title: str, xlabel: str) -> list[Panel]:
    """At the last trained position, against the same model without feedback."""
    names = [name for name in found if not name.endswith(' plain')]
    curves = {}
    for told, suffix in (('four passes', ''), ('without feedback', ' plain')):
        last = [[run[-1] for run in at(found[name + suffix], 4, TRAINED)] for name in names]
        curves[told] = list(np.array(last).T)
    return [Panel(title, xlabel, names, curves)]


def passes_panels(found: Found) -> list[Panel]:
    read = {f'{k}': at(found['4'], k, TRAINED) for k in (1, 2, 3, 4)}
    trained = {k: at(runs, int(k), TRAINED) for k, runs in found.items()}
    x = list(range(1, TRAINED + 1))
    return [
        Panel('Trained with four passes, read after', 'position', x, read),
        Panel('Trained with and read after', 'position', x, trained),
    ]


PANELS = {
    'passes': passes_panels,
    'mixtures': lambda found: by_position(found, 'Mixtures of passes, soft decoding', READ, TRAINED),
    'layers': lambda found: by_name(found, f'Depth: position {TRAINED}', 'layers'),
    'groups': lambda found: by_name(found, f'Groups: position {TRAINED}', 'group'),
    'attention': lambda found: by_position(found, f'Soft decoding past the {TRAINED} trained positions', READ, READ),
}


def table(found: dict[str, Found]) -> list[str]:
    """Markdown: mean over seeds, and the least and greatest where there are several."""
    lines = ['| | | ' + ' | '.join(f'{k} passes' for k in PASSES[:-1]) + ' | soft | soft at 24 | soft at 48 |']
    lines.append('|---|---|' + '---|' * (len(PASSES) + 2))
    places = [(k, TRAINED) for k in PASSES] + [(READ, 2 * TRAINED), (READ, READ)]
    for part, runs_by_label in found.items():
        for label, runs in runs_by_label.items():
            cells = []
            for passes, position in places:
                values = [run[str(passes)][position - 1] for run in runs if str(passes) in run]
                spread = f' ({min(values):.2f} to {max(values):.2f})' if len(values) > 1 else ''
                cells.append(f'{np.mean(values):.2f}{spread}' if values else '')
            lines.append(f'| {part} | {label} | ' + ' | '.join(cells) + ' |')
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--workdir', default='runs/study')
    parser.add_argument('--seeds', default='0')
    parser.add_argument('--only', default=','.join(STUDY), help=f'parts, of {", ".join(STUDY)} (default: all)')
    args = parser.parse_args()
    parts = args.only.split(',')
    if unknown := [part for part in parts if part not in STUDY]:
        parser.error(f'--only: no part {unknown[0]}; must be of {", ".join(STUDY)}')
    seeds = args.seeds.split(',')
    if not all(seed.isdigit() for seed in seeds):
        parser.error(f'--seeds={args.seeds}: must be whole numbers, as 0,1,2')
    out = Path(args.workdir)
    found = run_study(out, parts, [int(seed) for seed in seeds])
    (out / 'study.json').write_text(json.dumps(found, indent=1) + '\n')
    print(*table(found), sep='\n')
    draw_panels(str(out / 'study.png'), [panel for part in parts for panel in PANELS[part](found[part])])
    print(f'picture: {out / "study.png"}')


if __name__ == '__main__':
    main()
