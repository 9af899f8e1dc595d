"""NorMuon for the matrices, Adam for the rest; WSD schedule, AdamC decay, frozen fusion (method.md sections 4, 6, 9).

    M <- b1 M + (1 - b1) G;   O = NewtonSchulz(M);   v <- b2 v + (1 - b2) mean over inputs of O*O
    Oh = O / (sqrt(v) + eps);   W <- W - lr (lr / lr_max) wd W - 0.2 lr sqrt(m n) / |Oh|_F Oh

Groups by parameter path: `matrix` (the stack's 2-D kernels), `fusion` (the feedback matrices: NorMuon too, untouched
by steps of one pass), `adam` (embedding, norm scales, head gates). Our kernels are (..., inputs, outputs) for x @ W:
the paper's rows are the LAST axis, and leading axes (the scan's layers) are separate matrices. Learning rates are
functions of the global step, not of per-group counters, so that freezing a group does not delay its schedule.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from fbt_jax.config import OptimizerConfig
from fbt_jax.training.newton_schulz import orthogonalised

EPS = 1e-8
Schedule = Callable[[jax.Array], jax.Array]


def wsd_schedule(peak: float, *, warmup_steps: int, decay_fraction: float, total_steps: int) -> Schedule:
    """Warm-up, stable, linear decay, as a function of the 0-based step.

    With w warm-up steps and d = round(decay_fraction * total) decay steps, step i has the smaller of peak (i + 1) / w
    and peak (total - i) / (d + 1), and at most the peak: the first step has peak / w, the last warm-up step the peak,
    the first decay step peak d / (d + 1), the last step of the run peak / (d + 1), and the line reaches 0 at step
    `total`, which is no longer taken. w = 0 and d = 0 mean that there is no such phase.
    """
    decay_steps = round(decay_fraction * total_steps)

    def schedule(step: jax.Array) -> jax.Array:
        warmup = (step + 1) / warmup_steps if warmup_steps else 1.0
        decay = (total_steps - step) / (decay_steps + 1)
        return peak * jnp.clip(jnp.minimum(warmup, decay), 0.0, 1.0).astype(jnp.float32)

    return schedule


def decay_start(optimizer: OptimizerConfig, total_steps: int) -> int:
    """0-based step at which the decay phase begins (and the z-loss with it)."""
    return total_steps - round(optimizer.decay_fraction * total_steps)


def scale_by_normuon(b1: float, b2: float, specs: Any = None) -> optax.GradientTransformation:
    """The NorMuon direction for leaves of shape (..., inputs, outputs); `specs` as in `orthogonalised`."""
    return optax.chain(optax.ema(b1, debias=False), orthogonalised(specs), scale_by_output_rms(b2))


def scale_by_output_rms(b2: float) -> optax.GradientTransformation:
    """O -> 0.2 sqrt(m n) / |Oh|_F Oh, Oh = O / (sqrt(v) + eps), v the running mean square of each output's weights.

    State: v, (..., outputs). A matrix whose |Oh| is 0 gets a zero update.
    """

    def init(params: Any) -> Any:
        return jax.tree.map(lambda p: jnp.zeros(p.shape[:-2] + p.shape[-1:], p.dtype), params)

    def direction(o: jax.Array, v: jax.Array) -> jax.Array:
        o_hat = o / (jnp.sqrt(v) + EPS)[..., None, :]
        norm = jnp.linalg.norm(o_hat, axis=(-2, -1), keepdims=True)
        rate = 0.2 * (o.shape[-2] * o.shape[-1]) ** 0.5 / jnp.where(norm > 0, norm, 1.0)
        return rate * o_hat  # 0 where the norm is

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        state = jax.tree.map(lambda o, v: b2 * v + (1 - b2) * jnp.mean(jnp.square(o), axis=-2), updates, state)
        return jax.tree.map(direction, updates, state), state

    return optax.GradientTransformation(init, update)


def decay_and_descend(schedule: Schedule, *, peak: float, weight_decay: float) -> optax.GradientTransformationExtraArgs:
    """-lr (u + (lr / lr_max) wd W): AdamC's decay, with lr = schedule(step) of the global step."""

    def update(updates: Any, state: Any, params: Any = None, *, step: jax.Array, **_: Any) -> tuple[Any, Any]:
        rate = schedule(step)
        decay = weight_decay * rate / peak
        return jax.tree.map(lambda u, p: (-rate * (u + decay * p)).astype(p.dtype), updates, params), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def frozen_without_feedback(inner: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """`inner` where `fused` is true; otherwise no update and no change of its state, at no cost (lax.cond)."""

    def update(updates: Any, state: Any, params: Any = None, *, fused: jax.Array, **extra: Any) -> tuple[Any, Any]:
        return jax.lax.cond(
            fused,
            lambda: inner.update(updates, state, params, **extra),
            lambda: (optax.tree.zeros_like(updates), state),
        )

    return optax.GradientTransformationExtraArgs(inner.init, update)


class SkipState(NamedTuple):
    """Counts of steps that were left out, int32."""

    in_a_row: jax.Array
    total: jax.Array
    inner_state: Any


def skipped_unless_finite(inner: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """`inner` where the gradient's global norm is finite; otherwise no update and no change of its state, but counted.

    optax.apply_if_finite looks at the elements alone: with large finite ones the norm overflows, clipping turns every
    gradient into 0, and the step would move parameters on stale momentum.
    """

    def init(params: Any) -> SkipState:
        return SkipState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), inner.init(params))

    def update(updates: Any, state: SkipState, params: Any = None, **extra: Any) -> tuple[Any, SkipState]:
        finite = jnp.isfinite(optax.tree.norm(updates))
        updates, inner_state = jax.lax.cond(
            finite,
            lambda: inner.update(updates, state.inner_state, params, **extra),
            lambda: (optax.tree.zeros_like(updates), state.inner_state),
        )
        in_a_row = jnp.where(finite, 0, state.in_a_row + 1)
        return updates, SkipState(in_a_row, state.total + ~finite, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def parameter_group(path: tuple[Any, ...]) -> str:
    """`fusion`, `matrix` or `adam`, by the parameter's path."""
    names = [key.key for key in path]
    if names[0] == 'fusion':
        return 'fusion'
    return 'matrix' if names[-1] == 'kernel' and 'head_gate' not in names else 'adam'


def parameter_groups(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: parameter_group(path), params)


def learning_rate_schedules(config: OptimizerConfig, total_steps: int) -> dict[str, Schedule]:
    """Of the `matrix` (also the fusion's) and `adam` groups."""
    return {
        group: wsd_schedule(
            peak, warmup_steps=config.warmup_steps, decay_fraction=config.decay_fraction, total_steps=total_steps
        )
        for group, peak in (('matrix', config.matrix_learning_rate), ('adam', config.adam_learning_rate))
    }


def make_optimizer(
    config: OptimizerConfig, total_steps: int, specs: Any = None
) -> optax.GradientTransformationExtraArgs:
    """`update(grads, state, params, step=..., fused=...)`: step is the 0-based global step, fused whether K > 1.

    specs: PartitionSpecs in the parameters' tree; needed on a mesh of several devices.

    A gradient whose norm is not finite changes nothing but the counts in the state, see `skipped_unless_finite`.
    """
    schedules = learning_rate_schedules(config, total_steps)
    by_path = {
        tuple(key.key for key in path): spec
        for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    }
    normuon = optax.chain(
        scale_by_normuon(config.normuon_b1, config.normuon_b2, by_path),
        decay_and_descend(
            schedules['matrix'], peak=config.matrix_learning_rate, weight_decay=config.matrix_weight_decay
        ),
    )
    adam = optax.chain(
        optax.scale_by_adam(config.adam_b1, config.adam_b2, config.adam_eps),
        decay_and_descend(schedules['adam'], peak=config.adam_learning_rate, weight_decay=0.0),
    )
    groups = {'matrix': normuon, 'fusion': frozen_without_feedback(normuon), 'adam': adam}
    inner = optax.chain(optax.clip_by_global_norm(config.clip_norm), optax.partition(groups, parameter_groups))
    return skipped_unless_finite(inner)
