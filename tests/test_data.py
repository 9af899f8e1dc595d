"""Corpus, tokenizers and the word problem, against facts about the novels, UTF-8 itself and permutation matrices."""

import hashlib
import itertools
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from fbt_jax.data import corpus, word_problem
from fbt_jax.data.tokenizer import BPE_VOCAB_SIZE, BpeTokenizer, ByteTokenizer, tokenizer, train_bpe

# Chapters of the novels in the corpus's order: Emma (18 + 18 + 19), Mansfield Park, Northanger Abbey, Persuasion,
# Pride and Prejudice, Sense and Sensibility.
CHAPTERS = (55, 48, 31, 24, 61, 50)
TITLES = ('EMMA', 'MANSFIELD PARK', 'NORTHANGER ABBEY', 'Persuasion', 'PRIDE AND PREJUDICE', 'SENSE AND SENSIBILITY')

ODD_TEXTS = {
    'empty': '',
    'emoji': '👩\u200d👩\u200d👧 née 🇫🇷 naïve',
    'nul': 'a\0b\0\0',
    'controls': ''.join(map(chr, range(32))) + '\x7f\x80\x9f\ufeff\ufffd\uffff',
    'specials spelt out': '<|bos|>a<|eos|> <|bos|><|eos|>',
    'spaces': '  a  \n\n\n\n \t\r\n b   ',
    'every two-byte character': ''.join(map(chr, range(0x800))),
    'every lead byte': ''.join(map(chr, [*range(0x800, 0xD800, 0x100), *range(0xE000, 0x110000, 0x1000)])),
    'prose': 'It is a truth universally acknowledged, that a single man...',
}


def test_the_documents_joined_are_the_text():
    text = corpus.text()
    # Of the bytes as delivered, written down before the code that splits them.
    digest = '49e55f4936b4a0835f04c5d885f6f56cc19b6a55679df4164f91c49ba14e6992'
    assert hashlib.sha256(text.encode()).hexdigest() == digest
    assert ''.join(corpus.chapters(text)) == text


def test_every_chapter_of_the_six_novels_is_a_document():
    documents = corpus.chapters(corpus.text())
    assert len(documents) == sum(CHAPTERS)
    firsts = [0, *itertools.accumulate(CHAPTERS)][:-1]
    assert [documents[i].split('\n')[0] for i in firsts] == list(TITLES)
    assert [i for i, d in enumerate(documents) if d.startswith('VOLUME')] == [18, 36]
    assert all(d.lower().startswith('chapter ') for i, d in enumerate(documents) if i not in (*firsts, 18, 36))
    assert documents[54].rstrip().endswith('FINIS')
    assert min(map(len, documents)) > 3000


def test_front_matter_joins_the_chapter_after_it_and_end_matter_the_one_before():
    parts = (
        'Title page\n\nEMMA\n\nVOLUME I\n\nCHAPTER I\n\nIn CHAPTER II she\n',
        'CHAPTER II\n\nEMMA was here. Chapter 3\n\nFINIS\n\n',
        'Persuasion\n\nA preface\n\nChapter 1\n\nCHAPTER ONE\n',
        'Chapter 2\n\nend',
    )
    assert corpus.chapters(''.join(parts)) == parts


def test_splits_are_disjoint_complete_and_spread_over_the_novels():
    documents = corpus.chapters(corpus.text())
    split = corpus.split()
    assert Counter(split.train) + Counter(split.validation) == Counter(documents)
    assert not set(split.train) & set(split.validation)
    assert 0.04 < sum(map(len, split.validation)) / sum(map(len, documents)) < 0.05
    ends = list(itertools.accumulate(CHAPTERS))
    novels = Counter(next(n for n, end in enumerate(ends) if documents.index(d) < end) for d in split.validation)
    assert all(novels[n] > 0 for n in range(6))


@pytest.mark.parametrize('name', ['bytes', 'bpe'])
@pytest.mark.parametrize('text', ODD_TEXTS.values(), ids=ODD_TEXTS.keys())
def test_any_text_survives_and_its_bytes_are_counted(name, text):
    encoding = tokenizer(name)
    ids = encoding.encode(text)
    assert encoding.decode(ids) == text
    assert encoding.token_bytes[ids].sum() == len(text.encode())
    assert not {encoding.bos_id, encoding.eos_id} & set(ids)
    assert all(0 <= i < encoding.vocab_size for i in ids)


@pytest.mark.parametrize('name', ['bytes', 'bpe'])
def test_batches_arrays_and_special_tokens(name):
    encoding = tokenizer(name)
    texts = list(ODD_TEXTS.values())
    assert encoding.encode_batch(texts) == [encoding.encode(text) for text in texts]
    ids = np.array([encoding.bos_id, *encoding.encode('naïve'), encoding.eos_id], np.int32)
    assert encoding.decode(ids) == 'naïve'
    assert encoding.token_bytes[[encoding.bos_id, encoding.eos_id]].tolist() == [0, 0]
    assert encoding.token_bytes.shape == (encoding.vocab_size,)
    assert encoding.token_bytes.dtype == np.int32
    assert '\ufffd' in encoding.decode(encoding.encode('🙂')[:1]), 'a character cut in two'
    assert tokenizer(name) is encoding


def test_bytes_are_bytes():
    assert ByteTokenizer().encode('aé') == [97, 0xC3, 0xA9]
    assert ByteTokenizer().decode([97, 255, 98, 257]) == 'a\ufffdb'
    assert (ByteTokenizer().bos_id, ByteTokenizer().eos_id, ByteTokenizer().vocab_size) == (256, 257, 258)


def test_the_shipped_bpe_is_what_training_on_the_training_split_gives():
    trained = train_bpe(corpus.split().train)
    shipped = tokenizer('bpe')
    assert BpeTokenizer(trained).fingerprint == shipped.fingerprint
    assert shipped.vocab_size == BPE_VOCAB_SIZE
    text = corpus.split().validation[0]
    assert len(shipped.encode(text)) < len(text) / 3


def test_fingerprints_tell_tokenizers_apart():
    small, other = train_bpe(['some text'], 300), train_bpe(['another text'], 300)
    prints = {t.fingerprint for t in (ByteTokenizer(), BpeTokenizer(small), BpeTokenizer(other), tokenizer('bpe'))}
    assert len(prints) == 4
    assert BpeTokenizer(small).fingerprint == BpeTokenizer(small).fingerprint


def test_wrong_tokenizers_are_refused():
    with pytest.raises(ValueError, match=r"data.tokenizer = 'words': must be one of bytes, bpe"):
        tokenizer('words')
    without_eos = train_bpe(['some text'], 300).replace('<|eos|>', '<|end|>')
    with pytest.raises(ValueError, match=r"no token '<\|eos\|>'"):
        BpeTokenizer(without_eos)


def rank(matrix: np.ndarray) -> int:
    """The lexicographic index of the permutation x -> row of the 1 in column x, by its Lehmer code."""
    p = matrix.argmax(axis=0).tolist()
    factorials = (24, 6, 2, 1, 1)
    return sum(factorials[i] * sum(later < p[i] for later in p[i + 1 :]) for i in range(5))


def word_rows(*, seed: int = 0, validation: bool = False, seq_len: int = 12) -> word_problem.WordProblemRows:
    return word_problem.WordProblemRows(seq_len=seq_len, seed=seed, validation=validation)


def test_word_problem_targets_are_running_products_of_matrices():
    eye = np.eye(5, dtype=int)
    swap = eye[[1, 0, 2, 3, 4]]
    cycle = np.roll(eye, 1, axis=0)  # x -> x + 1 mod 5
    rows = word_rows()
    seen = set()
    for i in range(150):
        product = eye
        for token, target in zip(rows[i].tokens.tolist(), rows[i].targets.tolist(), strict=True):
            product = (swap, cycle, eye)[token - 120] @ product
            assert target == rank(product)
            seen.add(target)
    assert len(seen) > 60


def test_word_problem_rows_are_whole_documents_whose_answers_never_appear():
    row = word_rows()[5]
    assert row.weights.tolist() == [1] * 12
    assert row.segment_ids.tolist() == [1] * 12
    assert row.positions.tolist() == list(range(12))
    assert [a.dtype for a in row] == [np.int32, np.int32, np.float32, np.int32, np.int32]
    tokens = np.concatenate([word_rows()[i].tokens for i in range(500)])
    targets = np.concatenate([word_rows()[i].targets for i in range(500)])
    assert set(tokens.tolist()) == {120, 121, 122}
    assert set(targets.tolist()) <= set(range(120))
    assert word_problem.VOCAB_SIZE == 123
    counts = np.bincount(tokens - 120)  # 6000 draws, standard deviation 37
    assert (np.abs(counts - 2000) < 150).all()


def test_word_problem_rows_depend_on_seed_split_and_index_alone():
    def word(index: int, **kwargs) -> tuple[int, ...]:
        return tuple(word_rows(seq_len=30, **kwargs)[index].tokens.tolist())

    assert word(7) == word(7)
    words = [word(i, seed=s, validation=v) for i in range(50) for s in (0, 1) for v in (False, True)]
    assert len(set(words)) == 200
    assert len(word_rows(validation=True)) == 1024
    with pytest.raises(IndexError):
        word_rows(validation=True)[1024]


def test_importing_data_loads_neither_jax_nor_grain():
    code = (
        'import sys, fbt_jax.data; print(sorted({"jax", "grain", "flax", "tokenizers", "orbax"} & sys.modules.keys()))'
    )
    assert subprocess.check_output([sys.executable, '-c', code], text=True).strip() == '[]'
