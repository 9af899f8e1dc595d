"""examples:
  fbt report --workdir=runs/tiny
  fbt report --workdir=runs/tiny --against=runs/baseline --out=tiny.html
  fbt report --workdir=runs/tiny --prompt='It is a truth' --prompt='She was'

Writes one HTML page that needs no network: headline, curves with the mixture's phases, loss by number of passes, the
iterated feedback map, samples in the three modes side by side, which tokens feedback makes cheaper, another run beside
it, the configuration. What the run lacks is said on the page.
"""

import argparse
from pathlib import Path

from fbt_jax.cli import no_more_arguments, processes, require_output
from fbt_jax.errors import UserError

HELP = 'one HTML page of a run: curves, the map, samples, tokens'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--workdir', required=True, metavar='DIR', help="the run's folder")
    parser.add_argument('--out', metavar='FILE.html', help='where to write it (default: DIR/report.html)')
    parser.add_argument('--against', metavar='DIR', help='another run, shown beside this one as its baseline')
    parser.add_argument('--step', type=int, metavar='N', help='checkpoint (default: the newest)')
    parser.add_argument(
        '--prompt', action='append', default=[], metavar='TEXT', help='for the samples; may be given again'
    )
    parser.add_argument('--passes', type=int, default=30, metavar='K', help='passes of the iterated map (default: 30)')
    parser.add_argument(
        '--rows', type=int, default=0, metavar='N', help='validation rows for the losses by passes (default: all)'
    )


def run(args: argparse.Namespace, rest: list[str]) -> int:
    no_more_arguments(rest)
    out = _out(args)
    if args.passes < 6:
        raise UserError(f'--passes={args.passes}: must be at least 6, of which the second half is looked at apart')
    if args.rows < 0:
        raise UserError(f'--rows={args.rows}: must not be negative')
    if args.against == '':
        raise UserError('--against=: must be the folder of another run')
    if args.against is not None and Path(args.against).resolve() == Path(args.workdir).resolve():
        raise UserError(f'--against={args.against}: is the run itself')
    with processes():
        _report(args, out)
    return 0


def _out(args: argparse.Namespace) -> Path:
    """Where the page goes, if it can."""
    if not (Path(args.workdir) / 'config.json').is_file():
        raise UserError(f'{args.workdir}: no run here (no config.json)')
    out = Path(args.workdir) / 'report.html' if args.out is None else Path(args.out)
    require_output(f'--out={out}', out, '.html', '.htm')
    return out


def _report(args: argparse.Namespace, out: Path) -> None:
    from fbt_jax.files import replace
    from fbt_jax.training.processes import is_primary
    from fbt_jax.training.report import Asked, report

    asked = Asked(args.workdir, args.against, args.step, tuple(args.prompt), args.passes, args.rows)
    html = report(asked)
    if is_primary():
        replace(out, html)
        print(f'{out} ({out.stat().st_size / 1e6:.1f} MB)')
