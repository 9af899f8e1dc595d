"""The tables of `fbt report`: headline, origin, losses by passes, configuration, another run beside it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fbt_jax.config import Config, flat_keys
from fbt_jax.evaluation.intervals import FEW
from fbt_jax.evaluation.per_pass import PassResults, together
from fbt_jax.evaluation.report_figures import comparison_figures, of_passes
from fbt_jax.evaluation.report_page import Block, Facts, Table, Text
from fbt_jax.training.comparison import Comparison, compare, cumulative_flops, fed_before
from fbt_jax.training.metrics import Row, read_rows
from fbt_jax.training.run_folder import Run, read_config
from fbt_jax.training.scoring import Scored

Ends = Sequence[float] | None


def headline(
    config: Config,
    rows: Sequence[Row],
    trained: Run | None,
    scored: Scored | None,
    figures: dict[str, Any] | None,
    *,
    scored_rows: int,
) -> Facts:
    """The numbers to see first; those that there are, up to the checkpoint where there is one.

    `scored_rows`: of each validation set, 0 for all.
    """
    step = max((row['step'] for row in rows), default=0) if trained is None else trained.step
    entries = _loss_facts(config, [row for row in rows if row['step'] <= step], scored, scored_rows)
    if trained is not None:
        count = sum(x.size for x in jax.tree.leaves(trained.params))
        layers = config.model.num_layers
        shape = f'{layers} layer{"s" if layers > 1 else ""}, width {config.model.width}'
        entries.append(('parameters', _short(count), shape))
    train = [row for row in rows if row['split'] == 'train']
    if train:
        tokens, token_passes, flops = _spent(config, train, step)
        told = f'{_short(round(token_passes))} token-passes, {_power(flops)} FLOPs'
        entries.append(('training tokens', _short(round(tokens)), told))
        entries.append(
            ('time of the steps', _duration(_seconds(config, train, step)), 'from the steps that were logged')
        )
    if figures is not None:
        rate = figures['rate']
        remark = f'a pass multiplies the update by {rate["value"]:.3f} ({rate["low"]:.3f} to {rate["high"]:.3f})'
        entries.append(('feedback map', figures['verdict'], remark))
    return Facts(entries)


def _loss_facts(
    config: Config, rows: Sequence[Row], scored: Scored | None, scored_rows: int
) -> list[tuple[str, str, str]]:
    """From the checkpoint that was scored; where none could be, from the last validation row."""
    validation = [row for row in rows if row['split'] == 'validation']
    known = [row for row in validation if row['loss_pass_1'] is not None]
    best = min(known, key=lambda row: row['loss_pass_1']) if known else None
    told = (
        f'; best while training {best["loss_pass_1"]:.4f} at step {best["step"]:,}, on {logged_on(config)}'
        if best
        else ''
    )
    trained_passes = config.passes.max_passes
    entries = []
    if scored is not None:
        results = together(scored.by_set.values())
        loss_K, bits_K = results.loss_K, results.bits_per_byte_K
        read = f'on {_rows_read(scored, scored_rows)}'
        shown = [k for k in (1, trained_passes) if k <= len(loss_K)]
        losses = {k: float(loss_K[k - 1]) for k in shown}
        bits = None if bits_K is None else {k: float(bits_K[k - 1]) for k in shown}
        if bits is None:
            accuracy = results.accuracy_K[shown[-1] - 1]
            entries.append(('accuracy', f'{accuracy:.1%}', f'after {of_passes(shown[-1])}'))
    elif validation:
        last = validation[-1]
        read = f'logged at step {last["step"]:,}, on {logged_on(config)}'
        train = [row for row in rows if row['split'] == 'train']
        fed = fed_before(config) or any(row['token_passes'] > row['tokens'] for row in train)
        shown = [k for k in (1, trained_passes) if f'loss_pass_{k}' in last and (k == 1 or fed)]
        losses = {k: _number(last[f'loss_pass_{k}']) for k in shown}
        bits = {k: _number(last[f'bits_per_byte_pass_{k}']) for k in shown if f'bits_per_byte_pass_{k}' in last}
    else:
        return []
    facts = []
    for k in dict.fromkeys(shown):
        more = told if k == 1 else f'; {losses[k] - losses[1]:+z.4f} from pass 1'
        facts.append((f'validation loss, {of_passes(k)}', f'{losses[k]:.4f}', f'nats per token, {read}{more}'))
    last_k = shown[-1]
    if bits:
        others = f'; {bits[last_k]:.4f} after {last_k}' if last_k > 1 else ''
        facts.append(('bits per byte', f'{bits[1]:.4f}', f'after 1 pass{others}'))
    others = f'; {_exp(losses[last_k])} after {last_k}' if last_k > 1 else ''
    facts.append(('perplexity', _exp(losses[1]), f'after 1 pass{others}'))
    return facts + entries


def logged_on(config: Config) -> str:
    """Which rows the losses in metrics.jsonl are of."""
    rows = config.training.eval_rows
    return f'{rows:,} row{"s" if rows > 1 else ""} of each validation set' if rows else 'all validation rows'


def _rows_read(scored: Scored, rows: int) -> str:
    totals = [source.num_rows for source in scored.data.validation.values()]
    read, total = sum(min(rows or n, n) for n in totals), sum(totals)
    tokens = together(scored.by_set.values()).tokens
    told = f'all {total:,}' if read == total else f'{read:,} of {total:,}'
    return f'{told} validation row{"s" if total > 1 else ""} ({tokens:,.0f} tokens)'


def _number(value: float | None) -> float:
    return float('nan') if value is None else value


def _exp(loss: float) -> str:
    with np.errstate(over='ignore'):
        return f'{np.exp(loss):.2f}'


def _short(count: int) -> str:
    for size, unit in ((1e12, 'T'), (1e9, 'B'), (1e6, 'M'), (1e3, 'k')):
        if count >= size:
            return f'{count / size:.3g}{unit}'
    return str(count)


def _seconds(config: Config, train: Sequence[Row], step: int) -> float:
    """Of the run's own steps up to `step`. A logged step stands for those since the one before it."""
    continued = config.init.schedule == 'continue'
    start = max(0, train[0]['step'] - config.training.log_every) if continued else 0
    steps = np.diff(np.minimum([start, *(row['step'] for row in train)], step))
    return float(steps @ [row['step_seconds'] or 0.0 for row in train])


def _power(value: float) -> str:
    digits, _, exponent = f'{value:.2e}'.partition('e')
    raised = str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))
    return f'{digits} × 10{raised}'.replace(' ', '\N{NO-BREAK SPACE}')


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 48:
        return f'{hours / 24:.1f} days'
    return f'{hours:.1f} h' if hours >= 2 else f'{minutes:.1f} min' if minutes >= 2 else f'{seconds:.0f} s'


def origin_table(workdir: str, record: dict[str, Any], trained: Run | None) -> Table:
    devices = f'{record.get("device_count", "?")} x {record.get("device_kind", "?")}'
    processes = record.get('process_count', 1)
    rows = [
        ('folder', workdir),
        ('checkpoint', 'none' if trained is None else f'step {trained.step:,}'),
        ('devices', devices if processes == 1 else f'{devices} in {processes} processes'),
        ('git commit', str(record.get('git_commit') or 'unknown')),
        ('versions', ', '.join(f'{name} {version}' for name, version in record.get('versions', {}).items())),
    ]
    for name, entry in record['data'].items():
        counts = [f'{entry[field]:,} {field}' for field in ('documents', 'tokens') if isinstance(entry.get(field), int)]
        rows.append((f'data, {name}', ', '.join(counts) or 'rows made as they are read'))
    return Table('Where it comes from', ('', ''), rows, folded=True)


def evaluation_table(results: PassResults, passes: Sequence[int], intervals: dict[str, Any]) -> Table:
    text = results.bits_per_byte_K is not None
    head = (
        'passes',
        'nats per token',
        'perplexity',
        'bits per byte' if text else 'accuracy',
        'from pass 1',
        'update norm',
    )
    rows = []
    for k in passes:
        i = k - 1
        third = results.accuracy_K[i] if results.bits_per_byte_K is None else results.bits_per_byte_K[i]
        difference = intervals['difference_from_pass_1'].get(str(k))
        rows.append(
            (
                str(k),
                f'{results.loss_K[i]:.4f}{_ends(intervals["loss"][str(k)])}',
                _exp(results.loss_K[i]),
                f'{third:.4f}',
                '' if difference is None else f'{difference["loss"]:+z.4f}{_ends(difference["interval"], "+")}',
                f'{results.update_norm_K[i]:.4f}' if k > 1 else '',
            )
        )
    caption = (
        f'{results.tokens:,.0f} validation tokens, each counted once; in brackets 95 % intervals over '
        f'{_documents(intervals["documents"])}'
    )
    return Table(caption, head, rows)


def _documents(count: int) -> str:
    few = f'; of so few (fewer than {FEW}) they are likely too narrow' if count < FEW else ''
    return f'{count:,} document{"s" if count > 1 else ""}{few}'


def _ends(interval: Ends, sign: str = '') -> str:
    return '' if interval is None else f' ({interval[0]:{sign}z.4f} to {interval[1]:{sign}z.4f})'


def config_blocks(config: Config, against: str | None) -> list[Block]:
    """What differs from the defaults (and from the other run), then all of it, folded."""
    own, default = flat_keys(config), flat_keys(Config())
    other = flat_keys(read_config(against)) if against else None
    head = ('key', 'value', 'default', *([against] if against else []))
    rows, changed = [], set()
    for number, key in enumerate(own):
        row = [key, json.dumps(own[key]), json.dumps(default[key])]
        if other is not None:
            row.append(json.dumps(other[key]))
        if own[key] != default[key] or (other is not None and other[key] != own[key]):
            changed.add(number)
        rows.append(row)
    differing = [rows[n] for n in sorted(changed)]
    of_other = frozenset(n for n, row in enumerate(differing) if len(row) > 3 and row[3] != row[1])
    told = f'; marked: keys in which {against} differs' if against else ''
    return [
        Table(
            f'{len(differing)} keys that differ from the defaults{" or from the other run" if against else ""}{told}',
            head,
            differing,
            of_other,
            folded=True,
        ),
        Table(f'All {len(rows)} keys; marked: those that differ', head, rows, frozenset(changed), folded=True),
    ]


def sentence(text: str, *names: str) -> str:
    """`text` with a capital, unless it begins with a name, and a full stop."""
    text = text if text.endswith('.') else f'{text}.'
    return text if text.startswith(names) else text[0].upper() + text[1:]


def comparison_blocks(against: str, workdir: str) -> tuple[list[Block], list[Block]]:
    """Curves and factors, and what to know of them; the other run is the baseline.

    Raises UserError where the two can't be compared.
    """
    result = compare([against, workdir])
    blocks: list[Block] = [*comparison_figures(result, lambda g, s: result.groups[g].workdirs[s])]
    blocks += _factor_blocks(result, against, read_config(workdir))
    return blocks, [Text(sentence(note, against, workdir)) for note in result.notes]


def _factor_blocks(result: Comparison, against: str, config: Config) -> list[Block]:
    head = ('the baseline needs, for the loss', 'after passes', 'tokens, times', 'token-passes, times', 'FLOPs, times')
    rows = [
        (f'{entry.loss:.4f}', str(entry.passes), *map(str, entry.factor_A))
        for of_passes_ in result.factors
        for entry in of_passes_
    ]
    if not rows:
        return []
    caption = (
        f"Data-efficiency factor: how much more {against} needs for the loss of this run's last evaluation while "
        f'training (metrics.jsonl, step {result.groups[1].steps_N[-1]:,}, on {logged_on(config)})'
    )
    signs = {
        '>': "> says that the baseline's curve ends before it comes down to that loss, so that it needs more than this",
        '<': "< says that the baseline's first evaluation is at or below that loss, so that it needs less than this",
    }
    told = [text for sign, text in signs.items() if any(sign in cell for row in rows for cell in row[2:])]
    bounds = [Text(f'{"; ".join(told)}. Nothing is extrapolated.')] if told else []
    return [Table(caption, head, rows), *bounds]


def difference_blocks(difference: dict[str, Any], one: Scored, other: Scored) -> list[Block]:
    """The difference, and what either has been trained with."""
    rows = [
        (k, str(entry['other_passes']), f'{entry["difference"]:+z.4f}{_ends(entry["interval"], "+")}')
        for k, entry in difference['passes'].items()
    ]
    documents = together(one.by_set.values()).documents
    assert documents is not None
    caption = (
        f'Loss at step {one.run.step:,} less that of {difference["workdir"]} at step {difference["step"]:,}, on the '
        f'same documents, {difference["unit"]}; 95 % intervals, paired, over {_documents(len(documents.tokens_U))}'
    )
    trained = [(x.workdir, f'{x.run.step:,}', *_trained_with(x.workdir, x.run)) for x in (one, other)]
    return [
        Table(caption, ('passes', 'its passes', 'difference'), rows),
        Table(
            'What either has been trained with until that step',
            ('run', 'step', 'tokens', 'token-passes', 'FLOPs'),
            trained,
        ),
    ]


def _trained_with(workdir: str, run: Run) -> tuple[str, str, str]:
    """Tokens, token-passes and FLOPs at the checkpoint."""
    try:
        train = [row for row in read_rows(Path(workdir) / 'metrics.jsonl') if row['split'] == 'train']
    except (OSError, ValueError):
        train = []
    if not train:
        return ('unknown',) * 3
    tokens, token_passes, flops = _spent(run.config, train, run.step)
    return f'{tokens:,.0f}', f'{token_passes:,.0f}', _power(flops)


def _spent(config: Config, train: Sequence[Row], step: int) -> tuple[float, float, float]:
    """Tokens, token-passes and FLOPs up to `step`, which may lie between two logged ones."""
    steps = [0, *(row['step'] for row in train)]
    tokens, token_passes = (
        np.interp(step, steps, [0, *(row[name] for row in train)]) for name in ('tokens', 'token_passes')
    )
    return float(tokens), float(token_passes), float(cumulative_flops(config, tokens, token_passes))
