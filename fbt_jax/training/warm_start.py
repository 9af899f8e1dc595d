"""`init.from`: start a run with feedback from one without (the paper's main path, method.md section 3), or from any
run that fits.

Parameters and optimizer state are taken leaf by leaf, by path. Only what the source cannot have, the fusion matrices
and their moments, comes from the initialiser; so does the norm of fused inputs where the source (an imported model)
norms no input, with the RMS of the source's embeddings as its gain (method.md section 2). Anything else that is
missing or has another shape is an error. The step count and the data position go on from the source's or start anew,
as `init.schedule` and `init.data` say.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fbt_jax.config import Config, flat_keys
from fbt_jax.data import Data
from fbt_jax.errors import UserError
from fbt_jax.training.checkpoint import Loaded, load_tree
from fbt_jax.training.integrity import named_leaves
from fbt_jax.training.run_folder import data_fingerprint, read_config, weight_phases
from fbt_jax.training.step import TrainState

_GAIN = 'params/input_norm/scale'


def load_source(config: Config, shapes: TrainState, data: Data) -> Loaded:
    """The newest checkpoint of the run `init.from`, found to fit `shapes`. Reads only, so that a mistake costs nothing.

    Raises:
      UserError: the source is no run, does not fit this model, has another data order although `init.data` is
      'continue', or is past the last step although `init.schedule` is.
      RuntimeError: its newest checkpoint can't be read.
    """
    source = config.init.from_
    if config.init.data == 'continue':
        _require_same_data(config, source, data)
    try:
        loaded = load_tree(source, what='params+opt_state' if config.init.optimizer else 'params')
    except ValueError as error:
        raise UserError(f'init.from = {source}: {error}') from None
    wanted, found = named_leaves(_taken_part(config, shapes)), named_leaves(loaded.tree)
    fresh = {'fusion', 'input_norm'} if config.model.input_norm == 'fused' else {'fusion'}
    wrong = [f'{name} is missing' for name in wanted if name not in found and not fresh & set(name.split('/'))]
    wrong += [
        f'{name} {found[name].shape} for {leaf.shape}'
        for name, leaf in wanted.items()
        if name in found and found[name].shape != leaf.shape
    ]
    if wrong:
        wrong.sort(key=lambda name: not name.startswith('params/'))  # the moments only repeat it
        more = f' and {len(wrong) - 6} more' if len(wrong) > 6 else ''
        raise UserError(f'init.from = {source}: does not fit this model: {", ".join(wrong[:6])}{more}')
    if config.init.schedule == 'continue' and loaded.step >= config.training.steps:
        raise UserError(
            f"training.steps = {config.training.steps}: with init.schedule = 'continue' the run goes on from step "
            f'{loaded.step} of {source}, so it must be more than that'
        )
    return loaded


def warm_start(config: Config, fresh: TrainState, loaded: Loaded, say: Callable[[str], None]) -> TrainState:
    """`fresh` with everything in its place that `load_source` has found; tells what was taken, initialised and left."""
    source, target = config.init.from_, _taken_part(config, fresh)
    wanted, found = named_leaves(target), named_leaves(loaded.tree)
    missing = [name for name in wanted if name not in found]
    left = [name for name in found if name not in wanted]
    if _GAIN in missing:
        rows_VD = np.asarray(found['params/embedding'], np.float64)[: config.model.vocab_size]
        found[_GAIN] = np.full(wanted[_GAIN].shape, np.sqrt(np.mean(rows_VD**2)))
    leaves = [_placed(found[n], leaf) if n in found else leaf for n, leaf in wanted.items()]
    state = fresh._replace(**jax.tree.unflatten(jax.tree.structure(target), leaves))
    if config.init.schedule == 'continue':
        state = state._replace(step=_placed(np.asarray(loaded.step), fresh.step))

    say(f'init.from {source}, step {loaded.step}: took {len(wanted) - len(missing)} arrays')
    say(f'  initialised: {", ".join(missing) or "nothing"}')
    say(f'  left in the source: {", ".join(left) or "nothing"}')
    say(
        f'  schedule: {config.init.schedule}, data: {config.init.data}, '
        f'optimizer state: {"taken" if config.init.optimizer else "new"}'
    )
    return state


def _placed(value: np.ndarray, like: jax.Array) -> jax.Array:
    """`value` in the dtype and on the devices of `like`, whatever process has which of them."""
    value = np.asarray(value).astype(like.dtype)
    return jax.make_array_from_callback(value.shape, like.sharding, lambda index: value[index])


def _taken_part(config: Config, state: TrainState) -> dict[str, Any]:
    return {'params': state.params} | ({'opt_state': state.opt_state} if config.init.optimizer else {})


def _require_same_data(config: Config, source: str, data: Data) -> None:
    theirs = read_config(source)
    keys = ('seed', 'data.batch_size', 'data.packing')
    ours, before = flat_keys(config), flat_keys(theirs)
    wrong = [f'{key} is {ours[key]!r}, was {before[key]!r}' for key in keys if ours[key] != before[key]]
    if weight_phases(config) != weight_phases(theirs):
        wrong.append("data.weights' phases begin at other steps, or have other shares")
    if not wrong and data_fingerprint(source) != data.fingerprint:
        wrong.append('the documents, the tokenizer or data.seq_len')
    if wrong:
        raise UserError(f"init.data = 'continue': the data order of {source} differs: {'; '.join(wrong)}")
