"""Several processes as one run: real ones, joined by gloo over loopback. Killed, stopped, resumed in other numbers."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers_e2e import (
    ROOT,
    Result,
    checkpoint_done,
    finish,
    rows,
    send_when,
    start,
    train,
    train_rows_written,
    write_config,
)

pytestmark = pytest.mark.slow

STEPS = 60
# Each of an evaluation's batches waits for all processes several times, which costs more than it computes.
SETTINGS = ('--config.training.eval_every=20', '--config.training.eval_rows=32')
SCRIPT = Path(__file__).parent / 'process_batches.py'


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def environments(count: int) -> list[dict[str, str]]:
    """Of each of `count` processes; none for a single one."""
    if count == 1:
        return [{}]
    where = {'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{free_port()}', 'JAX_NUM_PROCESSES': str(count)}
    return [where | {'JAX_PROCESS_ID': str(index)} for index in range(count)]


def start_all(count: int, verb: str, *arguments: str) -> list[subprocess.Popen]:
    return [start(verb, *arguments, extra=extra) for extra in environments(count)]


def finish_all(processes: list[subprocess.Popen], timeout: float = 300) -> list[Result]:
    try:
        return [finish(process, timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()


def train_all(count: int, config: Path, workdir: Path) -> list[subprocess.Popen]:
    return start_all(count, 'train', f'--config={config}', f'--workdir={workdir}', *SETTINGS)


def signalled(
    processes: list[subprocess.Popen], moment: Callable[[], bool], number: int, whom: list[int]
) -> list[Result]:
    """What all processes came to after those of `whom` got the signal, all within a minute of it."""
    try:
        sent = send_when(processes[whom[0]], moment, number, timeout=240)
        assert sent, '\n'.join(result.text for result in finish_all(processes, 60))
        for index in whom[1:]:
            processes[index].send_signal(number)
        deadline = time.monotonic() + 60
        return [finish(process, timeout=max(1, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope='module')
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp('config'))


@pytest.fixture(scope='module')
def unbroken(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process from the start to the end."""
    workdir = tmp_path_factory.mktemp('unbroken') / 'run'
    train(config, workdir, *SETTINGS)
    return workdir


@pytest.fixture(scope='module')
def killed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Result]]:
    """Two processes, of which the one that is not the primary gets SIGKILL in mid-run."""
    workdir = tmp_path_factory.mktemp('killed') / 'run'
    saved, far = checkpoint_done(workdir, 14), train_rows_written(workdir, 17)
    return workdir, signalled(train_all(2, config, workdir), lambda: saved() and far(), signal.SIGKILL, [1])


@pytest.fixture(scope='module')
def finished(config: Path, killed: tuple[Path, list[Result]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, resumed with four of which one gets SIGTERM, then to the end with one."""
    workdir = shutil.copytree(killed[0], tmp_path_factory.mktemp('finished') / 'run')
    done = newest(workdir)
    four = train_all(4, config, workdir)
    results = signalled(four, train_rows_written(workdir, 35), signal.SIGTERM, [2])
    assert [result.status for result in results] == [143] * 4, '\n'.join(result.text for result in results)
    assert f'from step {done}\n' in results[0].out
    told = re.search(r'stopped by SIGTERM: checkpoint (\d+) saved in ', results[0].out)
    assert told, results[0].text
    assert newest(workdir) == int(told[1])
    assert 35 <= int(told[1]) < STEPS
    assert all('checkpoint' not in result.out for result in results[1:])  # the primary alone speaks
    last = train(config, workdir, *SETTINGS)
    assert f'from step {told[1]}\n' in last.out
    return workdir


def newest(workdir: Path) -> int:
    return max(int(path.name) for path in (workdir / 'checkpoints').iterdir() if path.name.isdigit())


def require_same_losses(workdir: Path, unbroken: Path) -> None:
    """Each step once, in order, with the losses of the unbroken run to 1e-5 and its counts exactly."""
    ours, theirs = rows(workdir), rows(unbroken)
    assert [row['step'] for row in ours if row['split'] == 'train'] == list(range(1, STEPS + 1))
    assert [(row['step'], row['split']) for row in ours] == [(row['step'], row['split']) for row in theirs]
    for our, their in zip(ours, theirs, strict=True):
        for name, value in their.items():
            if name.startswith('loss'):
                assert our[name] == pytest.approx(value, rel=1e-5), (their['step'], name)
            if name in ('passes', 'tokens', 'token_passes', 'learning_rate'):
                assert our[name] == value, (their['step'], name)


def test_when_one_is_killed_the_other_leaves(killed: tuple[Path, list[Result]]) -> None:
    workdir, (survivor, victim) = killed
    assert victim.status == 137
    assert survivor.status not in (0, 137), survivor.text
    assert newest(workdir) >= 14  # what was saved before is still there


def test_other_numbers_of_processes_go_on_where_it_was(finished: Path, unbroken: Path) -> None:
    require_same_losses(finished, unbroken)


def test_evaluate_with_two_prints_what_one_prints(finished: Path) -> None:
    arguments = (f'--workdir={finished}', '--passes=1,2,4')
    [alone] = finish_all(start_all(1, 'evaluate', *arguments))
    first, second = finish_all(start_all(2, 'evaluate', *arguments))
    assert [alone.status, first.status, second.status] == [0, 0, 0], first.text + second.text
    assert alone.out.startswith(f'{finished}, step {STEPS}: 1024 validation rows')
    assert without_gloo(first.out) == alone.out
    assert without_gloo(second.out) == ''


def test_diagnose_and_intervals_with_two_are_those_of_one(finished: Path, tmp_path: Path) -> None:
    """To rounding: two processes add in another order."""
    for verb, passes in (('evaluate', '--passes=1,2'), ('diagnose', '--passes=6')):
        found = []
        for count in (1, 2):
            path = tmp_path / f'{verb}{count}.json'
            results = finish_all(start_all(count, verb, f'--workdir={finished}', passes, f'--json={path}'))
            assert [result.status for result in results] == [0] * count, results[0].text
            found.append(json.loads(path.read_text()))
        one, two = found
        if verb == 'evaluate':
            assert two['intervals']['documents'] == one['intervals']['documents'] == 1024
            assert two['intervals']['loss']['2'] == pytest.approx(one['intervals']['loss']['2'], rel=1e-5)
        else:
            assert (two['positions'], two['verdict']) == (one['positions'], one['verdict'])
            for name in ('loss', 'singular_values', 'rollout_state_norm'):
                assert two[name] == pytest.approx(one[name], rel=1e-3), name


def without_gloo(out: str) -> str:
    """Its C++ prints how many peers it has reached straight to stdout."""
    return ''.join(line for line in out.splitlines(keepends=True) if not line.startswith('[Gloo] '))


def test_both_killed_together_resume_as_two(config: Path, unbroken: Path, tmp_path: Path) -> None:
    """As when a machine loses its power; the two end the run, so their losses are compared to the last."""
    workdir = tmp_path / 'run'
    results = signalled(train_all(2, config, workdir), checkpoint_done(workdir, 28), signal.SIGKILL, [0, 1])
    assert [result.status for result in results] == [137, 137]
    results = finish_all(train_all(2, config, workdir))
    assert [result.status for result in results] == [0, 0], '\n'.join(result.text for result in results)
    assert re.search(r'resuming .* from step (28|35|42)\n', results[0].out)
    require_same_losses(workdir, unbroken)


def test_a_missing_peer_is_told(config: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    extra = environments(2)[0] | {'FBT_START_SECONDS': '10'}
    arguments = (f'--config={config}', f'--workdir={tmp_path}/run')
    result = finish(start('train', *arguments, extra=extra), timeout=60)
    assert time.monotonic() - began < 60
    assert result.status not in (0, 2), result.text
    assert re.search(r'not all of 2 processes \(JAX_NUM_PROCESSES\) met at 127\.0\.0\.1:\d+ within 10 s', result.err), (
        result.text
    )
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    ('change', 'told'),
    [
        ('--config.seed=4', 'seed = 4, but 3 on process 0'),
        ('--config.mesh.tensor=2', 'mesh.tensor = 2, but 1 on process 0'),
        ('--workdir={}/other', "--workdir = '{0}/other', but '{0}/run' on process 0"),
    ],
)
def test_processes_started_differently_are_told_and_leave(config: Path, tmp_path: Path, change: str, told: str) -> None:
    command = ('train', f'--config={config}', f'--workdir={tmp_path}/run')
    both = [
        start(*command, *arguments, extra=extra)
        for arguments, extra in zip(((), (change.format(tmp_path),)), environments(2), strict=True)
    ]
    for result in finish_all(both, timeout=60):
        assert result.status == 2, result.text
        assert f'process 1 was started with {told.format(tmp_path)}\n' in result.err + '\n'
    assert not (tmp_path / 'run').exists()


def test_global_batches_do_not_depend_on_the_processes() -> None:
    """Hashes of the first 5, gathered from 1, 2 and 4 processes."""
    found = {}
    for count in (1, 2, 4):
        started = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT)],
                env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)} | extra,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for extra in environments(count)
        ]
        results = finish_all(started, 120)
        assert [result.status for result in results] == [0] * count, results[0].text
        told = [json.loads(result.out.splitlines()[-1]) for result in results]
        assert [one['processes'] for one in told] == [count] * count
        assert sorted(row for one in told for row in one['rows']) == list(range(8))
        assert all(one['hashes'] == told[0]['hashes'] for one in told)
        found[count] = told[0]['hashes']
    assert len(set(found[1])) == 5
    assert found[2] == found[1]
    assert found[4] == found[1]


# The first process takes longer over the text than a collective waits for a late peer (30 s).
TOKENISING = """
import sys, time
from fbt_jax.training import run_folder
from fbt_jax.cli import main

prepare = run_folder.prepare_sources


def slowly(*args, **kwargs):
    time.sleep(40)
    prepare(*args, **kwargs)


run_folder.prepare_sources = slowly
sys.exit(main(sys.argv[1:]))
"""


def test_the_others_wait_while_the_first_tokenises(tmp_path: Path) -> None:
    (tmp_path / 'a.txt').write_text('It is a truth universally acknowledged. ' * 300)
    config = write_config(tmp_path)
    arguments = [
        'train',
        f'--config={config}',
        f'--config.data.source=text:{tmp_path}/a.txt',
        '--config.data.tokenizer=bytes',
        '--config.data.seq_len=32',
        '--config.training.steps=3',
    ]
    losses = {}
    for count in (1, 2):
        workdir = tmp_path / f'run{count}'
        code = TOKENISING if count > 1 else TOKENISING.replace('time.sleep(40)', '')
        processes = [
            subprocess.Popen(
                [sys.executable, '-c', code, *arguments, f'--workdir={workdir}'],
                cwd=ROOT,
                env=os.environ | {'JAX_PLATFORMS': 'cpu'} | extra,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for extra in environments(count)
        ]
        for result in finish_all(processes):
            assert result.status == 0, result.text
        losses[count] = [row['loss'] for row in rows(workdir) if row['split'] == 'train']
    assert losses[2] == pytest.approx(losses[1], rel=1e-5)
