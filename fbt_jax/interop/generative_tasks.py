"""Generates and judges the answers to a task's items, in each mode and at each temperature.

A sample draws by (seed, task, item, sample) alone, so that neither the batch size nor the number of processes, nor
where a killed evaluation went on, changes it; modes and temperatures draw the same noise. Process 0 judges, in threads
where programs are run: little work beside the decoding, and one place that writes.
"""

import hashlib
import itertools
import json
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from fbt_jax.errors import UserError
from fbt_jax.evaluation.answers import require_math_verify
from fbt_jax.evaluation.sandbox import end_all, require_sandbox
from fbt_jax.evaluation.task_items import TASKS, Item, Items, Task, Verdict, read_items
from fbt_jax.evaluation.task_scores import generative_scores
from fbt_jax.inference.decode import cast
from fbt_jax.inference.generate import MOST_PROMPTS, generate
from fbt_jax.interop.task_records import Records, require_settings
from fbt_jax.interop.task_settings import Settings
from fbt_jax.model.transformer import compute_dtype
from fbt_jax.training import processes
from fbt_jax.training.run_folder import Run, spread

_calls = itertools.count()


class Asked(NamedTuple):
    """One sample of one item."""

    item: Item
    sample: int
    ids: list[int]  # of the prompt


class Planned(NamedTuple):
    """A task of which all has been looked at that can be before it takes long."""

    name: str
    read: Items
    names: list[str]  # of the items that count
    asked: list[Asked]
    max_tokens: int


def plan_generative(run: Run, name: str, settings: Settings) -> Planned:
    """UserError where no prompt fits or nothing can judge the answers."""
    task, read = TASKS[name], read_items(name, settings.files, settings.shots)
    max_tokens = settings.max_tokens or task.max_tokens
    items = read.items[: settings.limit]
    asked = _fitting(run, name, items, max_tokens, settings.samples)

    processes.on_primary(require_sandbox if task.runs_programs else require_math_verify)
    return Planned(name, read, [item.name for item in items], asked, max_tokens)


def note_generative(planned: Planned, settings: Settings, out: Path, made_by: dict[str, Any]) -> None:
    """UserError where there are records of the task made otherwise."""
    read = planned.read
    own: dict[str, Any] = {'max_tokens': planned.max_tokens, 'seed': settings.seed, 'shots': read.shots}
    own |= {'items': hashlib.sha256(repr(read.items).encode()).hexdigest()[:16]}
    require_settings(out, planned.name, made_by | own, fused_passes=settings.noted_fused_passes)


def evaluate_generative(run: Run, planned: Planned, settings: Settings, out: Path) -> dict[str, Any]:
    """Does what is missing of a task and returns its scores; {} on all processes but the first."""
    name, read, names, asked, max_tokens = planned
    run, mesh = spread(run, split_rows=False)
    found: dict[str, dict[float, list[dict[str, Any]]]] = {}
    with jax.set_mesh(mesh):
        run = run._replace(params=cast(run.params, dtype=compute_dtype(run.model.config)))
        for mode, temperature in itertools.product(settings.modes or (), settings.temperatures):
            options = {'mode': mode, 'temperature': temperature, 'max_tokens': max_tokens, 'seed': settings.seed}
            options |= {'fused_passes': settings.fused_passes or 1, 'stop': TASKS[name].stop}
            records = Records(out, name, mode, temperature or None)
            _do_missing(run, name, asked, options, records, settings.batch_size)
            if processes.is_primary():
                there = records.read()
                chosen = [there[a.item.name, a.sample] for a in asked]
                found.setdefault(mode, {})[temperature] = chosen
    if not processes.is_primary():
        return {}
    about = {'source': read.source, 'shots': read.shots, 'items': len(names), 'samples': settings.samples}
    about |= {'too_long': len(names) - len(asked) // settings.samples, 'max_tokens': max_tokens}
    return about | generative_scores(found, names, settings.samples)


def _fitting(run: Run, name: str, items: Sequence[Item], max_tokens: int, samples: int) -> list[Asked]:
    """Samples of the items whose prompts leave room for the answer; the others count as wrong, in all modes alike."""
    tokenizer: Any = run.tokenizer
    encoded = [[tokenizer.bos_id, *ids.tolist()] for ids in tokenizer.encode_batch([item.prompt for item in items])]
    room = run.config.data.seq_len - max_tokens
    asked = [
        Asked(item, sample, ids)
        for item, ids in zip(items, encoded, strict=True)
        if len(ids) <= room
        for sample in range(samples)
    ]
    if not asked:
        raise UserError(
            f'{name}: its shortest prompt of {min(map(len, encoded))} tokens and --max-tokens={max_tokens} are more '
            f'than the trained context of {run.config.data.seq_len}: take fewer, or fewer --shots'
        )
    return asked


def _do_missing(
    run: Run, name: str, asked: list[Asked], options: dict[str, Any], records: Records, batch_size: int
) -> None:
    """Generates and judges what has no record yet, the longest prompts first."""
    there = records.read() if processes.is_primary() else {}
    missing = [n for n, a in enumerate(asked) if (a.item.name, a.sample) not in there]
    missing = json.loads(processes.from_primary(json.dumps(missing)))
    waiting = sorted((asked[n] for n in missing), key=lambda a: -len(a.ids))
    label = f'{name} {options["mode"]}' + (f' {options["temperature"]:g}' if options['temperature'] else '')
    bar = tqdm(total=len(waiting), desc=label, disable=not processes.is_primary() or not waiting)
    for batch in _batches(waiting, batch_size):
        processes.meet(f'task batch {next(_calls)}')  # while process 0 judges, the others wait here
        numbers = [_noise_number(name, a) for a in batch]
        made = generate(run, [a.ids for a in batch], numbers=numbers, **options)
        if processes.is_primary():
            verdicts = _judge(TASKS[name], batch, made.texts)
            rows = zip(batch, made.texts, made.tokens, made.finished, verdicts, strict=True)
            records.add(_record(name, options, *row) for row in rows)
        bar.update(len(batch))
    bar.close()


def _batches(waiting: list[Asked], size: int) -> Iterator[list[Asked]]:
    for start in range(0, len(waiting), size):
        yield waiting[start : start + size]


def _noise_number(name: str, asked: Asked) -> int:
    return zlib.crc32(json.dumps([name, asked.item.name, asked.sample]).encode()) % MOST_PROMPTS


def _judge(task: Task, batch: list[Asked], texts: list[str]) -> list[Verdict]:
    expected = [a.item.expected for a in batch]
    if not task.runs_programs:
        return [task.judge(text, e) for text, e in zip(texts, expected, strict=True)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        verdicts = [pool.submit(task.judge, text, e) for text, e in zip(texts, expected, strict=True)]
        try:
            return [verdict.result() for verdict in verdicts]
        except BaseException:  # Ctrl-C: the pool would wait for programs that may take half a minute
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(verdict.done() for verdict in verdicts):
                end_all()
                time.sleep(0.05)
            raise


def _record(
    name: str,
    options: dict[str, Any],
    asked: Asked,
    text: str,
    tokens: list[int],
    finished: str,
    verdict: Verdict,
) -> dict[str, Any]:
    return {
        'task': name,
        'mode': options['mode'],
        'temperature': options['temperature'],
        'item': asked.item.name,
        'sample': asked.sample,
        'seed': options['seed'],
        'prompt': asked.item.prompt,
        'output': text,
        'tokens': len(tokens),
        'finished': finished,
        **verdict._asdict(),
    }
