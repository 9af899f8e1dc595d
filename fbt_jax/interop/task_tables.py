"""The scores of tasks as lines of text, from what `evaluate_tasks` returns."""

from typing import Any

from fbt_jax.evaluation.intervals import FEW
from fbt_jax.training.summary import table


def task_lines(figures: dict[str, Any]) -> list[str]:
    """A table for each task: a row a mode (and temperature), then the modes in pairs."""
    lines = [f'{figures["workdir"]}, step {figures["step"]}; a record of each item in {figures["out"]}']
    for name, task in figures['tasks'].items():
        shots = 'with the prompts they came with' if task['shots'] is None else f'{task["shots"]} shots'
        lines += ['', f'{name}: {task["items"]} items, {shots}, from {task["source"]}']
        if task['items'] < FEW and any(task['scores'].values()):
            lines.append(f'intervals over so few items (< {FEW}) are likely too narrow')
        if task.get('too_long'):
            lines.append(f'{task["too_long"]} of them do not fit the trained context and count as wrong')
        if task.get('cut'):
            lines.append(
                f'{task["cut"]} of them do not fit the trained context: the left ends of their prompts are cut off'
            )
        lines += _generative(task) if 'best_temperature' in task else _harness(task)
        lines += [_pair(pair, task.get('samples', 1)) for pair in task['pairs'] if pair['second_less_first']]
    return lines


def _generative(task: dict[str, Any]) -> list[str]:
    some = next(iter(next(iter(task['scores'].values())).values()))
    passes = list(some['pass'])
    heads = [f'pass@{k}' for k in passes] if task['samples'] > 1 else ['correct']
    rows: list[tuple[str, ...]] = [('mode', 'temperature', *heads, 'no answer', 'median tokens', 'mean', 'at limit')]
    for mode, by_temperature in task['scores'].items():
        for temperature, scores in by_temperature.items():
            best = len(by_temperature) > 1 and temperature == task['best_temperature'][mode]
            rows.append(
                (
                    mode,
                    f'{temperature} (best)' if best else temperature,
                    *(_estimate(scores['pass'][k]) for k in passes),
                    str(scores['verdicts'].get('no answer', 0)),
                    f'{scores["median_tokens"]:g}',
                    f'{scores["mean_tokens"]:.1f}',
                    f'{scores["at_limit"]:.1%}',
                )
            )
    return table(rows)


def _harness(task: dict[str, Any]) -> list[str]:
    metrics = list(next(iter(task['scores'].values())))
    if not metrics:
        return ['nothing to score: none of its metrics is a number of single items']
    rows: list[tuple[str, ...]] = [('mode', *metrics)]
    rows += [(mode, *(_estimate(scores[m]) for m in metrics)) for mode, scores in task['scores'].items()]
    return table(rows)


def _pair(pair: dict[str, Any], samples: int) -> str:
    a, b = pair['first'], pair['second']
    parts = [f'{b} less {a}:']
    for name, found in pair['second_less_first'].items():
        parts.append(
            f'{name} {_estimate(found, sign="+")}'
            if not name.isdigit()
            else f'pass@{name} {_estimate(found, sign="+")}'
        )
    if pair['p_value'] is not None:
        alone = f'{pair["only_second"]} right in {b} alone, {pair["only_first"]} in {a} alone'
        first = ' of first samples' if samples > 1 else ''
        parts.append(f'({alone}; McNemar p{first} = {pair["p_value"]:.3g})')
    return ' '.join(parts)


def _estimate(found: dict[str, Any], sign: str = '') -> str:
    ends = found['interval']
    return f'{found["value"]:{sign}.3f}' + (f' ({ends[0]:.3f} to {ends[1]:.3f})' if ends else '')
