"""The exported PyTorch model: logits, losses, gradients and decoding in the three modes are those of the run.

Shapes: K passes, B rows, T positions, V vocabulary.
"""

import re
from typing import Any

import jax
import numpy as np
import pytest
from helpers import float64
from helpers_hf import (
    ALL_MODES,
    PROMPTS,
    load,
    new_tokens,
    padded,
    run_logits,
    tokens_of,
    torch,
    transformers,
    windowed,
)
from helpers_run import Run

from fbt_jax.inference.generate import generate
from fbt_jax.interop import hf_export, modeling_fbt


@pytest.fixture(scope='module')
def run() -> Run:
    return windowed()


@pytest.fixture(scope='module')
def model(run: Run) -> Any:
    return load(run)


@pytest.fixture(scope='module')
def exact() -> Run:
    """In float64: random weights blow rounding up with every step, so that float32 soon chooses other tokens."""
    with jax.enable_x64(True):
        return windowed(dtype='float64')


@pytest.fixture(scope='module')
def exact_model(exact: Run) -> Any:
    return load(exact)


@pytest.mark.parametrize(
    'changes',
    [
        pytest.param({}, id='gated'),
        pytest.param({'fusion': 'add'}, id='add'),
        pytest.param({'fusion': 'concat', 'num_kv_heads': 4}, id='concat, no GQA'),
        pytest.param({'fusion': 'none', 'num_kv_heads': 1}, id='none, one key head'),
        pytest.param({'window': 0}, id='no window'),
        pytest.param({'window': 1, 'num_layers': 6, 'full_attention_every': 3}, id='six layers, window of 1'),
    ],
)
def test_logits_are_the_run_s_after_every_pass(changes: dict[str, Any]) -> None:
    run = windowed(**changes)
    tokens_BT = tokens_of()
    model = load(run)
    for passes in (1, 2, 3) if run.trained_feedback else (1,):
        with torch.no_grad():
            found_BTV = model(torch.tensor(tokens_BT), num_passes=passes).logits.numpy()
        np.testing.assert_allclose(found_BTV, run_logits(run, tokens_BT, passes), atol=1e-4)
    if not run.trained_feedback:
        with pytest.raises(ValueError, match='num_passes = 2: this model has no feedback'):
            model(torch.tensor(tokens_BT), num_passes=2)


@pytest.mark.parametrize('side', ['left', 'right'])
def test_padding_changes_nothing(exact_model: Any, side: str) -> None:
    lengths, long = (4, 9, 20), 20
    tokens_BT, mask_BT = torch.tensor(tokens_of(3, long)), torch.zeros(3, long, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask_BT[row, slice(long - length, None) if side == 'left' else slice(length)] = 1
    for passes in (1, 2, 3):
        with torch.no_grad():
            both = [
                exact_model(torch.where(mask_BT == 1, tokens_BT, pad), attention_mask=mask_BT, num_passes=passes).logits
                for pad in (7, 200)
            ]
            for row in range(3):
                real = mask_BT[row] == 1
                alone = exact_model(tokens_BT[row : row + 1, real], num_passes=passes).logits[0]
                for padded in both:
                    torch.testing.assert_close(padded[row, real], alone, atol=1e-9, rtol=0)
        assert torch.isfinite(both[0]).all()


@pytest.mark.parametrize('passes', [1, 2, 3])
def test_the_loss_is_that_of_all_passes_and_reaches_the_fusion(model: Any, run: Run, passes: int) -> None:
    tokens_BT = tokens_of()
    labels_BT = torch.tensor(tokens_BT, dtype=torch.long)
    labels_BT[0, :9] = -100
    model.zero_grad()
    loss = model(torch.tensor(tokens_BT), labels=labels_BT, num_passes=passes).loss
    targets, nlls = labels_BT[:, 1:].numpy(), []
    for k in range(1, passes + 1):
        log_probs = np.asarray(jax.nn.log_softmax(run_logits(run, tokens_BT, k)[:, :-1]))
        chosen = np.take_along_axis(log_probs, np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        nlls.append(-chosen[targets >= 0].mean())
    np.testing.assert_allclose(loss.item(), nlls[0] + (np.mean(nlls[1:]) if passes > 1 else 0), rtol=1e-5)
    loss.backward()
    for name, parameter in model.named_parameters():
        if passes == 1 and name.startswith('fusion'):
            assert parameter.grad is None
        else:
            assert torch.isfinite(parameter.grad).all()
            assert parameter.grad.abs().max() > 0, name


def test_trainer_s_count_divides_the_loss(model: Any) -> None:
    ids = torch.tensor(tokens_of(), dtype=torch.long)
    mean = model(ids, labels=ids, num_passes=2).loss
    counted = model(ids, labels=ids, num_passes=2, num_items_in_batch=2 * ids[:, 1:].numel()).loss
    torch.testing.assert_close(mean, 2 * counted)


@pytest.mark.parametrize('passes', [1, 3])
def test_the_loss_of_padded_rows_is_that_of_the_rows_alone(exact_model: Any, passes: int) -> None:
    """Padding on the left predicts each row's first token, which nothing comes before."""
    lengths, long = (4, 9, 20), 20
    tokens_BT = torch.tensor(tokens_of(3, long), dtype=torch.long)
    rows = [tokens_BT[i : i + 1, :length] for i, length in enumerate(lengths)]
    counts = [length - 1 for length in lengths]
    losses = [exact_model(row, labels=row, num_passes=passes).loss.item() for row in rows]
    right_BT = torch.stack([torch.arange(long) < length for length in lengths])
    for mask_BT in (right_BT, right_BT.flip(1)):
        ids_BT = torch.full((3, long), 7).masked_scatter(mask_BT, torch.cat(rows, dim=1))
        inputs = {'labels': ids_BT.masked_fill(~mask_BT, -100), 'num_passes': passes}
        for mask in (mask_BT, mask_BT.long()):
            loss = exact_model(ids_BT, attention_mask=mask, **inputs).loss.item()
            np.testing.assert_allclose(loss, np.average(losses, weights=counts), rtol=1e-6)
        loss = exact_model(ids_BT, attention_mask=mask_BT, num_items_in_batch=torch.tensor(33), **inputs).loss.item()
        np.testing.assert_allclose(loss, np.dot(losses, counts) / 33, rtol=1e-6)


@pytest.mark.filterwarnings('ignore::FutureWarning')
@pytest.mark.parametrize('passes', [1, 3])
def test_gradient_checkpointing_changes_no_gradient(
    exact: Run, exact_model: Any, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, attention = [], modeling_fbt.FbtBlock._attention
    monkeypatch.setattr(
        modeling_fbt.FbtBlock, '_attention', lambda block, *args: reads.append(block.index) or attention(block, *args)
    )
    inputs = padded(exact, PROMPTS)
    ids = inputs['input_ids']
    exact_model.zero_grad()
    expected = exact_model(**inputs, labels=ids, num_passes=passes)
    expected.loss.backward()
    model = load(exact).train()
    model.gradient_checkpointing_enable()
    reads.clear()
    out = model(**inputs, labels=ids, num_passes=passes, use_cache=True)
    assert out.loss == expected.loss
    assert out.get(modeling_fbt._CACHE) is None
    assert reads == [0, 1] * passes
    out.loss.backward()
    assert len(reads) == 2 * 2 * passes  # once more on the way back
    for (name, found), reference in zip(model.named_parameters(), exact_model.parameters(), strict=True):
        if reference.grad is None:
            assert found.grad is None, name
        else:
            torch.testing.assert_close(found.grad, reference.grad, atol=0, rtol=1e-12)
    cache = transformers.DynamicCache(config=model.config)
    with pytest.raises(ValueError, match='cache = DynamicCache: gradient checkpointing trains without a cache'):
        model(ids, **{modeling_fbt._CACHE: cache})
    options = {'max_new_tokens': 5, 'mode': 'soft'}
    assert new_tokens(model, inputs, exact, **options) == new_tokens(exact_model, inputs, exact, **options)


@pytest.mark.parametrize('tied', [True, False])
def test_more_or_fewer_tokens_leave_the_others_as_they_were(run: Run, tied: bool) -> None:
    config = modeling_fbt.FbtConfig(**hf_export.hf_config(run, 'float32') | {'tie_word_embeddings': tied})
    model = modeling_fbt.FbtForCausalLM(config).eval()
    ids = torch.tensor(tokens_of(vocab=200), dtype=torch.long)
    before_BTV = model(ids, num_passes=2).logits
    for size in (300, 200):
        model.resize_token_embeddings(size)
        after_BTV = model(ids, num_passes=2).logits
        assert (model.config.vocab_size, after_BTV.shape[-1]) == (size, size)
        torch.testing.assert_close(after_BTV[..., :200], before_BTV[..., :200], atol=1e-5, rtol=0)
    if not tied:
        head = torch.nn.Linear(16, 200)
        head.weight.data, head.bias.data = model.head.weight.data, torch.ones(200)
        model.set_output_embeddings(head)
        torch.testing.assert_close(model(ids, num_passes=2).logits, after_BTV + 1, atol=1e-5, rtol=0)


def test_what_layers_share_is_the_same_on_another_device(
    exact: Run, exact_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """'cpu:0' is a second name of the first device, so that the values can be compared."""
    inputs = padded(exact, PROMPTS)
    expected_BTV = exact_model(**inputs, num_passes=2, use_cache=True).logits
    on, places = modeling_fbt._Rows.on, iter([torch.device('cpu'), torch.device('cpu', 0)] * 2)
    monkeypatch.setattr(modeling_fbt._Rows, 'on', lambda rows, _: on(rows, next(places)))
    assert torch.equal(exact_model(**inputs, num_passes=2, use_cache=True).logits, expected_BTV)
    assert not list(places)


@pytest.mark.parametrize(
    ('passes', 'first'),
    [
        pytest.param(1, ['embedding', 'input_norm', 'fusion', 'layers.0'], id='the last layer elsewhere'),
        pytest.param(3, ['embedding'], id='all layers elsewhere, several passes'),
    ],
)
def test_layers_may_lie_on_several_devices(run: Run, passes: int, first: list[str]) -> None:
    """'meta' is the second device: it computes nothing, but takes no tensors of the first, as a GPU wouldn't."""
    hooks = pytest.importorskip('accelerate.hooks')
    changes = {'tie_word_embeddings': False, 'input_norm': 'fused', 'layer_types': ['full_attention'] * 2}
    model = modeling_fbt.FbtForCausalLM(modeling_fbt.FbtConfig(**hf_export.hf_config(run, 'float32') | changes))
    for name in ('embedding', 'input_norm', 'fusion', 'layers.0', 'layers.1', 'final_norm', 'head'):
        if name not in first:
            module = model.get_submodule(name).to('meta')
            hooks.add_hook_to_module(module, hooks.AlignDevicesHook('meta', io_same_device=False))
    inputs = padded(run, PROMPTS)
    counted = {'labels': inputs['input_ids'], 'num_items_in_batch': torch.ones(1)}
    out = model(**inputs, **counted, num_passes=passes, use_cache=True)
    cache = out[modeling_fbt._CACHE]
    assert [layer.keys.device.type for layer in cache.layers] == ['cpu' if 'layers.0' in first else 'meta', 'meta']
    mask_BT = torch.nn.functional.pad(inputs['attention_mask'], (0, 1), value=1)
    step = model(inputs['input_ids'][:, :1], attention_mask=mask_BT, **{modeling_fbt._CACHE: cache})
    assert {x.device.type for x in (out.loss, out.logits, step.logits)} == {'meta'}


def test_a_tied_head_reads_the_states_where_the_embedding_lies(run: Run) -> None:
    model = load(run)
    model.embedding.to('meta')
    assert model._logits(torch.ones(1, 1, 16)).device.type == 'meta'
    assert {'FbtBlock', 'FbtFusion'} <= set(model._no_split_modules)


@pytest.mark.parametrize(('mode', 'fused_passes'), ALL_MODES)
@float64
def test_both_generate_the_same(exact: Run, exact_model: Any, mode: str, fused_passes: int | None) -> None:
    """30 tokens, far beyond the window of 5, of prompts padded on the left, alone, and without a cache."""
    count, options = 30, {'mode': mode} | ({} if fused_passes is None else {'fused_passes': fused_passes})
    expected = generate(exact, PROMPTS, max_tokens=count, **options).tokens
    inputs = padded(exact, PROMPTS)
    assert new_tokens(exact_model, inputs, exact, max_new_tokens=count, **options) == expected
    assert new_tokens(exact_model, inputs, exact, max_new_tokens=count, use_cache=False, **options) == expected
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert new_tokens(exact_model, padded(exact, [prompt]), exact, max_new_tokens=count, **options) == [tokens]


def test_modes_differ(run: Run, model: Any) -> None:
    inputs = padded(run, PROMPTS)
    found = [new_tokens(model, inputs, run, max_new_tokens=20, mode=mode) for mode in modeling_fbt.MODES]
    assert [a[0] for a in found[0]] == [b[0] for b in found[1]]  # standard and soft share the prompt's pass
    assert found[0] != found[1] != found[2] != found[0]


def test_logits_of_cached_steps_are_those_of_the_definition(exact: Run, exact_model: Any) -> None:
    """The states of a soft decoding, fed in one pass over the whole row, come out of it again."""
    inputs = padded(exact, ['It is a truth'])
    length = inputs['input_ids'].shape[1]
    out = exact_model.generate(
        **inputs, mode='soft', max_new_tokens=25, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    steps_NV = torch.cat(out.logits)
    plain_BT = torch.arange(length + 24)[None] < length
    prev_BTD = torch.zeros(1, length + 24, 16, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(25):  # by then every position has been fed with the final state of the one before
            hidden_BTD = exact_model(
                out.sequences[:, :-1], prev_hidden_states=prev_BTD, plain_mask=plain_BT
            ).last_hidden_state
            prev_BTD = torch.nn.functional.pad(hidden_BTD[:, :-1], (0, 0, 1, 0))
        whole_NV = torch.nn.functional.linear(hidden_BTD[0, length - 1 :], exact_model.embedding.weight)
    torch.testing.assert_close(steps_NV, whole_NV.float(), atol=1e-5, rtol=0)


def test_samples_beams_and_conversations(run: Run, model: Any) -> None:
    inputs = padded(run, PROMPTS[:2])
    options = {'do_sample': True, 'top_k': 20, 'num_return_sequences': 3, 'max_new_tokens': 12}
    for mode in modeling_fbt.MODES:
        torch.manual_seed(0)
        first = model.generate(**inputs, mode=mode, **options)
        torch.manual_seed(0)
        assert torch.equal(first, model.generate(**inputs, mode=mode, **options))
        assert len({tuple(row) for row in first.tolist()}) > 2
    assert model.generate(**inputs, num_beams=3, max_new_tokens=5).shape[0] == 2
    # A cache goes on where it was: its text isn't read again.
    ids = torch.tensor([[256, *range(97, 117)]])
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :12], **{modeling_fbt._CACHE: cache}, use_cache=True)
    whole = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(whole, model.generate(ids, max_new_tokens=8, do_sample=False, **{modeling_fbt._CACHE: cache}))


def test_what_cannot_be_decoded_is_told(run: Run, model: Any) -> None:
    inputs = padded(run, ['ab'])
    for options, told in [
        ({'mode': 'hard'}, "mode = 'hard': must be one of standard, soft, fused"),
        ({'mode': 'soft', 'num_beams': 2}, "num_beams > 1: is possible with mode = 'standard' only"),
        ({'mode': 'fused', 'num_beams': 2}, "num_beams > 1: is possible with mode = 'standard' only"),
        ({'mode': 'soft', 'prompt_lookup_num_tokens': 2}, "assisted decoding: is possible with mode = 'standard' only"),
        ({'mode': 'soft', 'fused_passes': 2}, "fused_passes = 2: has no effect with mode = 'soft'"),
        ({'mode': 'fused', 'fused_passes': 0}, 'fused_passes = 0: must be at least 1'),
        ({'cache_implementation': 'static'}, "cache_implementation = 'static': this model needs a cache that grows"),
        ({'cache_implementation': 'paged'}, "cache_implementation = 'paged': this model needs a cache that grows"),
    ]:
        with pytest.raises(ValueError, match=re.escape(told)):
            model.generate(**inputs, max_new_tokens=3, **options)
    with pytest.raises(ValueError, match='continuous batching pages its cache: this model needs a cache that grows'):
        model.generate_batch(inputs['input_ids'].tolist(), max_new_tokens=3)
    fixed = transformers.StaticCache(config=model.config, max_cache_len=9)
    with pytest.raises(ValueError, match='cache = StaticCache: this model needs a cache that grows'):
        model(inputs['input_ids'], **{modeling_fbt._CACHE: fixed})
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(inputs['input_ids'][:, :2], **{modeling_fbt._CACHE: cache}, use_cache=True)
    with pytest.raises(ValueError, match='the cache holds 2 positions, but several passes read their text from its'):
        model.generate(**inputs, max_new_tokens=3, mode='fused', **{modeling_fbt._CACHE: cache})
    plain = load(run._replace(trained_feedback=False))
    assert plain.generate(**inputs, max_new_tokens=3).shape == (1, 6)
    for mode in ('soft', 'fused'):
        with pytest.raises(ValueError, match='was not trained with feedback; only standard is possible'):
            plain.generate(**inputs, max_new_tokens=3, mode=mode)


def test_a_cache_that_was_filled_before_is_refused_where_steps_are_fed(exact: Run, exact_model: Any) -> None:
    inputs = padded(exact, ['It is'])
    cache = transformers.DynamicCache(config=exact_model.config)
    told = {'soft': 'goes on from no cache that was filled before', 'fused': 'the cache holds'}
    for mode in ('standard', 'soft', 'fused'):
        options = {'max_new_tokens': 3, 'do_sample': False, 'past_key_values': cache, 'mode': mode}
        if mode == 'standard':
            assert exact_model.generate(**inputs, **options).shape[1] == inputs['input_ids'].shape[1] + 3
        else:
            with pytest.raises(ValueError, match=told[mode]):
                exact_model.generate(**inputs, **options)
