"""What `fbt diagnose --probes` makes of a run: linear probes of its residual stream on three tasks.

The tasks are those of evaluation/probe_tasks.py, the probes those of evaluation/probes.py. Settings whose texts are
longer than the trained context are left out. Shapes: E examples, S = L + 2 depths, D width.
"""

from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from fbt_jax.errors import UserError
from fbt_jax.evaluation import probes
from fbt_jax.evaluation.intervals import ends_of
from fbt_jax.evaluation.probe_tasks import Setting, all_settings
from fbt_jax.model.transformer import init_params
from fbt_jax.training.run_folder import load_run, require_finite, spread
from fbt_jax.training.summary import table

SEED = 0
STEPS = (1, 2, 4, 8)  # of the recurrent suffixes that are looked at


def probe_figures(workdir: str, *, untrained: bool = False) -> dict[str, Any]:
    """Probes of a run's newest checkpoint: what `fbt diagnose --probes --json` writes. All processes call it.

    untrained: the same with fresh weights, to see what training has to do with it.

    Raises:
      UserError: no scikit-learn, a run that doesn't read text, a tokenizer or a context that no task fits.
    """
    probes.require_scikit_learn()
    trained = require_finite(load_run(workdir))
    tokenizer, context = trained.tokenizer, trained.config.data.seq_len
    if tokenizer is None:
        raise UserError(f'{workdir}: was not trained on text, which probes are made of')
    settings = all_settings(SEED, lambda text: len(tokenizer.encode(text)))
    by_setting = [(setting, probes.encoded(tokenizer, setting)) for setting in settings]
    fitting = [(setting, ids) for setting, ids in by_setting if max(map(len, ids)) <= context]
    if not fitting:
        shortest = min(max(map(len, ids)) for _, ids in by_setting)
        raise UserError(f'{workdir}: no task fits the trained context of {context} tokens; the shortest has {shortest}')
    modes = [probes.PLAIN]
    if trained.trained_feedback:
        modes += [*map(probes.k_step, STEPS), probes.FULL]
    if untrained:
        trained = trained._replace(params=init_params(trained.model, jax.random.key(SEED)), step=0)
    trained, mesh = spread(trained, split_rows=False)
    with jax.set_mesh(mesh):
        results = [_result(trained, setting, ids, modes) for setting, ids in tqdm(fitting, disable=None)]
    return {
        'workdir': workdir,
        'step': trained.step,
        'untrained': untrained,
        'context': context,
        'trained_feedback': trained.trained_feedback,
        'classifier': f'logistic regression, L2, C = {probes.PENALTY_C:g}, standardised, {probes.FOLDS} folds by group',
        'chance': 0.5,
        'depths': [*map(str, range(trained.config.model.num_layers + 1)), 'h'],
        'modes': [mode.name for mode in modes],
        'results': results,
        'left_out': [
            {'task': setting.task, 'setting': setting.name, 'tokens': max(map(len, ids))}
            for setting, ids in by_setting
            if max(map(len, ids)) > context
        ],
    }


def _result(trained: Any, setting: Setting, ids: list[list[int]], modes: list[probes.Mode]) -> dict[str, Any]:
    labels_E, groups_E = (np.array([getattr(x, name) for x in setting.examples]) for name in ('label', 'group'))
    by_mode = {}
    for mode in modes:
        context = trained.config.data.seq_len
        states_ESD = probes.depth_states(trained.model, trained.params, ids, mode, context=context)
        found = probes.probe(states_ESD, labels_E, groups_E)
        by_mode[mode.name] = {
            'accuracy': found.value_S.tolist(),
            'interval': [ends_of(*ends) for ends in zip(found.low_S, found.high_S, strict=True)],
        }
    return {
        'task': setting.task,
        'setting': setting.name,
        'examples': len(ids),
        'groups': len(set(groups_E.tolist())),
        'tokens': max(map(len, ids)),
        'modes': by_mode,
    }


def probe_lines(figures: dict[str, Any]) -> list[str]:
    """`probe_figures` as text: accuracy in percent, by task, number of recurrent steps and depth."""
    weights = 'fresh weights' if figures['untrained'] else f'step {figures["step"]}'
    lines = [f'{figures["workdir"]}, {weights}: {figures["classifier"]}; chance is 50 %']
    for result in figures['results']:
        lines.append(
            f'{result["task"]}, {result["setting"]}: {result["examples"]} examples in {result["groups"]} groups, '
            f'up to {result["tokens"]} tokens'
        )
        rows = [('depth', *figures['depths'])]
        rows += [(m, *(f'{100 * a:.1f}' for a in result['modes'][m]['accuracy'])) for m in figures['modes']]
        lines += table(rows)
    if not figures['trained_feedback']:
        lines.append('trained without feedback: read plainly only')
    lines += [
        f'left out: {x["task"]}, {x["setting"]}: {x["tokens"]} tokens, more than the trained context of '
        f'{figures["context"]}'
        for x in figures['left_out']
    ]
    return lines
