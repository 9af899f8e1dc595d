"""Scores and records of lm-evaluation-harness's tasks, offline, by hand; what is refused before anything is scored."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_data import write_jsonl
from helpers_e2e import TEXT, finish, start, train, write_config
from helpers_harness import LM, ROWS, TaskManager, datasets, questions, write
from helpers_run import make_run
from test_e2e_processes import environments

from fbt_jax.errors import UserError
from fbt_jax.evaluation.task_scores import harness_scores, mcnemar
from fbt_jax.interop import harness_tasks
from fbt_jax.interop.harness_tasks import load_task, local_files, plan_harness
from fbt_jax.interop.task_records import Records
from fbt_jax.interop.task_settings import Settings
from fbt_jax.interop.task_tables import task_lines


@pytest.fixture(autouse=True)
def no_shared_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(tmp_path / 'datasets'))


@pytest.fixture(scope='module')
def manager() -> TaskManager:
    return TaskManager()


def evaluate(run: Any, names: list[str], asked: Settings, out: Path, made_by: dict[str, Any]) -> dict[str, Any]:
    plan = plan_harness(names, asked)
    harness_tasks.note_harness(plan, asked, out, made_by)
    return harness_tasks.evaluate_harness(run, plan, asked, out)


class Lengths(LM):
    """Likes short continuations, in mode soft long ones; counts its requests."""

    asked = 0

    def __init__(self, run: Any, *, mode: str, batch_size: int, fused_passes: int | None) -> None:
        super().__init__()
        self._sign = 1 if mode == 'soft' else -1
        self.cut_contexts: set[str] = set()

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        Lengths.asked += len(requests)
        self.cut_contexts |= {r.args[0] for r in requests if '1 0?' in r.args[0]}
        return [(self._sign * len(r.args[1]) - 99.0, False) for r in requests]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: list[Any]) -> list[str]:
        return ['yes'] * len(requests)


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch, manager: TaskManager) -> type[Lengths]:
    """Also one index of the harness's tasks for all tests: it takes seconds to make."""
    monkeypatch.setattr(harness_tasks, 'FbtLM', Lengths)
    monkeypatch.setattr('lm_eval.tasks.TaskManager', lambda include_path: manager)
    Lengths.asked = 0
    return Lengths


def test_scores_and_records_of_a_group(tmp_path: Path, lengths: type[Lengths]) -> None:
    """'red' is the shortest, 'yellowish' the longest; the group counts items, not tasks."""
    files = write(tmp_path / 'files', 'arc_easy', test=questions('AACB'))
    write(files, 'arc_challenge', test=questions('CC', 1))
    asked = Settings(('ai2_arc', 'arc_easy'), ('standard', 'soft'), str(files))
    out = tmp_path / 'out'
    out.mkdir()
    run = make_run()
    found = evaluate(run, list(asked.tasks), asked, out, {'step': 7})
    assert lengths.asked == 6 * 3 * 2  # a task that is asked for twice is done once
    group = found['ai2_arc']
    assert group['items'] == 6
    assert {mode: scores['acc']['value'] for mode, scores in group['scores'].items()} == {
        'standard': pytest.approx(2 / 6),
        'soft': pytest.approx(3 / 6),
    }
    assert found['arc_easy']['scores']['soft']['acc']['value'] == 1 / 4
    (pair,) = group['pairs']
    assert (pair['only_first'], pair['only_second']) == (2, 3)
    assert pair['p_value'] == mcnemar([1, 1, 0, 0, 0], [0, 0, 1, 1, 1]).p_value
    rows = [json.loads(line) for line in (out / 'arc_easy-soft.jsonl').open()]
    assert [(r['item'], r['verdict']) for r in rows] == [(0, 'wrong'), (1, 'wrong'), (2, 'correct'), (3, 'wrong')]
    assert rows[0]['prompt'][2] == ['Question: 0 0?\nAnswer:', ' yellowish']
    assert rows[0]['output'][2] == [10 - 99.0, False]
    again = evaluate(run, list(asked.tasks), asked, out, {'step': 7})
    assert again == found
    assert lengths.asked == 6 * 3 * 2
    assert (group['cut'], found['arc_easy']['cut']) == (1, 0)
    rows = [json.loads(line) for line in (out / 'arc_challenge-soft.jsonl').open()]
    assert [r['cut'] for r in rows] == [True, False]
    lines = task_lines({'workdir': 'runs/x', 'step': 7, 'out': 'o', 'tasks': found})
    assert sum(line.startswith('1 of them do not fit the trained context: the left ends') for line in lines) == 1
    assert lines.count('intervals over so few items (< 30) are likely too narrow') == 2
    assert any(line.startswith('soft less standard: acc +0.167') for line in lines)
    write(files, 'arc_easy', test=questions('AAAA'))
    with pytest.raises(UserError, match='arc_easy made otherwise: files was'):
        evaluate(run, ['arc_easy'], asked, out, {'step': 7})


def test_examples_and_limits_are_the_harness_s(tmp_path: Path, lengths: type[Lengths]) -> None:
    files = write(tmp_path / 'files', 'arc_easy', test=questions('AAAA'), train=questions('BBBB', 9))
    (tmp_path / 'out').mkdir()
    asked = Settings(('arc_easy',), ('standard',), str(files), shots=2, limit=3)
    found = evaluate(make_run(), ['arc_easy'], asked, tmp_path / 'out', {})
    assert (found['arc_easy']['items'], found['arc_easy']['scores']['standard']['acc']['value']) == (3, 1.0)
    assert found['arc_easy']['source'] == str(files / 'arc_easy' / 'test.jsonl')
    row = json.loads((tmp_path / 'out' / 'arc_easy-standard.jsonl').read_text().splitlines()[0])
    assert row['prompt'][0][0].count('Answer: blue\n\nQuestion:') == 2
    (tmp_path / 'more').mkdir()
    with pytest.raises(UserError, match='--shots=50: arc_easy has 4 examples'):
        evaluate(make_run(), ['arc_easy'], asked._replace(shots=50), tmp_path / 'more', {})
    write(tmp_path / 'alone', 'arc_easy', test=questions('AAAA'))
    with pytest.raises(UserError, match='--shots=4: arc_easy has 3 examples'):
        evaluate(
            make_run(), ['arc_easy'], asked._replace(files=str(tmp_path / 'alone'), shots=4), tmp_path / 'more', {}
        )
    # An item is none of its own examples, whatever split both come from.
    write(tmp_path / 'piqa', 'piqa', validation=[ROWS['piqa'][1] | {'goal': f'Open {n}'} for n in range(4)])
    for name, files in (('arc_easy', tmp_path / 'alone'), ('piqa', tmp_path / 'piqa')):
        evaluate(make_run(), [name], Settings((name,), ('soft',), str(files), shots=3), tmp_path / 'more', {})
        rows = [json.loads(line) for line in (tmp_path / 'more' / f'{name}-soft.jsonl').open()]
        for row in rows:
            questions_of = row['prompt'][0][0].split('\n\n')
            assert len({text.split('\n')[0] for text in questions_of}) == len(questions_of) == 4


def test_modes_may_be_added_and_left_out(tmp_path: Path, lengths: type[Lengths]) -> None:
    files = write(tmp_path / 'files', 'arc_easy', test=questions('AB'))
    (tmp_path / 'out').mkdir()

    def do(*modes: str, fused_passes: int | None = None) -> dict[str, Any]:
        asked = Settings(('arc_easy',), modes, str(files), fused_passes)
        return evaluate(make_run(), ['arc_easy'], asked, tmp_path / 'out', {'step': 7})['arc_easy']['scores']

    assert list(do('standard')) == ['standard']
    assert list(do('standard', 'fused', fused_passes=2)) == ['standard', 'fused']
    assert list(do('soft')) == ['soft']
    assert lengths.asked == 3 * 2 * 3
    with pytest.raises(UserError, match='arc_easy in mode fused made otherwise: fused_passes was 2, now 1'):
        do('fused')


MADE_TASKS = {
    'zero': """
output_type: multiple_choice
doc_to_choice: [a, bb]
doc_to_target: label
num_fewshot: 0
metric_list: [{metric: acc}]
""",
    'filtered': """
output_type: generate_until
doc_to_target: answer
generation_kwargs: {until: ["\\n"]}
filter_list:
  - {name: whole, filter: [{function: take_first}]}
  - {name: nothing, filter: [{function: regex, regex_pattern: zzz}, {function: take_first}]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    'likely': """
output_type: loglikelihood
fewshot_split: test
doc_to_target: answer
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    'wanting': """
output_type: loglikelihood
fewshot_split: test
num_fewshot: 5
doc_to_target: answer
""",
    'gsm8k': """
output_type: loglikelihood
doc_to_target: answer
""",
}


@pytest.fixture
def made_tasks(tmp_path: Path, lengths: type[Lengths], monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of tasks of our own, over three rows, and their groups."""
    files = tmp_path / 'made'
    files.mkdir()
    answers = ('yes', 'no', 'yes')
    rows = [{'question': f'{n}?', 'answer': answer, 'label': n % 2} for n, answer in enumerate(answers)]
    write_jsonl(files / 'rows.jsonl', rows)
    where = f'dataset_path: json\ndataset_kwargs: {{data_files: {{test: {files}/rows.jsonl}}}}\ntest_split: test\n'
    for name, text in MADE_TASKS.items():
        (files / f'{name}.yaml').write_text(f'task: {name}\n{where}doc_to_text: question{text}')
    for name, members in {'mixed': 'zero, filtered', 'clashing': 'zero, gsm8k'}.items():
        (files / f'{name}.yaml').write_text(f'group: {name}\ntask: [{members}]\n')
    manager = TaskManager(include_path=str(files), include_defaults=False)
    monkeypatch.setattr('lm_eval.tasks.TaskManager', lambda include_path: manager)
    (tmp_path / 'out').mkdir()
    return str(files)


def test_scores_of_each_filter_and_of_each_task_s_own_metrics(made_tasks: str, tmp_path: Path) -> None:
    asked = Settings(('mixed', 'likely'), ('standard', 'soft'), made_tasks)
    found = evaluate(make_run(), list(asked.tasks), asked, tmp_path / 'out', {})
    means = {n: s['value'] for n, s in found['mixed']['scores']['standard'].items()}
    assert found['mixed']['items'] == 6
    assert means == {'acc': 2 / 3, 'exact_match,whole': 2 / 3, 'exact_match,nothing': 0.0}
    # A perplexity is no mean over items.
    assert list(found['likely']['scores']['standard']) == ['acc']
    rows = [json.loads(line) for line in (tmp_path / 'out' / 'filtered-soft.jsonl').open()]
    assert [row['output'] for row in rows] == [{'whole': ['yes'], 'nothing': ['[invalid]']}] * 3
    (pair,) = found['mixed']['pairs']
    assert pair['second_less_first']['acc']['value'] == pytest.approx(-1 / 3)
    assert pair['second_less_first']['exact_match,whole']['value'] == 0


def test_what_the_harness_would_leave_out_or_mix_up_is_refused(made_tasks: str, tmp_path: Path) -> None:
    for names, changes, told in (
        (['zero'], {'shots': 2}, '--shots=2: zero takes no examples, by its own definition'),
        (['clashing'], {}, '--tasks: clashing: holds gsm8k, which is generated and judged here: --tasks=gsm8k'),
        (['likely'], {'shots': 3}, '--shots=3: likely has 2 examples'),
        (['wanting'], {}, 'wanting takes 5: wanting has 2 examples'),
    ):
        with pytest.raises(UserError, match=f'^{re.escape(told)}$'):
            evaluate(make_run(), names, Settings(tuple(names), ('soft',), made_tasks, **changes), tmp_path, {})
    path = Path(made_tasks) / 'rows.jsonl'
    path.write_text(path.read_text().splitlines(keepends=True)[0] * 3)
    with pytest.raises(UserError, match='likely has 0 examples'):  # all rows are the item itself
        evaluate(make_run(), ['likely'], Settings(('likely',), ('soft',), made_tasks, shots=1), tmp_path, {})


def test_every_row_is_looked_at_first(tmp_path: Path, lengths: type[Lengths]) -> None:
    files = write(tmp_path / 'files', 'arc_easy', test=questions('ABZ'))
    asked = Settings(('arc_easy',), ('soft',), str(files))
    with pytest.raises(UserError, match='arc_easy: item 3 is none of it: ValueError: '):
        evaluate(make_run(), ['arc_easy'], asked, tmp_path, {})
    assert lengths.asked == 0
    (tmp_path / 'out').mkdir()
    assert evaluate(make_run(), ['arc_easy'], asked._replace(limit=2), tmp_path / 'out', {})['arc_easy']['items'] == 2
    (files / 'arc_easy' / 'test.jsonl').write_text('')
    with pytest.raises(UserError, match=r'arc_easy/test\.jsonl: is empty'):
        evaluate(make_run(), ['arc_easy'], asked, tmp_path, {})


def test_metrics_that_are_not_of_items_leave_nothing_to_score(tmp_path: Path) -> None:
    records = Records(tmp_path, 'made', 'soft')
    records.write([{'item': 1, 'sample': 0, 'verdict': None, 'scores': {}}])
    by_item = {item: r['scores'] for item, r in records.read().items()}
    scores = harness_scores({'standard': by_item, 'soft': by_item}) | {'shots': 0, 'source': 'x'}
    lines = task_lines({'workdir': 'runs/x', 'step': 7, 'out': 'o', 'tasks': {'made': scores}})
    assert lines[2:] == [
        'made: 1 items, 0 shots, from x',
        'nothing to score: none of its metrics is a number of single items',
    ]


def test_what_is_not_there_is_told(tmp_path: Path, lengths: type[Lengths], manager: TaskManager) -> None:
    with pytest.raises(UserError, match=r'no arc_easy/validation\.jsonl or arc_easy/test\.jsonl there'):
        evaluate(make_run(), ['arc_easy'], Settings(('arc_easy',), ('soft',), str(tmp_path)), tmp_path, {})
    with pytest.raises(UserError, match='nothing_like_it: no such task'):
        plan_harness(['nothing_like_it'], Settings(('x',), ('soft',)))
    for wrong, right in (('arc_eazy', 'arc_easy'), ('gsm8', 'gsm8k'), ('math50', 'math500')):
        with pytest.raises(UserError, match=f'{wrong}: no such task.* did you mean {right}\\?$'):
            plan_harness([wrong], Settings(('x',), ('soft',)))
    with pytest.raises(UserError, match=r'social_iqa: .*; give --task-files=FOLDER with social_iqa/validation\.jsonl'):
        load_task(manager, 'social_iqa', None)
    write(tmp_path, 'piqa', validation=[{'nothing': 1}])
    with pytest.raises(UserError, match='piqa: '):
        load_task(manager, 'piqa', local_files('piqa', str(tmp_path)))


def test_scores_that_are_not_right_or_wrong_have_no_mcnemar() -> None:
    found = harness_scores({'a': {1: {'acc': 0.25}, 2: {'acc': 1.0}}, 'b': {1: {'acc': 0.5}, 2: {'acc': 1.0}}})
    assert found['scores']['a']['acc']['value'] == 0.625
    (pair,) = found['pairs']
    assert (pair['p_value'], pair['second_less_first']['acc']['value']) == (None, 0.125)


@pytest.mark.slow
def test_mmlu_is_scored_over_all_its_subjects(tmp_path: Path, lengths: type[Lengths], manager: TaskManager) -> None:
    leaves = list(harness_tasks._leaves(manager, 'mmlu'))
    assert len(leaves) == 57
    files, row = tmp_path / 'files', ROWS['mmlu_anatomy'][1]
    for n, leaf in enumerate(leaves):
        write(files, leaf, test=[row | {'answer': n % 4}] * (1 + n % 2), dev=[row] * 5)
    (tmp_path / 'out').mkdir()
    asked = Settings(('mmlu',), ('standard',), str(files), shots=1)
    found = evaluate(make_run(), ['mmlu'], asked, tmp_path / 'out', {})['mmlu']
    assert found['items'] == 57 + 28
    # All choices are as long: the first is taken.
    assert found['scores']['standard']['acc']['value'] == pytest.approx(15 / 85)


@pytest.mark.slow
def test_the_command_in_one_and_two_processes(tmp_path: Path) -> None:
    train(write_config(tmp_path), tmp_path / 'run', *TEXT, '--config.training.steps=20')
    files = write(tmp_path / 'files', 'arc_easy', test=questions('ABCA'))
    write(files, 'copa', validation=[ROWS['copa'][1] | {'label': n % 2, 'idx': n} for n in range(3)])

    def ask(out: str, *more: str, **extra: str) -> Any:
        arguments = [
            f'--workdir={tmp_path}/run',
            '--tasks=arc_easy,copa',
            f'--task-files={files}',
            '--modes=standard,fused',
        ]
        extra |= {'HF_HOME': str(tmp_path / 'home')}
        return start(
            'evaluate', *arguments, f'--out={tmp_path}/{out}', f'--json={tmp_path}/{out}.json', *more, extra=extra
        )

    one, two = ask('one'), [ask('two', '--batch-size=3', **extra) for extra in environments(2)]
    done = [finish(process) for process in (one, *two)]
    assert [d.status for d in done] == [0, 0, 0], done[1].text
    rows = [
        [json.loads(line) for path in sorted((tmp_path / out).glob('*.jsonl')) for line in path.open()]
        for out in ('one', 'two')
    ]
    assert len(rows[0]) == 2 * (4 + 3)
    for a, b in zip(*rows, strict=True):
        assert (a['item'], a['verdict'], a['scores']) == (b['item'], b['verdict'], b['scores'])
        np.testing.assert_allclose([x[0] for x in a['output']], [x[0] for x in b['output']], rtol=1e-5)
    figures = [json.loads((tmp_path / f'{out}.json').read_text())['tasks'] for out in ('one', 'two')]
    assert figures[0] == figures[1]
