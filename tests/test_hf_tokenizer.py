"""The tokenizers of exported runs: what transformers makes of them gives the same ids, or none is written."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from test_data_tokenizers import model_file, tiktoken_file

os.environ['HF_HUB_OFFLINE'] = '1'
transformers = pytest.importorskip('transformers', minversion='5')

from fbt_jax.config import DataConfig  # noqa: E402
from fbt_jax.data import corpus  # noqa: E402
from fbt_jax.data.tokenizer import open_tokenizer, train_bpe  # noqa: E402
from fbt_jax.interop.hf_tokenizer import tokenizer_files  # noqa: E402

TEXTS = [
    '',
    ' ',
    'It is a truth',
    " \r\n\n\té \U0001f469\u200d\U0001f467 don't \u2581 née☃ |||EMAIL|||",
    'a<|bos|> <|eos|>b',
]


LINES = [line for line in corpus.split().train[0].split('\n') if line]


def written_tokenizer(folder: Path, tokenizer: Any, data: DataConfig) -> Any:
    for name, content in tokenizer_files(tokenizer, data).items():
        (folder / name).write_text(content)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize('name', ['bytes', 'bpe', 'tokenizer.json'])
def test_tokenizers_give_the_same_ids_and_bos_once(name: str, tmp_path: Path) -> None:
    data = DataConfig(tokenizer=name)
    if name == 'tokenizer.json':
        bpe = tokenizers.Tokenizer.from_str(train_bpe(['It is a truth universally acknowledged'] * 3, 280))
        bpe.add_tokens(['|||EMAIL|||'])
        bpe.add_special_tokens(['<|start|>'])
        processors = tokenizers.processors
        bpe.post_processor = processors.TemplateProcessing(single='<|eos|> $A', special_tokens=[('<|eos|>', 1)])
        bpe.enable_truncation(5)
        bpe.enable_padding(length=9)
        bpe.save(str(tmp_path / name))
        data = dataclasses.replace(data, tokenizer=str(tmp_path / name), bos='<|start|>', eos='<|eos|>')
    ours = open_tokenizer(data)
    (tmp_path / 'out').mkdir()
    theirs = written_tokenizer(tmp_path / 'out', ours, data)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    for text in TEXTS:
        assert theirs(text)['input_ids'] == [ours.bos_id, *ours.encode(text)]
        assert theirs(text, add_special_tokens=False)['input_ids'] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
        assert theirs.decode(theirs(text)['input_ids'], skip_special_tokens=True) == ours.decode(ours.encode(text))
    rows = theirs(['a', 'It is'], padding=True)
    assert rows['attention_mask'][0][0] == 0  # padded on the left


@pytest.mark.parametrize(
    ('name', 'options'),
    [
        pytest.param('ranks.tiktoken', {}, id='tiktoken, ids left out'),
        pytest.param('ranks.tiktoken', {'bos': '<|end|>', 'eos': '<|end|>'}, id='tiktoken, BOS is EOS'),
        pytest.param('unigram.model', {}, id='unigram'),
        pytest.param('unigram.model', {'add_dummy_prefix': True, 'byte_fallback': False}, id='unigram, a space first'),
        pytest.param(
            'unigram.model', {'user_defined_symbols': ['|||EMAIL|||', 'née☃']}, id="unigram, the user's pieces"
        ),
        pytest.param('bpe.model', {'model_type': 'bpe'}, id='BPE'),
        pytest.param('bpe.model', {'model_type': 'bpe', 'add_dummy_prefix': True}, id='BPE, a space first'),
        pytest.param(
            'bpe.model', {'model_type': 'bpe', 'user_defined_symbols': ['|||EMAIL|||']}, id="BPE, the user's pieces"
        ),
    ],
)
def test_tokenizers_of_other_libraries_give_the_same_ids(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    make = tiktoken_file if name.endswith('.tiktoken') else model_file
    data = make(tmp_path / name, LINES, **options)
    ours = open_tokenizer(data)
    (tmp_path / 'out').mkdir()
    theirs = written_tokenizer(tmp_path / 'out', ours, data)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    whole = corpus.split().validation[1]
    for text in [*TEXTS, '<s>', '</s> <unk> <0x41><0xE2>', '\u0301\u1100\u1161\u11a8\u0e33  \t', whole]:
        assert theirs(text)['input_ids'] == [ours.bos_id, *ours.encode(text)]
        assert theirs(text, add_special_tokens=False)['input_ids'] == ours.encode(text)
        if options.get('byte_fallback', True):
            assert theirs.decode(theirs(text)['input_ids'], skip_special_tokens=True) == ours.decode(ours.encode(text))
    assert len(ours.encode(whole)) > 1000


def test_a_tokenizer_without_an_exact_form_is_left_out(tmp_path: Path) -> None:
    """`tokenizers` reads NFKC maps grapheme by grapheme, SentencePiece by the longest match."""
    data = model_file(tmp_path / 'a.model', LINES, normalization_rule_name='nmt_nfkc')
    assert tokenizer_files(open_tokenizer(data), data) == {}
    words = model_file(tmp_path / 'b.model', LINES, model_type='char')
    assert tokenizer_files(open_tokenizer(words), words) == {}
    # Its expressions know no possessive repetition of a count.
    ranks = tiktoken_file(tmp_path / 'a.tiktoken', LINES, tokenizer_pattern=r'[a-z]{1,2}+|[\s\S]')
    assert tokenizer_files(open_tokenizer(ranks), ranks) == {}
    assert tokenizer_files(None, DataConfig(source='word_problem', tokenizer='none')) == {}
