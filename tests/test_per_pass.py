"""Evaluation by number of passes: loss, update norm, accuracy and bytes by hand, whatever the batch size."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from fbt_jax.batch import Batch
from fbt_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, PassesConfig
from fbt_jax.data import Data, corpus, open_data
from fbt_jax.evaluation.per_pass import BatchSums, PassResults, evaluate_passes, make_eval_step
from fbt_jax.model.transformer import Transformer, init_params

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
def eval_step(data: Data, model: Transformer) -> Callable[[Any, Batch], BatchSums]:
    return make_eval_step(model, num_passes=PASSES, token_bytes=data.token_bytes)


def results_of(data: Data, params: Any, eval_step: Any, batch_size: int, rows: int = ROWS) -> PassResults:
    batches = data.validation_batches('validation', batch_size, max_rows=rows)
    return evaluate_passes(eval_step, params, batches)


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


def test_a_first_pass_does_not_depend_on_how_many_follow(
    results: PassResults, data: Data, model: Transformer, params: Any
) -> None:
    alone = results_of(data, params, make_eval_step(model, num_passes=1), 3)
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
    step = make_eval_step(small, num_passes=1, token_bytes=data.token_bytes)
    counted = evaluate_passes(
        step, init_params(small, jax.random.key(0)), data.validation_batches('validation', batch_size)
    )
    assert counted.bytes == sum(len(document.encode()) for document in corpus.split().validation)


def test_rows_that_are_no_text_have_no_bytes(model: Transformer, params: Any) -> None:
    one_pass = PassesConfig(phases='one_pass')
    config = Config(
        data=DataConfig(source='word_problem', tokenizer='none', seq_len=96, batch_size=4),
        passes=one_pass,
        optimizer=OptimizerConfig(),
    )
    data = open_data(config)
    assert data.token_bytes is None
    eval_step = make_eval_step(model, num_passes=1, token_bytes=data.token_bytes)
    results = results_of(data, params, eval_step, 2, rows=3)
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
