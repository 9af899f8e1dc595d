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
from typing import Any

from fbt_jax.cli import no_more_arguments, processes, require_outputs
from fbt_jax.errors import UserError

HELP = 'iterates the feedback map: contracting or diverging'
ROWS = 64  # of each validation set, evenly spread
SAMPLES = 32  # positions at which the one-token map is looked at
ROLLOUTS, ROLLOUT_TOKENS = 8, 1000


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
    import jax

    from fbt_jax.data import open_data
    from fbt_jax.evaluation.contraction import iterate, judge, make_iteration
    from fbt_jax.model.transformer import compute_dtype
    from fbt_jax.sharding import batch_shards
    from fbt_jax.training.loop import validation_batches
    from fbt_jax.training.processes import is_primary
    from fbt_jax.training.run_folder import data_folder, load_run, require_data, spread

    trained = load_run(args.workdir)
    config = trained.config
    if not trained.trained_feedback:
        raise UserError(f'{args.workdir}: was trained without feedback (one pass only), so there is no map to iterate')
    data = open_data(config, data_folder(args.workdir), held_out_only=True)
    require_data(args.workdir, data)
    if not data.validation:
        raise UserError(f'{args.workdir} was trained without validation data (data.validation)')
    trained, mesh = spread(trained, split_rows=False)
    size = -(-config.data.batch_size // batch_shards(mesh)) * batch_shards(mesh)
    with jax.set_mesh(mesh):
        iteration = make_iteration(trained.model, num_passes=args.passes)
        batches = (b for name in data.validation for b in validation_batches(data, name, mesh, size, max_rows=ROWS))
        found = iterate(iteration, trained.params, batches, passes=args.passes)
        verdict = judge(found, trained_passes=config.passes.max_passes, dtype=compute_dtype(trained.model.config))
        one_token = _one_token(trained, _pieces(data), num_passes=args.passes)
    if not is_primary():
        return
    figures = {
        'workdir': args.workdir,
        'step': trained.step,
        'passes': args.passes,
        'positions': int(found.judged_R.sum()),
        'rows': len(found.judged_R),
        'loss': found.loss_K.tolist(),
        'update_norm': [None, *found.update_norm_K[1:].tolist()],
        'state_norm': found.state_norm_K.tolist(),
        **{name: x._asdict() if hasattr(x, '_asdict') else x for name, x in verdict._asdict().items()},
        **one_token,
    }
    print(*_lines(figures), sep='\n')
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + '\n')
    if args.plot:
        from fbt_jax.evaluation.plots import draw_contraction

        draw_contraction(args.plot, figures)


def _pieces(data: Any) -> list[Any]:
    """The tokens of the longest piece of each of SAMPLES validation rows, evenly spread."""
    import numpy as np

    found = []
    for rows in data.validation.values():
        count = min(-(-SAMPLES // len(data.validation)), rows.num_rows)
        batch = rows.batch([i * rows.num_rows // count for i in range(count)])
        for tokens_T, segments_T in zip(batch.tokens, batch.segment_ids, strict=True):
            longest = np.argmax(np.bincount(segments_T[segments_T > 0], minlength=1)) if segments_T.any() else 0
            found.append(tokens_T[segments_T == longest] if longest else tokens_T[:0])
    return [piece for piece in found if len(piece) > 1]


def _one_token(trained: Any, pieces: list[Any], *, num_passes: int) -> dict[str, Any]:
    """Singular values of the one-token map, and state norms of rollouts as long as the trained context allows."""
    import numpy as np

    from fbt_jax.evaluation.one_token import PROMPT, prompts_of, rollout_norms, stretches

    context = trained.config.data.seq_len
    # From the second token of a piece to its last, by turns.
    lengths = [1 + (len(piece) - 2) * (i + 1) // len(pieces) for i, piece in enumerate(pieces)]
    prompts = prompts_of(pieces, lengths, context=context)
    sigma_B, residual_B = (
        np.asarray(x, np.float64)[: len(pieces)]
        for x in stretches(trained.model, trained.params, prompts, num_passes=num_passes)
    )
    beginnings = [piece[: PROMPT + 1] for piece in pieces[:ROLLOUTS]]
    starts = prompts_of(beginnings, [len(piece) - 1 for piece in beginnings], context=context)
    tokens = min(ROLLOUT_TOKENS, context - PROMPT)
    norms_NB = rollout_norms(trained.model, trained.params, starts, tokens=tokens, context=context)[
        :, : len(beginnings)
    ]
    return {
        'singular_values': sigma_B.tolist(),
        'singular_value_residuals': residual_B.tolist(),
        'singular_value_positions': lengths,
        'rollout_tokens': tokens,
        'rollout_state_norm': norms_NB.mean(1).tolist(),
        'rollout_state_norm_range': [float(norms_NB.min()), float(norms_NB.max())],
    }


def _lines(figures: dict[str, Any]) -> list[str]:
    import numpy as np

    from fbt_jax.training.summary import table

    passes = figures['passes']
    shown = sorted({k for k in (1, 2, 3, 4, 5, 7, 10, 20, 30, 50, 100, 200, 300, 500, 1000) if k < passes} | {passes})
    rows = [('passes', 'nats/token', 'update norm')]
    for k in shown:
        update = figures['update_norm'][k - 1]
        rows.append((str(k), f'{figures["loss"][k - 1]:.4f}', '' if update is None else f'{update:.2g}'))
    sigma = np.array(figures['singular_values'])
    norms, ends = figures['rollout_state_norm'], figures['rollout_state_norm_range']
    short = '' if figures['rollout_tokens'] == ROLLOUT_TOKENS else ', as many as the trained context allows'
    return [
        f'{figures["workdir"]}, step {figures["step"]}: {figures["positions"]:,} positions of {figures["rows"]} rows, '
        f'each more than {passes} tokens into its document',
        *table(rows),
        f'largest singular value of h_(t-1) -> h_t at {len(sigma)} positions: mean {sigma.mean():.3f}, '
        f'least {sigma.min():.3f}, greatest {sigma.max():.3f}',
        f'state norm in soft decoding: {norms[0]:.3f} at the first of {len(norms)} tokens{short}, {norms[-1]:.3f} at '
        f'the last; {ends[0]:.3f} to {ends[1]:.3f} in all',
        *figures['evidence'],
        f'verdict: {figures["verdict"]}',
    ]
