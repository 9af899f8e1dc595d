"""Corpus and the word problem, against facts about the novels and permutation matrices."""

import hashlib
import itertools
import subprocess
import sys
from collections import Counter

import numpy as np

from fbt_jax.data import corpus, word_problem

# Chapters of the novels in the corpus's order: Emma (18 + 18 + 19), Mansfield Park, Northanger Abbey, Persuasion,
# Pride and Prejudice, Sense and Sensibility.
CHAPTERS = (55, 48, 31, 24, 61, 50)
TITLES = ('EMMA', 'MANSFIELD PARK', 'NORTHANGER ABBEY', 'Persuasion', 'PRIDE AND PREJUDICE', 'SENSE AND SENSIBILITY')


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
    batch = word_rows().batch(range(150))
    seen = set()
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        product = eye
        for token, target in zip(tokens, targets, strict=True):
            product = (swap, cycle, eye)[token - 120] @ product
            assert target == rank(product)
            seen.add(target)
    assert len(seen) > 60


def test_word_problem_rows_are_whole_documents_whose_answers_never_appear():
    batch = word_rows().batch(range(500))
    assert batch.weights.tolist() == [[1] * 12] * 500
    assert batch.segment_ids.tolist() == [[1] * 12] * 500
    assert batch.positions.tolist() == [list(range(12))] * 500
    assert [a.dtype for a in batch] == [np.int32, np.int32, np.float32, np.int32, np.int32]
    assert set(batch.tokens.ravel().tolist()) == {120, 121, 122}
    assert set(batch.targets.ravel().tolist()) <= set(range(120))
    assert word_problem.VOCAB_SIZE == 123
    counts = np.bincount(batch.tokens.ravel() - 120)  # 6000 draws, standard deviation 37
    assert (np.abs(counts - 2000) < 150).all()


def test_word_problem_rows_depend_on_seed_split_and_index_alone():
    def word(index: int, **kwargs) -> tuple[int, ...]:
        return tuple(word_rows(seq_len=30, **kwargs).batch([index]).tokens[0].tolist())

    assert word(7) == word(7)
    words = [word(i, seed=s, validation=v) for i in range(50) for s in (0, 1) for v in (False, True)]
    assert len(set(words)) == 200
    held_out = word_rows(validation=True)
    assert held_out.num_rows == 1024
    assert held_out.batch([1023, 1024]).weights.sum(axis=1).tolist() == [12, 0]


def test_importing_data_loads_neither_jax_nor_grain():
    code = (
        'import sys, fbt_jax.data; print(sorted({"jax", "grain", "flax", "tokenizers", "orbax"} & sys.modules.keys()))'
    )
    assert subprocess.check_output([sys.executable, '-c', code], text=True).strip() == '[]'
