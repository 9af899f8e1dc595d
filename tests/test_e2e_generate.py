"""`fbt generate` on a run of a few steps on the novels: what it prints, streams, refuses."""

import io
import json
from pathlib import Path

import pytest
from helpers_e2e import TEXT, finish, start, train, write_config

import fbt_jax
from fbt_jax.cli import main


@pytest.fixture(scope='module')
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('generate')
    few = ('--config.training.steps=4', '--config.training.eval_every=9', '--config.training.eval_rows=4')
    train(write_config(folder), folder / 'run', *TEXT, *few)
    return folder / 'run'


def told(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(['generate', *arguments]) == status
    out, err = capsys.readouterr()
    return out if status == 0 else err


def test_what_is_streamed_is_the_text(capsys: pytest.CaptureFixture[str], workdir: Path) -> None:
    run = fbt_jax.load_run(str(workdir))
    assert run.trained_feedback
    for mode in ('standard', 'soft', 'fused'):
        out = told(capsys, f'--workdir={workdir}', '--prompt=It is', f'--mode={mode}', '--max-tokens=12')
        assert out == fbt_jax.generate(run, ['It is'], mode=mode, max_tokens=12).texts[0] + '\n'


def test_what_the_terminal_has_no_letter_for(workdir: Path) -> None:
    arguments = ('--prompt=é', '--num-samples=2', '--mode=standard', '--max-tokens=2')
    result = finish(start('generate', f'--workdir={workdir}', *arguments, extra={'PYTHONIOENCODING': 'ascii'}))
    assert (result.status, result.err) == (0, '')
    assert result.out.count("--- '?', sample") == 2


def test_json_lines(capsys: pytest.CaptureFixture[str], workdir: Path, tmp_path: Path) -> None:
    (tmp_path / 'prompts.txt').write_text('It is\nShe\n')
    options = (f'--prompt-file={tmp_path}/prompts.txt', '--mode=soft', '--max-tokens=5', '--temperature=1', '--json')
    lines = told(capsys, f'--workdir={workdir}', *options, '--num-samples=2', '--seed=3').splitlines()
    found = [json.loads(line) for line in lines]
    assert [line['prompt'] for line in found] == ['It is', 'It is', 'She', 'She']
    expected = fbt_jax.generate(
        fbt_jax.load_run(str(workdir)),
        ['It is', 'She'],
        mode='soft',
        max_tokens=5,
        temperature=1.0,
        num_samples=2,
        seed=3,
    )
    assert [line['tokens'] for line in found] == expected.tokens
    assert [line['text'] for line in found] == expected.texts
    assert all(len(line['log_probs']) == len(line['tokens']) for line in found)


def test_a_conversation_goes_on_after_a_mistake(
    capsys: pytest.CaptureFixture[str], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = io.BytesIO(b'It is\n' + b'x' * 300 + b'\nno UTF-8: \xff\nShe\n')
    monkeypatch.setattr('sys.stdin', io.TextIOWrapper(lines, encoding='utf-8', errors='strict'))
    assert main(['generate', f'--workdir={workdir}', '--interactive', '--mode=soft', '--max-tokens=3']) == 0
    out, err = capsys.readouterr()
    assert out.count('> ') == 5
    assert err.splitlines() == [
        'a prompt of 301 tokens and max_tokens = 3 are more than the trained context of 256',
        r"prompt = 'no UTF-8: \udcff': is not UTF-8",
    ]


@pytest.mark.parametrize(
    ('arguments', 'line'),
    [
        (('--prompt=a', '--mode=soft', '--max-tokens=0'), 'max_tokens = 0: must be at least 1'),
        (('--prompt=a', '--mode=soft', '--fused-passes=2'), '--fused-passes=2: has no effect with --mode=soft'),
        (('--prompt-file=/no/file', '--mode=soft'), '--prompt-file=/no/file: No such file or directory'),
        (('--prompt=a', '--mode=soft', '--step=99'), 'step = 99: '),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], workdir: Path, arguments: tuple[str, ...], line: str
) -> None:
    err = told(capsys, f'--workdir={workdir}', *arguments, status=2)
    assert err.startswith(f'fbt generate: {line}')
    assert err.count('\n') == 1
