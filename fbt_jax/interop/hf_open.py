"""A script: `python hf_open.py QUESTION ANSWER`, a Hugging Face folder as `transformers` itself sees it.

QUESTION (JSON): folder, gguf_file ('' = none), vocab_size, text, length, rows, places, dtype (of the computation),
weights (whether to write them), probes.
Writes into the folder ANSWER: tokenizer.json; tokens.npy, (B, T) ids of the text; logits.npy, (B, P, V) at the places;
told.json: names of BOS and EOS, the ids of each probe. With `weights` also model.safetensors, in float32: what a GGUF
file holds, taken out of its quantisation. Knows nothing of fbt_jax.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoTokenizer


class InDouble(TorchFunctionMode):
    """float64 wherever code asks for float32, as models do for norms, angles and softmax whatever their weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{key: wide(x) for key, x in (kwargs or {}).items()})


def main(question: str, answer: str) -> None:
    asked = json.loads(Path(question).read_text())
    folder, out = asked['folder'], Path(answer)
    gguf = {'gguf_file': asked['gguf_file']} if asked['gguf_file'] else {}
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **gguf)
    backend = getattr(tokenizer, 'backend_tokenizer', None)
    if backend is None:
        sys.exit(f'its tokenizer ({type(tokenizer).__name__}) has no form as tokenizer.json')
    vocabulary, rows = max(tokenizer.get_vocab().values()) + 1, asked['vocab_size']
    if vocabulary > rows:
        sys.exit(f'its tokenizer has {vocabulary} ids, but its model {rows}')
    (out / 'tokenizer.json').write_text(backend.to_str())
    # Text that spells a special token is text, as in training.
    plain = {'add_special_tokens': False, 'split_special_tokens': True}
    told = {
        'bos': tokenizer.bos_token,
        'eos': tokenizer.eos_token,
        'ids': [tokenizer(t, **plain)['input_ids'] for t in asked['probes']],
    }
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, dtype=torch.float32, **gguf).eval()
    ends = model.generation_config.eos_token_id
    told |= {'ends': ends if isinstance(ends, list) else [] if ends is None else [ends]}
    told |= {'has_chat_template': bool(tokenizer.chat_template)}
    (out / 'told.json').write_text(json.dumps(told))
    if asked['weights']:
        tied = model.config.tie_word_embeddings
        weights = {n: w.contiguous() for n, w in model.state_dict().items() if not (tied and n == 'lm_head.weight')}
        save_file(weights, out / 'model.safetensors')
    rows, length = asked['rows'], asked['length']
    ids = tokenizer(asked['text'], **plain)['input_ids'][: rows * length]
    tokens_BT = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    places_P = torch.tensor(asked['places'])
    with torch.no_grad(), InDouble() if asked['dtype'] == 'float64' else contextlib.nullcontext() as wide:
        if wide:  # made anew, since rotary frequencies are no weights
            weights = model.state_dict()
            model = AutoModelForCausalLM.from_config(model.config).double().eval()
            model.load_state_dict(weights)
        logits_BPV = model(tokens_BT, logits_to_keep=places_P, use_cache=False).logits
    np.save(out / 'tokens.npy', tokens_BT.numpy().astype(np.int32))
    np.save(out / 'logits.npy', logits_BPV.numpy())


if __name__ == '__main__':
    main(*sys.argv[1:])
