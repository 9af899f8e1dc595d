"""The fusion against equation 4 written in numpy; which inputs are fused, and what reaches the fusion's matrices.

Shapes: B batch, T positions, D width.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from helpers import apply, flat_params, float64, make_batch, make_model, make_params

from fbt_jax.config_model import FUSIONS, ModelConfig
from fbt_jax.model.feedback import Fusion
from fbt_jax.model.transformer import dense, init_params

WIDTH = 8
FUSED = tuple(f for f in FUSIONS if f != 'none')


def fuse(kind: str, params: Any, gate_input_BTD: Any, prev_BTD: Any) -> Any:
    dtype = jnp.asarray(gate_input_BTD).dtype
    config = ModelConfig(width=WIDTH, num_heads=2, num_kv_heads=1, dtype=str(dtype))
    return Fusion(kind, partial(dense, config)).apply({'params': params}, gate_input_BTD, prev_BTD)


def random_inputs(kind: str) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """(fusion parameters, n(e), h), float64."""
    rng = np.random.default_rng(0)
    gate_input_BTD, prev_BTD = rng.normal(size=(2, 2, 5, WIDTH))
    shapes = {
        'gated': {'state': (WIDTH, WIDTH), 'gate': (WIDTH, WIDTH)},
        'add': {'state': (WIDTH, WIDTH)},
        'concat': {'joint': (2 * WIDTH, WIDTH)},
    }[kind]
    return {name: {'kernel': rng.normal(size=shape)} for name, shape in shapes.items()}, gate_input_BTD, prev_BTD


@float64
def test_gated_fusion_is_equation_4() -> None:
    params, gate_input_BTD, prev_BTD = random_inputs('gated')
    value_BTD = prev_BTD @ params['state']['kernel']
    gate_BTD = 1 / (1 + np.exp(-gate_input_BTD @ params['gate']['kernel']))
    np.testing.assert_allclose(fuse('gated', params, gate_input_BTD, prev_BTD), value_BTD * gate_BTD, atol=1e-13)


@float64
def test_add_and_concat_fusions_are_their_equations() -> None:
    params, gate_input_BTD, prev_BTD = random_inputs('add')
    expected_BTD = gate_input_BTD + prev_BTD @ params['state']['kernel']
    np.testing.assert_allclose(fuse('add', params, gate_input_BTD, prev_BTD), expected_BTD, atol=1e-13)
    params, gate_input_BTD, prev_BTD = random_inputs('concat')
    joint = params['joint']['kernel']
    expected_BTD = gate_input_BTD @ joint[:WIDTH] + prev_BTD @ joint[WIDTH:]  # the token first, then the state
    np.testing.assert_allclose(fuse('concat', params, gate_input_BTD, prev_BTD), expected_BTD, atol=1e-13)


@float64
def test_without_a_state_the_gated_input_is_exactly_zero() -> None:
    params, gate_input_BTD, prev_BTD = random_inputs('gated')
    assert not np.any(fuse('gated', params, 1e3 * gate_input_BTD, np.zeros_like(prev_BTD)))
    for kind in ('add', 'concat'):  # the control: there the token has a path of its own
        params, gate_input_BTD, prev_BTD = random_inputs(kind)
        assert np.all(np.any(fuse(kind, params, gate_input_BTD, np.zeros_like(prev_BTD)) != 0, axis=-1))


@pytest.mark.parametrize(
    ('kind', 'shapes'),
    [
        ('gated', {'state': (16, 16), 'gate': (16, 16)}),
        ('add', {'state': (16, 16)}),
        ('concat', {'joint': (32, 16)}),
        ('none', None),
    ],
)
def test_fusion_parameters_are_matrices_without_biases(kind: str, shapes: dict[str, Any] | None) -> None:
    model = make_model(fusion=kind)
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    assert ('fusion' in params) == (shapes is not None)
    if shapes is not None:
        assert {name: jax.tree.map(jnp.shape, leaf) for name, leaf in params['fusion'].items()} == {
            name: {'kernel': shape} for name, shape in shapes.items()
        }


def test_a_model_without_fusion_refuses_previous_states() -> None:
    model, batch = make_model(fusion='none'), make_batch()
    prev_BTD = jnp.zeros((*batch.tokens.shape, 16))
    with pytest.raises(ValueError, match=r"model\.fusion = 'none'"):
        apply(model, make_params(model), batch, prev_BTD)


def test_fused_positions_read_the_state_given_and_plain_ones_do_not() -> None:
    """The input of a plain position is that of an ordinary pass, bit for bit, whatever the state (known failure 42)."""
    model, batch = make_model(), make_batch()
    params = make_params(model)
    rng = np.random.default_rng(3)
    prev_BTD = rng.normal(size=(*batch.tokens.shape, 16)).astype(np.float32)
    all_plain_BT = np.ones(batch.tokens.shape, bool)
    np.testing.assert_array_equal(apply(model, params, batch, prev_BTD, all_plain_BT), apply(model, params, batch))

    plain_BT = (batch.positions == 0) | (rng.random(batch.tokens.shape) < 0.4)
    hidden_BTD = np.asarray(apply(model, params, batch, prev_BTD, plain_BT))
    moved_BTD = np.where(plain_BT[..., None], 100 * prev_BTD + 1, prev_BTD)
    np.testing.assert_array_equal(apply(model, params, batch, moved_BTD, plain_BT), hidden_BTD)
    for b, t in np.argwhere(~plain_BT & (batch.segment_ids > 0)):
        moved_BTD = prev_BTD.copy()
        moved_BTD[b, t] = rng.normal(size=16)
        changed_BT = np.any(np.asarray(apply(model, params, batch, moved_BTD, plain_BT)) != hidden_BTD, axis=-1)
        assert changed_BT[b, t]
        assert not np.any(changed_BT & ((batch.segment_ids != batch.segment_ids[b, t]) | (np.arange(12) < t)))
        assert not np.any(changed_BT[1 - b])


def test_only_document_starts_are_plain_by_default() -> None:
    model, batch = make_model(), make_batch()
    params = make_params(model)
    prev_BTD = np.random.default_rng(3).normal(size=(*batch.tokens.shape, 16)).astype(np.float32)
    np.testing.assert_array_equal(
        apply(model, params, batch, prev_BTD), apply(model, params, batch, prev_BTD, batch.positions == 0)
    )


@float64
@pytest.mark.parametrize('kind', FUSED)
def test_fused_pass_equals_the_reference(kind: str) -> None:
    """Norm on the gate's input and on the fused input, with the same scale: equations of section 2, in the stack."""
    model, batch = make_model(fusion=kind, dtype='float64', num_layers=1, full_attention_every=1), make_batch()
    params = make_params(model, seed=5)
    prev_BTD = np.random.default_rng(3).normal(size=(*batch.tokens.shape, 16))
    plain_BT = batch.positions == 0
    expected_BTD = reference.states(
        flat_params(params), model.config, batch.tokens, prev_BTD, plain_BT, batch.positions, batch.segment_ids
    )
    actual_BTD = np.asarray(apply(model, params, batch, prev_BTD))
    real_BT = batch.segment_ids > 0
    np.testing.assert_allclose(actual_BTD[real_BT], expected_BTD[real_BT], atol=1e-11)


@float64
def test_gated_input_does_not_depend_on_the_state_s_scale() -> None:
    """The norm on the fused input makes it scale-free (known failure 45)."""
    model, batch = make_model(dtype='float64'), make_batch()
    params = make_params(model)
    prev_BTD = np.random.default_rng(3).normal(size=(*batch.tokens.shape, 16))
    hidden_BTD = apply(model, params, batch, 100 * prev_BTD)
    np.testing.assert_allclose(apply(model, params, batch, 1200 * prev_BTD), hidden_BTD, atol=1e-5)
    assert np.max(np.abs(apply(model, params, batch, -100 * prev_BTD) - hidden_BTD)) > 0.1
