"""Configuration: typed, frozen, validated. Imports no jax, so that `fbt --help` and bad input stay fast.

A config file under `configs/` returns a locked `ml_collections.ConfigDict` (start from `default_config()`), see
config_file.py; `from_dict` turns what it says into the dataclasses below, strictly: every key must exist, have the
right type and pass its check, or one UserError names the key, its value and what is allowed. Defaults are the paper's
1B recipe (method.md section 6); lengths are in tokens, rates per optimizer step.
"""

import dataclasses
import difflib
import math
import types
import typing
from typing import Any

from ml_collections import config_dict

from fbt_jax.config_data import DataConfig
from fbt_jax.config_model import ModelConfig
from fbt_jax.config_passes import PassesConfig
from fbt_jax.errors import UserError, require


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """NorMuon for matrices, Adam for the rest, WSD schedule (method.md sections 6 and 9)."""

    matrix_learning_rate: float = 1e-2
    matrix_weight_decay: float = 0.01
    normuon_b1: float = 0.95
    normuon_b2: float = 0.95
    adam_learning_rate: float = 5e-4
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_eps: float = 1e-8
    warmup_steps: int = 200
    decay_fraction: float = 0.25
    clip_norm: float = 1.0
    z_loss: float = 1e-5

    def __post_init__(self) -> None:
        for name in ('matrix_learning_rate', 'adam_learning_rate', 'adam_eps', 'clip_norm'):
            require(getattr(self, name) > 0, f'optimizer.{name}', getattr(self, name), 'must be positive')
        for name in ('matrix_weight_decay', 'warmup_steps', 'z_loss'):
            require(getattr(self, name) >= 0, f'optimizer.{name}', getattr(self, name), 'must not be negative')
        for name in ('normuon_b1', 'normuon_b2', 'adam_b1', 'adam_b2'):
            require(0 <= getattr(self, name) < 1, f'optimizer.{name}', getattr(self, name), 'must lie in [0, 1)')
        require(0 <= self.decay_fraction <= 1, 'optimizer.decay_fraction', self.decay_fraction, 'must lie in [0, 1]')


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """The loop. `*_every` in optimizer steps; `eval_rows` caps the validation rows of one evaluation (0 = all)."""

    steps: int = 333_000
    microbatches: int = 1
    log_every: int = 10
    eval_every: int = 1000
    eval_rows: int = 0
    checkpoint_every: int = 1000
    keep_checkpoints: int = 3
    profile_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ('steps', 'microbatches', 'log_every', 'eval_every', 'checkpoint_every', 'keep_checkpoints'):
            require(getattr(self, name) >= 1, f'training.{name}', getattr(self, name), 'must be at least 1')
        require(self.eval_rows >= 0, 'training.eval_rows', self.eval_rows, 'must not be negative')
        p = self.profile_steps
        require(
            not p or (len(p) == 2 and all(isinstance(s, int) for s in p) and 1 <= p[0] <= p[1] <= self.steps),
            'training.profile_steps',
            p,
            f'must be (first, last), both within 1..{self.steps}, or () for none',
        )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh, within one slice; one may be -1: whatever is left. See sharding.py.

    `data`: replicas; `fsdp`: rows, and parameters split; `tensor`: heads, MLP width and vocabulary split; `context`:
    positions of a row split. `slices` multiplies `data`.
    """

    slices: int = 1
    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        require(self.slices >= 1, 'mesh.slices', self.slices, 'must be at least 1')
        axes = {name: getattr(self, name) for name in ('data', 'fsdp', 'tensor', 'context')}
        for name, size in axes.items():
            require(size >= 1 or size == -1, f'mesh.{name}', size, 'must be at least 1, or -1 for what is left')
        require(list(axes.values()).count(-1) <= 1, 'mesh.*', axes, 'only one of them may be -1')


@dataclasses.dataclass(frozen=True)
class InitConfig:
    """Start from another run's newest checkpoint (key `init.from`). '' = from the initialiser.

    `schedule` and `data` say whether the step count (with the schedules) and the data position go on from the source's
    or start anew.
    """

    from_: str = ''
    optimizer: bool = True
    schedule: str = 'restart'
    data: str = 'restart'

    def __post_init__(self) -> None:
        for name in ('schedule', 'data'):
            value = getattr(self, name)
            require(value in ('restart', 'continue'), f'init.{name}', value, 'must be restart or continue')
        if not self.from_:
            for field in dataclasses.fields(self)[1:]:
                require(
                    getattr(self, field.name) == field.default,
                    f'init.{field.name}',
                    getattr(self, field.name),
                    'has no effect without init.from',
                )


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run. Everything random follows from `seed` and the step."""

    seed: int = 0
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    passes: PassesConfig = dataclasses.field(default_factory=PassesConfig)
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    mesh: MeshConfig = MeshConfig()
    init: InitConfig = InitConfig()

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**31, 'seed', self.seed, 'must lie in 0..2**31 - 1')
        require(
            self.model.fusion != 'none' or self.passes.max_passes == 1,
            'passes.phases',
            self.passes.phases,
            "more than one pass needs a fusion, but model.fusion = 'none'; use passes.phases = 'one_pass'",
        )
        divisors = [n for n in range(1, self.data.batch_size + 1) if self.data.batch_size % n == 0]
        require(
            self.training.microbatches in divisors,
            'training.microbatches',
            self.training.microbatches,
            f'must divide data.batch_size = {self.data.batch_size}: one of {", ".join(map(str, divisors))}',
        )
        self.passes.phase_steps(self.training.steps)
        self.data.weight_phases(self.training.steps)


def _key(field: dataclasses.Field) -> str:
    return field.name.rstrip('_')  # `init.from` is a Python keyword


def default_config() -> config_dict.ConfigDict:
    """The defaults as a locked ConfigDict: what a config file starts from."""
    return config_dict.ConfigDict(to_dict(Config(), placeholders=True)).lock()


def to_dict(config: Any, *, placeholders: bool = False) -> dict[str, Any]:
    """Nested plain dict of a config dataclass, with the public key names. `from_dict` is its inverse."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            out[_key(field)] = to_dict(value, placeholders=placeholders)
        elif placeholders and (value is None or field.name in ('phases', 'source', 'validation')):
            # A plain None could not be overridden, and the others are a name or something with parts.
            out[_key(field)] = config_dict.placeholder(int if value is None else object)
            if value is not None:
                out[_key(field)].set(value)
        else:
            out[_key(field)] = value
    return out


def from_dict(values: dict[str, Any]) -> Config:
    """The typed config of a nested dict; UserError names the first wrong key and the nearest real one."""
    return _build(Config, values, prefix='')


def from_config_dict(config: config_dict.ConfigDict) -> Config:
    return from_dict(config.to_dict())


def _build(cls: Any, values: dict[str, Any], *, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise UserError(no_section(prefix.rstrip('.'), values))
    fields = {_key(f): f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise UserError(unknown_key(f'{prefix}{key}'))
    hints = typing.get_type_hints(cls)
    kwargs = {}
    for key, value in values.items():
        hint = hints[fields[key].name]
        if dataclasses.is_dataclass(hint):
            kwargs[fields[key].name] = _build(hint, value, prefix=f'{prefix}{key}.')
        else:
            kwargs[fields[key].name] = _typed(value, hint, prefix + key)
    return cls(**kwargs)


def _typed(value: Any, hint: Any, key: str) -> Any:
    """`value` as the field's type: ints pass for floats, lists and dicts for tuples; nothing else is converted."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    bases = [typing.get_origin(o) or o for o in options]
    if tuple in bases and isinstance(value, list | tuple | dict):
        return tuple(value.items() if isinstance(value, dict) else value)
    if isinstance(value, int) and not -(2**31) <= value < 2**31:
        raise UserError(f'{key} = {value!r}: must fit in 32 bits')
    if bases == [float] and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if (isinstance(value, bool) and bool not in bases) or not isinstance(value, tuple(bases)):
        names = ' or '.join('none' if b is types.NoneType else b.__name__ for b in bases)
        raise UserError(f'{key} = {value!r}: must be of type {names}, not {type(value).__name__}')
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f'{key} = {value!r}: must be a finite number')
    return value


def no_section(key: str, value: Any) -> str:
    return f'{key} = {value!r}: must be a section with keys'


def key_types(cls: Any = Config, prefix: str = '') -> dict[str, Any]:
    """{dotted name: type} of every key, sections left out."""
    hints = typing.get_type_hints(cls)
    keys: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        nested = dataclasses.is_dataclass(hint)
        keys |= key_types(hint, f'{prefix}{_key(field)}.') if nested else {prefix + _key(field): hint}
    return keys


def unknown_key(key: str) -> str:
    keys = list(key_types())
    same_leaf = [k for k in keys if k.split('.')[-1] == key.split('.')[-1]]
    near = same_leaf or difflib.get_close_matches(key, keys, n=1, cutoff=0.0)
    return f'unknown config key {key}; did you mean {near[0]}?'


def changed_keys(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{dotted key: (old value, new value)} for what differs between two nested config dicts."""
    flat_old, flat_new = _flat(old), _flat(new)
    missing = object()
    return {
        key: (flat_old.get(key), flat_new.get(key))
        for key in sorted(flat_old.keys() | flat_new.keys())
        if flat_old.get(key, missing) != flat_new.get(key, missing)
    }


def flat_keys(config: Config) -> dict[str, Any]:
    """{dotted key: value}, values as JSON would give them back."""
    return _flat(to_dict(config))


def _flat(values: dict[str, Any], prefix: str = '') -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f'{prefix}{key}.')
        else:
            flat[prefix + key] = _as_lists(value)
    return flat


def _as_lists(value: Any) -> Any:
    """Tuples as lists, the form that JSON gives back."""
    return [_as_lists(v) for v in value] if isinstance(value, list | tuple) else value
