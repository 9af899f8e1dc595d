"""The optimizer against the papers' equations in float64 numpy (method.md section 9); its schedules and groups.

Shapes: m outputs and n inputs of a matrix; L stacked layers. The numpy functions work on the paper's W (m, n), whose
rows are output neurons: our kernels (..., n, m) are transposed on the way in and out.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import float64

from fbt_jax.config import ModelConfig, OptimizerConfig
from fbt_jax.model.transformer import Transformer, init_params
from fbt_jax.training.optimizer import (
    decay_start,
    learning_rate_schedules,
    make_optimizer,
    parameter_groups,
    scale_by_normuon,
    wsd_schedule,
)

Array = np.ndarray
Tree = dict[str, Any]

NEVER_CLIP = 1e12
SHAPES: dict[str, tuple[int, ...]] = {
    'layers/query/kernel': (3, 6, 10),  # wide
    'layers/mlp_down/kernel': (3, 14, 5),  # tall
    'layers/head_gate/kernel': (3, 6, 2),
    'layers/mlp_norm/scale': (3, 6),
    'fusion/state/kernel': (6, 6),
    'fusion/joint/kernel': (12, 6),
    'embedding': (7, 6),
    'final_norm/scale': (6,),
}
MATRICES = ('layers/query/kernel', 'layers/mlp_down/kernel')
FUSION = ('fusion/state/kernel', 'fusion/joint/kernel')
ADAM = tuple(name for name in SHAPES if name not in MATRICES + FUSION)


def nested(flat: dict[str, Any]) -> Tree:
    tree: Tree = {}
    for name, value in flat.items():
        *parents, leaf = name.split('/')
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def flat(tree: Any) -> dict[str, Array]:
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(x) for path, x in paths}


def random_tree(seed: int, scale: float = 1.0) -> Tree:
    rng = np.random.default_rng(seed)
    return nested({name: jnp.asarray(scale * rng.normal(size=shape)) for name, shape in SHAPES.items()})


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def fast_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function, compiler_options={'xla_backend_optimization_level': 0})


@functools.cache
def make_update(config: OptimizerConfig, total_steps: int) -> tuple[Any, Callable[..., tuple[Tree, Any]]]:
    """(optimizer, jitted (grads, state, params, step, fused) -> (new params, new state))."""
    optimizer = make_optimizer(config, total_steps)

    @fast_jit
    def update(grads: Tree, state: Any, params: Tree, step: Any, fused: Any) -> tuple[Tree, Any]:
        updates, state = optimizer.update(grads, state, params, step=step, fused=fused)
        return optax.apply_updates(params, updates), state

    return optimizer, lambda grads, state, params, step, fused: update(
        grads, state, params, jnp.int32(step), jnp.bool_(fused)
    )


# The papers, in numpy


def newton_schulz(m_mn: Array) -> Array:
    """Five quintic iterations towards the nearest orthogonal matrix; tall matrices are transposed."""
    if m_mn.shape[0] > m_mn.shape[1]:
        return newton_schulz(m_mn.T).T
    norm = np.sqrt(np.sum(m_mn**2))
    x_mn = m_mn / norm if norm > 0 else m_mn
    for _ in range(5):
        gram_mm = x_mn @ x_mn.T
        x_mn = 3.4445 * x_mn + (-4.7750 * gram_mm + 2.0315 * gram_mm @ gram_mm) @ x_mn
    return x_mn


class NorMuon:
    """One matrix W of the paper; `update` gives rate * Oh / lr."""

    def __init__(self, shape_mn: tuple[int, int], b1: float, b2: float) -> None:
        self.momentum_mn, self.v_m, self.b1, self.b2 = np.zeros(shape_mn), np.zeros(shape_mn[0]), b1, b2

    def update(self, gradient_mn: Array) -> Array:
        self.momentum_mn = self.b1 * self.momentum_mn + (1 - self.b1) * gradient_mn
        o_mn = newton_schulz(self.momentum_mn)
        self.v_m = self.b2 * self.v_m + (1 - self.b2) * np.mean(o_mn**2, axis=1)
        o_hat_mn = o_mn / (np.sqrt(self.v_m) + 1e-8)[:, None]
        norm = np.sqrt(np.sum(o_hat_mn**2))
        return 0.2 * np.sqrt(o_mn.size) / norm * o_hat_mn if norm > 0 else np.zeros_like(o_mn)


class StackedNorMuon:
    """The same for our kernels, (..., inputs, outputs)."""

    def __init__(self, shape: tuple[int, ...], b1: float, b2: float) -> None:
        self.index = list(np.ndindex(shape[:-2]))
        self.parts = {i: NorMuon((shape[-1], shape[-2]), b1, b2) for i in self.index}

    def update(self, gradient: Array) -> Array:
        out = np.zeros_like(gradient)
        for i in self.index:
            out[i] = self.parts[i].update(gradient[i].T).T
        return out


class Adam:
    def __init__(self, shape: tuple[int, ...], b1: float, b2: float, eps: float) -> None:
        self.m, self.v, self.t, self.b1, self.b2, self.eps = np.zeros(shape), np.zeros(shape), 0, b1, b2, eps

    def update(self, gradient: Array) -> Array:
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * gradient
        self.v = self.b2 * self.v + (1 - self.b2) * gradient**2
        return self.m / (1 - self.b1**self.t) / (np.sqrt(self.v / (1 - self.b2**self.t)) + self.eps)


# NorMuon


@float64
@pytest.mark.parametrize('shape', [(6, 10), (10, 6), (7, 7), (1, 5), (5, 1), (3, 6, 10), (3, 14, 5), (2, 3, 4, 6)])
def test_normuon_equals_the_papers_update(shape: tuple[int, ...]) -> None:
    b1, b2 = 0.9, 0.8
    transform = scale_by_normuon(b1, b2)
    rng = np.random.default_rng(0)
    state = transform.init(jnp.zeros(shape))
    paper = StackedNorMuon(shape, b1, b2)
    update = fast_jit(transform.update)
    for step in range(5):
        # Layers, inputs and outputs of very different scales; large enough that no epsilon shows.
        scales = 10.0 ** rng.uniform(2, 5, size=(*shape[:-2], 1, 1)) * 10.0 ** rng.uniform(-1, 1, size=shape[-1])
        gradient = rng.normal(size=shape) * scales
        direction, state = update(jnp.asarray(gradient), state)
        np.testing.assert_allclose(direction, paper.update(gradient), rtol=1e-8, atol=1e-9, err_msg=f'step {step}')


@float64
@pytest.mark.parametrize('shape', [(6, 10), (10, 6), (3, 14, 5)])
def test_norm_of_every_matrix_of_the_update(shape: tuple[int, ...]) -> None:
    """0.2 sqrt(m n), so that the update's RMS is 0.2 lr: for each layer of a stack alone, whatever the gradient."""
    transform = scale_by_normuon(0.95, 0.95)
    gradient = np.random.default_rng(1).normal(size=shape) * np.logspace(-3, 3, shape[0]).reshape(
        -1, *[1] * (len(shape) - 1)
    )
    state = transform.init(jnp.zeros(shape))
    for _ in range(2):
        direction, state = transform.update(jnp.asarray(gradient), state)
        norm = np.linalg.norm(direction, axis=(-2, -1))
        np.testing.assert_allclose(norm, 0.2 * np.sqrt(shape[-2] * shape[-1]), rtol=1e-12)


@float64
def test_second_moments_belong_to_the_outputs() -> None:
    """v has one entry per output (the last axis), and evens out the RMS of the outputs' weights at the first step."""
    transform = scale_by_normuon(0.95, 0.95)
    gradient = np.random.default_rng(2).normal(size=(2, 12, 5)) * np.array([1e-2, 1e-1, 1, 10, 100])
    direction, state = transform.update(jnp.asarray(gradient), transform.init(jnp.zeros((2, 12, 5))))
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(direction), axis=1)), 0.2, rtol=1e-5)
    assert np.ptp(np.sqrt(np.mean(np.square(direction), axis=2))) > 1e-3  # not so the inputs'
    assert (2, 5) in [x.shape for x in jax.tree.leaves(state)]


def test_zero_gradients_from_the_start_give_a_zero_update() -> None:
    transform = scale_by_normuon(0.95, 0.95)
    gradient = np.random.default_rng(3).normal(size=(3, 6, 10)).astype(np.float32)
    gradient[1] = 0
    state = alone_state = transform.init(jnp.zeros((3, 6, 10)))
    for _ in range(3):
        direction, state = transform.update(jnp.asarray(gradient), state)
        zeros, alone_state = transform.update(jnp.zeros((3, 6, 10)), alone_state)
        assert np.all(np.asarray(zeros) == 0)
        assert np.all(np.asarray(direction)[1] == 0)
        assert np.all(np.isfinite(direction))
        np.testing.assert_allclose(np.linalg.norm(direction[::2], axis=(1, 2)), 0.2 * 60**0.5, rtol=1e-5)
    direction, _ = transform.update(jnp.asarray(gradient), alone_state)  # and it moves once there is a gradient
    np.testing.assert_allclose(np.linalg.norm(direction, axis=(1, 2)), 0.2 * 60**0.5 * np.array([1, 0, 1]), rtol=1e-5)


# The whole optimizer

SIMULATED = OptimizerConfig(
    matrix_learning_rate=0.05,
    matrix_weight_decay=0.7,
    normuon_b1=0.9,
    normuon_b2=0.8,
    adam_learning_rate=0.02,
    warmup_steps=3,
    decay_fraction=0.25,
    clip_norm=5.0,
)
# First warm-up steps 1/3, 2/3, 1; five at the peak; the last 4 of 16 fall by fifths. Written out, not computed.
RATES = [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
FUSED = [False, False, True, True, False, True, False, False, True, True, False, True, False, True, True, False]


@float64
def test_a_run_equals_its_simulation() -> None:
    """16 steps: clipping, groups, warm-up, decay, AdamC and freezing at once, in numpy."""
    optimizer, update = make_update(SIMULATED, 16)
    params = random_tree(0)
    state = optimizer.init(params)
    weights = {name: value.copy() for name, value in flat(params).items()}
    normuon = {name: StackedNorMuon(SHAPES[name], 0.9, 0.8) for name in MATRICES + FUSION}
    adam = {name: Adam(SHAPES[name], 0.9, 0.95, 1e-8) for name in ADAM}
    norms = []
    for step in range(16):
        grads = random_tree(100 + step, scale=[0.02, 100.0][step % 2])
        params, state = update(grads, state, params, step, FUSED[step])
        gradients = flat(grads)
        norms.append(np.sqrt(sum(np.sum(g**2) for g in gradients.values())))
        clip = min(1, 5.0 / norms[-1])
        for name, w in weights.items():
            if name in ADAM:
                w -= 0.02 * RATES[step] * adam[name].update(clip * gradients[name])
            elif FUSED[step] or name not in FUSION:
                lr = 0.05 * RATES[step]
                decay = lr * RATES[step] * 0.7 * w
                w -= decay + lr * normuon[name].update(clip * gradients[name])
        for name, value in flat(params).items():
            # Rates are float32 in the package.
            np.testing.assert_allclose(value, weights[name], rtol=1e-6, atol=3e-6, err_msg=f'{name} at step {step}')
    assert min(norms) < 5 < max(norms), 'both kinds of step, clipped and not'


def test_clipping_is_by_the_norm_of_all_groups_together() -> None:
    config = OptimizerConfig(clip_norm=2.0)
    optimizer, update = make_update(config, 100)
    params, grads = random_tree(0), random_tree(1)
    norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in flat(grads).values()))
    assert norm > 4
    for scale, clip in ((1.0, 2.0 / norm), (1.0 / norm, 1.0), (1e3, 2e-3 / norm)):
        scaled = jax.tree.map(lambda g, scale=scale: scale * g, grads)
        _, state = update(scaled, optimizer.init(params), params, 0, True)
        moments = first_moments(state)
        assert moments.keys() == SHAPES.keys()
        for name, moment in moments.items():
            b1 = 0.9 if name in ADAM else 0.95
            expected = (1 - b1) * clip * flat(scaled)[name]
            np.testing.assert_allclose(moment, expected, rtol=1e-5, atol=1e-8, err_msg=name)


def first_moments(state: Any) -> dict[str, Array]:
    """{parameter: momentum} over all groups; NorMuon's is called `ema`, Adam's `mu`."""
    found = optax.tree.get_all_with_path(state, 'ema') + optax.tree.get_all_with_path(state, 'mu')
    assert len(found) == 3
    return {name: moment for _, part in found for name, moment in flat(part).items()}


@float64
def test_adam_group_equals_optax_adam_without_decay() -> None:
    config = OptimizerConfig(
        adam_learning_rate=0.03,
        adam_b1=0.8,
        adam_b2=0.9,
        adam_eps=1e-3,
        matrix_weight_decay=0.5,
        warmup_steps=0,
        decay_fraction=0.0,
        clip_norm=NEVER_CLIP,
    )
    optimizer, update = make_update(config, 50)
    params = random_tree(0)
    state = optimizer.init(params)
    theirs = optax.adam(np.float64(np.float32(0.03)), 0.8, 0.9, 1e-3)
    their_params = {name: value for name, value in flat(params).items() if name in ADAM}
    their_state = theirs.init(their_params)
    for step in range(6):
        grads = random_tree(10 + step)
        params, state = update(grads, state, params, step, True)
        their_grads = {name: flat(grads)[name] for name in ADAM}
        updates, their_state = theirs.update(their_grads, their_state)
        their_params = optax.apply_updates(their_params, updates)
    for name in ADAM:
        np.testing.assert_allclose(flat(params)[name], their_params[name], rtol=1e-9, atol=1e-10, err_msg=name)


def test_adamc_decay_shrinks_with_the_square_of_the_rate() -> None:
    """With zero gradients only decay is left: -lr (lr / lr_max) wd W = -lr_max share^2 wd W; Adam's group has none."""
    config = OptimizerConfig(matrix_learning_rate=0.02, matrix_weight_decay=0.3, warmup_steps=4, decay_fraction=0.2)
    optimizer, update = make_update(config, 100)
    params = random_tree(0)
    zeros, state = jax.tree.map(jnp.zeros_like, params), optimizer.init(params)
    for step, share in ((0, 0.25), (3, 1.0), (50, 1.0), (80, 20 / 21), (90, 10 / 21), (99, 1 / 21)):
        after, _ = update(zeros, state, params, step, True)
        for name, before in flat(params).items():
            expected = before if name in ADAM else before.astype(np.float64) * (1 - 0.02 * share**2 * 0.3)
            np.testing.assert_allclose(flat(after)[name], expected, rtol=2e-7, err_msg=f'{name} at step {step}')


def test_norm_of_the_update_at_every_phase_of_the_schedule() -> None:
    """|update|_F = 0.2 lr sqrt(m n) with the rate of the step that is given, however many updates came before."""
    config = OptimizerConfig(matrix_learning_rate=0.02, matrix_weight_decay=0.0, warmup_steps=4, decay_fraction=0.2)
    optimizer, update = make_update(config, 100)
    before = random_tree(0)
    state = optimizer.init(before)
    for step, share in ((99, 1 / 21), (0, 0.25), (0, 0.25), (1, 0.5), (79, 1.0), (80, 20 / 21)):
        after, state = update(random_tree(step), state, before, step, True)
        moved = {name: flat(after)[name] - value for name, value in flat(before).items()}
        for name in MATRICES + FUSION:
            m, n = SHAPES[name][-2:]
            norm = np.linalg.norm(moved[name], axis=(-2, -1))
            np.testing.assert_allclose(norm, 0.2 * 0.02 * share * (m * n) ** 0.5, rtol=1e-4, err_msg=name)


# Steps without feedback


def test_fusion_is_frozen_in_steps_without_feedback() -> None:
    """Bit for bit: parameters, moments and counters, with weight decay, stale momentum and a large rate."""
    config = OptimizerConfig(
        matrix_learning_rate=3.0, matrix_weight_decay=0.2, warmup_steps=10, decay_fraction=0.25, clip_norm=NEVER_CLIP
    )
    optimizer, update = make_update(config, 40)
    params = random_tree(0)
    state = optimizer.init(params)
    for step in range(2):
        params, state = update(random_tree(10 + step), state, params, step, True)

    def frozen(params: Tree, state: Any) -> list[bytes]:
        return bits(params['fusion']) + bits(state.inner_state[1].inner_states['fusion'])

    expected = frozen(params, state)
    assert max(np.max(np.abs(first_moments(state)[name])) for name in FUSION) > 0, 'momentum is there'
    plain_params, plain_state = params, state
    for step in range(2, 5):
        grads = random_tree(20 + step)
        if step > 2:  # as in the model, and once as it must not matter
            grads['fusion'] = jax.tree.map(jnp.zeros_like, grads['fusion'])
        new_params, new_state = update(grads, plain_state, plain_params, step, False)
        assert frozen(new_params, new_state) == expected
        for name, value in flat(new_params).items():
            if name not in FUSION:
                assert not np.any(value == flat(plain_params)[name]), name
        plain_params, plain_state = new_params, new_state
    groups = plain_state.inner_state[1].inner_states
    counts = {name: int(optax.tree.get(groups[name], 'count')) for name in ('matrix', 'fusion', 'adam')}
    assert counts == {'matrix': 5, 'fusion': 2, 'adam': 5}

    # The next fused step goes on from the stale moments, at the rate of the global step: 6 / 10 of the peak.
    after, _ = update(random_tree(30), plain_state, plain_params, 5, True)
    for name in FUSION:
        before = flat(plain_params)[name].astype(np.float64)
        moved = flat(after)[name] - before * (1 - 3.0 * 0.6**2 * 0.2)
        norm = 0.2 * 3.0 * 0.6 * np.prod(SHAPES[name]) ** 0.5
        np.testing.assert_allclose(np.linalg.norm(moved), norm, rtol=1e-4)
    direct, _ = update(random_tree(30), state, params, 5, True)  # as if the plain steps had not been
    assert bits(direct['fusion']) == bits(after['fusion'])


def test_fusion_that_never_had_a_gradient_is_untouched_and_finite() -> None:
    config = OptimizerConfig(matrix_weight_decay=0.2, warmup_steps=0)
    optimizer, update = make_update(config, 40)
    params = random_tree(0)
    state, start = optimizer.init(params), bits(params['fusion'])
    for step in range(3):
        grads = random_tree(step)
        grads['fusion'] = jax.tree.map(jnp.zeros_like, grads['fusion'])
        params, state = update(grads, state, params, step, False)
    assert bits(params['fusion']) == start
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((params, state)))


def test_a_model_without_fusion_has_an_empty_group() -> None:
    optimizer, update = make_update(OptimizerConfig(warmup_steps=0), 40)
    params, grads = random_tree(0), random_tree(1)
    del params['fusion'], grads['fusion']
    new_params, _ = update(grads, optimizer.init(params), params, 0, False)
    assert all(not np.array_equal(value, flat(params)[name]) for name, value in flat(new_params).items())


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('name', ['embedding', 'layers/query/kernel', 'fusion/state/kernel'])
def test_one_bad_number_changes_nothing_and_is_counted(bad: float, name: str) -> None:
    optimizer, update = make_update(OptimizerConfig(warmup_steps=0), 40)
    params = random_tree(0)
    params, state = update(random_tree(1), optimizer.init(params), params, 0, True)
    poisoned = flat(random_tree(2))
    poisoned[name] = poisoned[name].copy()
    poisoned[name].flat[3] = bad
    same_params, counted = update(nested(poisoned), state, params, 1, True)
    assert bits(same_params) == bits(params)
    assert bits(counted.inner_state) == bits(state.inner_state)
    assert (int(counted.in_a_row), int(counted.total)) == (1, 1)
    same_params, counted = update(nested(poisoned), counted, params, 2, True)
    assert (int(counted.in_a_row), int(counted.total)) == (2, 2)
    after, good = update(random_tree(3), counted, same_params, 3, True)
    expected, _ = update(random_tree(3), state, params, 3, True)
    assert bits(after) == bits(expected)
    assert (int(good.in_a_row), int(good.total)) == (0, 2)


# Groups


def test_every_parameter_of_the_1b_model_has_its_group() -> None:
    shapes = jax.eval_shape(lambda: init_params(Transformer(ModelConfig(vocab_size=100_352)), jax.random.key(0)))
    groups = {name: str(group) for name, group in flat(parameter_groups(shapes)).items()}
    layers = {f'layers/{name}/kernel': 'matrix' for name in ('query', 'key', 'value', 'output')}
    layers |= {f'layers/{name}/kernel': 'matrix' for name in ('mlp_gate', 'mlp_up', 'mlp_down')}
    layers |= {'layers/head_gate/kernel': 'adam'}
    norms = ['attention_norm', 'attention_post_norm', 'mlp_norm', 'mlp_post_norm', 'query_norm', 'key_norm']
    layers |= {f'layers/{name}/scale': 'adam' for name in norms}
    fusion = {'fusion/state/kernel': 'fusion', 'fusion/gate/kernel': 'fusion'}
    assert groups == layers | fusion | {
        'embedding': 'adam',
        'input_norm/scale': 'adam',
        'final_norm/scale': 'adam',
    }
    sizes = {name: int(np.prod(leaf.shape)) for name, leaf in _flat_shapes(shapes).items()}
    by_group = {g: sum(n for name, n in sizes.items() if groups[name] == g) for g in ('matrix', 'fusion', 'adam')}
    # 24 layers of q and o (D x D), k and v (D x D / 2), three D x F; two D x D; E, 24 D x 16 gates, 4 D + 2 H scales.
    assert by_group['matrix'] == 24 * (3 * 1536**2 + 3 * 1536 * 6656)
    assert by_group['fusion'] == 2 * 1536**2
    assert by_group['adam'] == 100_352 * 1536 + 24 * (1536 * 16 + 4 * 1536 + 2 * 96) + 2 * 1536


@pytest.mark.parametrize(('fusion', 'names'), [('add', {'state'}), ('concat', {'joint'}), ('none', set())])
def test_groups_of_the_other_fusions(fusion: str, names: set[str]) -> None:
    config = ModelConfig(vocab_size=40, width=16, num_layers=6, num_heads=2, num_kv_heads=1, mlp_width=8, fusion=fusion)
    groups = flat(parameter_groups(jax.eval_shape(lambda: init_params(Transformer(config), jax.random.key(0)))))
    assert {name for name, group in groups.items() if group == 'fusion'} == {f'fusion/{n}/kernel' for n in names}
    assert sum(str(group) == 'matrix' for group in groups.values()) == 7


def _flat_shapes(shapes: Any) -> dict[str, jax.ShapeDtypeStruct]:
    paths = jax.tree_util.tree_flatten_with_path(shapes)[0]
    return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in paths}


# Warm-up, stable, decay


def rates(peak: float = 1.0, *, warmup: int, decay: float, total: int) -> Array:
    """Of the steps 0..total, the last of which is no longer taken."""
    schedule = wsd_schedule(peak, warmup_steps=warmup, decay_fraction=decay, total_steps=total)
    return np.array([schedule(jnp.int32(step)) for step in range(total + 1)])


@pytest.mark.parametrize(
    ('warmup', 'decay', 'total', 'expected'),
    [
        (4, 0.3, 10, [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
        (0, 0.5, 4, [1, 1, 2 / 3, 1 / 3, 0]),  # no warm-up: the peak from the first step
        (1, 0.5, 4, [1, 1, 2 / 3, 1 / 3, 0]),  # one step of warm-up is the peak
        (2, 0.0, 4, [0.5, 1, 1, 1, 0]),  # no decay: the peak to the last step
        (2, 0.1, 4, [0.5, 1, 1, 1, 0]),  # 0.4 steps of decay are none
        (0, 0.0, 3, [1, 1, 1, 0]),
        (0, 1.0, 4, [0.8, 0.6, 0.4, 0.2, 0]),  # decay only
        (0, 0.0, 1, [1, 0]),
        (0, 1.0, 1, [0.5, 0]),
        (2, 0.25, 1, [0.5, 0]),
        (8, 0.0, 4, [1 / 8, 2 / 8, 3 / 8, 4 / 8, 0]),  # a run shorter than its warm-up
        (4, 0.75, 4, [0.25, 0.5, 0.5, 0.25, 0]),  # overlapping: the smaller of the two lines
    ],
)
def test_wsd_by_hand(warmup: int, decay: float, total: int, expected: list[float]) -> None:
    np.testing.assert_allclose(rates(3.0, warmup=warmup, decay=decay, total=total), 3 * np.array(expected), rtol=1e-6)


def test_wsd_of_the_paper() -> None:
    """200 warm-up steps, stable, the last quarter down to 0."""
    schedules = learning_rate_schedules(OptimizerConfig(), 333_000)
    for group, peak in (('matrix', 1e-2), ('adam', 5e-4)):
        for step, share in (
            (0, 1 / 200),
            (99, 1 / 2),
            (199, 1),
            (200, 1),
            (249_749, 1),
            (249_750, 83_250 / 83_251),
            (291_375, 41_625 / 83_251),
            (332_999, 1 / 83_251),
            (333_000, 0),
        ):
            assert float(schedules[group](jnp.int32(step))) == pytest.approx(peak * share, rel=1e-5), (group, step)
    assert decay_start(OptimizerConfig(), 333_000) == 249_750


@pytest.mark.parametrize(('warmup', 'decay', 'total'), [(5, 0.25, 60), (0, 0.4, 33), (7, 0.0, 20), (10, 1.0, 50)])
def test_wsd_has_no_jumps(warmup: int, decay: float, total: int) -> None:
    curve = rates(warmup=warmup, decay=decay, total=total)[:-1]
    decay_steps = round(decay * total)
    change = np.diff(curve)
    assert np.all(change <= (1 / warmup if warmup else 0) + 1e-6)
    assert np.all(change >= -1 / (decay_steps + 1) - 1e-6)
    assert np.all(curve > 0)
    top = int(np.argmax(curve))
    assert np.all(change[:top] >= 0)
    assert np.all(change[top:] <= 0)


@pytest.mark.parametrize(
    ('fraction', 'total', 'start'), [(0.25, 100, 75), (0.0, 100, 100), (0.001, 100, 100), (1.0, 100, 0), (1.0, 1, 0)]
)
def test_decay_start_is_the_first_step_below_the_peak(fraction: float, total: int, start: int) -> None:
    assert decay_start(OptimizerConfig(decay_fraction=fraction), total) == start
    curve = rates(warmup=0, decay=fraction, total=total)[:-1]
    assert np.all(curve[:start] == 1)
    assert np.all(curve[start:] < 1)
