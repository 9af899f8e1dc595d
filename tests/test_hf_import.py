"""`fbt import`: folders that transformers itself has made become runs that compute the same, and training goes on.

Shapes: B rows, T positions, V vocabulary.
"""

import contextlib
import dataclasses
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from helpers_e2e import finish, rows, send_when, start, train
from helpers_hf_folders import LLAMA_3, MODELS, SMALL, VOCAB_SIZE, make_folder, make_model, torch, transformers

from fbt_jax.cli import main
from fbt_jax.config_file import load_config_file
from fbt_jax.data import open_data
from fbt_jax.inference.generate import generate
from fbt_jax.interop import hf_weights
from fbt_jax.interop.hf_export import export_hf
from fbt_jax.interop.hf_import import import_hf
from fbt_jax.model.attention import rope_frequencies
from fbt_jax.training.run_folder import load_run


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


def test_what_is_not_the_run_s_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids at which its own `generate` ends besides, and a chat template."""
    make_folder(tmp_path / 'hf')
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hf')
    tokenizer.chat_template = '{{ messages }}'
    tokenizer.save_pretrained(tmp_path / 'hf')
    eos = tokenizer.eos_token_id
    (tmp_path / 'hf' / 'generation_config.json').write_text(json.dumps({'eos_token_id': [eos, 5, 7]}))
    assert main(['import', f'--from={tmp_path / "hf"}', f'--workdir={tmp_path / "run"}']) == 0
    out = capsys.readouterr().out
    assert 'its own texts also end at other ids than EOS: fbt generate --stop-id=5 --stop-id=7\n' in out
    assert 'its chat template is left out: the run continues plain text\n' in out


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
