"""`fbt evaluate` and `fbt diagnose` on runs that `fbt train` has made: figures, refusals, nothing damaged."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers_e2e import PLAIN, finish, python, refused, rows, snapshot, start, train, write_config

from fbt_jax.cli import main
from fbt_jax.data import corpus
from fbt_jax.training.run_folder import load_run


@pytest.fixture(scope='module')
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp('config'))


@pytest.fixture(scope='module')
def run(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run without feedback, the cheapest there is."""
    workdir = tmp_path_factory.mktemp('cli') / 'run'
    train(config, workdir, *PLAIN, '--config.training.steps=8')
    return workdir


@pytest.fixture(scope='module')
def fed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp('cli') / 'fed'
    train(config, workdir, '--config.training.steps=2')
    return workdir


def evaluate(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> str:
    capsys.readouterr()
    assert main(['evaluate', f'--workdir={run}', *arguments]) == 0
    return capsys.readouterr().out


def test_evaluate_says_what_training_said(capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path) -> None:
    before = snapshot(run)
    table = evaluate(capsys, run, f'--json={tmp_path}/figures.json')
    figures = json.loads((tmp_path / 'figures.json').read_text())
    row = rows(run)[-1]
    assert figures['loss_pass_1'] == pytest.approx(row['loss_pass_1'], abs=2e-6)
    assert f'\n1           {row["loss_pass_1"]:.4f}' in table
    assert table.startswith(f'{run}, step 8: 1024 validation rows, 12,288 tokens\n')  # 1024 rows of 12 positions
    assert (figures['step'], figures['tokens'], figures['passes']) == (8, 12_288, 1)
    assert len(figures['accuracy_by_position']['1']) == 12
    assert snapshot(run) == before


def test_evaluate_against_a_run_on_the_same_documents(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path
) -> None:
    """Against itself: exactly nothing. Against a copy at another step: the difference of what each says of itself."""
    other = shutil.copytree(run, tmp_path / 'other')
    shutil.rmtree(other / 'checkpoints/8')
    path = f'--json={tmp_path}/figures.json'
    evaluate(capsys, other, path)
    alone = json.loads((tmp_path / 'figures.json').read_text())
    table = evaluate(capsys, run, f'--against={other}', path)
    figures = json.loads((tmp_path / 'figures.json').read_text())
    assert f'less {other}, step 7, on the same documents\n' in table
    assert (figures['against']['step'], figures['against']['unit']) == (7, 'nats per token')
    entry = figures['against']['passes']['1']
    assert entry['other_passes'] == 1
    assert entry['difference'] == pytest.approx(figures['loss_pass_1'] - alone['loss_pass_1'], abs=1e-6)
    low, high = entry['interval']
    assert low < entry['difference'] < high < low + 0.1
    assert figures['intervals']['documents'] == 1024
    assert figures['intervals']['loss']['1'][0] < figures['loss_pass_1'] < figures['intervals']['loss']['1'][1]
    evaluate(capsys, run, f'--against={run}', '--rows=9', path)
    entry = json.loads((tmp_path / 'figures.json').read_text())['against']['passes']['1']
    assert (entry['difference'], entry['interval']) == (0, [0, 0])


def test_the_recurrence_against_other_runs(
    capsys: pytest.CaptureFixture[str], run: Path, fed: Path, tmp_path: Path
) -> None:
    """It is as many passes as a row has positions, 12, also in its difference from a run without feedback."""
    path = f'--json={tmp_path}/figures.json'
    evaluate(capsys, fed, '--rows=16', '--passes=1,12', '--soft', f'--against={run}', path)
    found = json.loads((tmp_path / 'figures.json').read_text())['against']['passes']
    assert [(name, entry['other_passes']) for name, entry in found.items()] == [('1', 1), ('12', 1), ('soft', 1)]
    assert found['soft']['difference'] == pytest.approx(found['12']['difference'], abs=1e-5)
    assert abs(found['soft']['difference'] - found['1']['difference']) > 1e-4
    evaluate(capsys, fed, '--rows=16', '--passes=2', '--soft', f'--against={fed}', path)
    found = json.loads((tmp_path / 'figures.json').read_text())['against']['passes']
    assert found['soft'] == {'other_passes': 'soft', 'difference': 0, 'interval': [0, 0]}
    line = refused(capsys, 'evaluate', f'--workdir={fed}', '--passes=1,13')
    assert line == f'--passes = 13: must be at most 12, the rows of {fed}'


def test_passes_that_no_step_has_trained(
    capsys: pytest.CaptureFixture[str], config: Path, run: Path, fed: Path, tmp_path: Path
) -> None:
    """Fusion left on, one pass in all steps: one pass by default, a remark, and one pass against another run."""
    idle, path = tmp_path / 'idle', f'--json={tmp_path}/figures.json'
    train(config, idle, '--config.training.steps=2', '--config.passes.phases=one_pass')

    def found() -> dict[str, Any]:
        return json.loads((tmp_path / 'figures.json').read_text())

    told = evaluate(capsys, idle, '--rows=16', path)
    alone = found()
    assert (list(alone['intervals']['loss']), alone['trained_feedback']) == (['1'], False)
    assert f'\npasses after the first are left out: no step of {idle} has trained them\n' in told
    told = evaluate(capsys, idle, '--rows=16', '--passes=1,2')
    assert f'\npasses after the first say nothing: no step of {idle} has trained them\n' in told
    assert re.search(r'^2 ', told, re.MULTILINE)
    told = evaluate(capsys, fed, '--rows=16', '--passes=1,2,3', f'--against={idle}', path)
    against = found()['against']['passes']
    assert {name: entry['other_passes'] for name, entry in against.items()} == {'1': 1, '2': 1, '3': 1}
    for k in (1, 2, 3):
        difference = found()[f'loss_pass_{k}'] - alone['loss_pass_1']
        assert against[str(k)]['difference'] == pytest.approx(difference, abs=1e-6)
    assert found()['trained_feedback']
    assert 'passes after the first' not in told + evaluate(capsys, run, '--rows=16')
    assert refused(capsys, 'evaluate', f'--workdir={idle}', '--soft') == f'--soft: {idle} was trained without feedback'


def test_a_run_that_has_diverged_is_not_scored(
    capsys: pytest.CaptureFixture[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single parameter that is not a number."""

    def broken(workdir: str, step: int | None = None) -> Any:
        found = load_run(workdir, step)
        params = found.params | {'embedding': found.params['embedding'].at[3, 1].set(np.nan)}
        return found._replace(params=params)

    for module in ('scoring', 'diagnosis', 'probing'):
        monkeypatch.setattr(f'fbt_jax.training.{module}.load_run', broken)
    monkeypatch.setattr('fbt_jax.interop.tasks.load_run', broken)
    for arguments in (['evaluate'], ['diagnose'], ['diagnose', '--probes'], ['evaluate', '--tasks=gsm8k']):
        if arguments[-1] == '--tasks=gsm8k':
            monkeypatch.setattr('fbt_jax.interop.tasks.read_items', lambda *_: None)
        line = refused(capsys, *arguments, f'--workdir={run}')
        assert line == 'not every parameter of step 8 is finite: the run has diverged'


def test_evaluate_refuses_the_recurrence_without_feedback(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    line = refused(capsys, 'evaluate', f'--workdir={run}', '--rows=8', '--soft')
    assert line == f'--soft: {run} was trained without feedback'


def test_evaluate_refuses_other_documents(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shutil.copytree(run, tmp_path / 'other')
    record = json.loads((other / 'config.json').read_text())
    record['config']['seed'] = 4
    (other / 'config.json').write_text(json.dumps(record))
    line = refused(capsys, 'evaluate', f'--workdir={run}', '--rows=8', f'--against={other}')
    assert line == f'{other} cannot be compared with {run}: its rows are drawn with another seed'
    record['data']['validation']['documents'] = 5
    (other / 'config.json').write_text(json.dumps(record))
    monkeypatch.setattr('fbt_jax.training.scoring.load_run', lambda *_: pytest.fail('took long'))
    line = refused(capsys, 'evaluate', f'--workdir={run}', '--rows=8', f'--against={other}')
    assert line == f'{other} cannot be compared with {run}: its validation documents are others, 5 instead of None'
    record['data']['validation-more'] = {'fingerprint': 'x'}
    (other / 'config.json').write_text(json.dumps(record))
    line = refused(capsys, 'evaluate', f'--workdir={run}', '--rows=8', f'--against={other}')
    assert line.endswith(': validation sets validation, validation-more instead of validation')
    line = refused(capsys, 'evaluate', f'--workdir={run}', '--rows=8', f'--against={tmp_path}/none')
    assert line.endswith('none: no run here (no config.json)')


def test_evaluate_fails_on_a_model_that_sees_ahead(
    capsys: pytest.CaptureFixture[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leak planted in the model itself: what the embedding gives is that of the next token too."""
    from fbt_jax.model import transformer

    def leaky(embedding: Any, tokens: Any, *, dtype: Any, look_up: Any = transformer.look_up) -> Any:
        own = look_up(embedding, tokens, dtype=dtype)
        return own + 0.01 * np.eye(tokens.shape[1], k=1, dtype=np.float32) @ own

    monkeypatch.setattr(transformer, 'look_up', leaky)
    jax.clear_caches()  # the honest model's programs
    capsys.readouterr()
    assert main(['evaluate', f'--workdir={run}']) == 1
    jax.clear_caches()
    out, err = capsys.readouterr()
    assert out == ''
    assert re.fullmatch(r'fbt evaluate: the model sees tokens that it must predict: in pass 1 of 1, [^\n]+\n', err)


def test_evaluate_takes_a_part_of_the_rows_and_another_step(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path
) -> None:
    table = evaluate(capsys, run, '--rows=10', '--step=7', f'--json={tmp_path}/figures.json')
    assert table.startswith(f'{run}, step 7: 10 validation rows, 120 tokens\n')
    figures = json.loads((tmp_path / 'figures.json').read_text())
    assert figures['step'] == 7
    assert figures['loss_pass_1'] != pytest.approx(rows(run)[-1]['loss_pass_1'], abs=1e-4)


def test_evaluate_refuses_what_the_run_does_not_have(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path
) -> None:
    before = snapshot(run)
    line = refused(capsys, 'evaluate', f'--workdir={run}', '--step=3')
    assert line == f'step = 3: {run} has checkpoints of steps 7, 8'
    line = refused(capsys, 'evaluate', f'--workdir={run}', '--against=')
    assert line == '--against=: must be the folder of another run'
    line = refused(capsys, 'evaluate', f'--workdir={run}', '--passes=1,2')
    assert line == f'--passes=1,2: {run} was trained without feedback; only 1 is possible'
    shutil.copy(run / 'config.json', tmp_path)
    assert refused(capsys, 'evaluate', f'--workdir={tmp_path}').endswith('holds no checkpoints')

    other = shutil.copytree(run, tmp_path / 'other')
    with (other / 'metrics.jsonl').open('a') as file:
        file.write('no row\n')
    line = refused(capsys, 'evaluate', f'--workdir={other}', f'--plot={tmp_path}/a.png')
    assert line.startswith('--plot needs the metrics of the run: ') and 'is not a row of metrics' in line
    record = json.loads((other / 'config.json').read_text())
    record['data']['validation']['fingerprint'] = 'another'
    (other / 'config.json').write_text(json.dumps(record))
    assert 'holds a run of other data (validation)' in refused(capsys, 'evaluate', f'--workdir={other}')
    assert snapshot(run) == before


def test_evaluate_fails_on_a_damaged_checkpoint(capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(run, tmp_path / 'run')
    (damaged / 'checkpoints/8/meta/metadata').write_text('{')
    assert main(['evaluate', f'--workdir={damaged}']) == 1
    out, err = capsys.readouterr()
    assert out == ''
    assert re.fullmatch(r'fbt evaluate: checkpoint 8 in \S+ cannot be read \(.*\); other steps: 7\n', err)
    assert main(['evaluate', f'--workdir={damaged}', '--step=7', '--rows=8']) == 0


@pytest.mark.slow
def test_evaluate_counts_the_texts_bytes(capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path) -> None:
    """bits per byte by hand, from the loss per token and the length of the validation chapters."""
    run = tmp_path / 'text'
    text = ('--config.data.source=austen', '--config.data.tokenizer=bpe', '--config.data.seq_len=1024')
    train(config, run, *PLAIN, *text, '--config.training.steps=2', '--config.data.batch_size=4')
    evaluate(capsys, run, f'--json={tmp_path}/figures.json')
    figures = json.loads((tmp_path / 'figures.json').read_text())
    num_bytes = sum(len(document.encode()) for document in corpus.split().validation)
    bits = figures['loss_pass_1'] * figures['tokens'] / 0.6931471805599453 / num_bytes
    assert figures['bits_per_byte_pass_1'] == pytest.approx(bits, rel=1e-6)


@pytest.mark.slow
def test_float64_runs_are_evaluated_in_float64(config: Path, tmp_path: Path) -> None:
    """In a process of its own, because the switch is for good."""
    run = tmp_path / 'run'
    train(config, run, *PLAIN, '--config.training.steps=2', '--config.model.dtype=float64')
    result = finish(start('evaluate', f'--workdir={run}', f'--json={tmp_path}/figures.json'))
    assert result.status == 0
    assert 'truncated' not in result.err
    code = f"import fbt_jax; print(fbt_jax.load_run({str(run)!r}).params['embedding'].dtype)"
    assert python(code).stdout == 'float64\n'


def test_diagnose_refuses_a_run_without_feedback(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    line = refused(capsys, 'diagnose', f'--workdir={run}')
    assert line == f'{run}: was trained without feedback (one pass only), so there is no map to iterate'


@pytest.mark.slow
def test_diagnose_a_run(capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path) -> None:
    """64 rows of 12: six passes leave the last six positions of each to judge, twelve none."""
    run = tmp_path / 'run'
    train(config, run, '--config.training.steps=8')
    before = snapshot(run)
    files = [f'--json={tmp_path}/map.json', f'--plot={tmp_path}/map.png']
    assert main(['diagnose', f'--workdir={run}', '--passes=6', *files]) == 0
    out = capsys.readouterr().out
    figures = json.loads((tmp_path / 'map.json').read_text())
    assert out.startswith(f'{run}, step 8: 384 positions of 64 rows, each more than 6 tokens into its document\n')
    assert out.endswith(f'verdict: {figures["verdict"]}\n')
    assert figures['verdict'] in ('contracting', 'diverging', 'undecided')
    assert (len(figures['loss']), figures['update_norm'][0], len(figures['evidence'])) == (6, None, 4)
    assert figures['rate']['low'] <= figures['rate']['value'] <= figures['rate']['high']
    assert len(figures['singular_values']) == 32 and min(figures['singular_values']) > 0
    assert len(set(figures['singular_value_positions'])) > 5
    assert figures['rollout_tokens'] == len(figures['rollout_state_norm']) == 4  # 12 less a prompt of 8
    assert (tmp_path / 'map.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'
    line = refused(capsys, 'diagnose', f'--workdir={run}', '--passes=12')
    assert line.startswith('--passes=12: only 0 positions in 0 rows lie further than that into their document')
    assert snapshot(run) == before
