"""The `passes.*` keys: how many passes a step makes, over training (method.md section 3). Imports nothing heavy."""

import dataclasses
import difflib
from typing import Any

from fbt_jax.config_phases import first_steps, is_start
from fbt_jax.errors import require

# Phases of the paper's three runs (method.md section 3). Each phase is (start, probabilities of 1..K passes);
# start is a fraction of the run's steps if a float below 1, a step if an int.
Phases = tuple[tuple[float | int, tuple[float, ...]], ...]
PHASE_PRESETS: dict[str, Phases] = {
    'one_pass': ((0, (1.0,)),),
    'progressive_75_22_3': ((0, (1.0,)), (0.75, (0.0, 1.0)), (0.97, (0.0, 0.0, 1.0))),
    'late_75_22_3': ((0, (1.0,)), (0.5, (0.5, 0.44, 0.06))),
    'constant_75_22_3': ((0, (0.75, 0.22, 0.03)),),
    'progressive_75_0_25': ((0, (1.0,)), (0.75, (0.0, 0.0, 1.0))),
    'late_75_0_25': ((0, (1.0,)), (0.5, (0.5, 0.0, 0.5))),
    'constant_75_0_25': ((0, (0.75, 0.0, 0.25)),),
    'progressive_75_25_0': ((0, (1.0,)), (0.75, (0.0, 1.0))),
    'late_75_25_0': ((0, (1.0,)), (0.5, (0.5, 0.5))),
    'constant_75_25_0': ((0, (0.75, 0.25)),),
}


@dataclasses.dataclass(frozen=True)
class PassesConfig:
    """Multi-pass training (method.md section 3). `phases`: a preset's name or ((start, probabilities of 1..K), ...)."""

    phases: str | Phases = 'progressive_75_22_3'
    loss_weight: float = 1.0
    prefix_mixin: bool = True
    jitter: float = 0.02

    def __post_init__(self) -> None:
        if isinstance(self.phases, str):
            near = difflib.get_close_matches(self.phases, PHASE_PRESETS, n=1)
            hint = f'did you mean {near[0]!r}? ' if near else ''
            require(
                self.phases in PHASE_PRESETS,
                'passes.phases',
                self.phases,
                f'{hint}presets are {", ".join(PHASE_PRESETS)}; or give ((start, (p1, p2, ...)), ...)',
            )
            object.__setattr__(self, 'phases', PHASE_PRESETS[self.phases])
        object.__setattr__(self, 'phases', _check_phases(self.phases))
        require(self.loss_weight >= 0, 'passes.loss_weight', self.loss_weight, 'must not be negative')
        require(self.jitter >= 0, 'passes.jitter', self.jitter, 'must not be negative')

    @property
    def pass_counts(self) -> tuple[int, ...]:
        """The pass counts that some phase gives a nonzero probability, ascending: only these are compiled."""
        return tuple(sorted({k for _, p in self._phases for k, p_k in enumerate(p, start=1) if p_k > 0}))

    @property
    def max_passes(self) -> int:
        return self.pass_counts[-1]

    @property
    def _phases(self) -> Phases:
        assert not isinstance(self.phases, str), 'names are replaced by their phases at construction'
        return self.phases

    def phase_steps(self, total_steps: int) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """((first step, 0-based; probabilities over `pass_counts`), ...) for a run of `total_steps`.

        Later phases win where two begin at the same step, and phases that begin past the end are kept (never reached).
        """
        steps = first_steps(self._phases, total_steps, 'passes.phases')
        return tuple(
            (step, tuple(p[k - 1] if k <= len(p) else 0.0 for k in self.pass_counts))
            for step, (_, p) in zip(steps, self._phases, strict=True)
        )


def _check_phases(phases: Any) -> Phases:
    form = 'must be ((start, (p1, p2, ...)), ...), start a fraction below 1 (float) or a step (int)'
    require(isinstance(phases, tuple | list) and len(phases) > 0, 'passes.phases', phases, form)
    checked = []
    for phase in phases:
        require(isinstance(phase, tuple | list) and len(phase) == 2, 'passes.phases', phase, form)
        start, p = phase
        require(isinstance(p, tuple | list) and len(p) > 0, 'passes.phases', phase, form)
        require(
            all(isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= 1 for x in p),
            'passes.phases',
            phase,
            'probabilities must lie in 0..1',
        )
        require(abs(sum(p) - 1) < 1e-6, 'passes.phases', phase, f'probabilities sum to {sum(p):.6g}, must sum to 1')
        require(is_start(start), 'passes.phases', phase, form)
        checked.append((start, tuple(float(x) for x in p)))
    require(checked[0][0] == 0, 'passes.phases', phases, 'the first phase must start at 0')
    return tuple(checked)
