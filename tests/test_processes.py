"""Joining and sharing out, without other processes: wrong environments, and which rows each of N processes reads."""

import hashlib
import threading
from typing import Any

import jax
import numpy as np
import pytest
from helpers import on_devices
from jax.sharding import NamedSharding

from fbt_jax.batch import Batch
from fbt_jax.config import Config, DataConfig, MeshConfig
from fbt_jax.data import open_data
from fbt_jax.errors import UserError
from fbt_jax.sharding import local_rows, make_mesh
from fbt_jax.training import processes

BY_HAND = {'JAX_COORDINATOR_ADDRESS': '127.0.0.1:1', 'JAX_NUM_PROCESSES': '2', 'JAX_PROCESS_ID': '0'}


@pytest.fixture
def initialised(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each call of jax.distributed.initialize, which does nothing. No launcher's variable is set."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(jax.distributed, 'initialize', lambda **arguments: calls.append(arguments))
    monkeypatch.setattr(processes, 'find_spec', lambda name: None)
    for name in (*BY_HAND, 'SLURM_STEP_NUM_TASKS', 'FBT_START_SECONDS'):
        monkeypatch.delenv(name, raising=False)
    return calls


@pytest.mark.parametrize(
    ('given', 'told'),
    [
        (
            {'JAX_COORDINATOR_ADDRESS': 'a:1'},
            'JAX_COORDINATOR_ADDRESS set, but not JAX_NUM_PROCESSES, JAX_PROCESS_ID',
        ),
        (
            {'JAX_NUM_PROCESSES': '2', 'JAX_PROCESS_ID': '1'},
            'JAX_NUM_PROCESSES, JAX_PROCESS_ID set, but not JAX_COORDINATOR_ADDRESS',
        ),
        (BY_HAND | {'JAX_PROCESS_ID': ''}, 'JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES set, but not JAX_PROCESS_ID'),
        (BY_HAND | {'JAX_NUM_PROCESSES': 'two'}, 'JAX_NUM_PROCESSES and JAX_PROCESS_ID must be numbers'),
        (BY_HAND | {'JAX_PROCESS_ID': '0.5'}, 'JAX_NUM_PROCESSES and JAX_PROCESS_ID must be numbers'),
        (BY_HAND | {'JAX_PROCESS_ID': '2'}, 'JAX_PROCESS_ID = 2: must lie in 0..1 (JAX_NUM_PROCESSES = 2)'),
        (BY_HAND | {'JAX_PROCESS_ID': '-1'}, 'JAX_PROCESS_ID = -1: must lie in 0..1 (JAX_NUM_PROCESSES = 2)'),
    ],
)
def test_a_wrong_environment_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, initialised: list[dict[str, Any]], given: dict[str, str], told: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as info:
        processes.join()
    assert str(info.value) == told
    assert initialised == []


def test_alone_nothing_is_joined(monkeypatch: pytest.MonkeyPatch, initialised: list[dict[str, Any]]) -> None:
    """Nor in a Slurm step of one task."""
    processes.join()
    monkeypatch.setenv('SLURM_STEP_NUM_TASKS', '1')
    processes.join()
    assert initialised == []


def test_what_is_given_reaches_jax(monkeypatch: pytest.MonkeyPatch, initialised: list[dict[str, Any]]) -> None:
    """By hand JAX looks for no cluster of its own; under Slurm it is left to find all."""
    for name, value in (BY_HAND | {'JAX_PROCESS_ID': '1', 'FBT_START_SECONDS': '7'}).items():
        monkeypatch.setenv(name, value)
    processes.join()
    limits = {'heartbeat_timeout_seconds': 30, 'initialization_timeout': 74}  # past the 7 s that `join` itself waits
    by_hand = {'num_processes': 2, 'process_id': 1, 'cluster_detection_method': 'deactivate'}
    assert initialised == [by_hand | limits]
    for name in BY_HAND:
        monkeypatch.delenv(name)
    monkeypatch.setenv('SLURM_STEP_NUM_TASKS', '4')
    processes.join()
    assert initialised[1:] == [limits]


def test_missing_peers_are_told_with_what_was_expected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()
    statuses: list[int] = []

    def leave(status: int) -> None:
        statuses.append(status)
        ended.set()

    monkeypatch.setattr(processes, 'exit_now', leave)
    monkeypatch.setattr(jax.distributed, 'initialize', lambda **_: ended.wait(20))
    for name, value in (BY_HAND | {'FBT_START_SECONDS': '1'}).items():
        monkeypatch.setenv(name, value)
    processes.join()
    assert statuses == [1]
    assert capsys.readouterr().err == (
        'fbt: not all of 2 processes (JAX_NUM_PROCESSES) met at 127.0.0.1:1 within 1 s; look whether each was started '
        'and can reach it\n'
    )


def test_on_primary_of_one_process_is_the_work_itself() -> None:
    done = []
    processes.on_primary(lambda: done.append(1))
    assert done == [1]

    def fail() -> None:
        raise KeyError('x')

    with pytest.raises(KeyError):  # as it was raised, whatever it is
        processes.on_primary(fail)
    assert processes.is_primary()
    assert processes.everywhere(True)
    assert not processes.everywhere(False)
    assert processes.prefix() == ''
    assert processes.count() == 1


# Which rows a process reads

MESHES = ((1, 8, 1, 1), (8, 1, 1, 1), (2, 2, 2, 1), (1, 4, 1, 2), (1, 2, 2, 2), (1, 1, 1, 8))
CONFIG = Config(data=DataConfig(tokenizer='bytes', seq_len=96, batch_size=8))


def rows_of_processes() -> dict[str, Any]:
    """{mesh: {N: rows of each of N processes}}, N processes of 8 / N neighbouring fake devices each."""
    found: dict[str, Any] = {}
    whole_map = NamedSharding.devices_indices_map
    for sizes in MESHES:
        mesh = make_mesh(MeshConfig(1, *sizes))
        by_count = found[','.join(map(str, sizes))] = {}
        for count in (1, 2, 4):
            by_count[count] = []
            for process in range(count):
                own = range(process * 8 // count, (process + 1) * 8 // count)

                def addressable(self: Any, shape: Any, own: range = own) -> dict[Any, Any]:
                    return {d: index for d, index in whole_map(self, shape).items() if d.id in own}

                NamedSharding.addressable_devices_indices_map = addressable  # type: ignore[method-assign]
                by_count[count].append(local_rows(mesh, 8))
    return found


@pytest.fixture(scope='module')
def rows() -> dict[str, dict[str, list[list[int]]]]:
    return on_devices(rows_of_processes)


def test_processes_that_split_the_batch_read_each_row_once(rows: dict[str, dict[str, list[list[int]]]]) -> None:
    for sizes in ('1,8,1,1', '8,1,1,1', '1,4,1,2'):
        for count in (1, 2, 4):
            parts = rows[sizes][str(count)]
            assert [len(part) for part in parts] == [8 // count] * count
            assert sorted(row for part in parts for row in part) == list(range(8)), (sizes, count)


def test_processes_that_share_rows_read_them_all(rows: dict[str, dict[str, list[list[int]]]]) -> None:
    """Where `tensor` or `context` reaches over processes, these hold parts of the same rows: complete, ascending."""
    for sizes, by_count in rows.items():
        for parts in by_count.values():
            assert {row for part in parts for row in part} == set(range(8)), sizes
            assert all(part == sorted(set(part)) for part in parts)
    assert rows['1,1,1,8']['4'] == [list(range(8))] * 4
    assert rows['1,2,2,2']['4'] == [list(range(4))] * 2 + [list(range(4, 8))] * 2


@pytest.mark.parametrize('count', [1, 2, 4])
def test_batches_of_the_processes_make_up_the_global_ones(
    rows: dict[str, dict[str, list[list[int]]]], count: int
) -> None:
    """Hashes of 5 batches, put together from what each process's own iterator gives."""
    data = open_data(CONFIG)
    whole = data.train_iterator()
    expected = [digest(next(whole)) for _ in range(5)]
    whole.close()
    for sizes in ('1,8,1,1', '2,2,2,1'):
        parts = rows[sizes][str(count)]
        iterators = [data.train_iterator(part) for part in parts]
        found = []
        for _ in range(5):
            arrays = [np.full_like(x, -1, shape=(8, 96)) for x in data.validation['validation'].batch([0])]
            for part, iterator in zip(parts, iterators, strict=True):
                for array, local in zip(arrays, next(iterator), strict=True):
                    assert local.shape == (len(part), 96)
                    array[part] = local
            found.append(digest(Batch(*arrays)))
        for iterator in iterators:
            assert iterator.get_state() == {'next_index': 5}  # the position is global, whatever a process reads
            iterator.close()
        assert found == expected
    assert len(set(expected)) == 5


def digest(batch: Batch) -> str:
    return hashlib.sha256(b''.join(np.ascontiguousarray(x).tobytes() for x in batch)).hexdigest()
