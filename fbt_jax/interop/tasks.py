"""Benchmark tasks with a run, in the three modes: `fbt evaluate --tasks=...` (method.md sections 5 and 7).

Tasks that are answered in text (evaluation/task_items.py) are generated and judged by generative_tasks.py; all others
are lm-evaluation-harness's (harness_tasks.py). Several processes decode together on one mesh, process 0 writes.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fbt_jax.errors import UserError
from fbt_jax.evaluation.task_items import TASKS, read_items
from fbt_jax.files import held
from fbt_jax.inference.decode import MODES
from fbt_jax.interop.generative_tasks import evaluate_generative, note_generative, plan_generative
from fbt_jax.interop.task_settings import Settings, check
from fbt_jax.training import processes
from fbt_jax.training.run_folder import Run, load_run, require_finite


def evaluate_tasks(workdir: str, settings: Settings) -> dict[str, Any]:
    """Does what is missing of all tasks in all modes, and returns the scores; every process must call it alike.

    Raises:
      UserError: no such task, no items, settings that make no sense, no sandbox, records made with other settings.
    """
    check(settings)
    for name in settings.generative:
        read_items(name, settings.files, settings.shots)
    others = [name for name in settings.tasks if name not in TASKS]
    plan = _harness().plan_harness(others, settings) if others else None
    run = require_finite(load_run(workdir, settings.step))
    if run.tokenizer is None:
        raise UserError(f'{workdir}: this model reads no text')
    modes = settings.modes or (MODES if run.trained_feedback else ('standard',))
    if set(modes) != {'standard'} and not run.trained_feedback:
        told = f'--modes={",".join(modes)}'
        raise UserError(f'{told}: {workdir} was trained without feedback; only standard is possible')
    if settings.fused_passes is not None and 'fused' not in modes:
        raise UserError(
            f'--fused-passes={settings.fused_passes}: has no effect: {workdir} was trained without feedback'
        )
    settings = settings._replace(modes=tuple(modes))
    processes.agree({f'--{key}': str(value) for key, value in settings._asdict().items()})
    out = Path(settings.out or Path(workdir) / 'tasks' / f'step{run.step}')
    made_by = {'step': run.step, 'weights': _fingerprint(run)}
    figures: dict[str, Any] = {'workdir': workdir, 'step': run.step, 'out': str(out), 'tasks': {}}
    generative = [plan_generative(run, name, settings) for name in settings.generative]

    def note() -> None:
        for planned in generative:
            note_generative(planned, settings, out, made_by)
        if plan:
            _harness().note_harness(plan, settings, out, made_by)

    with _own_folder(out) if processes.is_primary() else nullcontext():
        processes.on_primary(note)
        for planned in generative:
            figures['tasks'][planned.name] = evaluate_generative(run, planned, settings, out)
        if plan:
            figures['tasks'] |= _harness().evaluate_harness(run, plan, settings, out)
    return figures


def _harness() -> Any:
    """Its module, which takes an extra."""
    try:
        from fbt_jax.interop import harness_tasks
    except ImportError as error:
        raise UserError(f'--tasks: only {", ".join(TASKS)} are there without lm-evaluation-harness: {error}') from None
    return harness_tasks


@contextmanager
def _own_folder(out: Path) -> Iterator[None]:
    """`out`, for this process alone; what was made for it goes again where nothing came into it."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        with held(out, str(out), 'another evaluation writes there'):
            yield
    finally:
        with suppress(OSError):  # it is not empty
            for folder in made:
                folder.rmdir()


def _fingerprint(run: Run) -> str:
    """Of weights spread over all parameters: another training of the same length has others."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(run.params):
        digest.update(np.asarray(leaf.reshape(-1)[:: max(1, leaf.size // 256)]).tobytes())
    return digest.hexdigest()[:16]
