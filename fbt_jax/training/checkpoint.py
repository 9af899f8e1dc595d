"""Checkpoints: a thin layer over Orbax that saves in the background, keeps the right ones and trusts no byte it reads.

DIR/checkpoints/STEP holds two items: `state` (a pytree of arrays) and `meta` (the position of the input iterator, the
caller's JSON, and a manifest: path, shape, dtype and digest of every leaf). Every byte is checked against a digest at
restore, see `integrity.py`. Nothing in it depends on the mesh or the number of processes that saved it: the position is
a global one, arrays are read into whatever shardings they are asked for.
A step counts once Orbax has renamed its finished folder into place; older ones are removed after that, never before.
"""

import contextlib
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from fbt_jax.training.integrity import (
    DamagedError,
    brief,
    damage,
    manifest_of,
    named_leaves,
    quiet_failures,
    require_digests,
    seal,
    unseal,
)
from fbt_jax.training.processes import everywhere, on_primary
from fbt_jax.training.signals import Stopped

_TREES = {'params': ('params',), 'params+opt_state': ('params', 'opt_state')}


# Orbax logs each failure that it also raises, with a traceback, and warns in normal use.
logging.getLogger('absl').addFilter(lambda record: 'orbax' not in record.pathname)


class CheckpointError(RuntimeError):
    """A save failed, or no checkpoint of a run can be read."""


class Restored(NamedTuple):
    """`state` has the structure, dtypes and shardings of the abstract state it was asked for."""

    step: int
    state: Any
    meta: dict[str, Any]


class Loaded(NamedTuple):
    """`tree` is nested dicts of numpy arrays in the saved dtypes; sequence positions are keys '0', '1', ..."""

    step: int
    tree: dict[str, Any]
    meta: dict[str, Any]
    data_position: Any


class Checkpoints:
    """The checkpoints of the run in `workdir`: the newest `keep`, and the one with the lowest `loss_pass_1`.

    A context manager: leaving it waits for the save in progress. Opening it removes what killed saves left behind, so
    only the process (group) that trains opens one; readers use `load_tree`.
    """

    def __init__(self, workdir: str, keep: int) -> None:
        self._root = _absolute(workdir)
        self._losses = _Losses()
        self._saving: int | None = None
        self._failure: CheckpointError | None = None
        policies = [checkpoint_managers.LatestN(keep), _Best(self._losses)]
        self._manager = _open_manager(
            self._root,
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            cleanup_tmp_directories=True,
            # Made in the background, a folder that can't be made leaves `save` waiting for it for many minutes.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        for step in self.steps():
            try:
                self._losses[step] = _read_header(self._manager, step)['loss_pass_1']
            except Exception as error:
                damage(error)  # never the best, then; restore_latest deals with it

    def __enter__(self) -> 'Checkpoints':
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if jax.process_count() == 1 or kind in (None, Stopped):  # else a peer that has failed would be waited for
            self.close()

    def steps(self) -> list[int]:
        """Complete checkpoints, ascending; the one being saved, if there is one, is the last of them."""
        return sorted(self._manager.all_steps())

    def best_step(self) -> int | None:
        """The step with the lowest finite validation `loss_pass_1`, the newest of equals; None if none has one."""
        return self._losses.best(self.steps())

    def save(
        self,
        step: int,
        state: Any,
        *,
        data_iterator: Any,
        meta: dict[str, Any],
        metrics: dict[str, Any] | None = None,
    ) -> bool:
        """Starts saving `step` in the background; False (and nothing done) if it is complete already.

        Returns once the arrays are copied, so `state` may be donated and `data_iterator` moved on. `meta` is JSON.
        `metrics` is the validation row of this step, if there is one. Raises CheckpointError if this or an earlier save
        failed.
        """
        self.wait()
        if step in self.steps():
            return False
        loss = None if metrics is None else float(metrics['loss_pass_1'])
        loss = loss if loss is not None and math.isfinite(loss) else None
        header = {
            'meta': meta,
            'loss_pass_1': loss,
            'data_position': data_iterator.get_state(),
            'leaves': manifest_of(state),
        }
        self._losses[step] = loss
        self._saving = step
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_nest(named_leaves(state))),
            meta=ocp.args.JsonSave({'sealed': seal(header)}),
        )
        try:
            return self._manager.save(step, args=items, force=True)
        except Exception as error:
            raise self._failed(step, error) from error

    def check(self) -> None:
        """Raises CheckpointError if a save has failed; cheap and never blocks: call it every step."""
        if self._failure is not None:
            raise self._failure
        if self._saving is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Blocks until the save in progress is complete; raises CheckpointError if it failed."""
        if self._failure is not None:
            raise self._failure
        if self._saving is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(self._saving, error) from error
        if not (self._manager.directory / str(self._saving)).exists():
            raise self._failed(self._saving, DamagedError('its folder is missing after the save'))
        self._saving = None

    def close(self) -> None:
        """Waits, then frees the threads; raises CheckpointError if the last save failed."""
        try:
            self.wait()
        except CheckpointError:
            with contextlib.suppress(Exception):  # Orbax may raise the same failure once more
                self._manager.close()
            raise
        self._manager.close()

    @quiet_failures()
    def restore_latest(self, abstract_state: Any, data_iterator: Any, *, say: Callable[[str], None]) -> Restored | None:
        """The newest readable checkpoint; None only if there is no checkpoint at all.

        abstract_state: pytree of jax.ShapeDtypeStruct (shape, dtype, sharding) or arrays. `data_iterator` is set to
        the position saved with it. Damaged steps are passed over, told through `say` and moved to
        DIR/corrupt_checkpoints, but only once an older one has been read. Raises ValueError if the checkpoint doesn't
        fit `abstract_state` or the iterator (nothing is moved then), CheckpointError if there are steps but none can be
        read. Processes agree on the step: damage that one of them meets counts for all.
        """
        steps = self.steps()[::-1]
        damaged: dict[int, str] = {}
        for step in steps:
            try:
                header = _read_header(self._manager, step)
            except Exception as error:
                damaged[step] = damage(error)
                continue
            _require_fit(f'checkpoint {step} in {self._manager.directory}', header, abstract_state)
            state = None
            try:
                state = self._read(step, header['leaves'], abstract_state)
            except Exception as error:
                damaged[step] = damage(error)
            if not everywhere(state is not None):
                damaged.setdefault(step, 'another process cannot read it')
                continue
            _set_position(data_iterator, header['data_position'], f'checkpoint {step} in {self._manager.directory}')
            for bad in damaged:
                self._set_aside(bad, f'{damaged[bad]}; going on from step {step}', say)
            return Restored(step, state, header['meta'])
        if steps:
            reasons = '; '.join(f'{step}: {reason}' for step, reason in damaged.items())
            raise CheckpointError(f'none of the checkpoints in {self._manager.directory} can be read ({reasons})')
        return None

    def _read(self, step: int, manifest: dict[str, Any], abstract_state: Any) -> Any:
        """The state. Read in the saved dtypes, so that digests are compared before anything is cast."""
        wanted = named_leaves(abstract_state)
        target = {
            name: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(manifest[name]['dtype']), sharding=_sharding(leaf))
            for name, leaf in wanted.items()
        }
        items = ocp.args.Composite(state=ocp.args.StandardRestore(_nest(target)))
        leaves = named_leaves(self._manager.restore(step, args=items).state)
        require_digests(leaves, manifest)
        cast = [leaves[name].astype(leaf.dtype) for name, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), cast)

    def _set_aside(self, step: int, reason: str, say: Callable[[str], None]) -> None:
        home = self._root / 'corrupt_checkpoints'
        target, n = home / str(step), 1
        while target.exists():
            target, n = home / f'{step}.{n}', n + 1

        def move() -> None:
            home.mkdir(parents=True, exist_ok=True)
            (self._manager.directory / str(step)).rename(target)

        on_primary(move)
        self._losses.pop(step, None)
        self._manager.reload()
        say(f'checkpoint {step} cannot be read and was moved to {target}: {reason}')

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        where = self._manager.directory / str(step)
        self._failure = CheckpointError(f'saving the checkpoint {where} failed: {brief(error)}')
        self._losses.pop(step, None)
        return self._failure


@quiet_failures()
def load_tree(workdir: str, step: int | None = None, *, what: str = 'params') -> Loaded:
    """Reads `params` or `params+opt_state` of a checkpoint (default: the newest) with no knowledge of what saved it.

    Works on any number of devices and changes nothing in `workdir`, so it may run beside the training process. Raises
    ValueError if there is no such checkpoint, CheckpointError if it can't be read.
    """
    if what not in _TREES:
        raise ValueError(f'what = {what!r}: must be one of {", ".join(_TREES)}')
    root = _absolute(workdir)
    if not (root / 'checkpoints').exists():
        raise ValueError(f'workdir = {workdir}: holds no checkpoints')
    with _open_manager(root, read_only=True) as manager:
        steps = sorted(manager.all_steps())
        if not steps:
            raise ValueError(f'workdir = {workdir}: holds no complete checkpoint yet')
        step = steps[-1] if step is None else step
        if step not in steps:
            raise ValueError(f'step = {step}: {workdir} has checkpoints of steps {", ".join(map(str, steps))}')
        try:
            header = _read_header(manager, step)
            leaves = {k: v for k, v in header['leaves'].items() if k.split('/')[0] in _TREES[what]}
            target = _nest({k: jax.ShapeDtypeStruct(v['shape'], jnp.dtype(v['dtype'])) for k, v in leaves.items()})
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), target)
            restore = ocp.args.PyTreeRestore(target, restore_args=as_numpy, partial_restore=True)
            tree = manager.restore(step, args=ocp.args.Composite(state=restore)).state
            require_digests(named_leaves(tree), leaves)
        except Exception as error:
            reason = damage(error)
            others = ', '.join(str(s) for s in steps if s != step) or 'none'
            message = f'checkpoint {step} in {workdir} cannot be read ({reason}); other steps: {others}'
            raise CheckpointError(message) from error
    return Loaded(step, tree, header['meta'], header['data_position'])


def _nest(leaves: dict[str, Any]) -> dict[str, Any]:
    """Nested dicts of named leaves: the form on disk, free of the classes that optimizers are made of."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split('/')
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def _absolute(workdir: str) -> epath.Path:
    return epath.Path(workdir) if '://' in workdir else epath.Path(workdir).resolve()  # Orbax takes no relative path


def _open_manager(root: epath.Path, **options: Any) -> ocp.CheckpointManager:
    # Lightweight: Orbax would read every step's own metadata at the start and fail on the first damaged file.
    return ocp.CheckpointManager(
        root / 'checkpoints', options=ocp.CheckpointManagerOptions(lightweight_initialize=True, **options)
    )


class _Losses(dict[int, float | None]):
    """{step: validation loss_pass_1, None if it had none or it wasn't finite}."""

    def best(self, steps: list[int]) -> int | None:
        known = [(loss, -step) for step in steps if (loss := self.get(step)) is not None]
        return -min(known)[1] if known else None


class _Best:
    """Orbax preservation policy. Orbax's own BestN reads its metrics unchecked and sorts NaN anywhere."""

    def __init__(self, losses: _Losses) -> None:
        self._losses = losses

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        best = self._losses.best([c.step for c in checkpoints])
        return [c.step == best for c in checkpoints]


def _read_header(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    return unseal(manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta['sealed'])


def _set_position(data_iterator: Any, position: Any, where: str) -> None:
    try:
        data_iterator.set_state(position)
    except Exception as error:
        raise ValueError(f'{where}: the data pipeline does not take the saved position: {brief(error)}') from error


def _require_fit(where: str, header: dict[str, Any], abstract_state: Any) -> None:
    """ValueError unless the saved leaves are exactly those of `abstract_state`, by path and shape."""
    saved, wanted = header['leaves'], named_leaves(abstract_state)
    differences = {
        'missing in the checkpoint': sorted(wanted.keys() - saved.keys()),
        'extra in the checkpoint': sorted(saved.keys() - wanted.keys()),
        'mismatched': [
            f'{name} (saved {tuple(saved[name]["shape"])}, wanted {tuple(leaf.shape)})'
            for name, leaf in wanted.items()
            if name in saved and tuple(saved[name]['shape']) != tuple(leaf.shape)
        ],
    }
    if any(differences.values()):
        listing = '; '.join(f'{kind}: {", ".join(names)}' for kind, names in differences.items() if names)
        raise ValueError(f'{where} holds another model or optimizer; {listing}')
    for name, leaf in wanted.items():
        # A mesh that doesn't divide the array must be told as such, not found while reading and taken for damage.
        _sharding(leaf).shard_shape(tuple(leaf.shape))
        dtype = saved[name]['dtype']
        if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
            raise ValueError(f'{where}: {name} was saved as {dtype}, which needs jax_enable_x64')


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    return leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
