"""A run from an ordinary Llama-, Qwen2- or Qwen3-family checkpoint: a Hugging Face folder, or a GGUF file.

    DIR/config.json  DIR/checkpoints/0  DIR/data/tokenizer.json      a run of no steps, without feedback
    DIR/config.py                                                    the config of a run that continues from it with

Weights go to their places by name, none left over (hf_weights.py). A process that knows only the folder (hf_open.py)
gives the tokenizer and the logits of `transformers`, which must be the run's; only then DIR gets its name. A run that
continues from it begins with its loss: `model.input_norm = 'fused'` leaves plain inputs as they are, so that the first
pass is the imported model.
Shapes: B rows, T positions, P of them compared, V vocabulary.
"""

import dataclasses
import json
import re
import tempfile
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbt_jax.config import Config, flat_keys
from fbt_jax.config_data import DataConfig
from fbt_jax.config_model import ModelConfig
from fbt_jax.config_passes import PassesConfig
from fbt_jax.data import corpus, load_tokenizer, open_data, resolved
from fbt_jax.data.tokenizer import Tokenizer
from fbt_jax.errors import UserError, require
from fbt_jax.files import replace
from fbt_jax.interop.hf_compare import (
    TOLERANCE,
    cpu,
    logits_at,
    new_folder,
    require_new,
    require_packages,
    run_script,
)
from fbt_jax.interop.hf_tokenizer import probes
from fbt_jax.interop.hf_weights import FAMILIES, Weights, model_config, params_of, places, require_all
from fbt_jax.training.checkpoint import Checkpoints
from fbt_jax.training.integrity import quiet_failures
from fbt_jax.training.run_folder import Tally, data_folder, record_config

TOKENIZER = 'tokenizer.json'
GGUF_NEEDED = ('gguf', 'accelerate')
LONGEST = 2048  # default of data.seq_len where the model can do more
EXACT = 1e-6  # of logits in float64, where nothing is left of rounding: SmolLM2-135M's are 2e-13 apart
COMPARED_ROWS, COMPARED_LENGTH, COMPARED_PLACES = 2, 512, 128
# Of what continues from an imported model: NorMuon's update has 0.2 times its rate as RMS, so both are 1e-4 at most.
RATES = {'matrix_learning_rate': 5e-4, 'adam_learning_rate': 1e-4}


# What decides the logits and follows from no tensor's shape; the families' configs have defaults for all of them.
_DECIDING = ('num_attention_heads', 'hidden_act', 'rms_norm_eps', 'rope_theta', 'max_position_embeddings')
_TOKENIZERS = ('tokenizer.json', 'tokenizer.model', 'vocab.json', 'tokenizer_config.json')


class Imported(NamedTuple):
    """`difference`: the largest between logits in float32, over `positions` positions of the embedded novels.

    in_float64: the same in float64, looked at where rounding in float32 exceeds TOLERANCE.

    assumed: what its config.json leaves unsaid, as `transformers` has it.

    ends: ids at which its own texts end, beside the run's EOS. Neither they nor a chat template are the run's.
    """

    config: Config
    parameters: int
    difference: float
    in_float64: float | None
    positions: int
    assumed: dict[str, Any]
    ends: list[int]
    has_chat_template: bool


def import_hf(source: str, workdir: str, *, seq_len: int | None = None) -> Imported:
    """Writes the run folder `workdir`, a new one, from the folder or GGUF file `source`.

    Args:
      seq_len: the run's context; default: the model's own, LONGEST at most.

    Raises:
      UserError: a package is missing, `source` can't be imported (says why), or `workdir` is no new folder.
      RuntimeError: the run computes something else than `transformers` does. Nothing is left behind.
    """
    folder, gguf_file = _where(source)
    require_packages('fbt import', *(GGUF_NEEDED if gguf_file else ()))
    require_new(workdir, '--workdir')
    said = {} if gguf_file else _said(source, folder)
    theirs = _their_config(source, folder, gguf_file)
    try:
        model = model_config(theirs, source)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        told = str(error) if isinstance(error, UserError) else f'{type(error).__name__}: {error}'
        at = '' if told.startswith('--from') else f'--from={source}: its config cannot be used: '
        raise UserError(f'{at}{told}') from None
    most = theirs['max_position_embeddings']
    if most < 2:
        raise UserError(f'--from={source}: its max_position_embeddings is {most}')
    seq_len = min(most, LONGEST) if seq_len is None else seq_len
    require(1 < seq_len <= most, '--seq-len', seq_len, f'must lie in 2..{most}, the context of {source}')
    if not gguf_file:
        require_all(Weights(folder), places(model))  # before anything takes long
    with (
        new_folder(workdir, '--workdir') as temporary,
        tempfile.TemporaryDirectory() as name,
        jax.default_device(cpu()),
    ):
        scratch, length = Path(name), min(COMPARED_LENGTH, seq_len)
        opened = _open(source, folder, gguf_file, scratch, model, length, 'float32')
        weights = Weights(scratch if gguf_file else folder)
        require_all(weights, places(model))
        params = params_of(model, weights)
        data_folder(str(temporary)).mkdir()
        replace(data_folder(str(temporary)) / TOKENIZER, opened.tokenizer)
        config = _config(model, opened, data_folder(str(Path(workdir).absolute())) / TOKENIZER, seq_len)
        config = dataclasses.replace(config, data=_resolved(config.data, temporary, source))
        tokenizer = load_tokenizer(config.data, data_folder(str(temporary)))
        assert tokenizer is not None
        _require_same_ids(tokenizer, opened)
        difference, in_float64 = _difference(model, params, opened), None
        if not difference <= TOLERANCE:  # written so that not-a-number does not pass
            exact = _open(source, folder, gguf_file, scratch, model, length, 'float64')
            in_float64 = _difference(model, params, exact)
            if not in_float64 <= EXACT:
                apart = f'by {difference:.1e} in float32 and {in_float64:.1e} in float64'
                raise RuntimeError(f'logits differ from those of transformers {apart}')
        _write(temporary, gguf_file or folder.resolve().name, config, params)
    count = sum(int(np.prod(place.shape)) for place in places(model).values())
    rope = theirs['rope_parameters']
    assumed = {} if gguf_file else {key: (theirs | rope)[key] for key in _DECIDING if key not in said}
    ends = [id_ for id_ in opened.ends if id_ != tokenizer.eos_id]
    positions = int(opened.tokens_BT.size)
    return Imported(config, count, difference, in_float64, positions, assumed, ends, opened.has_chat_template)


class _Opened(NamedTuple):
    """What hf_open.py tells."""

    tokenizer: str  # tokenizer.json
    bos: str | None
    eos: str | None
    ids: list[list[int]]  # of each of `probes`
    ends: list[int]  # at which its own `generate` ends
    has_chat_template: bool
    tokens_BT: np.ndarray
    places_P: np.ndarray
    logits_BPV: np.ndarray


def _where(source: str) -> tuple[Path, str]:
    """The folder, and the name of the GGUF file in it ('': it holds safetensors)."""
    path = Path(source)
    if not source:
        raise UserError('--from= names nothing: must be a folder of a Hugging Face model, or a .gguf file')
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise UserError(f'--from={source!r}: its name is not UTF-8, which transformers cannot read') from None
    if path.is_file() and path.suffix == '.gguf':
        return path.parent, path.name
    if not path.is_dir():
        raise UserError(f'--from={source}: must be a folder of a Hugging Face model, or a .gguf file')
    files = sorted(p.name for p in path.glob('*.gguf'))
    if (path / 'config.json').is_file():
        return path, ''
    if len(files) != 1:
        told = f'several GGUF files ({", ".join(files[:3])}); name one of them' if files else 'no config.json'
        raise UserError(f'--from={source}: holds {told}')
    return path, files[0]


def _said(source: str, folder: Path) -> dict[str, Any]:
    """What its config.json itself says, RoPE's keys among the others. UserError where it cannot be one of ours."""
    try:
        said = json.loads((folder / 'config.json').read_text())
        said |= said.get('rope_parameters') or said.get('rope_scaling') or {}
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise UserError(f'--from={source}: its config.json cannot be read: {_brief(error)}') from None
    if said.get('model_type') not in FAMILIES:
        told = f'its model_type is {said.get("model_type")!r}; only {", ".join(FAMILIES)} can be imported'
        raise UserError(f'--from={source}: {told}')
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise UserError(f'--from={source}: holds no tokenizer ({", ".join(_TOKENIZERS)})')
    return said


def _their_config(source: str, folder: Path, gguf_file: str) -> dict[str, Any]:
    """Whatever version of `transformers` wrote it, in the form of this one."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()  # what it warns of is checked here, and told in one line
    try:
        found = AutoConfig.from_pretrained(
            folder, trust_remote_code=False, **({'gguf_file': gguf_file} if gguf_file else {})
        )
    except Exception as error:  # the library raises what it likes for what a file may hold
        raise UserError(f'--from={source}: transformers cannot read its config: {_brief(error)}') from None
    theirs = found.to_dict()
    if theirs.get('quantization_config') and not gguf_file:
        raise UserError(f'--from={source}: its weights are quantised; only whole ones, and GGUF, can be imported')
    return theirs


def _open(
    source: str, folder: Path, gguf_file: str, scratch: Path, model: ModelConfig, length: int, dtype: str
) -> _Opened:
    places_P = np.unique(np.linspace(0, length - 1, COMPARED_PLACES).astype(int))
    question = {
        'folder': str(folder),
        'gguf_file': gguf_file,
        'vocab_size': model.vocab_size,
        'text': corpus.split().validation[0],
        'rows': COMPARED_ROWS,
        'length': length,
        'places': places_P.tolist(),
        'dtype': dtype,
        'weights': bool(gguf_file) and dtype == 'float32',
        'probes': probes(None),
    }
    (scratch / 'question.json').write_text(json.dumps(question))
    failed = run_script('hf_open.py', scratch / 'question.json', scratch, scratch=scratch)
    if failed:
        raise UserError(f'--from={source}: transformers cannot use it: {failed}')
    told = json.loads((scratch / 'told.json').read_text())
    tokens_BT, logits_BPV = np.load(scratch / 'tokens.npy'), np.load(scratch / 'logits.npy')
    return _Opened(
        (scratch / TOKENIZER).read_text(), **told, tokens_BT=tokens_BT, places_P=places_P, logits_BPV=logits_BPV
    )


def _config(model: ModelConfig, opened: _Opened, tokenizer: Path, seq_len: int) -> Config:
    """Of a run on the embedded novels. A model that has no BOS begins documents with its EOS."""
    eos = opened.eos or opened.bos or ''
    data = DataConfig(tokenizer=str(tokenizer), bos=opened.bos or eos, eos=eos, seq_len=seq_len)
    return Config(data=data, model=model, passes=PassesConfig('one_pass'))


def _resolved(data: DataConfig, folder: Path, source: str) -> DataConfig:
    try:
        return resolved(data, data_folder(str(folder)))
    except UserError as error:
        if not str(error).startswith(('data.bos', 'data.eos')):
            raise
        told = f'it has BOS {data.bos!r} and EOS {data.eos!r}; name special tokens of its in tokenizer_config.json'
        raise UserError(f'--from={source}: its tokenizer: {told} (bos_token, eos_token)') from None


def _require_same_ids(tokenizer: Tokenizer, opened: _Opened) -> None:
    for text, theirs in zip(probes(None), opened.ids, strict=True):
        if tokenizer.encode(text) != theirs:
            raise RuntimeError(f'transformers reads {text[:40]!r} as {theirs[:8]}, its tokenizer.json alone does not')


def _difference(model: ModelConfig, params: Any, opened: _Opened) -> float:
    """The largest between logits, ours in the dtype of theirs."""
    tokens_BT, theirs_BPV = opened.tokens_BT, opened.logits_BPV
    ours_KBPV = logits_at(model, params, tokens_BT, opened.places_P, num_passes=1, dtype=theirs_BPV.dtype.name)
    return float(np.max(np.abs(ours_KBPV[0] - theirs_BPV)))


def _write(folder: Path, name: str, config: Config, params: Any) -> None:
    """The run at step 0, and the config of what goes on from it."""
    data = open_data(config, data_folder(str(folder)))
    record_config(str(folder), config, data)
    with quiet_failures(), Checkpoints(str(folder), keep=1) as checkpoints:
        state = {'params': jax.tree.map(jnp.asarray, params), 'step': jnp.zeros((), jnp.int32)}
        checkpoints.save(0, state, data_iterator=data.train_iterator(), meta=Tally()._asdict())
    replace(folder / 'config.py', _continuing(name, config))


def _continuing(name: str, config: Config) -> str:
    """A config file: the imported model with feedback, on data still to be named."""
    # It is code, and a folder's name may hold anything.
    name = re.sub(r'[^\w .+-]', '_', name)
    keys, usual = flat_keys(config), flat_keys(Config())
    own = ('data.tokenizer', 'model.fusion', 'passes.phases')
    wanted = {key: value for key, value in keys.items() if value != usual[key] and key not in own}
    wanted |= {f'optimizer.{name}': rate for name, rate in RATES.items()}
    lines = '\n'.join(f'    config.{key} = {_literal(value)}' for key, value in wanted.items())
    return f'''"""Goes on from {name}, which `fbt import` has put beside this file, with latent feedback.

    fbt train --config=THIS_FILE --workdir=A_NEW_FOLDER --config.data.source='text:corpus/*.txt#except_every=100' \\
        --config.data.validation='text:corpus/*.txt#every=100'

The first pass is the imported model. The rates suit a start from trained weights but aren't tuned; the number of steps
and the batch are those of the paper's 1B run.
"""

from pathlib import Path

from fbt_jax.config import default_config

HERE = Path(__file__).resolve().parent


def get_config():
    config = default_config()
{lines}
    config.data.tokenizer = str(HERE / 'data' / '{TOKENIZER}')
    config.init['from'] = str(HERE)
    config.init.optimizer = False
    return config
'''


def _literal(value: Any) -> str:
    return repr(tuple(value) if isinstance(value, list) else value)


def _brief(error: Exception) -> str:
    return textwrap.shorten(str(error), 300, placeholder=' ...')
