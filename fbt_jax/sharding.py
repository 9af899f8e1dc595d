"""The mesh, and the ONE table from logical axes to mesh axes that parameters, optimizer state, activations and batch
follow.

Mesh axes: `data` (replicas of the parameters; slices of a pod count here), `fsdp` (rows and parameters), `tensor`
(heads, MLP width, vocabulary), `context` (positions of a row, and parameters). One SPMD program under `jit` with these
shardings; XLA inserts the collectives, but where the best ones are known (embedding lookup, attention over a split
row, Newton-Schulz) the code says so with `jax.shard_map`. A parameter names its logical axes where it is defined, in
`model/`; nothing else has to be touched for it.
"""

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fbt_jax.config import Config, MeshConfig
from fbt_jax.config_model import ModelConfig
from fbt_jax.errors import UserError

MESH_AXES = ('data', 'fsdp', 'tensor', 'context')
# Logical axis -> the mesh axes that split it. An axis that isn't here is an error, never a silent replication.
RULES: dict[str, tuple[str, ...]] = {
    'batch': ('data', 'fsdp'),  # rows
    'length': ('context',),  # positions of a row
    'state': (),  # the width of activations
    'layers': (),
    'embed': ('fsdp', 'context'),  # the width, in parameters
    'heads': ('tensor',),
    'kv_heads': ('tensor',),
    'mlp': ('tensor',),
    'vocab': ('tensor',),
    'fused': ('tensor',),  # outputs of the feedback matrices
    'norm': (),  # scales: too small to split
}
MAX_REPLICATED = 0.05  # share of the parameters' bytes that may lie whole on every device: 0.02 % at 1B, 2 % of a toy


def mesh_axes(*logical: str | None) -> PartitionSpec:
    """The table's PartitionSpec of an array with these logical axes; None is a dimension that is never split."""
    entries = []
    for name in logical:
        if name is not None and name not in RULES:
            raise ValueError(f'logical axis {name!r}: must be one of {", ".join(RULES)}')
        axes = () if name is None else RULES[name]
        entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
    used = [axis for entry in entries if entry for axis in ([entry] if isinstance(entry, str) else entry)]
    if len(used) != len(set(used)):
        raise ValueError(f'logical axes {logical}: two of them are split over the same mesh axis, {entries}')
    return PartitionSpec(*entries)


def current_mesh() -> jax.sharding.AbstractMesh | None:
    """The mesh that `jax.set_mesh` has set; None where there is none or it has one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """`x` laid out as the table says, within `jax.set_mesh`; `x` itself where no mesh is set."""
    return x if current_mesh() is None else jax.lax.with_sharding_constraint(x, mesh_axes(*logical))


def reduce_scatter(x: jax.Array, axes: Sequence[str], *, dimension: int) -> jax.Array:
    """Within `shard_map`: the sum over `axes` of which each device keeps its part of `dimension`.

    One axis after the other, the slowest first. In one step over all of them a TPU compiler (libtpu 0.0.42) sums the
    whole array on every device and slices it, twice the bytes; so it does for any group that is the whole slice.
    """
    for axis in axes:
        if axis_size(axis) > 1:
            x = jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)
    return x


def replicated(tree: Any) -> Any:
    """Every array of `tree` whole on each device, so that any process can read it."""
    return tree if current_mesh() is None else jax.lax.with_sharding_constraint(tree, PartitionSpec())


def axis_size(*axes: str) -> int:
    """Devices along these axes of the current mesh together, 1 where there is none."""
    mesh = current_mesh()
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)


# Mesh


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a config over `devices` (default: all of all processes), neighbours placed by the interconnect.

    Several slices are replicas: `data` is then slices x mesh.data, the slice its slowest part. Devices that know no
    slice (GPUs, CPUs) are cut into equal runs in their order, such as the GPUs of one host.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = mesh_shape(config, len(devices))
    within = (shape[0] // config.slices, *shape[1:])
    if config.slices == 1:
        grid = mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)
    elif len({getattr(d, 'slice_index', 0) for d in devices}) == config.slices:
        grid = mesh_utils.create_hybrid_device_mesh(
            within, (config.slices, 1, 1, 1), devices, allow_split_physical_axes=True
        )
    else:
        grid = np.array(devices).reshape(shape)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def mesh_shape(config: MeshConfig, num_devices: int) -> tuple[int, int, int, int]:
    """Sizes of `MESH_AXES` with the -1 filled in; UserError if they don't make up `num_devices`."""
    sizes = [config.data, config.fsdp, config.tensor, config.context]
    fixed = config.slices * math.prod(size for size in sizes if size > 0)
    text = ', '.join(f'{axis}={size}' for axis, size in zip(MESH_AXES, sizes, strict=True))
    if num_devices % fixed or (-1 not in sizes and fixed != num_devices):
        raise UserError(
            f'mesh of slices={config.slices}, {text}: needs {"a multiple of " if -1 in sizes else ""}{fixed} devices, '
            f'but there are {num_devices}'
        )
    data, *rest = [num_devices // fixed if size == -1 else size for size in sizes]
    return (config.slices * data, *rest)  # type: ignore[return-value]


def batch_shards(mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in RULES['batch'])


def require_divisible(config: Config, mesh: Mesh) -> None:
    """Raises UserError unless every split dimension of `config` divides, naming the sizes that would do."""
    rows = config.data.batch_size // config.training.microbatches
    m = config.model
    dimensions = [
        ('batch', 'data.batch_size / training.microbatches', rows),
        ('length', 'data.seq_len', config.data.seq_len),
        *_model_dimensions(m),
    ]
    _require_divisible(dimensions, dict(mesh.shape), config.mesh.slices)


def _model_dimensions(m: ModelConfig) -> list[tuple[str, str, int]]:
    return [
        ('embed', 'model.width', m.width),
        ('fused', 'model.width', m.width),
        ('heads', 'model.num_heads', m.num_heads),
        ('kv_heads', 'model.num_kv_heads', m.num_kv_heads),
        ('mlp', 'model.mlp_width', m.mlp_width),
        ('vocab', 'the vocabulary, padded,', m.padded_vocab_size),
    ]


def _require_divisible(dimensions: list[tuple[str, str, int]], shape: dict[str, int], slices: int) -> None:
    def failing(sizes: dict[str, int]) -> Iterable[tuple[str, str, int]]:
        return (d for d in dimensions if d[2] % math.prod(sizes[axis] for axis in RULES[d[0]]))

    for logical, what, size in failing(shape):
        axes = [axis for axis in RULES[logical] if shape[axis] > 1]
        names = {axis: f'slices x mesh.{axis}' if axis == 'data' and slices > 1 else f'mesh.{axis}' for axis in axes}
        devices = math.prod(shape.values())
        legal = {
            axis: [n for n in range(1, devices + 1) if devices % n == 0 and not any(failing(shape | {axis: n}))]
            for axis in axes
        }
        options = '; '.join(f'{names[axis]}: {", ".join(map(str, n)) or "none"}' for axis, n in legal.items())
        raise UserError(
            f'{" x ".join(names.values())} = {" x ".join(str(shape[axis]) for axis in axes)}: {what} = {size} must be '
            f'divisible by it; legal sizes are {options} (another axis takes the rest of the {devices} devices)'
        )


# Shardings of a whole state


def parameter_specs(boxed: Any) -> Any:
    """PartitionSpecs of parameters from what `model.init` gives, whose leaves name their logical axes.

    ValueError names a parameter that has none: it would be replicated without a word.
    """

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        if not isinstance(leaf, nn.LogicallyPartitioned):
            raise ValueError(f'parameter {name}: names no logical axes')
        if len(leaf.names) != len(leaf.value.shape):
            raise ValueError(f'parameter {name}: {len(leaf.names)} logical axes for shape {leaf.value.shape}')
        return mesh_axes(*leaf.names)

    return jax.tree_util.tree_map_with_path(spec, boxed, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))


def state_specs(state: Any, params: Any, specs: Any) -> Any:
    """PartitionSpecs of a train state (arrays or their shapes): parameters and what the optimizer keeps of each.

    A leaf belongs to the parameter whose path its own ends in. Moments have the parameter's shape; NorMuon's second
    moments lack its next-to-last axis; everything else (counters) is replicated.
    """
    known = {
        _keys(path): (leaf.shape, spec)
        for (path, leaf), spec in zip(
            jax.tree_util.tree_leaves_with_path(params),
            jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)),
            strict=True,
        )
    }

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        keys = _keys(path)
        for length in range(len(keys), 0, -1):
            if keys[-length:] in known:
                shape, of_parameter = known[keys[-length:]]
                if leaf.shape == shape:
                    return of_parameter
                if leaf.shape == shape[:-2] + shape[-1:]:
                    return PartitionSpec(*of_parameter[:-2], of_parameter[-1])
                raise ValueError(f'state {"/".join(keys)}: shape {leaf.shape} is none of a parameter of shape {shape}')
        if leaf.shape:
            raise ValueError(f'state {"/".join(keys)}: shape {leaf.shape} belongs to no parameter')
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, state)


def _keys(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def named(mesh: Mesh, specs: Any) -> Any:
    """NamedShardings of a tree of PartitionSpecs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of every array of a `Batch`, (B, T)."""
    return NamedSharding(mesh, mesh_axes('batch', 'length'))


def local_rows(mesh: Mesh, num_rows: int) -> list[int]:
    """Indices, ascending, of the rows of a (num_rows, T) batch of which this process's devices hold a part."""
    parts = NamedSharding(mesh, mesh_axes('batch')).addressable_devices_indices_map((num_rows,)).values()
    return sorted({row for part in parts if part for row in range(*part[0].indices(num_rows))})


def place(batch: Any, mesh: Mesh, *, rows: Sequence[int], num_rows: int) -> Any:
    """Global (num_rows, T) arrays from the rows `rows` of them, (len(rows), T) in numpy, that this process has read."""
    sharding = batch_sharding(mesh)

    def one(local: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            wanted = range(*index[0].indices(num_rows))
            start = bisect.bisect_left(rows, wanted[0])
            return local[start : start + len(wanted), index[1]]

        return jax.make_array_from_callback((num_rows, *local.shape[1:]), sharding, part)

    return jax.tree.map(one, batch)


class Placement(NamedTuple):
    """Of one parameter."""

    bytes: int  # whole
    bytes_per_device: int
    replicated: bool  # not split over every device of `fsdp`, `tensor` and `context`


def placements(params: Any, shardings: Any, mesh: Mesh) -> list[Placement]:
    """How each parameter (in the order of its leaves) lies on a device.

    Raises UserError if more than MAX_REPLICATED of all bytes are not split as far as the mesh could.
    """
    copies = mesh.shape['data']
    found = []
    for leaf, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True):
        local = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        whole = math.prod(leaf.shape) * leaf.dtype.itemsize
        found.append(Placement(whole, local, local * mesh.size > whole * copies))
    total = sum(p.bytes for p in found)
    replicated = sum(p.bytes for p in found if p.replicated)
    if replicated > MAX_REPLICATED * total:
        names = [
            jax.tree_util.keystr(path, simple=True, separator='/')
            for (path, _), p in zip(jax.tree_util.tree_leaves_with_path(params), found, strict=True)
            if p.replicated
        ]
        raise UserError(
            f'mesh.* = {dict(mesh.shape)}: {replicated / total:.1%} of the parameters would lie undivided on devices '
            f'that could share them (at most {MAX_REPLICATED:.0%}): {", ".join(names[:6])}'
        )
    return found
