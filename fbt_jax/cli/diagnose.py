"""examples:
  fbt diagnose --workdir=runs/tiny
  fbt diagnose --workdir=runs/tiny --passes=100 --json=map.json --plot=map.png

Iterates the feedback map over validation rows and says whether it settles: loss and update norm by pass at positions
further into their document than the number of passes, the contraction rate, the largest singular value of the map from
one token's state to the next, the state's norm in soft decoding, and a verdict.
"""

import argparse
import json
from pathlib import Path

from fbt_jax.cli import no_more_arguments, processes, require_outputs
from fbt_jax.errors import UserError

HELP = 'iterates the feedback map: contracting or diverging'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--workdir', required=True, metavar='DIR', help="the run's folder")
    parser.add_argument('--passes', type=int, default=30, metavar='K', help='passes to iterate (default: 30)')
    parser.add_argument('--json', metavar='FILE', help='write the figures there too')
    parser.add_argument('--plot', metavar='FILE.png', help='draw them')


def run(args: argparse.Namespace, rest: list[str]) -> int:
    no_more_arguments(rest)
    require_outputs(args)
    if args.passes < 6:
        raise UserError(f'--passes={args.passes}: must be at least 6, of which the second half is looked at apart')
    with processes():
        _diagnose(args)
    return 0


def _diagnose(args: argparse.Namespace) -> None:
    from fbt_jax.training.diagnosis import contraction_figures, contraction_lines
    from fbt_jax.training.processes import is_primary

    figures = contraction_figures(args.workdir, passes=args.passes)
    if not is_primary():
        return
    print(*contraction_lines(figures), sep='\n')
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + '\n')
    if args.plot:
        from fbt_jax.evaluation.plots import draw_contraction

        draw_contraction(args.plot, figures)
