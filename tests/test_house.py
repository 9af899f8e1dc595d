"""The house keeps its order: imports go one way only, flax stays under model/, nothing goes round in circles."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / 'fbt_jax'

# Room -> the rooms it may import; architecture.md's arrows, with what lies behind each arrow spelt out.
_CONFIG = {'config_data', 'config_model', 'config_passes', 'config_phases', 'errors'}
_GROUND = _CONFIG | {'config', 'files', 'batch'}
_MODEL = _GROUND | {'sharding'}
_MATHS = _MODEL | {'model'}
_INFERENCE = _MATHS | {'passes', 'losses', 'data'}
_EVALUATION = _INFERENCE | {'inference'}
_TRAINING = _EVALUATION | {'evaluation'}
MAY_IMPORT: dict[str, set[str]] = {
    'errors': set(),
    'files': {'errors'},
    'config_phases': {'errors'},
    'config_data': {'config_phases', 'errors'},
    'config_model': {'errors'},
    'config_passes': {'config_phases', 'errors'},
    'config': _CONFIG,
    'config_file': {'config', 'errors'},
    'batch': set(),
    'sharding': {'config', 'config_model', 'errors'},
    'data': _GROUND,
    'model': _MODEL,
    'passes': _MATHS,
    'losses': _MATHS,
    'inference': _INFERENCE,
    'evaluation': _EVALUATION,
    'training': _TRAINING,
    'interop': _TRAINING | {'training'},  # a run is loaded by its folder
    'cli': _TRAINING | {'training', 'interop', 'config_file'},
    '__init__': set(),
    '__main__': {'cli'},
}
FLAX_ROOMS = {'model', 'sharding'}
# What `fbt --help` loads.
LIGHT_ROOMS = _CONFIG | {'config', 'config_file', 'files', 'batch', '__init__', '__main__'}
HEAVY = {'jax', 'flax', 'optax', 'orbax', 'grain', 'numpy', 'tensorboardX', 'tokenizers', 'matplotlib', 'plotly'}


def imports(path: Path, package: Path) -> Iterator[str]:
    """Dotted names that a file imports, wherever in it: `fbt_jax.a.b` for modules of the package, else the top name."""
    module = ('fbt_jax', *path.relative_to(package).with_suffix('').parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*module[: len(module) - node.level]] if node.level else []
            origin = '.'.join(base + ([node.module] if node.module else []))
            names = [submodule(package, f'{origin}.{alias.name}') or origin for alias in node.names]
        else:
            continue
        for name in names:
            yield (submodule(package, name) or name) if name.split('.')[0] == 'fbt_jax' else name.split('.')[0]


def submodule(package: Path, name: str) -> str | None:
    """`name` if it is a module of the package, `name.__init__` if it is a folder of it."""
    parts = name.split('.')
    if parts[0] != 'fbt_jax':
        return None
    path = package.joinpath(*parts[1:])
    if path.is_dir():
        return f'{name}.__init__'
    return name if path.with_suffix('.py').is_file() else None


def violations(package: Path) -> list[str]:
    found = []
    graph: dict[str, set[str]] = {}
    for path in sorted(package.rglob('*.py')):
        module = '.'.join(('fbt_jax', *path.relative_to(package).with_suffix('').parts))
        room = module.split('.')[1]
        graph[module] = set()
        if room not in MAY_IMPORT:
            found.append(f'{module}: no room of this name')
            continue
        for name in imports(path, package):
            top, *rest = name.split('.')
            if top == 'fbt_jax':
                graph[module].add(name)
                if rest[0] not in MAY_IMPORT[room] | {room}:
                    found.append(f'{module} imports {name}')
            elif top == 'flax' and room not in FLAX_ROOMS:
                found.append(f'{module} imports flax')
            elif top in HEAVY and room in LIGHT_ROOMS:
                found.append(f'{module} imports {top}')
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append(f'a cycle: {" <- ".join(error.args[1])}')
    return found


def test_imports_go_one_way() -> None:
    assert violations(PACKAGE) == []


def test_the_rules_see_the_package() -> None:
    """Known imports are found, so that an empty list of violations means something."""
    found = {(path.stem, name) for path in PACKAGE.rglob('*.py') for name in imports(path, PACKAGE)}
    assert {
        ('loop', 'fbt_jax.training.step'),
        ('loop', 'jax'),
        ('generate', 'fbt_jax.training.run_folder'),  # within a function
        ('transformer', 'flax'),
        ('pipeline', 'fbt_jax.data.corpus'),  # from fbt_jax.data import corpus
        ('__main__', 'fbt_jax.cli.__init__'),
    } <= found


@pytest.mark.parametrize(
    ('path', 'text', 'told'),
    [
        ('model/a.py', 'import fbt_jax.training.step', 'fbt_jax.model.a imports fbt_jax.training.step'),
        ('losses.py', 'def f():\n    from fbt_jax.cli import main', 'fbt_jax.losses imports fbt_jax.cli.__init__'),
        ('losses.py', 'from fbt_jax import passes', 'fbt_jax.losses imports fbt_jax.passes'),
        ('data/a.py', 'from ..training import step', 'fbt_jax.data.a imports fbt_jax.training.step'),
        (
            'evaluation/a.py',
            'from fbt_jax.training.step import x',
            'fbt_jax.evaluation.a imports fbt_jax.training.step',
        ),
        ('passes.py', 'import flax.linen as nn', 'fbt_jax.passes imports flax'),
        ('config.py', 'def f():\n    import jax', 'fbt_jax.config imports jax'),
        ('utils.py', '', 'fbt_jax.utils: no room of this name'),
        ('training/step.py', 'from fbt_jax.training import loop', 'a cycle: '),
        ('training/step.py', 'from . import loop', 'a cycle: '),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, path: str, text: str, told: str) -> None:
    package = tmp_path / 'fbt_jax'
    clean = {'cli/__init__.py': 'from fbt_jax.training import loop', 'training/step.py': 'import jax', 'passes.py': ''}
    clean |= {'training/loop.py': 'from fbt_jax.training.step import x', 'model/a.py': 'import flax', 'config.py': ''}
    for name, content in clean.items():
        file = package / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert violations(package) == []
    (package / path).parent.mkdir(exist_ok=True)
    (package / path).write_text(text)
    found = violations(package)
    assert len(found) == 1
    assert found[0].startswith(told)
