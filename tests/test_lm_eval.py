"""A run as a model of lm-evaluation-harness: its scores against plain numpy, its texts, the harness itself, offline."""

import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ['HF_HUB_OFFLINE'] = '1'  # read when the harness's libraries are imported

import jax
import numpy as np
import pytest
import reference
from helpers import flat_params, float64, on_devices
from helpers_e2e import ROOT
from helpers_run import Run, make_run

from fbt_jax.config import Config, DataConfig, TrainingConfig
from fbt_jax.data import corpus
from fbt_jax.data.tokenizer import open_tokenizer
from fbt_jax.errors import UserError
from fbt_jax.inference.generate import generate

pytest.importorskip('lm_eval')
from lm_eval.api.model import CachingLM, TemplateLM
from lm_eval.api.registry import get_model

from fbt_jax.interop import lm_eval_model
from fbt_jax.interop.lm_eval_model import FbtLM, Pair, encode_pairs

CONTEXT = 48
MODES = [
    pytest.param({'mode': 'standard'}, id='standard'),
    pytest.param({'mode': 'fused'}, id='fused'),
    pytest.param({'mode': 'fused', 'fused_passes': 2}, id='fused twice'),
    pytest.param({'mode': 'soft'}, id='soft'),
]
REQUESTS = [
    ('It is a truth', ' universally'),
    ('It is a truth', ' acknowledged'),
    ('', 'Emma'),
    ('x', 'y'),
    ('Emma ', 'Woodhouse, hand'),
    ('clever,\n', 'and rich'),
    ('with a comfortable home and a happy', ' disposition'),  # 47 bytes and BOS: just fit
    ('the best blessings of existence; and had lived nearly twenty-one years', ' in the world'),
]


def small_run(tokenizer: str = 'bytes', dtype: str = 'float64') -> Run:
    return make_run(tokenizer, seq_len=CONTEXT, dtype=dtype)


def asked(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=a) for a in arguments]


def by_hand(run: Run, pair: Pair, *, mode: str = 'standard', fused_passes: int = 1) -> tuple[float, bool]:
    """What method.md section 5 says, in float64 numpy, of a row that is not padded."""
    params, config, n = flat_params(run.params), run.model.config, len(pair.context)
    tokens = np.array([pair.context + pair.continuation[:-1]])
    positions, segments = np.arange(tokens.shape[1])[None], np.ones_like(tokens)
    if mode == 'soft':
        hidden = np.zeros((1, 0, config.width))
        for t in range(tokens.shape[1]):  # the states before t stay: nothing that comes changes them
            prev = np.concatenate([np.zeros((1, 1, config.width)), hidden], axis=1)
            rows = (a[:, : t + 1] for a in (tokens, prev, positions < n, positions, segments))
            hidden = np.concatenate([hidden, reference.states(params, config, *rows)[:, -1:]], axis=1)
    else:
        hidden = np.zeros((1, tokens.shape[1], config.width))
        for k in range(1 + (fused_passes if mode == 'fused' else 0)):
            plain = np.ones_like(tokens, bool) if k == 0 else positions == 0
            hidden = reference.states(params, config, tokens, reference.shift(hidden), plain, positions, segments)
    log_probs = reference.log_probs(params, config, hidden[0, n - 1 :])
    total = sum(log_probs[i, token] for i, token in enumerate(pair.continuation))
    return float(total), bool((log_probs.argmax(-1) == pair.continuation).all())


def cut(pair: Pair) -> Pair:
    return Pair(pair.context[-(CONTEXT + 1 - len(pair.continuation)) :], pair.continuation)


# loglikelihood


@pytest.mark.parametrize('options', MODES)
@float64
def test_scores_are_those_of_the_definition_at_any_batch_size(options: dict[str, Any]) -> None:
    run = small_run()
    pairs = [cut(pair) for pair in encode_pairs(run.tokenizer, REQUESTS)]
    expected = [by_hand(run, pair, **options) for pair in pairs]
    assert len({round(log_prob, 6) for log_prob, _ in expected}) == len(REQUESTS)
    for batch_size in (1, 3, 8):
        model = FbtLM(run, batch_size=batch_size, **options)
        found = model.loglikelihood(asked(*REQUESTS), disable_tqdm=True)
        np.testing.assert_allclose([s for s, _ in found], [s for s, _ in expected], rtol=1e-9)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        assert all(type(s) is float and type(greedy) is bool for s, greedy in found)


@float64
def test_the_modes_differ_where_they_should() -> None:
    """Soft and standard read the context alike, so a continuation of one token has one score in both."""
    run = small_run()
    score = {
        m: FbtLM(run, mode=m).loglikelihood(asked(('ab', 'c'), ('ab', 'cd'))) for m in ('standard', 'soft', 'fused')
    }
    assert score['standard'][0] == pytest.approx(score['soft'][0], rel=1e-12)
    assert len({round(score[m][1][0], 6) for m in score}) == 3
    assert len({round(score[m][0][0], 6) for m in score}) == 2


@pytest.mark.parametrize('options', MODES)
def test_probabilities_of_all_continuations_of_one_token_sum_to_one(options: dict[str, Any]) -> None:
    model = FbtLM(small_run(dtype='float32'), batch_size=64, **options)
    pairs = [Pair([256, 97, 98], [i]) for i in range(258)]
    scores = dict(model._scores(pairs, 'all', True))
    assert sum(math.exp(s.log_prob) for s in scores.values()) == pytest.approx(1, abs=1e-5)
    greedy = [i for i, s in scores.items() if s.greedy]
    assert greedy == [max(scores, key=lambda i: scores[i].log_prob)]


def test_what_the_model_chooses_itself_is_greedy() -> None:
    run = small_run(dtype='float32')
    run.params['embedding'] = run.params['embedding'] * 3  # sharper, so that rounding chooses nothing
    for mode in ('standard', 'soft'):
        chosen = generate(run, [[256, 97]], mode=mode, max_tokens=6)
        pair = Pair([256, 97], chosen.tokens[0])
        score = dict(FbtLM(run, mode=mode)._scores([pair, Pair([256, 97], [*chosen.tokens[0][:-1], 3])], 'own', True))
        assert score[0].greedy
        assert score[0].log_prob == pytest.approx(sum(chosen.log_probs[0]), abs=1e-3)
        assert not score[1].greedy


def test_a_row_that_is_too_long_loses_its_left_end_and_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = FbtLM(small_run(dtype='float32'), max_length=20)
    long, short = ('a' * 30 + 'bcdefgh', 'ij'), ('a', 'ij')
    logging.getLogger('lm_eval').propagate = True
    with caplog.at_level(logging.WARNING, 'lm_eval.fbt'):
        found = model.loglikelihood(asked(long, short))
        assert '1 of 2 requests: contexts lose their left ends, for max_length = 20' in caplog.text
        assert model.cut_contexts == {long[0]}
        caplog.clear()
        # 20 inputs and the last target: what is cut makes no difference.
        assert model.loglikelihood(asked(('?' + long[0], 'ij')))[0][0] == pytest.approx(found[0][0], abs=1e-5)
        caplog.clear()
        assert model.loglikelihood(asked(('a' * 17, 'ijk')))[0][0] < 0  # BOS and 20 bytes: just fits
        assert caplog.text == ''
    with pytest.raises(UserError, match='max_length = 20: a continuation has 21 tokens'):
        model.loglikelihood(asked(('a', 'i' * 21)))


def test_nothing_to_score_is_certain() -> None:
    model = FbtLM(small_run(dtype='float32'))
    assert model.loglikelihood(asked(('', ''), ('a', ''))) == [(0.0, True)] * 2
    assert model.loglikelihood([]) == []
    assert model.loglikelihood_rolling(asked(('',))) == [0.0]
    assert model.loglikelihood_rolling([]) == []
    assert model.generate_until([]) == []


# Where a context ends


def test_bos_stands_first_and_once() -> None:
    tokenizer = open_tokenizer(DataConfig(tokenizer='bytes'))
    pairs = encode_pairs(
        tokenizer, [('', 'ab'), ('a', 'b'), ('a', ' b'), ('a ', 'b'), ('a \n', 'b'), (' ', 'b'), ('', '')]
    )
    assert pairs == [
        Pair([256], [97, 98]),
        Pair([256, 97], [98]),
        Pair([256, 97], [32, 98]),
        Pair([256, 97], [32, 98]),
        Pair([256, 97], [32, 10, 98]),
        Pair([256], [32, 98]),
        Pair([256], []),
    ]
    bpe = open_tokenizer(DataConfig(tokenizer='bpe'))
    for pair in encode_pairs(bpe, [('', 'Emma'), ('<|bos|>', 'Emma'), ('<|bos|>Emma', ' was')]):
        assert (pair.context + pair.continuation).count(bpe.bos_id) == 1
        assert pair.context[0] == bpe.bos_id


@pytest.mark.parametrize('name', ['bytes', 'bpe'])
def test_wherever_a_context_ends_its_text_and_the_continuation_s_are_there(name: str) -> None:
    tokenizer = open_tokenizer(DataConfig(tokenizer=name))
    ends = ['', ' ', '  ', '\n', ' \n\t ', 'né', 'e\u0301', '\U0001f469\u200d', '\u00a0', '\u3000', '日本', 'a ']
    starts = ['b', ' b', '  b', '\nb', '\u0301', '\U0001f467', '語', '\u00a0x', ' ']
    texts = [(a + b, c) for a in ('', 'It is') for b in ends for c in starts]
    for (context, continuation), pair in zip(texts, encode_pairs(tokenizer, texts), strict=True):
        assert pair.context[0] == tokenizer.bos_id
        assert [*pair.context[1:], *pair.continuation] == tokenizer.encode(context + continuation)
        scored = tokenizer.token_bytes[pair.continuation].sum()
        assert scored >= len((context[len(context.rstrip()) :] + continuation).encode())  # spaces go over


def test_without_a_merge_pairs_are_those_of_the_harness() -> None:
    bpe = open_tokenizer(DataConfig(tokenizer='bpe'))
    own = SimpleNamespace(tok_encode=bpe.encode, backend='causal')
    text = corpus.split().validation[0][:3000]
    places = [i for i, c in enumerate(text) if c in ' \n' and 0 < i < len(text) - 1]
    texts = [(text[:i], text[i : i + 25]) for i in places] + [(text[: i + 1], text[i + 1 : i + 25]) for i in places]
    texts = [(context, continuation) for context, continuation in texts if context.strip() and continuation]
    assert len(texts) > 800
    for pair, (context, continuation) in zip(encode_pairs(bpe, texts), texts, strict=True):
        expected = TemplateLM._encode_pair(own, context, continuation)
        assert (pair.context[1:], pair.continuation) == expected


def test_a_merge_over_the_boundary_leaves_no_text_out() -> None:
    bpe = open_tokenizer(DataConfig(tokenizer='bpe'))
    own = SimpleNamespace(tok_encode=bpe.encode, backend='causal')
    words = sorted({*corpus.split().validation[0].split()})[:300]
    texts = [('It was ' + word[:i], word[i:]) for word in words for i in range(1, len(word))]
    pairs = encode_pairs(bpe, texts)
    emptied = sum(TemplateLM._encode_pair(own, *text)[1] == [] for text in texts)
    assert emptied > 50  # what would have gone wrong
    for pair, (context, continuation) in zip(pairs, texts, strict=True):
        assert pair.context + pair.continuation == [bpe.bos_id, *bpe.encode(context + continuation)]
        assert context.startswith(bpe.decode(pair.context))
        assert bpe.decode(pair.continuation).endswith(continuation)
    run = small_run('bpe', 'float32')
    assert all(score < 0 for score, _ in FbtLM(run, batch_size=64).loglikelihood(asked(*texts[:64])))


# loglikelihood_rolling


@pytest.mark.parametrize('options', MODES)
@float64
def test_rolling_scores_each_token_once(options: dict[str, Any]) -> None:
    run = small_run()
    text = corpus.split().validation[0]
    documents = [text[:n] for n in (1, CONTEXT - 1, CONTEXT, CONTEXT + 1, 2 * CONTEXT, 110)]
    expected = []
    for document in documents:
        ids, total = [256, *document.encode()], 0.0
        for start in range(1, len(ids), CONTEXT):
            end = min(start + CONTEXT, len(ids))
            # The last window is as long as the others; what it shares with the one before is context.
            pair = Pair(ids[max(end - CONTEXT - 1, 0) : start], ids[start:end])
            total += by_hand(run, pair, **options)[0]
        expected.append(total)
    for batch_size in (1, 4):
        model = FbtLM(run, batch_size=batch_size, **options)
        np.testing.assert_allclose(model.loglikelihood_rolling(asked(*((d,) for d in documents))), expected, rtol=1e-9)


def test_rolling_counts_are_those_of_the_text() -> None:
    """All parameters 0: every token has probability 1 / V."""
    run = small_run('bpe', 'float32')
    run = run._replace(params=jax.tree.map(np.zeros_like, run.params))
    documents = [d[:2000] for d in corpus.split().validation[:4]]
    found = FbtLM(run, batch_size=16).loglikelihood_rolling(asked(*((d,) for d in documents)))
    expected = [-len(run.tokenizer.encode(d)) * math.log(run.tokenizer.vocab_size) for d in documents]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# generate_until


@pytest.mark.parametrize('options', [{'mode': 'standard'}, {'mode': 'fused', 'fused_passes': 2}])
def test_texts_are_those_of_generate(options: dict[str, Any]) -> None:
    run = small_run(dtype='float32')
    run.params['embedding'] = run.params['embedding'] * 3
    prompts = ['', 'It is', 'a truth', 'universally']  # of few sizes, so that few programs are compiled
    free = generate(run, prompts, max_tokens=16, **options)
    stop = free.texts[0][4:6]
    expected = [text.split(stop)[0] for text in free.texts]
    for batch_size in (1, 8):
        model = FbtLM(run, batch_size=batch_size, **options)
        given = {'until': [stop, ''], 'max_gen_toks': 16, 'temperature': 0.0, 'do_sample': False, 'top_p': 0.9}
        assert model.generate_until(asked(*((p, given) for p in prompts))) == expected
    mixed = asked(*((p, {'until': None, 'max_gen_toks': 16 - i}) for i, p in enumerate(prompts)))
    alone = [generate(run, [p], max_tokens=16 - i, **options).texts[0] for i, p in enumerate(prompts)]
    assert model.generate_until(mixed) == alone


def test_samples_of_a_prompt_differ_and_no_batch_size_changes_them() -> None:
    run = small_run(dtype='float32')
    given = {'until': [], 'max_gen_toks': 12, 'do_sample': True, 'temperature': 1.0, 'top_p': 0.95, 'top_k': 50}
    requests = asked(*((prompt, given) for prompt in ('It is', 'a') for _ in range(4)))
    texts = FbtLM(run, mode='soft', batch_size=1).generate_until(requests)
    assert len(set(texts)) == 8
    assert FbtLM(run, mode='soft', batch_size=8).generate_until(requests) == texts
    assert FbtLM(run, mode='soft').generate_until(requests[4:]) == texts[4:]
    assert FbtLM(run, mode='soft', seed=1).generate_until(requests) != texts
    bare = FbtLM(run)._options({'do_sample': True, 'until': 'x'})
    assert (bare['temperature'], bare['stop'], bare['max_tokens']) == (1.0, ('x',), 256)


def test_a_prompt_that_is_too_long_loses_its_left_end() -> None:
    run = small_run(dtype='float32')
    text = FbtLM(run).generate_until(asked(('a' * 60 + 'b' * 10, {'max_gen_toks': 38})))[0]
    assert generate(run, [[98] * 10], mode='standard', max_tokens=38).texts == [text]
    with pytest.raises(UserError, match='num_beams = 4: would have no effect'):
        FbtLM(run).generate_until(asked(('a', {'num_beams': 4})))
    one = [FbtLM(run).generate_until(asked(('a', {'max_gen_toks': 3} | beams))) for beams in ({}, {'num_beams': 1})]
    assert one[0] == one[1]


def test_there_is_no_chat_template() -> None:
    with pytest.raises(UserError, match='this model has no chat template'):
        FbtLM(small_run(dtype='float32')).apply_chat_template([{'role': 'user', 'content': 'a'}])


def test_more_tokens_than_the_context_holds_are_cut_to_half_of_it(caplog: pytest.LogCaptureFixture) -> None:
    """The harness's own default of 256 among them; the prompt keeps the other half."""
    run = small_run(dtype='float32')
    prompts = ['a' * 60 + 'b' * 10, 'x', 'y']
    logging.getLogger('lm_eval').propagate = True
    with caplog.at_level(logging.WARNING, 'lm_eval.fbt'):
        given = ({}, {'max_gen_toks': 48}, {'max_gen_toks': 24})
        model = FbtLM(run)
        texts = model.generate_until(asked(*zip(prompts, given, strict=True)))
    assert model.cut_contexts == {prompts[0]}
    expected = [[*b'a' * 14, *b'b' * 10], [256, *b'x'], [256, *b'y']]
    assert texts == [generate(run, [ids], mode='standard', max_tokens=24).texts[0] for ids in expected]
    told = '2 of 3 requests: max_gen_toks leaves no room for prompts in max_length = 48: half of it is taken'
    assert [record.getMessage() for record in caplog.records] == [
        told,
        '1 of 3 requests: contexts lose their left ends, for max_length = 48',
    ]


# Batches


@pytest.mark.parametrize('options', MODES)
@float64
def test_an_automatic_batch_size_changes_nothing(options: dict[str, Any]) -> None:
    run = small_run()
    alone, auto = (FbtLM(run, batch_size=size, **options) for size in (1, 'auto:4'))
    scores = auto.loglikelihood(asked(*REQUESTS))
    np.testing.assert_allclose(scores, alone.loglikelihood(asked(*REQUESTS)), rtol=1e-9)
    text = asked((corpus.split().validation[0][:140],), ('né☃',))
    np.testing.assert_allclose(auto.loglikelihood_rolling(text), alone.loglikelihood_rolling(text), rtol=1e-9)
    given = {'until': ['e'], 'max_gen_toks': 4}
    prompts = asked(*((prompt, given) for prompt in ('It is', '', 'né☃', 'x')))
    assert auto.generate_until(prompts) == alone.generate_until(prompts)


def test_an_automatic_batch_holds_what_a_microbatch_held_and_half_where_memory_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = small_run(dtype='float32')
    data = DataConfig(tokenizer='bytes', seq_len=512, batch_size=16)
    training = TrainingConfig(microbatches=2)
    run = run._replace(config=Config(data=data, model=run.model.config, training=training))
    model = FbtLM(run, batch_size='auto')
    assert [model._rows(n) for n in (1, 128, 129, 400, 512)] == [32, 32, 16, 8, 8]
    assert FbtLM(run, batch_size='auto', max_batch_size=5)._rows(1) == 5
    expected = model.loglikelihood(asked(*REQUESTS))
    asked_for = []

    def full(self: FbtLM, pairs: list[Pair], rows: int) -> Any:
        asked_for.append(len(pairs))
        if len(pairs) > 2:
            raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory')
        return score(self, pairs, rows)

    score = FbtLM._score
    monkeypatch.setattr(FbtLM, '_score', full)
    np.testing.assert_allclose(model.loglikelihood(asked(*REQUESTS)), expected, rtol=1e-4)
    assert asked_for == [8, 8, 8, 4, 2, 2, 2, 2]  # 32, 16, 8 rows are asked for, and there are but 8
    with pytest.raises(jax.errors.JaxRuntimeError):
        FbtLM(run, batch_size=8).loglikelihood(asked(*REQUESTS))


# The harness


def test_the_harness_stores_results(tmp_path: Path) -> None:
    """What it has stored it asks for no more, each kind of request under its own name."""
    model = FbtLM(small_run(dtype='float32'))
    cached = CachingLM(model, str(tmp_path / 'cache.db'))
    requests = {'loglikelihood': asked(*REQUESTS), 'loglikelihood_rolling': asked(('some text',))}
    requests['generate_until'] = asked(('a', {'until': ['b'], 'max_gen_toks': 5}))
    first = {name: getattr(model, name)(given) for name, given in requests.items()}  # stored by the hook alone
    cached.lm = SimpleNamespace(**dict.fromkeys(requests))  # which cannot be called
    assert {name: getattr(cached, name)(given) for name, given in requests.items()} == first


@pytest.mark.parametrize(
    ('arguments', 'told'),
    [
        ({'mode': 'hard'}, r"mode = 'hard': must be one of standard, soft, fused"),
        ({'fused_passes': 1}, r'fused_passes = 1: has no effect in mode standard'),
        ({'mode': 'fused', 'fused_passes': 0}, r'fused_passes = 0: must be at least 1'),
        ({'batch_size': 'auto:x'}, r"batch_size = 'auto:x': must be a number above 0, or 'auto'"),
        ({'batch_size': 0}, r'batch_size = 0: must be a number above 0'),
        ({'batch_size': 'auto', 'max_batch_size': 0}, r'max_batch_size = 0: must be at least 1'),
        ({'max_length': 49}, r'max_length = 49: must lie in 1\.\.48, the trained context'),
        ({'seed': -1}, r'seed = -1: must lie in 0'),
        ({'max_batch_size': 4}, r'max_batch_size = 4: has no effect: is of batch_size=auto'),
        ({'pretrained': 'gpt2'}, r"pretrained = 'gpt2': no argument of the model; those are workdir, step, mode"),
    ],
)
def test_a_wrong_argument_is_told(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        FbtLM(small_run(dtype='float32'), **arguments)


def test_a_run_that_cannot_be_asked_is_told() -> None:
    run = small_run(dtype='float32')
    with pytest.raises(UserError, match='not trained with feedback; only standard is possible'):
        FbtLM(run._replace(trained_feedback=False), mode='soft')
    with pytest.raises(UserError, match='has no tokenizer'):
        FbtLM(run._replace(tokenizer=None))
    with pytest.raises(UserError, match="workdir = None: must be a run's folder"):
        FbtLM.create_from_arg_string('mode=soft', {'batch_size': 1, 'device': None})


def test_without_the_harness_its_extra_is_named() -> None:
    code = "import sys; sys.modules['lm_eval'] = None; import fbt_jax.interop.lm_eval_model"
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert "lm-evaluation-harness is an extra: pip install 'fbt-jax[lm-eval]'" in done.stderr.splitlines()[-1]


def test_arguments_go_before_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """`lm_eval` gives `batch_size=1` where nobody has asked for anything."""
    loaded = []

    def load(workdir: str, step: int | None) -> Run:
        loaded.append((workdir, step))
        return small_run(dtype='float32')

    monkeypatch.setattr(lm_eval_model, 'load_run', load)
    assert get_model('fbt') is FbtLM
    model = FbtLM.create_from_arg_string('workdir=12,step=3,mode=soft,batch_size=5', {'batch_size': 1, 'device': None})
    assert (loaded, model._rows(9), model._mode) == ([('12', 3)], 5, 'soft')
    assert FbtLM.create_from_arg_obj({'workdir': 'runs/a'}, {'batch_size': '3'})._rows(9) == 3
    assert model.get_model_info()['model_step'] == 7


def answers() -> list[Any]:
    """Scores, rolling scores and texts of each mode, on however many devices there are."""
    found = []
    with jax.enable_x64(True):
        for mode in ('standard', 'fused', 'soft'):
            model = FbtLM(small_run(), mode=mode, batch_size=3)
            scores = [score for score, _ in model.loglikelihood(asked(*REQUESTS))]
            rolling = model.loglikelihood_rolling(asked(('some text ' * 12,)))
            found.append([scores, rolling, model.generate_until(asked(('a', {'max_gen_toks': 3})))])
    return [jax.device_count(), found]


@pytest.mark.slow
def test_devices_change_nothing() -> None:
    count, found = on_devices(answers)
    assert count == 8
    for (scores, rolling, texts), (a, b, c) in zip(found, answers()[1], strict=True):
        np.testing.assert_allclose(scores, a, rtol=1e-9)
        np.testing.assert_allclose(rolling, b, rtol=1e-9)
        assert texts == c
