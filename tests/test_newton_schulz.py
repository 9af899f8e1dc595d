"""Newton-Schulz: each matrix by itself against numpy in float64, the same on every mesh, and each computed once.

Shapes: S matrices of one kind, m x n. Mesh sizes are (data, fsdp, tensor, context).
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import float64, on_devices, quick_jit
from jax.sharding import NamedSharding

from fbt_jax.config import MeshConfig
from fbt_jax.sharding import make_mesh, mesh_axes
from fbt_jax.training.newton_schulz import orthogonalised

Array = np.ndarray

# Of a model of 3 layers: each leaf's shape and logical axes. Kinds that share a stack: `query` with `output`, which is
# its transpose, and `fusion`, one matrix of the same shape (S = 3 + 3 + 1); `up` and `gate` with `down` (9); `key` (3).
LEAVES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    'query': ((3, 16, 16), ('layers', 'embed', 'heads')),
    'output': ((3, 16, 16), ('layers', 'heads', 'embed')),
    'fusion': ((16, 16), ('embed', 'fused')),
    'key': ((3, 16, 8), ('layers', 'embed', 'kv_heads')),
    'up': ((3, 16, 24), ('layers', 'embed', 'mlp')),
    'gate': ((3, 16, 24), ('layers', 'embed', 'mlp')),
    'down': ((3, 24, 16), ('layers', 'mlp', 'embed')),
}
STACKS = (7, 3, 9)
MESHES = ((8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 8, 1), (1, 1, 1, 8), (2, 2, 2, 1), (1, 2, 2, 2), (1, 4, 1, 2))


def newton_schulz(matrix: Array) -> Array:
    """x <- a x + (b A + c A^2) x, A = x x^T, five times from x / |x|_F: Jordan's quintic, by its definition."""
    x = matrix.astype(np.float64) / np.linalg.norm(matrix)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def each(leaf: Array) -> Array:
    flat = leaf.reshape(-1, *leaf.shape[-2:])
    return np.stack([newton_schulz(matrix) for matrix in flat]).reshape(leaf.shape)


def leaves(dtype: Any = np.float64) -> dict[str, Array]:
    """Of very different size from matrix to matrix, so that a norm over more than one of them shows."""
    rng = np.random.default_rng(0)
    found = {}
    for name, (shape, _) in LEAVES.items():
        scale = 10.0 ** rng.integers(-3, 4, size=(*shape[:-2], 1, 1))
        found[name] = (scale * rng.normal(size=shape)).astype(dtype)
    return found


def specs() -> dict[tuple[str, ...], Any]:
    return {(name,): mesh_axes(*axes) for name, (_, axes) in LEAVES.items()}


def run(updates: dict[str, Any]) -> dict[str, Any]:
    transformation = orthogonalised(specs())
    return transformation.update(updates, transformation.init(updates))[0]


@pytest.mark.parametrize(
    'shape', [(8, 8), (5, 12), (12, 5), (1, 7), (4, 8, 8), (3, 5, 12), (3, 12, 5), (2, 3, 6, 4)], ids=str
)
@float64
def test_each_matrix_of_a_leaf_equals_numpy(shape: tuple[int, ...]) -> None:
    leaf = np.random.default_rng(1).normal(size=shape)
    transformation = orthogonalised()
    [result] = jax.tree.leaves(transformation.update({'w': jnp.asarray(leaf)}, transformation.init({'w': leaf}))[0])
    assert result.dtype == np.float64
    np.testing.assert_allclose(result, each(leaf), rtol=0, atol=1e-7)  # optax divides by |x|_F + 1e-8


@float64
def test_leaves_that_share_a_stack_come_back_to_their_places() -> None:
    updates = leaves()
    results = run(jax.tree.map(jnp.asarray, updates))
    assert results.keys() == updates.keys()
    for name, leaf in updates.items():
        np.testing.assert_allclose(results[name], each(leaf), rtol=0, atol=1e-4, err_msg=name)


def test_matrices_of_zeros_stay_zeros() -> None:
    updates = {'w': jnp.zeros((2, 4, 6)).at[1].set(jnp.eye(4, 6))}
    result = np.asarray(orthogonalised().update(updates, None)[0]['w'])
    assert not result[0].any()
    np.testing.assert_allclose(result[1], newton_schulz(np.eye(4, 6)), atol=1e-6)


# On 8 fake devices


def facts_of_eight_devices() -> dict[str, Any]:
    """For each mesh: the largest difference from one device by leaf, where results lie, the products' batches."""
    updates = leaves(np.float32)
    alone = quick_jit(run)(updates)
    found = {}
    for sizes in MESHES:
        mesh = make_mesh(MeshConfig(1, *sizes))
        placed = {name: jax.device_put(leaf, NamedSharding(mesh, specs()[(name,)])) for name, leaf in updates.items()}
        with jax.set_mesh(mesh):
            results = quick_jit(run)(placed)
            batches = sorted(products(jax.make_jaxpr(run)(placed).jaxpr, False))
        found[','.join(map(str, sizes))] = {
            'differences': {name: float(np.max(np.abs(results[name] - np.asarray(alone[name])))) for name in updates},
            'stays': all(results[name].sharding.is_equivalent_to(placed[name].sharding, placed[name].ndim)
                         for name in placed),
            'products': batches,
        }  # fmt: skip
    return found


def products(jaxpr: Any, inside: bool) -> Iterator[int]:
    """Matrices in each batched product, those within shard_map as a device sees them; -1 for one outside of it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == 'dot_general':
            lhs = equation.invars[0].aval.shape
            (_, _), (batch, _) = equation.params['dimension_numbers']
            yield math.prod(lhs[i] for i in batch) if inside else -1
        turns = equation.params['length'] if equation.primitive.name == 'scan' else 1
        for value in turns * jax.tree.leaves(
            equation.params, is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr')
        ):
            inner = getattr(value, 'jaxpr', value)
            if hasattr(inner, 'eqns'):
                yield from products(inner, inside or equation.primitive.name == 'shard_map')


@pytest.fixture(scope='module')
def eight() -> dict[str, Any]:
    return on_devices(facts_of_eight_devices)


@pytest.mark.parametrize('sizes', MESHES, ids=str)
def test_every_mesh_gives_what_one_device_gives(eight: dict[str, Any], sizes: tuple[int, ...]) -> None:
    """To float32's rounding; entries are of size 1. The results stay split as the parameters are."""
    found = eight[','.join(map(str, sizes))]
    assert found['differences'].keys() == LEAVES.keys()
    assert max(found['differences'].values()) < 2e-5, found['differences']
    assert found['stays']


@pytest.mark.parametrize('sizes', MESHES, ids=str)
def test_each_matrix_is_orthogonalised_once(eight: dict[str, Any], sizes: tuple[int, ...]) -> None:
    """Three products in each of five iterations, of ceil(S / 8) of a stack's matrices on a device."""
    expected = sorted(math.ceil(count / 8) for count in STACKS for _ in range(3 * 5))
    assert eight[','.join(map(str, sizes))]['products'] == expected
