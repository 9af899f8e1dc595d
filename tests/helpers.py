"""Small models, packed rows and slow evaluations that several test files share.

Shapes: B batch, T positions, D width, K passes.
"""

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbt_jax.batch import Batch
from fbt_jax.config_model import ModelConfig
from fbt_jax.model.transformer import Transformer, init_params
from fbt_jax.passes import MultiPass, Noise, multi_pass

Array = np.ndarray
Params = dict[str, Any]

# For programs whose compilation dwarfs their run: LLVM's optimizations are left out, XLA's are not. Top level only.
quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})

VOCAB_SIZE = 40
SEQ_LEN = 12
LENGTHS = ((5, 4, 1), (8, 3))  # documents of each row; the rest of the row is padding


def float64(test: Callable[..., Any]) -> Callable[..., Any]:
    """Runs the test with 64-bit types."""

    @functools.wraps(test)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with jax.enable_x64(True):
            return test(*args, **kwargs)

    return wrapped


def make_model(**changes: Any) -> Transformer:
    """Two layers, the first with a window of 3, the second full, unless `changes` says otherwise."""
    defaults: dict[str, Any] = {
        'vocab_size': VOCAB_SIZE,
        'width': 16,
        'num_layers': 2,
        'num_heads': 4,
        'num_kv_heads': 2,
        'mlp_width': 24,
        'window': 3,
        'full_attention_every': 2,
        'rope_theta': 100.0,
        'dtype': 'float32',
        'remat': 'nothing',
    }
    return Transformer(ModelConfig(**(defaults | changes)))


def make_params(model: Transformer, seed: int = 0) -> Params:
    """Random everywhere: norm scales away from 1 and padded embedding rows away from 0, so that a misuse shows."""
    rng = np.random.default_rng(seed)
    dtype = np.float64 if model.config.dtype == 'float64' else np.float32

    def leaf(path: Any, like: jax.ShapeDtypeStruct) -> Array:
        match path[-1].key:
            case 'scale' | 'bias':
                return rng.uniform(0.5, 1.5, like.shape).astype(dtype)
            case 'embedding' | 'head':
                return (rng.normal(size=like.shape) * like.shape[-1] ** -0.5).astype(dtype)
        return (rng.normal(size=like.shape) * like.shape[-2] ** -0.5).astype(dtype)

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(lambda: init_params(model, jax.random.key(0))))


def flat_params(params: Params) -> Params:
    """The reference's tree: `kernel`, `scale` and `bias` leaves go by their module's name (`..._bias`), in float64."""
    flat: Params = {}
    for name, value in params.items():
        if not isinstance(value, dict):
            flat[name] = np.asarray(value, np.float64)
        elif set(value) <= {'kernel', 'scale', 'bias'}:
            flat |= {name + '_bias' * (k == 'bias'): np.asarray(leaf, np.float64) for k, leaf in value.items()}
        else:
            flat[name] = flat_params(value)
    return flat


def make_batch(lengths: tuple[tuple[int, ...], ...] = LENGTHS, seq_len: int = SEQ_LEN, seed: int = 1) -> Batch:
    """Rows of documents of these lengths, then padding; random weights, some of them 0."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), seq_len)
    positions_BT, segment_ids_BT = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for b, row in enumerate(lengths):
        start = 0
        for number, length in enumerate(row, start=1):
            positions_BT[b, start : start + length] = np.arange(length)
            segment_ids_BT[b, start : start + length] = number
            start += length
    counted_BT = (segment_ids_BT > 0) & (rng.random(shape) < 0.8)
    return Batch(
        tokens=rng.integers(VOCAB_SIZE, size=shape, dtype=np.int32),
        targets=rng.integers(VOCAB_SIZE, size=shape, dtype=np.int32),
        weights=np.where(counted_BT, rng.uniform(0.5, 2, shape), 0).astype(np.float32),
        segment_ids=segment_ids_BT,
        positions=positions_BT,
    )


def shifted(hidden_BTD: Any) -> Any:
    """The state of t - 1 at t; zeros at t = 0."""
    return jnp.concatenate([jnp.zeros_like(hidden_BTD[:, :1]), hidden_BTD[:, :-1]], axis=1)


def apply(model: Transformer, params: Params, batch: Batch, prev_BTD: Any = None, plain_BT: Any = None) -> jax.Array:
    """One pass over the batch's rows. `prev_BTD` None: an ordinary one."""
    return _apply(model)(params, batch, prev_BTD, plain_BT)


@functools.cache
def _apply(model: Transformer) -> Callable[..., jax.Array]:
    @jax.jit
    def run(params: Params, batch: Batch, prev_BTD: Any, plain_BT: Any) -> jax.Array:
        return model.apply(
            {'params': params},
            batch.tokens,
            prev_BTD,
            plain_BT=plain_BT,
            positions_BT=batch.positions,
            segment_ids_BT=batch.segment_ids,
        )

    return run


def run_passes(
    model: Transformer, params: Params, batch: Batch, *, num_passes: int, noise: Noise | None = None
) -> MultiPass:
    """The package's scan, which yields the (h^k, h^{k-1}) that it was given. `noise` may have any key and rows."""
    settings = None if noise is None else (noise.prefix_mixin, noise.jitter)
    keys = None if noise is None else (noise.key, noise.rows_B)
    return _run_passes(model, num_passes, settings)(params, batch, keys)


def all_passes(
    model: Transformer, params: Params, batch: Batch, *, num_passes: int, noise: Noise | None = None
) -> Array:
    """States of every pass, (K, B, T, D)."""
    return np.asarray(run_passes(model, params, batch, num_passes=num_passes, noise=noise).yields[0])


@functools.cache
def _run_passes(model: Transformer, num_passes: int, settings: tuple[bool, float] | None) -> Callable[..., MultiPass]:
    @quick_jit
    def run(params: Params, batch: Batch, keys: Any) -> MultiPass:
        noise = None if settings is None else Noise(*keys, *settings)
        return multi_pass(model, params, batch, num_passes=num_passes, per_pass=lambda *states: states, noise=noise)

    return run


def sequential_states(model: Transformer, params: Params, batch: Batch, plain_BT: Array | None = None) -> Array:
    """The exact recurrence u_t = fuse(e_t, h_{t-1}), one token at a time. `plain_BT`: default document starts.

    At step t the model is given the first t + 1 tokens and the t states so far; what follows is blank padding, so that
    all steps share a shape.
    """
    return np.asarray(_sequential(model)(params, batch, batch.positions == 0 if plain_BT is None else plain_BT))


@functools.cache
def _sequential(model: Transformer) -> Callable[..., jax.Array]:
    @quick_jit
    def run(params: Params, batch: Batch, plain_BT: jax.Array) -> jax.Array:
        index_T = jnp.arange(batch.tokens.shape[1])

        def step(t: jax.Array, hidden_BTD: jax.Array) -> jax.Array:
            prefix_BTD = model.apply(
                {'params': params},
                jnp.where(index_T <= t, batch.tokens, 0),
                shifted(hidden_BTD),
                plain_BT=plain_BT,
                positions_BT=jnp.where(index_T <= t, batch.positions, 0),
                segment_ids_BT=jnp.where(index_T <= t, batch.segment_ids, 0),
            )
            return hidden_BTD.at[:, t].set(prefix_BTD[:, t])

        shape = (*batch.tokens.shape, model.config.width)
        return jax.lax.fori_loop(0, shape[1], step, jnp.zeros(shape, model.config.dtype))

    return run


def jaxpr_sizes(jaxpr: Any) -> Iterator[int]:
    """Elements of every intermediate, those of inner jaxprs included."""
    for equation in jaxpr.eqns:
        yield from (math.prod(v.aval.shape) for v in equation.outvars)
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr')):
            inner = getattr(value, 'jaxpr', value)
            if hasattr(inner, 'eqns'):
                yield from jaxpr_sizes(inner)


def on_devices(function: Callable[[], Any], count: int = 8) -> Any:
    """What `function`, at the top level of a test file, returns on `count` fake CPU devices; must be JSON.

    In a process of its own: the number of devices is settled when JAX starts.
    """
    module = function.__module__
    code = f'import json; import {module}; print(json.dumps({module}.{function.__name__}()))'
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get('PYTHONPATH', '')])
    flags = {'XLA_FLAGS': f'--xla_force_host_platform_device_count={count}', 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': path}
    result = subprocess.run([sys.executable, '-c', code], env=os.environ | flags, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])
