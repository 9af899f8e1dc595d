"""examples:
  fbt plan --config=configs/fbt_1b.py --topology=v5e:8x8
  fbt plan --config=configs/fbt_1b.py --topology=v5e:8x8 --slices=2 --config.data.batch_size=128 --json=plan.json
  fbt plan --config=configs/fbt_1b.py --topology=v5p:4x4x4 --sweep
  fbt plan --config=configs/tiny.py --here

Compiles the real train step for devices that need not be there: bytes per device and whether they fit, FLOPs, bytes
through each kind of collective beside the count on paper, a roofline of the step's time, days for the token budget.
"""

import argparse
from pathlib import Path

from fbt_jax.cli import config_overrides, require_outputs
from fbt_jax.config_file import load_config_file
from fbt_jax.errors import UserError
from fbt_jax.files import to_json

HELP = 'what a run would cost on an accelerator, compiled without one'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--config', required=True, metavar='FILE', help='Python file with get_config()')
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument('--topology', metavar='NAME', help='such as v5e:8x8, v5p:4x4x4, h100:8; a wrong one lists all')
    where.add_argument('--here', action='store_true', help='the devices of this machine')
    parser.add_argument('--slices', type=int, metavar='N', help='slices of that topology (default: mesh.slices)')
    parser.add_argument('--sweep', action='store_true', help='try meshes and remat policies, fastest that fits first')
    parser.add_argument('--tries', type=int, default=6, metavar='N', help='how many of them to compile (default: 6)')
    parser.add_argument('--json', metavar='FILE', help='write the figures there too')


def run(args: argparse.Namespace, rest: list[str]) -> int:
    overrides = config_overrides(rest)
    if args.slices is not None:
        overrides['mesh.slices'] = str(args.slices)
    config = load_config_file(args.config, overrides)
    require_outputs(args)
    if args.tries < 1:
        raise UserError(f'--tries={args.tries}: must be at least 1')

    import jax

    from fbt_jax.training import plan
    from fbt_jax.training.chips import CHIPS, chip_of
    from fbt_jax.training.loop import resolve
    from fbt_jax.training.processes import settle_platform
    from fbt_jax.training.topologies import chip_name, devices_of

    if args.here:
        settle_platform()
        devices, chip = jax.devices(), chip_of(jax.devices()[0].device_kind)
    else:
        chip = CHIPS[chip_name(args.topology)]
        devices = list(devices_of(args.topology, config.mesh.slices))
    if config.model.vocab_size is None:
        config = resolve(config)

    def say(text: str) -> None:
        print(text, flush=True)

    say(f'{args.config} on {len(devices)} x {devices[0].device_kind}')
    if args.sweep:
        if chip is None:
            raise UserError(f'--sweep needs a chip of known speed, not {devices[0].device_kind}')
        results = plan.sweep(config, devices, chip, tries=args.tries, say=say)
        print(*plan.sweep_lines(results, chip), sep='\n')
        figures: object = [plan.as_json(c, [cost], chip) if cost else {'fits': False} for c, cost in results]
    else:
        try:
            costs = plan.plan(config, devices, chip, say=say)
        except plan.OutOfMemoryError as error:
            raise RuntimeError(f'does not fit: {error}') from error
        print(*plan.lines(config, costs, chip, len(devices)), sep='\n')
        figures = plan.as_json(config, costs, chip)
    if args.json:
        Path(args.json).write_text(to_json(figures, indent=2) + '\n')
    return 0
