"""What can be read, linearly, from the residual stream at a text's last token (method.md section 8).

    plain    every token read plainly
    k-step   the last k tokens each fused with the state of the step before, all before them read plainly
    full     the exact recurrence: every token but the first fused

States are those of cached single steps after a plain prefill, at each depth: 0 the stack's input, then each layer's
output, then h after the final norm. The probe is a logistic regression with an L2 penalty (C = 1) on features that are
standardised on its training part; four folds, in which a group is never split. Its accuracy's interval is a bootstrap
over groups. Shapes: E examples, B rows of a batch, T positions, D width, S = L + 2 depths, U groups.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbt_jax.errors import UserError
from fbt_jax.evaluation.intervals import ratios
from fbt_jax.evaluation.probe_tasks import Setting
from fbt_jax.inference.decode import read_prompts
from fbt_jax.inference.generate import LEAST, padded_rows, rounded
from fbt_jax.sharding import replicated

FOLDS, PENALTY_C, MOST_ITERATIONS = 4, 1.0, 1000
BATCH_ROWS = 128


class Mode(NamedTuple):
    name: str
    steps: int | None  # recurrent steps at the end; None: all but the first token


PLAIN, FULL = Mode('plain', 0), Mode('full', None)


def k_step(k: int) -> Mode:
    return Mode(f'{k}-step', k)


class Accuracy(NamedTuple):
    """By depth, with 95 % intervals over groups."""

    value_S: np.ndarray
    low_S: np.ndarray
    high_S: np.ndarray


def encoded(tokenizer: Any, setting: Setting) -> list[list[int]]:
    """The examples' ids, BOS first.

    Raises:
      UserError: with this tokenizer members of a pair differ in length, or texts don't end in a colon of its own.
    """
    ids = [[tokenizer.bos_id, *tokenizer.encode(x.text)] for x in setting.examples]
    told = f'{setting.task}, {setting.name}: with the tokenizer of this run'
    ends = {x[-1] for x in ids}
    if len(ends) > 1 or tokenizer.decode([*ends]).strip() != ':':
        raise UserError(f'{told} not every text ends in the same token, a colon alone')
    lengths: dict[tuple[int, int], int] = {}
    for example, own in zip(setting.examples, ids, strict=True):
        if lengths.setdefault((example.group, example.pair), len(own)) != len(own):
            raise UserError(f'{told} {example.text!r} has not as many tokens as the text that it is paired with')
    return ids


@partial(jax.jit, static_argnames=('model', 'feedback'))
def last_depths(
    model: Any, params: Any, tokens_BT: jax.Array, lengths_B: jax.Array, steps: jax.Array, *, feedback: bool
) -> jax.Array:
    """(B, S, D): the residual stream at each row's last token.

    steps: how many tokens at the end are fed one by one, at most all but the first. feedback: each fused with the state
    of the step before, not plain.
    """
    prompts_B = jnp.maximum(lengths_B - steps, 1)
    capacity = tokens_BT.shape[1]
    read = read_prompts(model, params, tokens_BT, prompts_B, num_passes=1, capacity=capacity)
    num_depths = model.config.num_layers + 2

    def step(i: jax.Array, carry: tuple[Any, jax.Array, jax.Array]) -> tuple[Any, jax.Array, jax.Array]:
        cache, hidden_BD, last_BSD = carry
        position_B = jnp.minimum(prompts_B + i, lengths_B - 1)  # a shorter row repeats its last token, unread
        result: Any = model.apply(
            {'params': params},
            jnp.take_along_axis(tokens_BT, position_B[:, None], axis=1),
            hidden_BD[:, None] if feedback else None,
            plain_BT=jnp.zeros((len(position_B), 1), bool) if feedback else None,
            positions_BT=position_B[:, None],
            cache=cache,
            mutable='intermediates',
        )
        (hidden_B1D, cache), kept = result
        depths_SBD = jnp.concatenate([kept['intermediates']['depths'][0][:, :, 0], hidden_B1D[None, :, 0]])
        going_B11 = (prompts_B + i < lengths_B)[:, None, None]
        return cache, hidden_B1D[:, 0], jnp.where(going_B11, jnp.moveaxis(depths_SBD, 0, 1), last_BSD)

    blank_BSD = jnp.zeros((len(tokens_BT), num_depths, model.config.width), read.hidden_BD.dtype)
    turns = jnp.max(lengths_B - prompts_B)
    return replicated(jax.lax.fori_loop(0, turns, step, (read.cache, read.hidden_BD, blank_BSD))[2])


def depth_states(model: Any, params: Any, ids: Sequence[Sequence[int]], mode: Mode, *, context: int) -> np.ndarray:
    """(E, S, D) float64: of texts of two tokens or more, in batches of rows of one size."""
    width = rounded(max(LEAST, *map(len, ids)), context)
    rows = padded_rows(min(len(ids), BATCH_ROWS))
    found = []
    for start in range(0, len(ids), rows):
        part = [*ids[start : start + rows]]
        tokens_BT, lengths_B = np.zeros((rows, width), np.int32), np.full(rows, 2, np.int32)
        for row, own in enumerate(part):
            tokens_BT[row, : len(own)], lengths_B[row] = own, len(own)
        steps = {0: 1, None: width}.get(mode.steps, mode.steps)
        states = last_depths(model, params, tokens_BT, lengths_B, jnp.int32(steps), feedback=mode.steps != 0)
        found.append(np.asarray(states, np.float64)[: len(part)])
    return np.concatenate(found)


def probe(states_ESD: np.ndarray, labels_E: np.ndarray, groups_E: np.ndarray) -> Accuracy:
    """Accuracy of a linear probe at each depth, each example judged by the probe that has not seen its group."""
    correct_SE = np.stack([_held_out_correct(states_ESD[:, s], labels_E, groups_E) for s in range(states_ESD.shape[1])])
    groups, place_E = np.unique(groups_E, return_inverse=True)
    correct_US = np.zeros((len(groups), len(correct_SE)))
    np.add.at(correct_US, place_E, correct_SE.T)
    return Accuracy(*ratios(correct_US.T, np.bincount(place_E).astype(float)))


def _held_out_correct(x_ED: np.ndarray, labels_E: np.ndarray, groups_E: np.ndarray) -> np.ndarray:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GroupKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    # Of its solvers the quickest here; it shrinks the intercept too, which is 0 for labels in balance.
    fitted = LogisticRegression(C=PENALTY_C, max_iter=MOST_ITERATIONS, solver='liblinear')
    classifier = make_pipeline(StandardScaler(), fitted)
    folds = GroupKFold(FOLDS)
    return cross_val_predict(classifier, x_ED, labels_E, groups=groups_E, cv=folds) == labels_E


def require_scikit_learn() -> None:
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise UserError("probes need scikit-learn: pip install 'fbt-jax[probes]'") from None
