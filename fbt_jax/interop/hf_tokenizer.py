"""A run's tokenizer as the files that Hugging Face's `AutoTokenizer` reads: the same ids, BOS put first once.

`bpe` and a tokenizer.json are that already. `bytes` becomes byte-level BPE without merges: each byte is a token. A
SentencePiece model or tiktoken's ranks are built anew, and left out where that doesn't give the very ids. Text that
spells a special token stays text (`split_special_tokens`), as in training.
"""

import base64
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from fbt_jax.config_data import DataConfig
from fbt_jax.data import corpus
from fbt_jax.data.tokenizer import BPE_FILE
from fbt_jax.data.tokenizer_files import BOS, EOS, byte_characters


def tokenizer_files(tokenizer: Any, data: DataConfig) -> dict[str, str]:
    """{name: content}; none where the rows aren't text, or where no tokenizer.json gives the same ids."""
    if data.tokenizer == 'none':
        return {}
    if data.tokenizer == 'bytes':
        parsed = _byte_level()
    elif data.tokenizer == 'bpe':
        parsed = json.loads((resources.files('fbt_jax.data') / BPE_FILE).read_bytes())
    elif Path(tokenizer.file[0]).suffix == '.json':
        parsed = json.loads(tokenizer.file[1])
    else:
        built = _built(tokenizer, data.tokenizer_pattern)
        if built is None:
            return {}
        parsed = json.loads(built.to_str())
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


def probes(tokenizer: Any) -> list[str]:
    """Texts that must be encoded alike: real, odd, and spelling the special tokens."""
    names = [getattr(tokenizer, name, f'<|{name}|>') for name in ('bos', 'eos')]
    odd = ' Ab,  12\r\n\n\té \U0001f469\u200d\U0001f467 \u2581 " <0x41> <unk>'
    runs = "I'LL don't We'Ve 3.14159 1234567890 1,000,000 ABCdefGHI snake_case ...!!! \t\t  \n\n \n   x    \n"
    # Of each script a few letters in a row, and what is composed of several code points.
    spread = ''.join(chr(c) for c in range(0xA0, 0x30000, 61) if not 0xD800 <= c < 0xE000)
    composed = 'e\u0301a\u0308\u0323 \u1100\u1161\u11a8 \ufb01 \uff21\u3000 \u2126 \u0e01\u0e33 1\u20e3 \u00bd\u2026'
    real = corpus.split().validation[0][:5000]
    return [
        '',
        ' ',
        '  a ',
        'It is a truth',
        odd,
        runs,
        f'a{names[0]} {names[1]}b',
        *names,
        '<0x41>',
        spread,
        composed,
        real,
    ]


def _built(tokenizer: Any, pattern: str) -> tokenizers.Tokenizer | None:
    """The tokenizer of another library's file; None where `tokenizers` has no exact form of it."""
    name, content = tokenizer.file
    try:
        if Path(name).suffix == '.model':
            built = _sentencepiece(content)
        else:
            built = _tiktoken(content, pattern, dict.fromkeys((tokenizer.bos, tokenizer.eos)))
    except Exception:  # an expression or a map that it can't read: the library has no narrower type
        return None
    built.encode_special_tokens = True
    exact = all(built.encode(text).ids == tokenizer.encode(text) for text in probes(tokenizer))
    return built if exact else None


def _sentencepiece(content: bytes) -> tokenizers.Tokenizer:
    """What SentencePiece does with a model: normalise, put a space first, isolate the user's pieces, segment."""
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2
    proto = messages.ModelProto.FromString(content)
    kinds, trained, spec = messages.ModelProto.SentencePiece, proto.trainer_spec, proto.normalizer_spec
    pieces = {p.piece: i for i, p in enumerate(proto.pieces)}
    normal = {p.piece: p.score for p in proto.pieces if p.type == kinds.NORMAL}
    users = [p.piece for p in proto.pieces if p.type == kinds.USER_DEFINED]
    if trained.model_type == trained.BPE:
        halves = (
            (p[:i], p[i:]) for p in sorted(normal, key=lambda p: (-normal[p], pieces[p])) for i in range(1, len(p))
        )
        merges = [(a, b) for a, b in halves if a in normal and b in normal]
        model: Any = models.BPE(pieces, merges, unk_token=trained.unk_piece, fuse_unk=True, ignore_merges=bool(users))
        model.byte_fallback = trained.byte_fallback
    elif trained.model_type == trained.UNIGRAM:
        # SentencePiece keeps pieces of another kind from text that spells them; here their score must.
        scores = [(p.piece, p.score if p.piece in normal or p.piece in users else -1e9) for p in proto.pieces]
        model = models.Unigram(scores, unk_id=trained.unk_id, byte_fallback=trained.byte_fallback)
    else:
        raise ValueError('no such model')
    built = tokenizers.Tokenizer(model)
    steps: list[Any] = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:  # spaces alone; lines stay
        ends, several = tokenizers.Regex(r'\A +| +\z'), tokenizers.Regex(' {2,}')
        steps += [normalizers.Replace(ends, ''), normalizers.Replace(several, ' ')]
    steps.append(normalizers.Replace(' ', '\u2581'))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Replace(tokenizers.Regex(r'\A(?=[\s\S])'), '\u2581'))
    built.normalizer = normalizers.Sequence(steps)
    cuts = ['|'.join(re.escape(piece) for piece in sorted(users, key=len, reverse=True))] if users else []
    # Where neither scores nor merges keep text from becoming a piece that it spells, it is cut after its first signs.
    spelt = [p.piece for p in proto.pieces if p.piece not in normal and p.piece not in users]
    heads = [(p, re.match(r'\W*', p)[0] or p[0]) for p in spelt if p[0] not in normal or users]  # type: ignore[index]
    cuts += ['|'.join(f'(?<={re.escape(h)})(?={re.escape(p[len(h) :])})' for p, h in heads)] if heads else []
    splits = [pre_tokenizers.Split(tokenizers.Regex(cut), 'isolated') for cut in cuts]
    built.pre_tokenizer = pre_tokenizers.Sequence(splits)
    parts: list[Any] = [decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*parts, *([decoders.Strip(' ', left=1)] if spec.add_dummy_prefix else [])])
    built.add_special_tokens([p.piece for p in proto.pieces if p.type == kinds.CONTROL])
    return built


def _tiktoken(content: bytes, pattern: str, specials: Any) -> tokenizers.Tokenizer:
    """Byte-level BPE: a merge for each way to make a token of two others, in the order of the tokens' ranks."""
    lines = (line.split() for line in content.splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    characters = byte_characters()

    def spelt(token: bytes) -> str:
        return ''.join(characters[byte] for byte in token)

    splits = ((token[:i], token[i:]) for token in sorted(ranks, key=ranks.__getitem__) for i in range(1, len(token)))
    merges = [(spelt(a), spelt(b)) for a, b in splits if a in ranks and b in ranks]
    # Ids that no token has are filled with what no text spells, so that the special tokens get the ids behind them.
    free = sorted({*range(max(ranks.values()))} - {*ranks.values()})
    vocab = {spelt(token): rank for token, rank in ranks.items()} | {f' {i}': i for i in free}
    built = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    parts = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    built.pre_tokenizer = pre_tokenizers.Sequence(parts)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(list(specials))
    return built


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
            'vocab': {character: byte for byte, character in enumerate(byte_characters())} | {BOS: 256, EOS: 257},
            'merges': [],
        },
    }
