"""What `fbt import` refuses: one line, status 2, and nothing is left behind."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers_hf_folders import VOCAB_SIZE, make_folder, torch
from safetensors.torch import load_file, save_file

from fbt_jax.cli import main
from fbt_jax.interop.hf_import import import_hf


def edit_weights(folder: Path, change: Any) -> None:
    weights = load_file(folder / 'model.safetensors')
    change(weights)
    save_file(weights, folder / 'model.safetensors', metadata={'format': 'pt'})


def missing(weights: dict[str, Any]) -> None:
    for i in range(3):
        del weights[f'model.layers.{i}.mlp.up_proj.weight']


def added(weights: dict[str, Any]) -> None:
    weights['model.layers.1.self_attn.sinks'] = torch.zeros(3)


def whole_numbers(weights: dict[str, Any]) -> None:
    weights['model.norm.weight'] = torch.ones(32, dtype=torch.int8)


def one_nan(weights: dict[str, Any]) -> None:
    """In a row that no text reads."""
    weights['model.embed_tokens.weight'][VOCAB_SIZE - 1, 3] = torch.nan


def reshaped(weights: dict[str, Any]) -> None:
    weights['model.norm.weight'] = torch.zeros(31)


@pytest.mark.parametrize(
    ('change', 'told'),
    [
        (missing, '3 missing: model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight, model.layers.2'),
        (added, '1 without a place: model.layers.1.self_attn.sinks'),
        (whole_numbers, 'model.norm.weight is stored as I8; only F64, F32, F16, BF16'),
        (one_nan, 'model.embed_tokens.weight holds numbers that are not finite'),
        (reshaped, r'1 of another shape: model.norm.weight \(31,\) for \(32,\)'),
    ],
)
def test_a_report_of_what_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, told: str
) -> None:
    make_folder(tmp_path / 'hf')
    edit_weights(tmp_path / 'hf', change)
    refused(tmp_path, capsys, told)


def test_a_tied_head_may_be_there_but_not_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / 'hf', changes={'tie_word_embeddings': True})
    edit_weights(tmp_path / 'hf', lambda w: w.update({'lm_head.weight': w['model.embed_tokens.weight'].clone()}))
    import_hf(str(tmp_path / 'hf'), str(tmp_path / 'run'))
    edit_weights(tmp_path / 'hf', lambda w: w['lm_head.weight'].mul_(2))
    refused(tmp_path, capsys, 'tie_word_embeddings is true, but lm_head.weight is not', workdir='other')


def refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], told: str, *arguments: str, workdir: str = 'run'
) -> None:
    """One line, status 2, and nothing is left behind."""
    before = sorted(p.name for p in tmp_path.iterdir())
    assert main(['import', f'--from={tmp_path / "hf"}', f'--workdir={tmp_path / workdir}', *arguments]) == 2
    line = capsys.readouterr().err
    assert re.search(told, line), line
    assert line.count('\n') == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ('changes', 'told'),
    [
        ({'model_type': 'mistral'}, "model_type is 'mistral'; only llama, qwen2, qwen3"),
        ({'hidden_act': 'gelu'}, "hidden_act is 'gelu'; only silu"),
        ({'layer_types': ['full_attention'] * 2 + ['sliding_attention']}, 'layer_types is .*; only full attention'),
        ({'rope_parameters': {'rope_type': 'yarn', 'rope_theta': 1e4, 'factor': 2.0}}, 'only default, linear, llama3'),
        ({'quantization_config': {'quant_method': 'awq'}}, 'its weights are quantised'),
        ({'num_hidden_layers': 'three'}, 'transformers cannot read its config'),
    ],
)
def test_what_has_no_place_here_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], told: str
) -> None:
    make_folder(tmp_path / 'hf')
    path = tmp_path / 'hf' / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refused(tmp_path, capsys, told)


@pytest.mark.parametrize('index', ['[1]', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": 1, "b": "x"}}', '{'])
def test_an_index_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], index: str) -> None:
    make_folder(tmp_path / 'hf')
    (tmp_path / 'hf' / 'model.safetensors.index.json').write_text(index)
    refused(tmp_path, capsys, 'model.safetensors.index.json is no index')


def test_no_file_outside_the_folder_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / 'hf')
    (tmp_path / 'hf' / 'model.safetensors').rename(tmp_path / 'x.safetensors')
    index = {'weight_map': {'model.norm.weight': '../x.safetensors'}}
    (tmp_path / 'hf' / 'model.safetensors.index.json').write_text(json.dumps(index))
    refused(tmp_path, capsys, 'x.safetensors cannot be read: No such file')


def test_a_tensor_in_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / 'hf')
    weights = load_file(tmp_path / 'hf' / 'model.safetensors')
    save_file({'model.norm.weight': weights['model.norm.weight'] * 2}, tmp_path / 'hf' / 'more.safetensors')
    index = {'weight_map': dict.fromkeys(weights, 'model.safetensors') | {'other': 'more.safetensors'}}
    (tmp_path / 'hf' / 'model.safetensors.index.json').write_text(json.dumps(index))
    refused(tmp_path, capsys, 'model.norm.weight is in several of its files')


def test_what_its_config_leaves_unsaid_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / 'hf')
    path = tmp_path / 'hf' / 'config.json'
    said = json.loads(path.read_text())
    del said['rms_norm_eps'], said['rope_parameters']
    path.write_text(json.dumps(said))
    assert main(['import', f'--from={tmp_path / "hf"}', f'--workdir={tmp_path / "run"}']) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if 'transformers does' in line]
    # The documented defaults of LlamaConfig.
    assert told == [
        "its config.json doesn't say rms_norm_eps: taken as 1e-06, as transformers does",
        "its config.json doesn't say rope_theta: taken as 10000.0, as transformers does",
    ]


def test_a_tokenizer_must_be_there_and_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / 'hf', changes={'vocab_size': 2000})
    refused(tmp_path, capsys, 'its tokenizer has 2048 ids, but its model 2000')
    for path in tmp_path.glob('hf/tokenizer*'):
        path.unlink()
    refused(tmp_path, capsys, r'holds no tokenizer \(tokenizer.json, ')


def test_a_tokenizer_s_special_tokens_must_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / 'hf')
    path = tmp_path / 'hf' / 'tokenizer_config.json'
    settings = json.loads(path.read_text())
    file = tmp_path / 'hf' / 'tokenizer.json'
    file.write_text(file.read_text().replace('<|bos|>', '<s>').replace('<|eos|>', '</s>'))
    for bos, eos in ((None, None), ('the', 'the')):
        path.write_text(json.dumps(settings | {'bos_token': bos, 'eos_token': eos}))
        refused(tmp_path, capsys, r'it has BOS .* and EOS .*; name special tokens of its in tokenizer_config')


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(tmp_path, capsys, 'must be a folder of a Hugging Face model, or a .gguf file')
    (tmp_path / 'hf').mkdir()
    refused(tmp_path, capsys, 'holds no config.json')
    make_folder(tmp_path / 'hf')
    refused(tmp_path, capsys, r'--seq-len = 97: must lie in 2\.\.96', '--seq-len=97')
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'mine').write_text('')
    refused(tmp_path, capsys, 'must be a new folder')
    (tmp_path / 'link').symlink_to('nowhere')
    refused(tmp_path, capsys, 'must be a new folder, not a link', workdir='link')
    for arguments in (['--from=', '--workdir=x'], [f'--from={tmp_path / "hf"}', '--workdir=']):
        assert main(['import', *arguments]) == 2
        assert re.search(r'--from= names nothing|--workdir=: must be a new folder', capsys.readouterr().err)
    (tmp_path / 'hf' / 'model.safetensors').write_bytes(b'\xff' * 100)
    refused(tmp_path, capsys, 'model.safetensors cannot be read', workdir='other')
    (tmp_path / 'hf' / 'model.safetensors').unlink()
    refused(tmp_path, capsys, 'holds no model.safetensors', workdir='other')
    assert main(['import', '--from=\udcff', f'--workdir={tmp_path}/x']) == 2
    assert 'its name is not UTF-8' in capsys.readouterr().err
