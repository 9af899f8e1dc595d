"""What `fbt evaluate --tasks` may be asked for, and which of it makes no sense together."""

from typing import NamedTuple

from fbt_jax.errors import UserError, require
from fbt_jax.evaluation.task_items import TASKS
from fbt_jax.inference.decode import MODES


class Settings(NamedTuple):
    """None: the task's or the run's default."""

    tasks: tuple[str, ...]
    modes: tuple[str, ...] | None = None
    files: str | None = None
    fused_passes: int | None = None
    samples: int = 1
    temperatures: tuple[float, ...] = (0.0,)
    limit: int | None = None
    max_tokens: int | None = None
    batch_size: int = 8
    shots: int | None = None
    seed: int = 0
    step: int | None = None
    out: str | None = None

    @property
    def generative(self) -> list[str]:
        """Tasks that are generated and judged here; all others are the harness's."""
        return [name for name in self.tasks if name in TASKS]

    @property
    def noted_fused_passes(self) -> int | None:
        """What records of mode fused depend on; None where it is not among the modes."""
        return (self.fused_passes or 1) if 'fused' in (self.modes or ()) else None


def check(settings: Settings) -> None:
    """UserError for what can be known before anything is read."""
    s = settings
    once = len(set(s.tasks)) == len(s.tasks) > 0 and all(s.tasks)
    require(once, '--tasks', ','.join(s.tasks), 'must be names of tasks, each once')
    for flag, folder in (('task-files', s.files), ('out', s.out)):
        require(folder != '', f'--{flag}', folder, 'must be a folder')
    modes = ','.join(s.modes or ())
    fit = s.modes is None or (len(set(s.modes)) == len(s.modes) > 0 and set(s.modes) <= set(MODES))
    require(fit, '--modes', modes, f'must be of {", ".join(MODES)}, each once')
    require(s.fused_passes is None or s.fused_passes >= 1, '--fused-passes', s.fused_passes, 'must be at least 1')
    if s.fused_passes is not None and s.modes is not None and 'fused' not in s.modes:
        raise UserError(f'--fused-passes={s.fused_passes}: has no effect in --modes={modes}')
    for flag, value in (('samples', s.samples), ('batch-size', s.batch_size)):
        require(value >= 1, f'--{flag}', value, 'must be at least 1')
    for flag, limit in (('limit', s.limit), ('max-tokens', s.max_tokens)):
        require(limit is None or limit >= 1, f'--{flag}', limit, 'must be at least 1')
    require(s.shots is None or s.shots >= 0, '--shots', s.shots, 'must not be negative')
    require(0 <= s.seed < 2**31, '--seed', s.seed, 'must lie in 0..2**31 - 1')
    _check_sampling(s)


def _check_sampling(s: Settings) -> None:
    told = ','.join(f'{t:g}' for t in s.temperatures)
    alone = len({f'{t:g}' for t in s.temperatures}) == len(s.temperatures) > 0
    fit = alone and all(t == 0 or 1e-4 <= t <= 1e4 for t in s.temperatures)
    require(fit, '--temperatures', told, 'must be 0 or lie in 1e-4..1e4, each once (to six digits)')
    if s.samples > 1 and 0 in s.temperatures:
        raise UserError(
            f'--samples={s.samples}: at temperature 0 all are the same; give --temperatures=0.3,0.5,0.7, say'
        )
    if s.seed and set(s.temperatures) == {0}:
        raise UserError(f'--seed={s.seed}: has no effect at temperature 0')
    if s.generative:
        return
    sampling = {'samples': s.samples != 1, 'temperatures': s.temperatures != (0.0,), 'max-tokens': bool(s.max_tokens)}
    for flag, given in sampling.items():
        if given:
            raise UserError(f'--{flag}: has no effect on {", ".join(s.tasks)}; only on {", ".join(TASKS)}')
