"""`fbt compare` on runs whose losses follow a power law: factors in closed form, intervals, refusals, the command."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fbt_jax.cli import main
from fbt_jax.config import Config, to_dict
from fbt_jax.config_model import ModelConfig
from fbt_jax.errors import UserError
from fbt_jax.training import comparison
from fbt_jax.training.comparison import Bound, Group, compare, factors, first_reach, read_curve
from fbt_jax.training.flops import train_flops
from fbt_jax.training.metrics import train_row, validation_row

TOKENS = 1000  # a step
SMALL = {
    'width': 32,
    'num_layers': 2,
    'num_heads': 2,
    'num_kv_heads': 1,
    'mlp_width': 64,
    'vocab_size': 259,
    'window': 0,
}


def power_law(tokens: float) -> float:
    return 2 + 50 * tokens**-0.3


def make_run(
    workdir: Path,
    *,
    steps: int,
    loss: Callable[[float], list[float]],
    drawn: Callable[[int], int] = lambda step: 1,
    log_every: int = 1,
    eval_every: int = 1,
    bytes_per_token: float | None = 1.0,
    fingerprint: str = 'held out',
    **changes: Any,
) -> str:
    """A run's folder: `loss` gives the losses by pass at so many tokens, `drawn` the passes of each step."""
    config = to_dict(Config(model=ModelConfig(**SMALL)))
    config['training']['steps'] = steps
    config['data'] |= {'source': 'austen', 'tokenizer': 'bytes', 'seq_len': 64, 'batch_size': 4}
    for key, value in changes.items():
        section, _, name = key.rpartition('__')
        (config[section] if section else config)[name] = value
    if config['model']['fusion'] == 'none':
        config['passes']['phases'] = [[0, [1.0]]]
    workdir.mkdir()
    entry = {'documents': 7, 'tokens': 10_000, 'fingerprint': fingerprint}
    record = {'config': config, 'data_fingerprint': f'train {fingerprint}', 'data': {'validation': entry}}
    (workdir / 'config.json').write_text(json.dumps(record))
    rows, token_passes = [], 0
    for step in range(1, steps + 1):
        token_passes += TOKENS * drawn(step)
        if step % log_every == 0 or step == steps:
            counts = {'tokens': step * TOKENS, 'token_passes': token_passes}
            speed = {'grad_norm': 1.0, 'learning_rate': 0.1, 'tokens_per_second': 1.0, 'step_seconds': 1.0}
            rows.append(train_row(step=step, loss=5.0, pass_losses=[5.0] * drawn(step), **counts, **speed))
        if step % eval_every == 0 or step == steps:
            losses = loss(step * TOKENS)
            norms = [1.0] * (len(losses) - 1)
            rows.append(
                validation_row(step=step, pass_losses=losses, update_norms=norms, bytes_per_token=bytes_per_token)
            )
    finite = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()} for row in rows]
    (workdir / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in finite))
    return str(workdir)


@pytest.fixture
def baseline(tmp_path: Path) -> str:
    return make_run(tmp_path / 'baseline', steps=40, loss=lambda n: [power_law(n)], model__fusion='none')


def flops_per_token(passes: int) -> float:
    return train_flops(ModelConfig(**SMALL), seq_len=64, passes=passes)


def test_the_factor_of_a_known_power_law(tmp_path: Path, baseline: str) -> None:
    """The run is the baseline at 1.5 times its tokens after one pass, at 1.25 times after two; it trains with two."""
    losses = lambda n: [power_law(1.5 * n), power_law(1.25 * n)]  # noqa: E731
    run = make_run(tmp_path / 'run', steps=20, loss=losses, drawn=lambda step: 2)
    result = compare([baseline, run])
    assert result.unit == 'nats per token'
    plain, fed = result.factors[0]
    assert (plain.passes, plain.baseline_passes, fed.passes, fed.baseline_passes) == (1, 1, 2, 1)
    costs = flops_per_token(2) / flops_per_token(1)
    for found, factor in ((plain, 1.5), (fed, 1.25)):
        values = [by_axis.value.value for by_axis in found.factor_A]
        assert values == pytest.approx([factor, factor / 2, factor / costs], rel=1e-5)
        assert all(by_axis.value.sign == '' and by_axis.low is None for by_axis in found.factor_A)
    assert any(f'no interval, for there is but one seed of {baseline} and of {run}' in note for note in result.notes)
    assert any('has not decayed' in note for note in result.notes)


def test_passes_that_no_step_has_trained_are_not_compared(tmp_path: Path) -> None:
    """Fusion left on, one pass in all steps: its later passes are noise, the first stands against all of the run's."""
    idle = make_run(tmp_path / 'idle', steps=40, loss=lambda n: [power_law(n), 9.0, 9.0])
    losses = lambda n: [power_law(1.5 * n), power_law(1.25 * n), power_law(1.25 * n), power_law(n)]  # noqa: E731
    run = make_run(tmp_path / 'run', steps=20, loss=losses, drawn=lambda step: 2)
    result = compare([idle, run])
    assert [len(group.loss_SKN[0]) for group in result.groups] == [1, 4]
    assert [(entry.passes, entry.baseline_passes) for entry in result.factors[0]] == [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert [entry.factor_A[0].value.value for entry in result.factors[0]] == pytest.approx([1.5, 1.25, 1.25, 1.0])
    assert f'{idle} is compared by its first pass: no step has trained those after it' in result.notes
    assert not any(note.startswith(run) and 'first pass' in note for note in result.notes)
    back = compare([run, idle])
    assert [(entry.passes, entry.baseline_passes) for entry in back.factors[0]] == [(1, 1)]
    early = make_run(tmp_path / 'early', steps=20, loss=losses, seed=1)  # of two seeds one has trained no feedback
    assert [len(group.loss_SKN[0]) for group in compare([idle, run, early]).groups] == [1, 1]


def test_a_later_pass_of_the_baseline_counts_from_where_feedback_is_trained(tmp_path: Path) -> None:
    """Untrained it is at 5.2 from the start; trained from step 11 on it is the power law, which is at 5.07 there."""
    losses = lambda n: [power_law(n), 5.2 if n <= 10_000 else power_law(n)]  # noqa: E731
    late = make_run(tmp_path / 'late', steps=40, loss=losses, drawn=lambda step: 1 + (step > 10))
    run = make_run(tmp_path / 'run', steps=5, loss=lambda n: [5.3, 5.3], drawn=lambda step: 2)
    first, second = compare([late, run]).factors[0]
    assert first.factor_A[0].value.value == pytest.approx((3.3 / 50) ** (-1 / 0.3) / 5000, rel=1e-2)
    assert second.factor_A[0].value == Bound(11 / 5, '<')


def test_feedback_that_the_origin_has_trained_counts(tmp_path: Path) -> None:
    two = {'steps': 4, 'loss': lambda n: [3.0, 2.5]}
    fed = make_run(tmp_path / 'fed', drawn=lambda step: 2, **two)
    idle = make_run(tmp_path / 'idle', **two)
    for name, origin, passes in (('a', fed, 2), ('b', idle, 1), ('c', str(tmp_path / 'gone'), 1)):
        run = make_run(tmp_path / name, init__from=origin, **two)
        further = make_run(tmp_path / f'{name}{name}', init__from=run, **two)
        assert [len(group.loss_SKN[0]) for group in compare([run, further]).groups] == [passes] * 2


def test_nothing_is_extrapolated(tmp_path: Path, baseline: str) -> None:
    better = make_run(tmp_path / 'better', steps=20, loss=lambda n: [power_law(3 * n)])
    worse = make_run(tmp_path / 'worse', steps=20, loss=lambda n: [9.0], model__mlp_width=32)
    result = compare([baseline, better, worse])
    assert [of_run[0].factor_A[0].value for of_run in result.factors] == [Bound(2.0, '>'), Bound(0.05, '<')]
    assert not any('has not decayed' in note for note in result.notes)  # no factor was read on the way


def test_where_a_curve_first_reaches_a_loss() -> None:
    x, loss = np.array([[1.0, 10.0, 100.0, 1000.0]]), np.array([[5.0, 3.0, 4.0, 1.0]])
    reach = lambda target: first_reach(x, loss, np.array([target]))[0]  # noqa: E731
    assert reach(4.0) == pytest.approx(10**0.5)
    assert reach(3.0) == pytest.approx(10.0)
    assert reach(2.0) == pytest.approx(10**2.5)  # from the best so far, 3.0, not from 4.0
    assert (reach(5.0), reach(0.9)) == (0.0, np.inf)


def test_flops_are_the_sum_over_steps_whatever_is_logged(tmp_path: Path) -> None:
    drawn = lambda step: 1 + step % 3  # noqa: E731
    common = {'steps': 40, 'loss': lambda n: [power_law(n)], 'drawn': drawn, 'eval_every': 8}
    direct = [sum(TOKENS * flops_per_token(drawn(s)) for s in range(1, end + 1)) for end in range(8, 41, 8)]
    for log_every in (1, 4, 8):
        curve = read_curve(make_run(tmp_path / f'{log_every}', log_every=log_every, **common), comparison.NATS)
        assert curve.steps_N.tolist() == [8, 16, 24, 32, 40]
        assert curve.axes_AN[0].tolist() == [8000, 16000, 24000, 32000, 40000]
        assert curve.axes_AN[2] == pytest.approx(direct, rel=1e-12)
        assert curve.notes == ()
    between = read_curve(make_run(tmp_path / 'between', log_every=5, **common), comparison.NATS)
    assert 'between: 4 of 5 evaluations lie between two train rows, interpolated' in between.notes[0]
    assert between.axes_AN[0].tolist() == [8000, 16000, 24000, 32000, 40000]
    assert between.axes_AN[2] == pytest.approx(direct, rel=0.1)
    assert between.axes_AN[2, -1] == pytest.approx(direct[-1], rel=1e-12)


def noisy_group(rng: np.random.Generator, *, steps: int, ahead: float, seeds: range) -> Group:
    tokens = TOKENS * np.arange(1, steps + 1)
    axes_SAN = np.broadcast_to(tokens, (len(seeds), 3, steps))
    loss_SKN = power_law(ahead * tokens) + rng.normal(0, 0.05, (len(seeds), 1, 1))
    names = tuple(f'{seed}' for seed in seeds)
    return Group('group', 1, names, tuple(seeds), np.arange(1, steps + 1), axes_SAN, loss_SKN, axes_SAN[:, 0] > 0)


@pytest.mark.parametrize('same_seeds', [True, False])
def test_the_interval_covers_the_true_factor(same_seeds: bool) -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(40):
        baseline = noisy_group(rng, steps=50, ahead=1.0, seeds=range(8))
        run = noisy_group(rng, steps=20, ahead=1.5, seeds=range(8) if same_seeds else range(10, 18))
        factor = factors(run, baseline)[0].factor_A[0]
        assert factor.low is not None and factor.high is not None
        assert factor.low.value < factor.value.value < factor.high.value
        covered += factor.low.value <= 1.5 <= factor.high.value
    assert covered >= 32  # 95 % of 40 is 38, and eight seeds are few


def test_an_interval_may_end_where_the_baseline_does() -> None:
    rng = np.random.default_rng(2)
    baseline = noisy_group(rng, steps=31, ahead=1.0, seeds=range(3))
    factor = factors(noisy_group(rng, steps=20, ahead=1.5, seeds=range(5, 8)), baseline)[0].factor_A[0]
    assert factor.high == Bound(pytest.approx(31 / 20), '>')


def test_warm_starts_are_one_group_where_their_origins_are(tmp_path: Path) -> None:
    plain = [make_run(tmp_path / f'p{s}', steps=4, loss=lambda n: [3.0], seed=s, model__fusion='none') for s in (0, 1)]
    other = make_run(tmp_path / 'q', steps=4, loss=lambda n: [3.0], model__fusion='none', optimizer__adam_b1=0.5)
    starts = [(plain[0], 0), (plain[1], 1), (other, 1), (str(tmp_path / 'gone'), 1)]
    warm = [
        make_run(tmp_path / f'w{i}', steps=4, loss=lambda n: [2.5, 2.4], seed=s, init__from=str(origin))
        for i, (origin, s) in enumerate(starts)
    ]
    found = compare([*plain, *warm])
    assert [len(group.seeds) for group in found.groups] == [2, 2, 1, 1]


def test_runs_that_differ_in_their_seed_are_one_group(tmp_path: Path) -> None:
    def run(name: str, seed: int, fusion: str, shift: float) -> str:
        loss = lambda n: [power_law(n) + shift]  # noqa: E731
        return make_run(tmp_path / name, steps=20, loss=loss, seed=seed, model__fusion=fusion)

    a0, b0 = run('a0', 0, 'none', 0.0), run('b0', 0, 'gated', -0.1)
    a1, b1 = run('a1', 1, 'none', 0.2), run('b1', 1, 'gated', 0.1)
    result = compare([a0, b1, a1, b0])
    assert [group.name for group in result.groups] == [a0, b1]
    assert [group.workdirs for group in result.groups] == [(a0, a1), (b0, b1)]
    assert result.groups[0].loss_SKN[:, 0, -1].mean() == pytest.approx(power_law(20_000) + 0.1, rel=1e-6)
    assert any('95% intervals, bootstrap over pairs of the same seed' in note for note in result.notes)
    told = ': 4 of 5 evaluations lie between two train rows, interpolated'
    c0, c1 = (
        make_run(tmp_path / f'c{s}', steps=20, loss=lambda n: [3.0], seed=s, log_every=10, eval_every=4) for s in (0, 1)
    )
    assert f'{c0}, {c1}{told}' in compare([c0, c1]).notes
    assert compare([a0, a1]).factors == []
    with pytest.raises(UserError, match='are the same run twice: one config, seed 0'):
        compare([a0, b0, a0])


def test_files_of_a_run_are_not_written_over(tmp_path: Path, baseline: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / 'run', steps=20, loss=lambda n: [power_law(n)])
    (tmp_path / 'run' / 'checkpoints').mkdir()
    before = (tmp_path / 'run' / 'config.json').read_bytes()
    for name in ('config.json', 'metrics.jsonl', 'checkpoints/a.json'):
        assert main(['compare', baseline, run, f'--json={run}/{name}']) == 2
        assert 'is a file of the run itself' in capsys.readouterr().err
    assert (tmp_path / 'run' / 'config.json').read_bytes() == before
    assert main(['compare', baseline, run, f'--json={run}/figures.json']) == 0


def test_a_run_that_has_not_ended_is_named(tmp_path: Path, baseline: str) -> None:
    run = make_run(tmp_path / 'run', steps=20, loss=lambda n: [power_law(n)])
    lines = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines(keepends=True)
    (tmp_path / 'run' / 'metrics.jsonl').write_text(''.join(lines[:30]))  # two a step
    notes = compare([baseline, run]).notes
    assert f'{run} has not ended: its last evaluation is at step 15 of 20' in notes


def test_a_loss_that_was_not_finite(tmp_path: Path, baseline: str) -> None:
    run = make_run(tmp_path / 'run', steps=20, loss=lambda n: [power_law(n), math.nan], drawn=lambda step: 2)
    result = compare([baseline, run])
    assert [entry.passes for entry in result.factors[0]] == [1]
    assert any('no factor after pass 2: the last loss was not finite' in note for note in result.notes)


def test_other_tokenizers_are_compared_by_bytes(tmp_path: Path, baseline: str) -> None:
    other = {'fingerprint': 'other ids', 'data__tokenizer': 'bpe', 'model__vocab_size': 2048}
    run = make_run(tmp_path / 'run', steps=20, loss=lambda n: [2 * power_law(1.5 * n)], bytes_per_token=2.0, **other)
    result = compare([baseline, run])
    assert result.unit == 'bits per byte'
    assert result.factors[0][0].factor_A[0].value.value == pytest.approx(1.5, rel=1e-5)
    assert any('has another tokenizer' in note for note in result.notes)
    bare = make_run(tmp_path / 'bare', steps=20, loss=lambda n: [3.0], bytes_per_token=None, **other)
    with pytest.raises(UserError, match='bare: no bits per byte in the validation rows'):
        compare([baseline, bare])


def test_refusals(tmp_path: Path, baseline: str, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*workdirs: str) -> str:
        assert main(['compare', *workdirs]) == 2
        out, err = capsys.readouterr()
        assert out == '' and err.startswith('fbt compare: ') and err.count('\n') == 1
        return err

    flat = {'steps': 4, 'loss': lambda n: [3.0]}
    assert 'needs two runs or more' in refused(baseline)
    assert 'no/run: no run here (no config.json)' in refused(baseline, 'no/run')
    rows = make_run(tmp_path / 'rows', training__eval_rows=5, **flat)
    assert 'different validation rows: training.eval_rows = ' in refused(baseline, rows)
    other = make_run(tmp_path / 'other', fingerprint='other', **flat)
    record = json.loads(Path(other, 'config.json').read_text())
    record['data']['validation']['documents'] = 8
    Path(other, 'config.json').write_text(json.dumps(record))
    assert 'have different validation data' in refused(baseline, other)
    early = make_run(tmp_path / 'early', seed=5, **flat)
    metrics = Path(early, 'metrics.jsonl')
    train = [line for line in metrics.read_text().splitlines(keepends=True) if '"train"' in line]
    metrics.write_text(''.join(train))
    assert 'early: no validation rows in metrics.jsonl yet' in refused(baseline, early)
    metrics.write_text('no row\n')
    assert 'line 1 is not a row of metrics' in refused(baseline, early)
    metrics.unlink()
    assert 'early: no metrics of a run here' in refused(baseline, early)


def test_the_command(tmp_path: Path, baseline: str, capsys: pytest.CaptureFixture[str]) -> None:
    losses = lambda n: [power_law(1.5 * n), power_law(1.25 * n)]  # noqa: E731
    run = make_run(tmp_path / 'run', steps=20, loss=losses, drawn=lambda step: 2)
    files = [f'--json={tmp_path}/a.json', f'--plot={tmp_path}/a.png']
    assert main(['compare', baseline, run, *files]) == 0
    tables = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split('|')[1:-1]] for line in tables.splitlines()]
    assert [run, '0', '20', '20,000', '40,000'] == next(line for line in lines if line[:1] == [run])[:5]
    assert [run, '2', f'{power_law(25_000):.4f}', '1.25', '0.625'] in [line[:5] for line in lines]
    figures = json.loads((tmp_path / 'a.json').read_text())
    assert figures['factors'][0]['tokens']['value'] == {'value': pytest.approx(1.5, rel=1e-5), 'sign': ''}
    assert figures['factors'][0]['tokens']['low'] is None
    assert len(figures['runs'][1]['seeds'][0]['loss_pass_2']) == 20
    assert (tmp_path / 'a.png').read_bytes().startswith(b'\x89PNG')
