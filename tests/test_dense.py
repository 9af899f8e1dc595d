"""The products of split matrices against float64 numpy, on one device and on meshes of 8 fake ones.

Shapes: B rows, T positions, D inputs, F and G outputs of two matrices that read the same input.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import on_devices

from fbt_jax.config import MeshConfig
from fbt_jax.model.dense import products
from fbt_jax.sharding import make_mesh, mesh_axes, named

COLUMNS = (('embed', 'mlp'), ('embed', 'heads'))  # outputs split over tensor
ROWS = (('mlp', 'embed'), ('mlp', 'embed'))  # inputs split over tensor
MESHES = ((1, 1, 1, 1), (1, 2, 2, 2), (2, 2, 2, 1), (1, 1, 2, 4))
B, T, D, F, G = 4, 8, 16, 32, 8


def inputs() -> tuple[np.ndarray, ...]:
    """x, both matrices, and the cotangents of both products; numbers that bfloat16 holds exactly."""
    rng = np.random.default_rng(0)
    shapes = ((B, T, D), (D, F), (D, G), (B, T, F), (B, T, G))
    return tuple(np.asarray(jnp.asarray(rng.normal(size=s), jnp.bfloat16), np.float32) for s in shapes)


def expected() -> list[np.ndarray]:
    """Products, d x, d W of both, in float64."""
    x, w, u, d_y, d_z = (a.astype(np.float64) for a in inputs())
    d_w, d_u = (np.einsum('bti,bto->io', x, d) for d in (d_y, d_z))
    return [x @ w, x @ u, d_y @ w.T + d_z @ u.T, d_w, d_u]


def errors(dtype: Any, wide: bool, axes: Any, sizes: tuple[int, ...]) -> list[float]:
    """Largest error of each, relative to the largest entry."""
    x, w, u, *d_ys = inputs()

    def run(x: Any, kernels: Any) -> Any:
        return products(x.astype(dtype), kernels, axes, fp32_gradient_reduction=wide)

    def both(x: Any, kernels: Any, d_ys: Any) -> Any:
        ys, pull = jax.vjp(run, x, kernels)
        d_x, d_kernels = pull(tuple(d.astype(dtype) for d in d_ys))
        return [*ys, d_x, *d_kernels]

    mesh = make_mesh(MeshConfig(1, *sizes), jax.devices()[: int(np.prod(sizes))])
    specs = (mesh_axes('batch', 'length', 'mlp' if axes is ROWS else 'state'), tuple(mesh_axes(*a) for a in axes))
    with jax.set_mesh(mesh):
        placed = jax.device_put((jnp.asarray(x), (jnp.asarray(w), jnp.asarray(u))), named(mesh, specs))
        found = jax.jit(both)(*placed, tuple(jnp.asarray(d) for d in d_ys))
    return [
        float(np.max(np.abs(np.asarray(f, np.float64) - e)) / np.max(np.abs(e)))
        for f, e in zip(found, expected(), strict=True)
    ]


def all_errors() -> list[Any]:
    return [
        [errors(jnp.float32, False, axes, sizes) for axes in (COLUMNS, ROWS) for sizes in MESHES],
        [errors(jnp.bfloat16, wide, COLUMNS, sizes) for wide in (False, True) for sizes in MESHES],
    ]


@pytest.fixture(scope='module')
def found() -> list[Any]:
    return on_devices(all_errors)


def test_products_and_gradients_on_every_mesh(found: list[Any]) -> None:
    assert np.max(found[0]) < 1e-6


def test_gradients_are_summed_in_float32_where_asked(found: list[Any]) -> None:
    """bfloat16 inputs have exact products in float32; summed there, only its rounding is left."""
    narrow, wide = np.array(found[1]).reshape(2, len(MESHES), 5)[:, :, 3:]
    assert np.max(wide) < 1e-6
    assert np.min(narrow) > 1e-4
