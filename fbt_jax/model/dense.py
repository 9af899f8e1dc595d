"""The linear layer of the stack: x W with W (in, out) float32 at least, its logical axes named, computed in `dtype`.

Like flax's Dense without bias, but for the gradient: under `fp32_gradient_reduction` dW = x^T dy leaves the matrix unit
in W's own dtype, so that the sum over the devices that hold other rows is taken in float32 (twice the bytes on the
wire), not in the compute dtype.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class Dense(nn.Module):
    """y = x W, (..., in) -> (..., features); W is normal with std fan_in^-1/2."""

    features: int
    axes: tuple[str | None, str | None]
    dtype: jnp.dtype
    param_dtype: jnp.dtype
    fp32_gradient_reduction: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        initializer = nn.with_logical_partitioning(nn.initializers.variance_scaling(1.0, 'fan_in', 'normal'), self.axes)
        kernel: Any = self.param('kernel', initializer, (x.shape[-1], self.features), self.param_dtype)
        product = _product_wide_gradient if self.fp32_gradient_reduction else _product
        return product(x.astype(self.dtype), kernel)


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return x @ kernel.astype(x.dtype)


@jax.custom_vjp
def _product_wide_gradient(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _product(x, kernel)


def _forward(x, kernel):  # type: ignore[no-untyped-def]
    return _product(x, kernel), (x, kernel)


def _backward(residuals, d_y):  # type: ignore[no-untyped-def]
    x, kernel = residuals
    d_kernel = jnp.einsum('...i,...o->io', x, d_y, preferred_element_type=kernel.dtype)
    return d_y @ kernel.astype(d_y.dtype).T, d_kernel


_product_wide_gradient.defvjp(_forward, _backward)
