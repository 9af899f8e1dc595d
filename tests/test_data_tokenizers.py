"""Tokenizers, built in and from files, against UTF-8 itself and what the three libraries say of the same files."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from helpers_tokenizers import (
    FILES,
    PATTERN,
    PLAIN,
    TEXTS,
    check,
    edited,
    fallback_file,
    json_file,
    lines,
    model_file,
    ranks,
    tiktoken_file,
)
from tokenizers import decoders, normalizers

from fbt_jax.config_data import DataConfig
from fbt_jax.data import corpus
from fbt_jax.data.tokenizer import BPE_VOCAB_SIZE, ByteTokenizer, open_tokenizer, resolved, train_bpe
from fbt_jax.errors import UserError


@pytest.fixture(scope='module')
def prose() -> list[str]:
    """Lines of one chapter."""
    return [line for line in corpus.split().train[0].split('\n') if line]


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('tokenizers')


@pytest.fixture(scope='module', params=['bytes', 'bpe', *FILES])
def data(request: pytest.FixtureRequest, folder: Path, prose: list[str]) -> DataConfig:
    name = request.param
    return FILES[name](folder / name, prose) if name in FILES else DataConfig(tokenizer=name)


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


def test_vocab_size_is_the_largest_id_and_one(tmp_path):
    # The first of the bytes moves from id 2, after BOS and EOS, far up.
    (tmp_path / 'a.json').write_text(edited(lambda told: told['model']['vocab'].update({'!': 5000})))
    encoding = open_tokenizer(DataConfig(tokenizer=f'{tmp_path}/a.json'))
    assert (encoding.vocab_size, encoding.encode('!')) == (5001, [5000])
    assert encoding.token_bytes.nonzero()[0][[0, -1]].tolist() == [3, 5000]
    check(encoding, TEXTS)


OLMO2 = Path(os.environ.get('FBT_MATERIALS', '/no/materials')).absolute() / 'olmo2_tokenizer.json'


@pytest.mark.skipif(not OLMO2.exists(), reason='FBT_MATERIALS names no folder made by tests/materials.sh')
def test_olmo_2_on_the_novels():
    encoding = open_tokenizer(DataConfig(tokenizer=str(OLMO2), bos='<|endoftext|>', eos='<|endoftext|>'))
    check(encoding, [*corpus.split().train, *corpus.split().validation, *TEXTS])
