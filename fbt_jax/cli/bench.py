"""examples:
  fbt bench                                              # configs/tiny.py's shapes
  fbt bench --config=configs/fbt_1b.py --config.data.batch_size=8 --json=bench.json

Times the train step on the devices present: by number of passes and for the mixture, with the model FLOP/s reached and
MFU (causal attention counted once, recomputation not), memory, the input pipeline's tokens per second, and decoding
with feedback and without. `spread` is (slowest - fastest) / median.
"""

import argparse
import tempfile
from pathlib import Path

from fbt_jax.cli import config_overrides, require_outputs
from fbt_jax.config_file import load_config_file
from fbt_jax.errors import UserError
from fbt_jax.files import to_json

HELP = 'time the train step on the devices present'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = 'configs/tiny.py'
    parser.add_argument('--config', default=default, metavar='FILE', help=f'with get_config() (default: {default})')
    parser.add_argument('--rounds', type=int, default=5, metavar='N', help='timed steps for each pass count')
    parser.add_argument('--json', metavar='FILE', help='write the figures there too')


def run(args: argparse.Namespace, rest: list[str]) -> int:
    config = load_config_file(args.config, config_overrides(rest))
    if args.rounds < 1:
        raise UserError(f'--rounds={args.rounds}: must be at least 1')
    require_outputs(args)

    import jax

    from fbt_jax.data import open_data, prepare_sources
    from fbt_jax.training.bench import bench
    from fbt_jax.training.loop import resolve
    from fbt_jax.training.processes import settle_platform
    from fbt_jax.training.summary import GIB, table

    settle_platform()
    config = resolve(config)
    with tempfile.TemporaryDirectory() as folder:
        prepare_sources(config.data, folder)
        data = open_data(config, folder)
        print(f'compiling, then {args.rounds} steps for each of {config.passes.pass_counts} passes ...', flush=True)
        result = bench(config, data, rounds=args.rounds)
    device = jax.devices()[0].device_kind
    print(f'{args.config} on {jax.device_count()} x {device}; {config.data.batch_size} rows of {config.data.seq_len}')
    rows = [('passes', 'median s', 'spread', 'tokens/s', 'model TFLOP/s', 'MFU')]
    for t in result.timings:
        name, spread = (str(t.passes), f'{t.spread:.0%}') if t.passes else ('mixture', '')
        mfu = '-' if t.mfu is None else f'{t.mfu:.1%}'
        rows.append(
            (name, f'{t.seconds:.4f}', spread, f'{t.tokens_per_second:,.0f}', f'{t.flops_per_second / 1e12:.3f}', mfu)
        )
    print(*table(rows), sep='\n')
    print(f'compiled in {result.compile_seconds:.1f} s; peak of a step {result.peak_bytes / GIB:.3f} GiB per device')
    if result.allocated_bytes is not None:
        print(f'most memory in use on a device: {result.allocated_bytes / GIB:.3f} GiB')
    print(f'input pipeline: {result.input_tokens_per_second:,.0f} tokens/s on this host')
    decoding = result.decoding
    if decoding is not None:
        told = f'decoding {decoding.rows} rows: standard {decoding.rows / decoding.standard_step:,.0f} tokens/s'
        if decoding.soft_step is not None:
            told += f', soft {decoding.rows / decoding.soft_step:,.0f}'
        print(f'{told}; prompts of {decoding.prompt} tokens: plain {decoding.plain_prompt:.3f} s', end='')
        print('' if decoding.fused_prompt is None else f', fused {decoding.fused_prompt:.3f} s')
    if args.json:
        figures = result._asdict() | {'device': device, 'devices': jax.device_count()}
        figures['timings'] = [t._asdict() for t in result.timings]
        figures['decoding'] = None if decoding is None else decoding._asdict()
        Path(args.json).write_text(to_json(figures, indent=2) + '\n')
    return 0
