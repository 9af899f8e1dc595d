"""launch/slurm.sbatch under a real Slurm: requeued in mid-run, stopped before its time limit, it goes on and finishes.

    python tests/slurm/run.py --ntasks=2

Starts munged, slurmctld and slurmd of its own (slurm.conf beside this file), submits the recipe for a small model on
CPU, and checks after each start what the tasks left behind; then kills a task, and makes a user's mistake. Needs root
and Debian's slurm-wlm. Whatever happens, it ends the job and the daemons it started. Exit status 0 if all held;
otherwise it prints the logs.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / 'tests'))

from helpers_e2e import rows, write_config  # noqa: E402

PROGRAMS = ('munged', 'slurmctld', 'slurmd', 'sbatch', 'scontrol', 'scancel', 'srun')


class Failed(Exception):
    """What didn't hold."""


def missing() -> str | None:
    """Why this can't run here."""
    if os.geteuid() != 0:
        return 'not root'
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    return f'{", ".join(lacking)} missing (apt-get install slurm-wlm)' if lacking else None


def wait_for(what: str, condition: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Failed(f'after {seconds:.0f} s still waiting for {what}')
        time.sleep(0.2)


def check(holds: bool, what: str) -> None:
    print(f'{"ok" if holds else "FAILED"}: {what}', flush=True)
    if not holds:
        raise Failed(what)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(('127.0.0.1', 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def daemon(folder: Path, environment: dict[str, str], *command: str) -> Iterator[None]:
    with (folder / f'{command[0]}.log').open('w') as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Slurm:
    """One node, started and stopped with the context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        own = ('SLURM', 'SBATCH', 'SRUN')
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(own)}
        self.environment['SLURM_CONF'] = str(folder / 'slurm.conf')
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> 'Slurm':
        controller_port, node_port = free_ports(2)
        template = string.Template((HERE / 'slurm.conf').read_text())
        (self.folder / 'slurm.conf').write_text(
            template.substitute(folder=self.folder, controller_port=controller_port, node_port=node_port)
        )
        for name in ('state', 'spool'):
            (self.folder / name).mkdir()
        key = self.folder / 'munge.key'
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        munge = {name: f'--{name}={self.folder}/munge.{name.split("-")[0]}' for name in ('socket', 'key-file')}
        munge |= {name: f'--{name}={self.folder}/munged.{name.split("-")[0]}' for name in ('pid-file', 'seed-file')}
        try:
            self._start('munged', '--foreground', *munge.values(), f'--log-file={self.folder}/munged.file.log')
            wait_for('munged', (self.folder / 'munge.socket').exists, 20)
            self._start('slurmctld', '-D')
            self._start('slurmd', '-D', '-N', 'localhost')
            wait_for('the node', lambda: 'idle' in self.ask('sinfo', '-h', '-o', '%T'), 60)
        except BaseException:
            self.stack.close()
            raise
        return self

    def _start(self, *command: str) -> None:
        self.stack.enter_context(daemon(self.folder, self.environment, *command))

    def __exit__(self, *_: object) -> None:
        with self.stack:  # slurmd first
            self.ask('scancel', '--user=root')
            with contextlib.suppress(Failed):
                wait_for('jobs to end', lambda: not self.ask('squeue', '-h'), 90)

    def ask(self, *command: str, **variables: str) -> str:
        """stdout; a command that fails says so on stderr and gives what it printed."""
        result = subprocess.run(
            command, env=self.environment | variables, stdout=subprocess.PIPE, text=True, timeout=60, check=False
        )
        return result.stdout.strip()

    def job(self, job: str, field: str) -> str:
        match = re.search(rf'\b{field}=(\S+)', self.ask('scontrol', 'show', 'job', job))
        return match[1] if match else ''

    def ended(self, job: str) -> bool:
        return self.job(job, 'JobState') in ('COMPLETED', 'FAILED', 'CANCELLED', 'TIMEOUT', 'NODE_FAIL')


def submit(slurm: Slurm, ntasks: int, log: Path, workdir: Path, config: Path, *arguments: str) -> str:
    options = (f'--ntasks-per-node={ntasks}', '--nodes=1', '--gpus-per-node=0', '--time=30', f'--output={log}')
    job = slurm.ask(
        'sbatch',
        '--parsable',
        *options,
        str(ROOT / 'launch' / 'slurm.sbatch'),
        *arguments,
        CONFIG=str(config),
        WORKDIR=str(workdir),
        FBT=f'{sys.executable} -m fbt_jax',
        PYTHONPATH=str(ROOT),
        JAX_PLATFORMS='cpu',
        JAX_COMPILATION_CACHE_DIR=str(slurm.folder / 'compiled'),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES='-1',
    )
    check(job.isdigit(), f'sbatch takes the job ({job})')
    return job


def last_step(workdir: Path) -> int:
    path = workdir / 'metrics.jsonl'
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)['step'] for line in lines if line.endswith('\n')), default=0)


def requeued_run(slurm: Slurm, ntasks: int, log: Path) -> None:
    """Three starts: `scontrol requeue`, the signal before the time limit, the end."""
    workdir = slurm.folder / 'run'
    steps = 200 if ntasks > 1 else 1000  # one task takes hundreds a second: enough to be stopped in their middle
    eval_every = steps // 4
    overrides = {'steps': steps, 'eval_every': eval_every, 'eval_rows': 64, 'checkpoint_every': 10 * steps}
    arguments = [f'--config.training.{key}={value}' for key, value in overrides.items()]
    job = submit(slurm, ntasks, log, workdir, write_config(slurm.folder), *arguments)

    def saved() -> list[int]:
        """Steps of the checkpoints; before the end only a signal makes one."""
        folder = workdir / 'checkpoints'
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.exists() else []

    stops = ('scontrol', 'requeue', job), ('scancel', '--signal=USR1', '--batch', job)
    for number, stop in enumerate(stops, 1):
        before = saved()
        start = before[-1] if before else 0
        wait_for(f'steps of start {number}', lambda s=start: last_step(workdir) >= s + 20 or slurm.ended(job))
        check(not slurm.ended(job), f'start {number} runs, step {last_step(workdir)}')
        slurm.ask(*stop)
        wait_for('the tasks to leave', lambda n=number: log.read_text().count('batch: the tasks left') == n)
        new = [step for step in saved() if step not in before]
        check(len(new) == 1 and start < new[0] < steps, f'{" ".join(stop[:2])}: checkpoint {new} saved')
        text = log.read_text()
        check(text.count(f'checkpoint {new[0]} saved in') == 1, 'process 0 says so, once')
        wait_for('the next start', lambda t=f'from step {new[0]}': t in log.read_text() or slurm.ended(job))
        check(f'resuming {workdir} from step {new[0]}' in log.read_text(), f'start {number + 1} resumes from {new[0]}')
    wait_for('the end', lambda: slurm.ended(job))
    state = f'{slurm.job(job, "JobState")} {slurm.job(job, "ExitCode")}'
    check(state == 'COMPLETED 0:0', f'the job ends: {state}')
    check(log.read_text().count('left with status 143') == 2, 'the tasks left with 143 twice')
    written = [(row['step'], row['split']) for row in rows(workdir)]
    train = [step for step, split in written if split == 'train']
    validation = [step for step, split in written if split == 'validation']
    check(train == list(range(1, steps + 1)), f'metrics.jsonl has each of {steps} steps once, in order')
    check(validation == list(range(eval_every, steps + 1, eval_every)), f'and validation at {validation}')


def killed_task(slurm: Slurm, ntasks: int, log: Path) -> None:
    workdir = slurm.folder / 'killed'
    job = submit(slurm, ntasks, log, workdir, slurm.folder / 'config.py', '--config.training.steps=100000')
    wait_for('steps', lambda: last_step(workdir) >= 10 or slurm.ended(job))
    listed = [line.split() for line in slurm.ask('scontrol', 'listpids', f'{job}.0').splitlines()]
    (pid,) = [int(fields[0]) for fields in listed if fields[-1] == '1']
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    wait_for('the end', lambda: slurm.ended(job), 120)
    state = f'{slurm.job(job, "JobState")} {slurm.job(job, "ExitCode")}'
    took = time.monotonic() - killed
    check(
        state.startswith('FAILED') and ' 0:' not in state, f'one task killed: the job ends after {took:.0f} s: {state}'
    )


def user_mistake(slurm: Slurm, log: Path) -> None:
    job = submit(slurm, 1, log, slurm.folder / 'none', slurm.folder / 'no_such_config.py')
    wait_for('the end', lambda: slurm.ended(job))
    state = f'{slurm.job(job, "JobState")} {slurm.job(job, "ExitCode")}'
    check(state == 'FAILED 2:0', f'a missing config ends the job: {state}')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--ntasks', type=int, default=2, help='tasks of the job, all on the one node (default: 2)')
    args = parser.parse_args()
    why_not = missing()
    if why_not:
        print(f'run.py: {why_not}', file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix='fbt_slurm') as name:
        folder = Path(name)
        folder.chmod(0o755)  # munged wants its socket's folder open to all
        log, mistake_log = folder / 'job.log', folder / 'mistake.log'
        try:
            with Slurm(folder) as slurm:
                requeued_run(slurm, args.ntasks, log)
                if args.ntasks > 1:
                    killed_task(slurm, args.ntasks, folder / 'killed.log')
                user_mistake(slurm, mistake_log)
        except Failed as failed:
            print(f'FAILED: {failed}')
            for path in sorted(folder.glob('*.log')):
                print(f'--- {path.name}', path.read_text(errors='replace')[-6000:], sep='\n')
            return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
