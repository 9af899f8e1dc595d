"""Tokenizers, built in and from files, against UTF-8 itself and what the three libraries say of the same files."""

import base64
import dataclasses
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from fbt_jax.config_data import DataConfig
from fbt_jax.data import corpus
from fbt_jax.data.tokenizer import BPE_VOCAB_SIZE, ByteTokenizer, Tokenizer, open_tokenizer, resolved, train_bpe
from fbt_jax.errors import UserError

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


@pytest.fixture(scope='module')
def prose() -> list[str]:
    """Lines of one chapter."""
    return [line for line in corpus.split().train[0].split('\n') if line]


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('tokenizers')


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


@pytest.fixture(scope='module', params=['bytes', 'bpe', *FILES])
def data(request: pytest.FixtureRequest, folder: Path, prose: list[str]) -> DataConfig:
    name = request.param
    return FILES[name](folder / name, prose) if name in FILES else DataConfig(tokenizer=name)


def check(encoding: Tokenizer, texts: list[str]) -> None:
    """No byte of any text is lost, none is counted twice, and the ids are in range and none of them BOS or EOS."""
    for text, ids in zip(texts, encoding.encode_batch(texts), strict=True):
        assert ids.dtype == np.uint32
        assert encoding.token_bytes[ids].sum() == len(text.encode()), text
        assert encoding.decode(ids) == text
        assert not {encoding.bos_id, encoding.eos_id} & set(ids.tolist())
        assert (ids < encoding.vocab_size).all()


def test_any_text_survives_and_its_bytes_are_counted(data):
    check(open_tokenizer(data), TEXTS)


def test_batches_special_tokens_and_cut_characters(data):
    encoding = open_tokenizer(data)
    batch = encoding.encode_batch(TEXTS)
    assert [ids.tolist() for ids in batch] == [encoding.encode(text) for text in TEXTS]
    assert encoding.encode_batch([]) == []
    assert encoding.token_bytes.shape == (encoding.vocab_size,)
    assert encoding.token_bytes.dtype == np.int32
    assert encoding.token_bytes[[encoding.bos_id, encoding.eos_id]].tolist() == [0, 0]
    padding = encoding.vocab_size + 5  # an id that the padded embedding matrix has and the tokenizer hasn't
    ids = np.array([encoding.bos_id, *encoding.encode('naïve'), encoding.eos_id, padding], np.int32)
    assert encoding.decode(ids) == 'naïve'
    assert '\ufffd' in encoding.decode(encoding.encode('🙂')[:1]), 'a character cut in two'
    assert open_tokenizer(dataclasses.replace(data)) is encoding


def test_a_copy_in_the_run_is_the_same_tokenizer_without_the_file(data, tmp_path):
    whole = resolved(data)
    found = open_tokenizer(whole)
    if found.file is None:
        assert whole == data
        return
    name, content = found.file
    assert content == Path(data.tokenizer).read_bytes()
    (tmp_path / name).write_bytes(content)
    gone = dataclasses.replace(whole, tokenizer=f'/nowhere/{name}')
    copy = open_tokenizer(gone, tmp_path)
    assert copy.fingerprint == found.fingerprint == open_tokenizer(data).fingerprint
    assert (copy.bos_id, copy.eos_id) == (found.bos_id, found.eos_id)
    assert copy.file == found.file
    with pytest.raises(UserError, match=r"^data\.tokenizer = '/nowhere/.*': No such file or directory$"):
        open_tokenizer(gone, tmp_path / 'empty')


def test_what_follows_a_text_keeps_its_spaces(data):
    """Also where a document's own first space is left out, as in the files of Llama 2 (below)."""
    tokenizer = open_tokenizer(data)
    text = 'def f(x):\n    """Doc\u00e9."""\n    return  x\n'
    ids = tokenizer.encode(text)
    for n in range(1, len(ids)):
        before, after = tokenizer.decode(ids[:n]), tokenizer.decode(ids[n:], after=[tokenizer.bos_id, *ids[:n]])
        if not before.endswith('\ufffd'):  # else within a character
            assert before + after == text
    assert tokenizer.decode(ids, after=[tokenizer.bos_id]) == text


def test_bytes_before_a_text_take_none_of_it_along(tmp_path, prose):
    """As `tokenizers` reads a run of bytes: all or nothing of it."""
    tokenizer = open_tokenizer(fallback_file(tmp_path / 'a.json', prose))
    thai = tokenizer.encode('\u0e01' * 40)
    assert len(thai) == 120
    x, partial = tokenizer.encode('xa'), tokenizer.encode('\u65e5')[:1]
    assert tokenizer.decode(x, after=thai) == tokenizer.decode(x, after=[*thai, *partial]) == 'xa'
    assert tokenizer.decode([*partial, *x], after=tokenizer.encode('\u65e5\u672c')) == '\ufffdxa'


@pytest.mark.parametrize('kind', ['json', 'model'])
def test_the_space_that_begins_a_document_is_not_taken_from_what_follows(kind, tmp_path, prose):
    if kind == 'model':
        data = model_file(tmp_path / 'a.model', prose, add_dummy_prefix=True)
    else:
        data = fallback_file(tmp_path / 'a.json', prose)
        whole = tokenizers.Tokenizer.from_file(str(tmp_path / 'a.json'))
        whole.normalizer = normalizers.Sequence([normalizers.Prepend('\u2581'), normalizers.Replace(' ', '\u2581')])
        steps = [decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]
        whole.decoder = decoders.Sequence(steps)
        whole.save(str(tmp_path / 'a.json'))
    tokenizer = open_tokenizer(data)
    ids = tokenizer.encode('She had')
    n = next(n for n in range(1, len(ids)) if tokenizer.decode(ids[:n]) == 'She')
    assert tokenizer.decode(ids[n:]) == 'had'
    assert tokenizer.decode(ids[n:], after=ids[:n]) == ' had'
    assert tokenizer.decode(ids, after=[tokenizer.bos_id]) == 'She had'


def test_bytes_are_bytes():
    assert ByteTokenizer().encode('aé') == [97, 0xC3, 0xA9]
    assert ByteTokenizer().decode([97, 255, 98, 257]) == 'a\ufffdb'
    assert (ByteTokenizer().bos_id, ByteTokenizer().eos_id, ByteTokenizer().vocab_size) == (256, 257, 258)


def test_the_shipped_bpe_is_what_training_on_the_training_split_gives(tmp_path):
    (tmp_path / 'trained.json').write_text(train_bpe(corpus.split().train))
    shipped = open_tokenizer(DataConfig(tokenizer='bpe'))
    assert open_tokenizer(DataConfig(tokenizer=f'{tmp_path}/trained.json')).fingerprint == shipped.fingerprint
    assert shipped.vocab_size == BPE_VOCAB_SIZE
    assert shipped.file is None
    text = corpus.split().validation[0]
    assert len(shipped.encode(text)) < len(text) / 3


PLAIN = [text for text in TEXTS if '<|' not in text]  # those that spell no special token


@pytest.mark.parametrize('name', ['tokenizer.json', 'fallback.json'])
def test_json_files_encode_as_hugging_face_does(name, tmp_path, prose):
    path = tmp_path / name
    encoding = open_tokenizer(FILES[name](path, prose))
    library = tokenizers.Tokenizer.from_file(str(path))
    library.no_truncation()
    library.no_padding()
    texts = [*PLAIN, *prose, 'to |||EMAIL||| now']
    assert [i.tolist() for i in encoding.encode_batch(texts)] == [
        library.encode(text, add_special_tokens=False).ids for text in texts
    ]
    assert encoding.vocab_size == library.get_vocab_size()
    check(encoding, ['to |||EMAIL||| now', 'a née☃', '<|im_start|>'])


@pytest.mark.parametrize('name', ['unigram.model', 'bpe.model'])
def test_model_files_encode_as_sentencepiece_does(name, tmp_path, prose):
    encoding = open_tokenizer(FILES[name](tmp_path / name, prose))
    library = pytest.importorskip('sentencepiece').SentencePieceProcessor(model_file=str(tmp_path / name))
    texts = [*TEXTS, *prose]
    assert [i.tolist() for i in encoding.encode_batch(texts)] == [library.encode(text) for text in texts]
    assert (encoding.bos_id, encoding.eos_id) == (library.bos_id(), library.eos_id())
    assert encoding.vocab_size == library.get_piece_size()
    assert encoding.token_bytes[[library.unk_id(), library.piece_to_id('<0xE2>')]].tolist() == [0, 1]


def test_tiktoken_files_encode_as_tiktoken_does(tmp_path, prose):
    library = pytest.importorskip('tiktoken').Encoding(
        'test', pat_str=PATTERN, mergeable_ranks=ranks(skip=10), special_tokens={}
    )
    encoding = open_tokenizer(tiktoken_file(tmp_path / 'a.tiktoken', prose))
    texts = [*TEXTS, *prose]
    assert [i.tolist() for i in encoding.encode_batch(texts)] == [library.encode_ordinary(text) for text in texts]
    # 256 bytes, 10 ranks that nobody has, 9 merges.
    assert (encoding.bos_id, encoding.eos_id, encoding.vocab_size) == (275, 276, 277)
    assert encoding.token_bytes[254:268].tolist() == [1, 1, *[0] * 10, 2, 3]


def test_bos_and_eos_can_be_one_token(tmp_path, prose):
    data = tiktoken_file(tmp_path / 'a.tiktoken', prose, bos='<|endoftext|>', eos='<|endoftext|>')
    encoding = open_tokenizer(data)
    assert (encoding.bos_id, encoding.eos_id, encoding.vocab_size) == (275, 275, 276)
    check(encoding, TEXTS)
    data = dataclasses.replace(json_file(tmp_path / 'a.json', prose), bos='<|eos|>', eos='<|eos|>')
    assert open_tokenizer(data).bos_id == open_tokenizer(data).eos_id == 1


def test_a_dummy_prefix_is_one_byte_too_many_a_document(tmp_path, prose):
    encoding = open_tokenizer(model_file(tmp_path / 'a.model', prose, add_dummy_prefix=True))
    for text in filter(None, TEXTS):
        ids = encoding.encode(text)
        assert encoding.token_bytes[ids].sum() == len(text.encode()) + 1
        assert encoding.decode(ids) == text


def test_what_a_model_without_byte_fallback_lacks_counts_nothing(tmp_path, prose):
    encoding = open_tokenizer(model_file(tmp_path / 'a.model', prose, byte_fallback=False))
    ids = encoding.encode('a☃b')
    assert encoding.token_bytes[ids].tolist() == [1, 0, 1]
    assert encoding.decode(ids) == 'ab'


@pytest.mark.parametrize(
    ('name', 'declared'),
    [
        ('tokenizer_config.json', {'bos_token': '<|im_start|>', 'eos_token': {'content': '<|bos|>', 'lstrip': False}}),
        ('special_tokens_map.json', {'bos_token': {'content': '<|im_start|>'}, 'eos_token': '<|bos|>'}),
    ],
)
def test_files_beside_a_json_declare_bos_and_eos(name, declared, tmp_path, prose):
    data = json_file(tmp_path / 'tokenizer.json', prose)
    (tmp_path / 'special_tokens_map.json').write_text('{"bos_token": "<|eos|>"}')  # tokenizer_config.json wins
    (tmp_path / 'tokenizer_config.json').write_text('{"bos_token": null}')
    (tmp_path / name).write_text(json.dumps(declared))
    encoding, start = open_tokenizer(data), 402  # 400 of the BPE and two added tokens
    assert (encoding.bos_id, encoding.eos_id) == (start, 0)
    copies = tmp_path / 'copies'
    copies.mkdir()
    shutil.copy(data.tokenizer, copies)
    assert open_tokenizer(data, copies).fingerprint == encoding.fingerprint, 'what lies beside the file still counts'
    whole = resolved(data)
    assert (whole.bos, whole.eos) == ('<|im_start|>', '<|bos|>')
    gone = dataclasses.replace(whole, tokenizer='/nowhere/tokenizer.json')
    assert open_tokenizer(gone, copies).fingerprint == encoding.fingerprint
    named = open_tokenizer(dataclasses.replace(data, bos='<|eos|>'))
    assert (named.bos_id, named.eos_id) == (1, 0)


def test_fingerprints_differ_with_all_that_decides_the_encoding(tmp_path, prose):
    first = tiktoken_file(tmp_path / 'a.tiktoken', prose)
    (tmp_path / 'other.tiktoken').write_text(lines(ranks()))
    (tmp_path / 'a.json').write_text(train_bpe(['some text'], 300))
    (tmp_path / 'b.json').write_text(train_bpe(['another text'], 300))
    some = DataConfig(tokenizer=f'{tmp_path}/a.json')
    configs = [
        first,
        dataclasses.replace(first, tokenizer=f'{tmp_path}/other.tiktoken'),
        dataclasses.replace(first, tokenizer_pattern=r'\s?\w+|\W'),
        dataclasses.replace(first, bos='</s>'),  # one id for both
        some,
        DataConfig(tokenizer=f'{tmp_path}/b.json'),
        dataclasses.replace(some, bos='<|eos|>'),
        dataclasses.replace(some, eos='<|bos|>'),
        dataclasses.replace(some, bos='<|eos|>', eos='<|bos|>'),
        DataConfig(tokenizer='bytes'),
        DataConfig(tokenizer='bpe'),
    ]
    assert len({open_tokenizer(data).fingerprint for data in configs}) == len(configs)
    assert open_tokenizer(dataclasses.replace(some, bos='<|bos|>')).fingerprint == open_tokenizer(some).fingerprint


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


def test_vocab_size_is_the_largest_id_and_one(tmp_path):
    # The first of the bytes moves from id 2, after BOS and EOS, far up.
    (tmp_path / 'a.json').write_text(edited(lambda told: told['model']['vocab'].update({'!': 5000})))
    encoding = open_tokenizer(DataConfig(tokenizer=f'{tmp_path}/a.json'))
    assert (encoding.vocab_size, encoding.encode('!')) == (5001, [5000])
    assert encoding.token_bytes.nonzero()[0][[0, -1]].tolist() == [3, 5000]
    check(encoding, TEXTS)


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


OLMO2 = Path(os.environ.get('FBT_MATERIALS', '/no/materials')).absolute() / 'olmo2_tokenizer.json'


@pytest.mark.skipif(not OLMO2.exists(), reason='FBT_MATERIALS names no folder made by tests/materials.sh')
def test_olmo_2_on_the_novels():
    encoding = open_tokenizer(DataConfig(tokenizer=str(OLMO2), bos='<|endoftext|>', eos='<|endoftext|>'))
    check(encoding, [*corpus.split().train, *corpus.split().validation, *TEXTS])
