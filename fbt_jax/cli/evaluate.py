"""examples:
  fbt evaluate --workdir=runs/tiny
  fbt evaluate --workdir=runs/tiny --passes=1,2,3,30 --rows=64 --json=losses.json --plot=losses.png
  fbt evaluate --workdir=runs/word_problem --passes=1,4,12

Prints loss, perplexity and bits per byte after each number of passes over the run's validation rows; for rows that
aren't text, accuracy by position. `passes` counts the first, plain one.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from fbt_jax.cli import no_more_arguments, processes, require_output_files
from fbt_jax.errors import UserError

HELP = 'validation loss after each number of passes'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--workdir', required=True, metavar='DIR', help="the run's folder")
    parser.add_argument(
        '--passes', metavar='K,K,...', help='numbers of passes (default: 1 to two more than trained with)'
    )
    parser.add_argument('--step', type=int, metavar='N', help='checkpoint (default: the newest)')
    parser.add_argument(
        '--rows', type=int, default=0, metavar='N', help='validation rows, evenly spread (default: all)'
    )
    parser.add_argument('--json', metavar='FILE', help='write the figures there too')
    parser.add_argument('--plot', metavar='FILE.png', help='draw the loss over training and by number of passes')


def run(args: argparse.Namespace, rest: list[str]) -> int:
    no_more_arguments(rest)
    if args.rows < 0:
        raise UserError(f'--rows={args.rows}: must not be negative')
    passes = None if args.passes is None else _passes(args.passes)
    require_output_files(args)

    with processes():
        _evaluate(args, passes)
    return 0


def _evaluate(args: argparse.Namespace, passes: list[int] | None) -> None:
    import jax

    from fbt_jax.data import open_data
    from fbt_jax.evaluation.per_pass import evaluate_passes, make_eval_step, together
    from fbt_jax.sharding import batch_shards
    from fbt_jax.training import summary
    from fbt_jax.training.loop import validation_batches
    from fbt_jax.training.processes import is_primary
    from fbt_jax.training.run_folder import data_folder, load_run, require_data, spread

    trained = load_run(args.workdir, args.step)
    config = trained.config
    has_feedback = config.model.fusion != 'none'
    passes = passes or list(range(1, config.passes.max_passes + 3 if has_feedback else 2))
    if max(passes) > 1 and not has_feedback:
        raise UserError(f'--passes={args.passes}: {args.workdir} was trained without feedback; only 1 is possible')

    data = open_data(config, data_folder(args.workdir), held_out_only=True)
    require_data(args.workdir, data)
    if not data.validation:
        raise UserError(f'{args.workdir} was trained without validation data (data.validation)')
    rows_logged = _metric_rows(args.workdir) if args.plot else []
    trained, mesh = spread(trained)
    shards = batch_shards(mesh)
    step = make_eval_step(trained.model, num_passes=max(passes), token_bytes=data.token_bytes)
    by_set = {}
    with jax.set_mesh(mesh):
        for name, source in data.validation.items():
            size = -(-min(config.data.batch_size, source.num_rows) // shards) * shards
            batches = validation_batches(data, name, mesh, size, max_rows=args.rows)
            by_set[name] = evaluate_passes(step, trained.params, batches)
    if not is_primary():
        return
    for name, part in by_set.items():
        rows = min(args.rows or data.validation[name].num_rows, data.validation[name].num_rows)
        print(f'{args.workdir}, step {trained.step}: {rows} {name} rows, {part.tokens:,.0f} tokens')
        print(*summary.loss_table(part, passes), sep='\n')
        if data.token_bytes is None:
            print('accuracy by position:', *summary.position_table(part.accuracy_KP, passes), sep='\n')
    results = together(by_set.values())
    if len(by_set) > 1:
        print(f'all of them: {results.tokens:,.0f} tokens', *summary.loss_table(results, passes), sep='\n')
    if args.json:
        figures = _figures(args.workdir, trained.step, results, passes)
        if len(by_set) > 1:
            parts = {name: _figures(args.workdir, trained.step, part, passes) for name, part in by_set.items()}
            figures['sets'] = parts
        Path(args.json).write_text(json.dumps(figures, indent=2) + '\n')
    if args.plot:
        from fbt_jax.evaluation.plots import draw_run

        draw_run(args.plot, rows_logged, results, passes)


def _metric_rows(workdir: str) -> list[dict[str, Any]]:
    from fbt_jax.training.metrics import read_rows

    try:
        return read_rows(Path(workdir) / 'metrics.jsonl')
    except (OSError, ValueError) as error:
        raise UserError(f'--plot needs the metrics of the run: {error}') from None


def _passes(text: str) -> list[int]:
    try:
        passes = sorted({int(part) for part in text.split(',')})
    except ValueError:
        passes = []
    if not passes or passes[0] < 1:
        raise UserError(f'--passes={text}: must be numbers of passes from 1 on, such as 1,2,3')
    return passes


def _figures(workdir: str, step: int, results: Any, passes: list[int]) -> dict[str, Any]:
    """What the table shows, unrounded."""
    from fbt_jax.training.metrics import validation_row

    bytes_per_token = results.bytes / results.tokens if results.bytes else None
    row = validation_row(
        step=step,
        pass_losses=results.loss_K,
        update_norms=results.update_norm_K[1:],
        bytes_per_token=bytes_per_token,
    )
    chosen = {k: v for k, v in row.items() if not k.rsplit('_', 1)[-1].isdigit() or int(k.rsplit('_', 1)[-1]) in passes}
    accuracy = {str(k): [None if a != a else float(a) for a in results.accuracy_KP[k - 1]] for k in passes}
    return chosen | {'workdir': workdir, 'tokens': int(results.tokens), 'accuracy_by_position': accuracy}
