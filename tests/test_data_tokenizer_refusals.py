"""Tokenizers' files that are refused in one line, and what they may lack."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest
from helpers_tokenizers import (
    PATTERN,
    TEXTS,
    check,
    edited,
    json_file,
    lines,
    model_file,
    ranks,
    takes_words_whole,
    without_a_byte,
    without_control_characters,
    without_special_tokens,
)

from fbt_jax.config_data import DataConfig
from fbt_jax.data import corpus
from fbt_jax.data.tokenizer import open_tokenizer, train_bpe
from fbt_jax.errors import UserError


@pytest.fixture(scope='module')
def prose() -> list[str]:
    """Lines of one chapter."""
    return [line for line in corpus.split().train[0].split('\n') if line]


REFUSED: dict[str, tuple[str, str, dict[str, str], str]] = {
    'missing': (
        '',
        '',
        {'tokenizer': '/nowhere/a.json'},
        r"data\.tokenizer = '/nowhere/a\.json': No such file or directory",
    ),
    'empty': ('a.model', '', {}, r"data\.tokenizer = '.*a\.model': the file is empty"),
    'no json': ('a.json', 'words', {}, r"data\.tokenizer = '.*a\.json': no tokenizer\.json: .*"),
    'other json': ('a.json', '{"bos_token": "<s>"}', {}, r"data\.tokenizer = '.*a\.json': no tokenizer\.json: .*"),
    'no model': ('a.model', 'words', {}, r"data\.tokenizer = '.*a\.model': no SentencePiece model: .*"),
    'no ranks': ('a.tiktoken', 'IQ== 0\nwords', {}, r"data\.tokenizer = '.*': lines must be a token in base64 and .*"),
    'no base64': ('a.tiktoken', '*** 0', {}, r"data\.tokenizer = '.*': lines must be a token in base64 and its rank.*"),
    'few bytes': ('a.tiktoken', 'IQ== 0', {}, r"data\.tokenizer = '.*': loses text: lacks 255 single bytes, 0 for one"),
    'one rank for all': (
        'a.tiktoken',
        lines(dict.fromkeys(ranks(), 7)),
        {},
        r'.*its ranks must be different numbers.*',
    ),
    'negative rank': (
        'a.tiktoken',
        lines(ranks() | {b'aa': -1}),
        {},
        r'.*its ranks must be different numbers in 0.*',
    ),
    'enormous rank': (
        'a.tiktoken',
        lines(ranks() | {b'aa': 10**12}),
        {},
        r'.*its ranks must be different numbers in 0.*',
    ),
    'no expression': (
        'a.tiktoken',
        lines(ranks()),
        {'tokenizer_pattern': '(a'},
        r"data\.tokenizer_pattern = '\(a': no regular expression: .*",
    ),
    'words only': (
        'a.tiktoken',
        lines(ranks()),
        {'tokenizer_pattern': r'\w+'},
        r"data\.tokenizer_pattern = '\\\\w\+': loses text: every character must belong to a match",
    ),
    'no bos': ('a.tiktoken', lines(ranks()), {'bos': ''}, r"data\.bos = '': .*a\.tiktoken names no tokens: give .*"),
    'no eos': ('a.tiktoken', lines(ranks()), {'eos': ''}, r"data\.eos = '': .*a\.tiktoken names no tokens: give .*"),
    'misnamed': (
        'a.json',
        train_bpe(['some text'], 300),
        {'eos': '<|end|>'},
        r"data\.eos = '<\|end\|>': set .* of .*a\.json, which has <\|bos\|>, <\|eos\|>",
    ),
    'a word as bos': ('a.json', train_bpe(['some text'], 300), {'bos': 'e'}, r"data\.bos = 'e': set data\.bos and .*"),
    'none declared': ('a.json', edited(without_special_tokens), {}, r"data\.bos = '': set data\.bos .* which has none"),
    'bos from text': (
        'a.json',
        edited(takes_words_whole),
        {},
        r"data\.bos = '<\|bos\|>': .* encodes text as this token",
    ),
    'dropout': ('a.json', edited(lambda told: told['model'].update(dropout=0.1)), {}, r'.* has a dropout, .*'),
    'a byte short': ('a.json', edited(without_a_byte), {}, r'.*: loses text: lacks 1 single bytes, 233 for one'),
    'characters': (
        'a.json',
        edited(lambda told: told.update(pre_tokenizer=None, decoder=None)),
        {},
        r'.*: loses text: must be byte-level or fall back to bytes',
    ),
}


@pytest.mark.parametrize(('name', 'content', 'changes', 'message'), REFUSED.values(), ids=REFUSED)
def test_wrong_files_and_names_are_refused_in_one_line(name, content, changes, message, tmp_path):
    if name.endswith(('.model', '.tiktoken')):
        pytest.importorskip({'.model': 'sentencepiece', '.tiktoken': 'tiktoken'}[Path(name).suffix])
    if name:
        (tmp_path / name).write_text(content)
    words = {'tokenizer_pattern': PATTERN, 'bos': '<s>', 'eos': '</s>'} if name.endswith('.tiktoken') else {}
    with pytest.raises(UserError) as caught:
        open_tokenizer(DataConfig(**{'tokenizer': f'{tmp_path}/{name}'} | words | changes))
    assert re.fullmatch(message, str(caught.value)), str(caught.value)
    assert '\n' not in str(caught.value)


def test_a_model_made_without_bos_needs_a_name(tmp_path, prose):
    data = model_file(tmp_path / 'a.model', prose, bos_id=-1, control_symbols=['<|start|>'])
    with pytest.raises(UserError, match=r"^data\.bos = '': set .*/a\.model, which has <\|start\|>, </s>$"):
        open_tokenizer(data)
    encoding = open_tokenizer(dataclasses.replace(data, bos='<|start|>'))
    check(encoding, ['<|start|>a', *TEXTS])


def test_a_broken_file_beside_a_json_is_told(tmp_path, prose):
    data = json_file(tmp_path / 'tokenizer.json', prose)
    for broken in ('{', '[]', '{"bos_token": 3}', '{"bos_token": {"id": 3}}'):
        (tmp_path / 'tokenizer_config.json').write_text(broken)
        with pytest.raises(UserError, match=r'tokenizer_config\.json beside it is broken .*: set data\.bos'):
            open_tokenizer(data)
    open_tokenizer(dataclasses.replace(data, bos='<|bos|>', eos='<|eos|>'))


@pytest.mark.parametrize(('name', 'library'), [('a.model', 'sentencepiece'), ('a.tiktoken', 'tiktoken')])
def test_a_missing_library_is_told(name, library, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / name).write_text('words')
    words = {'tokenizer_pattern': PATTERN, 'bos': '<s>', 'eos': '</s>'} if library == 'tiktoken' else {}
    with pytest.raises(UserError, match=rf"{name}': needs {library}: pip install 'fbt-jax\[tokenizers\]'$"):
        open_tokenizer(DataConfig(tokenizer=f'{tmp_path}/{name}', **words))


def test_bytes_that_no_text_needs_may_be_missing(tmp_path):
    """As in SmolLM2's tokenizer, which lacks 0x04 and 0xF1 among others: it loses what holds them, and only that."""
    path = tmp_path / 'a.json'
    path.write_text(edited(without_control_characters))
    encoding = open_tokenizer(DataConfig(tokenizer=str(path)))
    check(encoding, ['It is a truth', ' \t\n\r\x0cé\U0001f469'])
    lost = 'a\x04b\U00040000c'  # the first byte of U+40000 is 0xF1
    assert encoding.decode(encoding.encode(lost)).startswith('ab')
    assert sum(encoding.token_bytes[encoding.encode(lost)]) == len(lost.encode()) - 2
