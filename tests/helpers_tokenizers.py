"""Texts that tokenizers must keep, and tokenizers' files of each kind, made up."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from fbt_jax.config_data import DataConfig
from fbt_jax.data.tokenizer import Tokenizer, train_bpe

ODD_TEXTS = {
    'empty': '',
    'emoji': 'née☃ 👩\u200d👩\u200d👧 née 🇫🇷 naïve',
    'combining marks': 'e\u0301 n\u0303a\u0308\u0323 \u1100\u1161\u11a8 ｆｕｌｌ ﬁ',
    'nul': 'a\0b\0\0',
    'controls': ''.join(map(chr, range(32))) + '\x7f\x80\x9f\ufeff\ufffd\uffff',
    'specials spelt out': '<|bos|>a<|eos|> <|bos|><|eos|> <s>b</s><unk><0x41> <|endoftext|>',
    'spaces': '  a  \n\n\n\n \t\r\n b   ',
    'windows newlines': 'It is\r\na truth\r\n\r\nuniversally\r',
    'every two-byte character': ''.join(map(chr, range(0x800))),
    'every lead byte': ''.join(map(chr, [*range(0x800, 0xD800, 0x100), *range(0xE000, 0x110000, 0x1000)])),
    'prose': 'It is a truth universally acknowledged, that a single man...',
}


PATTERN = r'\s?\w+|\s?[^\s\w]+|\s+'


def random_texts() -> list[str]:
    """40 texts of 0 to 60 characters each, from ASCII to the end of Unicode."""
    draws = np.random.default_rng(0)
    tops = draws.choice([0x80, 0x500, 0xD800, 0x110000], (40, 60))
    points = (draws.random((40, 60)) * tops).astype(int)
    fine = (points < 0xD800) | (points > 0xDFFF)
    fine &= points != 0x2581  # a space to SentencePiece
    return [''.join(map(chr, p[f][: draws.integers(61)])) for p, f in zip(points, fine, strict=True)]


TEXTS = [*ODD_TEXTS.values(), *random_texts()]


def json_file(path: Path, prose: list[str]) -> DataConfig:
    """A byte-level BPE that would cut, pad and add BOS if it were let, with an added token that is no special one."""
    bpe = tokenizers.Tokenizer.from_str(train_bpe(prose, 400))
    bpe.add_tokens(['|||EMAIL|||', 'née☃'])
    bpe.add_special_tokens(['<|im_start|>'])
    bpe.post_processor = processors.TemplateProcessing(single='<|bos|> $A', special_tokens=[('<|bos|>', 0)])
    bpe.enable_truncation(5)
    bpe.enable_padding(length=9)
    bpe.save(str(path))
    return DataConfig(tokenizer=str(path))


def fallback_file(path: Path, prose: list[str]) -> DataConfig:
    """A BPE like Llama 2's: U+2581 for a space, characters it lacks as byte tokens."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Replace(' ', '\u2581')
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme='never')
    bpe.train_from_iterator(prose, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    told = json.loads(bpe.to_str())['model']
    names = ['<unk>', '<s>', '</s>', *(f'<0x{b:02X}>' for b in range(256)), *told['vocab']]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [tuple(pair) for pair in told['merges']]
    whole = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token='<unk>', fuse_unk=True, byte_fallback=True))
    whole.normalizer = bpe.normalizer
    whole.decoder = decoders.Sequence([decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse()])
    whole.add_special_tokens(['<unk>', '<s>', '</s>'])
    whole.save(str(path))
    return DataConfig(tokenizer=str(path), bos='<s>', eos='</s>')


def model_file(path: Path, prose: list[str], **options: Any) -> DataConfig:
    library = pytest.importorskip('sentencepiece')
    written = io.BytesIO()
    options = {'add_dummy_prefix': False, 'byte_fallback': True, 'normalization_rule_name': 'identity'} | options
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(prose),
        model_writer=written,
        vocab_size=450,
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    path.write_bytes(written.getvalue())
    return DataConfig(tokenizer=str(path))


def ranks(*, skip: int = 0) -> dict[bytes, int]:
    """Each byte and a few merges; `skip` leaves out that many ranks in between."""
    merges = [b'th', b'the', b' the', b'in', b'ing', b'\r\n', 'é'.encode(), '👩'.encode()[:2], '👩'.encode()[:3]]
    return {bytes([b]): b for b in range(256)} | {token: 256 + skip + i for i, token in enumerate(merges)}


def lines(table: dict[bytes, int]) -> str:
    return ''.join(f'{base64.b64encode(token).decode()} {rank}\n' for token, rank in table.items())


def tiktoken_file(path: Path, _: list[str], **changes: str) -> DataConfig:
    pytest.importorskip('tiktoken')
    path.write_text(lines(ranks(skip=10)))
    return DataConfig(tokenizer=str(path), **{'tokenizer_pattern': PATTERN, 'bos': '<s>', 'eos': '</s>'} | changes)


FILES: dict[str, Callable[[Path, list[str]], DataConfig]] = {
    'tokenizer.json': json_file,
    'fallback.json': fallback_file,
    'unigram.model': model_file,
    'bpe.model': lambda path, prose: model_file(path, prose, model_type='bpe'),
    'ranks.tiktoken': tiktoken_file,
}


def check(encoding: Tokenizer, texts: list[str]) -> None:
    """No byte of any text is lost, none is counted twice, and the ids are in range and none of them BOS or EOS."""
    for text, ids in zip(texts, encoding.encode_batch(texts), strict=True):
        assert ids.dtype == np.uint32
        assert encoding.token_bytes[ids].sum() == len(text.encode()), text
        assert encoding.decode(ids) == text
        assert not {encoding.bos_id, encoding.eos_id} & set(ids.tolist())
        assert (ids < encoding.vocab_size).all()


PLAIN = [text for text in TEXTS if '<|' not in text]  # those that spell no special token


def edited(change: Callable[[dict[str, Any]], Any]) -> str:
    """A small tokenizer.json after `change` of what it says."""
    told = json.loads(train_bpe(['some text'], 300))
    change(told)
    return json.dumps(told)


def without_special_tokens(told: dict[str, Any]) -> None:
    told['added_tokens'] = []


def without_a_byte(told: dict[str, Any]) -> None:
    told['model']['vocab']['no byte'] = told['model']['vocab'].pop('é')


def without_control_characters(told: dict[str, Any]) -> None:
    """As SmolLM2's: 0x04 is spelt U+0104, 0xF1 itself."""
    for character in '\u0104\xf1':
        told['model']['vocab'][f'no {character}'] = told['model']['vocab'].pop(character)


def takes_words_whole(told: dict[str, Any]) -> None:
    """The model finds BOS in its own vocabulary, without a merge."""
    told['model']['ignore_merges'] = True
    told['pre_tokenizer']['use_regex'] = False
