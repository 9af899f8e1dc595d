"""The causality check: honest models pass it, planted leaks of each kind don't."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_batch, make_model, make_params

from fbt_jax import passes
from fbt_jax.evaluation import causality
from fbt_jax.evaluation.causality import require_causal

MODEL = make_model()
PARAMS = make_params(MODEL)
BATCH = make_batch(((12,), (7, 5), (4, 6)))


class Leaky:
    """The model with a little of the embedding `ahead` positions later in its states; `only_fed`: where it is fed."""

    config = MODEL.config

    def __init__(self, ahead: int, only_fed: bool = False) -> None:
        self.ahead, self.only_fed = ahead, only_fed

    def apply(self, variables: Any, tokens: Any, prev: Any = None, *, plain_BT: Any = None, **more: Any) -> Any:
        hidden = MODEL.apply(variables, tokens, prev, plain_BT=plain_BT, **more)
        seen = jnp.roll(variables['params']['embedding'][tokens], -self.ahead, axis=1)
        return hidden + 1e-3 * (jnp.where(plain_BT[..., None], 0, seen) if self.only_fed else seen)


def test_the_model_is_causal_to_the_bit() -> None:
    require_causal(MODEL, PARAMS, BATCH, num_passes=3)
    np.testing.assert_array_equal(causality.loss_changes(MODEL, PARAMS, BATCH, num_passes=3), np.zeros(3))


@pytest.mark.parametrize(('leak', 'first'), [(Leaky(1), 1), (Leaky(3), 1), (Leaky(1, only_fed=True), 2)])
def test_a_planted_leak_is_caught(leak: Leaky, first: int) -> None:
    with pytest.raises(RuntimeError, match=rf'^the model sees tokens that it must predict: in pass {first} of 3, .*$'):
        require_causal(leak, PARAMS, BATCH, num_passes=3)


def test_feedback_from_the_position_itself_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shift to the wrong side: h_{t+1} fed at t."""
    monkeypatch.setattr(passes, 'shift', lambda hidden: jnp.roll(hidden, -1, axis=1))
    with pytest.raises(RuntimeError, match='in pass 2 of 2'):
        require_causal(make_model(rope_theta=101.0), PARAMS, BATCH, num_passes=2)


def test_not_a_number_on_one_side_is_a_leak() -> None:
    class Broken(Leaky):
        def apply(self, variables: Any, tokens: Any, prev: Any = None, **more: Any) -> Any:
            hidden = MODEL.apply(variables, tokens, prev, **more)
            return jnp.where(jnp.any(tokens != BATCH.tokens), jnp.nan, hidden)

    with pytest.raises(RuntimeError, match='by up to inf nats'):
        require_causal(Broken(1), PARAMS, BATCH, num_passes=1)
