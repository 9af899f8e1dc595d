"""The recipes in launch/: local processes, Slurm, GKE, TPU pods. Mostly with made-up commands in place of `fbt`."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers_e2e import ROOT, Result, checkpoint_done, rows, train_rows_written, write_config

LAUNCH = ROOT / 'launch'
LOCAL = LAUNCH / 'local_processes.sh'
POD = LAUNCH / 'tpu_pod.sh'

# Stands for `fbt`: notes what it was given and each SIGTERM, then does what its last argument says for its process.
FAKE = """
import json, os, pathlib, signal, sys, time
index = os.environ['JAX_PROCESS_ID']
here = pathlib.Path(__file__).parent
def note(kind, what):
    with (here / f'{kind}_{index}').open('a') as file:
        file.write(json.dumps(what) + chr(10))
def stop(number, frame):
    note('signals', number)
    if deed != 'deaf':
        time.sleep(0.3)
        print('saved')
        sys.exit(143)
deeds = dict(item.split(':') for item in sys.argv[-1].split(','))
deed = deeds.get(index, deeds.get('all'))
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
names = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID', 'JAX_PLATFORMS', 'XLA_FLAGS')
note('started', {'pid': os.getpid(), 'cwd': os.getcwd(), 'argv': sys.argv[1:]} | {n: os.environ.get(n) for n in names})
print(f'this is process {index}', flush=True)
while deed in ('stay', 'deaf'):
    time.sleep(0.05)
sys.exit(int(deed))
"""


class Local:
    """`local_processes.sh`, started from another folder than the repository's, as leader of a process group."""

    def __init__(self, folder: Path, *options: str, count: int, arguments: tuple[str, ...], fake: bool = True) -> None:
        self.folder = folder
        (folder / 'fake.py').write_text(FAKE)
        python = f'{sys.executable} {folder / "fake.py"}' if fake else f'{sys.executable} -m fbt_jax'
        compiled = {  # so that the second start of a real run compiles nothing
            'JAX_COMPILATION_CACHE_DIR': str(folder / 'compiled'),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
            'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
        }
        self.process = subprocess.Popen(
            [LOCAL, f'--logs={folder / "logs"}', *options, str(count), '--', *arguments],
            env=os.environ | {'FBT': python, 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': '', **compiled},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, timeout: float = 60) -> Result:
        try:
            out, err = self.process.communicate(timeout=timeout)
        finally:
            if self.process.poll() is None:
                self.process.terminate()
                self.process.wait(20)
        return Result(self.process.returncode, out, err)

    def notes(self, kind: str, index: int) -> list[Any]:
        path = self.folder / f'{kind}_{index}'
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ('arguments', 'told'),
    [
        ((), 'the number of processes is missing'),
        (('0', '--', 'x'), '0: must be a number of processes'),
        (('two', '--', 'x'), 'two: must be a number of processes'),
        (('2',), 'the arguments of fbt train are missing'),
        (('2', '--'), 'the arguments of fbt train are missing'),
        (('2', '--workdir=x'), 'unknown option --workdir=x'),
        (('2', '3', '--', 'x'), 'unexpected 3'),
        (('--devices=none', '2', '--', 'x'), '--devices=none: must be a number of devices'),
        (('--grace=0', '2', '--', 'x'), '--grace=0: must be a number of seconds'),
    ],
)
def test_local_tells_wrong_arguments(arguments: tuple[str, ...], told: str) -> None:
    result = subprocess.run([LOCAL, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ''
    assert told in result.stderr.splitlines()[0]
    assert 'usage: local_processes.sh' in result.stderr


def test_local_tells_a_missing_command() -> None:
    environment = os.environ | {'FBT': 'no_such_command'}
    result = subprocess.run([LOCAL, '1', '--', 'x'], env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, 'no_such_command: no such command' in result.stderr) == (2, True)


def test_local_gives_each_process_its_place(tmp_path: Path) -> None:
    run = Local(tmp_path, '--devices=3', count=3, arguments=('--workdir=a b', 'all:0'))
    result = run.finish()
    assert result.status == 0, result.text
    given = [run.notes('started', i)[0] for i in range(3)]
    assert [one['JAX_PROCESS_ID'] for one in given] == ['0', '1', '2']
    assert {one['JAX_NUM_PROCESSES'] for one in given} == {'3'}
    (address,) = {one['JAX_COORDINATOR_ADDRESS'] for one in given}
    assert address.startswith('127.0.0.1:')
    for one in given:
        assert one['argv'] == ['train', '--workdir=a b', 'all:0']
        assert one['cwd'] == str(tmp_path)
        assert '--xla_force_host_platform_device_count=3' in one['XLA_FLAGS']
        assert one['JAX_PLATFORMS'] == 'cpu'
    assert 'this is process 0' in result.out
    assert 'this is process 1' not in result.out
    for i in range(3):
        assert (tmp_path / 'logs' / f'process_{i}.log').read_text() == f'this is process {i}\n'


@pytest.mark.parametrize(('deeds', 'status'), [('all:2', 2), ('0:0,1:5', 5), ('0:1,1:0', 1)])
def test_local_passes_the_status_on(tmp_path: Path, deeds: str, status: int) -> None:
    assert Local(tmp_path, count=2, arguments=(deeds,)).finish().status == status


def test_local_ends_the_others_when_one_fails(tmp_path: Path) -> None:
    run = Local(tmp_path, '--grace=1', count=3, arguments=('1:7,all:stay',))
    result = run.finish()
    assert result.status == 7, result.text
    assert 'process 1 left with status 7' in result.err
    assert 'this is process 1' in result.err  # the end of its log
    assert [run.notes('signals', i) for i in range(3)] == [[15], [], [15]]
    assert not any(alive(run.notes('started', i)[0]['pid']) for i in range(3))


def test_local_ends_the_others_when_one_is_killed(tmp_path: Path) -> None:
    run = Local(tmp_path, '--grace=1', count=2, arguments=('all:stay',))
    wait_for(lambda: run.notes('started', 0) and run.notes('started', 1))
    os.kill(run.notes('started', 1)[0]['pid'], signal.SIGKILL)
    result = run.finish()
    assert result.status == 137, result.text
    assert run.notes('signals', 0) == [15]


@pytest.mark.slow
def test_local_kills_what_does_not_listen(tmp_path: Path) -> None:
    run = Local(tmp_path, '--grace=1', count=2, arguments=('0:deaf,1:7',))
    assert run.finish().status == 7
    assert not alive(run.notes('started', 0)[0]['pid'])


@pytest.mark.parametrize('how', ['SIGTERM', 'Ctrl-C'])
def test_local_passes_a_stop_on_once(tmp_path: Path, how: str) -> None:
    run = Local(tmp_path, count=2, arguments=('all:stay',))
    wait_for(lambda: run.notes('started', 0) and run.notes('started', 1))
    if how == 'SIGTERM':
        run.process.terminate()
    else:
        os.killpg(run.process.pid, signal.SIGINT)  # what a terminal does: to the whole foreground group
    result = run.finish()
    assert result.status == 143, result.text
    assert 'saved' in result.out
    assert [run.notes('signals', i) for i in (0, 1)] == [[15], [15]]


def test_local_second_stop_kills(tmp_path: Path) -> None:
    run = Local(tmp_path, count=1, arguments=('all:deaf',))
    wait_for(lambda: run.notes('started', 0))
    run.process.terminate()
    wait_for(lambda: run.notes('signals', 0))
    run.process.terminate()
    assert run.finish().status == 137


@pytest.mark.slow
@pytest.mark.parametrize('count', [1, 2])
def test_local_training_stops_and_goes_on(tmp_path: Path, count: int) -> None:
    workdir = tmp_path / 'run'
    training = {'checkpoint_every': 1000, 'eval_every': 30, 'eval_rows': 64}
    overrides = [f'--config.training.{key}={value}' for key, value in training.items()]
    arguments = (f'--config={write_config(tmp_path)}', f'--workdir={workdir}', *overrides)
    run = Local(tmp_path, '--devices=1', count=count, arguments=arguments, fake=False)
    wait_for(lambda: train_rows_written(workdir, 20)() or run.process.poll() is not None, 300)
    run.process.terminate()
    result = run.finish(200)
    assert result.status == 143, result.text
    (saved,) = [int(path.name) for path in (workdir / 'checkpoints').iterdir() if path.name.isdigit()]
    assert f'checkpoint {saved} saved' in result.out

    result = Local(tmp_path, '--devices=1', count=count, arguments=arguments, fake=False).finish(300)
    assert result.status == 0, result.text
    assert f'resuming {workdir} from step {saved}' in result.out
    assert checkpoint_done(workdir, 60)()
    assert [row['step'] for row in rows(workdir) if row['split'] == 'train'] == list(range(1, 61))


# Slurm


@pytest.mark.slow
@pytest.mark.parametrize('ntasks', [1, 2])
def test_slurm_requeues_and_goes_on(ntasks: int) -> None:
    script = ROOT / 'tests' / 'slurm' / 'run.py'
    spec = importlib.util.spec_from_file_location('slurm_run', script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    why_not = module.missing()
    if why_not:
        pytest.skip(f'no Slurm here: {why_not}')
    command = [sys.executable, script, f'--ntasks={ntasks}']
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr


# GKE


def jobset(variant: str) -> dict[str, Any]:
    (found,) = [
        document
        for document in yaml.safe_load_all((LAUNCH / 'gke_jobset.yaml').read_text())
        if document['metadata']['labels'] == {'variant': variant}
    ]
    return found


@pytest.mark.parametrize('variant', ['tpu', 'gpu'])
def test_gke_restarts_what_can_go_on(variant: str) -> None:
    document = jobset(variant)
    assert (document['apiVersion'], document['kind']) == ('jobset.x-k8s.io/v1alpha2', 'JobSet')
    policy = document['spec']['failurePolicy']
    assert policy['maxRestarts'] > 0
    assert policy['rules'] == [{'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy']}]
    (replicated,) = document['spec']['replicatedJobs']
    job = replicated['template']['spec']
    pod = job['template']['spec']
    (container,) = pod['containers']
    assert job['completionMode'] == 'Indexed'
    assert job['completions'] == job['parallelism'] > 1
    assert job['backoffLimit'] == 0
    on_user_mistake = {'containerName': container['name'], 'operator': 'In', 'values': [2]}
    assert job['podFailurePolicy']['rules'] == [{'action': 'FailJob', 'onExitCodes': on_user_mistake}]
    assert pod['restartPolicy'] == 'Never'  # podFailurePolicy demands it
    assert pod['terminationGracePeriodSeconds'] >= 120
    assert container['command'][:2] == ['fbt', 'train']  # no shell before it, which would keep SIGTERM to itself
    assert '--workdir=${WORKDIR}' in container['command']
    mounts = {mount['name']: mount['mountPath'] for mount in container['volumeMounts']}
    (bucket,) = (volume for volume in pod['volumes'] if volume['name'] == 'bucket')
    assert mounts['bucket'] == '/bucket'
    assert bucket['csi']['driver'] == 'gcsfuse.csi.storage.gke.io'
    assert job['template']['metadata']['annotations'] == {'gke-gcsfuse/volumes': 'true'}


def test_gke_tpu_chips_add_up() -> None:
    (slices,) = jobset('tpu')['spec']['replicatedJobs']
    job = slices['template']['spec']
    pod = job['template']['spec']
    chips = pod['containers'][0]['resources']['limits']['google.com/tpu'] * job['completions']
    width, height = pod['nodeSelector']['cloud.google.com/gke-tpu-topology'].split('x')
    assert chips == int(width) * int(height)


def test_gke_gpu_processes_find_each_other() -> None:
    document = jobset('gpu')
    (nodes,) = document['spec']['replicatedJobs']
    job = nodes['template']['spec']
    variables = {variable['name']: variable for variable in job['template']['spec']['containers'][0]['env']}
    assert document['spec']['coordinator'] == {'replicatedJob': nodes['name'], 'jobIndex': 0, 'podIndex': 0}
    assert variables['JAX_COORDINATOR_ADDRESS']['value'].startswith('$(COORDINATOR):')
    assert list(variables).index('COORDINATOR') < list(variables).index('JAX_COORDINATOR_ADDRESS')  # or it stays as is
    assert variables['JAX_NUM_PROCESSES']['value'] == str(job['completions'])
    index = variables['JAX_PROCESS_ID']['valueFrom']['fieldRef']['fieldPath']
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"


# TPU pods

# Stands for `gcloud`: two hosts, a folder each, in which ssh runs its commands; `state` is that of the slice.
GCLOUD = """
import os, pathlib, subprocess, sys
here = pathlib.Path(__file__).parent
verb, arguments = sys.argv[4], sys.argv[5:]
with (here / 'calls').open('a') as file:
    file.write(' '.join(sys.argv[4:6]) + chr(10))
assert sys.argv[1:4] == ['compute', 'tpus', 'queued-resources'] and '--zone=z' in arguments, sys.argv
state = here / 'state'
if verb == 'create':
    state.write_text('ACTIVE')
elif verb == 'delete':
    state.unlink()
elif verb == 'describe':
    print(state.read_text())
elif verb == 'ssh':
    (command,) = [a.removeprefix('--command=') for a in arguments if a.startswith('--command=')]
    for host in ('0', '1') if '--worker=all' in arguments else ('0',):
        home = here / f'host_{host}'
        status = subprocess.run(['bash', '-c', command], cwd=home, env=os.environ | {'HOME': str(home)}).returncode
        if status:
            sys.exit(status)
"""
ON_HOST = """#!/bin/sh
trap 'echo saved; exit 143' TERM
echo "host runs $*"
while [ ! -e ../leave_with ]; do sleep 0.05; done
exit $(cat ../leave_with)
"""


class Pod:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts = [folder / 'host_0', folder / 'host_1']
        (folder / 'gcloud.py').write_text(GCLOUD)
        self._program(folder / 'gcloud', f'#!/bin/sh\nexec {sys.executable} {folder / "gcloud.py"} "$@"\n')
        for host in self.hosts:
            self._program(host / 'fbt' / '.venv' / 'bin' / 'fbt', ON_HOST)

    @staticmethod
    def _program(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def __call__(self, *arguments: str, **variables: str) -> Result:
        environment = os.environ | {'NAME': 'slice', 'ZONE': 'z', 'POLL_SECONDS': '0', **variables}
        environment['PATH'] = f'{self.folder}:{environment["PATH"]}'
        result = subprocess.run(
            [POD, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        return Result(result.returncode, result.stdout, result.stderr)

    def leave(self, *statuses: int) -> None:
        for host, status in zip(self.hosts, statuses, strict=True):
            (host / 'leave_with').write_text(str(status))

    def start(self, *arguments: str) -> Result:
        for host in self.hosts:
            (host / 'leave_with').unlink(missing_ok=True)
        return self('start', '--', *(arguments or ('--workdir=/mnt/b/a run',)))


@pytest.fixture
def pod(tmp_path: Path) -> Any:
    pod = Pod(tmp_path)
    yield pod
    pod.leave(9, 9)  # ends what a failed test left running


@pytest.mark.parametrize(
    ('arguments', 'variables', 'told'),
    [
        ((), {}, 'what to do?'),
        (('fly',), {}, 'unknown: fly'),
        (('start',), {}, 'start needs --'),
        (('resume', '--'), {}, 'resume needs --'),
        (('watch', 'x'), {}, 'watch takes no arguments'),
        (('create',), {'NAME': ''}, 'NAME is not set'),
        (('create',), {'ZONE': ''}, 'ZONE is not set'),
        (('create',), {'SLICES': 'no'}, 'SLICES=no'),
    ],
)
def test_pod_tells_wrong_arguments(pod: Pod, arguments: tuple[str, ...], variables: dict[str, str], told: str) -> None:
    result = pod(*arguments, **variables)
    assert result.status == 2
    assert told in result.err.splitlines()[0]
    assert not (pod.folder / 'calls').exists()


def test_pod_dry_run_prints_and_does_nothing(pod: Pod) -> None:
    resource = 'gcloud compute tpus queued-resources'
    created = pod('--dry-run', 'create', SPOT='yes', PROJECT='p', CREATE_ARGS='--reserved')
    assert created.out.splitlines()[0].strip() == (
        f'{resource} create slice --node-id=slice --accelerator-type=v5litepod-16 '
        '--runtime-version=v2-alpha-tpuv5-lite --spot --reserved --zone=z --project=p'
    )
    assert '--node-count=2 --node-prefix=slice' in pod('--dry-run', 'create', SLICES='2').out
    installed = pod('--dry-run', 'install').out
    assert 'git -C' in installed and f'{resource} scp' in installed and 'fbt[tpu]' in installed
    started = pod('--dry-run', 'start', '--', '--config=a b').out
    assert '--node=all --worker=all' in started and 'fbt train' in started
    assert 'fbt.log' in pod('--dry-run', 'watch').out
    assert 'kill' in pod('--dry-run', 'stop').out
    assert f'{resource} delete slice --force --quiet --zone=z' in pod('--dry-run', 'delete').out
    resumed = pod('--dry-run', 'resume', '--', 'x').out
    order = [resumed.index(f'{resource} {verb}') for verb in ('describe', 'delete', 'create', 'scp', 'ssh')]
    assert order == sorted(order)
    assert not (pod.folder / 'calls').exists()


def test_pod_run_ends_with_its_status(pod: Pod) -> None:
    assert pod('create').status == 0
    assert pod.start().status == 0
    again = pod('start', '--', 'x')
    assert (again.status, 'runs here already' in again.err) == (1, True)
    pod.leave(0, 0)
    watched = pod('watch')
    assert watched.status == 0, watched.text
    assert 'host runs train --workdir=/mnt/b/a run' in watched.out
    assert '2 hosts, the run left with status 0' in watched.out
    for statuses, expected in (((0, 3), 3), ((143, 1), 1), ((143, 143), 143)):
        pod.start()
        pod.leave(*statuses)
        assert pod('watch').status == expected


def test_pod_stop_and_resume(pod: Pod) -> None:
    pod('create')
    pod.start()
    assert pod('stop').status == 0
    (pod.hosts[1] / 'leave_with').write_text('143')  # as the processes agree
    watched = pod('watch')
    assert watched.status == 143, watched.text
    assert 'saved' in watched.out
    pod.leave(0, 0)
    (pod.folder / 'calls').unlink()
    assert pod('resume', '--', '--workdir=w').status == 0
    assert pod('watch').status == 0
    assert pod('delete').status == 0
    verbs = [line.split()[0] for line in (pod.folder / 'calls').read_text().splitlines()]
    assert verbs == ['describe', 'ssh', 'ssh', 'ssh', 'delete']  # the slice was there: not created anew


def test_pod_create_fails_with_the_queued_resource(pod: Pod) -> None:
    (pod.folder / 'gcloud.py').write_text(GCLOUD.replace("write_text('ACTIVE')", "write_text('FAILED')"))
    assert pod('create').status == 1


# All of them


@pytest.mark.skipif(shutil.which('shellcheck') is None, reason='no shellcheck here (apt-get install shellcheck)')
def test_shellcheck_has_nothing_to_say() -> None:
    scripts = [LOCAL, POD, LAUNCH / 'slurm.sbatch']
    result = subprocess.run(['shellcheck', *scripts], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
