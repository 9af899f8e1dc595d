"""A run from an ordinary Llama-, Qwen2- or Qwen3-family checkpoint: a Hugging Face folder, or a GGUF file.

    DIR/config.json  DIR/checkpoints/0  DIR/data/tokenizer.json      a run of no steps, without feedback
    DIR/config.py                                                    the config of a run that continues from it with

Weights go to their places by name, none left over (hf_weights.py). A process of its own, which knows only the folder
(hf_open.py), gives the tokenizer and the logits of `transformers`, which must be the run's. Only then DIR gets its name.
What the run continues from computes the same: `model.input_norm = 'fused'` leaves plain inputs as they are, so its first
pass is the imported model.
Shapes: B rows, T positions, P of them compared, V vocabulary.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbt_jax.batch import Batch
from fbt_jax.config import Config, flat_keys, from_dict, to_dict
from fbt_jax.config_data import DataConfig
from fbt_jax.config_model import ModelConfig
from fbt_jax.config_passes import PassesConfig
from fbt_jax.data import corpus, open_data, resolved
from fbt_jax.data.tokenizer import open_tokenizer
from fbt_jax.errors import UserError, require
from fbt_jax.interop.hf_export import PROBE, TOLERANCE, allow_as_usual, require_packages
from fbt_jax.interop.hf_weights import Weights, model_config, params_of, places, require_all
from fbt_jax.model.transformer import Transformer, head_table, logits
from fbt_jax.passes import multi_pass
from fbt_jax.training.checkpoint import Checkpoints
from fbt_jax.training.run_folder import Tally, record_config

LONGEST = 2048  # default of data.seq_len where the model can do more
COMPARED_ROWS, COMPARED_LENGTH, COMPARED_PLACES = 2, 512, 128
# Of what continues from an imported model: NorMuon's update has 0.2 times its rate as RMS, so both are 1e-4 at most.
RATES = {'matrix_learning_rate': 5e-4, 'adam_learning_rate': 1e-4}


class Imported(NamedTuple):
    """`difference`: the largest between logits, over `positions` positions of the embedded novels."""

    config: Config
    parameters: int
    difference: float
    positions: int


def import_hf(source: str, workdir: str, *, seq_len: int | None = None) -> Imported:
    """Writes the run folder `workdir`, a new one, from the folder or GGUF file `source`.

    Args:
      seq_len: the run's context; default: the model's own, LONGEST at most.

    Raises:
      UserError: a package is missing, `source` can't be imported (says why), or `workdir` is no new folder.
      RuntimeError: the run computes something else than `transformers` does. Nothing is left behind.
    """
    require_packages('import')
    folder, gguf_file = _where(source)
    theirs = _their_config(source, folder, gguf_file)
    model = model_config(theirs, source)
    most = theirs['max_position_embeddings']
    seq_len = min(most, LONGEST) if seq_len is None else seq_len
    require(1 < seq_len <= most, '--seq-len', seq_len, f'must lie in 2..{most}, the context of {source}')
    if not gguf_file:
        require_all(Weights(folder), places(model))  # before anything takes long
    target = Path(workdir).absolute()
    require_new(target)
    temporary = Path(tempfile.mkdtemp(prefix=f'.{target.name}.', dir=target.parent))
    try:
        with tempfile.TemporaryDirectory() as scratch, jax.default_device(jax.devices('cpu')[0]):
            opened = _open(source, folder, gguf_file, Path(scratch), min(COMPARED_LENGTH, seq_len))
            weights = Weights(Path(scratch) if gguf_file else folder)
            require_all(weights, places(model))
            params = params_of(model, weights)
            config = _run_config(model, opened, target, seq_len)
            _require_same_ids(config, temporary, opened)
            difference = _difference(model, params, opened)
            if not difference <= TOLERANCE:  # so that not-a-number does not pass
                raise RuntimeError(
                    f'import: its logits differ by {difference:.1e} from those of transformers, more than {TOLERANCE}'
                )
            _write(temporary, source, config, params)
        allow_as_usual(temporary)
        target.rmdir() if target.exists() else None
        temporary.replace(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    count = sum(place_size for place_size in (int(np.prod(p.shape)) for p in places(model).values()))
    return Imported(config, count, difference, int(opened.tokens_BT.size))
