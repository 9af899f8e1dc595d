"""The linear layers of the stack: y = x W (+ b), W (in, out) kept in float32 at least and split over the mesh.

The collectives are written out, forward and backward, because XLA's partitioner would sum a split matrix's gradient
over all devices whole and then slice it (seen in the program for TPU v5e 8x8). The side of W that `embed` splits is
gathered in the compute dtype when it is needed; its gradient dW = x^T dy leaves by a reduce-scatter, in the compute
dtype or, under `fp32_gradient_reduction`, in W's own (twice the bytes). The side that `tensor` splits stays split:
then y is split too (outputs), or a sum over `tensor` (inputs). Matrices that read the same x share one sum of dx.
Shapes: (B, T, in) -> (B, T, out).
"""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fbt_jax.sharding import RULES, current_mesh, mesh_axes, reduce_scatter

_GATHERED = {'fsdp', 'context'}  # they split rows and positions, so each device needs the whole side that they split

Axes = tuple[str, str]


class Kernel(nn.Module):
    """The matrix W, (in, out), normal with std fan_in^-1/2; `axes` are its logical axes. The bias (out,), of zeros."""

    shape: tuple[int, int]
    axes: Axes
    dtype: jnp.dtype
    with_bias: bool

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array | None]:
        initializer = nn.with_logical_partitioning(nn.initializers.variance_scaling(1.0, 'fan_in', 'normal'), self.axes)
        kernel: Any = self.param('kernel', initializer, self.shape, self.dtype)
        if not self.with_bias:
            return kernel, None
        zeros = nn.with_logical_partitioning(nn.initializers.zeros, ('norm',))
        bias: Any = self.param('bias', zeros, self.shape[1:], self.dtype)
        return kernel, bias


def products(
    x_BTi: jax.Array, kernels: tuple[jax.Array, ...], axes: tuple[Axes, ...], *, fp32_gradient_reduction: bool
) -> tuple[jax.Array, ...]:
    """x W for each W, in the dtype of x. `axes`: the logical axes of each; those of the inputs must be the same."""
    return _products(x_BTi, kernels, axes, fp32_gradient_reduction)


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
def _products(x: jax.Array, kernels: tuple[jax.Array, ...], axes: tuple[Axes, ...], wide: bool) -> Any:
    if current_mesh() is None:
        return tuple(x @ kernel.astype(x.dtype) for kernel in kernels)
    layouts = [_layout(a) for a in axes]

    def local(x: jax.Array, *kernels: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(
            jax.lax.psum(x @ _whole(kernel, layout, x.dtype), layout.summed[0])
            for kernel, layout in zip(kernels, layouts, strict=True)
        )

    in_specs = (layouts[0].x, *(layout.kernel for layout in layouts))
    return _on_each(local, in_specs, tuple(layout.y for layout in layouts))(x, *kernels)


def _forward(x, kernels, axes, wide):  # type: ignore[no-untyped-def]
    return _products(x, kernels, axes, wide), (x, kernels)


def _backward(axes, wide, residuals, d_ys):  # type: ignore[no-untyped-def]
    x, kernels = residuals
    dtype = kernels[0].dtype if wide else x.dtype

    def d_kernel(x: jax.Array, d_y: jax.Array) -> jax.Array:
        return jnp.einsum('bti,bto->io', x, d_y, preferred_element_type=dtype)

    if current_mesh() is None:
        d_x = sum(d_y @ kernel.astype(x.dtype).T for d_y, kernel in zip(d_ys, kernels, strict=True))
        return d_x, tuple(d_kernel(x, d_y).astype(k.dtype) for d_y, k in zip(d_ys, kernels, strict=True))
    layouts = [_layout(a) for a in axes]
    count = len(kernels)

    def local(x: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
        kernels, d_ys = rest[:count], rest[count:]
        d_xs, d_kernels = [], []
        for kernel, d_y, layout in zip(kernels, d_ys, layouts, strict=True):
            d_xs.append(d_y @ _whole(kernel, layout, x.dtype).T)
            gradient = d_kernel(x, d_y)
            for side, side_axes in enumerate(layout.gathered):
                gradient = reduce_scatter(gradient, side_axes, dimension=side)
            d_kernels.append(jax.lax.psum(gradient, layout.rows).astype(kernel.dtype))
        d_x = sum(d_xs[1:], start=d_xs[0])
        return jax.lax.psum(d_x, layouts[0].summed[1]), *d_kernels

    x_spec, kernel_specs = layouts[0].x, tuple(layout.kernel for layout in layouts)
    in_specs = (x_spec, *kernel_specs, *(layout.y for layout in layouts))
    d_x, *d_kernels = _on_each(local, in_specs, (x_spec, *kernel_specs))(x, *kernels, *d_ys)
    return d_x, tuple(d_kernels)


def _on_each(function: Any, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


_products.defvjp(_forward, _backward)
