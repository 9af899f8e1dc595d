"""Evaluation by number of passes: loss, update norm, accuracy and bytes by hand, whatever the batch size."""

import functools
import math
from typing import Any

import jax
import numpy as np
import pytest
from helpers import SEQ_LEN, float64, make_batch, make_model, make_params, quick_jit, sequential_states

from fbt_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, PassesConfig
from fbt_jax.data import Data, corpus, open_data
from fbt_jax.evaluation.intervals import pass_intervals
from fbt_jax.evaluation.per_pass import EvalStep, PassResults, evaluate_passes, make_eval_step, together
from fbt_jax.inference.recurrence import recurrent_states
from fbt_jax.model.transformer import Transformer, init_params
from fbt_jax.training.summary import interval_table, loss_table

ROWS, PASSES = 7, 3  # rows that neither 2 nor 3 divides: the last batch is filled up with padding


def make_data(**changes: Any) -> Data:
    return open_data(Config(data=DataConfig(**{'tokenizer': 'bytes', 'seq_len': 96, 'batch_size': 4} | changes)))


@pytest.fixture(scope='module')
def data() -> Data:
    return make_data()


@pytest.fixture(scope='module')
def model() -> Transformer:
    return Transformer(
        ModelConfig(
            vocab_size=258,
            width=16,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            mlp_width=24,
            window=5,
            full_attention_every=2,
            dtype='float32',
            remat='nothing',
        )
    )


@pytest.fixture(scope='module')
def params(model: Transformer) -> Any:
    return init_params(model, jax.random.key(5))


@pytest.fixture(scope='module')
def eval_step(data: Data, model: Transformer) -> EvalStep:
    return make_eval_step(model, num_passes=PASSES, token_bytes=data.token_bytes, by_segment=True)


def results_of(data: Data, params: Any, eval_step: Any, batch_size: int, rows: int = ROWS) -> PassResults:
    batches = data.validation_batches('validation', batch_size, max_rows=rows)
    documents = data.validation_documents('validation', batch_size, max_rows=rows)
    return evaluate_passes(eval_step, params, batches, documents=documents)


@pytest.fixture(scope='module')
def results(data: Data, params: Any, eval_step: Any) -> PassResults:
    return results_of(data, params, eval_step, 3)


@pytest.fixture(scope='module')
def by_hand(data: Data, model: Transformer, params: Any) -> dict[str, np.ndarray]:
    """(K, N) per counted token: nll, whether it is right, squared update. One row and one pass at a time."""
    embedding = np.asarray(params['embedding'], np.float64)[:258]
    found: dict[str, list[list[np.ndarray]]] = {
        name: [[] for _ in range(PASSES)] for name in ('nll', 'right', 'update')
    }
    positions = []
    apply = jax.jit(lambda *args, **kwargs: model.apply({'params': params}, *args, **kwargs))
    for batch in data.validation_batches('validation', 1, max_rows=ROWS):
        counted = batch.weights[0] > 0
        positions.append(batch.positions[0][counted])
        where = {'positions_BT': batch.positions, 'segment_ids_BT': batch.segment_ids}
        last = np.zeros((1, 96, 16))
        for k in range(PASSES):
            shifted = np.concatenate([np.zeros((1, 1, 16)), last[:, :-1]], axis=1).astype(np.float32)
            hidden = np.asarray(apply(batch.tokens, *([shifted] if k else []), **where), np.float64)
            logits = hidden[0] @ embedding.T
            log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
            nll = log_z - logits[np.arange(96), batch.targets[0]]
            found['nll'][k].append(nll[counted])
            found['right'][k].append((logits.argmax(-1) == batch.targets[0])[counted])
            found['update'][k].append(((hidden - last)[0] ** 2).mean(-1)[counted])
            last = hidden
    arrays = {name: np.array([np.concatenate(part) for part in parts]) for name, parts in found.items()}
    return arrays | {'position': np.concatenate(positions)}


def test_losses_and_update_norms_by_hand(results: PassResults, by_hand: dict[str, np.ndarray]) -> None:
    """update_norm_k = sqrt(mean over counted positions and width of (h^k - h^{k-1})^2)."""
    assert results.tokens == by_hand['nll'].shape[1] > 500
    np.testing.assert_allclose(results.loss_K, by_hand['nll'].mean(-1), rtol=1e-6)
    np.testing.assert_allclose(results.update_norm_K, np.sqrt(by_hand['update'].mean(-1)), rtol=1e-5)
    np.testing.assert_allclose(results.accuracy_K, by_hand['right'].mean(-1), rtol=1e-9)
    assert len(set(np.round(results.loss_K, 5))) == PASSES  # the passes do differ


def test_accuracy_by_position_by_hand(results: PassResults, by_hand: dict[str, np.ndarray]) -> None:
    for position in range(96):
        here = by_hand['position'] == position
        expected = by_hand['right'][:, here].mean(-1) if here.any() else np.full(PASSES, np.nan)
        np.testing.assert_allclose(results.accuracy_KP[:, position], expected)


@pytest.mark.parametrize('batch_size', [1, 2, 4])
def test_results_do_not_depend_on_the_batch_size(
    results: PassResults, data: Data, params: Any, eval_step: Any, batch_size: int
) -> None:
    other = results_of(data, params, eval_step, batch_size)
    assert (other.tokens, other.bytes) == (results.tokens, results.bytes)
    np.testing.assert_array_equal(other.sums.tokens_P, results.sums.tokens_P)
    for name in ('loss_K', 'update_norm_K', 'accuracy_K', 'bits_per_byte_K'):
        np.testing.assert_allclose(getattr(other, name), getattr(results, name), rtol=1e-6, err_msg=name)
    for x, y in zip(other.documents, results.documents, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_sums_by_document_by_hand(results: PassResults, data: Data, by_hand: dict[str, np.ndarray]) -> None:
    """Where documents begin is found in the text itself: row r holds the tokens from 96 r on of all chapters."""
    lengths = [len(text.encode()) + 2 for text in corpus.split().validation]  # BOS and EOS
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    total = data.validation['validation'].num_rows
    numbers, num_bytes = [], []
    for row, batch in enumerate(data.validation_batches('validation', 1, max_rows=ROWS)):
        counted = batch.weights[0] > 0
        start = row * total // ROWS * 96
        numbers.append(document_of[start + 1 : start + 97][counted[: len(document_of) - start - 1]])
        num_bytes.append(batch.targets[0][counted] < 256)
    number, is_byte = np.concatenate(numbers), np.concatenate(num_bytes)
    known = np.unique(number)
    assert 3 < len(known) <= ROWS
    assert results.documents is not None
    for place, document in enumerate(known):
        here = number == document
        assert results.documents.tokens_U[place] == here.sum()
        assert results.documents.bytes_U[place] == is_byte[here].sum()
        np.testing.assert_allclose(results.documents.nll_KU[:, place], by_hand['nll'][:, here].sum(-1), rtol=1e-5)
    assert results.documents.nll_KU.shape == (PASSES, len(known))


def test_documents_of_several_sets_stay_apart(results: PassResults) -> None:
    both = together([results, results]).documents
    assert results.documents is not None and both is not None
    np.testing.assert_array_equal(both.tokens_U, np.tile(results.documents.tokens_U, 2))
    np.testing.assert_array_equal(both.nll_KU, np.tile(results.documents.nll_KU, (1, 2)))


def test_a_first_pass_does_not_depend_on_how_many_follow(
    results: PassResults, data: Data, model: Transformer, params: Any
) -> None:
    alone = evaluate_passes(
        make_eval_step(model, num_passes=1), params, data.validation_batches('validation', 3, max_rows=ROWS)
    )
    assert alone.documents is None
    np.testing.assert_allclose(alone.loss_K, results.loss_K[:1], rtol=1e-6)
    assert alone.update_norm_K.shape == (1,)


def test_bits_per_byte_by_hand(results: PassResults, data: Data, by_hand: dict[str, np.ndarray]) -> None:
    """A byte's token stands for one byte, EOS for none."""
    targets = np.concatenate(
        [b.targets[b.weights > 0] for b in data.validation_batches('validation', 1, max_rows=ROWS)]
    )
    num_bytes = int((targets < 256).sum())
    assert results.bytes == num_bytes
    np.testing.assert_allclose(results.nats_per_byte_K, by_hand['nll'].sum(-1) / num_bytes, rtol=1e-6)
    np.testing.assert_allclose(results.bits_per_byte_K, by_hand['nll'].sum(-1) / math.log(2) / num_bytes, rtol=1e-6)


@pytest.mark.parametrize('tokenizer', ['bytes', 'bpe'])
@pytest.mark.parametrize('batch_size', [1, 5])
def test_bytes_are_those_of_the_validation_text(tokenizer: str, batch_size: int) -> None:
    """Of every document to the last byte, counted by the step itself; its model is as small as can be."""
    data = make_data(tokenizer=tokenizer, seq_len=500)
    small = Transformer(
        ModelConfig(
            vocab_size=data.vocab_size,
            width=2,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            mlp_width=1,
            window=0,
            fusion='none',
            dtype='float32',
            remat='nothing',
        )
    )
    step = make_eval_step(small, num_passes=1, token_bytes=data.token_bytes, by_segment=True)
    counted = results_of(data, init_params(small, jax.random.key(0)), step, batch_size, rows=0)
    texts = [len(document.encode()) for document in corpus.split().validation]
    assert counted.bytes == sum(texts)
    # Pieces of a document are one, whatever rows they lie in.
    assert counted.documents is not None and counted.documents.bytes_U is not None
    assert counted.documents.bytes_U.tolist() == texts
    if tokenizer == 'bytes':
        assert counted.documents.tokens_U.tolist() == [n + 1 for n in texts]  # and EOS


def test_rows_that_are_no_text_have_no_bytes(model: Transformer, params: Any) -> None:
    one_pass = PassesConfig(phases='one_pass')
    config = Config(
        data=DataConfig(source='word_problem', tokenizer='none', seq_len=96, batch_size=4),
        passes=one_pass,
        optimizer=OptimizerConfig(),
    )
    data = open_data(config)
    assert data.token_bytes is None
    eval_step = make_eval_step(model, num_passes=1, token_bytes=data.token_bytes, by_segment=True)
    results = results_of(data, params, eval_step, 2, rows=3)
    assert results.documents is not None and results.documents.bytes_U is None
    assert results.documents.tokens_U.tolist() == [96] * 3  # a row is a document
    np.testing.assert_allclose(results.documents.nll_KU.sum(), results.sums.nll_KP.sum(), rtol=1e-6)
    assert results.bytes is None
    assert results.bits_per_byte_K is None
    assert results.nats_per_byte_K is None
    assert results.tokens == 3 * 96


def test_poll_may_end_it_between_batches(data: Data, params: Any, eval_step: Any) -> None:
    calls = []

    def poll() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_passes(eval_step, params, data.validation_batches('validation', 1), poll=poll)
    assert len(calls) == 3
    with pytest.raises(ValueError, match='no validation rows'):
        evaluate_passes(eval_step, params, iter(()))


# The exact recurrence


@float64
def test_the_recurrence_is_as_many_passes_as_positions() -> None:
    """Packed rows: token by token with a cache, without one, and in T passes; states, then losses and update norm."""
    model, batch = make_model(dtype='float64'), make_batch()
    params = make_params(model)
    within = batch.segment_ids > 0
    states_BTD = np.asarray(quick_jit(functools.partial(recurrent_states, model))(params, batch))
    np.testing.assert_allclose(states_BTD[within], sequential_states(model, params, batch)[within], atol=1e-9)

    documents = [[np.array([0, 1, 2]), np.array([3, 4])]]

    def results_with(num_passes: int, soft: bool) -> PassResults:
        step = make_eval_step(model, num_passes=num_passes, by_segment=True, soft=soft)
        return evaluate_passes(step, params, [batch], documents=documents)

    many, results = results_with(SEQ_LEN, soft=False), results_with(1, soft=True)
    assert many.documents is not None
    assert results.documents is not None
    np.testing.assert_allclose(results.documents.nll_KU[-1], many.documents.nll_KU[-1], rtol=1e-9)
    np.testing.assert_allclose(results.loss_K, many.loss_K[[0, -1]], rtol=1e-9)
    gain = results.loss_K[1] - results.loss_K[0]
    assert abs(gain) > 1e-3
    found = pass_intervals(results.documents, [1], soft=True)
    assert found['difference_from_pass_1']['soft']['loss'] == pytest.approx(gain, rel=1e-9)
    assert loss_table(results, [1], soft=True)[-1].split()[:2] == ['soft', f'{results.loss_K[-1]:.4f}']
    assert interval_table(found)[-1].startswith('soft')
