"""`init.from`: a run with feedback from one without. What is taken, what is new, what goes on, and what is refused."""

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers_e2e import (
    PLAIN,
    checkpoint_bits,
    checkpoint_done,
    finish,
    rows,
    send_when,
    snapshot,
    start_training,
    train,
    train_rows_written,
    without_times,
    write_config,
)

from fbt_jax.cli import main

SOURCE_STEPS = 20
SHORT = f'--config.training.steps={SOURCE_STEPS}'


@pytest.fixture(scope='module')
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp('config'))


@pytest.fixture(scope='module')
def source(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 steps without feedback."""
    workdir = tmp_path_factory.mktemp('source') / 'run'
    train(config, workdir, *PLAIN, SHORT)
    return workdir


def started(config: Path, source: Path, workdir: Path, *overrides: str) -> str:
    """What a run from `source` says that is stopped as it begins: its checkpoint 0 is what it began with."""
    process = start_training(config, workdir, f'--config.init.from={source}', *overrides)
    assert send_when(process, lambda: (workdir / 'metrics.jsonl').exists(), signal.SIGTERM)
    result = finish(process)
    assert result.status == 143, result.text
    return result.out


def named(bits: dict, *sections: str) -> dict:
    return {name: leaf for name, leaf in bits.items() if name.split('/')[0] in sections}


@pytest.fixture(scope='module')
def feedback(config: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with feedback as it stands before its first step, and what it said."""
    workdir = tmp_path_factory.mktemp('feedback') / 'run'
    out = started(config, source, workdir)
    return workdir, out


@pytest.fixture(scope='module')
def finished(config: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The same to its end."""
    workdir = tmp_path_factory.mktemp('finished') / 'run'
    return workdir, train(config, workdir, f'--config.init.from={source}').out


def test_all_is_taken_but_the_fusion(source: Path, feedback: tuple[Path, str]) -> None:
    """Parameters, moments and counters to the bit; the fusion's from the initialiser, told by name."""
    workdir, out = feedback
    theirs, ours = checkpoint_bits(source), checkpoint_bits(workdir, 0)
    theirs, ours = named(theirs, 'params', 'opt_state'), named(ours, 'params', 'opt_state')
    new = ours.keys() - theirs.keys()
    assert {name for name in new if name.startswith('params/')} == {
        'params/fusion/gate/kernel',
        'params/fusion/state/kernel',
    }
    assert all('/fusion/' in name for name in new)
    assert theirs.keys() <= ours.keys()
    for name, leaf in theirs.items():
        assert ours[name] == leaf, name
    moments = [np.frombuffer(theirs[name][2], theirs[name][0]) for name in theirs if '/mu/' in name or '/ema/' in name]
    assert len(moments) > 10
    assert all(moment.any() for moment in moments)  # carried moments, then, not those of a fresh start

    assert f'init.from {source}, step {SOURCE_STEPS}: took {len(theirs)} arrays\n' in out
    initialised = re.search(r'^  initialised: (.*)$', out, re.MULTILINE)[1].split(', ')
    assert sorted(initialised) == sorted(new)
    assert '\n  left in the source: nothing\n' in out
    assert '\n  schedule: restart, data: restart, optimizer state: taken\n' in out


def test_the_fusion_is_that_of_a_fresh_start(config: Path, feedback: tuple[Path, str], tmp_path: Path) -> None:
    workdir = tmp_path / 'fresh'
    process = start_training(config, workdir)
    assert send_when(process, lambda: (workdir / 'metrics.jsonl').exists(), signal.SIGTERM)
    assert finish(process).status == 143
    fresh, ours = checkpoint_bits(workdir, 0), checkpoint_bits(feedback[0], 0)
    for name in ('params/fusion/gate/kernel', 'params/fusion/state/kernel'):
        assert ours[name] == fresh[name]
    assert ours['params/embedding'] != fresh['params/embedding']


def test_it_begins_with_the_sources_loss(
    capsys: pytest.CaptureFixture[str],
    source: Path,
    feedback: tuple[Path, str],
    finished: tuple[Path, str],
    tmp_path: Path,
) -> None:
    """Of one pass: as training tells it, and to the last digit in `fbt evaluate`."""
    last = [row for row in rows(source) if row['split'] == 'validation'][-1]
    assert last['step'] == SOURCE_STEPS
    told = re.search(r'validation loss after one pass, before the first step: (\d+\.\d{6}) nats/token', finished[1])
    assert float(told[1]) == pytest.approx(last['loss_pass_1'], abs=6e-7)  # six digits, and float32's seven
    for name, folder in (('source', source), ('feedback', feedback[0])):
        assert main(['evaluate', f'--workdir={folder}', '--passes=1', f'--json={tmp_path}/{name}.json']) == 0
    capsys.readouterr()
    theirs, ours = (json.loads((tmp_path / f'{name}.json').read_text()) for name in ('source', 'feedback'))
    assert ours['loss_pass_1'] == theirs['loss_pass_1']
    assert ours['step'] == 0


def test_restarting_schedule_and_data(feedback: tuple[Path, str], finished: tuple[Path, str]) -> None:
    """Step, tally and data position begin anew: the default."""
    bits = checkpoint_bits(feedback[0], 0)
    assert bits['data_position'] == {'next_index': 0}
    assert (bits['meta']['tokens'], bits['meta']['token_passes']) == (0, 0)
    train_rows = [row for row in rows(finished[0]) if row['split'] == 'train']
    assert [row['step'] for row in train_rows] == list(range(1, 61))
    assert [row['tokens'] for row in train_rows] == [96 * step for step in range(1, 61)]
    assert [row['learning_rate'] for row in train_rows[:5]] == pytest.approx([0.01 * (i + 1) / 5 for i in range(5)])
    assert {row['passes'] for row in train_rows} == {1, 2}


@pytest.mark.slow
def test_going_on_is_as_if_the_source_had_gone_on(config: Path, source: Path, tmp_path: Path) -> None:
    """Schedule and data continued, the model the same: rows and weights of the source, resumed to more steps."""
    longer = '--config.training.steps=30'
    resumed = shutil.copytree(source, tmp_path / 'resumed')
    train(config, resumed, *PLAIN, longer)
    going_on = ('--config.init.schedule=continue', '--config.init.data=continue')
    result = train(config, tmp_path / 'run', *PLAIN, longer, f'--config.init.from={source}', *going_on)
    assert 'schedule: continue, data: continue, optimizer state: taken' in result.out
    new_rows = [row for row in without_times(rows(resumed)) if row['step'] > SOURCE_STEPS]
    assert new_rows[0]['step'] == 21
    assert new_rows[0]['tokens'] == 21 * 96
    ours = [row for row in without_times(rows(tmp_path / 'run')) if row['step'] > SOURCE_STEPS]
    assert ours == new_rows
    assert checkpoint_bits(tmp_path / 'run', 30) == checkpoint_bits(resumed, 30)


@pytest.mark.slow
def test_data_goes_on_while_the_schedule_restarts(config: Path, source: Path, tmp_path: Path) -> None:
    out = started(config, source, tmp_path / 'run', '--config.init.data=continue', '--config.init.optimizer=False')
    bits = checkpoint_bits(tmp_path / 'run', 0)
    assert bits['data_position'] == checkpoint_bits(source)['data_position'] == {'next_index': 20}
    assert bits['meta']['tokens'] == 0
    assert 'schedule: restart, data: continue, optimizer state: new' in out
    moments = [np.frombuffer(leaf[2], leaf[0]) for name, leaf in bits.items() if '/mu/' in name or '/ema/' in name]
    assert len(moments) > 10
    assert not any(moment.any() for moment in moments)
    theirs = named(checkpoint_bits(source), 'params')
    assert {name: leaf for name, leaf in named(bits, 'params').items() if '/fusion/' not in name} == theirs


@pytest.mark.slow
def test_a_killed_start_begins_again_and_a_resume_needs_no_source(
    config: Path, source: Path, finished: tuple[Path, str], tmp_path: Path
) -> None:
    """Before the first checkpoint the source is read again; after it, it may be gone."""
    gone = shutil.copytree(source, tmp_path / 'gone')
    workdir, override = tmp_path / 'run', f'--config.init.from={gone}'

    def kill(moment: Callable[[], bool]) -> None:
        process = start_training(config, workdir, override)
        assert send_when(process, moment, signal.SIGKILL)
        assert finish(process).status == 137

    kill(train_rows_written(workdir, 3))
    kill(checkpoint_done(workdir, 14))
    shutil.rmtree(gone)
    result = train(config, workdir, override)
    assert re.search(r'resuming .* from step (14|21|28|35|42|49|56)\n', result.out)
    assert without_times(rows(workdir)) == without_times(rows(finished[0]))
    assert checkpoint_bits(workdir) == checkpoint_bits(finished[0])


@pytest.mark.parametrize(
    ('overrides', 'told'),
    [
        (
            ['--config.model.width=32'],
            r'init\.from = \S+: does not fit this model: params/embedding \(128, 16\) for \(128, 32\), .* and \d+ more',
        ),
        (['--config.model.num_layers=2'], r'params/layers/attention_norm/scale \(1, 16\) for \(2, 16\)'),
        (
            ['--config.init.data=continue', '--config.seed=4'],
            r"init\.data = 'continue': the data order of \S+ differs: seed is 4, was 3",
        ),
        (['--config.init.data=continue', '--config.data.batch_size=4'], r'data\.batch_size is 4, was 8'),
        (
            ['--config.init.schedule=continue', SHORT],
            r"training\.steps = 20: with init\.schedule = 'continue' the run goes on from step 20",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_created(
    capsys: pytest.CaptureFixture[str], config: Path, source: Path, tmp_path: Path, overrides: list[str], told: str
) -> None:
    before = snapshot(source)
    workdir = tmp_path / 'run'
    arguments = ['train', f'--config={config}', f'--workdir={workdir}', f'--config.init.from={source}', *overrides]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ''
    assert re.fullmatch(rf'fbt train: [^\n]*{told}[^\n]*\n', err), err
    assert not workdir.exists()
    assert snapshot(source) == before


def test_a_damaged_source_is_a_failure(
    capsys: pytest.CaptureFixture[str], config: Path, source: Path, tmp_path: Path
) -> None:
    damaged = shutil.copytree(source, tmp_path / 'damaged')
    (damaged / f'checkpoints/{SOURCE_STEPS}/meta/metadata').write_text('{')
    workdir = tmp_path / 'run'
    assert main(['train', f'--config={config}', f'--workdir={workdir}', f'--config.init.from={damaged}']) == 1
    assert re.fullmatch(
        rf'fbt train: checkpoint {SOURCE_STEPS} in {damaged} cannot be read \(.*\); other steps: 7, 14\n',
        capsys.readouterr().err,
    )
    assert not workdir.exists()
