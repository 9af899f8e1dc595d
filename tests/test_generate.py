"""`fbt_jax.generate` on a small model of bytes: texts, samples, stops, streams, errors, no new programs."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from helpers import float64, on_devices
from helpers_run import Run, make_run

from fbt_jax.config import DataConfig, MeshConfig
from fbt_jax.data.tokenizer import open_tokenizer
from fbt_jax.errors import UserError
from fbt_jax.inference import decode
from fbt_jax.inference.generate import Generations, Piece, generate, stream
from fbt_jax.model.transformer import param_specs
from fbt_jax.sharding import make_mesh, named

BYTES = open_tokenizer(DataConfig(tokenizer='bytes'))
CONTEXT = 64


def sharp_run(**changes: Any) -> Run:
    made = make_run(seq_len=CONTEXT, **changes)
    made.params['embedding'] = made.params['embedding'] * 3  # sharper, so that rounding chooses nothing
    return made


@pytest.fixture(scope='module')
def run() -> Run:
    return sharp_run()


PROMPTS = ['a', 'It is a truth', '', 'x' * 30, 'universally']


@pytest.mark.parametrize('mode', decode.MODES)
def test_a_prompt_is_continued_alike_alone_and_among_others(run: Run, mode: str) -> None:
    together = generate(run, PROMPTS, mode=mode, max_tokens=20)
    for i, prompt in enumerate(PROMPTS):
        alone = generate(run, [prompt], mode=mode, max_tokens=20)
        assert alone.tokens[0] == together.tokens[i]
        # Random weights blow rounding up with each step; the first are little touched by it.
        np.testing.assert_allclose(alone.log_probs[0][:5], together.log_probs[i][:5], atol=1e-3)
    assert all(len(t) == len(p) for t, p in zip(together.tokens, together.log_probs, strict=True))
    assert [run.tokenizer.decode(t) for t in together.tokens] == together.texts


class Words:
    """As SentencePiece: id 256 is BOS, others are words, and a text's first space is left out."""

    bos_id, eos_id = 256, 257

    def decode(self, ids: list[int], *, after: Sequence[int] = ()) -> str:
        text = ''.join(f' w{i}' for i in ids)
        return text if any(i < 256 for i in after) else text.removeprefix(' ')


def test_texts_go_on_from_their_prompts() -> None:
    made = sharp_run()._replace(tokenizer=Words())  # type: ignore[arg-type]
    found = generate(made, [[256], [256, 97], [256, 98]], max_tokens=3, num_samples=2, temperature=1.0)
    spaces = [text[:2] == ' w' for text in found.texts]
    assert spaces == [False, False, True, True, True, True]
    begin, inner = found.texts[0].split(' ')[0], found.texts[2].split(' ')[2]
    stopped = generate(
        made, [[256], [256, 97]], max_tokens=3, num_samples=2, temperature=1.0, stop=[begin, ' ' + inner]
    )
    assert stopped.texts[0] == ''
    assert stopped.texts[2] == found.texts[2][: found.texts[2].index(' ' + inner)]


def test_samples_of_a_prompt_differ_and_keep_their_seed(run: Run) -> None:
    options = {'mode': 'soft', 'max_tokens': 12, 'temperature': 1.0}
    four = generate(run, PROMPTS[:2], num_samples=4, **options)
    assert len(set(four.texts)) == 8
    two = generate(run, PROMPTS[:2], num_samples=2, **options)
    assert two.tokens == four.tokens[0:2] + four.tokens[4:6]
    assert generate(run, PROMPTS[:1], **options).tokens == four.tokens[:1]
    assert generate(run, PROMPTS[:1], seed=1, **options).tokens != four.tokens[:1]


def test_prompts_draw_by_their_numbers(run: Run) -> None:
    options: dict[str, Any] = {'mode': 'soft', 'max_tokens': 10, 'temperature': 1.0, 'seed': 3}
    both = generate(run, PROMPTS[:2], **options, num_samples=2).tokens
    turned = generate(run, PROMPTS[1::-1], **options, num_samples=2, numbers=[1, 0]).tokens
    assert turned == both[2:] + both[:2]
    assert generate(run, PROMPTS[1:2], **options, numbers=[1]).tokens == both[2:3]
    assert generate(run, PROMPTS[:1], **options, numbers=[2**21 - 1]).tokens != both[:1]
    for wrong in ([2**21], [-1], [0, 1], ['a'], [0.5]):
        with pytest.raises(UserError, match=r'must be one of 0\.\.2097151 for each prompt'):
            generate(run, PROMPTS[:1], numbers=wrong, **options)


def test_prompts_may_be_ids(run: Run) -> None:
    text = generate(run, ['ab'], mode='soft', max_tokens=5)
    assert generate(run, [[256, 97, 98]], mode='soft', max_tokens=5) == text


def test_stop_tokens_and_stop_texts_end_a_row_and_no_other(run: Run) -> None:
    free = generate(run, PROMPTS, mode='soft', max_tokens=30, temperature=1.0)
    eos = [BYTES.eos_id in tokens for tokens in free.tokens]
    assert free.finished == ['eos' if e else 'length' for e in eos]
    assert all(tokens[-1] == BYTES.eos_id for tokens, e in zip(free.tokens, eos, strict=True) if e)
    text = free.texts[1]
    stop = text[6:8]
    assert stop
    stopped = generate(run, PROMPTS, mode='soft', max_tokens=30, temperature=1.0, stop=[stop])
    for before, after, how in zip(free.texts, stopped.texts, stopped.finished, strict=True):
        assert after == before.split(stop)[0]
        assert (how == 'stop') == (stop in before)
    for tokens, log_probs, text, how in zip(*stopped[1:3], stopped.texts, stopped.finished, strict=True):
        assert len(tokens) == len(log_probs)
        if how == 'stop':  # the last token is the one that brought it
            assert BYTES.decode(tokens).startswith(text + stop)
            assert stop not in BYTES.decode(tokens[:-1])


def test_other_ids_end_a_row_as_eos_does(run: Run) -> None:
    options: dict[str, Any] = {'mode': 'soft', 'max_tokens': 30, 'temperature': 1.0}
    free = generate(run, PROMPTS, **options)
    ends = [free.tokens[0][5], free.tokens[1][9]]
    found = generate(run, PROMPTS, **options, stop_ids=ends)
    for before, after, how in zip(free.tokens, found.tokens, found.finished, strict=True):
        first = next((n for n, id_ in enumerate(before) if id_ in (*ends, BYTES.eos_id)), len(before) - 1)
        assert after == before[: first + 1]
        assert how == ('eos' if before[first] in (*ends, BYTES.eos_id) else 'length')
    assert found.texts[1] == BYTES.decode([*found.tokens[1]][: -1 if found.finished[1] == 'eos' else None])
    for wrong in ([258], [-1], ['a'], [True]):
        with pytest.raises(UserError, match=r'stop_ids = .*: must be ids of the model, 0\.\.257'):
            generate(run, PROMPTS, **options, stop_ids=wrong)


def test_of_two_stop_texts_the_first_that_is_complete_counts(run: Run) -> None:
    options: dict[str, Any] = {'mode': 'soft', 'max_tokens': 30, 'temperature': 1.0}
    for i, text in enumerate(generate(run, PROMPTS, **options).texts):
        for n in range(2, len(text) - 1):
            if text[n - 1 : n + 2].isascii() and text[n] not in text[:n]:
                stopped = generate(run, PROMPTS, **options, stop=[text[n - 1 : n + 2], text[n]])
                assert (stopped.texts[i], stopped.finished[i]) == (text[:n], 'stop')
                return
    pytest.fail('no text has such a place')


def test_a_wrong_prompt_is_told(run: Run) -> None:
    for prompts, told in (
        ('She', "prompts = 'She': must be a list"),
        (None, 'prompts = None: must be a list'),
        ({'She': 1}, 'must be a list'),
        ([b'She'], 'must be a text or a list of ids'),
        ([[True]], 'must be a text or a list of ids'),
        ([None], 'must be a text or a list of ids'),
        (['a\udcff'], 'is not UTF-8'),
        ([[1.5]], 'must be a text or a list of ids'),
        ([[999]], 'has ids that the model lacks'),
        ([[]], 'is empty'),
        ([], 'there is none'),
    ):
        with pytest.raises(UserError, match=told):
            generate(run, prompts, mode='soft', max_tokens=3)


def test_pieces_of_a_stream_are_the_text(run: Run) -> None:
    streaming = stream(run, PROMPTS[:2], mode='soft', max_tokens=40, temperature=1.0, stop=['zq'])
    pieces: list[Piece] = []
    while True:
        try:
            pieces.append(next(streaming))
        except StopIteration as done:
            result: Generations = done.value
            break
    assert len(pieces) > 3
    for row, text in enumerate(result.texts):
        assert ''.join(piece.text for piece in pieces if piece.row == row) == text


def test_changing_sizes_compile_nothing_new(run: Run) -> None:
    """Rows, lengths and lengths to come are rounded up; other numbers in the same powers of two run what is there."""
    generate(run, ['x' * 20] * 4, mode='soft', max_tokens=16, temperature=1.0)
    programs = [f._cache_size() for f in (decode.read_prompts, decode.begin, decode.advance)]
    for count, length, new in ((3, 25, 9), (4, 20, 16), (3, 22, 13)):
        generate(run, ['y' * length] * count, mode='soft', max_tokens=new, temperature=0.3 + length / 100, seed=new)
    assert [f._cache_size() for f in (decode.read_prompts, decode.begin, decode.advance)] == programs


@pytest.mark.slow
def test_ten_thousand_generations_leave_memory_flat(run: Run) -> None:
    rng = np.random.default_rng(0)

    def some(count: int) -> None:
        done = 0
        while done < count:
            prompts = ['z' * int(n) for n in rng.integers(1, 30, int(rng.integers(1, 33)))]
            generate(run, prompts, mode='soft', max_tokens=int(rng.integers(1, 17)), temperature=1.0)
            done += len(prompts)

    some(2000)  # all sizes have been seen
    programs = decode.advance._cache_size()
    live = len(jax.live_arrays())
    some(10_000)
    assert decode.advance._cache_size() == programs
    assert len(jax.live_arrays()) <= live + 5


@pytest.mark.parametrize(
    ('options', 'told'),
    [
        ({'mode': 'hard'}, r"mode = 'hard': must be one of standard, soft, fused"),
        ({'max_tokens': 0}, r'max_tokens = 0: must be at least 1'),
        ({'max_tokens': CONTEXT}, r'a prompt of 2 tokens and max_tokens = 64 are more than the trained context of 64'),
        ({'temperature': -1}, r'temperature = -1: must be 0 or lie in 1e-4\.\.1e4'),
        ({'temperature': float('inf')}, r'must be 0 or lie in'),
        ({'temperature': 1.0, 'top_k': 2**31}, r'must be a whole number below 2\*\*31'),
        ({'max_tokens': 5.0}, r'max_tokens = 5\.0: must be a whole number'),
        ({'top_k': 5}, r'temperature = 0\.0: is greedy: no top_k or top_p'),
        ({'temperature': 1.0, 'top_p': 0.0}, r'top_p = 0\.0: must lie in \(0, 1\]'),
        ({'temperature': 1.0, 'top_k': -2}, r'top_k = -2: must not be negative'),
        ({'num_samples': 0}, r'num_samples = 0: must lie in 1\.\.1024'),
        ({'fused_passes': 0, 'mode': 'fused'}, r'fused_passes = 0: must be at least 1'),
        ({'stop': ['']}, r'must not be empty texts'),
        ({'stop': [b'x']}, r'must be texts'),
        ({'stop': None}, r'stop = None: must be a list'),
        ({'numbers': 5}, r'numbers = 5: must be a list'),
        ({'seed': 1.5}, r'seed = 1\.5: must be a whole number'),
        ({'seed': -1}, r'seed = -1: must not be negative'),
        ({'max_tokens': True}, r'max_tokens = True: must be a whole number'),
        ({'temperature': None}, r'temperature = None: must be a number'),
        ({'temperature': 1.0, 'top_p': 'x'}, r"top_p = 'x': must be a number"),
    ],
)
def test_a_wrong_argument_is_told(run: Run, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        generate(run, ['a'], **options)


def test_numbers_of_numpy_are_numbers(run: Run) -> None:
    ones = {'max_tokens': np.int64(3), 'num_samples': np.int32(2), 'seed': np.int64(1), 'temperature': np.float32(1)}
    found = generate(run, [np.array([5, 6])], mode='soft', **ones)
    assert found == generate(run, [[5, 6]], mode='soft', max_tokens=3, num_samples=2, seed=1, temperature=1.0)


def test_without_a_number_it_writes_what_the_context_leaves(run: Run) -> None:
    written = generate(run, ['x' * 30, 'a'], mode='standard', temperature=1.0)
    most = CONTEXT - 31  # BOS and 30 bytes
    assert [len(t) for t, f in zip(written.tokens, written.finished, strict=True) if f == 'length'] == [most] * 2
    with pytest.raises(UserError, match='a prompt of 64 tokens and max_tokens = 1 are more than the trained context'):
        generate(run, ['x' * 63], mode='standard')


def test_a_model_without_trained_feedback_is_read_plainly(run: Run) -> None:
    plain = run._replace(trained_feedback=False)
    assert generate(plain, ['a'], mode='standard', max_tokens=3).tokens
    for mode in ('soft', 'fused'):
        with pytest.raises(UserError, match='was not trained with feedback; only standard is possible'):
            generate(plain, ['a'], mode=mode, max_tokens=3)


def test_rows_that_are_not_text_have_no_text(run: Run) -> None:
    words = run._replace(tokenizer=None)
    assert generate(words, [[3, 4]], mode='soft', max_tokens=3).texts == ['']
    with pytest.raises(UserError, match='reads no text: give its prompts as lists of ids'):
        generate(words, ['a'], mode='soft', max_tokens=3)


# Meshes: sizes of data, fsdp and tensor; the first is one device


def generations_on(*meshes: tuple[int, int, int], modes: tuple[str, ...], **options: Any) -> list[Any]:
    """[tokens, log probs] of each mode on each mesh in turn; in float64, as a random model blows rounding up."""
    run, found = sharp_run(dtype='float64'), []
    for sizes in ((1, 1, 1), *meshes):
        mesh = make_mesh(MeshConfig(1, *sizes, 1), jax.devices()[: math.prod(sizes)])
        placed = run._replace(params=jax.device_put(run.params, named(mesh, param_specs(run.model))))
        with jax.set_mesh(mesh):
            found += [generate(placed, PROMPTS, mode=mode, max_tokens=10, **options)[1:3] for mode in modes]
    return found


@float64
def soft_on_a_mesh() -> list[Any]:
    return generations_on((2, 2, 2), modes=('soft',))


@float64
def every_mode_on_meshes() -> list[Any]:
    return generations_on((2, 2, 2), (1, 4, 2), (8, 1, 1), (1, 1, 2), (3, 1, 1), modes=decode.MODES)


@float64
def samples_on_meshes() -> list[Any]:
    return generations_on((2, 2, 2), (3, 1, 2), modes=decode.MODES, temperature=0.8, top_k=50, num_samples=3)


@pytest.mark.parametrize(
    ('function', 'modes', 'meshes'),
    [
        (soft_on_a_mesh, 1, 1),
        pytest.param(every_mode_on_meshes, 3, 5, marks=pytest.mark.slow),
        pytest.param(samples_on_meshes, 3, 2, marks=pytest.mark.slow),
    ],
)
def test_a_mesh_chooses_what_one_device_does(function: Any, modes: int, meshes: int) -> None:
    """Rows, heads, weights and the cache split over up to eight devices, as they are in training."""
    found = on_devices(function)
    assert len(found) == modes * (1 + meshes)
    for i, (tokens, log_probs) in enumerate(found):
        alone, log_probs_alone = found[i % modes]
        assert tokens == alone
        for got, expected in zip(log_probs, log_probs_alone, strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5)
