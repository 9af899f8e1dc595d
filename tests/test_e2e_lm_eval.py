"""lm-evaluation-harness as a user runs it: by our command and by its own, offline, in several processes."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ['HF_HUB_OFFLINE'] = '1'  # read when the harness's libraries are imported

import numpy as np
import pytest
from helpers_e2e import ROOT, TEXT, finish, train, write_config
from test_e2e_processes import environments

from fbt_jax.config import Config, DataConfig
from fbt_jax.data import corpus

pytest.importorskip('lm_eval')

from test_lm_eval import asked, small_run

from fbt_jax.interop.lm_eval_model import FbtLM


def write_tasks(folder: Path) -> Path:
    """Three tasks over chapters that no run has seen: which sentence follows, perplexity, and copying a word."""
    folder.mkdir()
    sentences = [s.strip() + '.' for s in corpus.split().validation[1].split('.') if 20 < len(s.strip()) < 90]
    choices = [
        {'context': a, 'choices': [b, sentences[-1 - i], sentences[i + 20]], 'label': 0}
        for i, (a, b) in enumerate(itertools.pairwise(sentences[:13]))
    ]
    tasks: dict[str, tuple[list[dict[str, Any]], str]] = {
        'austen_next': (
            choices,
            'output_type: multiple_choice\ndoc_to_text: "{{context}}"\ndoc_to_choice: "{{choices}}"\n'
            'doc_to_target: label\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n',
        ),
        'austen_text': (
            [{'text': text[:700]} for text in corpus.split().validation[2:5]],
            'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
            'metric_list:\n  - metric: word_perplexity\n  - metric: byte_perplexity\n  - metric: bits_per_byte\n',
        ),
        'austen_write': (
            [{'question': s[:40], 'answer': s[40:60]} for s in sentences[:4]],
            'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
            'generation_kwargs:\n  until: ["."]\n  max_gen_toks: 8\n  do_sample: false\n'
            'metric_list:\n  - metric: exact_match\n',
        ),
    }
    for name, (rows, text) in tasks.items():
        data = folder / f'{name}.jsonl'
        data.write_text(''.join(json.dumps(row) + '\n' for row in rows))
        where = f'dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n'
        (folder / f'{name}.yaml').write_text(f'task: {name}\n{where}{text}')
    return folder


def test_the_harness_runs_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(tmp_path / 'datasets'))
    run = small_run(dtype='float32')
    run = run._replace(config=Config(data=DataConfig(seq_len=256, batch_size=2), model=run.model.config))
    names = ['austen_next', 'austen_text', 'austen_write']
    manager = TaskManager(include_path=str(write_tasks(tmp_path / 'tasks')), include_defaults=False)
    model = FbtLM(run, mode='fused')
    results = lm_eval.simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=0)['results']
    texts = [text[:700] for text in corpus.split().validation[2:5]]
    scores = model.loglikelihood_rolling(asked(*((t,) for t in texts)))
    bits = -sum(scores) / math.log(2) / sum(len(t.encode()) for t in texts)
    assert results['austen_text']['bits_per_byte,none'] == pytest.approx(bits, rel=1e-5)
    assert 0 <= results['austen_next']['acc,none'] <= 1
    assert 'exact_match,none' in results['austen_write']


TASKS = 'austen_next,austen_text,austen_write'


@pytest.fixture(scope='module')
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that `fbt train` has made, and tasks."""
    folder = tmp_path_factory.mktemp('trained')
    train(write_config(folder), folder / 'run', *TEXT)
    write_tasks(folder / 'tasks')
    return folder


def ask(
    folder: Path, out: Path | None, model_args: str, *, tasks: str = TASKS, command: str = '', **extra: str
) -> subprocess.Popen:
    """The module's command, or another one, on the run in `folder`; `extra`: of the environment."""
    environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'HF_HUB_OFFLINE': '1', 'HF_HOME': str(folder / 'home')}
    line = [command] if command else [sys.executable, '-m', 'fbt_jax.interop.lm_eval_model']
    line += ['--model', 'fbt', '--model_args', model_args, '--tasks', tasks, '--include_path', str(folder / 'tasks')]
    line += ['--output_path', str(out / 'results.json'), '--log_samples'] if out else []
    pipes: dict[str, Any] = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    return subprocess.Popen(line, cwd=ROOT, env=environment | {'PYTHONPATH': str(ROOT)} | extra, **pipes)


def results_in(folder: Path) -> dict[str, Any]:
    (path,) = folder.rglob('results*.json')
    return json.loads(path.read_text())


def responses_in(folder: Path) -> dict[tuple[str, int], Any]:
    """{(task, document): what the model answered}."""
    rows = [(p.name.split('_2')[0], json.loads(row)) for p in folder.rglob('*.jsonl') for row in p.open()]
    return {(name, row['doc_id']): row['resps'] for name, row in rows}


@pytest.mark.slow
def test_the_command_runs_offline(trained: Path, tmp_path: Path) -> None:
    """In each mode; mistakes are one line."""
    bits = set()
    for number, mode in enumerate(('standard', 'soft', 'fused,fused_passes=2')):
        done = finish(ask(trained, tmp_path / f'{number}', f'workdir={trained}/run,mode={mode},batch_size=4'))
        assert done.status == 0, done.text[-3000:]
        results = results_in(tmp_path / f'{number}')
        assert results['config']['model_step'] == 60
        bits.add(round(results['results']['austen_text']['bits_per_byte,none'], 4))
        assert results['results']['austen_next']['acc,none'] >= 0
    assert len(bits) == 3
    assert max(bits) < 8  # it has learned something
    wrong = finish(ask(trained, None, f'workdir={tmp_path}/nothing'))
    assert wrong.status == 2
    assert wrong.err.splitlines()[-1].startswith('fbt: ')


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['soft', 'fused'])
def test_two_processes_answer_as_one(mode: str, trained: Path, tmp_path: Path) -> None:
    arguments = f'workdir={trained}/run,mode={mode},batch_size=3'
    asked_of = [('one', {})] + [('two', extra) for extra in environments(2)]
    done = [finish(p) for p in [ask(trained, tmp_path / name, arguments, **extra) for name, extra in asked_of]]
    assert [d.status for d in done] == [0, 0, 0], done[1].text[-3000:]
    assert ['|austen_text' in d.out for d in done] == [True, True, False]  # process 0 writes alone
    one, two = (responses_in(tmp_path / name) for name in ('one', 'two'))
    assert len(one) == 12 + 3 + 4
    assert one.keys() == two.keys()
    said: dict[Any, float] = {'True': 1, 'False': 0}  # whether it is the likeliest; all are stored as texts
    for key, answers in one.items():
        if key[0].endswith('austen_write'):
            assert answers == two[key]
        else:
            found, expected = ([float(said.get(x, x)) for x in np.ravel(a)] for a in (two[key], answers))
            np.testing.assert_allclose(found, expected, rtol=1e-5)
    a, b = (results_in(tmp_path / name)['results'] for name in ('one', 'two'))
    assert a['austen_next'] == b['austen_next']
    assert a['austen_text']['bits_per_byte,none'] == pytest.approx(b['austen_text']['bits_per_byte,none'], rel=1e-5)


@pytest.mark.slow
def test_processes_that_are_asked_differently_say_so_and_leave(trained: Path) -> None:
    first, second = environments(2)
    both = [
        ask(trained, None, f'workdir={trained}/run', tasks='austen_next', **first),
        ask(trained, None, f'workdir={trained}/run', tasks='austen_text', **second),
    ]
    for number, done in enumerate([finish(process) for process in both]):
        assert done.status == 2, done.text[-3000:]
        assert f'fbt: [process {number}] process 1 was started with requests = ' in done.err


@pytest.mark.slow
def test_lm_eval_itself_finds_the_model_where_a_task_s_file_names_it(trained: Path, tmp_path: Path) -> None:
    """As README.md says; the tasks after it may be any."""
    names = 'metadata:\n  model: !function fbt_jax.interop.lm_eval_model.FbtLM\n'
    task = tmp_path / 'with_fbt.yaml'
    task.write_text(f'include: {trained}/tasks/austen_write.yaml\n{names}')
    command = str(Path(sys.executable).with_name('lm_eval'))
    arguments = f'workdir={trained}/run,mode=soft,batch_size=auto'
    done = finish(ask(trained, tmp_path / 'out', arguments, tasks=f'{task},austen_next', command=command))
    assert done.status == 0, done.text[-3000:]
    assert results_in(tmp_path / 'out')['results'].keys() == {'austen_write', 'austen_next'}
