"""Probes: the tasks' counts and pairs, states at every depth against numpy, chance and 100 % where they are planted."""

import collections
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from helpers import flat_params, float64
from helpers_e2e import TEXT, finish, start, train, write_config
from helpers_run import make_run

from fbt_jax.config import DataConfig
from fbt_jax.data.tokenizer import open_tokenizer
from fbt_jax.errors import UserError
from fbt_jax.evaluation import probe_tasks, probes
from fbt_jax.evaluation.probe_tasks import Setting
from fbt_jax.training import probing

BYTES = open_tokenizer(DataConfig(tokenizer='bytes'))
BPE = open_tokenizer(DataConfig(tokenizer='bpe'))


def settings(seed: int = 0) -> list[Setting]:
    return probe_tasks.all_settings(seed, len)


def arrays(setting: Setting) -> tuple[np.ndarray, np.ndarray]:
    return np.array([x.label for x in setting.examples]), np.array([x.group for x in setting.examples])


# Tasks


def test_counts_are_the_paper_s() -> None:
    counts: dict[str, int] = collections.Counter()
    groups = collections.defaultdict(set)
    for setting in settings():
        counts[setting.task] += len(setting.examples)
        groups[setting.task] |= {x.group for x in setting.examples}
        assert sum(x.label for x in setting.examples) * 2 == len(setting.examples)
        assert len({x.text for x in setting.examples}) == len(setting.examples)
    assert {task: len(found) for task, found in groups.items()} == {
        'completion tracking': 80,
        'delayed memory': 128,
        'last write': 128,
    }
    assert counts['completion tracking'] == 1600
    assert counts['delayed memory'] == 1280
    sizes = {setting.name: len(setting.examples) for setting in settings() if setting.task == 'last write'}
    sixteen = ['1 register, 16 writes each', '2 registers, 8 writes each', '4 registers, 4 writes each']
    eight = [f'8 registers, {writes} writes each' for writes in (2, 4, 8)]
    assert list(sizes) == [*sixteen, *eight]
    assert sum(sizes[name] for name in [*sixteen, eight[0]]) == 3840
    assert [sizes[name] for name in eight] == [2048] * 3


def test_labels_follow_from_the_texts() -> None:
    """Read as programs, by a reader of their own."""
    for setting in settings():
        for example in setting.examples:
            *statements, asked = example.text.removesuffix(':').split(';')
            values: dict[str, str] = {}
            fillers = 0
            for statement in statements:
                name, _, value = statement.partition('=')
                fillers += name.startswith('x')
                values |= {} if name.startswith('x') else {name: value}
            answer = values['required'] == values['completed'] if asked == 'done' else values[asked] == '1'
            assert answer == bool(example.label), example
            count = 8 if setting.task == 'last write' else int(setting.name.split()[0])
            assert fillers == count + 3 * (setting.task == 'delayed memory')


@pytest.mark.parametrize('tokenizer', [BYTES, BPE])
def test_pairs_are_matched(tokenizer: Any) -> None:
    """One of each label, of one length, alike but for one value (two that swap), long before the end."""
    for setting in probe_tasks.all_settings(0, lambda text: len(tokenizer.encode(text))):
        pairs = collections.defaultdict(list)
        for example, ids in zip(setting.examples, probes.encoded(tokenizer, setting), strict=True):
            pairs[example.group, example.pair].append((example.label, np.array(ids)))
        for members in pairs.values():
            assert sorted(label for label, _ in members) == [0, 1]
            (_, one), (_, other) = members
            differing = np.flatnonzero(one != other)
            if setting.task == 'completion tracking':
                assert differing[-1] - differing[0] < 2  # one name, of two letters
            else:
                assert len(differing) == {'delayed memory': 1, 'last write': 2}[setting.task]
            assert differing[-1] < len(one) - 2
            assert one[-1] == other[-1]
            if setting.task == 'last write':
                assert sorted(one) == sorted(other)


def test_texts_are_functions_of_the_seed() -> None:
    assert settings(3) == settings(3)
    for one, other in zip(settings(3), settings(4), strict=True):
        assert one.examples != other.examples


def test_neither_counts_nor_last_tokens_give_a_label_away() -> None:
    """Linear probes of the bag of tokens, and of the last five; but memory's label is one token, which a bag sees."""
    for setting in settings():
        if len(setting.examples) > 600:
            continue
        labels_E, groups_E = arrays(setting)
        ids = probes.encoded(BYTES, setting)
        used, place = np.unique(np.concatenate(ids), return_inverse=True)
        onehot = np.split(np.eye(len(used))[place], np.cumsum([len(x) for x in ids])[:-1])
        bag = probes.probe(np.stack([x.sum(0) for x in onehot])[:, None], labels_E, groups_E).value_S[0]
        end = probes.probe(np.stack([x[-5:].ravel() for x in onehot])[:, None], labels_E, groups_E).value_S[0]
        assert bag == 1 if setting.task == 'delayed memory' else abs(bag - 0.5) < 0.13, (setting.name, bag)
        assert end == 0.5, (setting.name, end)


def test_names_that_are_longer_are_left_out() -> None:
    """A tokenizer that takes two tokens for each vowel."""
    found = probe_tasks.all_settings(0, lambda text: len(text) + sum(map(text.count, 'aeiou')))
    assert not any(set(x.text[9:11]) & set('aeiou') for x in found[0].examples)
    with pytest.raises(ValueError, match='5 names are too few for 80 groups of two'):
        probe_tasks.completion_tracking(0, ['ab', 'cd', 'ef', 'gh', 'ij'])


def test_a_tokenizer_that_breaks_the_pairs_is_refused() -> None:
    class Merging:
        bos_id = 0

        def __init__(self, *merged: str) -> None:
            self.merged = merged

        def encode(self, text: str) -> list[int]:
            for i, piece in enumerate(self.merged):
                text = text.replace(piece, chr(1000 + i))
            return [ord(x) for x in text]

        def decode(self, ids: list[int]) -> str:
            return ''.join(self.merged[i - 1000] if i >= 1000 else chr(i) for i in ids)

    memory = probe_tasks.delayed_memory(0)[1]
    assert probes.encoded(Merging(), memory)
    with pytest.raises(UserError, match=r"^delayed memory, 8 fillers: .*state=1;.*' has not as many tokens as"):
        probes.encoded(Merging('=1'), memory)
    with pytest.raises(UserError, match='not every text ends in the same token, a colon alone'):
        probes.encoded(Merging('e:'), memory)


# The probe


def planted(strength: float, seed: int = 1, groups: int = 128) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(E, 3, 24) states: what a group shares, noise, and at depth 1 the label along one direction."""
    rng = np.random.default_rng(seed)
    groups_E, labels_E = np.repeat(np.arange(groups), 2), np.tile([0, 1], groups)
    states_ESD = rng.normal(size=(groups, 3, 24))[groups_E] * 3 + 0.3 * rng.normal(size=(2 * groups, 3, 24))
    states_ESD[:, 1] += strength * np.outer(2 * labels_E - 1, rng.normal(size=24))
    return states_ESD, labels_E, groups_E


def test_planted_labels_are_read_and_only_where_they_are() -> None:
    states_ESD, labels_E, groups_E = planted(5.0)
    found = probes.probe(states_ESD, labels_E, groups_E)
    assert found.value_S[1] == 1
    assert (found.low_S[1], found.high_S[1]) == (1, 1)
    for s in (0, 2):
        assert abs(found.value_S[s] - 0.5) < 4 * 0.5 / np.sqrt(len(labels_E))
        assert found.low_S[s] < 0.52
        assert found.high_S[s] > 0.48
        assert found.low_S[s] < found.value_S[s] < found.high_S[s]


def test_shuffled_labels_are_chance() -> None:
    """Within four standard deviations of a coin, each of five times and in all."""
    states_ESD, labels_E, groups_E = planted(5.0)
    shuffled = [np.random.default_rng(i).permutation(labels_E) for i in range(5)]
    found = np.array([probes.probe(states_ESD[:, 1:2], labels_E, groups_E).value_S[0] for labels_E in shuffled])
    assert np.abs(found - 0.5).max() < 4 * 0.5 / np.sqrt(len(labels_E))
    assert abs(found.mean() - 0.5) < 4 * 0.5 / np.sqrt(5 * len(labels_E))


def test_a_group_is_never_split() -> None:
    """States that say which group they are of, and labels that groups share: a part of one tells the rest."""
    rng = np.random.default_rng(0)
    groups_E = np.repeat(np.arange(40), 8)
    labels_E = rng.permutation(np.arange(40) % 2)[groups_E]
    states_ESD = np.eye(40)[groups_E][:, None]
    assert probes.probe(states_ESD, labels_E, groups_E).value_S[0] < 0.6
    assert probes.probe(states_ESD, labels_E, np.arange(320)).value_S[0] == 1


# States at every depth


@float64
def test_states_are_those_of_the_recurrence_at_every_depth() -> None:
    """Against numpy: k steps are k + 1 passes whose prefix is all but the last k; all steps are T passes."""
    run = make_run(seq_len=32, dtype='float64')
    rng = np.random.default_rng(2)
    ids = [[run.tokenizer.bos_id, *rng.integers(3, 200, size=n).tolist()] for n in (8, 6)]
    params, model_config = flat_params(run.params), run.model.config

    def expected(row: list[int], steps: int) -> np.ndarray:
        tokens = np.array([row])
        positions = np.arange(len(row))[None]
        hidden = np.zeros((1, len(row), model_config.width))
        for k in range(steps + 1):
            depths: list[np.ndarray] = []
            plain = (positions < len(row) - steps) | (positions == 0) | (k == 0)
            hidden = reference.states(
                params, model_config, tokens, reference.shift(hidden), plain, positions, np.ones_like(tokens), depths
            )
        return np.stack([*(x[0, -1] for x in depths), hidden[0, -1]])

    modes = [probes.PLAIN, *map(probes.k_step, (1, 3, 32)), probes.FULL]
    for mode in modes:
        found_ESD = probes.depth_states(run.model, run.params, ids, mode, context=32)
        assert found_ESD.shape == (2, model_config.num_layers + 2, model_config.width)
        for row, own_SD in zip(ids, found_ESD, strict=True):
            most = len(row) - 1
            np.testing.assert_allclose(
                own_SD, expected(row, most if mode.steps is None else min(mode.steps, most)), atol=1e-9
            )


@pytest.mark.slow
@float64
def test_batches_and_padding_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(seq_len=32, dtype='float64')
    ids = [[1, *range(20, 20 + n)] for n in (5, 9, 3, 12, 7)]
    whole = probes.depth_states(run.model, run.params, ids, probes.FULL, context=32)
    monkeypatch.setattr(probes, 'BATCH_ROWS', 2)
    np.testing.assert_allclose(
        probes.depth_states(run.model, run.params, ids, probes.FULL, context=32), whole, atol=1e-5
    )


# Runs


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few short texts, and one recurrent suffix."""

    def some(seed: int, tokens_in: Any) -> list[Setting]:
        memory = probe_tasks.delayed_memory(seed)
        return [x._replace(examples=x.examples[:128]) for x in (memory[0], memory[-1])]

    monkeypatch.setattr(probing, 'all_settings', some)
    monkeypatch.setattr(probing, 'STEPS', (1,))


def opened(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.setattr(probing, 'load_run', lambda workdir: run)


@pytest.mark.usefixtures('few')
def test_a_run_with_feedback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One recurrent step brings to depth 0 what a plain prefill cannot have there."""
    from fbt_jax.evaluation.plots import draw_probes

    opened(monkeypatch, make_run(seq_len=32, window=0, num_layers=1))
    figures = probing.probe_figures('runs/x')
    assert figures['modes'] == ['plain', '1-step', 'full']
    assert figures['depths'] == ['0', '1', 'h']
    assert [x['setting'] for x in figures['results']] == ['0 fillers']
    assert figures['left_out'] == [{'task': 'delayed memory', 'setting': '256 fillers', 'tokens': 1 + 9 + 8 + 768 + 6}]
    [result] = figures['results']
    assert result['modes']['plain']['accuracy'][0] == 0.5
    assert result['modes']['1-step']['accuracy'][0] > 0.75
    lines = probing.probe_lines(figures)
    assert lines[0] == 'runs/x, step 7: logistic regression, L2, C = 1, standardised, 4 folds by group; chance is 50 %'
    assert lines[1] == 'delayed memory, 0 fillers: 128 examples in 64 groups, up to 24 tokens'
    assert lines[-1].endswith('256 fillers: 792 tokens, more than the trained context of 32')
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    fresh = probing.probe_figures('runs/x', untrained=True)
    assert probing.probe_lines(fresh)[0].startswith('runs/x, fresh weights: ')
    assert fresh['results'] != figures['results']
    draw_probes(str(tmp_path / 'a.png'), figures)
    assert (tmp_path / 'a.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'


@pytest.mark.usefixtures('few')
def test_a_run_without_feedback_is_read_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    opened(monkeypatch, make_run(seq_len=32, window=0, num_layers=1, fusion='none'))
    figures = probing.probe_figures('x')
    assert figures['modes'] == ['plain']
    assert 'trained without feedback: read plainly only' in probing.probe_lines(figures)


def test_what_cannot_be_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(seq_len=8)
    opened(monkeypatch, run)
    with pytest.raises(UserError, match='no task fits the trained context of 8 tokens; the shortest has 24'):
        probing.probe_figures('x')
    opened(monkeypatch, run._replace(tokenizer=None))
    with pytest.raises(UserError, match='x: was not trained on text'):
        probing.probe_figures('x')
    monkeypatch.setitem(__import__('sys').modules, 'sklearn', None)
    with pytest.raises(UserError, match=r"probes need scikit-learn: pip install 'fbt-jax\[probes\]'"):
        probing.probe_figures('x')


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    config, run = write_config(tmp_path), tmp_path / 'run'
    train(config, run, *TEXT, '--config.training.steps=4', '--config.data.seq_len=48')
    json_path, png = tmp_path / 'probes.json', tmp_path / 'probes.png'
    result = finish(start('diagnose', f'--workdir={run}', '--probes', f'--json={json_path}', f'--plot={png}'))
    assert result.status == 0, result.text
    figures = json.loads(json_path.read_text())
    assert [x['examples'] for x in figures['results']] == [320, 256, 256]
    assert len(figures['left_out']) == 13
    assert 'completion tracking, 0 fillers: 320 examples in 80 groups' in result.out
    assert png.stat().st_size > 10_000
