"""The README.md of an exported folder: the run's own figures, and how to use what lies beside it."""

from typing import Any

USE = """## Use

Its code lies beside the weights (`modeling_fbt.py`), so loading needs `trust_remote_code=True`; read it first.

```python
from transformers import AutoModelForCausalLM{import_tokenizer}

model = AutoModelForCausalLM.from_pretrained('{here}', trust_remote_code=True)
{prompt}
model.generate(**inputs, max_new_tokens=60)                               # standard: plain embeddings
{fed}```"""
FED = """model.generate(**inputs, max_new_tokens=60, mode='soft')                  # each step fed with the state before
model.generate(**inputs, max_new_tokens=60, mode='fused', fused_passes=1) # the prompt read again, fed, then as soft
"""
TEXT = """tokenizer = AutoTokenizer.from_pretrained('{here}', trust_remote_code=True)
inputs = tokenizer('It is a truth', return_tensors='pt')                  # BOS is put first"""
IDS = """inputs = {'input_ids': torch.tensor([[1, 2, 3]])}                         # no tokenizer is exported with it"""
NOTES = """Prompts of different lengths are padded on the left, with the tokenizer's `attention_mask`. Beam search and
assistants work in the standard mode only. `model(ids, num_passes=K)` gives the logits after K passes, `labels=ids` the
loss NLL of pass 1 + mean NLL of passes 2 to K. The context is {context} tokens.
"""


def model_card(run: Any, metrics: list[dict[str, Any]], *, parameters: int, dtype: str, tokenizer: bool) -> str:
    """`run`: of `load_run`. metrics: rows of its metrics.jsonl; those past its step are not its own.

    tokenizer: whether one lies beside it.
    """
    config, model = run.config, run.config.model
    rows = [row for row in metrics if row['step'] <= run.step]
    full = (
        f', but in every {model.full_attention_every}. layer all' if model.full_attention_every else ' in every layer'
    )
    facts = {
        'Parameters': f'{parameters:,} ({dtype}), embeddings tied',
        'Layers / width / MLP': f'{model.num_layers} / {model.width} / {model.mlp_width}',
        'Heads': f'{model.num_heads} queries, {model.num_kv_heads} keys and values',
        'Sliding window': f'{model.window} keys{full}' if model.window else 'none',
        'Vocabulary / context': f'{model.vocab_size:,} / {config.data.seq_len:,}',
        'Tokenizer': config.data.tokenizer.replace('\\', '/').rsplit('/', 1)[-1],
        'Fusion': f'{model.fusion}{"" if run.trained_feedback or model.fusion == "none" else ", not trained"}',
        'Steps': f'{run.step:,} of {config.training.steps:,}, {config.data.batch_size} rows each',
        **_trained_on(rows),
        'Passes': _schedule(config.passes.phases),
    }
    lines = ['# A Full-bandwidth Transformer', '', _what(run), '', '| | |', '|---|---|']
    lines += [f'| {name} | {value} |' for name, value in facts.items()]
    lines += [
        '',
        *_validation(rows),
        USE.format(**_snippets(run, tokenizer)),
        '',
        NOTES.format(context=config.data.seq_len),
    ]
    front = '---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n'
    return front + '\n'.join(lines).rstrip() + '\n'


def _what(run: Any) -> str:
    if run.trained_feedback:
        return 'Trained with fbt_jax: the top state of each position is fed back into the input of the next.'
    return 'Trained with fbt_jax, without feedback: an ordinary decoder-only transformer.'


def _snippets(run: Any, tokenizer: bool) -> dict[str, str]:
    here = '/path/to/this/folder'
    return {
        'here': here,
        'import_tokenizer': ', AutoTokenizer' if tokenizer else '\nimport torch',
        'prompt': TEXT.format(here=here) if tokenizer else IDS,
        'fed': FED if run.trained_feedback else '',
    }


def _trained_on(rows: list[dict[str, Any]]) -> dict[str, str]:
    train = [row for row in rows if row['split'] == 'train']
    if not train:
        return {}
    last = train[-1]
    return {'Tokens / token-passes': f'{last["tokens"]:,} / {last["token_passes"]:,} (at step {last["step"]:,})'}


def _schedule(phases: Any) -> str:
    """From when on which numbers of passes are drawn with which probabilities."""
    parts = []
    for start, shares in phases:
        when = 'at first' if not start else f'from {start:.0%} of the steps' if start < 1 else f'from step {start:,}'
        drawn = [f'{k} ({share:.0%})' for k, share in enumerate(shares, start=1) if share]
        parts.append(f'{when} {", ".join(drawn)}')
    return '; '.join(parts)


def _validation(rows: list[dict[str, Any]]) -> list[str]:
    held_out = [row for row in rows if row['split'] == 'validation']
    if not held_out:
        return ['No validation figures were logged.', '']
    row = held_out[-1]
    lines = [f'Validation at step {row["step"]:,}:', '', '| passes | loss (nats) | perplexity | bits per byte |']
    lines.append('|---|---|---|---|')
    for k in range(1, row['passes'] + 1):
        figures = [_figure(row.get(f'{name}_pass_{k}')) for name in ('loss', 'perplexity', 'bits_per_byte')]
        lines.append(f'| {k} | {" | ".join(figures)} |')
    return [*lines, '']


def _figure(value: float | None) -> str:
    return '' if value is None else f'{value:.4f}'
