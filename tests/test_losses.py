"""Cross-entropy in chunks against float64 numpy and jax.grad of a plain log-softmax; what its memory may hold.

Shapes: B batch, T positions, C rows of a chunk of the vocabulary, D width, V padded vocabulary.
"""

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import float64, jaxpr_sizes

from fbt_jax import losses
from fbt_jax.losses import TokenLosses, chunk_count, loss_sums, token_losses
from fbt_jax.model.transformer import logits

Array = np.ndarray

BATCH, SEQ_LEN, WIDTH, VOCAB_SIZE, PADDED = 2, 12, 16, 100, 128
SCALES = (5, 20, 80)


class Inputs(NamedTuple):
    hidden_BTD: Any
    embedding_VD: Any
    targets_BT: Array


def make_inputs(scale: float, dtype: Any = np.float32, seed: int = 0) -> Inputs:
    """Logits of standard deviation `scale`; the padded rows of the embedding are ten times larger than the real ones.

    Half of the targets are the likeliest token, since a trained model's mostly are.
    """
    rng = np.random.default_rng(seed)
    hidden_BTD = jnp.asarray(rng.normal(size=(BATCH, SEQ_LEN, WIDTH)), dtype)
    embedding_VD = rng.normal(size=(PADDED, WIDTH)) * scale * WIDTH**-0.5
    embedding_VD[VOCAB_SIZE:] *= 10
    embedding_VD = jnp.asarray(embedding_VD, jnp.promote_types(dtype, jnp.float32))
    targets_BT = rng.integers(VOCAB_SIZE, size=(BATCH, SEQ_LEN), dtype=np.int32)
    best_BT = np.argmax(wide_logits(hidden_BTD, embedding_VD, dtype), axis=-1)
    return Inputs(hidden_BTD, embedding_VD, np.where(rng.random(best_BT.shape) < 0.5, best_BT, targets_BT))


def wide_logits(hidden_BTD: Any, embedding_VD: Any, dtype: Any) -> Array:
    """Over the real vocabulary, in float64, of the numbers that a computation in `dtype` is given."""
    rounded_VD = np.asarray(jnp.asarray(embedding_VD, dtype), np.float64)
    return np.asarray(hidden_BTD, np.float64) @ rounded_VD[:VOCAB_SIZE].T


def expected_losses(inputs: Inputs, dtype: Any) -> TokenLosses:
    logits_BTV = wide_logits(inputs.hidden_BTD, inputs.embedding_VD, dtype)
    top_BT1 = logits_BTV.max(-1, keepdims=True)
    log_z_BT = (top_BT1 + np.log(np.exp(logits_BTV - top_BT1).sum(-1, keepdims=True)))[..., 0]
    target_BT = np.take_along_axis(logits_BTV, inputs.targets_BT[..., None], axis=-1)[..., 0]
    return TokenLosses(log_z_BT - target_BT, log_z_BT, (logits_BTV.argmax(-1) == inputs.targets_BT) * 1.0)


def mixed_objective(nll_BT: Any, log_z_BT: Any) -> Any:
    """A sum in which each position has its own weight, for nll and for z-loss."""
    weights_BT = np.random.default_rng(7).uniform(0.5, 2, size=nll_BT.shape).astype(np.float32)
    return jnp.sum(weights_BT * nll_BT) + 0.01 * jnp.sum(weights_BT[::-1] * log_z_BT**2)


def package_objective(hidden_BTD: Any, embedding_VD: Any, targets_BT: Any, chunks: int | None = None) -> Any:
    out = token_losses(hidden_BTD, embedding_VD, targets_BT, vocab_size=VOCAB_SIZE, chunks=chunks)
    return mixed_objective(out.nll_BT, out.log_z_BT)


def plain_objective(hidden_BTD: Any, embedding_VD: Any, targets_BT: Any) -> Any:
    logits_BTV = hidden_BTD @ embedding_VD[:VOCAB_SIZE].T
    nll_BT = -jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), targets_BT[..., None], axis=-1)[..., 0]
    return mixed_objective(nll_BT, jax.nn.logsumexp(logits_BTV, axis=-1))


@partial(jax.jit, static_argnums=0, static_argnames='chunks')
def gradients(objective: Callable[..., Any], inputs: Inputs, **kwargs: Any) -> tuple[Array, Array]:
    """With respect to hidden_BTD and embedding_VD."""
    return jax.grad(partial(objective, **kwargs), argnums=(0, 1))(*inputs)


def assert_close(actual: Any, expected: Any, *, tolerance: float) -> None:
    """Relative to the largest entry of `expected`."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('scale', SCALES)
def test_values_equal_float64_at_any_logit_scale(scale: float, dtype: Any) -> None:
    inputs = make_inputs(scale, dtype)
    out = token_losses(*inputs, vocab_size=VOCAB_SIZE, chunks=4)
    expected = expected_losses(inputs, dtype)
    assert {x.dtype for x in out} == {jnp.dtype('float32')}
    assert expected.correct_BT.mean() > 0.4 and expected.correct_BT.mean() < 0.6
    # Logits of up to 5 scales, rounded to float32 a few times each.
    np.testing.assert_allclose(out.nll_BT, expected.nll_BT, rtol=1e-6, atol=2e-6 * scale)
    np.testing.assert_allclose(out.log_z_BT, expected.log_z_BT, rtol=1e-6, atol=2e-6 * scale)
    np.testing.assert_array_equal(out.correct_BT, expected.correct_BT)


@pytest.mark.parametrize(
    ('dtype', 'tolerance'),
    [(jnp.float64, 1e-13), (jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)],
    ids=['float64', 'float32', 'bfloat16'],
)
@pytest.mark.parametrize('scale', SCALES)
@float64
def test_gradients_equal_those_of_a_plain_log_softmax(scale: float, dtype: Any, tolerance: float) -> None:
    inputs = make_inputs(scale, dtype)
    actual = gradients(package_objective, inputs, chunks=4)
    rounded = Inputs(*(jnp.asarray(jnp.asarray(x, dtype), jnp.float64) for x in inputs[:2]), inputs.targets_BT)
    expected = gradients(plain_objective, rounded)
    assert actual[0].dtype == dtype and actual[1].dtype == jnp.promote_types(dtype, jnp.float32)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, tolerance=tolerance)


@float64
def test_float64_values_stay_float64() -> None:
    inputs = make_inputs(20, jnp.float64)
    expected = expected_losses(inputs, jnp.float64)
    out = token_losses(*inputs, vocab_size=VOCAB_SIZE)
    np.testing.assert_allclose(out.nll_BT, expected.nll_BT, rtol=0, atol=1e-12)
    sums = loss_sums(out, jnp.ones((BATCH, SEQ_LEN), jnp.float32))
    np.testing.assert_allclose(sums.nll, expected.nll_BT.sum(), rtol=1e-14)


@float64
def test_no_number_of_chunks_changes_anything() -> None:
    inputs = make_inputs(5, jnp.float64)

    def everything(chunks: int | None) -> Any:
        """(losses, gradients)."""

        def objective(hidden_BTD: Any, embedding_VD: Any) -> Any:
            out = token_losses(hidden_BTD, embedding_VD, inputs.targets_BT, vocab_size=VOCAB_SIZE, chunks=chunks)
            return mixed_objective(out.nll_BT, out.log_z_BT), out

        grads, out = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))(*inputs[:2])
        return *out, *grads

    whole = everything(1)
    for chunks in (2, 4, len(inputs.embedding_VD), None):
        for a, e in zip(everything(chunks), whole, strict=True):
            assert_close(a, e, tolerance=1e-13)
    with pytest.raises(ValueError, match=r'chunks = 5 does not divide the .* rows of the vocabulary'):
        token_losses(*inputs, vocab_size=VOCAB_SIZE, chunks=5)


def test_default_is_the_fewest_chunks_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(batch: int, seq_len: int, vocab: int, dtype: Any = jnp.float32) -> int:
        return chunk_count(jax.ShapeDtypeStruct((batch, seq_len, WIDTH), dtype), vocab)

    monkeypatch.setattr(losses, 'CHUNK_ELEMENTS', 2**20)
    monkeypatch.setattr(losses, 'CHUNK_ELEMENTS_BFLOAT16', 2**25)
    assert count(4, 24, 2**13) == 1  # 3 * 2^18 logits in all
    assert count(8, 32, 2**13) == 2  # 2^21
    assert count(8, 32, 3 * 2**12) == 3  # 3 * 2^20
    assert count(8, 48, 3 * 2**12) == 6  # 4.5 * 2^20, and 5 does not divide
    assert count(64, 2048, 2**13) == 64  # chunks of 128 rows, though they hold more
    assert count(1, 1, 96) == 1  # fewer rows than that
    assert count(8, 8192, 100_352, jnp.bfloat16) == 196  # of 512 rows: 2^16 tokens x 512 = 2^25


def test_correct_marks_the_argmax_over_the_real_vocabulary() -> None:
    embedding_VD = jnp.asarray(np.eye(PADDED, WIDTH, dtype=np.float32)).at[VOCAB_SIZE:].set(100.0)
    hidden_BTD = jnp.asarray(np.eye(WIDTH, dtype=np.float32)[None, :4])  # position t prefers token t
    targets_BT = np.array([[0, 2, 2, 99]], np.int32)
    out = token_losses(hidden_BTD, embedding_VD, targets_BT, vocab_size=VOCAB_SIZE)
    np.testing.assert_array_equal(out.correct_BT, [[1, 0, 1, 0]])


def test_padded_rows_have_no_probability_and_no_gradient() -> None:
    inputs = make_inputs(20)
    probabilities_BTV = jax.nn.softmax(logits(inputs.hidden_BTD, inputs.embedding_VD, vocab_size=VOCAB_SIZE))
    assert probabilities_BTV.shape[-1] == PADDED
    assert not np.any(probabilities_BTV[..., VOCAB_SIZE:])
    np.testing.assert_allclose(probabilities_BTV[..., :VOCAB_SIZE].sum(-1), 1, rtol=1e-5)
    d_embedding_VD = gradients(package_objective, inputs)[1]
    assert not np.any(d_embedding_VD[VOCAB_SIZE:])
    assert np.all(np.any(d_embedding_VD[:VOCAB_SIZE] != 0, axis=-1))


def test_masking_holds_where_all_real_logits_are_very_low() -> None:
    hidden_BTD = jnp.full((1, 1, WIDTH), -1e4)
    embedding_VD = jnp.ones((PADDED, WIDTH)).at[VOCAB_SIZE:].set(-1.0)
    out = token_losses(hidden_BTD, embedding_VD, np.zeros((1, 1), np.int32), vocab_size=VOCAB_SIZE)
    np.testing.assert_allclose(out.nll_BT, math.log(VOCAB_SIZE), atol=0.02)  # float32 at 160,000


def test_sums_are_weighted_and_in_float32() -> None:
    rng = np.random.default_rng(0)
    nll_BT, log_z_BT, correct_BT, weights_BT = rng.uniform(0, 3, size=(4, BATCH, SEQ_LEN)).astype(np.float32)
    weights_BT[:, ::3] = 0
    sums = loss_sums(TokenLosses(jnp.asarray(nll_BT), jnp.asarray(log_z_BT), jnp.asarray(correct_BT)), weights_BT)
    values = nll_BT, log_z_BT.astype(np.float64) ** 2, correct_BT
    expected = [np.sum(weights_BT.astype(np.float64) * values_BT) for values_BT in values]
    np.testing.assert_allclose(sums, expected, rtol=1e-6)
    assert {x.dtype for x in sums} == {jnp.dtype('float32')}


def test_weight_zero_counts_for_nothing_whatever_stands_there() -> None:
    """Any target there (also one outside the vocabulary), and states of any finite size."""
    inputs = make_inputs(5)
    weights_BT = np.ones((BATCH, SEQ_LEN), np.float32)
    ignored_BT = np.zeros((BATCH, SEQ_LEN), bool)
    ignored_BT[0, 3:7] = ignored_BT[1, -1] = True
    weights_BT[ignored_BT] = 0

    @jax.jit
    def value_and_gradients(hidden_BTD: Any, targets_BT: Any) -> Any:
        def objective(hidden_BTD: Any, embedding_VD: Any) -> Any:
            out = token_losses(hidden_BTD, embedding_VD, targets_BT, vocab_size=VOCAB_SIZE, chunks=4)
            sums = loss_sums(out, weights_BT)
            return sums.nll + 0.1 * sums.squared_log_z, sums

        return jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(hidden_BTD, inputs.embedding_VD)

    expected = value_and_gradients(inputs.hidden_BTD, inputs.targets_BT)
    assert not np.any(expected[1][0][ignored_BT]) and np.all(np.any(expected[1][0][~ignored_BT] != 0, axis=-1))
    for target in (-100, -1, VOCAB_SIZE, PADDED + 5):
        targets_BT = np.where(ignored_BT, target, inputs.targets_BT).astype(np.int32)
        hidden_BTD = jnp.where(ignored_BT[..., None], 1e6, inputs.hidden_BTD)
        actual = value_and_gradients(hidden_BTD, targets_BT)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)

    nan_BT = jnp.where(ignored_BT, jnp.nan, 1.0)
    np.testing.assert_array_equal(loss_sums(TokenLosses(nan_BT, nan_BT, nan_BT), weights_BT), [weights_BT.sum()] * 3)


def test_bfloat16_states_are_accumulated_in_float32() -> None:
    """Sums of thousands of equal terms, which stand still at 256 terms in bfloat16."""
    vocab, seq_len = 4096, 2048
    hidden_BTD = jnp.ones((1, seq_len, 1), jnp.bfloat16)
    embedding_VD = jnp.zeros((vocab, 1))
    targets_BT = np.zeros((1, seq_len), np.int32)

    def mean_nll(embedding_VD: Any) -> Any:
        return jnp.sum(token_losses(hidden_BTD, embedding_VD, targets_BT, vocab_size=vocab, chunks=32).nll_BT)

    value, d_embedding_VD = jax.jit(jax.value_and_grad(mean_nll))(embedding_VD)
    np.testing.assert_allclose(value, seq_len * math.log(vocab), rtol=1e-5)
    np.testing.assert_allclose(d_embedding_VD[0], seq_len * (1 / vocab - 1), rtol=5e-3)
    np.testing.assert_allclose(d_embedding_VD[1:], seq_len / vocab, rtol=5e-3)


def hlo_sizes(text: str) -> Iterator[int]:
    for dimensions in re.findall(r'\b(?:f64|f32|bf16|f16|s32|u32|pred)\[([\d,]+)\]', text):
        yield math.prod(int(d) for d in dimensions.split(','))


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_no_array_holds_all_logits_forward_or_backward(dtype: Any) -> None:
    batch, seq_len, chunks, vocab = 2, 64, 8, 1024
    hidden_BTD, embedding_VD = jnp.ones((batch, seq_len, WIDTH), dtype), jnp.ones((vocab, WIDTH))
    targets_BT = np.zeros((batch, seq_len), np.int32)

    def chunked(hidden_BTD: Any, embedding_VD: Any) -> Any:
        out = token_losses(hidden_BTD, embedding_VD, targets_BT, vocab_size=1000, chunks=chunks)
        return mixed_objective(out.nll_BT, out.log_z_BT)

    def whole(hidden_BTD: Any, embedding_VD: Any) -> Any:
        return plain_objective(hidden_BTD, embedding_VD, targets_BT)

    def largest(objective: Any) -> tuple[int, int]:
        traced = jax.jit(jax.value_and_grad(objective, argnums=(0, 1))).trace(hidden_BTD, embedding_VD)
        compiled = traced.lower().compile()
        return max(jaxpr_sizes(traced.jaxpr.jaxpr)), max(hlo_sizes(compiled.as_text()))

    assert largest(chunked) == (max(batch * seq_len * vocab // chunks, vocab * WIDTH),) * 2
    assert min(largest(whole)) >= batch * seq_len * VOCAB_SIZE, 'the control: the check sees whole logits'
