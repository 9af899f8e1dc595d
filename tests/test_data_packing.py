"""Packed rows against hand-made documents: completeness, order, pieces, masks, padding. Bytes: BOS 256, EOS 257."""

import itertools
import time

import numpy as np
import pytest

from fbt_jax.batch import Batch
from fbt_jax.data.documents import InMemory, concatenated
from fbt_jax.data.order import Order, shuffled
from fbt_jax.data.packing import ENDLESS, BestFitRows, StreamRows, best_fit

BOS, EOS = 256, 257
TEXTS = ('the first', '', 'b', 'a much longer one, several rows long', 'c', 'fünf', '\0')
EPOCH_TOKENS = sum(len(text.encode()) + 2 for text in TEXTS)  # 67, a prime


def documents_of(*texts: str) -> InMemory:
    return concatenated([np.array([BOS, *text.encode(), EOS], np.uint16) for text in texts], '')


def packed(seq_len: int, *, seed: int | None = 0) -> StreamRows:
    return StreamRows(documents_of(*TEXTS), seq_len=seq_len, seed=seed)


def row_of(rows: StreamRows | BestFitRows, index: int) -> Batch:
    """One row, arrays of shape (T,)."""
    return Batch(*(x[0] for x in rows.batch([index])))


def stream_of(rows: StreamRows, count: int) -> list[int]:
    """The first `count` tokens of the stream, read off the inputs of as many rows as that takes."""
    stream: list[int] = []
    for i in range(-(-count // len(row_of(rows, 0).tokens))):
        stream += row_of(rows, i).tokens.tolist()
    return stream[:count]


def texts_of(stream: list[int]) -> list[str]:
    """The documents in `stream`, by a parse that accepts nothing but [BOS, bytes, EOS] again and again."""
    texts, piece = [], None
    for token in stream:
        if token == BOS:
            assert piece is None
            piece = []
        elif token == EOS:
            texts.append(bytes(piece).decode())
            piece = None
        else:
            piece.append(token)
    assert piece is None
    return texts


def slow_pieces(tokens: list[int]) -> tuple[list[int], list[int]]:
    segments, positions, segment, position = [], [], 1, 0
    for i, token in enumerate(tokens):
        if token == BOS and i > 0:
            segment, position = segment + 1, 0
        segments.append(segment)
        positions.append(position)
        position += 1
    return segments, positions


def assert_same(a: Batch, b: Batch) -> None:
    for name in Batch._fields:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


# A row of 1000 is many epochs; 67 is one exactly; 2 is as short as the shortest document.
@pytest.mark.parametrize('seq_len', [2, 5, 66, 67, 68, 1000])
def test_every_epoch_has_every_document_once_and_whole(seq_len):
    stream = stream_of(packed(seq_len), 4 * EPOCH_TOKENS)
    epochs = [texts_of(stream[i * EPOCH_TOKENS : (i + 1) * EPOCH_TOKENS]) for i in range(4)]
    assert all(sorted(epoch) == sorted(TEXTS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4, 'epochs must not repeat the order'
    assert epochs[0] != list(TEXTS)


def test_the_stream_depends_on_the_seed_and_not_on_the_row_length():
    assert stream_of(packed(5), 300) == stream_of(packed(64), 300)
    assert stream_of(packed(5, seed=0), 300) != stream_of(packed(5, seed=1), 300)


@pytest.mark.parametrize('seq_len', [2, 5, 66, 1000])
def test_targets_are_the_next_tokens_across_rows_documents_and_epochs(seq_len):
    rows = packed(seq_len)
    for i in range(2 * EPOCH_TOKENS // seq_len + 2):
        row, following = row_of(rows, i), row_of(rows, i + 1)
        assert row.targets.tolist() == [*row.tokens.tolist()[1:], following.tokens[0]]


def test_each_token_but_bos_is_a_counted_target_once_an_epoch():
    seq_len = 5
    rows = packed(seq_len)
    counted = np.zeros(258)
    for i in range(EPOCH_TOKENS):  # these rows hold seq_len epochs exactly
        np.add.at(counted, row_of(rows, i).targets, row_of(rows, i).weights)
    expected = np.zeros(258)
    for text in TEXTS:
        for token in [*text.encode(), EOS]:
            expected[token] += seq_len
    np.testing.assert_array_equal(counted, expected)


@pytest.mark.parametrize('seq_len', [2, 5, 16, 66, 1000])
def test_pieces_and_weights_equal_a_slow_loop(seq_len):
    rows = packed(seq_len)
    continued = 0
    for i in range(3 * EPOCH_TOKENS // seq_len + 2):
        row = row_of(rows, i)
        segments, positions = slow_pieces(row.tokens.tolist())
        assert row.segment_ids.tolist() == segments
        assert row.positions.tolist() == positions
        assert row.weights.tolist() == [float(target != BOS) for target in row.targets.tolist()]
        continued += row.tokens[0] != BOS
    assert continued > 0, 'no row began inside a document: the case was not tried'


def test_a_row_written_out_by_hand():
    # One document, so that every epoch is the same: 256 97 98 257 | 256 97 98 257 | ...
    rows = StreamRows(documents_of('ab'), seq_len=6, seed=0)
    row = row_of(rows, 1)  # stream[6:13]
    assert row.tokens.tolist() == [98, 257, 256, 97, 98, 257]
    assert row.targets.tolist() == [257, 256, 97, 98, 257, 256]
    assert row.weights.tolist() == [1, 0, 1, 1, 1, 0]
    assert row.segment_ids.tolist() == [1, 1, 2, 2, 2, 2]
    assert row.positions.tolist() == [0, 1, 0, 1, 2, 3]
    assert [a.dtype for a in row] == [np.int32, np.int32, np.float32, np.int32, np.int32]


def test_a_document_longer_than_a_row_is_cut_into_pieces_of_their_own():
    rows = StreamRows(documents_of('x' * 50), seq_len=10, seed=0)
    for i in range(1, 5):
        assert row_of(rows, i).tokens.tolist() == [120] * 10
        assert row_of(rows, i).segment_ids.tolist() == [1] * 10
        assert row_of(rows, i).positions.tolist() == list(range(10))


def test_rows_do_not_depend_on_what_was_read_before():
    in_order = packed(7)
    expected = [row_of(in_order, i) for i in range(60)]
    other = packed(7)
    for i in np.random.default_rng(0).permutation(60).tolist():
        assert_same(row_of(other, i), expected[i])


def test_rows_far_out_in_the_stream():
    rows = packed(5)
    assert row_of(rows, 10**12).targets[-1] == row_of(rows, 10**12 + 1).tokens[0]
    assert rows.num_rows == ENDLESS


def test_shuffles_are_permutations_that_stay_the_same_from_release_to_release():
    assert shuffled(8, seed=0, epoch=0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert shuffled(8, seed=3, epoch=2).tolist() == [2, 4, 1, 3, 6, 5, 0, 7]
    orders = {tuple(shuffled(6, seed=seed, epoch=epoch)) for seed in range(10) for epoch in range(10)}
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len(orders) > 80  # 100 draws from 720 orders: 93 different ones are to be expected


# 67 tokens are 66 targets: rows of 11 fit exactly.
@pytest.mark.parametrize('seq_len', [2, 5, 11, 65, 66, 67, 100])
def test_validation_rows_are_the_documents_in_order_then_padding(seq_len):
    rows = packed(seq_len, seed=None)
    stream = [token for text in TEXTS for token in (BOS, *text.encode(), EOS)]
    assert rows.num_rows == -(-66 // seq_len)
    joined = Batch(
        *(np.concatenate(parts) for parts in zip(*(row_of(rows, i) for i in range(rows.num_rows)), strict=True))
    )
    assert joined.tokens.tolist()[:66] == stream[:-1]
    assert joined.targets.tolist()[:66] == stream[1:]
    assert joined.weights.tolist()[:66] == [float(token != BOS) for token in stream[1:]]
    missing = rows.num_rows * seq_len - 66
    assert joined.tokens.tolist()[66:] == [0] * missing
    assert joined.weights.tolist()[66:] == [0] * missing
    assert joined.segment_ids.tolist()[66:] == [0] * missing
    assert joined.positions.tolist()[66:] == list(range(missing))
    assert (joined.segment_ids[:66] > 0).all()
    for i in range(rows.num_rows):
        real = row_of(rows, i).segment_ids > 0
        segments, positions = slow_pieces(row_of(rows, i).tokens[real].tolist())
        assert row_of(rows, i).segment_ids[real].tolist() == segments
        assert row_of(rows, i).positions[real].tolist() == positions


@pytest.mark.parametrize('seq_len', [2, 5, 11, 65, 66, 67, 100])
def test_each_segment_of_validation_rows_names_its_document(seq_len):
    """Token by token of the whole stream; with rows of two a document begins on many a row's last input."""
    rows = packed(seq_len, seed=None)
    number_of = [i for i, text in enumerate(TEXTS) for _ in (BOS, *text.encode(), EOS)][:-1]
    found = []
    for row, documents in enumerate(rows.documents(range(rows.num_rows + 1))):
        segment_ids = row_of(rows, row).segment_ids
        found += documents[segment_ids[segment_ids > 0] - 1].tolist()
    assert found == number_of


def test_rows_past_the_end_of_validation_count_for_nothing():
    rows = packed(5, seed=None)
    beyond = rows.batch([rows.num_rows - 1, rows.num_rows, rows.num_rows + 7])
    assert beyond.weights[0].any()
    assert not beyond.weights[1:].any()
    assert not beyond.segment_ids[1:].any()
    assert (beyond.positions[1:] == np.arange(5)).all()


@pytest.mark.parametrize('rows', [packed(5), BestFitRows(documents_of(*TEXTS), seq_len=8, seed=0)])
def test_a_batch_is_its_rows_whatever_their_numbers(rows):
    for numbers in ([3], [4, 5, 6], [9, 2, 3, 4, 4, 0, 100, 101]):
        batch = rows.batch(numbers)
        for place, number in enumerate(numbers):
            assert_same(Batch(*(x[place] for x in batch)), row_of(rows, number))


# Best-fit


@pytest.mark.parametrize('seq_len', [2, 5, 8, 66, 1000])
def test_best_fit_rows_hold_every_target_once_an_epoch_and_no_document_is_cut_but_long_ones(seq_len):
    rows = BestFitRows(documents_of(*TEXTS), seq_len=seq_len, seed=0)
    for epoch in range(2):
        numbers = range(epoch * rows.epoch_rows, (epoch + 1) * rows.epoch_rows)
        targets, starts = [], []
        for row in (row_of(rows, i) for i in numbers):
            for segment in range(1, row.segment_ids.max() + 1):
                here = row.segment_ids == segment
                assert row.positions[here].tolist() == list(range(here.sum()))
                assert row.weights[here].all()
                targets += row.targets[here].tolist()
                starts.append(row.tokens[here][0])
                np.testing.assert_array_equal(row.tokens[here][1:], row.targets[here][:-1])
            padded = row.segment_ids == 0
            assert not row.weights[padded].any()
            assert row.positions[padded].tolist() == list(range(padded.sum()))
        expected = [token for text in TEXTS for token in (*text.encode(), EOS)]
        assert sorted(targets) == sorted(expected)
        # A document of n + 1 targets is cut into ceil((n + 1) / T) pieces; only the first begins with BOS.
        assert len(starts) == sum(-(-(len(text.encode()) + 1) // seq_len) for text in TEXTS)
        assert starts.count(BOS) == len(TEXTS)
    assert rows.padding == pytest.approx(1 - len(expected) / (rows.epoch_rows * seq_len))


def test_best_fit_puts_pieces_where_they_leave_the_least_room():
    # Targets 6, 5, 4, 3, 2 in rows of 10: 6 opens a row, 5 another; 4 fits both and fills the first; 3 and 2 fill the
    # second. First-fit in this order would do the same; of 7, 6, 3, 4 it would not.
    layout = best_fit(np.array([7, 6, 5, 4, 3]), 10)
    assert [sorted(layout.row(0, r).unit.tolist()) for r in range(layout.num_rows)] == [[0, 2], [1, 3, 4]]
    # 8, 7, 3, 2: 3 goes beside 7 (no room beside 8), 2 beside 8.
    layout = best_fit(np.array([9, 8, 4, 3]), 10)
    assert [sorted(layout.row(0, r).unit.tolist()) for r in range(layout.num_rows)] == [[0, 3], [1, 2]]


def test_best_fit_equals_a_slow_search():
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(2, 40, 60)
        seq_len = int(rng.integers(3, 30))
        rooms: list[int] = []
        sizes = [min(seq_len, n - 1 - a) for n in lengths for a in range(0, n - 1, seq_len)]
        for size in sorted(sizes, reverse=True):
            fitting = [room for room in rooms if room >= size]
            if fitting:
                rooms[rooms.index(min(fitting))] -= size
            else:
                rooms.append(seq_len - size)
        layout = best_fit(lengths, seq_len)
        filled = [int((p.stop - 1 - p.start).sum()) for p in (layout.row(0, r) for r in range(layout.num_rows))]
        assert sorted(seq_len - f for f in filled) == sorted(rooms)


# Masks


@pytest.mark.parametrize('dtype', [np.uint16, np.uint32])
@pytest.mark.parametrize('kind', [StreamRows, BestFitRows])
def test_masked_tokens_are_read_but_are_no_targets(dtype, kind):
    top = 1 << (8 * np.dtype(dtype).itemsize - 1)
    documents = InMemory(np.array([1, 5 | top, 6 | top, 7, 8, 2], dtype), np.array([6]), '')
    documents.masks = True
    rows = kind(documents, seq_len=5, seed=0)
    row = row_of(rows, 0)
    assert row.tokens.tolist() == [1, 5, 6, 7, 8]
    assert row.targets.tolist() == [5, 6, 7, 8, 2]
    assert row.weights.tolist() == [0, 0, 1, 1, 1]


# Order


class Sharded:
    """Documents of these lengths in shards; token t of document d of shard s is told by its place in `flat`."""

    masks = False
    fingerprint = ''

    def __init__(self, shards: list[list[int]]) -> None:
        self.shards = [np.array(lengths, np.int64) for lengths in shards]
        self.documents_S = np.array([len(lengths) for lengths in shards], np.int64)
        self.tokens_S = np.array([sum(lengths) for lengths in shards], np.int64)
        starts = np.cumsum(self.tokens_S) - self.tokens_S
        self.origin = [start + np.cumsum(x) - x for start, x in zip(starts, self.shards, strict=True)]

    def lengths(self, shard: int) -> np.ndarray:
        return self.shards[shard]

    def read(self, parts):
        origins = [self.origin[s][u] for s, u in zip(parts.shard, parts.unit, strict=True)]
        bounds = zip(origins, parts.start, parts.stop, strict=True)
        return [np.arange(o + a, o + b, dtype=np.uint32) for o, a, b in bounds]


@pytest.mark.parametrize('group_units', [1, 7, 40, 10**6])
def test_every_unit_comes_once_an_epoch_for_any_shards_and_groups(group_units):
    rng = np.random.default_rng(0)
    shards = [rng.integers(2, 9, n).tolist() for n in (10, 0, 3, 17, 1)]
    documents = Sharded(shards)
    total = int(documents.tokens_S.sum())
    order = Order(documents.documents_S, documents.tokens_S, documents.lengths, seed=1, group_units=group_units)
    epochs = []
    for epoch in range(3):
        parts = order.parts(epoch * total, (epoch + 1) * total)
        assert not parts.start.any()
        epochs.append(list(zip(parts.shard.tolist(), parts.unit.tolist(), parts.stop.tolist(), strict=True)))
        whole = [(s, d, n) for s, lengths in enumerate(shards) for d, n in enumerate(lengths)]
        assert sorted(epochs[-1]) == whole
    assert len(set(map(tuple, epochs))) == 3
    if group_units == 10**6:  # one group: the shards are mixed
        assert len([1 for a, b in itertools.pairwise(epochs[0]) if a[0] != b[0]]) > 10


def test_an_order_is_read_in_any_parts():
    documents = Sharded([[5, 3, 9], [4], [2, 2, 8, 6]])
    order = Order(documents.documents_S, documents.tokens_S, documents.lengths, seed=0, group_units=4)
    whole = np.concatenate(documents.read(order.parts(0, 120)))
    for start, stop in itertools.combinations(range(0, 121, 7), 2):
        np.testing.assert_array_equal(np.concatenate(documents.read(order.parts(start, stop))), whole[start:stop])


def test_a_position_far_out_in_a_large_source_is_found_at_once():
    """No replay: 2,000 shards of 500 documents, in 16 groups, a thousand epochs on."""
    rng = np.random.default_rng(0)
    shards = [rng.integers(2, 2000, 500) for _ in range(2000)]
    tokens = np.array([x.sum() for x in shards])
    order = Order(np.full(2000, 500), tokens, shards.__getitem__, seed=0)
    begin = time.perf_counter()
    parts = order.parts(1000 * int(tokens.sum()) + 10**8, 1000 * int(tokens.sum()) + 10**8 + 8193)
    assert time.perf_counter() - begin < 1
    assert (parts.stop - parts.start).sum() == 8193
