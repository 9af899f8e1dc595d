"""The linear layer of the stack: y = x W, W (in, out) kept in float32 at least and split over the mesh, in `dtype`.

The collectives are written out, forward and backward, because XLA's partitioner would sum a split matrix's gradient
over all devices whole and then slice it (seen in the program for TPU v5e 8x8). The side of W that `embed` splits is
gathered in the compute dtype when it is needed; its gradient dW = x^T dy leaves by a reduce-scatter, in the compute
dtype or, under `fp32_gradient_reduction`, in W's own (twice the bytes). The side that `tensor` splits stays split:
then y is split too (outputs), or a sum over `tensor` (inputs). Shapes: (B, T, in) -> (B, T, out).
"""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fbt_jax.sharding import RULES, current_mesh, mesh_axes

_GATHERED = {'fsdp', 'context'}  # they split rows and positions, so each device needs the whole side that they split


class Dense(nn.Module):
    """y = x W, (B, T, in) -> (B, T, features); W is normal with std fan_in^-1/2. `axes`: W's logical axes."""

    features: int
    axes: tuple[str, str]
    dtype: jnp.dtype
    param_dtype: jnp.dtype
    fp32_gradient_reduction: bool = False

    @nn.compact
    def __call__(self, x_BTi: jax.Array) -> jax.Array:
        initializer = nn.with_logical_partitioning(nn.initializers.variance_scaling(1.0, 'fan_in', 'normal'), self.axes)
        kernel: Any = self.param('kernel', initializer, (x_BTi.shape[-1], self.features), self.param_dtype)
        return _product(x_BTi.astype(self.dtype), kernel, self.axes, self.fp32_gradient_reduction)


class _Layout(NamedTuple):
    """How x, W and y lie on the mesh, and the mesh axes of each collective."""

    x: PartitionSpec
    kernel: PartitionSpec
    y: PartitionSpec
    gathered: tuple[tuple[str, ...], tuple[str, ...]]  # of W's two sides
    summed: tuple[tuple[str, ...], tuple[str, ...]]
    rows: tuple[str, ...]  # over which dW is summed, beyond those that it is scattered over


def _layout(axes: tuple[str, str]) -> _Layout:
    gathered = tuple(RULES[name] if set(RULES[name]) <= _GATHERED else () for name in axes)
    summed = tuple(() if side else RULES[name] for side, name in zip(gathered, axes, strict=True))
    kept = [None if side else name for side, name in zip(gathered, axes, strict=True)]
    scattered = {axis for side in gathered for axis in side}
    rows = tuple(axis for axis in (*RULES['batch'], *RULES['length']) if axis not in scattered)
    x, y = (mesh_axes('batch', 'length', name) for name in kept)
    return _Layout(x, mesh_axes(*axes), y, gathered, summed, rows)  # type: ignore[arg-type]


def _whole(kernel: jax.Array, layout: _Layout, dtype: jnp.dtype) -> jax.Array:
    """W as this device needs it: the sides that `embed` splits put together, in the compute dtype."""
    kernel = kernel.astype(dtype)
    for side, axes in enumerate(layout.gathered):
        if axes:
            kernel = jax.lax.all_gather(kernel, axes, axis=side, tiled=True)
    return kernel


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: jax.Array, kernel: jax.Array, axes: tuple[str, str], wide: bool) -> jax.Array:
    if current_mesh() is None:
        return x @ kernel.astype(x.dtype)
    layout = _layout(axes)

    def local(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.psum(x @ _whole(kernel, layout, x.dtype), layout.summed[0])

    return _on_each(local, (layout.x, layout.kernel), layout.y)(x, kernel)


def _forward(x, kernel, axes, wide):  # type: ignore[no-untyped-def]
    return _product(x, kernel, axes, wide), (x, kernel)


def _backward(axes, wide, residuals, d_y):  # type: ignore[no-untyped-def]
    x, kernel = residuals
    dtype = kernel.dtype if wide else x.dtype

    def gradients(x: jax.Array, d_y: jax.Array, whole: jax.Array) -> tuple[jax.Array, jax.Array]:
        return d_y @ whole.T, jnp.einsum('bti,bto->io', x, d_y, preferred_element_type=dtype)

    if current_mesh() is None:
        d_x, d_kernel = gradients(x, d_y, kernel.astype(x.dtype))
        return d_x, d_kernel.astype(kernel.dtype)
    layout = _layout(axes)

    def local(x: jax.Array, kernel: jax.Array, d_y: jax.Array) -> tuple[jax.Array, jax.Array]:
        d_x, d_kernel = gradients(x, d_y, _whole(kernel, layout, x.dtype))
        for side, side_axes in enumerate(layout.gathered):
            if side_axes:
                d_kernel = jax.lax.psum_scatter(d_kernel, side_axes, scatter_dimension=side, tiled=True)
        d_kernel = jax.lax.psum(d_kernel, layout.rows)
        return jax.lax.psum(d_x, layout.summed[1]), d_kernel.astype(kernel.dtype)

    specs = (layout.x, layout.kernel, layout.y)
    return _on_each(local, specs, (layout.x, layout.kernel))(x, kernel, d_y)


def _on_each(function: Any, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


_product.defvjp(_forward, _backward)
