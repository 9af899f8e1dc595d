"""The scheduled mixture of pass counts: phases, the draw and what a run costs, against tables written out here.

Shapes: N steps. A `table` is ((first step, probabilities of 1..K passes), ...), the plain statement of a schedule.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbt_jax.config import PassesConfig
from fbt_jax.config_passes import PHASE_PRESETS
from fbt_jax.errors import UserError
from fbt_jax.training.pass_schedule import draw_branch, expected_passes

Table = tuple[tuple[int, tuple[float, ...]], ...]

STEPS = 20_000
# method.md section 3, at 20,000 steps.
PRESETS: dict[str, Table] = {
    'one_pass': ((0, (1.0,)),),
    'progressive_75_22_3': ((0, (1.0,)), (15_000, (0.0, 1.0)), (19_400, (0.0, 0.0, 1.0))),
    'late_75_22_3': ((0, (1.0,)), (10_000, (0.5, 0.44, 0.06))),
    'constant_75_22_3': ((0, (0.75, 0.22, 0.03)),),
    'progressive_75_0_25': ((0, (1.0,)), (15_000, (0.0, 0.0, 1.0))),
    'late_75_0_25': ((0, (1.0,)), (10_000, (0.5, 0.0, 0.5))),
    'constant_75_0_25': ((0, (0.75, 0.0, 0.25)),),
    'progressive_75_25_0': ((0, (1.0,)), (15_000, (0.0, 1.0))),
    'late_75_25_0': ((0, (1.0,)), (10_000, (0.5, 0.5))),
    'constant_75_25_0': ((0, (0.75, 0.25)),),
}
EXPECTED = {'75_22_3': 1.28, '75_0_25': 1.5, '75_25_0': 1.25}  # token-passes per token of the three runs


def draws(passes: PassesConfig, *, total_steps: int, num_steps: int | None = None, seed: int = 0) -> np.ndarray:
    """(N,) pass counts of the steps 0..N-1, in one compiled call."""
    return _draws(passes, total_steps, num_steps or total_steps, seed, jax.config.jax_enable_x64)


@functools.cache
def _draws(passes: PassesConfig, total_steps: int, num_steps: int, seed: int, x64: bool) -> np.ndarray:
    del x64  # only a part of the cache's key

    def branch(step: jax.Array) -> jax.Array:
        return draw_branch(passes, seed=seed, step=step, total_steps=total_steps)

    compiled = jax.jit(jax.vmap(branch), compiler_options={'xla_backend_optimization_level': 0})
    branch_N = compiled(jnp.arange(num_steps, dtype=jnp.int32))
    return np.array(passes.pass_counts)[np.asarray(branch_N)]


def probabilities(table: Table, step: int) -> tuple[float, ...]:
    return [p for start, p in table if start <= step][-1]


def test_presets_are_the_ones_listed_here() -> None:
    assert PRESETS.keys() == PHASE_PRESETS.keys()


@pytest.mark.parametrize('name', PRESETS)
def test_preset_phases_and_pass_counts(name: str) -> None:
    passes = PassesConfig(phases=name)
    table = PRESETS[name]
    possible = {k for _, p in table for k, p_k in enumerate(p, start=1) if p_k > 0}
    assert passes.pass_counts == tuple(sorted(possible))
    resolved = passes.phase_steps(STEPS)
    assert [start for start, _ in resolved] == [start for start, _ in table]
    for (_, over_counts), (_, p) in zip(resolved, table, strict=True):
        by_count = dict(zip(passes.pass_counts, over_counts, strict=True))
        assert {k: p_k for k, p_k in by_count.items() if p_k > 0} == {k: q for k, q in enumerate(p, 1) if q > 0}


@pytest.mark.parametrize(
    ('phases', 'counts'),
    [
        (((0, (0.0, 1.0)),), (2,)),
        (((0, (0.7, 0.3, 0.0)),), (1, 2)),
        (((0, (0.0, 0.0, 0.5, 0.5)),), (3, 4)),
        (((0, (1.0,)), (0.5, (0.5, 0.0, 0.5))), (1, 3)),
        (((0, (0.5, 0.0, 0.0, 0.0, 0.5)), (0.5, (0.0, 1.0))), (1, 2, 5)),
    ],
)
def test_only_pass_counts_of_nonzero_probability_exist(phases: Table, counts: tuple[int, ...]) -> None:
    passes = PassesConfig(phases=phases)
    assert passes.pass_counts == counts
    assert passes.max_passes == counts[-1]
    assert set(draws(passes, total_steps=200)) == set(counts)


def test_fractions_and_steps_resolve_to_first_steps() -> None:
    phases = ((0.0, (1.0,)), (30, (0.0, 1.0)), (0.5, (0.5, 0.5)), (0.97, (0.0, 0.0, 1.0)))
    passes = PassesConfig(phases=phases)
    assert [start for start, _ in passes.phase_steps(100)] == [0, 30, 50, 97]
    assert [start for start, _ in passes.phase_steps(333_000)] == [0, 30, 166_500, 323_010]
    with pytest.raises(UserError, match='starts must not go down'):
        passes.phase_steps(50)  # the half is step 25, before step 30


def test_a_phase_holds_from_its_first_step_to_the_step_before_the_next() -> None:
    passes = PassesConfig(phases=((0, (1.0,)), (3, (0.0, 1.0)), (0.5, (0.0, 0.0, 1.0)), (0.9, (0.0, 0.0, 0.0, 1.0))))
    assert draws(passes, total_steps=10).tolist() == [1, 1, 1, 2, 2, 3, 3, 3, 3, 4]


def test_of_two_phases_that_begin_together_the_later_wins() -> None:
    passes = PassesConfig(phases=((0, (1.0,)), (2, (0.0, 1.0)), (2, (0.0, 0.0, 1.0))))
    assert draws(passes, total_steps=5).tolist() == [1, 1, 3, 3, 3]
    assert expected_passes(passes, 5) == pytest.approx((2 * 1 + 3 * 3) / 5)


def test_a_phase_beyond_the_end_is_never_reached() -> None:
    passes = PassesConfig(phases=((0, (0.5, 0.5)), (60, (0.0, 0.0, 1.0))))
    drawn = draws(passes, total_steps=50, num_steps=62)
    assert set(drawn[:60]) == {1, 2}
    assert drawn[60:].tolist() == [3, 3]
    assert expected_passes(passes, 50) == pytest.approx(1.5)
    # A run of more steps gets there.
    assert expected_passes(passes, 100) == pytest.approx(0.6 * 1.5 + 0.4 * 3)


def test_the_draw_is_the_same_in_and_outside_jit_and_recomputed_by_hand() -> None:
    """fold_in(fold_in(key(seed), step), purpose 0), whatever computes it."""
    table = ((0, (0.2, 0.3, 0.5)), (40, (0.6, 0.0, 0.4)))
    passes = PassesConfig(phases=table)
    choice = jax.jit(lambda key, p: jax.random.choice(key, 3, p=p))
    jitted = jax.jit(lambda step: draw_branch(passes, seed=7, step=step, total_steps=80))
    by_hand = []
    for step in range(80):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), step), 0)
        by_hand.append(1 + int(choice(key, np.array(probabilities(table, step), np.float32))))
        assert 1 + int(jitted(jnp.int32(step))) == by_hand[-1]
    assert draws(passes, total_steps=80, seed=7).tolist() == by_hand
    for step in (0, 39, 40, 79):
        eager = draw_branch(passes, seed=7, step=jnp.int32(step), total_steps=80)
        assert (eager.dtype, eager.shape, 1 + int(eager)) == (jnp.int32, (), by_hand[step])
    assert draws(passes, total_steps=80, seed=8).tolist() != by_hand


def test_the_draw_does_not_depend_on_double_precision() -> None:
    passes = PassesConfig(phases='constant_75_22_3')
    single = draws(passes, total_steps=2000)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(draws(passes, total_steps=2000), single)


@pytest.mark.parametrize('name', PRESETS)
def test_frequencies_of_every_phase(name: str) -> None:
    """Counts lie within five standard deviations of the binomial; what has probability 0 is never drawn."""
    table = PRESETS[name]
    drawn = draws(PassesConfig(phases=name), total_steps=STEPS)
    ends = [start for start, _ in table[1:]] + [STEPS]
    for (start, p), end in zip(table, ends, strict=True):
        n = end - start
        for k in range(1, 6):
            p_k = p[k - 1] if k <= len(p) else 0.0
            count = int(np.sum(drawn[start:end] == k))
            assert abs(count - n * p_k) <= 5 * (n * p_k * (1 - p_k)) ** 0.5, (start, k, count)


def test_steps_are_independent_of_each_other() -> None:
    drawn = draws(PassesConfig(phases='constant_75_25_0'), total_steps=STEPS)
    other_seed = draws(PassesConfig(phases='constant_75_25_0'), total_steps=STEPS, seed=1)
    bound = 5 * (0.25**2 * (1 - 0.25**2) / STEPS) ** 0.5
    assert abs(np.mean((drawn[1:] == 2) & (drawn[:-1] == 2)) - 0.25**2) < bound
    assert abs(np.mean((drawn == 2) & (other_seed == 2)) - 0.25**2) < bound


@pytest.mark.parametrize(
    'p', [(0.7, 0.3, 0.0), (0.0, 0.7, 0.3), (0.0, 0.0, 1.0, 0.0), (0.1, 0.0, 0.2, 0.0, 0.7), (0.0, 0.0, 0.0, 0.0, 1.0)]
)
def test_a_zero_probability_is_never_drawn(p: tuple[float, ...]) -> None:
    """Also at the ends of the list and where another phase makes all five pass counts exist."""
    passes = PassesConfig(phases=((0, p), (200_000, (0.2, 0.2, 0.2, 0.2, 0.2))))
    assert passes.pass_counts == (1, 2, 3, 4, 5)
    assert set(draws(passes, total_steps=200_000)) == {k for k, p_k in enumerate(p, start=1) if p_k > 0}


def test_any_number_of_passes() -> None:
    p = (0.4, 0.1, 0.2, 0.0, 0.3)
    passes = PassesConfig(phases=((0, p),))
    assert passes.pass_counts == (1, 2, 3, 5)
    drawn = draws(passes, total_steps=STEPS)
    np.testing.assert_allclose([np.mean(drawn == k) for k in range(1, 6)], p, atol=5 * (0.25 / STEPS) ** 0.5)
    assert expected_passes(passes, 17) == pytest.approx(0.4 + 0.2 + 0.6 + 1.5)


@pytest.mark.parametrize('placement', ['progressive', 'late', 'constant'])
@pytest.mark.parametrize('mixture', EXPECTED)
def test_expected_token_passes_of_the_papers_runs(placement: str, mixture: str) -> None:
    passes = PassesConfig(phases=f'{placement}_{mixture}')
    assert expected_passes(passes, 100_000) == pytest.approx(EXPECTED[mixture], rel=1e-12)
    assert np.mean(draws(passes, total_steps=STEPS)) == pytest.approx(EXPECTED[mixture], abs=0.03)


@pytest.mark.parametrize('name', PRESETS)
def test_expected_passes_equal_the_mean_over_the_steps(name: str) -> None:
    """Also where fractions of the run fall between two steps."""
    passes = PassesConfig(phases=name)
    for total_steps in (1, 7, 61):
        table = tuple(
            (round(start * total_steps) if isinstance(start, float) else start, p) for start, p in PHASE_PRESETS[name]
        )
        by_step = [np.dot(p, np.arange(1, len(p) + 1)) for p in (probabilities(table, i) for i in range(total_steps))]
        assert expected_passes(passes, total_steps) == pytest.approx(np.mean(by_step), rel=1e-12)
