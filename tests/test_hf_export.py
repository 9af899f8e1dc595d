"""`fbt export --format=hf`: what is written is loaded by transformers and is the run; what is wrong is not written."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import make_model, make_params
from helpers_hf import new_tokens, run_logits, tokens_of, torch, transformers, windowed
from helpers_run import Run

from fbt_jax import cli
from fbt_jax.config import Config, DataConfig, PassesConfig
from fbt_jax.data import word_problem
from fbt_jax.errors import UserError
from fbt_jax.inference.generate import generate
from fbt_jax.interop import hf_export, modeling_fbt
from fbt_jax.interop.hf_card import model_card


@pytest.fixture(scope='module')
def run() -> Run:
    return windowed()


@pytest.fixture(scope='module')
def folder(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('hf') / 'exported'
    told = hf_export.export_hf(run, str(path), data_folder=path.parent, metrics=[])
    assert len(told.difference) == 3
    assert max(told.difference) < 1e-4
    assert told.tokenizer
    return path


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
