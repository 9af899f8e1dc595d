"""Which tokens may be drawn, how often, and with whose noise; against counting and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbt_jax.inference.sampling import Sampling, choose, restrict

PROBS = np.array([0.05, 0.4, 0.1, 0.25, 0.2])
LOGITS = jnp.log(jnp.asarray(PROBS, jnp.float32))[None]


def allowed(*, top_k: int = 0, top_p: float = 1.0) -> list[int]:
    return np.flatnonzero(np.isfinite(np.asarray(restrict(LOGITS, top_k=top_k, top_p=top_p))[0])).tolist()


@pytest.mark.parametrize(
    ('options', 'left'),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({'top_k': 1}, [1]),
        ({'top_k': 3}, [1, 3, 4]),
        ({'top_k': 99}, [0, 1, 2, 3, 4]),
        ({'top_p': 0.1}, [1]),  # the largest always stays
        ({'top_p': 0.39}, [1]),
        ({'top_p': 0.6}, [1, 3]),
        ({'top_p': 0.7}, [1, 3, 4]),
        ({'top_p': 0.9}, [1, 2, 3, 4]),
        # Of the three that top-k leaves, 0.4 / 0.85 = 0.47 and 0.25 / 0.85 = 0.29 come to 0.76.
        ({'top_k': 3, 'top_p': 0.75}, [1, 3]),
    ],
)
def test_what_may_be_drawn(options: dict, left: list[int]) -> None:
    assert allowed(**options) == left


def draw(kind: str, count: int = 20_000, **options: float) -> np.ndarray:
    logits = jnp.broadcast_to(LOGITS, (count, 5))
    choice = choose(
        logits, Sampling(**options), kind=kind, key=jax.random.key(0), rows_B=jnp.arange(count), step=jnp.int32(3)
    )
    np.testing.assert_allclose(choice.log_prob_B, np.log(PROBS)[np.asarray(choice.token_B)], rtol=1e-5)
    return np.bincount(np.asarray(choice.token_B), minlength=5) / count


def test_frequencies_are_the_probabilities() -> None:
    """20,000 draws: a standard deviation is at most 0.0035."""
    np.testing.assert_allclose(draw('free', temperature=1.0), PROBS, atol=0.015)
    np.testing.assert_allclose(draw('free', temperature=0.5), PROBS**2 / (PROBS**2).sum(), atol=0.015)
    kept = np.where([False, True, False, True, True], PROBS, 0)
    np.testing.assert_allclose(draw('restricted', temperature=1.0, top_k=3), kept / kept.sum(), atol=0.015)
    assert draw('greedy')[1] == 1


def test_a_row_draws_the_same_whatever_else_is_drawn() -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(8, 50)), jnp.float32)

    def tokens(rows: list[int], step: int, seed: int = 0) -> list[int]:
        choice = choose(
            logits[jnp.array(rows)],
            Sampling(),
            kind='free',
            key=jax.random.key(seed),
            rows_B=jnp.array(rows),
            step=jnp.int32(step),
        )
        return np.asarray(choice.token_B).tolist()

    whole = tokens(list(range(8)), 5)
    for rows in ([3], [7, 0], [1, 2, 4]):
        assert tokens(rows, 5) == [whole[row] for row in rows]
    assert tokens(list(range(8)), 6) != whole
    assert tokens(list(range(8)), 5, seed=1) != whole
