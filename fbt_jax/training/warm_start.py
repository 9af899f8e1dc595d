"""`init.from`: start a run with feedback from one without (the paper's main path, method.md section 3), or from any
run that fits.

Parameters and optimizer state are taken leaf by leaf, by path. Only what the source cannot have, the fusion matrices
and their moments, comes from the initialiser; anything else that is missing or has another shape is an error. The
step count and the data position go on from the source's or start anew, as `init.schedule` and `init.data` say.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fbt_jax.config import Config, UserError, changed_keys, to_dict
from fbt_jax.training.checkpoint import load_tree, named_leaves
from fbt_jax.training.run_folder import read_config
from fbt_jax.training.step import TrainState


class WarmStart(NamedTuple):
    state: TrainState
    meta: dict[str, Any]  # of the source's checkpoint
    source_step: int


def warm_start(config: Config, fresh: TrainState, say: Callable[[str], None]) -> WarmStart:
    """`fresh` with everything that the source run has put in its place.

    Raises:
      UserError: the source is no run, has another data order although `init.data` is 'continue', or does not fit this
      model.
    """
    source = config.init.from_
    if config.init.data == 'continue':
        _require_same_data(config, source)
    try:
        loaded = load_tree(source, what='params+opt_state' if config.init.optimizer else 'params')
    except ValueError as error:
        raise UserError(f'init.from = {source}: {error}') from None
    target = {'params': fresh.params} | ({'opt_state': fresh.opt_state} if config.init.optimizer else {})
    wanted, found = named_leaves(target), named_leaves(loaded.tree)

    missing = [name for name in wanted if name not in found]
    wrong = [name for name in missing if 'fusion' not in name.split('/')]
    wrong += [
        f'{n} {found[n].shape} for {wanted[n].shape}'
        for n in wanted
        if n in found and found[n].shape != wanted[n].shape
    ]
    if wrong:
        raise UserError(f'init.from = {source}: does not fit this model: {", ".join(wrong[:6])}')
    left = [name for name in found if name not in wanted]
    leaves = [jnp.asarray(found[n], leaf.dtype) if n in found else leaf for n, leaf in wanted.items()]
    taken = jax.tree.unflatten(jax.tree.structure(target), leaves)
    state = fresh._replace(**taken)
    if config.init.schedule == 'continue':
        state = state._replace(step=jnp.asarray(loaded.step, jnp.int32))

    say(f'init.from {source}, step {loaded.step}: took {len(wanted) - len(missing)} arrays')
    say(f'  initialised: {", ".join(missing) or "nothing"}')
    say(f'  left in the source: {", ".join(left) or "nothing"}')
    say(
        f'  schedule: {config.init.schedule}, data: {config.init.data}, '
        f'optimizer state: {"taken" if config.init.optimizer else "new"}'
    )
    return WarmStart(state, loaded.meta, loaded.step)


def _require_same_data(config: Config, source: str) -> None:
    theirs = to_dict(read_config(source))
    ours = to_dict(config)
    keep = ('seed', 'data')
    changes = changed_keys({k: theirs[k] for k in keep}, {k: ours[k] for k in keep})
    if changes:
        text = '; '.join(f'{key} is {b!r}, was {a!r}' for key, (a, b) in changes.items())
        raise UserError(f"init.data = 'continue': the data order of {source} differs: {text}")
