"""A run's folder: what `config.json` records, whose folder it is, and how a trained model is loaded from it.

    DIR/config.json  DIR/metrics.jsonl  DIR/checkpoints/STEP/  DIR/tensorboard/  DIR/data/

A resume must not change the model, the data order or the seed; other keys may change, and the change is told.
"""

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from fbt_jax.config import Config, MeshConfig, changed_keys, from_dict, to_dict
from fbt_jax.data import Data, Tokenizer, is_prepared, load_tokenizer, prepare_sources
from fbt_jax.errors import UserError
from fbt_jax.files import hold, replace
from fbt_jax.model.transformer import Transformer, param_specs
from fbt_jax.sharding import make_mesh, named, require_divisible
from fbt_jax.training.checkpoint import load_tree
from fbt_jax.training.processes import everywhere, is_primary, on_primary

FIXED_SECTIONS = ('seed', 'data', 'model', 'init')
# How, not what, is computed.
FREE_KEYS = ('model.attention', 'model.remat', 'model.fp32_gradient_reduction', 'data.workers')
# Where things lie: what is in them is known by the data's fingerprint.
PATH_KEYS = ('data.source', 'data.validation', 'data.tokenizer')
SHARED_SECONDS = 10  # for a network disk to show a new file
PACKAGES = ('fbt-jax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy')


class Tally(NamedTuple):
    """Cumulative counts, as of the last step whose metrics were read.

    `feedback_before`: whether the run that this one began from had trained feedback.
    """

    tokens: int = 0
    token_passes: int = 0
    nonfinite_steps: int = 0
    feedback_before: bool = False

    @property
    def trained_feedback(self) -> bool:
        return self.feedback_before or self.token_passes > self.tokens


class Run(NamedTuple):
    """A trained model: `run.model.apply({'params': run.params}, tokens, ...)`. `tokenizer` None: rows aren't text."""

    model: Transformer
    params: Any
    config: Config
    tokenizer: Tokenizer | None
    step: int
    trained_feedback: bool  # whether some step, here or where it started from, made more than one pass


def load_run(workdir: str, step: int | None = None) -> Run:
    """The model of a run at a checkpoint (default: the newest), on this machine's devices; needs no training data.

    A model of float64 switches `jax_enable_x64` on, without which JAX would round it to float32.

    Raises:
      UserError: `workdir` holds no run, or no checkpoint of that step.
      RuntimeError: the checkpoint can't be read.
    """
    config = read_config(workdir)
    enable_float64(config)
    try:
        loaded = load_tree(workdir, step)
    except ValueError as error:
        raise UserError(str(error)) from None
    params = jax.tree.map(jax.numpy.asarray, loaded.tree['params'])
    # The kernel is the machine's choice: a run on TPU opens on a CPU.
    model = Transformer(dataclasses.replace(config.model, attention='auto'))
    return Run(
        model,
        params,
        config,
        load_tokenizer(config.data, data_folder(workdir)),
        loaded.step,
        config.model.fusion != 'none' and Tally(**loaded.meta).trained_feedback,
    )


def require_finite(run: Run) -> Run:
    """UserError where the run has diverged: losses and texts of such weights mean nothing."""
    if not all(bool(jax.numpy.isfinite(x).all()) for x in jax.tree.leaves(run.params)):
        raise UserError(f'not every parameter of step {run.step} is finite: the run has diverged')
    return run


def spread(run: Run, *, split_rows: bool = True) -> tuple[Run, Mesh]:
    """`run` over all devices of all processes: on its own mesh where that fits, else whole on each of them.

    split_rows: whether positions of a row may lie on several devices, as in training; for decoding they may not.
    """
    config = run.config.mesh
    if not split_rows:
        config = dataclasses.replace(config, data=-1 if config.fsdp != -1 else config.data, context=1)
    try:
        mesh = make_mesh(config)
        require_divisible(run.config, mesh)
    except UserError:
        mesh = make_mesh(MeshConfig(data=-1, fsdp=1))
    shardings = named(mesh, param_specs(run.model))
    params = jax.tree.map(
        lambda x, s: jax.make_array_from_callback(x.shape, s, lambda index: x[index]), run.params, shardings
    )
    return run._replace(params=params), mesh


def read_config(workdir: str) -> Config:
    """The resolved config that the run in `workdir` was started with."""
    return from_dict(read_record(workdir)['config'])


def data_fingerprint(workdir: str) -> str:
    """Of the data that the run in `workdir` began with."""
    return read_record(workdir)['data_fingerprint']


def data_record(workdir: str) -> dict[str, Any]:
    """Of each source that the run in `workdir` began with, held-out ones too: fingerprint, documents, tokens, files."""
    return read_record(workdir)['data']


def held_out(workdir: str) -> dict[str, Any]:
    """What `data_record` says of each validation set."""
    return {name: entry for name, entry in data_record(workdir).items() if name.split('-')[0] == 'validation'}


def require_data(workdir: str, data: Data) -> None:
    """Raises UserError unless the run in `workdir` began with these documents, and this tokenizer."""
    began = data_record(workdir)
    known = {name: entry['fingerprint'] for name, entry in began.items()}
    changed = [name for name, entry in data.record.items() if known.get(name) != entry['fingerprint']]
    if changed:
        told = 'the documents or the tokenizer changed since it began'
        raise UserError(f'{workdir} holds a run of other data ({", ".join(changed)}): {told}')


def tokenise_raw(config: Config, workdir: str, *, poll: Callable[[], None]) -> None:
    """Raw text into tokenised documents in the run's folder, by the primary; the others wait for the files.

    Not by a collective: those give up when a peer comes half a minute late, and this may take hours.
    """
    if jax.process_count() == 1:
        return prepare_sources(config.data, data_folder(workdir), poll=poll)
    if is_prepared(config.data, data_folder(workdir)) is None:
        return
    on_primary(lambda: data_folder(workdir).mkdir(parents=True, exist_ok=True))
    require_shared(workdir, 'data')
    if is_primary():
        prepare_sources(config.data, data_folder(workdir), poll=poll)
    while not is_prepared(config.data, data_folder(workdir)):
        poll()
        time.sleep(0.2)


def require_shared(workdir: str, name: str = 'config.json') -> None:
    """UserError unless every process sees what the primary has just written or found."""
    path = Path(workdir) / name
    deadline = time.monotonic() + SHARED_SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    if not everywhere(path.exists()):
        raise UserError(f'--workdir={workdir}: not all processes see the same folder; it must be on a shared disk')


def data_folder(workdir: str) -> Path:
    """Where a run keeps its tokenizer's file, and the raw text that it tokenised."""
    return Path(workdir) / 'data'


def require_path(workdir: str) -> None:
    """UserError for a bucket's address: files are opened, appended to and locked as on a disk."""
    if '://' in workdir:
        raise UserError(f'--workdir={workdir}: must be a folder; mount the bucket (gcsfuse) and give its path')


def enable_float64(config: Config) -> None:
    if config.model.dtype == 'float64':
        jax.config.update('jax_enable_x64', True)


def has_checkpoint(workdir: str) -> bool:
    """Whether a start in `workdir` will resume. (A save that isn't complete has a longer name.)"""
    return any(path.name.isdigit() for path in Path(workdir).glob('checkpoints/*'))


def require_same_run(workdir: str, config: Config) -> None:
    """Changes nothing.

    Raises:
      UserError: the folder holds a run of another model, data order or seed (names the keys), or something that is no
      run.
    """
    if not (Path(workdir) / 'config.json').exists():
        if any((Path(workdir) / name).exists() for name in ('checkpoints', 'metrics.jsonl')):
            raise UserError(f'{workdir} holds checkpoints or metrics but no config.json: use a new --workdir')
        return
    old = read_record(workdir)
    changes = changed_keys(old['config'], to_dict(config))
    fixed = [
        f'{key} was {a!r}, now {b!r}'
        for key, (a, b) in changes.items()
        if key.split('.')[0] in FIXED_SECTIONS and key not in (*FREE_KEYS, *PATH_KEYS, 'data.weights')
    ]
    if not fixed and weight_phases(from_dict(old['config'])) != weight_phases(config):
        fixed.append('data.weights: its phases begin at other steps, or have other shares')
    if fixed:
        raise UserError(f'{workdir} holds another run: {"; ".join(fixed)}. Use a new --workdir, or the old values')
    copy, original = data_folder(workdir) / Path(config.data.tokenizer).name, Path(config.data.tokenizer)
    if copy.is_file() and original.is_file() and copy.read_bytes() != original.read_bytes():
        raise UserError(f'{workdir} holds a run with another tokenizer than {original}: it keeps its own in {copy}')


def claim_folder(workdir: str, config: Config, data: Data, say: Callable[[str], None]) -> None:
    """Writes the config.json of a new run, or checks that the folder's run is this one; changes nothing then.

    Raises:
      UserError: as `require_same_run`, and where the run began with other documents.
    """
    require_same_run(workdir, config)
    if not (Path(workdir) / 'config.json').exists():
        if data.tokenizer is not None and data.tokenizer.file is not None:
            name, content = data.tokenizer.file
            data_folder(workdir).mkdir(exist_ok=True)
            replace(data_folder(workdir) / name, content)
        return record_config(workdir, config, data)
    require_data(workdir, data)
    if read_record(workdir)['data_fingerprint'] != data.fingerprint:
        raise UserError(f'{workdir} holds a run of other sources: their number or names changed since it began')
    for key, (before, now) in changed_keys(read_record(workdir)['config'], to_dict(config)).items():
        say(f'resuming with {key} = {now!r} (was {before!r})')


def record_config(workdir: str, config: Config, data: Data) -> None:
    """Writes config.json: what the steps from here on are trained with, and on what."""
    path = Path(workdir) / 'config.json'
    record = {
        'config': to_dict(config),
        'data_fingerprint': data.fingerprint,
        'data': data.record,
        'versions': {name: importlib.metadata.version(name) for name in PACKAGES},
        'git_commit': _git_commit(),
        'device_kind': jax.devices()[0].device_kind,
        'device_count': jax.device_count(),
        'process_count': jax.process_count(),
    }
    try:
        replace(path, json.dumps(record, indent=2) + '\n')
    except OSError as error:
        raise UserError(f'--workdir={workdir}: cannot write {path}: {error.strerror}') from None


@contextmanager
def locked(workdir: str) -> Iterator[None]:
    """Creates the folder and holds it: two runs that train in one folder would spoil each other's files."""
    handle: int | None = None

    def lock() -> None:
        nonlocal handle
        handle = hold(workdir, f'--workdir={workdir}', 'another process is training there')

    try:
        on_primary(lock)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def weight_phases(config: Config) -> Any:
    """When the shares of a mixture change, in steps; a fraction of a run depends on its length."""
    return config.data.weight_phases(config.training.steps)


def read_record(workdir: str) -> dict[str, Any]:
    """config.json as it stands."""
    path = Path(workdir) / 'config.json'
    if not path.is_file():
        raise UserError(f'{workdir}: no run here (no config.json)')
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f'{path} is not valid JSON: {error}') from None
    if not isinstance(record, dict) or not record.keys() >= {'config', 'data_fingerprint', 'data'}:
        raise UserError(f'{path} is not the record of a run: config, data_fingerprint or data is not there')
    return record


def _git_commit() -> str | None:
    """Of the source tree that this package was imported from; None outside a repository."""
    try:
        command = ['git', 'describe', '--always', '--dirty', '--abbrev=40']
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
