"""The command: help without jax, one line and status 2 for a user's mistake, nothing created, nothing damaged."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers_e2e import PLAIN, finish, python, refused, snapshot, start, train, write_config

from fbt_jax.cli import VERBS
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


# Help and imports


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


def test_the_harness_s_command_without_the_harness() -> None:
    """As where the extra is not installed."""
    code = "import runpy, sys; sys.modules['lm_eval'] = None; runpy.run_module({!r}, run_name={!r})"
    module = 'fbt_jax.interop.lm_eval_model'
    result = python(code.format(module, '__main__'))
    assert result.returncode == 2
    assert re.fullmatch(r"fbt: [^\n]+ is an extra: pip install 'fbt-jax\[lm-eval\]'\n", result.stderr)
    assert 'ImportError: ' in python(code.format(module, module)).stderr


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
        (['evaluate', '--workdir=x', '--json=/proc/a.json'], r'--json=/proc/a\.json: cannot be written'),
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
