"""Runs on a mixture of raw text, as a user starts them: the standard library's own code and the embedded novels."""

import json
import random
import shutil
import signal
import sysconfig
import time
from pathlib import Path

import pytest
from helpers_e2e import ROOT, checkpoint_bits, finish, rows, start, start_training, train, without_times, write_config

from fbt_jax import load_run
from fbt_jax.data import corpus
from fbt_jax.data.tokenizer import train_bpe

# configs/small.py, made small.
MIXTURE = """
import runpy


def get_config():
    config = runpy.run_path('ROOT/configs/small.py')['get_config']()
    config.seed = 3
    config.data.source = {'code': 'text:FOLDER/code/*.py#except_every=10', 'web': 'jsonl:FOLDER/web.jsonl'}
    config.data.weights = ((0, {'code': 0.25, 'web': 0.75}), (20, {'code': 1, 'web': 0}))
    config.data.validation = {'code': 'text:FOLDER/code/*.py#every=10', 'web': 'jsonl:FOLDER/held_out.jsonl'}
    config.data.tokenizer = 'FOLDER/tokenizer.json'
    config.data.seq_len = 64
    config.data.batch_size = 8
    config.model.vocab_size = 512
    config.model.width = 48
    config.model.mlp_width = 64
    config.model.num_layers = 2
    config.model.full_attention_every = 2
    config.model.window = 16
    config.passes.phases = ((0, (0.6, 0.4)),)
    config.training.steps = 40
    config.training.microbatches = 2
    config.training.log_every = 1
    config.training.eval_every = 20
    config.training.eval_rows = 20
    config.training.checkpoint_every = 9
    return config
"""


def materials(folder: Path) -> Path:
    """A config and its sources: modules of the standard library up to 20 kB, chapters of the novels."""
    (folder / 'code').mkdir()
    modules = [p for p in sorted(Path(sysconfig.get_path('stdlib')).glob('*.py')) if 0 < p.stat().st_size < 20_000]
    for path in modules[:60]:
        shutil.copy(path, folder / 'code' / path.name)
    train_split, validation = corpus.split()
    for name, texts in (('web', train_split[:20]), ('held_out', validation[:2])):
        (folder / f'{name}.jsonl').write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))
    (folder / 'tokenizer.json').write_text(train_bpe(validation, 512))
    return write_config(folder, MIXTURE.replace('FOLDER', str(folder)).replace('ROOT', str(ROOT)))


@pytest.fixture(scope='module')
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """(config, folder, what was printed) of an unbroken run."""
    folder = tmp_path_factory.mktemp('mixture')
    config = materials(folder)
    result = train(config, folder / 'run')
    return config, folder, result.out


def test_a_mixture_of_raw_text_trains_and_tells_what_it_read(run: tuple[Path, Path, str]) -> None:
    _, folder, out = run
    found = rows(folder / 'run')
    trained = {row['step']: row for row in found if row['split'] == 'train'}
    assert trained[20]['share_code'] == 0.25
    assert trained[40]['share_code'] == 0.625  # 40 rows of 160 before step 20, 160 of 160 after it
    tokens = json.loads((folder / 'run' / 'config.json').read_text())['data']['train-code']['tokens']
    assert trained[40]['epochs_code'] == pytest.approx(200 * 64 / tokens, rel=1e-6)
    assert 'read: epochs_code' in out
    splits = {row['split'] for row in found if row['step'] == 40}
    assert splits == {'train', 'validation', 'validation/code', 'validation/web'}
    # The whole is all tokens together: between its parts.
    losses = {row['split']: row['loss_pass_1'] for row in found if row['step'] == 40}
    assert min(losses['validation/code'], losses['validation/web']) < losses['validation']
    assert losses['validation'] < max(losses['validation/code'], losses['validation/web'])


def test_the_files_are_listed_with_the_run(run: tuple[Path, Path, str]) -> None:
    _, folder, _ = run
    record = json.loads((folder / 'run' / 'config.json').read_text())['data']
    listed = [tuple(file) for file in record['train-code']['source']['files']]
    assert listed == sorted((p.name, p.stat().st_size) for p in (folder / 'code').iterdir())
    assert record['validation-code']['documents'] == len(listed) // 10
    assert record['train-code']['documents'] == len(listed) - len(listed) // 10
    assert (record['train-web']['documents'], record['validation-web']['documents']) == (20, 2)


def test_a_run_goes_on_without_its_sources_but_not_with_others(run: tuple[Path, Path, str], tmp_path: Path) -> None:
    config, folder, _ = run
    workdir = tmp_path / 'run'
    shutil.copytree(folder / 'run', workdir)
    hidden = folder / 'hidden'
    more = '--config.training.steps=40'
    code = folder / 'code'
    first = sorted(code.iterdir())[0]
    content = first.read_bytes()
    try:
        first.write_bytes(content + b'#')
        told = train(config, workdir, more, status=2).err
        assert f'was made from other files: {first.name} came, went or changed size' in told
        first.write_bytes(content)
        code.rename(hidden)
        (folder / 'tokenizer.json').rename(folder / 'gone.json')
        assert 'has done its 40 steps already' in train(config, workdir, more).out
        assert load_run(str(workdir)).tokenizer is not None
        assert finish(start('evaluate', f'--workdir={workdir}', '--passes=1', '--rows=3')).status == 0
        elsewhere = write_config(tmp_path, config.read_text().replace('/code/*.py', '/hidden/*.py'))
        assert 'has done its 40 steps already' in train(elsewhere, workdir, more).out  # the same files in a new place
    finally:
        if hidden.exists():
            hidden.rename(code)
            (folder / 'gone.json').rename(folder / 'tokenizer.json')
        first.write_bytes(content)


@pytest.mark.slow
def test_ten_sigkills_change_nothing(run: tuple[Path, Path, str], tmp_path: Path) -> None:
    """From the first moment on: while text is tokenised, while the step compiles, in saves, in evaluations."""
    config, folder, _ = run
    workdir = tmp_path / 'run'
    rng = random.Random(0)
    kills = 0
    while kills < 10:
        process = start_training(config, workdir)
        time.sleep(rng.uniform(1, 11))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        else:
            assert finish(process).status == 0
            shutil.rmtree(workdir)  # done too early: the next kills go into a run from the start
            continue
        finish(process)
    train(config, workdir)
    assert without_times(rows(workdir)) == without_times(rows(folder / 'run'))
    assert checkpoint_bits(workdir) == checkpoint_bits(folder / 'run')
