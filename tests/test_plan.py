"""`fbt plan`: collectives read from a program's text and counted on paper, topologies, the table, the sweep.

The program's text is checked against hand-written HLO whose bytes are worked out here; the count on paper against the
program that XLA compiles for fake devices (test_mesh.py's script) and, with libtpu, for a TPU.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_e2e import CONFIG, ROOT, finish, start

from fbt_jax.config import Config, MeshConfig, ModelConfig
from fbt_jax.errors import UserError
from fbt_jax.training import plan
from fbt_jax.training.chips import CHIPS, chip_of
from fbt_jax.training.collectives import KINDS, in_program, newton_schulz_stacks, on_paper
from fbt_jax.training.flops import newton_schulz_flops
from fbt_jax.training.topologies import TPU_SHAPES, chip_name

# Eight devices. Bytes that a device receives, by hand:
#   all-gather f32[8,16] over 4: 512 * 3/4 = 384, in a loop of 5: 1920
#   reduce-scatter to f32[4,2] from a group of 2: 32 * 1 = 32, in the loop: 160
#   all-reduce bf16[10] over 8: 20 * 2 * 7/8 = 35, in branch 1 with share 0.25: 8.75
#   all-to-all f32[8,4] over 8: 128 * 7/8 = 112, in branch 0 with share 0.75: 84
#   collective-permute s32[6]: 24; its -start form: 24
#   all-gather-start f32[2] -> f32[8]: 32 * 3/4 = 24; its -done counts for nothing
HLO = """
HloModule jit_step, entry_computation_layout={()->f32[]}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %s = f32[] add(%a, %b)
}

%body (p: (s32[], f32[2,16])) -> (s32[], f32[2,16]) {
  %x = f32[2,16]{1,0} get-tuple-element(%p), index=1
  %ag = f32[8,16]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, metadata={op_name="x"}
  %rs = f32[4,2]{1,0} reduce-scatter(%y), channel_id=2, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  ROOT %t = (s32[], f32[2,16]) tuple(%i, %x)
}

%condition (p: (s32[], f32[2,16])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%off (p: f32[8,4]) -> f32[8,4] {
  ROOT %a2a = f32[8,4]{1,0} all-to-all(%p), channel_id=3, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}

%on (p: bf16[10]) -> bf16[10] {
  ROOT %ar = bf16[10]{0} all-reduce(%p), channel_id=4, replica_groups=[1,8]<=[8], to_apply=%add
}

ENTRY %main () -> f32[] {
  %w = (s32[], f32[2,16]) while(%init), condition=%condition, body=%body
  %c = f32[8,4] conditional(%pred, %u, %v), branch_computations={%off, %on}, metadata={op_name="jit/cond"}
  %cp = s32[6]{0} collective-permute(%z), channel_id=5, source_target_pairs={{0,4},{4,0}}
  %cps = (s32[6]{0}, s32[6]{0}) collective-permute-start(%z), channel_id=6, source_target_pairs={{0,1},{1,2}}
  %cpd = s32[6]{0} collective-permute-done(%cps)
  %ags = (f32[2]{0}, f32[8]{0}) all-gather-start(%q), channel_id=7, replica_groups=[2,4]<=[8], dimensions={0}
  %agd = f32[8]{0} all-gather-done(%ags)
  ROOT %r = f32[] constant(0)
}
"""


def test_bytes_of_a_program_by_hand() -> None:
    found = in_program(HLO, branch_shares=lambda name, n: {'jit/cond': [0.75, 0.25]}[name], devices_per_slice=4)
    total = {kind: sum(c.bytes for c in found if c.kind == kind) for kind in KINDS}
    assert total == {
        'all-gather': 1920 + 24,
        'reduce-scatter': 160,
        'all-reduce': 8.75,
        'all-to-all': 84,
        'collective-permute': 48,
    }
    crossing = {(c.kind, c.bytes) for c in found if c.crosses_slices}
    assert crossing == {('all-reduce', 8.75), ('all-to-all', 84.0), ('collective-permute', 24.0)}


def test_loops_whose_trip_count_is_stated() -> None:
    stated = HLO.replace('body=%body', 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    found = in_program(stated, branch_shares=lambda name, n: [1.0] * n, devices_per_slice=8)
    assert max(c.bytes for c in found) == 7 * 384


def test_one_collective_in_several_fusions_counts_once() -> None:
    """As a TPU program has it: the transfer's start, what runs beside it and its end all name the collective."""
    gather = '  %g{} = f32[8]{{0}} all-gather(%q), replica_groups=[2,4]<=[8], frontend_attributes={{chain_id="{}"}}\n'
    text = HLO.replace('  %cp =', ''.join(gather.format(i, i // 3) for i in range(6)) + '  %cp =')
    found = in_program(text, branch_shares=lambda name, n: [0.0] * n, devices_per_slice=8)
    assert [c.bytes for c in found if c.kind == 'all-gather'] == [1920.0, 24.0, 24.0, 24.0]


# On paper, by hand: 2 rows a device of 16 positions, width 8, tables of 128 rows, no windows.
MODEL = ModelConfig(
    vocab_size=128, width=8, num_layers=3, num_heads=2, num_kv_heads=1, mlp_width=32, window=0, remat='per_layer'
)


def small(**model: object) -> Config:
    config = Config(model=dataclasses.replace(MODEL, **model))
    return dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=16, batch_size=8))


def test_count_on_paper_of_rows_and_parameters_split_four_ways() -> None:
    layer = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 32 + 8 * 2  # q, output; k, v; MLP; head gates
    table = 128 * 8
    mesh = {'data': 1, 'fsdp': 4, 'tensor': 1, 'context': 1}
    counted = on_paper(small(), mesh, passes=1, element_bytes=2)
    assert counted['all-gather'] == 0.75 * 2 * 2 * (3 * layer + table)
    assert counted['reduce-scatter'] == 0.75 * (2 * 3 * layer + 4 * table)
    assert counted['all-reduce'] == counted['collective-permute'] == 0
    # 6 square matrices of 64, 6 of 32, 9 of 256: two stacks of 6 take 8 shares, one of 9 takes 12.
    exchanged = (8 * 64 + 8 * 32 + 12 * 256) * 4 / 4 * 0.75 * 2
    assert counted['all-to-all'] == 2 * 16 * 8 * 2 * 0.75 * 2 + exchanged


def test_count_on_paper_of_positions_split_in_two() -> None:
    mesh = {'data': 1, 'fsdp': 1, 'tensor': 1, 'context': 2}
    alone = on_paper(small(), mesh | {'context': 1}, passes=2, element_bytes=2)
    assert sum(alone.values()) == 0
    counted = on_paper(small(), mesh, passes=2, element_bytes=2)
    layer = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 32 + 8 * 2
    fusion = 2 * 8 * 8
    keys = 8 * 16 * 2 * 4 * 2  # rows, positions, keys and values, their width, bytes
    gathered = 2 * (3 * layer + fusion + 128 * 8) * 2
    assert counted['all-gather'] == 2 * 0.5 * (gathered + 3 * keys * 2)
    assert counted['collective-permute'] == 2 * 8 * 8 * 2 * 2  # the shift: one position of each row, there and back


def test_tensor_sums_the_state_and_data_sums_gradients() -> None:
    state = 2 * 16 * 8 * 2
    mesh = {'data': 1, 'fsdp': 4, 'tensor': 2, 'context': 1}
    counted = on_paper(small(num_kv_heads=2), mesh, passes=1, element_bytes=2)
    assert counted['all-reduce'] == (3 * 5 + 4) * state  # 2 (n-1)/n = 1 for two
    layer = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 32 + 8 * 2
    mesh = {'data': 4, 'fsdp': 1, 'tensor': 1, 'context': 1}
    counted = on_paper(small(), mesh, passes=1, element_bytes=2)
    assert counted['all-reduce'] == 1.5 * (3 * layer * 2 + 2 * 128 * 8 * 4)


def test_feedback_matrices_under_tensor() -> None:
    """Two inputs whose gradients are summed, one result that is put together, in each of three passes."""
    mesh = {'data': 1, 'fsdp': 1, 'tensor': 2, 'context': 1}
    three, one = (on_paper(small(num_kv_heads=2), mesh, passes=k, element_bytes=2) for k in (3, 1))
    state = 8 * 16 * 8 * 2
    assert three['all-reduce'] - 3 * one['all-reduce'] == 3 * 2 * state
    assert three['all-gather'] - 3 * one['all-gather'] == 3 * state / 2


def test_recomputing_whole_passes_gathers_a_third_time() -> None:
    mesh = {'data': 1, 'fsdp': 4, 'tensor': 1, 'context': 1}
    twice, thrice = (
        on_paper(small(remat=remat), mesh, passes=2, element_bytes=2)['all-gather'] for remat in ('dots', 'per_pass')
    )
    assert thrice == 1.5 * twice


def test_newton_schulz_by_hand() -> None:
    assert newton_schulz_flops(2, 3) == newton_schulz_flops(3, 2) == 5 * (2 * 2 * 2 * 3 + 2 * 2 * 2 * 2 + 2 * 2 * 2 * 3)
    stacks = newton_schulz_stacks(small(), 2)
    assert sorted(stacks) == [(2, 8, 8), (6, 4, 8), (6, 8, 8), (9, 8, 32)]
    assert sorted(newton_schulz_stacks(small(), 1)) == [(6, 4, 8), (6, 8, 8), (9, 8, 32)]


def test_shares_of_pass_counts_over_a_run() -> None:
    config = Config()  # progressive_75_22_3
    assert plan.expected_shares(config) == pytest.approx([0.75, 0.22, 0.03], abs=1e-5)


def test_roofline_by_hand() -> None:
    cost = plan.Cost(
        passes=1, parameters=0, optimizer=0, batch=0, activations=0, peak=10, memory=9.0, model_flops=150e12,
        recomputed_flops=40e12, optimizer_flops=7e12, compiler_flops=0.0,
        collectives={'all-gather': 9e9, 'all-reduce': 9e9}, on_paper={'all-gather': 15e9}, between_slices=3.1e9,
        largest_all_gather=0, compile_seconds=0.0,
    )  # fmt: skip
    hidden, exposed = cost.seconds(CHIPS['v5e'])  # 197e12 FLOP/s, 2 x 45 GB/s, 3.1 GB/s between slices
    assert hidden == pytest.approx(1.0)
    assert exposed == pytest.approx(1.0 + (18 - 3.1) / 90 + 1.0)
    assert not cost.fits
    assert plan.ratio(cost) == 1.2


def test_candidates_fill_the_devices() -> None:
    config = dataclasses.replace(small(), mesh=MeshConfig(slices=2))
    found = list(plan.candidates(config, 16))
    sizes = [(c.mesh.data, c.mesh.fsdp, c.mesh.tensor, c.mesh.context) for c in found]
    assert all(d * f * t * x == 8 for d, f, t, x in sizes)
    assert {(1, 8, 1, 1), (1, 4, 2, 1), (1, 2, 2, 2), (2, 1, 1, 4), (1, 1, 8, 1)} <= set(sizes)
    assert len(found) == len(set(sizes)) * 3, 'each mesh with each policy, once'


# Topologies


def test_every_listed_topology_has_its_chip() -> None:
    for chip, shapes in TPU_SHAPES.items():
        assert all(chip_name(f'{chip}:{shape}') == chip for shape in shapes)
    assert chip_name('h200:16') == 'h200'
    assert set(TPU_SHAPES) <= set(CHIPS)


@pytest.mark.parametrize('name', ['v5e:8x9', 'v5e', 'v7x:2x2x2', 'h100:', 'h100:0', 'h100:2x4', 'nothing:8'])
def test_unknown_topologies_are_told_with_the_known_ones(name: str) -> None:
    with pytest.raises(UserError) as error:
        chip_name(name)
    assert str(error.value).startswith(f'--topology={name}: must be one of v4:{{2x2x1, ')
    assert 'v5p:{' in str(error.value)
    assert 'h100:N' in str(error.value)
    assert '\n' not in str(error.value)


def test_chips_by_jax_s_names() -> None:
    assert chip_of('TPU v5 lite') is CHIPS['v5e']
    assert chip_of('cpu') is None


# The command


@pytest.mark.slow
def test_plan_and_bench_here(tmp_path: Path) -> None:
    (tmp_path / 'config.py').write_text(CONFIG)
    out = finish(start('plan', f'--config={tmp_path}/config.py', '--here', f'--json={tmp_path}/plan.json'))
    assert out.status == 0, out.text
    figures = json.loads((tmp_path / 'plan.json').read_text())
    assert [c['passes'] for c in figures['costs']] == [1, 2, 0]
    assert all(c['peak'] > c['parameters'] + c['optimizer'] for c in figures['costs'])
    assert figures['costs'][0]['parameters'] == 4 * sum(
        [128 * 16, 16 * 4, 2 * 8, 2 * 16 * 16, 2 * 16 * 8, 3 * 16 * 32, 16 * 2, 16 + 16, 2 * 16 * 16]
    ), 'embedding; norms; QK norms; q, o; k, v; MLP; head gates; input and output norms; fusion'
    out = finish(start('bench', f'--config={tmp_path}/config.py', '--rounds=2', f'--json={tmp_path}/bench.json'))
    assert out.status == 0, out.text
    timings = json.loads((tmp_path / 'bench.json').read_text())['timings']
    assert [t['passes'] for t in timings] == [1, 2, 0]
    assert timings[2]['seconds'] == pytest.approx(0.6 * timings[0]['seconds'] + 0.4 * timings[1]['seconds'])
    for t in timings:
        assert t['tokens_per_second'] == pytest.approx(12 * 8 / t['seconds'])


@pytest.mark.parametrize(
    ('arguments', 'told'),
    [
        (('plan', '--topology=v5e:3x3'), '--topology=v5e:3x3: must be one of'),
        (('plan', '--topology=v5e:2x4', '--config.mesh.tensor=3'), 'needs a multiple of 3 devices, but there are 8'),
        (('plan', '--here', '--tries=0'), '--tries=0: must be at least 1'),
        (('plan',), 'one of the arguments --topology --here is required'),
        (
            ('plan', '--here', '--json=/nowhere/x.json'),
            '--json=/nowhere/x.json: must be a file in a folder that exists',
        ),
        (('bench', '--rounds=0'), '--rounds=0: must be at least 1'),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    if 'v5e:2x4' in str(arguments) and not importlib.util.find_spec('libtpu'):
        pytest.skip("needs libtpu: pip install -e '.[plan]'")
    (tmp_path / 'config.py').write_text(CONFIG)
    result = finish(start(arguments[0], f'--config={tmp_path}/config.py', *arguments[1:]))
    assert result.status == 2, result.text
    assert told in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec('libtpu'), reason="needs libtpu: pip install -e '.[plan]'")
def test_a_tpu_s_program_moves_what_is_counted_on_paper(tmp_path: Path) -> None:
    """The 1B model's widths on v5e:2x4, four layers: within 1.2 of the paper, no whole table gathered, and it fits."""
    command = [
        sys.executable, '-m', 'fbt_jax', 'plan', f'--config={ROOT}/configs/fbt_1b.py', '--topology=v5e:2x4',
        '--config.data.batch_size=4', '--config.mesh.context=2', '--config.model.num_layers=6',
        '--config.passes.phases=((0,(0.0,1.0)),)', f'--json={tmp_path}/plan.json',
    ]  # fmt: skip
    done = subprocess.run(command, env=os.environ | {'JAX_PLATFORMS': 'cpu'}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (cost,) = json.loads((tmp_path / 'plan.json').read_text())['costs']
    assert cost['fits']
    assert 1 / 1.2 < cost['program_over_paper'] < 1.2
    assert cost['largest_all_gather'] < 100_352 * 1536 / 4
    assert cost['optimizer_flops'] < 0.1 * cost['model_flops']
