"""Runs of `fbt` as a user starts them: killable processes of their own, on a model that compiles in seconds."""

import atexit
import functools
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from fbt_jax.cli import main

ROOT = Path(__file__).parents[1]

# Sampled pass counts with mixin and jitter; no checkpoint but the last coincides with an evaluation; each evaluation
# reads 1024 rows, long enough to be hit by a signal.
CONFIG = """
from fbt_jax.config import default_config


def get_config():
    config = default_config()
    config.seed = 3
    config.data.source = 'word_problem'
    config.data.tokenizer = 'none'
    config.data.seq_len = 12
    config.data.batch_size = 8
    config.model.width = 16
    config.model.num_layers = 1
    config.model.num_heads = 2
    config.model.num_kv_heads = 1
    config.model.mlp_width = 32
    config.model.window = 0
    config.model.remat = 'nothing'
    config.passes.phases = ((0, (0.6, 0.4)),)
    config.optimizer.adam_learning_rate = 3e-3
    config.optimizer.warmup_steps = 5
    config.training.steps = 60
    config.training.log_every = 1
    config.training.eval_every = 10
    config.training.checkpoint_every = 7
    return config
"""
# The same without feedback, what `init.from` starts from.
PLAIN = ('--config.model.fusion=none', '--config.passes.phases=one_pass')
TEXT = ('--config.data.source=austen', '--config.data.tokenizer=bytes', '--config.data.seq_len=256')
TIMES = ('tokens_per_second', 'step_seconds', 'mfu')


class Result(NamedTuple):
    status: int  # as a shell has it: 128 + the signal's number if one ended the process
    out: str
    err: str  # without the progress bar

    @property
    def text(self) -> str:
        return f'status {self.status}\n{self.out}\n{self.err}'


@functools.cache
def _compile_cache() -> str:
    """One for the whole session, so that the second start of a program compiles nothing."""
    folder = tempfile.mkdtemp(prefix='fbt_compile_cache')
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def write_config(folder: Path, text: str = CONFIG) -> Path:
    path = folder / 'config.py'
    path.write_text(text)
    return path


def start(verb: str, *arguments: str, extra: dict[str, str] | None = None) -> subprocess.Popen:
    """`extra`: environment variables."""
    environment = os.environ | {
        'JAX_PLATFORMS': 'cpu',
        'PYTHONUNBUFFERED': '1',
        'JAX_COMPILATION_CACHE_DIR': _compile_cache(),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
        **(extra or {}),
    }
    return subprocess.Popen(
        [sys.executable, '-m', 'fbt_jax', verb, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, timeout: float = 300) -> Result:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    bar = ('step/s', 's/step', '?step')
    lines = [line.strip() for line in err.replace('\r', '\n').split('\n')]
    return Result(status, out, '\n'.join(line for line in lines if line and not any(b in line for b in bar)))


def start_training(config: Path, workdir: Path, *overrides: str) -> subprocess.Popen:
    return start('train', f'--config={config}', f'--workdir={workdir}', *overrides)


def train(config: Path, workdir: Path, *overrides: str, status: int = 0) -> Result:
    result = finish(start_training(config, workdir, *overrides))
    assert result.status == status, result.text
    return result


def send_when(process: subprocess.Popen, condition: Callable[[], bool], number: int, timeout: float = 120) -> bool:
    """Sends the signal as soon as `condition` holds; False if the process ended before that."""
    deadline = time.monotonic() + timeout
    while process.poll() is None:
        if condition():
            process.send_signal(number)
            return True
        assert time.monotonic() < deadline, f'nothing to send {signal.Signals(number).name} at'
        time.sleep(0.0005)
    return False


# What a run has reached, from its files alone


def train_rows_written(workdir: Path, count: int) -> Callable[[], bool]:
    """Whether the train row of step `count` is there."""
    path, mark = workdir / 'metrics.jsonl', f'{{"step": {count}, "split": "train"'
    return lambda: path.exists() and mark in path.read_text(errors='replace')


def checkpoint_done(workdir: Path, step: int) -> Callable[[], bool]:
    return lambda: (workdir / 'checkpoints' / str(step)).exists()


def unfinished_saves(workdir: Path) -> list[Path]:
    folder = workdir / 'checkpoints'
    return [path for path in folder.iterdir() if not path.name.isdigit()] if folder.is_dir() else []


def rows(workdir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


def without_times(run_rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in TIMES} for row in run_rows]


def checkpoint_bits(workdir: Path, step: int | None = None) -> dict[str, Any]:
    """All that a checkpoint holds, to the bit: parameters, moments, counters, tally, data position."""
    from fbt_jax.training.checkpoint import load_tree
    from fbt_jax.training.integrity import named_leaves

    loaded = load_tree(str(workdir), step, what='params+opt_state')
    leaves = {name: (str(x.dtype), x.shape, np.asarray(x).tobytes()) for name, x in named_leaves(loaded.tree).items()}
    return leaves | {'step': loaded.step, 'meta': loaded.meta, 'data_position': loaded.data_position}


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """{path: (time of change, content)} of every file below `folder`."""
    files = (path for path in folder.rglob('*') if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def tensorboard_scalars(workdir: Path) -> dict[str, dict[int, float]]:
    """{name: {step: value}} as TensorBoard shows them: files in order of time, a restart hides what it purges."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    scalars: dict[str, dict[int, float]] = {}
    for path in sorted((workdir / 'tensorboard').glob('*tfevents*'), key=lambda p: (p.stat().st_mtime_ns, p.name)):
        for record in _records(path.read_bytes()):
            event = Event.FromString(record)
            if event.session_log.status == SessionLog.START:
                for values in scalars.values():
                    for step in [s for s in values if s >= event.step]:
                        del values[step]
            for value in event.summary.value:
                scalars.setdefault(value.tag, {})[event.step] = value.simple_value
    return scalars


def _records(data: bytes) -> Iterator[bytes]:
    """Of a TFRecord file: length, its checksum, the record, its checksum; a torn last one is left out."""
    at = 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from('<Q', data, at)
        if at + 16 + length > len(data):
            return
        yield data[at + 12 : at + 12 + length]
        at += 16 + length


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr with which `fbt` refuses, without the command's name in front."""
    capsys.readouterr()
    try:
        status = main(list(arguments))
    except SystemExit as leaving:
        status = leaving.code
    out, err = capsys.readouterr()
    assert status == 2, (status, out, err)
    assert out == ''
    assert re.fullmatch(r'fbt( \w+)?: [^\n]+\n', err), err
    return err.partition(': ')[2].rstrip('\n')


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
