"""Shares, phases and epochs of mixtures, against counting by hand."""

import dataclasses

import numpy as np
import pytest

from fbt_jax.batch import Batch
from fbt_jax.config import Config, DataConfig, TrainingConfig
from fbt_jax.data.documents import concatenated
from fbt_jax.data.mixture import Mixture
from fbt_jax.data.packing import ENDLESS, StreamRows
from fbt_jax.data.pipeline import Data


class Numbered:
    """Row i of member m is filled with 1000 m + i."""

    num_rows = ENDLESS

    def __init__(self, member: int) -> None:
        self._member = member

    def batch(self, rows):
        filled = np.repeat(np.array(rows)[:, None] + 1000 * self._member, 3, axis=1)
        return Batch(*(filled.astype(t) for t in (np.int32, np.int32, np.float32, np.int32, np.int32)))


def mixture(*phases: tuple[int, tuple[float, ...]]) -> Mixture:
    return Mixture([Numbered(m) for m in range(len(phases[0][1]))], phases)


def members_of(mixed: Mixture, rows: range) -> np.ndarray:
    return mixed.batch(rows).tokens[:, 0] // 1000


@pytest.mark.parametrize(
    'shares', [(0.5, 0.5), (0.9, 0.1), (1 / 3, 1 / 3, 1 / 3), (0.7, 0.001, 0.299), (0.0, 1.0), (0.2, 0.3, 0.1, 0.4)]
)
def test_each_row_is_the_next_of_one_member_in_its_share(shares):
    mixed = mixture((0, shares))
    tokens = mixed.batch(range(900)).tokens[:, 0]
    for member, share in enumerate(shares):
        own = tokens[tokens // 1000 == member]
        assert own.tolist() == list(range(1000 * member, 1000 * member + len(own))), 'rows left out or doubled'
        counted = np.cumsum(tokens // 1000 == member)
        # Half a row for itself and for each before it.
        assert np.abs(counted - share * np.arange(1, 901)).max() <= 0.5 * (member + 1) + 1e-9
    assert mixed.counts(900).tolist() == np.bincount(tokens // 1000, minlength=len(shares)).tolist()


def test_phases_change_the_shares_and_no_source_loses_its_place():
    mixed = mixture((0, (1.0, 0.0)), (40, (0.5, 0.5)), (40, (0.25, 0.75)), (100, (0.0, 1.0)))
    tokens = mixed.batch(range(130)).tokens[:, 0]
    member = tokens // 1000
    assert not member[:40].any()
    assert member[40:100].mean() == 0.75  # of two phases that begin together the later one holds
    assert member[100:].all()
    for m in range(2):
        own = tokens[member == m] - 1000 * m
        assert own.tolist() == list(range(len(own)))


def test_rows_are_found_without_those_before_them():
    mixed = mixture((0, (0.3, 0.7)), (10**12, (0.6, 0.4)))
    assert mixed.counts(10**12).tolist() == [3 * 10**11, 7 * 10**11]
    assert mixed.counts(2 * 10**12).tolist() == [9 * 10**11, 11 * 10**11]
    assert mixed.counts(10**15).sum() == 10**15


def test_a_batch_in_any_order():
    mixed = mixture((0, (0.3, 0.3, 0.4)))
    in_order = mixed.batch(range(50))
    numbers = np.random.default_rng(0).permutation(50)
    for whole, part in zip(in_order, mixed.batch(numbers.tolist()), strict=True):
        np.testing.assert_array_equal(part, whole[numbers])


def two_sources(
    tokens: tuple[int, int], *, seq_len: int = 4, batch_size: int = 2, weights=((0, (0.75, 0.25)),)
) -> Data:
    members = {
        name: StreamRows(concatenated([np.arange(n, dtype=np.uint16)], ''), seq_len=4, seed=0)
        for name, n in zip(('a', 'b'), tokens, strict=True)
    }
    rows = Mixture(list(members.values()), ((0, (0.75, 0.25)),))
    return Data(1000, None, '', {}, rows, members, {}, 4, 2, workers=0)


def test_epochs_and_realised_shares():
    data = two_sources((100, 40))
    # 8 steps of 2 rows: 12 rows of a, 4 of b, 4 tokens each.
    assert data.read_so_far(8) == {'epochs_a': 0.48, 'epochs_b': 0.4, 'share_a': 0.75, 'share_b': 0.25}
    single = dataclasses.replace(data, train_rows=data.members['a'], members={'a': data.members['a']})
    assert single.read_so_far(25) == {'epochs': 2.0}


def test_where_the_first_source_ends():
    # b: 40 tokens are 39 targets, 9 whole rows of 4; every fourth row is one of b.
    data = two_sources((1000, 40))
    last, name = data.steps_in_one_epoch(10**6)
    assert name == 'b'
    counts = [data.train_rows.counts(2 * steps)[1] for steps in (last, last + 1)]
    assert counts == [9, 10]
    assert data.steps_in_one_epoch(5) == (5, '')


DATA = {'seq_len': 8, 'batch_size': 2}
TWO = {'web': 'text:/a', 'code': 'jsonl:/b#key=x'}


def test_sources_and_weights_of_the_config():
    config = DataConfig(
        source=TWO, weights=((0, {'web': 0.25, 'code': 0.75}), (0.5, {'code': 0, 'web': 1}), (90, TWO_SHARES)), **DATA
    )
    assert config.sources == (('code', 'jsonl:/b#key=x'), ('web', 'text:/a'))
    assert config.weight_phases(100) == ((0, (0.75, 0.25)), (50, (0.0, 1.0)), (90, (0.5, 0.5)))
    # From what JSON makes of it.
    assert DataConfig(source=[list(x) for x in config.source], weights=config.weights, **DATA) == config
    Config(data=config, training=TrainingConfig(steps=100))
    with pytest.raises(ValueError, match=r'starts must not go down; for training\.steps = 200 they are \[0, 100, 90\]'):
        Config(data=config, training=TrainingConfig(steps=200))


TWO_SHARES = {'web': 0.5, 'code': 0.5}


@pytest.mark.parametrize(
    ('keys', 'told'),
    [
        ({'source': 'jsonl'}, r'no path; must be jsonl:PATH'),
        (
            {'source': 'json:/x'},
            r"data\.source = 'json:/x': did you mean jsonl\? must be austen, word_problem or",
        ),
        ({'source': 'jsonl:/x#ky=text'}, r"option 'ky=text'; jsonl takes key=, prompt_key=, every=, except_every="),
        ({'source': 'text:/x#unit=word'}, r'unit=word; a document is a file or a line'),
        ({'source': 'text:/x#every=1'}, r'every must lie in 2\.\.999999999'),
        ({'source': 'text:/x#every=2,except_every=2'}, r'only one of every= and except_every='),
        ({'source': 'prepared:/x#every=2'}, r"option 'every=2'; prepared takes none"),
        ({'source': 'austen:/x'}, r'austen is built in and takes no path'),
        ({'source': ''}, r"data\.source = '': must be"),
        ({'source': {}}, r'names no source'),
        ({'source': {'a b': 'text:/x'}}, r'names of sources are letters, digits, - and _'),
        ({'source': {'a': 3}}, r'data\.source\.a = 3: must be FORMAT:PATH'),
        ({'source': {'a': 'text:'}}, r"data\.source\.a = 'text:': no path"),
        ({'source': {'a': 'austen', 'b': 'text:/x'}, 'weights': ((0, {'a': 0.5, 'b': 0.5}),)}, r'austen is no part'),
        ({'source': TWO}, r'data\.weights = \(\): a mixture needs them'),
        ({'source': 'text:/x', 'weights': ((0, {'train': 1}),)}, r'has no effect on a single source'),
        ({'source': TWO, 'weights': ((0, {'web': 1}),)}, r'no share for code \(0 leaves a source out\)'),
        ({'source': TWO, 'weights': ((0, {'web': 1, 'cod': 0}),)}, r"'cod': is no source; did you mean code\?"),
        ({'source': TWO, 'weights': ((0, {'web': 1, 'code': 0.5}),)}, r'shares sum to 1\.5, must sum to 1'),
        ({'source': TWO, 'weights': ((0, {'web': 2, 'code': -1}),)}, r'shares must lie in 0\.\.1'),
        ({'source': TWO, 'weights': ((5, TWO_SHARES),)}, r'the first phase must start at 0'),
        ({'source': TWO, 'weights': ((0, {'web': 1, 'code': 0}),)}, r'code would never be read'),
        ({'validation': 'text:/x'}, r'austen has validation rows of its own'),
        ({'source': 'text:/x', 'validation': 'austen'}, r'austen validates itself only'),
        ({'tokenizer': 'gpt2'}, r'must be bytes, bpe, none or a file that ends in \.json, \.model or \.tiktoken'),
        ({'tokenizer': 'x.tiktoken'}, r'data\.tokenizer_pattern = .*: is what a \.tiktoken file needs, and only that'),
        ({'tokenizer_pattern': 'x'}, r'is what a \.tiktoken file needs, and only that'),
        ({'bos': '<s>'}, r"data\.bos = '<s>': has no effect with tokenizer bpe"),
        ({'packing': 'first_fit'}, r'must be one of carry_over, best_fit'),
        ({'exhausted': 'stop'}, r'must be repeat or end'),
        ({'source': 'word_problem', 'tokenizer': 'none', 'packing': 'best_fit'}, r'no effect on endless rows'),
        ({'workers': -1}, r'must lie in 0\.\.64'),
    ],
)
def test_a_wrong_data_config_is_told(keys, told):
    with pytest.raises(ValueError, match=told) as error:
        DataConfig(**DATA | keys)
    assert '\n' not in str(error.value)
