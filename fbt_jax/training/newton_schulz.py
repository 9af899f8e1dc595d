"""Newton-Schulz orthogonalisation, each matrix once: spread over the devices instead of repeated on every one.

On a mesh each device holds a slice of every matrix, and every iteration needs whole ones. Matrices of one shape (up to
transposition, which Newton-Schulz commutes with) are stacked, (S, m, n); one all-to-all turns slices of all of them
into a few whole matrices a device, and one turns the results back. Replicated, this work would not shrink with the
mesh and would cost more than the model's own step on a pod. The iteration itself is optax's.
The stacks don't depend on each other, so the compiler may overlap one's exchange with another's products.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from fbt_jax.sharding import MESH_AXES, axis_size, current_mesh

Axes = tuple[str, ...]


class _Kind(NamedTuple):
    """Matrices that can share a stack: m <= n, and the mesh axes that split each side."""

    m: int
    n: int
    rows: Axes
    columns: Axes


def orthogonalised(specs: dict[tuple[str, ...], PartitionSpec] | None = None) -> optax.GradientTransformation:
    """Replaces each leaf (..., m, n) by the Newton-Schulz iterate of each of its matrices.

    specs: PartitionSpec of each parameter by its path's keys; needed on a mesh of several devices.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        paths_and_leaves, structure = jax.tree.flatten_with_path(updates)
        spec_of = [
            PartitionSpec() if current_mesh() is None else specs[tuple(key.key for key in path)]  # type: ignore[index]
            for path, _ in paths_and_leaves
        ]
        leaves = [leaf for _, leaf in paths_and_leaves]
        kinds = [_kind(leaf.shape, spec) for leaf, spec in zip(leaves, spec_of, strict=True)]
        for kind in dict.fromkeys(kind for kind, _ in kinds):
            members = [i for i, (k, _) in enumerate(kinds) if k == kind]
            flips = [kinds[i][1] for i in members]
            run = _stacked(kind, flips)
            if current_mesh() is not None:
                member_specs = tuple(spec_of[i] for i in members)
                run = jax.shard_map(run, in_specs=member_specs, out_specs=member_specs, check_vma=False)
            for i, result in zip(members, run(*(leaves[i] for i in members)), strict=True):
                leaves[i] = result
        return jax.tree.unflatten(structure, leaves), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _kind(shape: tuple[int, ...], spec: PartitionSpec) -> tuple[_Kind, bool]:
    """The stack that a leaf goes to, and whether its matrices are transposed for it."""
    entries = (*spec, *[None] * (len(shape) - len(spec)))
    rows, columns = (_axes(entry) for entry in entries[-2:])
    upright = _Kind(shape[-2], shape[-1], rows, columns)
    flipped = _Kind(shape[-1], shape[-2], columns, rows)
    return (upright, False) if upright[:2] < flipped[:2] or upright <= flipped else (flipped, True)


def _axes(entry: str | Axes | None) -> Axes:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _stacked(kind: _Kind, flips: list[bool]) -> Callable[..., tuple[jax.Array, ...]]:
    """A function of the leaves' local parts; on one device these are the leaves."""

    def run(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        parts = [jnp.swapaxes(leaf, -1, -2) if flip else leaf for leaf, flip in zip(leaves, flips, strict=True)]
        stack_Smn = jnp.concatenate([part.reshape(-1, *part.shape[-2:]) for part in parts])
        result_Smn = _newton_schulz(stack_Smn) if current_mesh() is None else _spread(stack_Smn, kind)
        results, at = [], 0
        for part, flip in zip(parts, flips, strict=True):
            count = part.size // (part.shape[-1] * part.shape[-2])
            piece = result_Smn[at : at + count].reshape(part.shape)
            results.append(jnp.swapaxes(piece, -1, -2) if flip else piece)
            at += count
        return tuple(results)

    return run


def _spread(stack_Smn: jax.Array, kind: _Kind) -> jax.Array:
    """Each device orthogonalises its share of the S matrices; zeros fill up the last shares."""
    copies = tuple(a for a in MESH_AXES if a not in kind.rows + kind.columns)
    devices = axis_size(*MESH_AXES)
    count = stack_Smn.shape[0]
    share = -(-count // devices)
    x = jnp.pad(stack_Smn, ((0, share * devices - count), (0, 0), (0, 0)))
    for axes, dimension in ((kind.rows, 1), (kind.columns, 2)):
        if axes:
            x = _exchange(x, axes, split_axis=0, concat_axis=dimension)
    x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(copies) * share, share)
    x = _newton_schulz(x)
    x = jax.lax.all_gather(x, copies, axis=0, tiled=True)
    for axes, dimension in ((kind.columns, 2), (kind.rows, 1)):
        if axes:
            x = _exchange(x, axes, split_axis=dimension, concat_axis=0)
    return x[:count]


def _exchange(x: jax.Array, axes: Axes, *, split_axis: int, concat_axis: int) -> jax.Array:
    # XLA's CPU compiler (jax 0.10.2) looks through the stack for the exchange's operands, finds one transposed and one
    # not, and refuses them for their layouts; the barrier makes it take the stack as it is.
    x = jax.lax.optimization_barrier(x)
    return jax.lax.all_to_all(x, axes, split_axis=split_axis, concat_axis=concat_axis, tiled=True)


def _newton_schulz(x_Smn: jax.Array) -> jax.Array:
    """optax's Muon without momentum is the iteration alone: Jordan's quintic, five times."""
    axes = MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    muon = scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=axes)
    return muon.update(x_Smn, muon.init(x_Smn))[0]
