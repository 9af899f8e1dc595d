"""Does the feedback map h^k = F(h^{k-1}) settle when it is iterated past the passes it was trained with?

    u_k = sqrt(mean over judged positions and width of (h^k - h^{k-1})^2),   rate = exp(slope of log u_k over k)

Judged are the counted positions that lie more than K tokens into their document's piece, the same for all passes: the
first k positions are exact after k passes, so there h^k - h^{k-1} is 0 for any map. Memory does not grow with K: a pass
leaves three sums a row. Intervals are bootstraps over rows. Shapes: K passes, B rows of a batch, R rows, T positions.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbt_jax.batch import Batch
from fbt_jax.errors import UserError
from fbt_jax.evaluation.intervals import bootstrap, ratios
from fbt_jax.losses import token_losses
from fbt_jax.model.transformer import head_table
from fbt_jax.passes import multi_pass
from fbt_jax.sharding import replicated

MIN_POSITIONS, MIN_ROWS = 200, 8
SMALL = 0.1  # an update less than this part of the state is a plateau that contraction may leave
STILL = 0.99  # an update that shrinks by less than 1 % a pass doesn't shrink
GROWS = 1.0001  # the least rate that the four digits told can tell from 1
CLIMB = 0.01  # nats per token
AT_FLOOR = ', no measure of the map: by the end the update is at the floor of rounding and cannot be seen to fall on'
REGROWS = ': there it grows, so it is not seen to settle, however small it is'
ROUNDING = 8  # times the dtype's epsilon, in parts of the state: what an update cannot be seen to fall below


class Iterated(NamedTuple):
    """Sums over each row's judged positions, float64 numpy; rows without any are left out."""

    nll_KR: np.ndarray
    squared_update_KR: np.ndarray  # mean over the width; entry 0 is against h^0 = 0
    squared_state_KR: np.ndarray
    judged_R: np.ndarray

    @property
    def loss_K(self) -> np.ndarray:
        return self.nll_KR.sum(-1) / self.judged_R.sum()

    @property
    def update_norm_K(self) -> np.ndarray:
        return np.sqrt(self.squared_update_KR.sum(-1) / self.judged_R.sum())

    @property
    def state_norm_K(self) -> np.ndarray:
        return np.sqrt(self.squared_state_KR.sum(-1) / self.judged_R.sum())


class Interval(NamedTuple):
    value: float
    low: float
    high: float


class Verdict(NamedTuple):
    verdict: str  # contracting, diverging or undecided
    evidence: list[str]
    rate: Interval  # over the passes `fitted`
    fitted: tuple[int, int]  # first and last
    late_rate: Interval  # over the second half of the passes
    final_update: float  # mean over the last quarter of the passes, in parts of the state's norm
    late_loss_change: Interval  # over the second half, nats per token
    loss_change: Interval  # from the last pass it was trained with, nats per token


def make_iteration(model: Any, *, num_passes: int) -> Callable[[Any, Batch], Any]:
    """Jitted (params, batch) -> the four arrays of `Iterated` for the batch's rows; every process gets all of them."""

    @jax.jit
    def iteration(params: Any, batch: Batch) -> Any:
        judged_BT = (batch.weights > 0) & (batch.positions >= num_passes)

        def total(values_BT: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(judged_BT, values_BT, 0), axis=1)

        def per_pass(hidden_BTD: jax.Array, last_BTD: jax.Array) -> tuple[jax.Array, ...]:
            losses = token_losses(hidden_BTD, head_table(params), batch.targets, vocab_size=model.config.vocab_size)
            dtype = jnp.promote_types(hidden_BTD.dtype, jnp.float32)
            hidden_BTD, last_BTD = hidden_BTD.astype(dtype), last_BTD.astype(dtype)
            update_BT = jnp.mean(jnp.square(hidden_BTD - last_BTD), axis=-1)
            return total(losses.nll_BT), total(update_BT), total(jnp.mean(jnp.square(hidden_BTD), axis=-1))

        yields = multi_pass(model, params, batch, num_passes=num_passes, per_pass=per_pass).yields
        return replicated((*yields, jnp.sum(judged_BT, axis=1)))

    return iteration


def iterate(iteration: Callable[[Any, Batch], Any], params: Any, batches: Iterable[Batch], *, passes: int) -> Iterated:
    """Raises UserError where too few positions or rows can be judged, RuntimeError where a pass leaves the numbers."""
    parts = [[np.asarray(x, np.float64) for x in iteration(params, batch)] for batch in batches]
    found = Iterated(*(np.concatenate(x, axis=-1) for x in zip(*parts, strict=True)))
    found = Iterated(*(x[..., found.judged_R > 0] for x in found))
    positions, rows = int(found.judged_R.sum()), len(found.judged_R)
    if positions < MIN_POSITIONS or rows < MIN_ROWS:
        raise UserError(
            f'--passes={passes}: only {positions} positions in {rows} rows lie further than that into their document, '
            f'where a pass can still change them; {MIN_POSITIONS} in {MIN_ROWS} rows are needed: iterate fewer passes'
        )
    finite_K = np.isfinite(np.stack(found[:-1])).all(axis=(0, 2))
    if not finite_K.all():
        raise RuntimeError(f'from pass {finite_K.argmin() + 1} on, losses or states are not finite')
    return found


def judge(found: Iterated, *, trained_passes: int, dtype: Any) -> Verdict:
    """What the sums say. `trained_passes`: the most that training made; `dtype`: of the states."""
    num_passes = len(found.loss_K)
    floor = ROUNDING * float(jnp.finfo(dtype).eps) * found.state_norm_K[-1]
    fitted, half = fit_range(found.update_norm_K, floor), num_passes // 2
    rate, late_rate = (_rate(found, span, floor) for span in (fitted, (half, num_passes)))
    quarter = found.update_norm_K[-max(1, num_passes // 4) :]
    final = float(quarter.mean() / found.state_norm_K[-1])
    late_change = _loss_change(found, half)
    change = _loss_change(found, min(trained_passes, num_passes - 1))

    moves = final >= SMALL and late_rate.high >= STILL
    climbs = late_change.low > CLIMB
    regrows = late_rate.low >= GROWS  # what lies below the floor of rounding counts as that, so its rate is 1
    if rate.low > 1 or moves:
        verdict = 'diverging'
    elif rate.high < 1 and final < SMALL and not regrows and not climbs:
        verdict = 'contracting'
    else:
        verdict = 'undecided'
    evidence = [
        f'a pass multiplies the update by {_told(rate, 4)}, fitted over passes {fitted[0]} to {fitted[1]}',
        f'over passes {half} to {num_passes} alone, by {_told(late_rate, 4)}'
        + (AT_FLOOR if found.update_norm_K[-1] <= floor else REGROWS if regrows else ''),
        f'at the end the update is {final:.2g} of the state; below {SMALL} counts as small',
        f'the loss moves by {_told(late_change, 4)} nats per token from pass {half} to {num_passes}, by '
        f'{_told(change, 4)} from pass {min(trained_passes, num_passes - 1)}',
    ]
    return Verdict(verdict, evidence, rate, fitted, late_rate, final, late_change, change)


def fit_range(update_norm_K: np.ndarray, floor: float) -> tuple[int, int]:
    """First and last pass of the fit: from 2 to where the update comes within twice its plateau; else all of them."""
    num_passes = len(update_norm_K)
    plateau = max(floor, float(np.median(update_norm_K[-max(1, num_passes // 4) :])))
    there = [k for k in range(2, num_passes + 1) if update_norm_K[k - 1] <= 2 * plateau]
    return (2, there[0]) if there and there[0] > 2 else (2, num_passes)


def _rate(found: Iterated, span: tuple[int, int], floor: float) -> Interval:
    first, last = span
    passes = np.arange(first, last + 1)
    weights = (passes - passes.mean()) / np.sum((passes - passes.mean()) ** 2)

    def rate(*data: np.ndarray, axis: int = -1) -> np.ndarray:
        *squared, judged = (x.sum(axis) for x in data)
        # Of what rounding leaves nothing is learnt, and the logarithm of 0 is none.
        norms = [np.maximum(np.sqrt(x / judged), floor) for x in squared]
        return np.exp(sum(w * np.log(norm) for w, norm in zip(weights, norms, strict=True)))

    data = (*found.squared_update_KR[first - 1 : last], found.judged_R)
    low, high = bootstrap(data, rate)
    return Interval(float(rate(*data)), float(low), float(high))


def _loss_change(found: Iterated, since: int) -> Interval:
    changed = ratios(found.nll_KR[-1:] - found.nll_KR[since - 1 : since], found.judged_R)
    return Interval(*(float(x[0]) for x in changed))


def _told(interval: Interval, digits: int) -> str:
    return '{:z.{d}f} ({:z.{d}f} to {:z.{d}f})'.format(*interval, d=digits)
