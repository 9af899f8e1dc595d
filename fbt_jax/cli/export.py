"""examples:
  fbt export --workdir=runs/tiny --format=hf --out=exports/tiny
  fbt export --workdir=runs/tiny --format=hf --out=exports/tiny16 --dtype=bfloat16 --step=380

Writes a new folder with weights, config, tokenizer, the model's code for PyTorch and a model card. Then loads it and
compares its logits of passes 1 to 3 with the run's; where they differ nothing is left behind. Needs
pip install 'fbt-jax[hf]'.
"""

import argparse
from pathlib import Path

from fbt_jax.cli import no_more_arguments
from fbt_jax.errors import UserError

HELP = 'a folder that Hugging Face transformers loads'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--workdir', required=True, metavar='DIR', help="the run's folder")
    parser.add_argument('--format', required=True, choices=('hf',))
    parser.add_argument('--out', required=True, metavar='DIR', help='the folder to write: a new one')
    parser.add_argument('--step', type=int, metavar='N', help='checkpoint (default: the newest)')
    parser.add_argument('--dtype', default='float32', choices=('float32', 'bfloat16'), help='of the stored weights')


def run(args: argparse.Namespace, rest: list[str]) -> int:
    no_more_arguments(rest)
    from fbt_jax.interop.hf_compare import require_new, require_packages
    from fbt_jax.interop.hf_export import export_hf
    from fbt_jax.training.metrics import read_rows
    from fbt_jax.training.run_folder import data_folder, load_run

    require_packages('--format=hf')
    require_new(args.out, '--out')
    trained = load_run(args.workdir, args.step)
    path = Path(args.workdir) / 'metrics.jsonl'
    try:
        metrics = read_rows(path) if path.exists() else []
    except ValueError as error:
        raise UserError(str(error)) from None
    told = export_hf(trained, args.out, dtype=args.dtype, data_folder=data_folder(args.workdir), metrics=metrics)
    differences = ', '.join(f'{d:.1e}' for d in told.difference)
    print(f'{args.out}: {told.parameters:,} parameters of step {trained.step}, {args.dtype}')
    passes = f'passes 1..{len(told.difference)}' if len(told.difference) > 1 else 'pass 1'
    print(f'logits of {passes} over {told.rows} differ from the run by {differences} at most')
    if told.computed_in != 'float32':
        print(f'computed in {told.computed_in}: in float32 rounding alone exceeds what is allowed')
    if not told.tokenizer:
        print(f'no tokenizer is written: transformers has none for data.tokenizer = {trained.config.data.tokenizer!r}')
    return 0
