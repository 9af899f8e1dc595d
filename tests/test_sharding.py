"""The table of logical axes, meshes, and the specs of a whole train state: against specs derived by hand and a golden.

To renew the golden after a change on purpose: `python tests/golden/make_shardings.py`, and read the difference.
Nothing is compiled here. Mesh sizes are written (data, fsdp, tensor, context).
"""

import dataclasses
import itertools
import json
import math
import re
import runpy
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from helpers import on_devices
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from fbt_jax.batch import Batch
from fbt_jax.config import Config, DataConfig, MeshConfig, ModelConfig, PassesConfig, TrainingConfig
from fbt_jax.errors import UserError
from fbt_jax.model.transformer import Transformer, for_platform, param_specs
from fbt_jax.sharding import (
    MESH_AXES,
    batch_sharding,
    local_rows,
    make_mesh,
    mesh_axes,
    mesh_shape,
    named,
    parameter_specs,
    place,
    placements,
    require_divisible,
    state_specs,
)
from fbt_jax.training.integrity import named_leaves

GOLDEN = Path(__file__).parent / 'golden'
MAKER = runpy.run_path(str(GOLDEN / 'make_shardings.py'))

# Of configs/fbt_1b.py, by hand: the layers first, the width over fsdp and context, everything wide over tensor.
D = ('fsdp', 'context')
INTO = P(None, D, 'tensor')  # matrices that read the width
OUT_OF = P(None, 'tensor', D)  # matrices that write it
MATRICES = {
    'layers/query/kernel': INTO,
    'layers/key/kernel': INTO,
    'layers/value/kernel': INTO,
    'layers/mlp_gate/kernel': INTO,
    'layers/mlp_up/kernel': INTO,
    'layers/output/kernel': OUT_OF,
    'layers/mlp_down/kernel': OUT_OF,
}
FUSION = {'fusion/gate/kernel': P(D, 'tensor'), 'fusion/state/kernel': P(D, 'tensor')}
SCALES = ('attention_norm', 'attention_post_norm', 'query_norm', 'key_norm', 'mlp_norm', 'mlp_post_norm')
ADAM = {
    'embedding': P('tensor', D),
    'layers/head_gate/kernel': INTO,
    'input_norm/scale': P(None),
    'final_norm/scale': P(None),
    **{f'layers/{name}/scale': P(None, None) for name in SCALES},
}
# Second moments of NorMuon: one of each output, so the inputs' entry is gone.
OUTPUTS = {
    **{name: P(None, 'tensor') for name, spec in MATRICES.items() if spec == INTO},
    **{name: P(None, D) for name, spec in MATRICES.items() if spec == OUT_OF},
    **{name: P('tensor') for name in FUSION},
}


def mesh_of(*sizes: int) -> AbstractMesh:
    return AbstractMesh(sizes, MESH_AXES)


# The table


def test_table() -> None:
    """What each kind of array's axes come to; a dimension named None stays whole."""
    assert mesh_axes('batch', 'length') == P(('data', 'fsdp'), 'context')
    assert mesh_axes('vocab', 'embed') == P('tensor', ('fsdp', 'context'))
    assert mesh_axes('layers', None, 'mlp') == P(None, None, 'tensor')
    assert mesh_axes('batch', 'length', 'state') == P(('data', 'fsdp'), 'context', None)
    assert mesh_axes() == P()


def test_unknown_logical_axis_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^logical axis 'hedas': must be one of batch, length, .*, norm$"):
        mesh_axes('embed', 'hedas')


@pytest.mark.parametrize('axes', [('heads', 'mlp'), ('batch', 'embed'), ('embed', 'length'), ('vocab', 'vocab')])
def test_two_axes_on_one_mesh_axis_are_an_error(axes: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match='two of them are split over the same mesh axis'):
        mesh_axes(*axes)


# The mesh


@pytest.mark.parametrize(
    ('config', 'devices', 'shape'),
    [
        (MeshConfig(), 8, (1, 8, 1, 1)),
        (MeshConfig(), 1, (1, 1, 1, 1)),
        (MeshConfig(data=2, fsdp=-1, tensor=2), 8, (2, 2, 2, 1)),
        (MeshConfig(data=-1, fsdp=2, context=2), 64, (16, 2, 1, 2)),
        (MeshConfig(fsdp=32, context=-1), 64, (1, 32, 1, 2)),
        (MeshConfig(fsdp=4, tensor=-1), 4, (1, 4, 1, 1)),
        (MeshConfig(slices=2, data=2, fsdp=-1), 16, (4, 4, 1, 1)),
        (MeshConfig(slices=2, data=-1, fsdp=2), 16, (8, 2, 1, 1)),
    ],
)
def test_mesh_shape(config: MeshConfig, devices: int, shape: tuple[int, ...]) -> None:
    assert mesh_shape(config, devices) == shape


@pytest.mark.parametrize(
    ('config', 'told'),
    [
        (
            MeshConfig(data=3),
            'mesh of slices=1, data=3, fsdp=-1, tensor=1, context=1: needs a multiple of 3 devices, but there are 8',
        ),
        (
            MeshConfig(data=2, fsdp=2),
            'mesh of slices=1, data=2, fsdp=2, tensor=1, context=1: needs 4 devices, but there are 8',
        ),
        (
            MeshConfig(fsdp=16),
            'mesh of slices=1, data=1, fsdp=16, tensor=1, context=1: needs 16 devices, but there are 8',
        ),
        (
            MeshConfig(slices=3, fsdp=-1),
            'mesh of slices=3, data=1, fsdp=-1, tensor=1, context=1: needs a multiple of 3 devices, but there are 8',
        ),
    ],
)
def test_sizes_that_do_not_make_up_the_devices(config: MeshConfig, told: str) -> None:
    with pytest.raises(UserError) as info:
        mesh_shape(config, 8)
    assert str(info.value) == told


def test_only_one_size_may_be_left_open() -> None:
    with pytest.raises(UserError) as info:
        MeshConfig(data=-1, fsdp=-1)
    assert str(info.value) == (
        "mesh.* = {'data': -1, 'fsdp': -1, 'tensor': 1, 'context': 1}: only one of them may be -1"
    )


# Divisibility

SMALL = Config(
    data=DataConfig(tokenizer='bytes', seq_len=48, batch_size=24),
    model=ModelConfig(
        vocab_size=258, width=24, num_layers=2, num_heads=12, num_kv_heads=6, mlp_width=36, full_attention_every=2
    ),
    passes=PassesConfig(phases='one_pass'),
    training=TrainingConfig(microbatches=2),
)


def fits(data: int, fsdp: int, tensor: int, context: int) -> bool:
    """By hand for SMALL: 12 rows of 48 positions at a time; 258 ids are padded to 384."""
    rows = 12 % (data * fsdp) == 0
    width = 24 % (fsdp * context) == 0
    wide = all(size % tensor == 0 for size in (24, 12, 6, 36, 384))
    return rows and 48 % context == 0 and width and wide


def test_require_divisible_names_exactly_the_sizes_that_do() -> None:
    """All meshes of up to 6 along each axis: refused where they must be, and every list is a brute-force search's."""
    refused = 0
    for sizes in itertools.product((1, 2, 3, 4, 5, 6), repeat=4):
        if fits(*sizes):
            require_divisible(SMALL, mesh_of(*sizes))
            continue
        refused += 1
        with pytest.raises(UserError) as info:
            require_divisible(SMALL, mesh_of(*sizes))
        text = str(info.value)
        assert '\n' not in text
        listed = re.findall(r'mesh\.(\w+): ((?:\d+(?:, )?)+|none)', text.split('legal sizes are ')[1])
        assert listed
        by_axis = dict(zip(MESH_AXES, sizes, strict=True))
        for axis, options in listed:
            trials = range(1, math.prod(sizes) + 1)
            expected = [n for n in trials if math.prod(sizes) % n == 0 and fits(**(by_axis | {axis: n}))]
            assert options == (', '.join(map(str, expected)) or 'none'), (sizes, text)
    assert refused > 500


def test_require_divisible_in_words() -> None:
    with pytest.raises(UserError) as info:
        require_divisible(SMALL, mesh_of(2, 4, 1, 1))
    assert str(info.value) == (
        'mesh.data x mesh.fsdp = 2 x 4: data.batch_size / training.microbatches = 12 must be divisible by it; '
        'legal sizes are mesh.data: 1; mesh.fsdp: 1, 2 (another axis takes the rest of the 8 devices)'
    )
    with pytest.raises(UserError) as info:
        require_divisible(SMALL, mesh_of(1, 1, 4, 1))
    assert str(info.value) == (
        'mesh.tensor = 4: model.num_kv_heads = 6 must be divisible by it; '
        'legal sizes are mesh.tensor: 1, 2 (another axis takes the rest of the 4 devices)'
    )
    with pytest.raises(UserError) as info:
        require_divisible(dataclasses.replace(SMALL, mesh=MeshConfig(slices=2)), mesh_of(8, 1, 1, 1))
    assert str(info.value) == (
        'slices x mesh.data = 8: data.batch_size / training.microbatches = 12 must be divisible by it; '
        'legal sizes are slices x mesh.data: 1, 2, 4 (another axis takes the rest of the 8 devices)'
    )


# A whole state


def by_name(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, P))
    return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}


def test_every_leaf_of_the_1b_state_lies_as_derived_by_hand() -> None:
    _, specs = MAKER['state_and_specs'](MAKER['fbt_1b']())
    groups = 'opt_state/inner_state/1/inner_states'
    adam, matrix, fusion = (f'{groups}/{name}/inner_state' for name in ('adam', 'matrix', 'fusion'))
    expected = {f'params/{name}': spec for name, spec in (MATRICES | FUSION | ADAM).items()}
    expected |= {f'{adam}/0/{moment}/{name}': spec for moment in ('mu', 'nu') for name, spec in ADAM.items()}
    for group, of in ((matrix, MATRICES), (fusion, FUSION)):
        expected |= {f'{group}/0/0/ema/{name}': spec for name, spec in of.items()}
        expected |= {f'{group}/0/2/{name}': OUTPUTS[name] for name in of}
    counters = (f'{adam}/0/count', f'{matrix}/0/0/count', f'{fusion}/0/0/count')
    counters += ('opt_state/in_a_row', 'opt_state/total', 'step')
    assert by_name(specs) == expected | dict.fromkeys(counters, P())


def test_golden_shardings() -> None:
    """Specs and a device's part of every leaf on two meshes; see the head of this file for how to renew it."""
    expected = json.loads((GOLDEN / 'shardings.json').read_text())
    actual = MAKER['shardings']()
    assert list(actual) == list(expected) == ['1,32,1,2', '1,32,2,1']
    for mesh, leaves in expected.items():
        assert actual[mesh].keys() == leaves.keys()
        for name, leaf in leaves.items():
            assert actual[mesh][name] == leaf, (mesh, name)


def test_golden_shards_make_up_the_leaves() -> None:
    """The parts in the golden itself: each dimension's times the sizes of the axes that split it is the whole."""
    for mesh, leaves in json.loads((GOLDEN / 'shardings.json').read_text()).items():
        sizes = dict(zip(MESH_AXES, map(int, mesh.split(',')), strict=True))
        for name, leaf in leaves.items():
            entries = [[e] if isinstance(e, str) else e or [] for e in leaf['spec']]
            whole = [n * math.prod(sizes[a] for a in e) for n, e in zip(leaf['shard'], entries, strict=True)]
            assert whole == leaf['shape'], name


@pytest.mark.parametrize(
    ('path', 'shape', 'told'),
    [
        (('mu', 'w'), (3, 4, 5), 'state mu/w: shape (3, 4, 5) is none of a parameter of shape (3, 4)'),
        (('mu', 'w'), (3,), 'state mu/w: shape (3,) is none of a parameter of shape (3, 4)'),
        (('mu', 'other'), (3, 4), 'state mu/other: shape (3, 4) belongs to no parameter'),
        (('history',), (10,), 'state history: shape (10,) belongs to no parameter'),
    ],
)
def test_unknown_state_is_an_error(path: tuple[str, ...], shape: tuple[int, ...], told: str) -> None:
    def state(path: tuple[str, ...], shape: tuple[int, ...]) -> Any:
        leaf: Any = jax.ShapeDtypeStruct(shape, np.float32)
        for key in reversed(path):
            leaf = {key: leaf}
        return leaf

    params, specs = state(('w',), (3, 4)), {'w': P('fsdp', 'tensor')}
    assert state_specs(state(('mu', 'w'), (3, 4)), params, specs) == {'mu': {'w': P('fsdp', 'tensor')}}
    assert state_specs(state(('nu', 'w'), (4,)), params, specs) == {'nu': {'w': P('tensor')}}
    assert state_specs(state(('count',), ()), params, specs) == {'count': P()}
    with pytest.raises(ValueError, match=f'^{re.escape(told)}$'):
        state_specs(state(path, shape), params, specs)


def test_a_parameter_without_logical_axes_is_an_error() -> None:
    leaf = jax.ShapeDtypeStruct((3, 4), np.float32)
    boxed = {'layers': {'w': nn.LogicallyPartitioned(leaf, names=('embed', 'mlp')), 'bias': leaf}}
    with pytest.raises(ValueError, match=r'^parameter layers/bias: names no logical axes$'):
        parameter_specs(boxed)
    boxed['layers']['bias'] = nn.LogicallyPartitioned(leaf, names=('mlp',))
    with pytest.raises(ValueError, match=r'^parameter layers/bias: 1 logical axes for shape \(3, 4\)$'):
        parameter_specs(boxed)
    boxed['layers']['bias'] = nn.LogicallyPartitioned(leaf, names=(None, 'mlp'))
    assert parameter_specs(boxed) == {'layers': {'w': P(D, 'tensor'), 'bias': P(None, 'tensor')}}


# Silent replication


def params_and_specs() -> tuple[Any, Any]:
    state, specs = MAKER['state_and_specs'](MAKER['fbt_1b']())
    return state.params, specs.params


@pytest.mark.parametrize('sizes', [(1, 32, 1, 2), (1, 32, 2, 1), (2, 8, 4, 1)])
def test_only_the_norm_scales_of_the_1b_lie_whole(sizes: tuple[int, ...]) -> None:
    params, specs = params_and_specs()
    mesh = mesh_of(*sizes)
    leaves = named_leaves(params)
    found = dict(zip(leaves, placements(params, named(mesh, specs), mesh), strict=True))
    for name, (bytes_, on_device, replicated) in found.items():
        assert replicated == name.endswith('/scale')
        assert bytes_ == 4 * math.prod(leaves[name].shape)
        assert on_device == (bytes_ if replicated else bytes_ * sizes[0] / 64)


def test_planted_replication_is_refused() -> None:
    """The MLP's kernels whole: 3 x 24 x 1536 x 6656 of the model's 1,064.6 million; the scales are the rest."""
    params, specs = params_and_specs()
    mesh = mesh_of(1, 32, 1, 2)
    planted = jax.tree_util.tree_map_with_path(
        lambda path, spec: P() if path[1:] and str(path[1].key).startswith('mlp_') else spec,
        specs,
        is_leaf=lambda x: isinstance(x, P),
    )
    leaves = named_leaves(params)
    scales = sum(math.prod(leaf.shape) for name, leaf in leaves.items() if name.endswith('/scale'))
    total = sum(math.prod(leaf.shape) for leaf in leaves.values())
    share = (3 * 24 * 1536 * 6656 + scales) / total
    with pytest.raises(UserError) as info:
        placements(params, named(mesh, planted), mesh)
    text = str(info.value)
    assert f': {share:.1%} of the parameters would lie undivided' in text
    assert 'layers/mlp_down/kernel' in text
    assert '(at most 5%)' in text
    assert '\n' not in text


def test_a_matrix_split_over_one_of_two_axes_counts_as_replicated() -> None:
    """Half of what the mesh could do is no excuse; replicas along `data` are none of it."""
    params = {'w': jax.ShapeDtypeStruct((64, 64), np.float32)}
    with pytest.raises(UserError, match=r'100\.0% of the parameters would lie undivided .*: w$'):
        placements(params, named(mesh_of(1, 4, 2, 1), {'w': P('fsdp', None)}), mesh_of(1, 4, 2, 1))
    [found] = placements(params, named(mesh_of(8, 4, 2, 1), {'w': P('fsdp', 'tensor')}), mesh_of(8, 4, 2, 1))
    assert found == (64 * 64 * 4, 64 * 64 * 4 // 8, False)


# Arrays on devices


def facts_of_eight_devices() -> dict[str, Any]:
    """On 8 fake devices: where the slices' devices stand, and what `place` puts on each device."""
    ids: dict[str, Any] = {}
    for name, config in {
        'slices': MeshConfig(slices=2, data=2, fsdp=2, tensor=1),
        'slices of replicas alone': MeshConfig(slices=4, data=2, fsdp=1),
        'slices over tensor': MeshConfig(slices=2, data=1, fsdp=2, tensor=2),
    }.items():
        mesh = make_mesh(config)
        ids[name] = [list(mesh.devices.shape), [device.id for device in mesh.devices.flat]]

    rows, seq_len = 8, 16
    values = np.arange(rows * seq_len, dtype=np.int32).reshape(rows, seq_len)
    batch = Batch(values, values + 1, values.astype(np.float32) / 2, values % 3, values % 5)
    placed = {}
    for sizes in ((8, 1, 1, 1), (1, 8, 1, 1), (2, 2, 2, 1), (1, 2, 2, 2), (1, 1, 1, 8)):
        mesh = make_mesh(MeshConfig(1, *sizes))
        chosen = local_rows(mesh, rows)
        glob = place(batch, mesh, rows=chosen, num_rows=rows)
        right = all(
            np.array_equal(np.asarray(part.data), host[part.index])
            for array, host in zip(glob, batch, strict=True)
            for part in array.addressable_shards
        )
        placed[','.join(map(str, sizes))] = {
            'rows': chosen,
            'sharding': all(array.sharding == batch_sharding(mesh) for array in glob),
            'dtypes': [array.dtype.name for array in glob],
            'parts': [list(part.data.shape) for part in glob.tokens.addressable_shards],
            'right': right,
        }
    return {'ids': ids, 'placed': placed}


@pytest.fixture(scope='module')
def eight() -> dict[str, Any]:
    return on_devices(facts_of_eight_devices)


def test_slices_are_the_slowest_part_of_data(eight: dict[str, Any]) -> None:
    """CPU devices know no slice: each is a run of neighbours in their order."""
    for name, shape in (
        ('slices', [4, 2, 1, 1]),
        ('slices of replicas alone', [8, 1, 1, 1]),
        ('slices over tensor', [2, 2, 2, 1]),
    ):
        assert eight['ids'][name] == [shape, list(range(8))]


def test_each_device_gets_its_part_of_the_batch(eight: dict[str, Any]) -> None:
    parts = {
        '8,1,1,1': [1, 16],
        '1,8,1,1': [1, 16],
        '2,2,2,1': [2, 16],
        '1,2,2,2': [4, 8],
        '1,1,1,8': [8, 2],
    }
    assert eight['placed'].keys() == parts.keys()
    for sizes, shape in parts.items():
        found = eight['placed'][sizes]
        assert found['rows'] == list(range(8))  # one process has all devices
        assert found['sharding']
        assert found['dtypes'] == ['int32', 'int32', 'float32', 'int32', 'int32']
        assert found['parts'] == [shape] * 8
        assert found['right']


def test_param_specs_do_not_depend_on_the_fusion_or_the_dtype() -> None:
    """A model without feedback has the same specs but for the matrices that it lacks."""
    config = MAKER['fbt_1b']().model
    plain = dataclasses.replace(config, fusion='none', dtype='float32')
    assert by_name(param_specs(Transformer(for_platform(plain, 'cpu')))) == MATRICES | ADAM
