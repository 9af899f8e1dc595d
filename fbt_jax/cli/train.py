"""examples:
  fbt train --config=configs/tiny.py --workdir=runs/tiny
  fbt train --config=configs/tiny.py --workdir=runs/seed1 --config.seed=1 --config.passes.phases=late_75_25_0
  fbt train --config=configs/tiny.py --workdir=runs/warm --config.init.from=runs/plain

The same command again resumes from the newest complete checkpoint. --config.SECTION.KEY=VALUE overrides any key of the
config; fbt_jax/config.py lists them all. As one of several
processes where the environment says so: launch/README.md. SIGTERM, SIGINT and SIGHUP save a checkpoint and
leave with status 143, 130 or 129.
"""

import argparse

from fbt_jax.cli import config_overrides, processes
from fbt_jax.config_file import load_config_file

HELP = 'train a model, or resume its run'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--config', required=True, metavar='FILE', help='Python file with get_config()')
    parser.add_argument('--workdir', required=True, metavar='DIR', help="the run's folder, created if missing")


def run(args: argparse.Namespace, rest: list[str]) -> int:
    config = load_config_file(args.config, config_overrides(rest))
    with processes():
        from fbt_jax.training.loop import train

        train(config, args.workdir)
    return 0
