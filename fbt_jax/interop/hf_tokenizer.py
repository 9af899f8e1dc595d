"""A run's tokenizer as the files that Hugging Face's `AutoTokenizer` reads: the same ids, BOS put first once.

`bpe` and a tokenizer.json are that already. `bytes` becomes byte-level BPE without merges: each byte is a token. Text
that spells a special token stays text (`split_special_tokens`), as in training.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any

from fbt_jax.config_data import DataConfig
from fbt_jax.data.tokenizer import BPE_FILE
from fbt_jax.data.tokenizer_files import BOS, EOS


def tokenizer_files(tokenizer: Any, data: DataConfig) -> dict[str, str]:
    """{name: content}; none where the rows aren't text, or its library is another (SentencePiece, tiktoken)."""
    if data.tokenizer == 'bytes':
        parsed = _byte_level()
    elif data.tokenizer == 'bpe':
        parsed = json.loads((resources.files('fbt_jax.data') / BPE_FILE).read_bytes())
    elif tokenizer is not None and tokenizer.file is not None and Path(tokenizer.file[0]).suffix == '.json':
        parsed = json.loads(tokenizer.file[1])
    else:
        return {}
    bos, eos = getattr(tokenizer, 'bos', BOS), getattr(tokenizer, 'eos', EOS)
    parsed |= {'post_processor': _bos_first(bos, tokenizer.bos_id), 'truncation': None, 'padding': None}
    specials = {'bos_token': bos, 'eos_token': eos, 'pad_token': eos}
    config = {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        **specials,
        'split_special_tokens': True,
        'clean_up_tokenization_spaces': False,
        'padding_side': 'left',
        'model_input_names': ['input_ids', 'attention_mask'],
        'model_max_length': data.seq_len,
    }
    files = {'tokenizer.json': parsed, 'tokenizer_config.json': config, 'special_tokens_map.json': specials}
    return {name: json.dumps(content, indent=2, ensure_ascii=False) + '\n' for name, content in files.items()}


def _bos_first(bos: str, bos_id: int) -> dict[str, Any]:
    start = {'SpecialToken': {'id': bos, 'type_id': 0}}
    one, other = ({'Sequence': {'id': name, 'type_id': 0}} for name in 'AB')
    special = {'id': bos, 'ids': [bos_id], 'tokens': [bos]}
    return {
        'type': 'TemplateProcessing',
        'single': [start, one],
        'pair': [start, one, other],
        'special_tokens': {bos: special},
    }


def _byte_level() -> dict[str, Any]:
    """tokenizer.json of `ByteTokenizer`."""
    added = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False, 'special': True}
    byte_level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': False}
    return {
        'version': '1.0',
        'added_tokens': [{'id': 256 + i, 'content': name, **added} for i, name in enumerate((BOS, EOS))],
        'normalizer': None,
        'pre_tokenizer': byte_level,
        'decoder': byte_level,
        'model': {
            'type': 'BPE',
            'dropout': None,
            'unk_token': None,
            'continuing_subword_prefix': None,
            'end_of_word_suffix': None,
            'fuse_unk': False,
            'byte_fallback': False,
            'ignore_merges': False,
            'vocab': {character: byte for byte, character in enumerate(_byte_characters())} | {BOS: 256, EOS: 257},
            'merges': [],
        },
    }


def _byte_characters() -> list[str]:
    """What ByteLevel spells each byte with: its character where Latin-1 has a visible one, else U+0100 and on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]
