"""Corpus and the word problem, against facts about the novels and permutation matrices."""

import hashlib
import itertools
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from fbt_jax.config import Config, DataConfig, OptimizerConfig, PassesConfig
from fbt_jax.data import corpus, open_data, word_problem
from fbt_jax.data.word_problem import WordProblemRows

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


def word_rows(group: str = 'S5', *, seed: int = 0, validation: bool = False, seq_len: int = 12) -> WordProblemRows:
    return WordProblemRows(group, seq_len=seq_len, seed=seed, validation=validation)


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


def parity(p: tuple[int, ...]) -> int:
    return sum(p[i] > p[j] for i, j in itertools.combinations(range(len(p)), 2)) % 2


def powers(p: tuple[int, ...]) -> set[tuple[int, ...]]:
    found = [tuple(range(len(p)))]
    while len(found) < 2 or found[-1] != found[0]:
        found.append(tuple(p[x] for x in found[-1]))
    return set(found)


@pytest.mark.parametrize(
    ('group', 'elements'),
    [
        ('Z2', set(itertools.permutations(range(2)))),
        ('S3', set(itertools.permutations(range(3)))),
        ('Z60', powers((1, 2, 0, 4, 5, 6, 3, 8, 9, 10, 11, 7))),
        ('S4', set(itertools.permutations(range(4)))),
        ('A5', {p for p in itertools.permutations(range(5)) if parity(p) == 0}),
        ('S5', set(itertools.permutations(range(5)))),
    ],
)
def test_word_problem_groups(group: str, elements: set[tuple[int, ...]]):
    """Targets are the products among the group's elements, by its definition, in lexicographic order."""
    found = word_problem.GROUPS[group]
    assert found.order == len(elements) == {'Z2': 2, 'S3': 6, 'Z60': 60, 'S4': 24, 'A5': 60, 'S5': 120}[group]
    numbered = sorted(elements)
    batch = word_rows(group, seq_len=200).batch(range(20))
    assert len(set(batch.targets.ravel().tolist())) == found.order  # the generators generate
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        product = np.arange(len(numbered[0]))
        for token, target in zip(tokens, targets, strict=True):
            product = np.array(found.generators[token - found.order])[product]
            assert numbered[target] == tuple(product)
    config = Config(
        data=DataConfig(source=f'word_problem:{group}', tokenizer='none', seq_len=200, batch_size=5),
        passes=PassesConfig(),
        optimizer=OptimizerConfig(),
    )
    data = open_data(config)
    assert data.vocab_size == found.order + len(found.generators)
    assert data.train_rows.batch(range(20)).targets.tolist() == batch.targets.tolist()


def test_word_problem_rows_are_whole_documents_whose_answers_never_appear():
    batch = word_rows().batch(range(500))
    assert batch.weights.tolist() == [[1] * 12] * 500
    assert batch.segment_ids.tolist() == [[1] * 12] * 500
    assert batch.positions.tolist() == [list(range(12))] * 500
    assert [a.dtype for a in batch] == [np.int32, np.int32, np.float32, np.int32, np.int32]
    assert set(batch.tokens.ravel().tolist()) == {120, 121, 122}
    assert set(batch.targets.ravel().tolist()) <= set(range(120))
    assert word_problem.GROUPS['S5'].vocab_size == 123
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
