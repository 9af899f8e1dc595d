"""`fbt import`: folders that transformers itself has made become runs that compute the same, and training goes on.

Shapes: B rows, T positions, V vocabulary.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers_e2e import finish, rows, send_when, start, train

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers', minversion='5')
pytest.importorskip('safetensors')

from safetensors.torch import load_file, save_file  # noqa: E402

from fbt_jax.cli import main  # noqa: E402
from fbt_jax.config_file import load_config_file  # noqa: E402
from fbt_jax.data import open_data  # noqa: E402
from fbt_jax.data.tokenizer import BPE_FILE  # noqa: E402
from fbt_jax.errors import UserError  # noqa: E402
from fbt_jax.inference.generate import generate  # noqa: E402
from fbt_jax.interop import hf_compare, hf_import, hf_weights  # noqa: E402
from fbt_jax.interop.hf_compare import new_folder, run_script  # noqa: E402
from fbt_jax.interop.hf_export import export_hf  # noqa: E402
from fbt_jax.interop.hf_import import import_hf  # noqa: E402
from fbt_jax.model.attention import rope_frequencies  # noqa: E402
from fbt_jax.training.run_folder import load_run  # noqa: E402

transformers.utils.logging.disable_progress_bar()  # the lines that are looked at are ours alone
VOCAB_SIZE = 2048 + 8  # more rows than the tokenizer has ids, as Qwen's
LLAMA_3 = {
    'rope_type': 'llama3',
    'rope_theta': 5e3,
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 64,
}
SMALL = {
    'vocab_size': VOCAB_SIZE,
    'hidden_size': 32,
    'intermediate_size': 48,
    'num_hidden_layers': 3,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'max_position_embeddings': 96,
    'bos_token_id': 0,
    'eos_token_id': 1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    'a Llama': ('Llama', {'rms_norm_eps': 1e-5}),
    'a tied Llama with biases': ('Llama', {'tie_word_embeddings': True, 'attention_bias': True, 'mlp_bias': True}),
    'a Llama 3.1': ('Llama', {'rope_parameters': LLAMA_3, 'num_key_value_heads': 1}),
    'a Llama of wide heads': (
        'Llama',
        {'head_dim': 16, 'rope_parameters': {'rope_type': 'linear', 'factor': 4.0, 'rope_theta': 1e4}},
    ),
    'a Qwen2': ('Qwen2', {'tie_word_embeddings': True}),
    'a Qwen3': ('Qwen3', {'head_dim': 24}),
}


def make_model(family: str, changes: dict[str, Any]) -> Any:
    """Random everywhere, so that a tensor in the wrong place shows."""
    torch.manual_seed(0)
    config = getattr(transformers, f'{family}Config')(**SMALL | changes)
    model = getattr(transformers, f'{family}ForCausalLM')(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(std=0.5 if 'bias' in name else 0.15)
            if 'norm' in name:
                weight.uniform_(0.5, 1.5)
    return model


def make_folder(
    folder: Path, family: str = 'Llama', changes: dict[str, Any] | None = None, model: Any = None, **saving: Any
) -> Any:
    model = model or make_model(family, changes or {})
    model.save_pretrained(folder, **saving)
    bpe = Path(hf_import.__file__).parents[1] / 'data' / BPE_FILE
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(bpe), bos_token='<|bos|>', eos_token='<|eos|>', clean_up_tokenization_spaces=False
    )
    tokenizer.save_pretrained(folder)
    return model


@pytest.mark.parametrize('name', MODELS)
def test_the_run_is_the_model(name: str, tmp_path: Path) -> None:
    model = make_folder(tmp_path / 'hf', *MODELS[name])
    told = import_hf(str(tmp_path / 'hf'), str(tmp_path / 'run'))
    assert told.difference < 1e-4
    assert told.assumed == {}
    assert told.parameters == sum(p.numel() for p in model.parameters())
    run = load_run(str(tmp_path / 'run'))
    assert (run.step, run.trained_feedback, run.config.data.seq_len) == (0, False, 96)
    prompts = ['It is a truth universally', 'Emma Woodhouse']
    ours = generate(run, prompts, mode='standard', max_tokens=20, temperature=0.0)
    for prompt, ids in zip(prompts, ours.tokens, strict=True):
        before = [run.tokenizer.bos_id, *run.tokenizer.encode(prompt)]
        theirs = model.generate(torch.tensor([before]), max_new_tokens=20, do_sample=False, pad_token_id=1)
        assert list(ids) == theirs[0, len(before) :].tolist()[: len(ids)]
        assert len(ids) > 5


def test_a_run_that_was_imported_is_exported(tmp_path: Path) -> None:
    make_folder(tmp_path / 'hf', 'Qwen3', {'head_dim': 24})
    import_hf(str(tmp_path / 'hf'), str(tmp_path / 'run'))
    told = export_hf(load_run(str(tmp_path / 'run')), str(tmp_path / 'out'), data_folder=tmp_path, metrics=[])
    assert max(told.difference) < 1e-4
    assert told.tokenizer


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32'])
def test_several_files_and_half_precision(tmp_path: Path, dtype: str) -> None:
    model = make_model('Llama', {}).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size='100KB')
    assert len(list(tmp_path.glob('*.safetensors'))) > 2
    config = hf_weights.model_config(model.config.to_dict(), 'there')
    weights = hf_weights.Weights(tmp_path)
    hf_weights.require_all(weights, hf_weights.places(config))
    params = hf_weights.params_of(config, weights)
    expected = model.model.layers[2].self_attn.k_proj.weight.detach().float().numpy()
    np.testing.assert_array_equal(params['layers']['key']['kernel'][2], expected.T)
    np.testing.assert_array_equal(params['head'][:VOCAB_SIZE], model.lm_head.weight.detach().float().numpy())
    assert params['head'].shape == (2176, 32)
    assert not np.any(params['head'][VOCAB_SIZE:])


@pytest.mark.parametrize(('kind', 'settings'), [('llama3', (8.0, 1.0, 4.0, 64)), ('linear', (4.0,))])
def test_frequencies_are_those_of_transformers(kind: str, settings: tuple[float, ...]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = LLAMA_3 | {'rope_type': kind, 'factor': settings[0]}
    config = transformers.LlamaConfig(**SMALL | {'head_dim': 64, 'rope_parameters': parameters})
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, 'cpu')
    assert factor == 1
    np.testing.assert_allclose(rope_frequencies(32, theta=5e3, scaling=settings), expected.numpy(), rtol=2e-6)


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


def test_other_mathematics_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a config whose rotary base was read wrongly."""
    make_folder(tmp_path / 'hf')
    monkeypatch.setattr(hf_weights, '_rope', lambda *_: (9.9e3, ()))
    apart = r'logits differ from those of transformers by .* in float32 and .* in float64'
    with pytest.raises(RuntimeError, match=apart):
        import_hf(str(tmp_path / 'hf'), str(tmp_path / 'run'))
    assert [p.name for p in tmp_path.iterdir()] == ['hf']


def test_a_signal_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither folders, beside the run's and among the temporary ones, nor the process that asks transformers."""
    make_folder(tmp_path / 'hf')
    for number, name in ((signal.SIGTERM, 'terms'), (signal.SIGHUP, 'hups')):
        (tmp_path / name).mkdir()
        arguments = (f'--from={tmp_path}/hf', f'--workdir={tmp_path}/run')
        process = start('import', *arguments, extra={'TMPDIR': str(tmp_path / name)})
        assert send_when(process, lambda name=name: any((tmp_path / name).rglob('question.json')), number)  # type: ignore[misc]
        result = finish(process)
        assert result.status == 128 + number, result.text
        assert result.err == f'fbt import: ended by {number.name}'
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted({'hf', 'terms', name})
        assert list((tmp_path / name).iterdir()) == []
        deadline = time.monotonic() + 10
        while any(str(tmp_path / name) in command for command in commands()):
            assert time.monotonic() < deadline, 'it goes on'


def commands() -> list[str]:
    found = []
    for path in Path('/proc').glob('[0-9]*/cmdline'):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b'\0', b' ').decode(errors='replace'))
    return found


def test_no_room_is_not_the_model_s_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'hf').mkdir()
    monkeypatch.setattr(hf_compare.shutil, 'disk_usage', lambda _: SimpleNamespace(free=1000))
    with pytest.raises(RuntimeError, match=rf'no space left in {tmp_path}; TMPDIR names another place'):
        run_script('hf_open.py', 'no question', scratch=tmp_path / 'scratch')
    monkeypatch.undo()
    monkeypatch.setattr(hf_compare.subprocess, 'run', lambda *_, **__: SimpleNamespace(returncode=-9, stderr=''))
    with pytest.raises(RuntimeError, match='transformers was ended by SIGKILL: too little memory'):
        run_script('hf_open.py', scratch=tmp_path)


def test_a_folder_that_cannot_be_made_or_was_made_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r'must be a new folder; this one exists and is not empty'):  # noqa: SIM117
        with new_folder(str(tmp_path / 'run'), '--workdir') as temporary:
            (temporary / 'a').touch()
            (tmp_path / 'run').mkdir()
            (tmp_path / 'run' / 'b').touch()
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob('*')] == ['run', 'run/b']

    def read_only(**_: Any) -> str:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), '/random/name')

    monkeypatch.setattr(hf_compare.tempfile, 'mkdtemp', read_only)
    with pytest.raises(UserError, match=r'^--out=\S+/x: cannot be written \(Read-only file system\)$'):  # noqa: SIM117
        with new_folder(str(tmp_path / 'x'), '--out'):
            pass


@pytest.mark.parametrize('base', [5e3, 5.0001e3])
def test_float64_tells_rounding_from_a_mistake(base: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a thousand: float32 rounds them by more than the mistake of a base that is 2e-5 off makes of them."""
    model = make_model('Llama', {'rope_parameters': LLAMA_3})
    with torch.no_grad():
        model.lm_head.weight *= 300
    make_folder(tmp_path / 'hf', model=model)
    monkeypatch.setattr(hf_weights, '_rope', lambda *_: (base, (8.0, 1.0, 4.0, 64)))
    if base == 5e3:
        told = import_hf(str(tmp_path / 'hf'), str(tmp_path / 'run'))
        assert told.difference > 1e-4
        assert told.in_float64 is not None and told.in_float64 < 1e-9
    else:
        with pytest.raises(RuntimeError, match='in float64'):
            import_hf(str(tmp_path / 'hf'), str(tmp_path / 'run'))


def test_training_goes_on_from_the_model_s_own_loss(tmp_path: Path) -> None:
    model = make_folder(tmp_path / 'hf', 'Qwen2', {'tie_word_embeddings': True})
    import_hf(str(tmp_path / 'hf'), str(tmp_path / 'run'), seq_len=64)
    config, workdir = tmp_path / 'run' / 'config.py', tmp_path / 'on'
    few = {
        'data.batch_size': 2,
        'training.steps': 2,
        'training.log_every': 1,
        'training.eval_every': 2,
        'training.eval_rows': 2,
        'passes.phases': '((0, (1.0,)), (1, (0.0, 1.0)))',
        'passes.prefix_mixin': 'False',
        'passes.jitter': '0',
    }
    train(config, workdir, *(f'--config.{key}={value}' for key, value in few.items()))
    first, second = (row for row in rows(workdir) if row['split'] == 'train')

    resolved = load_run(str(workdir)).config
    batch = next(open_data(resolved).train_iterator())
    expected, count = 0.0, 0.0
    for b, segment in {(r, s) for r in range(2) for s in np.unique(batch.segment_ids[r]) if s > 0}:
        here_T = batch.segment_ids[b] == segment
        with torch.no_grad():
            logits_TV = model(torch.tensor(batch.tokens[b, here_T][None]).long()).logits[0]
        nll_T = torch.nn.functional.cross_entropy(
            logits_TV, torch.tensor(batch.targets[b, here_T]).long(), reduction='none'
        ).numpy()
        expected += float(np.sum(nll_T * batch.weights[b, here_T]))
        count += float(np.sum(batch.weights[b, here_T]))
    assert first['loss_pass_1'] == pytest.approx(expected / count, rel=1e-5)
    assert (first['passes'], second['passes']) == (1, 2)
    assert np.isfinite(second['loss_pass_2'])

    table = model.model.embed_tokens.weight.detach().double().numpy()
    gain = np.asarray(load_run(str(workdir), step=2).params['input_norm']['scale'])
    rms = np.sqrt(np.mean(table**2))
    np.testing.assert_allclose(gain, rms, atol=3e-4)  # two steps of Adam at warm-up rates from it
    assert load_run(str(workdir)).trained_feedback


def test_a_folder_s_name_is_no_code(tmp_path: Path) -> None:
    name = 'q"""; raise SystemExit(7); """ \\N'
    make_folder(tmp_path / name)
    import_hf(str(tmp_path / name), str(tmp_path / 'run'))
    assert load_config_file(str(tmp_path / 'run' / 'config.py'), {}).model.width == 32


def test_the_config_file_says_all_that_the_run_is(tmp_path: Path) -> None:
    make_folder(tmp_path / 'hf', 'Llama', {'rope_parameters': LLAMA_3, 'mlp_bias': True})
    imported = import_hf(str(tmp_path / 'hf'), str(tmp_path / 'run')).config
    going_on = load_config_file(str(tmp_path / 'run' / 'config.py'), {})
    assert going_on.model.fusion == 'gated'
    assert dataclasses.replace(going_on.model, fusion='none') == imported.model
    assert dataclasses.replace(going_on.data, tokenizer=imported.data.tokenizer) == imported.data
    assert Path(going_on.init.from_).samefile(tmp_path / 'run')


SMOLLM2 = Path(os.environ.get('FBT_MATERIALS', '/no/materials')).absolute() / 'smollm2'


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason='FBT_MATERIALS names no folder made by tests/materials.sh')
def test_smollm2_writes_its_own_text(tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct from GGUF: whose q and k rows lie in another order, whose tokenizer lacks eight bytes."""
    pytest.importorskip('gguf')
    told = import_hf(str(SMOLLM2), str(tmp_path / 'run'), seq_len=512)
    assert told.parameters == 134_515_008
    assert told.difference < 5e-4  # logits up to 39, which float32 rounds
    assert told.in_float64 is not None and told.in_float64 < 1e-9
    run = load_run(str(tmp_path / 'run'))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        SMOLLM2, gguf_file=next(SMOLLM2.glob('*.gguf')).name, dtype=torch.float32
    )
    prompts = ['The capital of France is', 'Once upon a time, in a village by the sea,', 'def fibonacci(n):']
    ours = generate(run, prompts, mode='standard', max_tokens=40, temperature=0.0)
    for prompt, ids in zip(prompts, ours.tokens, strict=True):
        before = [run.tokenizer.bos_id, *run.tokenizer.encode(prompt)]
        theirs = model.generate(torch.tensor([before]), max_new_tokens=40, do_sample=False, eos_token_id=2)
        assert list(ids) == theirs[0, len(before) :].tolist()[: len(ids)]
    assert ours.texts[0].startswith(' Paris')
