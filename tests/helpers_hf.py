"""Exported models, for the tests of the export and of its PyTorch model; importing it skips without the hf extra."""

import atexit
import os
import shutil
import tempfile
from typing import Any

import numpy as np
import pytest
from helpers import run_passes
from helpers_run import Run, make_run

MODULES = tempfile.mkdtemp(prefix='fbt_hf_modules')  # where transformers copies the exported code to
atexit.register(shutil.rmtree, MODULES, ignore_errors=True)
os.environ['HF_MODULES_CACHE'], os.environ['HF_HUB_OFFLINE'] = MODULES, '1'
torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers', minversion='5')
pytest.importorskip('safetensors')

from fbt_jax.batch import Batch  # noqa: E402
from fbt_jax.interop import hf_export, modeling_fbt  # noqa: E402
from fbt_jax.model.transformer import logits  # noqa: E402

CONTEXT = 64
PROMPTS = ['It is a truth universally', '', 'Emma Woodhouse', 'x']
ALL_MODES = [('standard', None), ('soft', None), ('fused', 1), ('fused', 3)]


def windowed(tokenizer: str = 'bytes', **changes: Any) -> Run:
    """Random weights and a window of 5 keys in the first of two layers."""
    return make_run(tokenizer, seq_len=CONTEXT, **{'window': 5, 'rope_theta': 1000.0} | changes)


def load(run: Run) -> Any:
    """The PyTorch model of a run, without a folder."""
    model = modeling_fbt.FbtForCausalLM(modeling_fbt.FbtConfig(**hf_export.hf_config(run, 'float32')))
    dtype = run.config.model.dtype
    weights = {name: torch.tensor(w) for name, w in hf_export.torch_weights(run, dtype).items()}
    model.to(getattr(torch, dtype)).load_state_dict(weights, strict=True)
    return model.eval()


def tokens_of(rows: int = 2, length: int = 40, seed: int = 0, vocab: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(vocab, size=(rows, length)).astype(np.int32)


def run_logits(run: Run, tokens_BT: np.ndarray, num_passes: int) -> np.ndarray:
    ones_BT = np.ones_like(tokens_BT)
    index_BT = np.broadcast_to(np.arange(tokens_BT.shape[1], dtype=np.int32), tokens_BT.shape)
    batch = Batch(tokens_BT, ones_BT, ones_BT.astype(np.float32), ones_BT, index_BT)
    hidden_BTD = run_passes(run.model, run.params, batch, num_passes=num_passes).hidden_BTD
    vocab_size = run.config.model.vocab_size
    return np.asarray(logits(hidden_BTD, run.params['embedding'], vocab_size=vocab_size))[..., :vocab_size]


def padded(run: Run, prompts: list[str]) -> dict[str, Any]:
    rows = [[run.tokenizer.bos_id, *run.tokenizer.encode(p)] for p in prompts]
    width = max(map(len, rows))
    ids = [[run.tokenizer.eos_id] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {'input_ids': torch.tensor(ids), 'attention_mask': torch.tensor(mask)}


def new_tokens(model: Any, inputs: dict[str, Any], run: Run, **options: Any) -> list[list[int]]:
    """Up to EOS, which is kept."""
    ids = model.generate(**inputs, do_sample=False, **options)[:, inputs['input_ids'].shape[1] :].tolist()
    eos = run.tokenizer.eos_id
    return [row[: row.index(eos) + 1] if eos in row else row for row in ids]
