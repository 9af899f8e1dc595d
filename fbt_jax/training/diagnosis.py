"""What `fbt diagnose` looks at in a run's folder, and how it is told (evaluation/contraction.py, one_token.py).

Rows of validation data, evenly spread, are iterated; from the longest piece of some of them come the one-token maps
and the prompts of soft rollouts.
"""

from typing import Any

import jax
import numpy as np

from fbt_jax.data import open_data
from fbt_jax.errors import UserError
from fbt_jax.evaluation.contraction import iterate, judge, make_iteration
from fbt_jax.evaluation.one_token import PROMPT, prompts_of, rollout_norms, stretches
from fbt_jax.model.transformer import compute_dtype
from fbt_jax.sharding import batch_shards
from fbt_jax.training.loop import validation_batches
from fbt_jax.training.run_folder import data_folder, load_run, require_data, require_finite, spread
from fbt_jax.training.summary import table

ROWS = 64  # of each validation set, evenly spread
SAMPLES = 32  # positions at which the one-token map is looked at
ROLLOUTS, ROLLOUT_TOKENS = 8, 1000


def contraction_figures(workdir: str, *, passes: int, step: int | None = None) -> dict[str, Any]:
    """The feedback map of a run's checkpoint (default: the newest) over validation rows, iterated to `passes` passes.

    Returns what `fbt diagnose --json` writes: loss (nats/token), update_norm (None for pass 1) and state_norm by
    pass, the verdict's fields, singular values of the one-token map, state norms of soft rollouts. All processes
    call it; each has the whole.

    Raises:
      UserError: no trained feedback, no validation data, or too few positions that are far enough into a document.
    """
    trained = require_finite(load_run(workdir, step))
    config = trained.config
    if not trained.trained_feedback:
        raise UserError(f'{workdir}: was trained without feedback (one pass only), so there is no map to iterate')
    data = open_data(config, data_folder(workdir), held_out_only=True)
    require_data(workdir, data)
    if not data.validation:
        raise UserError(f'{workdir} was trained without validation data (data.validation)')
    trained, mesh = spread(trained, split_rows=False)
    size = -(-config.data.batch_size // batch_shards(mesh)) * batch_shards(mesh)
    with jax.set_mesh(mesh):
        iteration = make_iteration(trained.model, num_passes=passes)
        batches = (b for name in data.validation for b in validation_batches(data, name, mesh, size, max_rows=ROWS))
        found = iterate(iteration, trained.params, batches, passes=passes)
        verdict = judge(found, trained_passes=config.passes.max_passes, dtype=compute_dtype(trained.model.config))
        one_token = _one_token(trained, pieces_of(data), num_passes=passes)
    return {
        'workdir': workdir,
        'step': trained.step,
        'passes': passes,
        'positions': int(found.judged_R.sum()),
        'rows': len(found.judged_R),
        'loss': found.loss_K.tolist(),
        'update_norm': [None, *found.update_norm_K[1:].tolist()],
        'state_norm': found.state_norm_K.tolist(),
        **{name: x._asdict() if hasattr(x, '_asdict') else x for name, x in verdict._asdict().items()},
        **one_token,
    }


def pieces_of(data: Any) -> list[Any]:
    """The tokens of the longest piece of each of SAMPLES validation rows, evenly spread."""
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


def contraction_lines(figures: dict[str, Any]) -> list[str]:
    """`contraction_figures` as text: the table by pass, the evidence, the verdict."""
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
