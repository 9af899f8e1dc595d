"""The command: help without jax, one line and status 2 for a user's mistake, nothing created, nothing damaged."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers_e2e import PLAIN, finish, rows, snapshot, start, train, write_config

from fbt_jax.cli import VERBS, main
from fbt_jax.data import corpus
from fbt_jax.training.run_folder import locked

HEAVY = ('jax', 'jaxlib', 'flax', 'optax', 'orbax', 'grain', 'tensorboardX', 'tokenizers', 'matplotlib', 'plotly')


@pytest.fixture(scope='module')
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp('config'))


@pytest.fixture(scope='module')
def run(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run without feedback, the cheapest there is."""
    workdir = tmp_path_factory.mktemp('cli') / 'run'
    train(config, workdir, *PLAIN, '--config.training.steps=8')
    return workdir


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr with which `fbt` refuses, without the command's name in front."""
    capsys.readouterr()
    try:
        status = main(list(arguments))
    except SystemExit as leaving:
        status = leaving.code
    out, err = capsys.readouterr()
    assert status == 2, (status, out, err)
    assert out == ''
    assert re.fullmatch(r'fbt( \w+)?: [^\n]+\n', err), err
    return err.partition(': ')[2].rstrip('\n')


# Help and imports


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)


@pytest.mark.parametrize('arguments', [['--help'], *([verb, '--help'] for verb in VERBS)], ids=' '.join)
def test_help_is_complete_quick_and_light(arguments: list[str]) -> None:
    seconds = []
    for _ in range(3):  # the best of three: the machine may be busy
        begin = time.monotonic()
        result = subprocess.run([sys.executable, '-m', 'fbt_jax', *arguments], capture_output=True, text=True)
        seconds.append(time.monotonic() - begin)
        assert result.returncode == 0
        assert result.stderr == ''
        if seconds[-1] < 2:
            break
    assert min(seconds) < 2
    by_verb = dict.fromkeys(('train', 'evaluate', 'generate', 'diagnose', 'export', 'report'), '--workdir') | {
        'compare': 'DIR'
    }
    own = by_verb.get(arguments[0], '--config')
    words = VERBS if arguments == ['--help'] else (own, 'examples:')
    assert all(word in result.stdout for word in words)
    code = f"""
import sys
from fbt_jax.cli import main
try:
    main({arguments!r})
except SystemExit as leaving:
    assert leaving.code == 0
print('loaded:', [name for name in {HEAVY!r} if name in sys.modules])
"""
    assert python(code).stdout.endswith('loaded: []\n')


def test_importing_the_package_imports_nothing_else() -> None:
    code = """
import sys
before = set(sys.modules)
import fbt_jax
new = {name.split('.')[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names)), sorted(dir(fbt_jax)))
"""
    result = python(code)
    names = ['Batch', 'Generations', 'MultiPass', 'Noise', 'Run', 'generate', 'load_run', 'multi_pass']
    assert result.stdout == f'{["fbt_jax"]} {names}\n', result.stderr
    assert python('import fbt_jax; fbt_jax.nothing').stderr.endswith(
        "AttributeError: module 'fbt_jax' has no attribute 'nothing'\n"
    )


def test_the_installed_command_is_the_module() -> None:
    command = Path(sys.executable).with_name('fbt')
    assert command.exists(), 'pip install -e . makes it'
    by_name = subprocess.run([command, '--help'], capture_output=True, text=True)
    assert by_name.returncode == 0
    assert (
        by_name.stdout
        == subprocess.run([sys.executable, '-m', 'fbt_jax', '--help'], capture_output=True, text=True).stdout
    )


# Mistakes that cost nothing


@pytest.mark.parametrize(
    ('arguments', 'told'),
    [
        ([], r'the following arguments are required: VERB'),
        (
            ['trian'],
            r"invalid choice: 'trian' \(choose from '?train'?, '?generate'?, .*'?data'?, .*'?compare'?, '?report'?\)",
        ),
        (['--foo'], r'the following arguments are required: VERB'),
        (['train', '--workdir=x'], r'the following arguments are required: --config'),
        (['train', '--config=x'], r'the following arguments are required: --workdir'),
        (['evaluate'], r'the following arguments are required: --workdir'),
        (['train', '--config=none.py', '--workdir=x'], r'--config=none\.py: no such file'),
        (['train', '--conf=none.py', '--workdir=x'], r'the following arguments are required: --config'),
        (['evaluate', '--workdir=x', '--passes=0'], r'--passes=0: must be numbers of passes from 1 on'),
        (['evaluate', '--workdir=x', '--passes=1,a'], r'--passes=1,a: must be numbers of passes'),
        (['evaluate', '--workdir=x', '--passes='], r'--passes=: must be numbers of passes'),
        (['evaluate', '--workdir=x', '--rows=-1'], r'--rows=-1: must not be negative'),
        (['evaluate', '--workdir=x', '--rows=many'], r"argument --rows: invalid int value: 'many'"),
        (['evaluate', '--workdir=x', '--json=no/such/folder'], r'--json=no/such/folder: must be a file in a folder'),
        (['evaluate', '--workdir=x', '--json=/'], r'--json=/: must be a file in a folder'),
        (['evaluate', '--workdir=x', '--passs=2'], r'unknown argument --passs=2; see --help'),
        (['evaluate', '--workdir=x', '--config.seed=2'], r'unknown argument --config\.seed=2; see --help'),
        (['diagnose'], r'the following arguments are required: --workdir'),
        (['diagnose', '--workdir=x', '--passes=5'], r'--passes=5: must be at least 6'),
        (['diagnose', '--workdir=x', '--passes=9', '--probes'], r'--passes=9: has no effect on --probes'),
        (['diagnose', '--workdir=x', '--untrained'], r'--untrained: has no effect without --probes'),
        (['diagnose', '--workdir=x', '--plot=map.jpg'], r'--plot=map\.jpg: must end in \.png'),
        (['diagnose', '--workdir=no/such/run'], r'no/such/run: no run here \(no config\.json\)'),
        (['compare'], r'the following arguments are required: DIR'),
        (['compare', 'x', '--json=/'], r'--json=/: must be a file in a folder'),
        (['evaluate', '--workdir=no/such/run'], r'no/such/run: no run here \(no config\.json\)'),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    assert re.search(told, refused(capsys, *arguments))


@pytest.mark.parametrize(
    ('arguments', 'told'),
    [
        (['--config.model.widht=3'], r'unknown config key model\.widht; did you mean model\.width\?'),
        (['--config.training.steps'], r'--config\.training\.steps needs a value: --config\.training\.steps=VALUE'),
        (['--config.training.steps', '--config.seed=1'], r'--config\.training\.steps needs a value'),
        (['--config.passes.phases=((0,(0.5,0.4)),)'], r'probabilities sum to 0\.9, must sum to 1'),
        (['--config.model.num_heads=3'], r'model\.width = 16: must be divisible by model\.num_heads = 3'),
        (['--config.model.window=4', '--config.model.full_attention_every=2'], r'must divide model\.num_layers = 1'),
        (['--config.training.microbatches=3'], r'must divide data\.batch_size = 8: one of 1, 2, 4, 8'),
        (['--config.training.steps=many'], r"training\.steps = 'many': must be of type int"),
        (['--config.training.profile_steps=(60,61)'], r'both within 1\.\.60'),
        (['--config.model.fusion=none'], r'more than one pass needs a fusion'),
        (['--config.init.data=continue'], r'has no effect without init\.from'),
        (['--config.data.tokenizer=bytes'], r"data\.tokenizer = 'bytes': must be 'none' for rows that are not text"),
        (['--config.model.dtype=float16'], r'must be one of auto, bfloat16, float32, float64'),
        (['--config.model.vocab_size=5'], r'model\.vocab_size = 5: the data need at least 123'),
        (['--config.init.from=/no/such/run'], r'init\.from = /no/such/run: .*holds no checkpoints'),
        (['--config.training.steps=10000000000'], r'must fit in 32 bits'),
        (['--steps=3'], r'unknown argument --steps=3; see --help'),
        (['more'], r'unknown argument more; see --help'),
    ],
)
def test_a_wrong_config_creates_nothing(
    capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path, arguments: list[str], told: str
) -> None:
    workdir = tmp_path / 'deep/run'
    line = refused(capsys, 'train', f'--config={config}', f'--workdir={workdir}', *arguments)
    assert re.search(told, line), line
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_in_a_process_of_its_own(config: Path, tmp_path: Path) -> None:
    """The exit status as a shell sees it; and it is quick, because jax isn't loaded."""
    result = finish(start('train', f'--config={config}', f'--workdir={tmp_path}/run', '--config.seeed=1'))
    assert result == (2, '', 'fbt train: unknown config key seeed; did you mean seed?')
    code = f"""
import sys
from fbt_jax.cli import main
assert main(['train', '--config={config}', '--workdir={tmp_path}/run', '--config.seeed=1']) == 2
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert python(code).stdout == '[]\n'
    exits = write_config(tmp_path, 'import sys\nsys.exit(0)\n')
    assert finish(start('train', f'--config={exits}', f'--workdir={tmp_path}/run')).status == 2
    assert not (tmp_path / 'run').exists()


# Folders


def test_wrong_workdirs(capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path) -> None:
    file = tmp_path / 'file'
    file.write_text('mine')
    told = {
        str(file): f'--workdir={file}: File exists',
        f'{file}/run': f'--workdir={file}/run: Not a directory',
        '/proc/no/run': '--workdir=/proc/no/run: No such file or directory',
        '/proc': '--workdir=/proc: cannot write /proc/config.json: ',
        '': '--workdir=: No such file or directory',
    }
    for workdir, line in told.items():
        assert refused(capsys, 'train', f'--config={config}', f'--workdir={workdir}').startswith(line)
    assert file.read_text() == 'mine'
    assert [path.name for path in tmp_path.iterdir()] == ['file']


@pytest.mark.parametrize(
    ('record', 'told'),
    [
        ('{"con', r'is not valid JSON'),
        ('[]', r'is not the record of a run'),
        ('{"config": {}}', r'is not the record of a run'),
        ('{"config": {"sed": 1}, "data_fingerprint": "", "data": {}}', r'unknown config key sed|holds another run'),
        (None, r'holds checkpoints or metrics but no config\.json: use a new --workdir'),
    ],
)
def test_a_folder_that_is_no_run(
    capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path, record: str | None, told: str
) -> None:
    (tmp_path / 'metrics.jsonl').write_text('')
    if record is not None:
        (tmp_path / 'config.json').write_text(record)
        assert re.search(told.split('|')[0], refused(capsys, 'evaluate', f'--workdir={tmp_path}'))
    before = snapshot(tmp_path)
    assert re.search(told, refused(capsys, 'train', f'--config={config}', f'--workdir={tmp_path}'))
    assert snapshot(tmp_path) == before


def test_a_folder_that_holds_another_run(capsys: pytest.CaptureFixture[str], config: Path, run: Path) -> None:
    """Model, data, seed and source can't change; each changed key is named, with both values."""
    before = snapshot(run)
    same = ['train', f'--config={config}', f'--workdir={run}', *PLAIN, '--config.training.steps=8']
    line = refused(capsys, *same, '--config.seed=4', '--config.model.mlp_width=48', '--config.training.log_every=2')
    assert line == (
        f'{run} holds another run: model.mlp_width was 32, now 48; seed was 3, now 4. '
        'Use a new --workdir, or the old values'
    )
    assert 'init.from' in refused(capsys, *same, f'--config.init.from={run}')
    assert snapshot(run) == before


def test_one_process_at_a_time(capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path) -> None:
    with locked(str(tmp_path)):
        line = refused(capsys, 'train', f'--config={config}', f'--workdir={tmp_path}')
    assert line == f'--workdir={tmp_path}: another process is training there'
    assert list(tmp_path.iterdir()) == []


# What a run's folder records


def test_config_json_records_the_resolved_config(run: Path) -> None:
    record = json.loads((run / 'config.json').read_text())
    assert record['config']['model']['vocab_size'] == 123  # None in the file; S5's 120 products and 3 generators
    assert record['config']['training']['steps'] == 8
    assert record['config']['passes']['phases'] == [[0, [1.0]]]
    assert {'jax', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'fbt-jax'} <= record['versions'].keys()
    assert (record['device_kind'], record['device_count']) == ('cpu', 1)
    head = subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=Path(__file__).parent, capture_output=True, text=True)
    if head.returncode == 0:
        assert record['git_commit'].removesuffix('-dirty') == head.stdout.strip()


# evaluate


def evaluate(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> str:
    capsys.readouterr()
    assert main(['evaluate', f'--workdir={run}', *arguments]) == 0
    return capsys.readouterr().out


def test_evaluate_says_what_training_said(capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path) -> None:
    before = snapshot(run)
    table = evaluate(capsys, run, f'--json={tmp_path}/figures.json')
    figures = json.loads((tmp_path / 'figures.json').read_text())
    row = rows(run)[-1]
    assert figures['loss_pass_1'] == pytest.approx(row['loss_pass_1'], abs=2e-6)
    assert f'\n1           {row["loss_pass_1"]:.4f}' in table
    assert table.startswith(f'{run}, step 8: 1024 validation rows, 12,288 tokens\n')  # 1024 rows of 12 positions
    assert (figures['step'], figures['tokens'], figures['passes']) == (8, 12_288, 1)
    assert len(figures['accuracy_by_position']['1']) == 12
    assert snapshot(run) == before


def test_evaluate_against_a_run_on_the_same_documents(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path
) -> None:
    """Against itself: exactly nothing. Against a copy at another step: the difference of what each says of itself."""
    other = shutil.copytree(run, tmp_path / 'other')
    shutil.rmtree(other / 'checkpoints/8')
    path = f'--json={tmp_path}/figures.json'
    evaluate(capsys, other, path)
    alone = json.loads((tmp_path / 'figures.json').read_text())
    table = evaluate(capsys, run, f'--against={other}', path)
    figures = json.loads((tmp_path / 'figures.json').read_text())
    assert f'less {other}, step 7, on the same documents\n' in table
    assert (figures['against']['step'], figures['against']['unit']) == (7, 'nats per token')
    entry = figures['against']['passes']['1']
    assert entry['other_passes'] == 1
    assert entry['difference'] == pytest.approx(figures['loss_pass_1'] - alone['loss_pass_1'], abs=1e-6)
    low, high = entry['interval']
    assert low < entry['difference'] < high < low + 0.1
    assert figures['intervals']['documents'] == 1024
    assert figures['intervals']['loss']['1'][0] < figures['loss_pass_1'] < figures['intervals']['loss']['1'][1]
    evaluate(capsys, run, f'--against={run}', '--rows=9', path)
    entry = json.loads((tmp_path / 'figures.json').read_text())['against']['passes']['1']
    assert (entry['difference'], entry['interval']) == (0, [0, 0])


def test_evaluate_refuses_the_recurrence_without_feedback(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    line = refused(capsys, 'evaluate', f'--workdir={run}', '--rows=8', '--soft')
    assert line == f'--soft: {run} was trained without feedback'


def test_evaluate_refuses_other_documents(capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path) -> None:
    other = shutil.copytree(run, tmp_path / 'other')
    record = json.loads((other / 'config.json').read_text())
    record['config']['seed'] = 4
    (other / 'config.json').write_text(json.dumps(record))
    line = refused(capsys, 'evaluate', f'--workdir={run}', '--rows=8', f'--against={other}')
    assert line == f'{other} cannot be compared with {run}: its rows are drawn with another seed'
    line = refused(capsys, 'evaluate', f'--workdir={run}', '--rows=8', f'--against={tmp_path}/none')
    assert line.endswith('none: no run here (no config.json)')


def test_evaluate_fails_on_a_model_that_sees_ahead(
    capsys: pytest.CaptureFixture[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leak planted in the model itself: what the embedding gives is that of the next token too."""
    from fbt_jax.model import transformer

    def leaky(embedding: Any, tokens: Any, *, dtype: Any, look_up: Any = transformer.look_up) -> Any:
        own = look_up(embedding, tokens, dtype=dtype)
        return own + 0.01 * np.eye(tokens.shape[1], k=1, dtype=np.float32) @ own

    monkeypatch.setattr(transformer, 'look_up', leaky)
    jax.clear_caches()  # the honest model's programs
    capsys.readouterr()
    assert main(['evaluate', f'--workdir={run}']) == 1
    jax.clear_caches()
    out, err = capsys.readouterr()
    assert out == ''
    assert re.fullmatch(r'fbt evaluate: the model sees tokens that it must predict: in pass 1 of 1, [^\n]+\n', err)


def test_evaluate_takes_a_part_of_the_rows_and_another_step(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path
) -> None:
    table = evaluate(capsys, run, '--rows=10', '--step=7', f'--json={tmp_path}/figures.json')
    assert table.startswith(f'{run}, step 7: 10 validation rows, 120 tokens\n')
    figures = json.loads((tmp_path / 'figures.json').read_text())
    assert figures['step'] == 7
    assert figures['loss_pass_1'] != pytest.approx(rows(run)[-1]['loss_pass_1'], abs=1e-4)


def test_evaluate_refuses_what_the_run_does_not_have(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path
) -> None:
    before = snapshot(run)
    line = refused(capsys, 'evaluate', f'--workdir={run}', '--step=3')
    assert line == f'step = 3: {run} has checkpoints of steps 7, 8'
    line = refused(capsys, 'evaluate', f'--workdir={run}', '--passes=1,2')
    assert line == f'--passes=1,2: {run} was trained without feedback; only 1 is possible'
    shutil.copy(run / 'config.json', tmp_path)
    assert refused(capsys, 'evaluate', f'--workdir={tmp_path}').endswith('holds no checkpoints')

    other = shutil.copytree(run, tmp_path / 'other')
    with (other / 'metrics.jsonl').open('a') as file:
        file.write('no row\n')
    line = refused(capsys, 'evaluate', f'--workdir={other}', f'--plot={tmp_path}/a.png')
    assert line.startswith('--plot needs the metrics of the run: ') and 'is not a row of metrics' in line
    record = json.loads((other / 'config.json').read_text())
    record['data']['validation']['fingerprint'] = 'another'
    (other / 'config.json').write_text(json.dumps(record))
    assert 'holds a run of other data (validation)' in refused(capsys, 'evaluate', f'--workdir={other}')
    assert snapshot(run) == before


def test_evaluate_fails_on_a_damaged_checkpoint(capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(run, tmp_path / 'run')
    (damaged / 'checkpoints/8/meta/metadata').write_text('{')
    assert main(['evaluate', f'--workdir={damaged}']) == 1
    out, err = capsys.readouterr()
    assert out == ''
    assert re.fullmatch(r'fbt evaluate: checkpoint 8 in \S+ cannot be read \(.*\); other steps: 7\n', err)
    assert main(['evaluate', f'--workdir={damaged}', '--step=7', '--rows=8']) == 0


@pytest.mark.slow
def test_evaluate_counts_the_texts_bytes(capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path) -> None:
    """bits per byte by hand, from the loss per token and the length of the validation chapters."""
    run = tmp_path / 'text'
    text = ('--config.data.source=austen', '--config.data.tokenizer=bpe', '--config.data.seq_len=1024')
    train(config, run, *PLAIN, *text, '--config.training.steps=2', '--config.data.batch_size=4')
    evaluate(capsys, run, f'--json={tmp_path}/figures.json')
    figures = json.loads((tmp_path / 'figures.json').read_text())
    num_bytes = sum(len(document.encode()) for document in corpus.split().validation)
    bits = figures['loss_pass_1'] * figures['tokens'] / 0.6931471805599453 / num_bytes
    assert figures['bits_per_byte_pass_1'] == pytest.approx(bits, rel=1e-6)


@pytest.mark.slow
def test_float64_runs_are_evaluated_in_float64(config: Path, tmp_path: Path) -> None:
    """In a process of its own, because the switch is for good."""
    run = tmp_path / 'run'
    train(config, run, *PLAIN, '--config.training.steps=2', '--config.model.dtype=float64')
    result = finish(start('evaluate', f'--workdir={run}', f'--json={tmp_path}/figures.json'))
    assert result.status == 0
    assert 'truncated' not in result.err
    code = f"import fbt_jax; print(fbt_jax.load_run({str(run)!r}).params['embedding'].dtype)"
    assert python(code).stdout == 'float64\n'


# diagnose


def test_diagnose_refuses_a_run_without_feedback(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    line = refused(capsys, 'diagnose', f'--workdir={run}')
    assert line == f'{run}: was trained without feedback (one pass only), so there is no map to iterate'


@pytest.mark.slow
def test_diagnose_a_run(capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path) -> None:
    """64 rows of 12: six passes leave the last six positions of each to judge, twelve none."""
    run = tmp_path / 'run'
    train(config, run, '--config.training.steps=8')
    before = snapshot(run)
    files = [f'--json={tmp_path}/map.json', f'--plot={tmp_path}/map.png']
    assert main(['diagnose', f'--workdir={run}', '--passes=6', *files]) == 0
    out = capsys.readouterr().out
    figures = json.loads((tmp_path / 'map.json').read_text())
    assert out.startswith(f'{run}, step 8: 384 positions of 64 rows, each more than 6 tokens into its document\n')
    assert out.endswith(f'verdict: {figures["verdict"]}\n')
    assert figures['verdict'] in ('contracting', 'diverging', 'undecided')
    assert (len(figures['loss']), figures['update_norm'][0], len(figures['evidence'])) == (6, None, 4)
    assert figures['rate']['low'] <= figures['rate']['value'] <= figures['rate']['high']
    assert len(figures['singular_values']) == 32 and min(figures['singular_values']) > 0
    assert len(set(figures['singular_value_positions'])) > 5
    assert figures['rollout_tokens'] == len(figures['rollout_state_norm']) == 4  # 12 less a prompt of 8
    assert (tmp_path / 'map.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'
    line = refused(capsys, 'diagnose', f'--workdir={run}', '--passes=12')
    assert line.startswith('--passes=12: only 0 positions in 0 rows lie further than that into their document')
    assert snapshot(run) == before
