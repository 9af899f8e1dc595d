"""What export and import share: Hugging Face's side in a process of its own, ours on the CPU.

Logits of both sides in float32 are the same within TOLERANCE. Where float32 itself does more to them (those of
SmolLM2-135M, up to 39: ours are 1.6e-4 from their float64 values, those of transformers 1.4e-4 from theirs), float64
tells rounding from a mistake.
Shapes: K passes, B rows, T positions, P of them compared, V vocabulary.
"""

import dataclasses
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fbt_jax.batch import Batch
from fbt_jax.config_model import ModelConfig
from fbt_jax.errors import UserError
from fbt_jax.model.transformer import Transformer, head_table, logits
from fbt_jax.passes import multi_pass

NEEDED = ('torch', 'transformers', 'safetensors')
TOLERANCE = 1e-4  # of logits
NO_ROOM = 2**20  # bytes
# Runs a script that ends with its parent, however that ends; `subprocess` sees to it only once the script has begun.
_LEASHED = """
import ctypes, os, runpy, signal, sys
if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit()
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def require_packages(what: str, *more: str) -> None:
    missing = [name for name in (*NEEDED, *more) if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{what} needs {', '.join(missing)}: pip install 'fbt-jax[hf]'")


def require_new(folder: str, flag: str) -> None:
    path = Path(folder).absolute()
    if not folder or path.is_symlink():
        raise UserError(f'{flag}={folder}: must be a new folder{", not a link" if folder else ""}')
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f'{flag}={folder}: must be a new folder; this one exists and is not empty')
    if not path.parent.is_dir():
        raise UserError(f'{flag}={folder}: must lie in a folder that exists')


@contextmanager
def new_folder(folder: str, flag: str) -> Iterator[Path]:
    """A temporary folder beside `folder`, which becomes it at the end; whatever ends this before, it is gone."""
    target = Path(folder).absolute()
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f'.{target.name}.', dir=target.parent))
    except OSError as error:
        raise UserError(f'{flag}={folder}: cannot be written ({error.strerror})') from None
    try:
        yield temporary
        _allow_as_usual(temporary)
        try:
            temporary.replace(target)
        except OSError:
            require_new(folder, flag)  # somebody else may have made it meanwhile
            raise
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def logits_at(
    config: ModelConfig, params: Any, tokens_BT: np.ndarray, places_P: np.ndarray, *, num_passes: int, dtype: str
) -> np.ndarray:
    """(K, B, P, V) logits of the model in `dtype`, each row one document."""
    config = dataclasses.replace(config, dtype=dtype, attention='blockwise', remat='nothing')
    model = Transformer(config)
    wide = jax.enable_x64(dtype == 'float64')
    with wide, jax.default_device(cpu()), jax.default_matmul_precision('highest'):
        params = jax.tree.map(lambda x: np.asarray(x).astype(dtype), params)
        index_BT = np.broadcast_to(np.arange(tokens_BT.shape[1], dtype=np.int32), tokens_BT.shape)
        batch = Batch(
            tokens=tokens_BT, targets=None, weights=None, segment_ids=np.ones_like(tokens_BT), positions=index_BT
        )

        def chosen(params: Any, batch: Batch) -> jax.Array:
            def per_pass(hidden_BTD: jax.Array, _: jax.Array) -> jax.Array:
                return logits(hidden_BTD[:, places_P], head_table(params), vocab_size=config.vocab_size or 0)

            return multi_pass(model, params, batch, num_passes=num_passes, per_pass=per_pass).yields

        return np.asarray(jax.jit(chosen)(params, batch))[..., : config.vocab_size]


def cpu() -> jax.Device:
    """Where float32 is float32."""
    try:
        return jax.devices('cpu')[0]
    except RuntimeError:
        return jax.devices()[0]


def run_script(name: str, *arguments: Any, scratch: Path) -> str:
    """Runs a script of this folder, which knows nothing of fbt_jax; '' if it did its job, else its last line.

    scratch: a folder in which it writes, and transformers keeps its copies of models' code.

    Raises:
      RuntimeError: the fault is not what it was given: it was killed, or there is no room in `scratch`.
    """
    environment = os.environ | {
        'HF_MODULES_CACHE': str(scratch / 'modules'),
        'HF_HUB_OFFLINE': '1',
    }  # nothing is looked up elsewhere
    script = str(resources.files('fbt_jax.interop') / name)
    command = [sys.executable, '-P', '-c', _LEASHED, str(os.getpid()), script, *map(str, arguments)]
    result = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode < 0:
        raise RuntimeError(f'transformers was ended by {signal.Signals(-result.returncode).name}: too little memory?')
    if result.returncode and shutil.disk_usage(scratch).free < NO_ROOM:
        raise RuntimeError(f'no space left in {scratch.parent}; TMPDIR names another place')
    lines = [line for line in result.stderr.splitlines() if line.strip()] or ['no word of why']
    return lines[-1] if result.returncode else ''


def _allow_as_usual(folder: Path) -> None:
    """The folder and its files as readable as any new ones: temporary folders and safetensors' files are private."""
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)
    for path in folder.iterdir():
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
