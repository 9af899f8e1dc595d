"""The train step: objective, accumulation, pass counts in one compilation, frozen fusion, steps that are not finite.

The objective and its gradient are checked against `reference.py`, in float64. Shapes: B rows, T positions, D width,
K passes.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from helpers import flat_params, make_batch, make_model, make_params

from fbt_jax.batch import Batch
from fbt_jax.config import Config, DataConfig, OptimizerConfig, PassesConfig, TrainingConfig
from fbt_jax.model.transformer import Transformer
from fbt_jax.training.optimizer import make_optimizer
from fbt_jax.training.pass_schedule import draw_branch
from fbt_jax.training.step import StepMetrics, TrainState, make_train_step

MIXTURE = ((0, (0.4, 0.3, 0.3)),)
STEPS = 40  # the last 10 decay
# Rows of very unequal padding: in 4 micro-batches (rows i and i + 4) one holds 1 token, another all of two rows.
LENGTHS = ((5, 4, 1), (12,), (), (8, 3), (2,), (7, 5), (1,), (3, 3, 3, 3))
EMPTY_ROW = 2
JITTER, LOSS_WEIGHT, Z_LOSS = 0.25, 0.5, 0.125  # large, so that they show; exact in binary


def make_config(*, dtype: str, phases: Any = MIXTURE, microbatches: int = 1, **optimizer: Any) -> Config:
    optimizer = {'warmup_steps': 4, 'z_loss': Z_LOSS, 'matrix_weight_decay': 0.5} | optimizer
    return Config(
        seed=3,
        data=DataConfig(seq_len=12, batch_size=len(LENGTHS)),
        model=make_model(dtype=dtype).config,
        passes=PassesConfig(phases=phases, jitter=JITTER, loss_weight=LOSS_WEIGHT),
        optimizer=OptimizerConfig(**optimizer),
        training=TrainingConfig(steps=STEPS, microbatches=microbatches),
    )


class CountingModel:
    """A model that counts how often it is traced."""

    def __init__(self, model: Transformer) -> None:
        self.config, self.model, self.traces = model.config, model, 0

    def apply(self, *args: Any, **kwargs: Any) -> jax.Array:
        self.traces += 1
        return self.model.apply(*args, **kwargs)


class Step:
    """A compiled train step with its own model and optimizer."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model = CountingModel(make_model(dtype=config.model.dtype))
        self.optimizer = make_optimizer(config.optimizer, STEPS)
        self.function = make_train_step(config, self.model, self.optimizer)
        self.jitted = jax.jit(self.function, compiler_options={'xla_backend_optimization_level': 0})
        self.init = functools.cache(self._init)

    def _init(self) -> TrainState:
        params = jax.tree.map(jnp.asarray, make_params(self.model.model))
        return TrainState(params, self.optimizer.init(params), jnp.int32(0))

    def __call__(self, state: TrainState, batch: Batch, step: int | None = None) -> tuple[TrainState, StepMetrics]:
        """`step` other than the state's own: as if the state had got there."""
        return self.jitted(state if step is None else state._replace(step=jnp.int32(step)), batch)


@functools.cache
def compiled(**settings: Any) -> Step:
    return Step(make_config(**settings))


# No clipping: then NorMuon's and Adam's first momentum is the gradient.
def wide(**settings: Any) -> Step:
    return compiled(dtype='float64', clip_norm=1e9, **settings)


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope='module')
def batch() -> Batch:
    batch = make_batch(LENGTHS)
    return batch._replace(weights=np.ceil(4 * batch.weights) / np.float32(4))  # sums are exact in float32


@functools.cache
def drawn(step: int) -> int:
    return int(draw_branch(make_config(dtype='float32').passes, seed=3, step=jnp.int32(step), total_steps=STEPS)) + 1


def step_that_draws(num_passes: int, first: int = 0) -> int:
    return next(step for step in range(first, STEPS) if drawn(step) == num_passes)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def named(tree: Any) -> dict[str, np.ndarray]:
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(x) for path, x in paths}


def group_state(state: TrainState, group: str) -> Any:
    return state.opt_state.inner_state[1].inner_states[group]


# The objective, against numpy


def plain_and_noise(batch: Batch, step: int, num_passes: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """What the training step draws, by hand: (plain_KBT, noise_KBTD).

    Keys: fold_in of seed, step, purpose (1 the prefix, 2 the jitter), pass, row of the global batch. A document of n
    tokens is plain up to p, uniform on 1..n, in each pass k >= 2.
    """
    rows, seq_len = batch.tokens.shape
    plain_KBT = np.ones((num_passes, rows, seq_len), bool)
    noise_KBTD = np.zeros((num_passes, rows, seq_len, width))
    for k in range(2, num_passes + 1):
        for row in range(rows):
            keys = [jax.random.fold_in(jax.random.key(3), step)] * 2
            for i, purpose in enumerate((1, 2)):
                for number in (purpose, k, row):
                    keys[i] = jax.random.fold_in(keys[i], number)
            segment_ids_T = batch.segment_ids[row]
            n_S = np.bincount(segment_ids_T, minlength=seq_len + 1)
            p_S = 1 + np.asarray(jax.random.randint(keys[0], (seq_len + 1,), 0, np.maximum(n_S, 1)))
            plain_KBT[k - 1, row] = batch.positions[row] < p_S[segment_ids_T]
            noise = jax.random.uniform(keys[1], (seq_len, width), minval=-JITTER, maxval=JITTER)
            noise_KBTD[k - 1, row] = noise
    return plain_KBT, noise_KBTD


def reference_loss(step: Step, params: Any, batch: Batch, at: int, num_passes: int, z_loss: float) -> Any:
    plain_KBT, noise_KBTD = plain_and_noise(batch, at, num_passes, step.config.model.width)
    return reference.multi_pass_loss(
        flat_params(params),
        step.config.model,
        batch,
        num_passes=num_passes,
        plain_KBT=plain_KBT,
        noise_KBTD=noise_KBTD,
        loss_weight=LOSS_WEIGHT,
        z_loss=z_loss,
    )


@pytest.mark.usefixtures('x64')
@pytest.mark.parametrize('decay', [False, True])
@pytest.mark.parametrize('num_passes', [1, 2, 3])
def test_metrics_equal_the_reference(num_passes: int, decay: bool, batch: Batch) -> None:
    """NLL_1 + lambda mean NLL_k, and in the decay phase the z-loss, which `loss_K` does not hold."""
    step = wide(microbatches=4)
    at = step_that_draws(num_passes, first=30 if decay else 0)
    assert (at >= 30) == decay
    state = step.init()
    _, metrics = step(state, batch, at)
    objective, nll_K, z_K = reference_loss(step, state.params, batch, at, num_passes, Z_LOSS if decay else 0.0)
    weights_K = [1.0] + [LOSS_WEIGHT / (num_passes - 1)] * (num_passes - 1) if num_passes > 1 else [1.0]
    assert float(metrics.loss) == pytest.approx(objective, rel=1e-9)
    assert float(metrics.z_loss) == pytest.approx(Z_LOSS * np.dot(weights_K, z_K) if decay else 0.0, rel=1e-9)
    np.testing.assert_allclose(metrics.loss_K[:num_passes], nll_K, rtol=1e-9)
    np.testing.assert_array_equal(metrics.loss_K[num_passes:], 0)
    assert int(metrics.passes) == num_passes
    assert int(metrics.tokens) == int(np.sum(batch.weights > 0))
    assert int(metrics.nonfinite_in_a_row) == 0


@pytest.mark.usefixtures('x64')
@pytest.mark.parametrize(('at', 'on'), [(0, False), (29, False), (30, True), (39, True)])
def test_z_loss_begins_with_the_decay(at: int, on: bool, batch: Batch) -> None:
    """10 of 40 steps decay: 30 is the first."""
    step = wide(microbatches=1)
    _, metrics = step(step.init(), batch, at)
    assert (float(metrics.z_loss) > 0) == on
    plain = np.dot([1.0, *[LOSS_WEIGHT / max(1, drawn(at) - 1)] * 2], metrics.loss_K)
    assert float(metrics.loss - metrics.z_loss) == pytest.approx(plain, rel=1e-9)


@pytest.mark.usefixtures('x64')
@pytest.mark.parametrize('num_passes', [1, 2, 3])
def test_gradient_is_that_of_the_reference(num_passes: int, batch: Batch) -> None:
    """Central differences of the numpy loss along random directions: through all passes, fusion and z-loss included."""
    step = wide(microbatches=4)
    at = step_that_draws(num_passes, first=30)
    state = step.init()
    new_state, metrics = step(state, batch, at)
    gradient = first_gradient(new_state)
    assert gradient.keys() == named(state.params).keys()
    norm = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
    assert float(metrics.grad_norm) == pytest.approx(norm, rel=1e-9)

    rng = np.random.default_rng(0)
    for group in ('embedding', 'layers', 'norm', 'fusion') if num_passes > 1 else ('embedding', 'layers', 'norm'):
        direction = jax.tree.map(lambda x: rng.normal(size=x.shape), state.params)
        paths = jax.tree_util.tree_flatten_with_path(direction)[0]
        chosen = [group in jax.tree_util.keystr(path) for path, _ in paths]
        leaves = [leaf if yes else np.zeros(leaf.shape) for yes, (_, leaf) in zip(chosen, paths, strict=True)]
        direction = jax.tree.unflatten(jax.tree.structure(direction), leaves)

        ahead, behind = (
            reference_loss(step, optax.tree.add_scale(state.params, e, direction), batch, at, num_passes, Z_LOSS)[0]
            for e in (1e-6, -1e-6)
        )
        slope = (ahead - behind) / 2e-6
        product = sum(np.sum(gradient[name] * along) for name, along in named(direction).items())
        assert product == pytest.approx(slope, rel=1e-6, abs=1e-8), group


def first_gradient(state: TrainState) -> dict[str, np.ndarray]:
    """After one step from zero moments: the moments divided by 1 - b1. A frozen group's are 0."""
    gradient = {}
    for group, moments, b1 in (('matrix', 'ema', 0.95), ('fusion', 'ema', 0.95), ('adam', 'mu', 0.9)):
        for name, moment in named(optax.tree.get(group_state(state, group), moments)).items():
            gradient[name] = moment / (1 - b1)
    return gradient


@pytest.mark.usefixtures('x64')
@pytest.mark.parametrize('num_passes', [1, 2, 3])
@pytest.mark.parametrize('microbatches', [2, 4])
def test_micro_batches_equal_the_large_batch(microbatches: int, num_passes: int, batch: Batch) -> None:
    """Loss, metrics, moments and parameters, with mixin and jitter on and padding that differs between the parts."""
    at = step_that_draws(num_passes, first=30)
    whole, parts = wide(microbatches=1), wide(microbatches=microbatches)
    counts = batch.weights.reshape(-1, microbatches, 12).sum(axis=(0, 2))
    assert np.max(counts) > 1.5 * np.min(counts)
    expected_state, expected_metrics = whole(whole.init(), batch, at)
    state, metrics = parts(parts.init(), batch, at)
    for name, value in expected_metrics._asdict().items():
        np.testing.assert_allclose(getattr(metrics, name), value, rtol=1e-10, err_msg=name)
    assert int(state.step) == int(expected_state.step) == at + 1
    actual = named(state)
    for name, value in named(expected_state).items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-9, atol=1e-10, err_msg=name)


@pytest.mark.usefixtures('x64')
def test_rows_of_padding_count_for_nothing(batch: Batch) -> None:
    """Whatever stands in them; and the loss is that of the reference without those rows."""
    step = wide(microbatches=4)
    at = step_that_draws(3)
    rows = np.arange(len(LENGTHS)) >= 6
    padded = Batch(*(np.where(rows[:, None], np.zeros_like(x), x) for x in batch))
    state = step.init()
    new_state, metrics = step(state, padded, at)
    without = Batch(*(x[~rows] for x in batch))
    objective, nll_K, _ = reference_loss(step, state.params, without, at, 3, 0.0)
    assert float(metrics.loss) == pytest.approx(objective, rel=1e-9)
    np.testing.assert_allclose(metrics.loss_K, nll_K, rtol=1e-9)

    other_tokens = np.where(rows[:, None], 7, padded.tokens).astype(np.int32)
    other_targets = np.where(padded.weights == 0, 5, padded.targets).astype(np.int32)
    garbage_state, garbage = step(state, padded._replace(tokens=other_tokens, targets=other_targets), at)
    assert float(garbage.loss) == pytest.approx(float(metrics.loss), rel=1e-12)
    changed = named(garbage_state.params)
    for name, value in named(new_state.params).items():
        np.testing.assert_allclose(changed[name], value, rtol=1e-9, atol=1e-10, err_msg=name)


def test_a_batch_without_a_counted_token_is_no_division_by_zero(batch: Batch) -> None:
    step = compiled(dtype='float32')
    _, metrics = step(step.init(), batch._replace(weights=np.zeros_like(batch.weights)), step_that_draws(2))
    assert float(metrics.loss) == 0
    assert int(metrics.nonfinite_in_a_row) == 0


# The pass count


def test_a_run_of_sampled_pass_counts_is_one_compilation(batch: Batch) -> None:
    """40 steps: no retrace at the second or later, the counts drawn are the schedule's, the step counts up."""
    step = compiled(dtype='float32')
    state = step.init()
    types = [(x.shape, x.dtype, x.aval.weak_type) for x in jax.tree.leaves(state)]
    passes, rates, traces = [], [], set()
    for i in range(STEPS):
        state, metrics = step(state, batch)
        traces.add(step.model.traces)
        assert [(x.shape, x.dtype, x.aval.weak_type) for x in jax.tree.leaves(state)] == types
        assert int(state.step) == i + 1
        passes.append(int(metrics.passes))
        rates.append(float(metrics.learning_rate))
        assert np.all(np.isfinite(metrics.loss_K))
        assert np.count_nonzero(metrics.loss_K) == passes[-1]
    assert step.jitted._cache_size() == 1
    assert len(traces) == 1, 'the model was traced in the first step only'
    assert passes == [drawn(i) for i in range(STEPS)]
    assert set(passes) == {1, 2, 3}
    shares = [0.25, 0.5, 0.75] + [1.0] * 27 + [i / 11 for i in range(10, 0, -1)]
    np.testing.assert_allclose(rates, 1e-2 * np.array(shares), rtol=1e-5)


def test_every_buffer_of_the_state_can_be_donated(batch: Batch) -> None:
    """Each is aliased to a result, whatever the pass count."""
    step = compiled(dtype='float32')
    lowered = jax.jit(step.function, donate_argnums=0, keep_unused=True).lower(step.init(), batch)
    text = lowered.as_text()
    assert text.count('tf.aliasing_output') == len(jax.tree.leaves(step.init()))


def sub_jaxprs(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            part = getattr(part, 'jaxpr', part)
            if hasattr(part, 'eqns'):
                yield part


def equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for part in sub_jaxprs(eqn):
            yield from equations(part)


def primitives(jaxpr: Any) -> list[str]:
    return [eqn.primitive.name for eqn in equations(jaxpr)]


def products(jaxpr: Any) -> int:
    """How many matrices are multiplied; the loss's sums over the passes are vectors."""
    dots = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == 'dot_general']
    return sum(all(x.aval.ndim >= 2 for x in eqn.invars) for eqn in dots)


def trace(phases: Any, **settings: Any) -> Any:
    step = compiled(dtype='float32', phases=phases, **settings)
    return jax.make_jaxpr(step.function)(step.init(), make_batch(LENGTHS)).jaxpr


def pass_switches(jaxpr: Any) -> list[Any]:
    """The `cond`s that choose between models: only those look tokens up in their branches."""
    conds = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == 'cond']
    return [eqn for eqn in conds if any('gather' in primitives(part) for part in sub_jaxprs(eqn))]


@pytest.mark.parametrize(
    ('phases', 'branches'),
    [
        (((0, (0.4, 0.3, 0.3)),), 3),
        (((0, (1.0,)), (0.5, (0.0, 0.0, 1.0))), 2),  # two passes have probability 0 in every phase
        (((0, (0.5, 0.5, 0.0)),), 2),
    ],
)
def test_one_switch_with_a_branch_per_pass_count(phases: Any, branches: int) -> None:
    (switch,) = pass_switches(trace(phases))
    assert len(switch.params['branches']) == branches


@pytest.mark.parametrize('num_passes', [1, 3])
def test_a_single_pass_count_needs_no_switch(num_passes: int) -> None:
    jaxpr = trace(((0, (0.0,) * (num_passes - 1) + (1.0,)),))
    assert pass_switches(jaxpr) == []
    assert 'exp' in primitives(jaxpr)


def test_the_one_pass_branch_computes_what_a_plain_step_does() -> None:
    """No fusion, no prefixes, no jitter: the same products, and no random numbers."""
    (switch,) = pass_switches(trace(MIXTURE))
    one, two, _ = (branch.jaxpr for branch in switch.params['branches'])
    single = trace(((0, (1.0,)),))
    step = compiled(dtype='float32')
    state = step.init()
    update = jax.make_jaxpr(step.optimizer.update)(
        state.params, state.opt_state, state.params, step=jnp.int32(0), fused=jnp.bool_(True)
    )
    assert products(one) == products(single) - products(update.jaxpr)
    assert products(one) < products(two)
    assert 'random_bits' not in primitives(one)
    assert 'random_bits' in primitives(two)


def test_a_step_of_one_pass_leaves_the_fusion_as_it_is(batch: Batch) -> None:
    """Parameters, moments and counters bit for bit, with decay and stale momentum; everything else moves."""
    step = compiled(dtype='float32')
    state = step.init()
    for at in (step_that_draws(3), step_that_draws(2)):
        state, _ = step(state, batch, at)
    assert max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(group_state(state, 'fusion'))) > 0
    after, metrics = step(state, batch, step_that_draws(1, first=5))
    assert int(metrics.passes) == 1
    assert bits(after.params['fusion']) == bits(state.params['fusion'])
    assert bits(group_state(after, 'fusion')) == bits(group_state(state, 'fusion'))
    before = named(state.params)
    for name, value in named(after.params).items():
        assert name.startswith('fusion') or not np.array_equal(value, before[name]), name
    fused, _ = step(after, batch, step_that_draws(2, first=5))
    for name, value in named(fused.params).items():
        assert not np.array_equal(value, named(after.params)[name]), name


@pytest.mark.usefixtures('x64')
def test_a_step_of_one_pass_equals_that_of_a_plain_run(batch: Batch) -> None:
    mixture, plain = wide(microbatches=1), wide(microbatches=1, phases=((0, (1.0,)),))
    state, _ = mixture(mixture.init(), batch, step_that_draws(3))
    for at in (step_that_draws(1, first=5), step_that_draws(1, first=30)):
        after, metrics = mixture(state, batch, at)
        expected, expected_metrics = plain(state, batch, at)
        actual = named(after)
        for name, value in named(expected).items():
            np.testing.assert_allclose(actual[name], value, rtol=1e-10, atol=1e-11, err_msg=name)
        for name in StepMetrics._fields:
            ours, theirs = np.asarray(getattr(metrics, name)), np.asarray(getattr(expected_metrics, name))
            np.testing.assert_allclose(ours[:1] if name == 'loss_K' else ours, theirs, rtol=1e-10, err_msg=name)


# Steps that are not finite


@pytest.mark.parametrize('num_passes', [1, 3])
@pytest.mark.parametrize('poison', ['weights', 'parameters'])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(poison: str, num_passes: int, batch: Batch) -> None:
    step = compiled(dtype='float32')
    state, _ = step(step.init(), batch, step_that_draws(2))
    bad_batch = batch
    if poison == 'weights':
        weights = batch.weights.copy()
        weights[1, 4] = np.inf
        bad_batch = batch._replace(weights=weights)
    else:
        scale = state.params['final_norm']['scale'].at[2].set(jnp.nan)
        state = state._replace(params=state.params | {'final_norm': {'scale': scale}})
    at = step_that_draws(num_passes, first=5)
    current = state
    for count in (1, 2, 3):
        current, metrics = step(current, bad_batch, at)
        assert int(metrics.nonfinite_in_a_row) == count
        assert bits(current.params) == bits(state.params)
        assert bits(current.opt_state.inner_state) == bits(state.opt_state.inner_state)
        assert int(current.step) == at + 1
    assert int(current.opt_state.total) == 3
    if poison == 'weights':
        good = step_that_draws(3, first=at + 1)
        after, metrics = step(current, batch, good)
        expected, _ = step(state, batch, good)  # as if they had never been
        assert int(metrics.nonfinite_in_a_row) == 0
        assert bits(after.params) == bits(expected.params)
        assert bits(after.opt_state.inner_state) == bits(expected.opt_state.inner_state)
        assert int(after.opt_state.total) == 3
