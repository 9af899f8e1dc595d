"""Cached decoding against the function that it abbreviates: whole passes over whole rows, in float64.

Shapes: B rows, T = 16 positions, D width. Each row's prompt has a length of its own; lengths meet the windows' edges.
"""

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import apply, float64, make_model, make_params, on_devices, quick_jit, run_passes, sequential_states
from jax.sharding import SingleDeviceSharding

from fbt_jax.batch import Batch
from fbt_jax.config_file import load_config_file
from fbt_jax.config_model import ModelConfig
from fbt_jax.inference.decode import Decoding, advance, begin, cast, read_prompts
from fbt_jax.inference.sampling import Sampling
from fbt_jax.model import kv_cache
from fbt_jax.model.transformer import Transformer, for_platform, init_params
from fbt_jax.passes import shift
from fbt_jax.training.flops import forward_flops
from fbt_jax.training.topologies import devices_of

T = 16
LENGTHS = (1, 2, 3, 4, 5, 8, 11)
WINDOWS = [
    pytest.param({'window': 3}, id='window of 3'),
    *(
        pytest.param(changes, id=name, marks=pytest.mark.slow)
        for name, changes in {
            'full': {'window': 0},
            'of 4': {'window': 4},
            'of 3 in every layer': {'window': 3, 'full_attention_every': 0},
            'one head': {'num_kv_heads': 1},
        }.items()
    ),
]


def rows_of(tokens: np.ndarray) -> Batch:
    """Unpadded rows of one document each."""
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    ones = np.ones_like(tokens)
    return Batch(tokens, ones, ones.astype(np.float32), ones, positions)


def decode(model: Any, params: Any, prompts: list[np.ndarray], *, passes: int, feedback: bool) -> Decoding:
    """Greedy, until each row would hold T positions; all rows together."""
    lengths = np.array([len(p) for p in prompts], np.int32)
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    common: dict[str, Any] = {
        'stop_ids': jnp.array([-1]),
        'rows_B': jnp.arange(len(prompts)),
        'key': jax.random.key(0),
        'sampling': Sampling(),
        'kind': 'greedy',
    }
    read = read_prompts(model, params, tokens, lengths, num_passes=passes, capacity=T)
    rows = jnp.arange(len(prompts))
    state = begin(model, params, read, rows < 0, max_tokens=T, **common)
    return advance(model, params, state, until=jnp.int32(T - max(lengths)), feedback=feedback, **common)


def whole_passes(
    model: Any, params: Any, tokens_BT: np.ndarray, prompts: list[int], *, passes: int, feedback: bool
) -> np.ndarray:
    """(B, T, D) states by definition: prompts through `passes` passes, what follows one position after the other."""
    batch = rows_of(tokens_BT)
    if not feedback:
        return np.asarray(apply(model, params, batch))
    prompt_B1 = np.array(prompts)[:, None]
    plain_BT = batch.positions < (prompt_B1 if passes == 1 else 1)
    if passes == 1:
        return sequential_states(model, params, batch, plain_BT)
    # The states of the pass before the last are what the prompt's inputs are made of, for good.
    fed = shift(run_passes(model, params, batch, num_passes=passes - 1).hidden_BTD)
    in_prompt = (batch.positions < prompt_B1)[..., None]
    hidden = jnp.zeros_like(fed)
    for _ in range(T):
        hidden = apply(model, params, batch, jnp.where(in_prompt, fed, shift(hidden)), plain_BT)
    return np.asarray(hidden)


@pytest.mark.parametrize('changes', WINDOWS)
@pytest.mark.parametrize(('mode', 'passes'), [('standard', 1), ('soft', 1), ('fused', 2), ('fused', 3)])
@float64
def test_cached_decoding_is_the_function_itself(changes: dict[str, int], mode: str, passes: int) -> None:
    """Every row of a batch of mixed lengths: states to 1e-9, so tokens too."""
    model = make_model(dtype='float64', **{'num_layers': 4} | changes)
    params = make_params(model)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 40, n).astype(np.int32) for n in LENGTHS]
    state = decode(model, params, prompts, passes=passes, feedback=mode != 'standard')
    steps = int(state.steps)
    fed = [np.concatenate([p, np.asarray(state.tokens_BN)[row, : steps - 1]]) for row, p in enumerate(prompts)]
    padded = np.stack([np.pad(f, (0, T - len(f))) for f in fed])
    hidden_BTD = whole_passes(model, params, padded, list(LENGTHS), passes=passes, feedback=mode != 'standard')
    for row, prompt in enumerate(prompts):
        chosen, last = np.asarray(state.tokens_BN)[row, :steps], len(fed[row]) - 1
        logits = hidden_BTD[row] @ np.asarray(params['embedding']).T[:, :40]
        np.testing.assert_array_equal(chosen, logits[len(prompt) - 1 : last + 1].argmax(-1))
        np.testing.assert_allclose(np.asarray(state.hidden_BD)[row], hidden_BTD[row, last], atol=1e-9, rtol=0)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = log_probs[np.arange(len(prompt) - 1, last + 1), chosen]
        np.testing.assert_allclose(np.asarray(state.log_probs_BN)[row, :steps], expected, atol=1e-5)


@float64
def test_as_many_passes_as_positions_are_decoding_step_by_step() -> None:
    """K = T passes over a whole row = reading one token and going on softly with the row's own tokens."""
    model = make_model(dtype='float64', num_layers=4)
    params = make_params(model)
    tokens = np.random.default_rng(1).integers(0, 40, (2, T)).astype(np.int32)
    whole = run_passes(model, params, rows_of(tokens), num_passes=T).hidden_BTD
    read = read_prompts(model, params, tokens[:, :1], np.ones(2, np.int32), num_passes=1, capacity=T)
    cache, hidden = read.cache, read.hidden_BD
    np.testing.assert_allclose(hidden, whole[:, 0], atol=1e-9, rtol=0)
    step = quick_jit(
        lambda params, token, hidden, cache, position: model.apply(
            {'params': params},
            token[:, None],
            hidden[:, None],
            plain_BT=jnp.zeros((2, 1), bool),
            positions_BT=position[:, None],
            cache=cache,
        )
    )
    for t in range(1, T):
        states, cache = step(params, tokens[:, t], hidden, cache, jnp.full(2, t))
        hidden = states[:, 0]
        np.testing.assert_allclose(hidden, whole[:, t], atol=1e-9, rtol=0, err_msg=str(t))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_in_the_dtypes_of_training(dtype: str) -> None:
    """The cache is of that dtype. In float32 the states after 10 steps are the exact ones to 1e-4."""
    model = make_model(dtype=dtype, num_layers=4)
    params = make_params(model)
    prompts = [np.random.default_rng(0).integers(0, 40, 6).astype(np.int32)]
    state = decode(model, params, prompts, passes=2, feedback=True)
    assert {x.dtype for x in jax.tree.leaves(state.cache)} == {jnp.dtype(dtype)}
    assert np.isfinite(np.asarray(state.log_probs_BN)).all()
    if dtype == 'float32':
        fed = np.concatenate([prompts[0], np.asarray(state.tokens_BN)[0, : int(state.steps) - 1]])
        with jax.enable_x64(True):
            exact = make_model(dtype='float64', num_layers=4)
            wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
            padded = np.pad(fed, (0, T - len(fed)))[None]
            hidden = whole_passes(exact, wide, padded, [6], passes=2, feedback=True)
        np.testing.assert_allclose(np.asarray(state.hidden_BD)[0], hidden[0, len(fed) - 1], atol=1e-4)


def test_soft_and_standard_begin_with_the_same_token_and_fused_need_not() -> None:
    model = make_model(num_layers=4)
    params = make_params(model)
    prompts = [np.random.default_rng(seed).integers(0, 40, 7).astype(np.int32) for seed in range(8)]
    first = {
        mode: np.asarray(decode(model, params, prompts, passes=passes, feedback=feedback).tokens_BN)[:, 0]
        for mode, passes, feedback in (('standard', 1, False), ('soft', 1, True), ('fused', 2, True))
    }
    np.testing.assert_array_equal(first['standard'], first['soft'])
    assert (first['fused'] != first['soft']).any()


def test_memory_follows_the_window() -> None:
    """Of the cache's arrays: T slots in full layers, the window's in the others."""
    model = make_model(window=3, num_layers=4, full_attention_every=2)
    cache = kv_cache.empty(model.config, rows=5, capacity=1000, dtype=jnp.dtype('float32'))
    assert [c.k.shape for c in cache] == [(2, 5, 2, 4, 3), (2, 5, 2, 4, 1000)]
    found = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert found == kv_cache.num_bytes(model.config, rows=5, capacity=1000, itemsize=4) == 2 * 2 * 5 * 1003 * 8 * 4


@pytest.mark.parametrize('store', [kv_cache.store_by_tiles, kv_cache.store_by_scatter])
@pytest.mark.parametrize('slots', [1, 3, 8, 160, 384])
def test_a_position_is_stored_in_its_slot_and_nowhere_else(slots: int, store: Any) -> None:
    """Slots that make one tile or several, of 1, 8, 32 or 128."""
    rng = np.random.default_rng(slots)
    before = rng.normal(size=(2, 5, 2, 4, slots)).astype(np.float32)
    new = rng.normal(size=(5, 2, 4)).astype(np.float32)
    at = np.array([0, slots - 1, slots // 2, slots // 3, 7 * slots // 8])
    after = store(jnp.array(before), jnp.int32(1), jnp.array(new), jnp.array(at))
    for row, slot in enumerate(at):
        before[1, row, :, :, slot] = new[row]
    np.testing.assert_array_equal(after, before)


@float64
def test_replaying_a_soft_rollout_by_parallel_passes_converges_to_its_states() -> None:
    """With each pass one more position of the rollout has exactly the state that it had in the rollout."""
    model = make_model(num_layers=4, dtype='float64')
    params = make_params(model)
    prompt = np.random.default_rng(0).integers(0, 40, 4).astype(np.int32)
    state = decode(model, params, [prompt], passes=1, feedback=True)
    fed = np.concatenate([prompt, np.asarray(state.tokens_BN)[0, : T - 4]])[:T]
    batch = rows_of(fed[None])
    plain = batch.positions < 4
    own = sequential_states(model, params, batch, plain)
    hidden = apply(model, params, batch)
    for k in range(1, T - 4 + 2):
        np.testing.assert_allclose(np.asarray(hidden)[:, : 4 + k - 1], own[:, : 4 + k - 1], atol=1e-9, err_msg=str(k))
        hidden = apply(model, params, batch, shift(hidden), plain)
    np.testing.assert_allclose(np.asarray(hidden), own, atol=1e-9)


def memory_over_paper(config: ModelConfig, *, rows: int, capacity: int, device: Any = None) -> float:
    """Bytes of the compiled loop of soft steps, over those of the weights (in the compute dtype) and the cache."""
    model, dtype = Transformer(config), jnp.dtype(config.dtype)
    on = None if device is None else SingleDeviceSharding(device)

    def shapes(function: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), jax.eval_shape(function))

    params = shapes(lambda: cast(init_params(model, jax.random.key(0)), dtype=dtype))
    state = shapes(
        lambda: Decoding(
            kv_cache.empty(config, rows=rows, capacity=capacity, dtype=dtype),
            hidden_BD=jnp.zeros((rows, config.width), dtype),
            token_B=jnp.zeros(rows, jnp.int32),
            position_B=jnp.zeros(rows, jnp.int32),
            done_B=jnp.zeros(rows, bool),
            steps=jnp.int32(0),
            tokens_BN=jnp.zeros((rows, 128), jnp.int32),
            log_probs_BN=jnp.zeros((rows, 128)),
        )
    )
    more = shapes(
        lambda: {
            'until': jnp.int32(0),
            'stop_ids': jnp.zeros(1, jnp.int32),
            'rows_B': jnp.zeros(rows, jnp.int32),
            'key': jax.random.key(0),
            'sampling': Sampling(jnp.float32(0), jnp.int32(0), jnp.float32(0)),
        }
    )
    compiled = advance.lower(model, params, state, kind='greedy', feedback=True, **more).compile()
    memory = compiled.memory_analysis()
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    paper = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    paper += kv_cache.num_bytes(config, rows=rows, capacity=capacity, itemsize=dtype.itemsize)
    return (used - memory.alias_size_in_bytes) / paper


def test_prompts_are_read_into_the_cache_that_decoding_goes_on_with() -> None:
    """No second one, nor a copy: rows of the same buffers."""
    model = make_model()
    params = make_params(model)
    read = read_prompts(model, params, np.zeros((2, 4), np.int32), np.full(2, 4, np.int32), num_passes=1, capacity=T)
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(read.cache)]
    common: dict[str, Any] = {'stop_ids': jnp.array([-1]), 'rows_B': jnp.arange(2), 'key': jax.random.key(0)}
    done_B = jnp.zeros(2, bool)
    state = begin(model, params, read, done_B, max_tokens=T, sampling=Sampling(), kind='greedy', **common)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.cache)] == before


def test_a_step_needs_little_more_than_weights_and_cache() -> None:
    """On CPU, by the compiler."""
    shape: dict[str, Any] = {'width': 256, 'num_layers': 12, 'mlp_width': 1024, 'full_attention_every': 6}
    config = make_model(vocab_size=2000, window=256, **shape).config
    assert 1 <= memory_over_paper(config, rows=4, capacity=512) < 1.05


def memory_of_a_tpu() -> float:
    device = devices_of('v5e:2x2', 1)[0]
    config = load_config_file(str(Path(__file__).parents[1] / 'configs/fbt_1b.py'), {}).model
    return memory_over_paper(for_platform(config, 'tpu'), rows=8, capacity=8192, device=device)


def memory_of_a_gpu() -> float:
    device = devices_of('h100:1', 1)[0]
    config = load_config_file(str(Path(__file__).parents[1] / 'configs/fbt_1b.py'), {}).model
    return memory_over_paper(for_platform(config, 'gpu'), rows=8, capacity=8192, device=device)


@pytest.mark.skipif(not importlib.util.find_spec('jax_cuda13_plugin'), reason="needs '.[plan-gpu]'")
def test_a_gpu_copies_no_more_than_one_layer_s_weights_at_once() -> None:
    """As above for an h100: 1.11 where the weights of all layers of a turn could be sliced at once."""
    assert 1 <= on_devices(memory_of_a_gpu, count=1) < 1.05


@pytest.mark.skipif(not importlib.util.find_spec('libtpu'), reason='needs libtpu, to compile for TPU without one')
def test_a_tpu_keeps_no_second_cache_and_no_second_weights() -> None:
    """The 1B model, 8 rows of 8192 positions, compiled for a v5e."""
    assert 1 <= on_devices(memory_of_a_tpu, count=1) < 1.005


def test_feedback_costs_less_than_a_hundredth_at_1b() -> None:
    """On paper, method.md section 2: FLOPs and bytes of a step, and twice the FLOPs for a prompt read in two passes."""
    config = ModelConfig(vocab_size=100_352)
    plain, fused = (forward_flops(config, seq_len=8192, fused=f) for f in (False, True))
    assert 1 < fused / plain < 1.01
    assert 2 < (plain + fused) / plain < 2.05
    shapes = jax.eval_shape(lambda: init_params(Transformer(config), jax.random.key(0)))
    weights = sum(x.size for x in jax.tree.leaves(shapes))
    feedback = sum(x.size for x in jax.tree.leaves(shapes['fusion']))
    assert feedback == 2 * 1536**2
    read = 2 * (weights - feedback) + kv_cache.num_bytes(config, rows=1, capacity=8192, itemsize=2)
    assert (read + 2 * feedback) / read < 1.01
