"""A run as a folder that Hugging Face `transformers` loads, compared with the run before it is handed over.

    model.safetensors  config.json  generation_config.json  modeling_fbt.py  README.md
    tokenizer.json  tokenizer_config.json  special_tokens_map.json      where the tokenizer has that form

Everything is written to a folder beside the one asked for. Then `hf_read.py` loads it in a process of its own, as a
user would, and its logits of passes 1 to 3 must be the run's. Only then it gets its name.
Shapes: K passes, B rows, T positions, P of them compared, V vocabulary.
"""

import json
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbt_jax.config_model import ModelConfig
from fbt_jax.data import corpus, open_data
from fbt_jax.errors import UserError, require
from fbt_jax.interop.hf_card import model_card
from fbt_jax.interop.hf_compare import (
    TOLERANCE,
    logits_at,
    new_folder,
    require_new,
    require_packages,
    run_script,
)
from fbt_jax.interop.hf_tokenizer import probes, tokenizer_files

DTYPES = ('float32', 'bfloat16')
# Fed passes may blow rounding up, those of a map that diverges above all: where logits differ in float32, float64 tells
# rounding from a mistake. Pass 1 has nothing that blows it up: it must agree in float32 too, to TOLERANCE or ROUNDINGS
# times what float32 does to ours.
ROUNDINGS = 3
COMPARED_IN = ('float32', 'float64')
COMPARED_PASSES, COMPARED_ROWS = 3, 2
MOST_COMPARED = 256  # positions of a row whose logits are compared, evenly spread
MODELING = 'modeling_fbt.py'


class Exported(NamedTuple):
    """What was written. `difference`: the largest of the logits, for each number of passes."""

    parameters: int
    difference: tuple[float, ...]
    computed_in: str
    rows: str  # what was compared on
    tokenizer: bool


def export_hf(
    run: Any, out: str, *, dtype: str = 'float32', data_folder: str | Path, metrics: list[dict[str, Any]]
) -> Exported:
    """Writes `run` (of `load_run`) to the new folder `out`.

    Args:
      dtype: of the stored weights. The comparison computes with them in float32.
      data_folder: where the run keeps what it tokenised. metrics: the rows of its metrics.jsonl, for the model card.

    Raises:
      UserError: a package is missing, or `out` is no new folder.
      RuntimeError: what was written doesn't load, or computes something else than the run. Nothing is left behind.
    """
    require(dtype in DTYPES, '--dtype', dtype, f'must be one of {", ".join(DTYPES)}')
    require_packages('--format=hf')
    require_new(out, '--out')
    weights = torch_weights(run, dtype)
    tokens_BT, rows = real_text(run, data_folder)
    text_files = tokenizer_files(run.tokenizer, run.config.data)
    with new_folder(out, '--out') as folder:
        card = model_card(run, metrics, parameters=count(weights), dtype=dtype, tokenizer=bool(text_files))
        write(folder, run, weights, text_files, card)
        difference, computed_in = compare(folder, run, weights, tokens_BT)
    return Exported(count(weights), difference, computed_in, rows, bool(text_files))


def write(folder: Path, run: Any, weights: dict[str, np.ndarray], text_files: dict[str, str], card: str) -> None:
    """All files of the exported folder."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    dtype = str(next(iter(weights.values())).dtype)
    files = {
        'config.json': _json(hf_config(run, dtype)),
        'generation_config.json': _json(_special_ids(run.tokenizer) | {'do_sample': False}),
        MODELING: modeling_source(),
        'README.md': card,
    }
    for name, content in (files | text_files).items():
        (folder / name).write_text(content, encoding='utf-8')
    try:
        save_file(weights, folder / 'model.safetensors', metadata={'format': 'pt'})
    except SafetensorError as error:
        raise RuntimeError(f'export: model.safetensors cannot be written: {error}') from None


def modeling_source() -> str:
    return (resources.files('fbt_jax.interop') / MODELING).read_text(encoding='utf-8')


def hf_config(run: Any, dtype: str) -> dict[str, Any]:
    """config.json: the fields of `FbtConfig`."""
    c: ModelConfig = run.config.model
    return {
        'architectures': ['FbtForCausalLM'],
        'model_type': 'fbt',
        'auto_map': {'AutoConfig': 'modeling_fbt.FbtConfig', 'AutoModelForCausalLM': 'modeling_fbt.FbtForCausalLM'},
        'dtype': dtype,
        'vocab_size': c.vocab_size,
        'hidden_size': c.width,
        'intermediate_size': c.mlp_width,
        'num_hidden_layers': c.num_layers,
        'num_attention_heads': c.num_heads,
        'num_key_value_heads': c.num_kv_heads,
        'max_position_embeddings': run.config.data.seq_len,
        'sliding_window': c.window or None,
        'layer_types': ['sliding_attention' if w else 'full_attention' for w in c.layer_windows],
        'rope_theta': c.rope_theta,
        'rope_factors': list(c.rope_scaling),
        'rms_norm_eps': c.norm_epsilon,
        'head_dim': c.head_dim,
        'head_gate': c.head_gate,
        'qk_norm': c.qk_norm,
        'post_norms': c.post_norms,
        'depth_scaling': c.depth_scaling,
        'biases': list(c.biases),
        'input_norm': c.input_norm,
        'fusion': c.fusion,
        'trained_feedback': run.trained_feedback,
        'feedback_loss_weight': run.config.passes.loss_weight,
        'tie_word_embeddings': c.tied_embedding,
        **_special_ids(run.tokenizer),
    }


def _special_ids(tokenizer: Any) -> dict[str, int]:
    """EOS pads too: the mask says what is padding."""
    if tokenizer is None:
        return {}
    return {'bos_token_id': tokenizer.bos_id, 'eos_token_id': tokenizer.eos_id, 'pad_token_id': tokenizer.eos_id}


def torch_weights(run: Any, dtype: str) -> dict[str, np.ndarray]:
    """The parameters under the names of modeling_fbt.py, each matrix (outputs, inputs), without padded rows."""
    c: ModelConfig = run.config.model
    weights = {}
    for module, tree in run.params.items():
        if module in ('embedding', 'head'):
            weights[f'{module}.weight'] = np.asarray(tree)[: c.vocab_size]
            continue
        for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
            *names, kind = [step.key for step in path]
            array = np.asarray(value)
            array = np.swapaxes(array, -1, -2) if kind == 'kernel' else array
            kind = 'bias' if kind == 'bias' else 'weight'
            if module == 'layers':
                weights |= {'.'.join([module, str(i), *names, kind]): layer for i, layer in enumerate(array)}
            else:
                weights['.'.join([module, *names, kind])] = array
    return {name: np.ascontiguousarray(array.astype(jnp.dtype(dtype))) for name, array in weights.items()}


def count(weights: dict[str, np.ndarray]) -> int:
    return sum(array.size for array in weights.values())


def real_text(run: Any, data_folder: str | Path) -> tuple[np.ndarray, str]:
    """(B, T) int32 ids to compare on, long enough to leave the window, and what they are."""
    config: ModelConfig = run.config.model
    length = min(run.config.data.seq_len, max(512, config.window + 128))
    try:
        data = open_data(run.config, data_folder, held_out_only=True)
        name = next(iter(data.validation))
    except (UserError, StopIteration):
        if run.tokenizer is None:
            raise
        ids = np.concatenate(run.tokenizer.encode_batch(corpus.split().validation[:4]))
        rows = min(COMPARED_ROWS, len(ids) // length)
        return ids[: rows * length].reshape(rows, length).astype(np.int32), 'the embedded novels'
    rows = min(COMPARED_ROWS, data.validation[name].num_rows)
    batch = next(data.validation_batches(name, rows, max_rows=rows))
    return np.asarray(batch.tokens)[:, :length].astype(np.int32), f'{name} rows'


def compare(
    folder: Path, run: Any, weights: dict[str, np.ndarray], tokens_BT: np.ndarray
) -> tuple[tuple[float, ...], str]:
    """The largest difference of logits for each number of passes between the written folder and the run, and in what.

    Raises:
      RuntimeError: it can't be loaded, or a difference is above TOLERANCE, or its tokenizer gives other ids.
    """
    passes = 1 if run.config.model.fusion == 'none' else COMPARED_PASSES
    places_P = np.unique(np.linspace(0, tokens_BT.shape[1] - 1, MOST_COMPARED).astype(int))
    texts = probes(run.tokenizer) if (folder / 'tokenizer.json').exists() else []
    rounded = next(iter(weights.values())).dtype
    params = jax.tree.map(lambda x: np.asarray(x).astype(rounded), run.params)
    found: dict[str, list[float]] = {}
    ours: dict[str, np.ndarray] = {}
    for dtype in COMPARED_IN:
        read = _read(folder, tokens=tokens_BT, places=places_P, passes=passes, dtype=dtype, texts=json.dumps(texts))
        for text, ids in zip(texts, read['ids'], strict=True):
            expected = [run.tokenizer.bos_id, *run.tokenizer.encode(text)]
            if ids != expected:
                raise RuntimeError(f'export: AutoTokenizer reads {text[:40]!r} as {ids[:8]}, the run as {expected[:8]}')
        ours[dtype] = logits_at(run.config.model, params, tokens_BT, places_P, num_passes=passes, dtype=dtype)
        found[dtype] = [float(np.max(np.abs(a - b))) for a, b in zip(ours[dtype], read['logits'], strict=True)]
        # Written so that not-a-number does not pass. Pass 1 has nothing that blows rounding up.
        plain = len(found) == 1 or found['float32'][0] <= _allowed(ours['float32'][0], ours['float64'][0])
        if plain and all(d <= TOLERANCE for d in found[dtype]):
            return tuple(found[dtype]), dtype
    told = '; '.join(f'{", ".join(f"{d:.1e}" for d in found[dtype])} in {dtype}' for dtype in found)
    raise RuntimeError(f'export: logits of passes 1, ... differ by more than {TOLERANCE}: {told}')


def _allowed(in_float32: np.ndarray, in_float64: np.ndarray) -> float:
    """How far another computation in float32 may be from ours, given what rounding does to ours."""
    return max(TOLERANCE, ROUNDINGS * float(np.max(np.abs(in_float32 - in_float64))))


def _read(folder: Path, **question: Any) -> dict[str, Any]:
    """What a process that knows only the folder makes of it: see hf_read.py."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        asked, answer = scratch / 'question.npz', scratch / 'answer'
        np.savez(asked, **question)
        failed = run_script('hf_read.py', folder, asked, answer, scratch=scratch)
        if failed:
            raise RuntimeError(f'export: transformers cannot use what was written: {failed}')
        return {'logits': np.load(f'{answer}.npy'), 'ids': json.loads(Path(f'{answer}.json').read_text())}


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + '\n'
