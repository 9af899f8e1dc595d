"""examples:
  fbt diagnose --workdir=runs/tiny
  fbt diagnose --workdir=runs/tiny --passes=100 --json=map.json --plot=map.png
  fbt diagnose --workdir=runs/tiny --probes --json=probes.json --plot=probes.png

Iterates the feedback map over validation rows and says whether it settles: loss and update norm by pass at positions
further into their document than the number of passes, the contraction rate, the largest singular value of the map from
one token's state to the next, the state's norm in soft decoding, and a verdict.

With --probes instead: what a linear classifier reads from the residual stream at each depth, on three tasks whose
answer was fixed earlier in the text, after a plain prefill, recurrent suffixes and full recurrence. It takes minutes,
and needs pip install 'fbt-jax[probes]'.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fbt_jax.cli import no_more_arguments, processes, require_outputs
from fbt_jax.errors import UserError
from fbt_jax.files import to_json

HELP = 'iterates the feedback map: contracting or diverging'
PASSES = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--workdir', required=True, metavar='DIR', help="the run's folder")
    parser.add_argument('--passes', type=int, metavar='K', help=f'passes to iterate (default: {PASSES})')
    parser.add_argument('--probes', action='store_true', help='probe the residual stream instead')
    parser.add_argument('--untrained', action='store_true', help='with --probes: of fresh weights, for comparison')
    parser.add_argument('--json', metavar='FILE', help='write the figures there too')
    parser.add_argument('--plot', metavar='FILE.png', help='draw them')


def run(args: argparse.Namespace, rest: list[str]) -> int:
    no_more_arguments(rest)
    require_outputs(args)
    if args.probes and args.passes is not None:
        raise UserError(f'--passes={args.passes}: has no effect on --probes')
    if args.untrained and not args.probes:
        raise UserError('--untrained: has no effect without --probes')
    if args.passes is not None and args.passes < 6:
        raise UserError(f'--passes={args.passes}: must be at least 6, of which the second half is looked at apart')
    with processes():
        (_probe if args.probes else _iterate)(args)
    return 0


def _iterate(args: argparse.Namespace) -> None:
    from fbt_jax.evaluation.plots import draw_contraction
    from fbt_jax.training.diagnosis import contraction_figures, contraction_lines

    _give(args, contraction_figures(args.workdir, passes=args.passes or PASSES), contraction_lines, draw_contraction)


def _probe(args: argparse.Namespace) -> None:
    from fbt_jax.evaluation.plots import draw_probes
    from fbt_jax.training.probing import probe_figures, probe_lines

    _give(args, probe_figures(args.workdir, untrained=args.untrained), probe_lines, draw_probes)


def _give(
    args: argparse.Namespace,
    figures: dict[str, Any],
    lines: Callable[[dict[str, Any]], list[str]],
    draw: Callable[[str, dict[str, Any]], None],
) -> None:
    from fbt_jax.training.processes import is_primary

    if not is_primary():
        return
    print(*lines(figures), sep='\n')
    if args.json:
        Path(args.json).write_text(to_json(figures, indent=2) + '\n')
    if args.plot:
        draw(args.plot, figures)
