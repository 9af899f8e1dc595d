"""The train step: one jitted function of (state, batch) that draws its pass count, and everything it is made of.

    objective = NLL(pass 1) + lambda * mean_{k>=2} NLL(pass k)  [+ z-loss coefficient * the same mix of mean (log Z)^2]

The gradient is taken INSIDE each branch of the switch over pass counts: peak memory is the largest branch's. The
other form, the gradient through one scan whose `cond` skips passes, was measured beside it (tiny, mixture of 1, 2, 3,
2 CPU cores): a one-pass step costs 1.33 of a single-pass step against 0.92 here, peak memory 322 MiB against 282,
compile time 4.6 s against 6.4. Sums are divided by the global token count, so micro-batches of any padding add up to
the large batch.
Shapes: B rows, T positions, K passes of one step, Kmax of the run.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fbt_jax.batch import Batch
from fbt_jax.config import Config
from fbt_jax.losses import LossSums, loss_sums, token_losses
from fbt_jax.model.transformer import head_table
from fbt_jax.passes import Noise, multi_pass, step_key
from fbt_jax.training.optimizer import decay_start, learning_rate_schedules
from fbt_jax.training.pass_schedule import draw_branch


class TrainState(NamedTuple):
    """Arrays only; model and optimizer are closed over. `step` counts finished optimizer steps (int32)."""

    params: Any
    opt_state: Any
    step: jax.Array


class StepMetrics(NamedTuple):
    """Scalars of one step; `loss_K` has Kmax entries, of which the first `passes` mean something."""

    passes: jax.Array
    loss: jax.Array  # the objective, z-loss included
    loss_K: jax.Array  # nats per token, by pass
    z_loss: jax.Array
    grad_norm: jax.Array  # before clipping
    learning_rate: jax.Array  # of the matrices
    tokens: jax.Array  # counted in the loss, int32
    nonfinite_in_a_row: jax.Array  # 0 if this step was applied


class Gradients(NamedTuple):
    """Of one global batch, at the pass count of one branch."""

    grads: Any
    sums_K: LossSums  # padded with zeros to Kmax


def pass_weights(num_passes: int, loss_weight: float) -> jax.Array:
    """(K,): 1 for pass 1 and lambda / (K - 1) for the others."""
    later = loss_weight / max(1, num_passes - 1)
    return jnp.array([1.0] + [later] * (num_passes - 1))


def batch_gradients(
    config: Config, model: Any, params: Any, batch: Batch, *, key: jax.Array, num_passes: int, z_loss: jax.Array
) -> Gradients:
    """Gradient of the objective over the whole batch, accumulated over `training.microbatches` in one scan."""
    weights_K = pass_weights(num_passes, config.passes.loss_weight)
    count = token_count(batch)

    def objective(params: Any, micro: Batch, rows_B: jax.Array) -> tuple[jax.Array, LossSums]:
        def per_pass(hidden_BTD: jax.Array, _: jax.Array) -> LossSums:
            losses = token_losses(hidden_BTD, head_table(params), micro.targets, vocab_size=model.config.vocab_size)
            return loss_sums(losses, micro.weights)

        noise = Noise(key, rows_B, config.passes.prefix_mixin, config.passes.jitter)
        sums_K = multi_pass(model, params, micro, num_passes=num_passes, per_pass=per_pass, noise=noise).yields
        return jnp.sum(weights_K * (sums_K.nll + z_loss * sums_K.squared_log_z)) / count, sums_K

    def one(rows: tuple[Batch, jax.Array]) -> Gradients:
        return Gradients(*jax.grad(objective, has_aux=True)(params, *rows))

    rows = (batch, jnp.arange(batch.tokens.shape[0], dtype=jnp.int32))
    if config.training.microbatches == 1:
        result = one(rows)
    else:
        parts = jax.tree.map(partial(_split_rows, parts=config.training.microbatches), rows)
        shapes = jax.eval_shape(lambda: one(jax.tree.map(lambda x: x[0], parts)))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        result, _ = jax.lax.scan(lambda total, part: (jax.tree.map(jnp.add, total, one(part)), None), zeros, parts)
    padding = (0, config.passes.max_passes - num_passes)
    return result._replace(sums_K=jax.tree.map(lambda x: jnp.pad(x, padding), result.sums_K))


def make_train_step(
    config: Config, model: Any, optimizer: optax.GradientTransformationExtraArgs
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The pure step, to be jitted with the state donated. It compiles once; the drawn pass count picks a branch."""
    total_steps = config.training.steps
    learning_rate = learning_rate_schedules(config.optimizer, total_steps)['matrix']
    z_loss_from = decay_start(config.optimizer, total_steps)
    counts = config.passes.pass_counts

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        branch = draw_branch(config.passes, seed=config.seed, step=state.step, total_steps=total_steps)
        z_loss = jnp.where(state.step >= z_loss_from, config.optimizer.z_loss, 0.0)
        key = step_key(config.seed, state.step)
        branches = [
            partial(batch_gradients, config, model, key=key, num_passes=num_passes, z_loss=z_loss)
            for num_passes in counts
        ]
        grads, sums_K = jax.lax.switch(branch, branches, state.params, batch)

        passes = jnp.array(counts, jnp.int32)[branch]
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params, step=state.step, fused=passes > 1)
        params = optax.apply_updates(state.params, updates)

        count = token_count(batch)
        weights_K = jnp.stack(
            [jnp.pad(pass_weights(k, config.passes.loss_weight), (0, counts[-1] - k)) for k in counts]
        )
        z_mean = jnp.sum(weights_K[branch] * sums_K.squared_log_z) / count
        metrics = StepMetrics(
            passes=passes,
            loss=jnp.sum(weights_K[branch] * sums_K.nll) / count + z_loss * z_mean,
            loss_K=sums_K.nll / count,
            z_loss=z_loss * z_mean,
            grad_norm=optax.tree.norm(grads),
            learning_rate=learning_rate(state.step),
            tokens=jnp.sum(batch.weights > 0, dtype=jnp.int32),
            nonfinite_in_a_row=opt_state.in_a_row,
        )
        return TrainState(params, opt_state, state.step + 1), metrics

    return train_step


def token_count(batch: Batch) -> jax.Array:
    """Sum of the weights over the global batch; 1 where none counts, whose sums are 0."""
    total = jnp.sum(batch.weights)
    return jnp.where(total > 0, total, 1.0)


def _split_rows(x_Bx: jax.Array, *, parts: int) -> jax.Array:
    """(B, ...) -> (parts, B / parts, ...), every `parts`-th row together: a sharded B stays spread over the devices."""
    return jnp.swapaxes(x_Bx.reshape(-1, parts, *x_Bx.shape[1:]), 0, 1)
