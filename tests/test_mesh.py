"""Training on 8 fake devices equals training on one, for meshes along every axis; and what the compiled step moves.

Mesh sizes are (data, fsdp, tensor, context). Shapes: B rows, T positions, V vocabulary, D width, F MLP width.
"""

import dataclasses
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import on_devices

from fbt_jax.config import Config, DataConfig, MeshConfig, ModelConfig, PassesConfig
from fbt_jax.data import open_data
from fbt_jax.evaluation.per_pass import evaluate_passes, make_eval_step
from fbt_jax.model.transformer import Transformer, init_params, param_specs
from fbt_jax.sharding import make_mesh, named
from fbt_jax.training.compiler import make_setup
from fbt_jax.training.integrity import digests
from fbt_jax.training.loop import validation_batches

MESH_RUNS = Path(__file__).parent / 'mesh_runs.py'
QUICK = ('2,2,2,1', '1,2,2,2')  # between them they split every axis, together with each other one
SLOW = ('8,1,1,1', '1,8,1,1', '1,1,1,8')


def trained_on(*meshes: str) -> dict[str, Any]:
    result = subprocess.run([sys.executable, str(MESH_RUNS), *meshes], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def require_equal_runs(found: dict[str, Any], meshes: tuple[str, ...]) -> None:
    """To float32's rounding over 20 steps: other orders of summation, fed back through every step."""
    assert set(found['passes']) == {1, 2, 3}
    assert found['passes'][0] == 3  # the gradients are those of three passes
    assert len(found['losses']) == len(set(found['hashes'])) == 20
    assert min(found['losses'][-5:]) < min(found['losses'][:5]) - 0.5  # it does train
    assert len(found['leaves']) == 19
    assert tuple(found['meshes']) == meshes
    for sizes, got in found['meshes'].items():
        assert got['hashes'] == found['hashes'], sizes
        assert got['passes'] == found['passes'], sizes
        np.testing.assert_allclose(got['losses'], found['losses'], rtol=0, atol=1e-5, err_msg=sizes)
        np.testing.assert_allclose(got['norms'][0], found['norms'][0], rtol=1e-5, err_msg=sizes)
        assert sorted(got['gradients']) == found['leaves']
        assert max(got['gradients'].values()) < 1e-5, (sizes, got['gradients'])


@pytest.mark.slow
def test_meshes_that_split_everything_train_like_one_device() -> None:
    require_equal_runs(trained_on(*QUICK), QUICK)


@pytest.mark.slow
def test_meshes_of_one_axis_train_like_one_device() -> None:
    require_equal_runs(trained_on(*SLOW), SLOW)


# What the step moves between devices

# Sizes at which the table, the logits and a layer's MLP kernels can be told from all else; the loss takes the
# vocabulary in more than one chunk. Nothing is run.
B, T, V, D, F = 16, 512, 4096, 32, 320
TWO_PASSES = Config(
    data=DataConfig(tokenizer='bytes', seq_len=T, batch_size=B),
    model=ModelConfig(
        vocab_size=V, width=D, num_layers=2, num_heads=2, num_kv_heads=1, mlp_width=F, window=128,
        full_attention_every=2, remat='per_layer',
    ),
    passes=PassesConfig(phases=((0, (0.0, 1.0)),)),
    mesh=MeshConfig(data=1, fsdp=4, tensor=1, context=2),
)  # fmt: skip


def hlo_of_eight_devices() -> str:
    setup = make_setup(TWO_PASSES, make_mesh(TWO_PASSES.mesh))
    quick = {'xla_backend_optimization_level': 0}
    return setup.lower(TWO_PASSES).compile(compiler_options=quick).as_text()


def group_size(attributes: str) -> int:
    """Devices that take part together, from any of the forms that XLA writes; 8 where it names no groups."""
    if explicit := re.search(r'replica_groups=\{\{([0-9,]+)\}', attributes):
        return len(explicit[1].split(','))
    if iota := re.search(r'replica_groups=\[[0-9]+,([0-9]+)\]<=', attributes):
        return int(iota[1])
    if axes := re.search(r'replica_groups=mesh\[(.*?)\] ?\{(.*?)\}', attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", axes[2]))
    return 8


def results(hlo: str, operation: str) -> Iterator[tuple[int, ...]]:
    """Shapes of what each instruction of this kind gives, each part of a tuple's by itself.

    Without those among groups of one device, which the CPU's compiler leaves in for axes of size 1.
    """
    for kind, rest in re.findall(rf'= (\(?[a-z0-9]+\[.*?) {operation}(?:-start)?\((.*)', hlo):
        if group_size(rest) == 1:
            continue
        for dimensions in re.findall(r'[a-z]+[0-9]+\[([0-9,]*)\]', kind):
            yield tuple(int(n) for n in dimensions.split(',') if n)


@pytest.fixture(scope='module')
def hlo() -> str:
    return on_devices(hlo_of_eight_devices)


def test_instructions_are_read_with_all_their_results() -> None:
    text = """
  %all-reduce.1 = (f32[2,32]{1,0}, f32[]) all-reduce(%a, %b), channel_id=1
  %ag = bf16[16,4]{1,0} all-gather(%c), dimensions={0}
  %one = f32[7]{0} all-reduce(%d), replica_groups={{0},{1}}, to_apply=%add
  %two = f32[6]{0} all-reduce(%d), replica_groups=mesh['fsdp'=4,'tensor'=1] {'tensor'}, to_apply=%add
  %three = f32[5]{0} all-reduce(%d), replica_groups=[8,1]<=[8], to_apply=%add
  %four = f32[4]{0} all-reduce-start(%d), replica_groups=mesh['fsdp'=4,'tensor'=1] {'fsdp','tensor'}, to_apply=%add
  ROOT %x = f32[9]{0} add(%all-reduce.1, %ag)
"""
    assert list(results(text, 'all-reduce')) == [(2, 32), (), (4,)]
    assert list(results(text, 'all-gather')) == [(16, 4)]


def test_neither_the_table_nor_logits_are_gathered(hlo: str) -> None:
    """All-gathers are of chunks, kernels, keys and ids: all smaller than V x D, and than B x T x V on 8 devices."""
    gathered = [math.prod(shape) for shape in results(hlo, 'all-gather')]
    assert D * F in gathered  # an MLP kernel, so that it is the table's absence that is seen
    assert max(gathered) < min(V * D, B * T * V // 8), sorted(gathered)[-3:]


def test_gradients_of_matrices_leave_by_reduce_scatter(hlo: str) -> None:
    """A device gets its eighth of each MLP kernel's gradient; nothing of a kernel's size is summed whole."""
    scattered = set(results(hlo, 'reduce-scatter'))
    assert {(D // 8, F), (F, D // 8)} <= scattered, scattered
    summed = [math.prod(shape) for shape in results(hlo, 'all-reduce')]
    assert summed
    assert max(summed) < D * F, sorted(summed)[-3:]


# Evaluation


def sums_of_eight_devices() -> dict[str, Any]:
    """Of 11 validation rows, by mesh and batch size: 11 is divided by none, so that rows of padding fill up."""
    config = dataclasses.replace(
        TWO_PASSES,
        data=DataConfig(tokenizer='bytes', seq_len=64, batch_size=8),
        model=dataclasses.replace(TWO_PASSES.model, vocab_size=384, mlp_width=64, num_heads=4, num_kv_heads=2),
    )
    data, model = open_data(config), Transformer(config.model)
    params = init_params(model, jax.random.key(1))
    found = {}
    for sizes, batch_size in (
        ((1, 1, 1, 1), 1),
        ((1, 1, 1, 1), 8),
        ((1, 2, 1, 1), 8),
        ((2, 2, 1, 1), 4),
        ((1, 2, 1, 2), 8),
        ((1, 1, 2, 2), 3),
    ):
        mesh = make_mesh(MeshConfig(1, *sizes), jax.devices()[: math.prod(sizes)])
        placed = jax.device_put(params, named(mesh, param_specs(model)))
        with jax.set_mesh(mesh):
            step = make_eval_step(model, num_passes=3, token_bytes=data.token_bytes)
            got = evaluate_passes(step, placed, validation_batches(data, 'validation', mesh, batch_size, max_rows=11))
        found[f'{sizes}, {batch_size} rows'] = {name: np.asarray(x).tolist() for name, x in got.sums._asdict().items()}
    return found


@pytest.mark.slow
def test_evaluation_depends_on_neither_devices_nor_batch_size() -> None:
    """Counts exactly; sums of float32 over a batch to 1e-6."""
    found = on_devices(sums_of_eight_devices)
    alone = found.pop('(1, 1, 1, 1), 1 rows')
    assert np.sum(alone['tokens_P']) > 600
    assert alone['bytes'] > 600
    assert len(found) == 5
    for where, got in found.items():
        for name in ('tokens_P', 'correct_KP', 'bytes'):
            np.testing.assert_array_equal(got[name], alone[name], err_msg=f'{where}: {name}')
        for name in ('nll_KP', 'squared_update_KP'):
            np.testing.assert_allclose(
                np.sum(got[name], axis=-1), np.sum(alone[name], axis=-1), rtol=1e-6, err_msg=f'{where}: {name}'
            )


# Digests of checkpoints


def digests_of_many_saves() -> list[dict[str, int]]:
    """40 small arrays split over two devices, again and again: what saves do, and once starved a CPU of threads."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:2])
    arrays = {str(i): np.random.default_rng(i).normal(size=(8, 16)).astype(np.float32) for i in range(40)}
    split = jax.device_put(arrays, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('fsdp')))
    return [digests(arrays), *(digests(split) for _ in range(200))]


def test_digests_of_split_arrays_are_those_of_whole_ones_however_often() -> None:
    whole, *split = on_devices(digests_of_many_saves, count=2)
    assert all(found == whole for found in split)


# Rematerialisation


def temporaries_by_policy() -> dict[str, int]:
    """Bytes that a device holds in a step of two passes over ten layers, split along every axis but `data`."""
    model = ModelConfig(
        vocab_size=128, width=32, num_layers=10, num_heads=4, num_kv_heads=2, mlp_width=128, window=0
    )  # fmt: skip
    found = {}
    for remat in ('nothing', 'dots', 'per_layer', 'per_pass'):
        config = Config(
            data=DataConfig(tokenizer='bytes', seq_len=64, batch_size=16),
            model=dataclasses.replace(model, remat=remat),
            passes=PassesConfig(phases=((0, (0.0, 1.0)),)),
            mesh=MeshConfig(1, 1, 2, 2, 2),
        )
        compiled = make_setup(config, make_mesh(config.mesh)).compile(config)
        found[remat] = compiled.memory_analysis().temp_size_in_bytes
    return found


@pytest.mark.slow
def test_policies_differ_on_a_mesh() -> None:
    """`dots` keeps the products of every layer, which `per_layer` doesn't; the others lie on either side."""
    found = on_devices(temporaries_by_policy)
    state = 16 // 2 * 64 // 2 * 4  # rows and positions of a device, bytes
    # q, k, v and two MLP products split over tensor, both outputs and the gates: 10 layers, 2 passes.
    products = 10 * 2 * state * ((32 + 2 * 16 + 2 * 128 + 4) / 2 + 2 * 32)
    assert found['dots'] - found['per_layer'] > 0.7 * products
    assert found['nothing'] > found['dots']
    assert found['per_pass'] < found['per_layer']
