"""A script: `python hf_read.py FOLDER QUESTION ANSWER`, the exported folder as a user of `transformers` sees it.

QUESTION (npz): tokens (B, T), places (P,), passes, dtype, texts (JSON). Writes ANSWER.npy, the (K, B, P, V) logits in
that dtype after 1..K passes, and ANSWER.json, the ids of each text. Knows nothing of fbt_jax.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, question: str, answer: str) -> None:
    asked = np.load(question)
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=getattr(torch, str(asked['dtype'])), output_loading_info=True
    )
    wrong = {name: sorted(map(str, keys)) for name, keys in loading.items() if keys}
    if wrong:
        sys.exit(f'its weights are not those of the model: {wrong}')
    tokens_BT, places_P = torch.tensor(asked['tokens'], dtype=torch.long), torch.tensor(asked['places'])
    with torch.no_grad():
        logits_KBPV = [
            model(tokens_BT, num_passes=k, logits_to_keep=places_P, use_cache=False).logits.numpy()
            for k in range(1, int(asked['passes']) + 1)
        ]
    np.save(f'{answer}.npy', np.stack(logits_KBPV))
    texts = json.loads(str(asked['texts']))
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True) if texts else None
    ids = [tokenizer(text)['input_ids'] for text in texts] if tokenizer is not None else []
    Path(f'{answer}.json').write_text(json.dumps(ids))


if __name__ == '__main__':
    main(*sys.argv[1:])
