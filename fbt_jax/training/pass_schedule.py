"""The scheduled mixture of pass counts, drawn inside the compiled step (method.md section 3).

Each optimizer step draws ONE pass count K for the global batch, from the phase in force. The draw is a function of
(seed, step) alone: the same on every host, after a resume, and on the host without the device. Only pass counts that
some phase gives a nonzero probability exist; they are the branches of the step's `lax.switch`.
"""

import jax
import jax.numpy as jnp

from fbt_jax.config import PassesConfig
from fbt_jax.passes import PURPOSE_PASS_COUNT, step_key


def draw_branch(passes: PassesConfig, *, seed: int, step: jax.Array, total_steps: int) -> jax.Array:
    """Index into `passes.pass_counts` of the pass count of `step` (0-based, int32 scalar, may be traced)."""
    phases = passes.phase_steps(total_steps)
    starts_P = jnp.array([start for start, _ in phases], jnp.int32)
    probabilities_Pb = jnp.array([p for _, p in phases], jnp.float32)
    phase = jnp.sum(step >= starts_P) - 1
    key = jax.random.fold_in(step_key(seed, step), PURPOSE_PASS_COUNT)
    # jax.random.choice searches the cumulative sum for r in (0, total], so it never returns an entry of probability 0.
    return jax.random.choice(key, len(passes.pass_counts), p=probabilities_Pb[phase]).astype(jnp.int32)


def expected_passes(passes: PassesConfig, total_steps: int) -> float:
    """Mean number of passes over the whole run: token-equivalent compute per token."""
    phases = passes.phase_steps(total_steps)
    ends = [min(start, total_steps) for start, _ in phases[1:]] + [total_steps]
    total = 0.0
    for (start, p), end in zip(phases, ends, strict=True):
        total += max(0, end - start) * sum(k * p_k for k, p_k in zip(passes.pass_counts, p, strict=True))
    return total / total_steps
