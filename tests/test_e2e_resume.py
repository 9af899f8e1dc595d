"""Runs that are killed, stopped, damaged or broken, and started again: nothing shows the seam, and nothing lies."""

import contextlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers_e2e import (
    PLAIN,
    TEXT,
    checkpoint_bits,
    checkpoint_done,
    finish,
    rows,
    send_when,
    snapshot,
    start,
    start_training,
    tensorboard_scalars,
    train,
    train_rows_written,
    unfinished_saves,
    without_times,
    write_config,
)

from fbt_jax import load_run
from fbt_jax.training.integrity import named_leaves

STEPS, EVAL_EVERY, CHECKPOINT_EVERY = 60, 10, 7
COMPILED, FIRST_STEP = r'compiled in ([\d.]+) s', r'first step done ([\d.]+) s after'


@pytest.fixture(scope='module')
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp('config'))


@pytest.fixture(scope='module')
def unbroken(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp('unbroken') / 'run'
    train(config, workdir)
    return workdir


def assert_same_run(workdir: Path, unbroken: Path) -> None:
    """Rows (so none lost, none doubled) and the last checkpoint, to the bit."""
    assert without_times(rows(workdir)) == without_times(rows(unbroken))
    assert checkpoint_bits(workdir) == checkpoint_bits(unbroken)
    ours, theirs = named_leaves(load_run(str(workdir)).params), named_leaves(load_run(str(unbroken)).params)
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        np.testing.assert_array_equal(leaf, theirs[name], err_msg=name)


def kill(config: Path, workdir: Path, moment: Callable[[], bool]) -> bool:
    process = start_training(config, workdir)
    hit = send_when(process, moment, signal.SIGKILL)
    result = finish(process)
    assert result.status == (137 if hit else 0), result.text
    return hit


def kill_in_mid_save(config: Path, workdir: Path) -> None:
    """Kills while Orbax's unfinished folder is there; a save that was quicker than the look is followed by a next."""
    for _ in range(5):
        assert kill(config, workdir, lambda: bool(unfinished_saves(workdir))), 'the run ended before a save was caught'
        if unfinished_saves(workdir):
            return
    raise AssertionError('no save was caught in five attempts')


def test_the_unbroken_run_samples_passes_and_has_each_row_once(unbroken: Path) -> None:
    run_rows = rows(unbroken)
    train_rows = [row for row in run_rows if row['split'] == 'train']
    assert [row['step'] for row in train_rows] == list(range(1, STEPS + 1))
    assert [r['step'] for r in run_rows if r['split'] == 'validation'] == list(range(EVAL_EVERY, STEPS + 1, EVAL_EVERY))
    assert {row['passes'] for row in train_rows} == {1, 2}  # or resuming would not be put to the test
    tokens = np.arange(1, STEPS + 1) * 8 * 12
    assert [row['tokens'] for row in train_rows] == tokens.tolist()
    assert [row['token_passes'] for row in train_rows] == np.cumsum([8 * 12 * r['passes'] for r in train_rows]).tolist()


def test_sigkill_at_any_moment_changes_nothing(config: Path, unbroken: Path, tmp_path: Path) -> None:
    workdir = tmp_path / 'run'
    kill(config, workdir, lambda: (workdir / 'config.json').exists())  # start-up: nothing else there yet
    kill(config, workdir, train_rows_written(workdir, 4))  # before the first checkpoint and evaluation
    assert not list((workdir / 'checkpoints').glob('7'))
    kill_in_mid_save(config, workdir)
    kill(config, workdir, checkpoint_done(workdir, 35))
    kill(config, workdir, train_rows_written(workdir, 50))  # in mid-evaluation
    result = train(config, workdir)
    assert re.search(r'resuming .* from step (35|42|49)\n', result.out), result.text
    assert_same_run(workdir, unbroken)
    assert tensorboard_scalars(workdir).keys() == tensorboard_scalars(unbroken).keys()
    for name, values in tensorboard_scalars(unbroken).items():
        if not name.endswith(('tokens_per_second', 'step_seconds')):
            assert tensorboard_scalars(workdir)[name] == values, name


@pytest.mark.slow
@pytest.mark.parametrize('seed', [0, 1])
def test_sigkill_at_random_moments_changes_nothing(config: Path, unbroken: Path, tmp_path: Path, seed: int) -> None:
    """Kills after random rows, after random times, and in saves, until eight attempts were killed; then to the end."""
    workdir = tmp_path / 'run'
    draw = random.Random(seed)
    step = 0
    for _ in range(8):
        choice = draw.random()
        if choice < 0.25:
            with contextlib.suppress(AssertionError):  # no save left to catch
                kill_in_mid_save(config, workdir)
        elif choice < 0.5:
            end = time.monotonic() + draw.uniform(0.1, 12)
            kill(config, workdir, lambda end=end: time.monotonic() > end)
        else:
            step = min(STEPS - 1, step + draw.randint(1, 14))
            kill(config, workdir, train_rows_written(workdir, step))
    train(config, workdir)
    assert_same_run(workdir, unbroken)


def test_sigterm_and_sigint_save_and_leave(config: Path, unbroken: Path, tmp_path: Path) -> None:
    """Stopped while it compiles, in mid-evaluation (the last one too) and between steps."""
    workdir = tmp_path / 'run'

    def stop(number: int, moment: Callable[[], bool]) -> int:
        process = start_training(config, workdir)
        assert send_when(process, moment, number)
        result = finish(process)
        assert result.status == 128 + number, result.text
        assert result.err == '', result.text
        last = result.out.splitlines()[-1]
        words = f'stopped by {signal.Signals(number).name}: checkpoint (\\d+) saved in {re.escape(str(workdir))}; '
        found = re.fullmatch(words + 'the same command resumes', last)
        assert found, result.text
        assert max(int(path.name) for path in (workdir / 'checkpoints').iterdir()) == int(found[1])
        return int(found[1])

    def evaluated() -> list[int]:
        return [row['step'] for row in rows(workdir) if row['split'] == 'validation']

    # metrics.jsonl is made just before the compilation.
    assert stop(signal.SIGTERM, lambda: (workdir / 'metrics.jsonl').exists()) == 0
    assert rows(workdir) == []
    assert stop(signal.SIGINT, train_rows_written(workdir, 10)) == 10
    assert evaluated() == []
    assert stop(signal.SIGHUP, train_rows_written(workdir, 23)) in range(23, STEPS)
    assert evaluated()[:2] == [10, 20]
    assert stop(signal.SIGTERM, train_rows_written(workdir, STEPS)) == STEPS
    assert STEPS not in evaluated()
    result = train(config, workdir)
    assert f'resuming {workdir} from step {STEPS}' in result.out
    assert_same_run(workdir, unbroken)


def test_a_signal_sent_twice_at_once_counts_once(config: Path, tmp_path: Path) -> None:
    """As Slurm does at a time limit: the checkpoint is saved all the same."""
    workdir = tmp_path / 'run'
    process = start_training(config, workdir)
    assert send_when(process, train_rows_written(workdir, 8), signal.SIGTERM)
    for _ in range(3):
        time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
    result = finish(process)
    assert result.status == 143, result.text
    saved = re.search(r'checkpoint (\d+) saved', result.out)
    assert saved, result.text
    assert checkpoint_done(workdir, int(saved[1]))()


def test_a_later_signal_ends_the_process_at_once() -> None:
    code = """
import os, signal, time
from fbt_jax.training.signals import REPEAT_SECONDS, StopSignals
with StopSignals():
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    print('still here', flush=True)
    time.sleep(REPEAT_SECONDS + 0.1)
    os.kill(os.getpid(), signal.SIGINT)
    print('and here')
"""
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == 'still here\n'


def test_a_signal_in_the_final_table_says_that_the_run_is_complete(
    config: Path, unbroken: Path, tmp_path: Path
) -> None:
    workdir = shutil.copytree(unbroken, tmp_path / 'run')
    before = snapshot(workdir)
    process = start_training(config, workdir)
    assert process.stdout is not None
    assert any('has done its' in line for line in process.stdout)  # the table comes next
    process.send_signal(signal.SIGTERM)
    result = finish(process)
    assert result.status == 143, result.text
    assert result.out.splitlines()[-1] == (
        f'stopped by SIGTERM: the run in {workdir} is complete; the same command prints its table'
    )
    assert snapshot(workdir) == before


def test_a_finished_run_keeps_the_record_of_how_it_was_trained(config: Path, unbroken: Path) -> None:
    """No step is taken, so config.json must not name other settings; and steps that were taken can't be untaken."""
    before = snapshot(unbroken)
    assert 'has done its' in train(config, unbroken, '--config.optimizer.clip_norm=9.0').out
    result = train(config, unbroken, f'--config.training.steps={STEPS - 1}', status=2)
    assert f'training.steps = {STEPS - 1}: the run in {unbroken} has done {STEPS} already' in result.text
    assert snapshot(unbroken) == before


def test_a_finished_run_is_left_as_it_is(config: Path, unbroken: Path) -> None:
    before = snapshot(unbroken)
    out = train(config, unbroken).out
    assert f'{unbroken} has done its {STEPS} steps already' in out
    table = out[out.index('validation, all 1024 rows:') :]
    last = rows(unbroken)[-1]
    assert re.search(rf'\n +1 +{last["loss_pass_1"]:.4f} ', table), table  # this evaluation read the same rows
    assert re.search(rf'\n +4 +{last["loss_pass_4"]:.4f} .* {last["update_norm_4"]:.4f}\n', table), table
    assert re.search(r'\n +30 ', table)
    assert f'{STEPS * 96:,} tokens' in table
    after = snapshot(unbroken)
    assert after.keys() == before.keys()
    assert {k: v for k, (_, v) in after.items()} == {k: v for k, (_, v) in before.items()}


def test_a_corrupt_newest_checkpoint_costs_steps_and_nothing_else(config: Path, unbroken: Path, tmp_path: Path) -> None:
    workdir = shutil.copytree(unbroken, tmp_path / 'run')
    largest = max((workdir / f'checkpoints/{STEPS}/state').rglob('*'), key=lambda p: p.is_file() and p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    result = train(config, workdir)
    assert f'checkpoint {STEPS} cannot be read and was moved to {workdir}/corrupt_checkpoints/{STEPS}' in result.out
    assert f'resuming {workdir} from step 56\n' in result.out
    assert_same_run(workdir, unbroken)


def test_a_run_without_a_readable_checkpoint_does_not_start_over(config: Path, unbroken: Path, tmp_path: Path) -> None:
    workdir = shutil.copytree(unbroken, tmp_path / 'run')
    for path in (workdir / 'checkpoints').glob('*/meta/metadata'):
        path.write_text('{')
    before = snapshot(workdir / 'checkpoints')
    result = train(config, workdir, status=1)
    assert re.fullmatch(r'fbt train: none of the checkpoints in \S+ can be read \(.*\)', result.err), result.text
    assert snapshot(workdir / 'checkpoints') == before


def test_a_damaged_metrics_file_is_told_in_one_line(config: Path, unbroken: Path, tmp_path: Path) -> None:
    workdir = shutil.copytree(unbroken, tmp_path / 'run')
    path = workdir / 'metrics.jsonl'
    path.write_text(path.read_text().replace('"split": "train"', '"split: "train"', 1))
    damaged = path.read_bytes()
    result = train(config, workdir, status=1)
    assert re.fullmatch(rf'fbt train: {path}: line 1 is not a row of metrics: .*', result.err), result.text
    assert path.read_bytes() == damaged


def test_a_failed_save_is_a_failed_run(config: Path, tmp_path: Path) -> None:
    """A file where the checkpoints' folder was. (A folder that is merely removed between two saves is made anew.)"""
    workdir = tmp_path / 'run'
    endless = ('--config.training.eval_every=100000', '--config.training.steps=100000')
    process = start_training(config, workdir, *PLAIN, *endless)
    deadline = time.monotonic() + 120
    while not checkpoint_done(workdir, 7)():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    for _ in range(100):  # a save in progress may put files in while they are removed
        shutil.rmtree(workdir / 'checkpoints', ignore_errors=True)
        if not (workdir / 'checkpoints').exists():
            break
    (workdir / 'checkpoints').write_text('')
    result = finish(process)
    assert result.status == 1, result.text
    # TensorStore's abandoned writes may complain beside it.
    line = rf'^fbt train: saving the checkpoint {workdir}/checkpoints/\d+ failed: .*$'
    assert len(re.findall(line, result.err, re.MULTILINE)) == 1, result.text


def test_ten_non_finite_steps_stop_the_run(config: Path, tmp_path: Path) -> None:
    """A learning rate that overflows the activations: step 1 is applied, all after it are left out."""
    workdir = tmp_path / 'run'
    overrides = ('--config.optimizer.adam_learning_rate=1e38', '--config.training.checkpoint_every=3')
    overrides += ('--config.optimizer.warmup_steps=0',)
    result = train(config, workdir, *PLAIN, *overrides, status=1)
    told = re.findall(r'^step (\d+): loss or gradient is not finite; .* \((\d+) in a row\)$', result.out, re.MULTILINE)
    assert [int(count) for _, count in told] == list(range(1, 11)), result.text
    newest = max(int(path.name) for path in (workdir / 'checkpoints').iterdir())
    assert result.err == f'fbt train: 10 steps in a row were not finite; the last good checkpoint is step {newest}'
    first = int(told[0][0])
    saved = checkpoint_bits(workdir, 3), checkpoint_bits(workdir, 9)
    assert first <= 3
    for name, leaf in saved[0].items():
        if name.startswith('params/') or any(moment in name for moment in ('/mu/', '/nu/', '/ema/')):
            assert leaf == saved[1][name], name  # nothing moved in between
    non_finite = [row for row in rows(workdir) if row['step'] >= first]
    assert all(row['grad_norm'] is None for row in non_finite if row['split'] == 'train')
    assert all(np.isfinite(row['loss']) for row in rows(workdir) if row['step'] < first)


def test_profile_steps_leave_a_trace(config: Path, tmp_path: Path) -> None:
    """Also when the last of them is the run's last."""
    workdir = tmp_path / 'run'
    train(config, workdir, *PLAIN, '--config.training.profile_steps=(59, 60)')
    assert len(traces(workdir)) == 1


@pytest.mark.slow
def test_profile_steps_survive_a_stop_and_a_resume_inside_them(config: Path, tmp_path: Path) -> None:
    workdir = tmp_path / 'run'
    overrides = (*PLAIN, '--config.training.profile_steps=(5, 40)')
    process = start_training(config, workdir, *overrides)
    assert send_when(process, train_rows_written(workdir, 20), signal.SIGTERM)
    assert finish(process).status == 143
    assert len(traces(workdir)) == 1
    time.sleep(1.1)  # traces are named by the second
    process = start_training(config, workdir, *overrides)
    assert send_when(process, train_rows_written(workdir, 50), signal.SIGTERM)
    assert finish(process).status == 143
    assert len(traces(workdir)) == 2
    train(config, workdir, *overrides)  # after the window: no trace, no complaint
    assert len(traces(workdir)) == 2


def traces(workdir: Path) -> list[Path]:
    found = list((workdir / 'tensorboard/plugins/profile').glob('*/*.xplane.pb'))
    assert all(b'train_step' in path.read_bytes() for path in found)
    return found


def test_rows_have_the_contracts_fields(config: Path, unbroken: Path, tmp_path: Path) -> None:
    """Text and other rows, train and validation, in the file and in TensorBoard."""
    workdir = tmp_path / 'text'
    train(config, workdir, *PLAIN, *TEXT, '--config.training.steps=4', '--config.optimizer.decay_fraction=0.5')
    assert all(check_fields(row, text=True, eval_passes=1) for row in rows(workdir))
    assert all(check_fields(row, text=False, eval_passes=4) for row in rows(unbroken))  # two more than trained with
    assert ['z_loss' in row for row in rows(workdir)[:4]] == [False, False, True, True]
    for folder in (workdir, unbroken):
        expected: dict[str, dict[int, float]] = {}
        for row in rows(folder):
            for name in row.keys() - {'step', 'split'}:
                expected.setdefault(f'{row["split"]}/{name}', {})[row['step']] = float(np.float32(row[name]))
        assert tensorboard_scalars(folder) == expected


def check_fields(row: dict, *, text: bool, eval_passes: int) -> bool:
    passes = range(1, row['passes'] + 1)
    if row['split'] == 'train':
        expected = {'loss', 'grad_norm', 'learning_rate', 'tokens', 'token_passes', 'tokens_per_second', 'step_seconds'}
        expected |= {f'loss_pass_{i}' for i in passes} | ({'z_loss'} & row.keys()) | ({'mfu'} & row.keys())
        expected |= {'epochs'} if text else set()
    else:
        assert row['passes'] == eval_passes
        names = ('loss_pass', 'perplexity_pass', 'bits_per_byte_pass') if text else ('loss_pass', 'perplexity_pass')
        expected = {f'{name}_{i}' for name in names for i in passes} | {f'update_norm_{i}' for i in passes[1:]}
    assert row.keys() == expected | {'step', 'split', 'passes'}
    return True


@pytest.mark.slow
def test_a_second_start_compiles_nothing(config: Path, tmp_path: Path) -> None:
    """The run's folder keeps the compiled step; the first step comes right after compilation, told in seconds."""
    workdir, extra = tmp_path / 'run', {'JAX_COMPILATION_CACHE_DIR': ''}
    command = ('train', f'--config={config}', f'--workdir={workdir}')
    first = start(*command, extra=extra)
    assert send_when(first, train_rows_written(workdir, 8), signal.SIGTERM)
    results = [finish(first), finish(start(*command, extra=extra))]
    assert [r.status for r in results] == [143, 0], results[1].text
    compiled, done = ([float(re.search(text, r.out)[1]) for r in results] for text in (COMPILED, FIRST_STEP))  # type: ignore[index]
    assert compiled[1] < 0.5 * compiled[0]
    assert done[0] < 1.2 * compiled[0] + 0.5
    assert list((workdir / 'compilation_cache').iterdir())
