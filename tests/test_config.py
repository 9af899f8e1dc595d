"""Configs: strict keys and types, checks, round trips, the files under configs/, parameter counts of the 1B model."""

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from fbt_jax import config as config_module
from fbt_jax.config import (
    Config,
    DataConfig,
    ModelConfig,
    PassesConfig,
    TrainingConfig,
    UserError,
    changed_keys,
    default_config,
    from_config_dict,
    from_dict,
    key_types,
    to_dict,
)
from fbt_jax.config_file import load_config_file, parse_value
from fbt_jax.model.transformer import Transformer, init_params

CONFIGS = Path(__file__).parents[1] / 'configs'
FILES = sorted(CONFIGS.glob('*.py'))


def write(folder: Path, body: str) -> str:
    path = folder / 'config.py'
    path.write_text('from fbt_jax.config import default_config\n\n\n' + body)
    return str(path)


DEFAULT = 'def get_config():\n    return default_config()\n'


# Config files


def test_the_promised_files_are_there() -> None:
    promised = {'tiny', 'word_problem', 'fbt_1b', 'baseline_1b', 'stability_two_pass', 'stability_three_pass'}
    assert promised <= {path.stem for path in FILES}


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_each_file_is_locked_valid_and_round_trips(path: Path) -> None:
    namespace = runpy.run_path(str(path))
    config_dict = namespace['get_config']()
    assert config_dict.is_locked
    with pytest.raises(AttributeError):
        config_dict.model.no_such_key = 1
    config = load_config_file(str(path), {})
    assert config == from_config_dict(config_dict)
    assert from_dict(to_dict(config)) == config
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config  # as config.json holds it
    assert namespace['__doc__'], 'a config opens with command, hardware, hours, expected result'
    assert f'configs/{path.name}' in namespace['__doc__']


def test_the_1b_model_has_1_06_billion_parameters() -> None:
    """Counted by hand from method.md section 6, against the shapes that the initialiser gives."""
    width, layers, mlp, vocabulary, heads, kv_heads, head = 1536, 24, 6656, 100_352, 16, 8, 96
    attention = width * heads * head * 2 + width * kv_heads * head * 2 + width * heads  # q and o, k and v, the gate
    norms = 4 * width + 2 * head  # around both branches, on queries and keys
    baseline = layers * (attention + 3 * width * mlp + norms) + vocabulary * width + 2 * width
    fusion = 2 * width * width

    def count(name: str) -> int:
        config = load_config_file(str(CONFIGS / name), {})
        shapes = jax.eval_shape(lambda: init_params(Transformer(config.model), jax.random.key(0)))
        assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype('float32')}
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    assert count('baseline_1b.py') == baseline
    assert count('fbt_1b.py') == baseline + fusion
    assert fusion == 4_718_592
    assert 1.05e9 < baseline < 1.07e9


def test_the_baseline_differs_in_feedback_alone() -> None:
    ours, baseline = (load_config_file(str(CONFIGS / f'{name}_1b.py'), {}) for name in ('fbt', 'baseline'))
    assert changed_keys(to_dict(ours), to_dict(baseline)).keys() == {'model.fusion', 'passes.phases'}
    assert baseline.passes.phases == ((0, (1.0,)),)
    assert ours.model.layer_windows == tuple(0 if i % 6 == 5 else 2048 for i in range(24))


def test_the_stability_pair_differs_in_the_mixture_alone() -> None:
    two, three = (load_config_file(str(CONFIGS / f'stability_{n}_pass.py'), {}) for n in ('two', 'three'))
    assert changed_keys(to_dict(two), to_dict(three)) == {
        'passes.phases': ([[0, [0.75, 0.25]]], [[0, [0.75, 0.22, 0.03]]])
    }


# Overrides


def test_overrides_reach_their_keys(tmp_path: Path) -> None:
    overrides = {
        'seed': '7',
        'model.vocab_size': '300',  # None by default
        'model.fusion': 'add',
        'optimizer.clip_norm': '2',  # an int for a float
        'passes.prefix_mixin': 'false',
        'passes.phases': '((0, (0.5, 0.5)),)',  # a name by default
        'training.profile_steps': '(3, 4)',
        'init.from': '2024',  # a name that looks like a number
    }
    config = load_config_file(write(tmp_path, DEFAULT), overrides)
    expected = dataclasses.replace(
        Config(),
        seed=7,
        model=dataclasses.replace(Config().model, vocab_size=300, fusion='add'),
        optimizer=dataclasses.replace(Config().optimizer, clip_norm=2.0),
        passes=PassesConfig(phases=((0, (0.5, 0.5)),), prefix_mixin=False),
        training=dataclasses.replace(Config().training, profile_steps=(3, 4)),
        init=dataclasses.replace(Config().init, from_='2024'),
    )
    assert config == expected
    assert isinstance(config.optimizer.clip_norm, float)


def test_every_key_can_be_overridden(tmp_path: Path) -> None:
    path = write(tmp_path, DEFAULT)
    flat = config_module._flat(to_dict(Config()))
    assert set(key_types()) == set(flat)
    values = {'model.vocab_size': 512, 'init.from': 'x'} | {k: v for k, v in flat.items() if v not in (None, '')}
    assert load_config_file(path, {key: str(value) for key, value in values.items()}) == dataclasses.replace(
        Config(),
        model=dataclasses.replace(Config().model, vocab_size=512),
        init=dataclasses.replace(Config().init, from_='x'),
    )


@pytest.mark.parametrize(
    ('text', 'value'),
    [
        ('3', 3),
        ('1e-3', 1e-3),
        ('true', True),
        ('False', False),
        ('None', None),
        ('a,b', 'a,b'),
        ('(1, 2)', (1, 2)),
        ('', ''),
        ('{[]: 1}', '{[]: 1}'),  # TypeError in literal_eval
        ('1+' * 20_000 + '1', '1+' * 20_000 + '1'),  # RecursionError
        ('(' * 5000, '(' * 5000),  # MemoryError or SyntaxError
        ('\0', '\0'),
    ],
)
def test_parse_value(text: str, value: Any) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


# What is refused, and how it is told


@pytest.mark.parametrize(
    ('overrides', 'told'),
    [
        ({'model.widht': '3'}, r'unknown config key model\.widht; did you mean model\.width\?'),
        ({'modle.width': '3'}, r'unknown config key modle\.width; did you mean model\.width\?'),
        ({'trainning.step': '3'}, r'did you mean training\.steps\?'),
        ({'width': '3'}, r'unknown config key width; did you mean model\.width\?'),
        ({'training.steps': 'many'}, r"training\.steps = 'many': must be of type int, not str"),
        ({'training.steps': '60.0'}, r'training\.steps = 60\.0: must be of type int, not float'),
        ({'training.steps': 'True'}, r'training\.steps = True: must be of type int, not bool'),
        ({'training.steps': 'None'}, r'must be of type int, not NoneType'),
        ({'training.steps': '10000000000'}, r'training\.steps = 10000000000: must fit in 32 bits'),
        ({'passes.prefix_mixin': '1'}, r'passes\.prefix_mixin = 1: must be of type bool, not int'),
        ({'optimizer.clip_norm': '1e999'}, r'optimizer\.clip_norm = inf: must be a finite number'),
        ({'optimizer.clip_norm': 'nan'}, r"optimizer\.clip_norm = 'nan': must be of type float"),
        ({'optimizer.clip_norm': '0'}, r'optimizer\.clip_norm = 0\.0: must be positive'),
        ({'optimizer.adam_b1': '1.0'}, r'optimizer\.adam_b1 = 1\.0: must lie in \[0, 1\)'),
        ({'training.profile_steps': '3'}, r'must be of type tuple, not int'),
        ({'training.profile_steps': '(5, 333001)'}, r'\(5, 333001\): must be \(first, last\), both within 1\.\.333000'),
        ({'training.profile_steps': '(5, 3)'}, r'must be \(first, last\)'),
        ({'training.microbatches': '5'}, r'must divide data\.batch_size = 36: one of 1, 2, 3, 4, 6, 9, 12, 18, 36'),
        ({'data.source': 'austin'}, r"data\.source = 'austin': did you mean austen\? must be austen, word_problem or"),
        ({'data.tokenizer': 'none'}, r"data\.tokenizer = 'none': must be 'none' for rows that are not text, and only"),
        (
            {'data.source': 'word_problem:Q8'},
            r"data\.source = 'word_problem:Q8': must be word_problem:GROUP, of Z2, S3,",
        ),
        ({'data.source': 'word_problem'}, r"data\.tokenizer = 'bpe': .* \(data\.source = 'word_problem'\)"),
        ({'model.dtype': 'float16'}, r'must be one of auto, bfloat16, float32, float64'),
        ({'model.fusion': 'none'}, r"more than one pass needs a fusion, but model\.fusion = 'none'"),
        ({'passes.phases': 'constant_75_22'}, r"did you mean 'constant_75_22_3'\?"),
        ({'init.schedule': 'continue'}, r"init\.schedule = 'continue': has no effect without init\.from"),
        ({'init.optimizer': 'False'}, r'init\.optimizer = False: has no effect without init\.from'),
        ({'seed': '-1'}, r'seed = -1: must lie in 0\.\.2\*\*31 - 1'),
    ],
)
def test_a_wrong_override_is_told(tmp_path: Path, overrides: dict[str, str], told: str) -> None:
    with pytest.raises(UserError, match=told) as error:
        load_config_file(write(tmp_path, DEFAULT), overrides)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('body', 'told'),
    [
        ('def get_config(:\n', r'SyntaxError: invalid syntax'),
        ('x = 1\n', r'defines no get_config\(\)'),
        ('def get_config():\n    return {}["x"]\n', r"KeyError: 'x'"),  # not "defines no get_config"
        ('def get_config():\n    raise RuntimeError("one\\ntwo")\n', r'RuntimeError: one two$'),
        ('import sys\nsys.exit(0)\n', r'SystemExit: 0'),  # which would else be a success
        ('def get_config():\n    pass\n', r'get_config\(\) returns a NoneType, must be a ConfigDict'),
        ('def get_config():\n    return {"seed": 3}\n', r'returns a dict, must be a ConfigDict'),
        ('get_config = 3\n', r'TypeError'),
        ('import no_such_module\n', r"ModuleNotFoundError: No module named 'no_such_module'"),
        ('def get_config():\n    c = default_config()\n    c.model.widht = 3\n    return c\n', r'mean model\.width\?$'),
        ('def get_config():\n    c = default_config()\n    c.model.width = "a"\n    return c\n', r"field 'width'"),
        (
            'def get_config():\n    c = default_config().unlock()\n    c.seeed = 3\n    return c\n',
            r'did you mean seed\?',
        ),
        (
            'import ml_collections\n\ndef get_config():\n    return ml_collections.ConfigDict({"model": 3})\n',
            r'model = 3: must be a section with keys',
        ),
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, body: str, told: str) -> None:
    for overrides in ({}, {'model.width': '64'}):
        with pytest.raises(UserError, match=told) as error:
            load_config_file(write(tmp_path, body), overrides)
        assert '\n' not in str(error.value)
        assert len(str(error.value)) < 300


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / 'none.py', tmp_path):
        with pytest.raises(UserError, match=f'--config={path}: no such file'):
            load_config_file(str(path), {})


def test_heads_and_windows_must_divide() -> None:
    with pytest.raises(UserError, match=r'model\.width = 16: must be divisible by model\.num_heads = 3; .* is 15'):
        ModelConfig(width=16, num_heads=3)
    with pytest.raises(UserError, match=r'gives heads of width 3, but RoPE needs an even one'):
        ModelConfig(width=6, num_heads=2)
    with pytest.raises(UserError, match=r'must divide model\.num_heads = 6: one of 1, 2, 3, 6'):
        ModelConfig(width=12, num_heads=6, num_kv_heads=4)
    with pytest.raises(UserError, match=r'model\.full_attention_every = 3: must divide model\.num_layers = 4'):
        ModelConfig(num_layers=4, full_attention_every=3)
    assert ModelConfig(num_layers=4, full_attention_every=3, window=0).layer_windows == (0,) * 4
    assert ModelConfig(num_layers=4, full_attention_every=2, window=9).layer_windows == (9, 0, 9, 0)
    assert ModelConfig(num_layers=3, full_attention_every=0, window=9).layer_windows == (9, 9, 9)
    with pytest.raises(UserError, match=r'model\.full_attention_every = -1: must not be negative'):
        ModelConfig(num_layers=4, full_attention_every=-1)
    assert [ModelConfig(vocab_size=v).padded_vocab_size for v in (2, 128, 129)] == [128, 128, 256]


@pytest.mark.parametrize(
    ('phases', 'told'),
    [
        (((0, (0.5, 0.4)),), r'probabilities sum to 0\.9, must sum to 1'),
        (((0, (1.5, -0.5)),), r'probabilities must lie in 0\.\.1'),
        (((0, (float('nan'), 1.0)),), r'probabilities must lie in 0\.\.1'),
        (((0, ()),), r'must be \(\(start, '),
        ((), r'must be \(\(start, '),
        (((0, 1.0),), r'must be \(\(start, '),
        (((5, (1.0,)),), r'the first phase must start at 0'),
        (((0, (1.0,)), (1.0, (0.0, 1.0))), r'a fraction below 1'),
        (((0, (1.0,)), (-3, (0.0, 1.0))), r'must be \(\(start, '),
        (((0, (1.0,)), (True, (0.0, 1.0))), r'must be \(\(start, '),
        ('progresive_75_22_3', r"did you mean 'progressive_75_22_3'\?"),
    ],
)
def test_wrong_phases_are_told(phases: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        PassesConfig(phases=phases)


def test_phases_in_steps() -> None:
    passes = PassesConfig(phases=((0, (1.0,)), (0.5, (0.5, 0.0, 0.5)), (90, (0.0, 0.0, 1.0))))
    assert passes.pass_counts == (1, 3)
    assert passes.max_passes == 3
    assert passes.phase_steps(100) == ((0, (1.0, 0.0)), (50, (0.5, 0.5)), (90, (0.0, 1.0)))
    with pytest.raises(UserError, match=r'for training\.steps = 1000 they are \[0, 500, 90\]'):
        Config(passes=passes, training=TrainingConfig(steps=1000))


@pytest.mark.parametrize(
    ('preset', 'token_passes'), [('75_22_3', 1.28), ('75_0_25', 1.5), ('75_25_0', 1.25)], ids=lambda x: str(x)
)
@pytest.mark.parametrize('form', ['progressive', 'late', 'constant'])
def test_presets_cost_what_the_method_says(form: str, preset: str, token_passes: float) -> None:
    """method.md section 3: expected token-passes, summed here step by step."""
    phases = PassesConfig(phases=f'{form}_{preset}').phases
    total = 0.0
    for step in range(1000):
        p = [p for start, p in phases if step >= (round(start * 1000) if isinstance(start, float) else start)][-1]
        total += sum(k * p_k for k, p_k in enumerate(p, start=1))
    assert total / 1000 == pytest.approx(token_passes, abs=1e-9)


def test_defaults_are_frozen_and_locked() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 1  # type: ignore[misc]
    with pytest.raises(AttributeError, match='locked'):
        default_config().sed = 1
    assert from_config_dict(default_config()) == Config()


def test_changed_keys_compares_what_json_gives_back() -> None:
    old = json.loads(json.dumps(to_dict(Config())))
    assert changed_keys(old, to_dict(Config())) == {}
    new = Config(seed=1, data=DataConfig(seq_len=64))
    assert changed_keys(old, to_dict(new)) == {'data.seq_len': (8192, 64), 'seed': (0, 1)}
    del old['init']['data']
    assert changed_keys(old, to_dict(Config())) == {'init.data': (None, 'restart')}
