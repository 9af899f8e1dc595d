"""Every implementation of attention: against a dense one in numpy, in its memory, on meshes and compiled for TPU.

Run as a script (`python tests/test_attention.py mesh`, or `tpu`) it makes the checks that need a process of their own.
Shapes: B rows, T query and S key positions, N query heads, M key/value heads, H head width.
"""

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import jaxpr_sizes, quick_jit
from jax.sharding import NamedSharding

from fbt_jax.config import MeshConfig
from fbt_jax.errors import UserError
from fbt_jax.model import attention as module
from fbt_jax.model import flash, splash
from fbt_jax.model.attention import attention, first_visible, resolve_implementation
from fbt_jax.sharding import make_mesh, mesh_axes
from fbt_jax.training.topologies import devices_of

Array = np.ndarray
NAMES = ('out', 'dq', 'dk', 'dv')


def random_documents(rng: np.random.Generator, rows: int, seq_len: int) -> Array:
    """(B, T) int32: documents of random lengths, then padding; the first row is one document, the last all padding."""
    segment_ids_BT = np.zeros((rows, seq_len), np.int32)
    segment_ids_BT[0] = 1
    for row_T in segment_ids_BT[1:-1]:
        ends = np.sort(rng.choice(np.arange(1, seq_len + 1), size=min(5, seq_len), replace=False))
        for number, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True), start=1):
            row_T[start:end] = number
    return segment_ids_BT


def random_case(
    shape: tuple[int, int, int, int], dtype: Any = np.float32, rows: int = 4, seed: int = 0
) -> tuple[tuple[Array, ...], Array]:
    """((q, k, v, cotangent of the result), segment ids) for shape (T, N, M, H)."""
    seq_len, heads, kv_heads, width = shape
    rng = np.random.default_rng(seed)
    q, k, v, dout = (
        rng.normal(size=(rows, seq_len, n, width)).astype(dtype) for n in (heads, kv_heads, kv_heads, heads)
    )
    return (q, k, v, dout), random_documents(rng, rows, seq_len)


def dense(arrays: tuple[Array, ...], segment_ids_BT: Array, window: int) -> tuple[Array, ...]:
    """Result and gradients (dq, dk, dv) in float64, head by head."""
    q_BTNH, k_BSMH, v_BSMH, dout_BTNH = (x.astype(np.float64) for x in arrays)
    out_BTNH, dq_BTNH, dk_BSMH, dv_BSMH = (np.zeros_like(x) for x in (q_BTNH, q_BTNH, k_BSMH, v_BSMH))
    batch, seq_len, heads, width = q_BTNH.shape
    distance_TS = np.arange(seq_len)[:, None] - np.arange(seq_len)
    for b, n in np.ndindex(batch, heads):
        m = n // (heads // k_BSMH.shape[2])
        q, k, v, dout = q_BTNH[b, :, n], k_BSMH[b, :, m], v_BSMH[b, :, m], dout_BTNH[b, :, n]
        seen_TS = (distance_TS >= 0) & (segment_ids_BT[b][:, None] == segment_ids_BT[b])
        if window:
            seen_TS &= distance_TS < window
        weights_TS = np.where(seen_TS, np.exp(q @ k.T / np.sqrt(width)), 0)
        weights_TS /= weights_TS.sum(axis=1, keepdims=True)
        dweights_TS = dout @ v.T
        dscores_TS = weights_TS * (dweights_TS - (weights_TS * dweights_TS).sum(axis=1, keepdims=True))
        out_BTNH[b, :, n] = weights_TS @ v
        dq_BTNH[b, :, n] = dscores_TS @ k / np.sqrt(width)
        dk_BSMH[b, :, m] += dscores_TS.T @ q / np.sqrt(width)
        dv_BSMH[b, :, m] += weights_TS.T @ dout
    return out_BTNH, dq_BTNH, dk_BSMH, dv_BSMH


def with_gradients(window: int, implementation: str, **options: Any) -> Callable[..., tuple[jax.Array, ...]]:
    def run(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, segment_ids_BT: jax.Array) -> Any:
        attend = functools.partial(
            attention, segment_ids_BT=segment_ids_BT, window=window, implementation=implementation, **options
        )
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    return run


def check_against_dense(
    shape: tuple[int, int, int, int],
    window: int,
    implementation: str,
    *,
    dtype: Any = np.float32,
    tolerance: float = 1e-5,
    **options: Any,
) -> None:
    arrays, segment_ids_BT = random_case(shape, dtype)
    actual = quick_jit(with_gradients(window, implementation, **options))(*arrays, segment_ids_BT)
    for name, value, expected in zip(NAMES, actual, dense(arrays, segment_ids_BT, window), strict=True):
        assert value.dtype == dtype
        np.testing.assert_allclose(np.asarray(value, np.float64), expected, rtol=0, atol=tolerance, err_msg=name)


# (T, N, M, H) and window
CASES = [
    ((37, 4, 2, 8), 0),
    ((37, 4, 1, 6), 7),
    ((37, 2, 2, 8), 8),
    ((40, 2, 1, 8), 1),
    ((33, 4, 4, 8), 33),
    ((33, 4, 2, 8), 1000),
]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in short rows, on CPU."""
    monkeypatch.setattr(flash, 'CPU_BLOCKS', (8,))
    monkeypatch.setattr(module, 'ONE_BLOCK', 0)


@pytest.mark.parametrize('dtype', [np.float32, np.float64])
@pytest.mark.parametrize('implementation', ['plain', 'blockwise'])
@pytest.mark.parametrize(('shape', 'window'), CASES)
def test_result_and_gradients_equal_dense_ones(
    small_blocks: None, shape: tuple[int, int, int, int], window: int, implementation: str, dtype: Any
) -> None:
    with jax.enable_x64(dtype == np.float64):
        tolerance = 1e-5 if dtype == np.float32 else 1e-12
        check_against_dense(shape, window, implementation, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize(('seq_len', 'window'), [(1, 0), (64, 5), (65, 0), (300, 70)])
def test_blockwise_with_its_own_block_lengths(seq_len: int, window: int) -> None:
    check_against_dense((seq_len, 4, 2, 8), window, 'blockwise', tolerance=2e-5)


@pytest.mark.parametrize('implementation', ['plain', 'blockwise'])
def test_bfloat16(small_blocks: None, implementation: str) -> None:
    check_against_dense((37, 4, 2, 8), 9, implementation, dtype=jnp.bfloat16, tolerance=0.06)


@pytest.mark.parametrize(
    ('shape', 'window'), [((130, 4, 2, 8), 0), ((256, 2, 2, 12), 40), ((40, 4, 1, 8), 1), ((130, 2, 1, 8), 129)]
)
def test_splash_interpreted(shape: tuple[int, int, int, int], window: int) -> None:
    check_against_dense(shape, window, 'splash', interpret=True)


def test_large_scores_stay_finite(small_blocks: None) -> None:
    arrays, segment_ids_BT = random_case((37, 2, 1, 8))
    arrays = (arrays[0] * 1e4, *arrays[1:])
    plain, blockwise = (quick_jit(with_gradients(0, n))(*arrays, segment_ids_BT) for n in ('plain', 'blockwise'))
    assert all(np.isfinite(x).all() for x in (*plain, *blockwise))
    np.testing.assert_allclose(plain[0], blockwise[0], rtol=0, atol=0.01)


def test_blockwise_holds_no_square_of_the_row() -> None:
    """Longer than any platform's block; 'plain' shows that the measure sees scores."""
    arrays, segment_ids_BT = random_case((2048, 2, 1, 8), rows=2)
    sizes = {
        name: max(jaxpr_sizes(jax.make_jaxpr(with_gradients(300, name))(*arrays, segment_ids_BT).jaxpr))
        for name in ('plain', 'blockwise')
    }
    assert sizes['blockwise'] < 2048**2 <= sizes['plain']


@pytest.mark.parametrize('window', [0, 1, 9, 100])
def test_blocks_that_no_query_sees_are_left_out(window: int) -> None:
    """The bounds of the loop are the first and last block of keys with something to see, and no wider."""
    rng = np.random.default_rng(1)
    segment_ids_BT = random_documents(rng, 6, 100)[1:-1]
    first_BT = first_visible(jnp.asarray(segment_ids_BT), window)
    x_BTNH = jnp.zeros((len(segment_ids_BT), 100, 1, 2))
    blocks = flash._cut(x_BTNH, x_BTNH, x_BTNH, first_BT, (16, 8))
    distance_TS = np.arange(100)[:, None] - np.arange(100)
    seen_TS = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None]).any(axis=0) & (distance_TS >= 0)
    seen_TS &= distance_TS < (window or 100)
    for i in range(7):
        keys = np.flatnonzero(seen_TS[16 * i : 16 * (i + 1)].any(axis=0))
        # Up to the block's last position, though that may be padding.
        expected = keys.min() // 8, min((16 * i + 15) // 8 + 1, 13)
        assert tuple(map(int, flash._bounds(blocks, jnp.int32(0), jnp.int32(i)))) == expected


@pytest.mark.parametrize(('length', 'limit', 'expected'), [(100, 64, 56), (512, 64, 64), (5, 64, 5), (130, 128, 72)])
def test_block_lengths(length: int, limit: int, expected: int) -> None:
    assert flash.block_length(length, limit) == expected


def test_implementations_of_a_platform() -> None:
    assert resolve_implementation('auto', 'tpu') == 'splash'
    assert resolve_implementation('auto', 'cpu') == resolve_implementation('auto', 'gpu') == 'blockwise'
    assert resolve_implementation('plain', 'tpu') == 'plain'
    with pytest.raises(UserError, match=r"model\.attention = 'splash': runs on TPU only, use auto, .* on cpu"):
        resolve_implementation('splash', 'cpu')
    with pytest.raises(UserError, match=r"model\.attention = 'dense': must be one of auto, plain"):
        resolve_implementation('dense', 'cpu')


def test_what_splash_cannot_take() -> None:
    (q, k, v, _), segment_ids_BT = random_case((40, 2, 1, 8))
    attend = functools.partial(attention, segment_ids_BT=segment_ids_BT, window=0, implementation='splash')
    with pytest.raises(UserError, match=r'model\.dtype must be bfloat16 or float32, not float16'):
        attend(*(x.astype(np.float16) for x in (q, k, v)), interpret=True)
    with pytest.raises(UserError, match=r'with mesh\.context = 2, data\.seq_len = 300 must be divisible by 2 x 128'):
        splash.check(jnp.zeros((1, 300, 1, 8)), shards=2)


def in_own_process(name: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, __file__, name],
        env=os.environ | {'JAX_PLATFORMS': 'cpu'} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def test_on_meshes() -> None:
    """Values and gradients are the dense ones, whichever way the arrays are split over 8 devices."""
    out = in_own_process('mesh', XLA_FLAGS='--xla_force_host_platform_device_count=8')
    assert out.count('ok') == len(MESH_CASES), out


@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='needs libtpu, to compile for TPU without one')
def test_compiles_for_tpu_ahead_of_time() -> None:
    out = in_own_process('tpu')
    assert out.count('ok') == len(TPU_CASES), out


# (data, fsdp, tensor, context), implementation, T, window
MESH_CASES: list[tuple[tuple[int, int, int, int], str, int, int]] = [
    ((1, 2, 2, 2), 'plain', 48, 7),
    ((1, 1, 1, 8), 'plain', 48, 0),
    ((1, 2, 2, 2), 'blockwise', 300, 70),
    ((1, 1, 1, 8), 'blockwise', 160, 0),
    ((1, 1, 1, 8), 'blockwise', 48, 5),
    ((1, 1, 1, 8), 'blockwise', 160, 21),
    ((1, 1, 1, 8), 'blockwise', 160, 22),
    ((1, 2, 1, 4), 'blockwise', 300, 1),
    ((2, 2, 2, 1), 'blockwise', 130, 0),
    ((1, 2, 2, 2), 'splash', 256, 40),
    ((1, 2, 2, 2), 'splash', 256, 0),
    ((1, 1, 2, 4), 'splash', 512, 40),
    ((2, 2, 2, 1), 'splash', 200, 0),
]
# Head width, (data, fsdp, tensor, context), window
TPU_CASES: list[tuple[int, tuple[int, int, int, int], int]] = [
    (64, (1, 2, 2, 2), 256),
    (96, (1, 2, 2, 2), 0),
    (96, (1, 1, 2, 4), 256),
    (128, (2, 2, 2, 1), 256),
]


def _layouts(mesh: Any) -> tuple[NamedSharding, NamedSharding]:
    """Of q, k and v, and of segment ids."""
    return (
        NamedSharding(mesh, mesh_axes('batch', 'length', 'heads', None)),
        NamedSharding(mesh, mesh_axes('batch', 'length')),
    )


def _run_on_meshes() -> None:
    for sizes, name, seq_len, window in MESH_CASES:
        mesh = make_mesh(MeshConfig(1, *sizes))
        arrays, segment_ids_BT = random_case((seq_len, 4, 2, 8))
        layout, ids_layout = _layouts(mesh)
        options = {'interpret': True} if name == 'splash' else {}
        with jax.set_mesh(mesh):
            run = quick_jit(
                with_gradients(window, name, **options),
                in_shardings=(*(layout,) * 4, ids_layout),
                out_shardings=(layout,) * 4,
            )
            actual = run(*arrays, segment_ids_BT)
        for what, value, expected in zip(NAMES, actual, dense(arrays, segment_ids_BT, window), strict=True):
            np.testing.assert_allclose(value, expected, rtol=0, atol=1e-5, err_msg=f'{what} {sizes} {name} {window}')
        print('ok', sizes, name, seq_len, window)


def _compile_for_tpu() -> None:
    devices = devices_of('v5e:2x4', slices=1)
    for width, sizes, window in TPU_CASES:
        mesh = make_mesh(MeshConfig(1, *sizes), devices)
        layout, ids_layout = _layouts(mesh)

        def shape(heads: int, width: int = width, layout: Any = layout) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((4, 1024, heads, width), jnp.bfloat16, sharding=layout)

        ids = jax.ShapeDtypeStruct((4, 1024), jnp.int32, sharding=ids_layout)
        name = resolve_implementation('auto', 'tpu')
        with jax.set_mesh(mesh):
            run = jax.jit(with_gradients(window, name), out_shardings=(layout,) * 4)
            compiled = run.lower(shape(4), shape(2), shape(2), shape(4), ids).compile()
        text = compiled.as_text()
        assert 'tpu_custom_call' in text
        whole_row = sizes[3] == 2  # more devices hold keys out of the window
        assert ('all-gather' in text) == ('reduce-scatter' in text) == whole_row
        assert ('collective-permute' in text) == (sizes[3] == 4)
        print('ok', width, sizes, window)


if __name__ == '__main__':
    {'mesh': _run_on_meshes, 'tpu': _compile_for_tpu}[sys.argv[1]]()
