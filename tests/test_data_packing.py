"""Packed rows against hand-made documents: completeness, order, pieces, padding. Bytes: BOS is 256, EOS is 257."""

import numpy as np
import pytest

from fbt_jax.batch import Batch
from fbt_jax.data.packing import ENDLESS, PackedRows, ValidationRows, shuffled, tokenise
from fbt_jax.data.tokenizer import ByteTokenizer

BOS, EOS = 256, 257
TEXTS = ('the first', '', 'b', 'a much longer one, several rows long', 'c', 'fünf', '\0')
EPOCH_TOKENS = sum(len(text.encode()) + 2 for text in TEXTS)  # 67, a prime


def packed(seq_len: int, *, seed: int = 0) -> PackedRows:
    return PackedRows(tokenise(TEXTS, ByteTokenizer()), seq_len=seq_len, seed=seed)


def stream_of(rows: PackedRows, count: int) -> list[int]:
    """The first `count` tokens of the stream, read off the inputs of as many rows as that takes."""
    stream: list[int] = []
    for i in range(-(-count // len(rows[0].tokens))):
        stream += rows[i].tokens.tolist()
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


def test_documents_are_stored_with_bos_and_eos():
    documents = tokenise(('ab', '', 'c'), ByteTokenizer())
    assert documents.tokens.tolist() == [BOS, 97, 98, EOS, BOS, EOS, BOS, 99, EOS]
    assert documents.starts.tolist() == [0, 4, 6]
    assert documents.tokens.dtype == np.uint16


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
        row, following = rows[i], rows[i + 1]
        assert row.targets.tolist() == [*row.tokens.tolist()[1:], following.tokens[0]]


def test_each_token_but_bos_is_a_counted_target_once_an_epoch():
    seq_len = 5
    rows = packed(seq_len)
    counted = np.zeros(258)
    for i in range(EPOCH_TOKENS):  # these rows hold seq_len epochs exactly
        np.add.at(counted, rows[i].targets, rows[i].weights)
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
        row = rows[i]
        segments, positions = slow_pieces(row.tokens.tolist())
        assert row.segment_ids.tolist() == segments
        assert row.positions.tolist() == positions
        assert row.weights.tolist() == [float(target != BOS) for target in row.targets.tolist()]
        continued += row.tokens[0] != BOS
    assert continued > 0, 'no row began inside a document: the case was not tried'


def test_a_row_written_out_by_hand():
    # One document, so that every epoch is the same: 256 97 98 257 | 256 97 98 257 | ...
    rows = PackedRows(tokenise(['ab'], ByteTokenizer()), seq_len=6, seed=0)
    row = rows[1]  # stream[6:13]
    assert row.tokens.tolist() == [98, 257, 256, 97, 98, 257]
    assert row.targets.tolist() == [257, 256, 97, 98, 257, 256]
    assert row.weights.tolist() == [1, 0, 1, 1, 1, 0]
    assert row.segment_ids.tolist() == [1, 1, 2, 2, 2, 2]
    assert row.positions.tolist() == [0, 1, 0, 1, 2, 3]
    assert [a.dtype for a in row] == [np.int32, np.int32, np.float32, np.int32, np.int32]


def test_a_document_longer_than_a_row_is_cut_into_pieces_of_their_own():
    rows = PackedRows(tokenise(['x' * 50], ByteTokenizer()), seq_len=10, seed=0)
    for i in range(1, 5):
        assert rows[i].tokens.tolist() == [120] * 10
        assert rows[i].segment_ids.tolist() == [1] * 10
        assert rows[i].positions.tolist() == list(range(10))


def test_rows_do_not_depend_on_what_was_read_before():
    in_order = packed(7)
    expected = [in_order[i] for i in range(60)]
    other = packed(7)
    for i in np.random.default_rng(0).permutation(60).tolist():
        assert_same(other[i], expected[i])


def test_rows_far_out_in_the_stream_and_outside_it():
    rows = packed(5)
    assert rows[10**12].targets[-1] == rows[10**12 + 1].tokens[0]
    assert len(rows) == ENDLESS
    with pytest.raises(IndexError):
        rows[-1]


def test_shuffles_are_permutations_that_stay_the_same_from_release_to_release():
    assert shuffled(8, seed=0, epoch=0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert shuffled(8, seed=3, epoch=2).tolist() == [2, 4, 1, 3, 6, 5, 0, 7]
    orders = {tuple(shuffled(6, seed=seed, epoch=epoch)) for seed in range(10) for epoch in range(10)}
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len(orders) > 80  # 100 draws from 720 orders: 93 different ones are to be expected


# 67 tokens are 66 targets: rows of 11 fit exactly.
@pytest.mark.parametrize('seq_len', [2, 5, 11, 65, 66, 67, 100])
def test_validation_rows_are_the_documents_in_order_then_padding(seq_len):
    rows = ValidationRows(tokenise(TEXTS, ByteTokenizer()), seq_len=seq_len)
    stream = [token for text in TEXTS for token in (BOS, *text.encode(), EOS)]
    assert len(rows) == -(-66 // seq_len)
    joined = Batch(*(np.concatenate(parts) for parts in zip(*(rows[i] for i in range(len(rows))), strict=True)))
    assert joined.tokens.tolist()[:66] == stream[:-1]
    assert joined.targets.tolist()[:66] == stream[1:]
    assert joined.weights.tolist()[:66] == [float(token != BOS) for token in stream[1:]]
    missing = len(rows) * seq_len - 66
    assert joined.tokens.tolist()[66:] == [0] * missing
    assert joined.weights.tolist()[66:] == [0] * missing
    assert joined.segment_ids.tolist()[66:] == [0] * missing
    assert joined.positions.tolist()[66:] == list(range(missing))
    assert (joined.segment_ids[:66] > 0).all()
    for i in range(len(rows)):
        real = rows[i].segment_ids > 0
        segments, positions = slow_pieces(rows[i].tokens[real].tolist())
        assert rows[i].segment_ids[real].tolist() == segments
        assert rows[i].positions[real].tolist() == positions


def test_validation_rows_end():
    rows = ValidationRows(tokenise(TEXTS, ByteTokenizer()), seq_len=5)
    for index in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows[index]
