"""examples:
  fbt evaluate --workdir=runs/tiny
  fbt evaluate --workdir=runs/tiny --passes=1,2,3,30 --rows=64 --json=losses.json --plot=losses.png
  fbt evaluate --workdir=runs/word_problem --passes=1,4,12
  fbt evaluate --workdir=runs/tiny --passes=1,2,3 --soft
  fbt evaluate --workdir=runs/tiny --against=runs/baseline
  fbt evaluate --workdir=runs/fbt_1b --tasks=gsm8k,math500 --task-files=benchmarks --json=scores.json
  fbt evaluate --workdir=runs/fbt_1b --tasks=humaneval,mbpp --samples=10 --temperatures=0.3,0.5,0.7
  fbt evaluate --workdir=runs/fbt_1b --tasks=arc_easy,piqa,mmlu --shots=5 --task-files=benchmarks

Prints loss, perplexity and bits per byte after each number of passes over the run's validation rows, with 95 %
intervals by a bootstrap over documents and paired differences; for rows that aren't text, accuracy by position.
`passes` counts the first, plain one; `--soft` adds the exact recurrence, token by token. A run trained without feedback
is compared by its first pass. A loss that depends on tokens after its target ends with status 1.

With --tasks: benchmark tasks in the three modes instead, with paired tests between them and a record of each item;
the same command again goes on where it was killed. gsm8k, math500, humaneval and mbpp are generated and judged,
programs in a sandbox; every other name is one of lm-evaluation-harness. FOLDER/TASK/test.jsonl has the items.
"""

import argparse
from pathlib import Path
from typing import Any

from fbt_jax.cli import no_more_arguments, processes, require_outputs
from fbt_jax.errors import UserError
from fbt_jax.files import to_json

HELP = 'validation loss after each number of passes'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--workdir', required=True, metavar='DIR', help="the run's folder")
    parser.add_argument(
        '--passes', metavar='K,K,...', help='default: 1 to two more than trained with; 1 if trained without feedback'
    )
    parser.add_argument('--soft', action='store_true', help='the exact recurrence too, as soft decoding computes it')
    parser.add_argument('--step', type=int, metavar='N', help='checkpoint (default: the newest)')
    parser.add_argument(
        '--rows', type=int, default=0, metavar='N', help='validation rows, evenly spread (default: all)'
    )
    parser.add_argument('--against', metavar='DIR', help='another run: paired differences on the same documents')
    parser.add_argument('--json', metavar='FILE', help='write the figures there too')
    parser.add_argument('--plot', metavar='FILE.png', help='draw the loss over training and by number of passes')
    tasks = parser.add_argument_group('tasks')
    tasks.add_argument('--tasks', metavar='NAME,NAME', help='gsm8k, math500, humaneval, mbpp, arc_easy, mmlu, ...')
    tasks.add_argument('--task-files', metavar='FOLDER', help='where items are (default: packages that bring them)')
    tasks.add_argument('--modes', metavar='MODE,MODE', help='default: standard,soft,fused')
    tasks.add_argument('--fused-passes', type=int, metavar='F', help='for mode fused (default: 1)')
    tasks.add_argument('--shots', type=int, metavar='N', help="examples before each item (default: the task's)")
    tasks.add_argument('--limit', type=int, metavar='N', help='the first items only')
    tasks.add_argument('--samples', type=int, metavar='N', help='answers to each item, for pass@k (default: 1)')
    tasks.add_argument('--temperatures', metavar='X,X', help='default: 0, greedy')
    tasks.add_argument('--max-tokens', type=int, metavar='N', help="of an answer (default: the task's)")
    tasks.add_argument('--batch-size', type=int, metavar='N', help='rows at a time (default: 8)')
    tasks.add_argument('--seed', type=int, metavar='N', help='of the samples (default: 0)')
    tasks.add_argument('--out', metavar='FOLDER', help='for the records (default: DIR/tasks/stepN)')


TASK_FLAGS = (
    'task_files', 'modes', 'fused_passes', 'shots', 'limit', 'samples', 'temperatures', 'max_tokens', 'batch_size',
    'seed', 'out',
)  # fmt: skip


def run(args: argparse.Namespace, rest: list[str]) -> int:
    no_more_arguments(rest)
    if args.tasks is not None:
        return _run_tasks(args)
    for flag in TASK_FLAGS:
        if getattr(args, flag) is not None:
            raise UserError(f'--{flag.replace("_", "-")}={getattr(args, flag)}: has no effect without --tasks')
    if args.against == '':
        raise UserError('--against=: must be the folder of another run')
    if args.rows < 0:
        raise UserError(f'--rows={args.rows}: must not be negative')
    passes = None if args.passes is None else _passes(args.passes)
    require_outputs(args)

    with processes():
        _evaluate(args, passes)
    return 0


def _run_tasks(args: argparse.Namespace) -> int:
    for flag in ('passes', 'soft', 'rows', 'against', 'plot'):
        if getattr(args, flag):
            raise UserError(f'--{flag}={getattr(args, flag)}: has no effect with --tasks')
    require_outputs(args)
    named = {'modes': str, 'temperatures': float}
    given: dict[str, Any] = {name: getattr(args, name) for name in TASK_FLAGS if getattr(args, name) is not None}
    for name, kind in named.items():
        if name in given:
            given[name] = _list(name, given[name], kind)
    given['files'] = given.pop('task_files', None)
    with processes():
        from fbt_jax.interop.task_settings import Settings
        from fbt_jax.interop.task_tables import task_lines
        from fbt_jax.interop.tasks import evaluate_tasks
        from fbt_jax.training.processes import is_primary

        settings = Settings(tuple(args.tasks.split(',')), step=args.step, **given)
        figures = evaluate_tasks(args.workdir, settings)
        if is_primary():
            print(*task_lines(figures), sep='\n')
            if args.json:
                Path(args.json).write_text(to_json(figures, indent=2) + '\n')
    return 0


def _list(flag: str, text: str, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(','))
    except ValueError:
        raise UserError(f'--{flag}={text}: must be numbers, such as 0.3,0.5,0.7') from None


def _evaluate(args: argparse.Namespace, passes: list[int] | None) -> None:
    from fbt_jax.evaluation.intervals import pass_intervals
    from fbt_jax.evaluation.per_pass import together
    from fbt_jax.training import summary
    from fbt_jax.training.processes import is_primary
    from fbt_jax.training.scoring import require_same_sets, run_difference, score

    rows_logged = _metric_rows(args.workdir) if args.plot else []
    if args.against is not None:
        require_same_sets(args.workdir, args.against)
    scored = score(args.workdir, args.step, passes, rows=args.rows, soft=args.soft)
    difference = None
    if args.against is not None:
        other = score(args.against, None, scored.passes, rows=args.rows, soft=args.soft, or_one=True)
        difference = run_difference(scored, other)
    if not is_primary():
        return
    step, passes = scored.run.step, scored.passes
    for name, part in scored.by_set.items():
        total = scored.data.validation[name].num_rows
        rows = min(args.rows or total, total)
        print(f'{args.workdir}, step {step}: {rows} {name} rows, {part.tokens:,.0f} tokens')
        print(*summary.loss_table(part, passes, soft=args.soft), sep='\n')
        if scored.data.token_bytes is None:
            print('accuracy by position:', *summary.position_table(part.accuracy_KP, passes, soft=args.soft), sep='\n')
    results = together(scored.by_set.values())
    if len(scored.by_set) > 1:
        lines = summary.loss_table(results, passes, soft=args.soft)
        print(f'all of them: {results.tokens:,.0f} tokens', *lines, sep='\n')
    assert results.documents is not None
    intervals = pass_intervals(results.documents, passes, soft=args.soft)
    print(*summary.interval_table(intervals), sep='\n')
    if difference is not None:
        print(*summary.difference_table(difference), sep='\n')
    if not scored.run.trained_feedback and scored.run.config.model.fusion != 'none':
        told = 'say nothing' if max(passes) > 1 else 'are left out'
        print(f'passes after the first {told}: no step of {args.workdir} has trained them')
    print(f'causal: in passes 1 to {scored.causal_passes} no loss depends on what comes after its target')
    if args.json:
        figures = _figures(args.workdir, step, results, passes, args.soft) | {'causal_passes': scored.causal_passes}
        figures |= {'trained_feedback': scored.run.trained_feedback}
        figures |= {'intervals': intervals} | ({} if difference is None else {'against': difference})
        if len(scored.by_set) > 1:
            parts = scored.by_set.items()
            figures['sets'] = {name: _figures(args.workdir, step, part, passes, args.soft) for name, part in parts}
        Path(args.json).write_text(to_json(figures, indent=2) + '\n')
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


def _figures(workdir: str, step: int, results: Any, passes: list[int], soft: bool) -> dict[str, Any]:
    """What the table shows, unrounded."""
    import numpy as np

    from fbt_jax.evaluation.per_pass import places
    from fbt_jax.training.metrics import validation_row

    bytes_per_token = results.bytes / results.tokens if results.bytes else None
    row = validation_row(
        step=step,
        pass_losses=results.loss_K,
        update_norms=results.update_norm_K[1:],
        bytes_per_token=bytes_per_token,
    )
    chosen = {k: v for k, v in row.items() if not k.rsplit('_', 1)[-1].isdigit() or int(k.rsplit('_', 1)[-1]) in passes}
    entries = places(passes, soft).items()
    accuracy = {name: [None if a != a else float(a) for a in results.accuracy_KP[i]] for name, i in entries}
    if soft:
        chosen |= {
            'loss_soft': float(results.loss_K[-1]),
            'perplexity_soft': float(np.exp(results.loss_K[-1])),
            'update_norm_soft': float(results.update_norm_K[-1]),
        }
        if results.bits_per_byte_K is not None:
            chosen['bits_per_byte_soft'] = float(results.bits_per_byte_K[-1])
    return chosen | {'workdir': workdir, 'tokens': int(results.tokens), 'accuracy_by_position': accuracy}
