"""examples:
  fbt compare runs/baseline runs/fbt
  fbt compare runs/baseline0 runs/baseline1 runs/fbt0 runs/fbt1 --json=comparison.json --plot=comparison.png

The first DIR is the baseline. Runs of one config that differ in the seed alone are taken together. Prints two
Markdown tables: what each run used and the validation loss it ends with, by number of passes; and how much more the
baseline needs for that loss (factor 1.5: half as many tokens again), with a 95 % interval where both sides have two
seeds or more. Beyond the baseline's curve nothing is extrapolated: '> 1.5' where it never comes down to the loss,
'< 0.1' where its first evaluation was there already.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fbt_jax.cli import no_more_arguments, require_outputs
from fbt_jax.files import to_json

if TYPE_CHECKING:
    from fbt_jax.training.comparison import Comparison, Factor

HELP = 'runs side by side by tokens, token-passes and FLOPs'
TITLES = ('tokens', 'token-passes', 'FLOPs')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('workdirs', nargs='+', metavar='DIR', help="runs' folders, the baseline first")
    parser.add_argument('--json', metavar='FILE', help='write the figures there too, with the curves of every seed')
    parser.add_argument('--plot', metavar='FILE.png', help='draw the validation loss by tokens, token-passes and FLOPs')


def run(args: argparse.Namespace, rest: list[str]) -> int:
    no_more_arguments(rest)
    require_outputs(args)
    from fbt_jax.training.comparison import compare

    result = compare(args.workdirs)
    print(*_runs_table(result), sep='\n')
    if result.factors:
        print('', *_factors_table(result), sep='\n')
    print('', *(f'- {note}' for note in result.notes), sep='\n')
    if args.json:
        Path(args.json).write_text(to_json(_figures(result), indent=2) + '\n')
    if args.plot:
        _draw(args.plot, result)
    return 0


def _runs_table(result: 'Comparison') -> list[str]:
    passes = max(group.loss_SKN.shape[1] for group in result.groups)
    heads = [f'{k} pass{"es" if k > 1 else ""}' for k in range(1, passes + 1)]
    rows = [[f'run ({result.unit})', 'seeds', 'step', *TITLES, *heads]]
    for group in result.groups:
        tokens, token_passes, flops = group.axes_SAN[:, :, -1].mean(axis=0)
        losses = [f'{loss:.4f}' if loss == loss else 'not finite' for loss in group.loss_SKN[:, :, -1].mean(axis=0)]
        cells = [group.name, ', '.join(map(str, group.seeds)), f'{group.steps_N[-1]:,}']
        cells += [f'{tokens:,.0f}', f'{token_passes:,.0f}', f'{flops:.3g}']
        rows.append(cells + losses + [''] * (passes - len(losses)))
    return _markdown(rows)


def _factors_table(result: 'Comparison') -> list[str]:
    rows = [['the baseline needs, for the loss of', 'after passes', 'loss', *(f'{title}, times' for title in TITLES)]]
    for group, of_passes in zip(result.groups[1:], result.factors, strict=True):
        for entry in of_passes:
            told = map(str, entry.factor_A)
            rows.append([group.name, str(entry.passes), f'{entry.loss:.4f}', *told])
    return _markdown(rows)


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns padded to equal width, so that the table reads as text too; the first is flush left."""
    rows = [[cell.replace('|', r'\|') for cell in row] for row in rows]  # a folder's name may hold one
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append(f'| {" | ".join(cells)} |')
    rule = ['-' * (w + 1) + ':' if i else '-' * (w + 2) for i, w in enumerate(widths)]
    return [lines[0], f'|{"|".join(rule)}|', *lines[1:]]


def _figures(result: 'Comparison') -> dict[str, Any]:
    """What the tables and the picture show, unrounded."""
    from fbt_jax.training.comparison import AXES

    def curve(steps_N: Any, axes_AN: Any, loss_KN: Any) -> dict[str, Any]:
        named = dict(zip(AXES, axes_AN.tolist(), strict=True))
        losses = {f'loss_pass_{k}': row for k, row in enumerate(loss_KN.tolist(), start=1)}
        return {'step': steps_N.tolist()} | named | losses

    def factor(found: 'Factor') -> dict[str, Any]:
        return {name: None if bound is None else bound._asdict() for name, bound in found._asdict().items()}

    runs = [
        {
            'name': group.name,
            'seeds': [
                {'workdir': workdir, 'seed': seed} | curve(group.steps_N, group.axes_SAN[s], group.loss_SKN[s])
                for s, (workdir, seed) in enumerate(zip(group.workdirs, group.seeds, strict=True))
            ],
        }
        for group in result.groups
    ]
    factors = [
        {'run': group.name, 'passes': entry.passes, 'baseline_passes': entry.baseline_passes, 'loss': entry.loss}
        | {axis: factor(found) for axis, found in zip(AXES, entry.factor_A, strict=True)}
        for group, of_passes in zip(result.groups[1:], result.factors, strict=True)
        for entry in of_passes
    ]
    baseline = result.groups[0].name
    return {'unit': result.unit, 'baseline': baseline, 'runs': runs, 'factors': factors, 'notes': result.notes}


def _draw(path: str, result: 'Comparison') -> None:
    from fbt_jax.evaluation.plots import Shown, draw_curves

    curves = [
        Shown(f'{group.name}, {k + 1} pass{"es" if k else ""}', colour, k, group.axes_SAN, group.loss_SKN[:, k])
        for colour, group in enumerate(result.groups)
        for k in range(min(group.loss_SKN.shape[1], group.trained_passes))
    ]
    draw_curves(path, curves, xlabels=TITLES, ylabel=f'loss, {result.unit}')
