"""`fbt export --format=hf`: what is written is loaded by transformers and is the run, in every mode.

Shapes: K passes, B rows, T positions, V vocabulary.
"""

import atexit
import importlib.util
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import float64, make_model, make_params, run_passes
from helpers_run import Run, make_run

MODULES = tempfile.mkdtemp(prefix='fbt_hf_modules')  # where transformers copies the exported code to
atexit.register(shutil.rmtree, MODULES, ignore_errors=True)
os.environ['HF_MODULES_CACHE'], os.environ['HF_HUB_OFFLINE'] = MODULES, '1'
torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers', minversion='5')
pytest.importorskip('safetensors')

from fbt_jax import cli  # noqa: E402
from fbt_jax.batch import Batch  # noqa: E402
from fbt_jax.config import Config, DataConfig, PassesConfig  # noqa: E402
from fbt_jax.data import word_problem  # noqa: E402
from fbt_jax.errors import UserError  # noqa: E402
from fbt_jax.inference.generate import generate  # noqa: E402
from fbt_jax.interop import hf_export, modeling_fbt  # noqa: E402
from fbt_jax.interop.hf_card import model_card  # noqa: E402
from fbt_jax.model.transformer import logits  # noqa: E402

CONTEXT = 64
PROMPTS = ['It is a truth universally', '', 'Emma Woodhouse', 'x']
ALL_MODES = [('standard', None), ('soft', None), ('fused', 1), ('fused', 3)]


def windowed(tokenizer: str = 'bytes', **changes: Any) -> Run:
    """Random weights and a window of 5 keys in the first of two layers."""
    return make_run(tokenizer, seq_len=CONTEXT, **{'window': 5, 'rope_theta': 1000.0} | changes)


def load(run: Run) -> Any:
    """The PyTorch model of a run, without a folder."""
    model = modeling_fbt.FbtForCausalLM(modeling_fbt.FbtConfig(**hf_export.hf_config(run, 'float32')))
    dtype = run.config.model.dtype
    weights = {name: torch.tensor(w) for name, w in hf_export.torch_weights(run, dtype).items()}
    model.to(getattr(torch, dtype)).load_state_dict(weights, strict=True)
    return model.eval()


def tokens_of(rows: int = 2, length: int = 40, seed: int = 0, vocab: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(vocab, size=(rows, length)).astype(np.int32)


def run_logits(run: Run, tokens_BT: np.ndarray, num_passes: int) -> np.ndarray:
    ones_BT = np.ones_like(tokens_BT)
    index_BT = np.broadcast_to(np.arange(tokens_BT.shape[1], dtype=np.int32), tokens_BT.shape)
    batch = Batch(tokens_BT, ones_BT, ones_BT.astype(np.float32), ones_BT, index_BT)
    hidden_BTD = run_passes(run.model, run.params, batch, num_passes=num_passes).hidden_BTD
    vocab_size = run.config.model.vocab_size
    return np.asarray(logits(hidden_BTD, run.params['embedding'], vocab_size=vocab_size))[..., :vocab_size]


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


@pytest.fixture(scope='module')
def folder(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('hf') / 'exported'
    told = hf_export.export_hf(run, str(path), data_folder=path.parent, metrics=[])
    assert len(told.difference) == 3
    assert max(told.difference) < 1e-4
    assert told.tokenizer
    return path


# The folder


def test_the_folder_is_whole_and_alone(folder: Path, run: Run) -> None:
    assert {p.name for p in folder.parent.iterdir()} == {'exported'}
    assert {p.name for p in folder.iterdir()} == {
        'model.safetensors',
        'config.json',
        'generation_config.json',
        'modeling_fbt.py',
        'README.md',
        'tokenizer.json',
        'tokenizer_config.json',
        'special_tokens_map.json',
    }
    (folder.parent / 'new').mkdir()
    assert folder.stat().st_mode == (folder.parent / 'new').stat().st_mode
    assert len({p.stat().st_mode for p in folder.iterdir()}) == 1
    from safetensors.numpy import load_file

    weights = load_file(folder / 'model.safetensors')
    assert run.params['embedding'].shape == (384, 16)
    assert weights['embedding.weight'].shape == (258, 16)  # padded rows are cut
    assert not [name for name in weights if 'head' in name and 'head_gate' not in name]  # the tied table is there once
    assert sum(w.size for w in weights.values()) == sum(x.size for x in jax.tree.leaves(run.params)) - (384 - 258) * 16
    said = json.loads((folder / 'config.json').read_text())
    assert said['layer_types'] == ['sliding_attention', 'full_attention']
    assert (said['sliding_window'], said['rope_theta'], said['bos_token_id'], said['eos_token_id']) == (
        5,
        1e3,
        256,
        257,
    )
    assert 'fbt_jax' not in (folder / 'modeling_fbt.py').read_text()


def test_transformers_loads_saves_and_loads_it_again(folder: Path, run: Run, tmp_path: Path) -> None:
    first = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokens_BT = tokens_of()
    with torch.no_grad():
        first_BTV = first(torch.tensor(tokens_BT), num_passes=3).logits.numpy()
    np.testing.assert_allclose(first_BTV, run_logits(run, tokens_BT, 3), atol=1e-4)
    first.save_pretrained(tmp_path / 'again')
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'again', trust_remote_code=True)
    assert again.config.to_dict() | {'_name_or_path': ''} == first.config.to_dict() | {'_name_or_path': ''}
    for (name, a), (_, b) in zip(first.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_weights_may_be_stored_in_bfloat16(run: Run, tmp_path: Path) -> None:
    out = tmp_path / 'small'
    told = hf_export.export_hf(run, str(out), dtype='bfloat16', data_folder=tmp_path, metrics=[])
    assert max(told.difference) < 1e-4  # from the run with its weights rounded
    model = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert model.dtype == torch.bfloat16
    ids = torch.tensor(tokens_of())
    assert torch.isfinite(model.generate(ids, mode='soft', max_new_tokens=9)).all()


def test_rows_that_are_not_text_are_exported_without_a_tokenizer(tmp_path: Path) -> None:
    model = make_model(vocab_size=word_problem.GROUPS['S5'].vocab_size, fusion='none')
    data = DataConfig(source='word_problem', tokenizer='none', seq_len=12, batch_size=2)
    config = Config(data=data, model=model.config, passes=PassesConfig(phases='one_pass'))
    words = Run(model, make_params(model), config, None, trained_feedback=False)
    told = hf_export.export_hf(words, str(tmp_path / 'out'), data_folder=tmp_path, metrics=[])
    assert (len(told.difference), told.tokenizer) == (1, False)
    assert not list((tmp_path / 'out').glob('tokenizer*'))
    assert 'AutoTokenizer' not in (tmp_path / 'out' / 'README.md').read_text()
    assert 'bos_token_id' not in json.loads((tmp_path / 'out' / 'config.json').read_text())


def judged(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, errors: dict[str, tuple[float, ...]]
) -> tuple[tuple[float, ...], str]:
    """The verdict on a folder that computes what the run does, but for errors: {dtype: one number a pass}."""
    weights = hf_export.torch_weights(run, 'float32')

    def wrong(_: Path, *, tokens: Any, places: Any, passes: int, dtype: str, texts: str) -> dict[str, Any]:
        config = run.config.model
        logits_KBPV = hf_export.logits_at(config, run.params, tokens, places, num_passes=passes, dtype=dtype).copy()
        logits_KBPV[:, 0, 3, 5] += np.array(errors.get(dtype, (0, 0, 0)), dtype)
        return {'logits': logits_KBPV, 'ids': json.loads(texts)}

    monkeypatch.setattr(hf_export, '_read', wrong)
    return hf_export.compare(folder, run, weights, tokens_of())


def test_rounding_that_grows_in_fed_passes_is_judged_in_float64(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judged(run, tmp_path, monkeypatch, {}) == ((0, 0, 0), 'float32')
    errors = {'float32': (5e-5, 0.0, 1e-3), 'float64': (0.0, 2e-8, 3e-8)}
    difference, computed_in = judged(run, tmp_path, monkeypatch, errors)
    assert computed_in == 'float64'
    np.testing.assert_allclose(difference, (0, 2e-8, 3e-8), rtol=1e-2)


@pytest.mark.parametrize(
    ('errors', 'told'),
    [
        pytest.param(
            {'float32': (1e-3, 0, 0)}, r'0\.0001: 1\.0e-03, \S+, \S+ in float32; 0.0e\+00, .*', id='pass 1, in float32'
        ),
        pytest.param({'float32': (np.nan, 0, 0)}, r'0\.0001: nan, \S+, \S+ in float32; .*', id='no number'),
        pytest.param(
            {'float32': (0, 1e-3, 0), 'float64': (0, 1e-3, 0)},
            r'in float32; \S+ 1\.0e-03, \S+ in float64$',
            id='pass 2',
        ),
    ],
)
def test_a_difference_that_float64_does_not_explain_fails(
    errors: dict[str, tuple[float, ...]], told: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=told):
        judged(run, tmp_path, monkeypatch, errors)


def wrong_rotary(monkeypatch: pytest.MonkeyPatch) -> None:
    source = hf_export.modeling_source()
    halves = 'first, second = x_BNTH.to(cos_B1Th.dtype).chunk(2, dim=-1)'
    assert halves in source
    neighbours = 'first, second = x_BNTH.to(cos_B1Th.dtype)[..., ::2], x_BNTH.to(cos_B1Th.dtype)[..., 1::2]'
    monkeypatch.setattr(hf_export, 'modeling_source', lambda: source.replace(halves, neighbours))


def swapped_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    write = hf_export.write

    def swapped(folder: Path, run: Run, weights: dict[str, np.ndarray], *rest: Any) -> None:
        gate, up = (f'layers.1.mlp_{name}.weight' for name in ('gate', 'up'))
        write(folder, run, weights | {gate: weights[up], up: weights[gate]}, *rest)

    monkeypatch.setattr(hf_export, 'write', swapped)


def missing_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    write = hf_export.write

    def without(folder: Path, run: Run, weights: dict[str, np.ndarray], *rest: Any) -> None:
        write(folder, run, {k: w for k, w in weights.items() if k != 'final_norm.weight'}, *rest)

    monkeypatch.setattr(hf_export, 'write', without)


@pytest.mark.parametrize(
    ('damage', 'told'),
    [
        (wrong_rotary, 'logits of passes 1, ... differ by more than 0.0001: '),
        (swapped_weights, 'logits of passes 1, ... differ by more than 0.0001: '),
        (missing_weight, 'final_norm.weight'),
    ],
)
def test_a_wrong_export_fails_and_leaves_nothing(
    damage: Any, told: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(monkeypatch)
    with pytest.raises(RuntimeError, match=re.escape(told)):
        hf_export.export_hf(run, str(tmp_path / 'out'), data_folder=tmp_path, metrics=[])
    assert list(tmp_path.iterdir()) == []


def test_only_a_new_folder_is_written_to(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / 'mine').write_text('kept')
    with pytest.raises(UserError, match='must be a new folder; this one exists and is not empty'):
        hf_export.export_hf(run, str(tmp_path), data_folder=tmp_path, metrics=[])
    with pytest.raises(UserError, match='must lie in a folder that exists'):
        hf_export.export_hf(run, str(tmp_path / 'a' / 'b'), data_folder=tmp_path, metrics=[])
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(UserError, match=r"needs torch, transformers, safetensors: pip install 'fbt-jax\[hf\]'"):
        hf_export.export_hf(run, str(tmp_path / 'new'), data_folder=tmp_path, metrics=[])
    assert [p.name for p in tmp_path.iterdir()] == ['mine']


def test_the_card_carries_the_run_s_figures(run: Run) -> None:
    rows: list[dict[str, Any]] = [
        {'step': s, 'split': 'train', 'passes': 1, 'tokens': 1000 * s, 'token_passes': 1250 * s} for s in (6, 7, 8)
    ]
    rows.append({'step': 7, 'split': 'validation', 'passes': 2, 'loss_pass_1': 3.25, 'loss_pass_2': 3.125})
    rows[-1] |= {'perplexity_pass_1': 25.79, 'perplexity_pass_2': 22.76, 'bits_per_byte_pass_1': None}
    card = model_card(run, rows, parameters=12_345, dtype='float32', tokenizer=True)
    for said in (
        '12,345',
        '7,000 / 8,750',
        '| 1 | 3.2500 | 25.7900 |  |',
        '| 2 | 3.1250 |',
        '1 (75%), 2 (25%)',
        'soft',
    ):
        assert said in card
    assert '8,000' not in card  # a later step's
    assert 'AutoTokenizer' in card
    plain = model_card(run._replace(trained_feedback=False), [], parameters=1, dtype='float32', tokenizer=False)
    assert "mode='soft'" not in plain
    assert 'no tokenizer is exported with it' in plain
    assert 'AutoTokenizer' not in plain


# One forward pass, several, and their gradients


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


# Decoding


def padded(run: Run, prompts: list[str]) -> dict[str, Any]:
    rows = [[run.tokenizer.bos_id, *run.tokenizer.encode(p)] for p in prompts]
    width = max(map(len, rows))
    ids = [[run.tokenizer.eos_id] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {'input_ids': torch.tensor(ids), 'attention_mask': torch.tensor(mask)}


def new_tokens(model: Any, inputs: dict[str, Any], run: Run, **options: Any) -> list[list[int]]:
    """Up to EOS, which is kept."""
    ids = model.generate(**inputs, do_sample=False, **options)[:, inputs['input_ids'].shape[1] :].tolist()
    eos = run.tokenizer.eos_id
    return [row[: row.index(eos) + 1] if eos in row else row for row in ids]


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


# The command


CONFIG = """
from fbt_jax.config import default_config


def get_config():
    config = default_config()
    config.data.source = 'austen'
    config.data.tokenizer = 'bpe'
    config.data.seq_len = 48
    config.data.batch_size = 4
    config.model.width = 32
    config.model.num_layers = 2
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.mlp_width = 48
    config.model.window = 16
    config.model.full_attention_every = 2
    config.model.remat = 'nothing'
    config.passes.phases = ((0, (0.5, 0.5)),)
    config.optimizer.warmup_steps = 2
    config.training.steps = 8
    config.training.log_every = 1
    config.training.eval_every = 8
    config.training.eval_rows = 4
    config.training.checkpoint_every = 8
    return config
"""


@pytest.mark.slow
def test_the_command_exports_a_trained_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fbt_jax.training.run_folder import load_run

    (tmp_path / 'config.py').write_text(CONFIG)
    workdir, out = tmp_path / 'run', tmp_path / 'out'
    assert cli.main(['train', f'--config={tmp_path / "config.py"}', f'--workdir={workdir}']) == 0
    command = ['export', f'--workdir={workdir}', '--format=hf', f'--out={out}']
    capsys.readouterr()
    assert cli.main(command) == 0
    assert 'logits of passes 1..3 over validation rows differ from the run by' in capsys.readouterr().out
    rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    row = next(row for row in rows if row['split'] == 'validation')
    figures = [row[f'{name}_pass_2'] for name in ('loss', 'perplexity', 'bits_per_byte')]
    assert f'| 2 | {" | ".join(f"{x:.4f}" for x in figures)} |' in (out / 'README.md').read_text()
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    assert cli.main(command) == 2
    assert (
        capsys.readouterr().err == f'fbt export: --out={out}: must be a new folder; this one exists and is not empty\n'
    )
    assert before == {p.name: p.stat().st_mtime_ns for p in out.iterdir()}

    run = load_run(str(workdir))
    model = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    prompts = ['It is a truth universally acknowledged, that', 'She', 'Emma']
    inputs = tokenizer(prompts, return_tensors='pt', padding=True)
    for mode in modeling_fbt.MODES:
        expected = generate(run, prompts, mode=mode, max_tokens=30)
        assert new_tokens(model, inputs, run, max_new_tokens=30, mode=mode) == expected.tokens


def test_the_code_for_transformers_needs_no_fbt_jax() -> None:
    for name in ('modeling_fbt.py', 'hf_read.py'):
        source = (Path(hf_export.__file__).parent / name).read_text()
        assert not re.search(r'^\s*(import|from) fbt_jax', source, re.MULTILINE)


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
