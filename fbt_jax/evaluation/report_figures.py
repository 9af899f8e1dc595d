"""The figures of `fbt report`, from rows of metrics.jsonl and what the other verbs find (plots.py makes PNG files)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fbt_jax.config_passes import PassesConfig
from fbt_jax.evaluation.report_page import Band, Figure, Text, Trace

POINTS = 1000  # of a curve; of a longer one, that many evenly spread
Row = dict[str, Any]


def thinned(rows: Sequence[Row]) -> list[Row]:
    """POINTS of them at most, evenly spread, the first and the last among them."""
    if len(rows) <= POINTS:
        return list(rows)
    return [rows[i * (len(rows) - 1) // (POINTS - 1)] for i in range(POINTS)]


def of_passes(k: int) -> str:
    return f'{k} pass{"es" if k > 1 else ""}'


def phase_bands(passes: PassesConfig, total_steps: int) -> list[Band]:
    """The phases of the mixture that steps fall into, as step numbers from 1 on."""
    phases = passes.phase_steps(total_steps)
    starts = [*(first for first, _ in phases), total_steps]
    bands = []
    for (start, probabilities), after in zip(phases, starts[1:], strict=True):
        after = min(after, total_steps)
        if start < after:
            drawn = [(k, p) for k, p in zip(passes.pass_counts, probabilities, strict=True) if p > 0]
            label = of_passes(drawn[0][0]) if len(drawn) == 1 else ', '.join(f'{k}: {p:.0%}' for k, p in drawn)
            bands.append(Band(start + 1, after, label))
    return bands


def broken_rows(rows: Sequence[Row]) -> list[Text]:
    """In words, since curves have nothing to show there: from which step on rows have losses or norms not finite."""

    def broken(row: Row) -> bool:
        return any(v is None for k, v in row.items() if k.startswith(('loss', 'grad_norm', 'update_norm')))

    found = []
    for split, name in (('train', 'training'), ('validation', 'validation')):
        own = [row for row in rows if row['split'] == split]
        bad = [row for row in own if broken(row)]
        if bad:
            since = [row for row in own if row['step'] >= bad[0]['step']]
            count = 'all' if len(bad) == len(since) else f'{len(bad):,}'
            found.append(
                f'From step {bad[0]["step"]:,} on, {count} of the {len(since):,} {name} rows have a loss or norm that '
                'is not finite: curves have gaps there, or end.'
            )
    return [Text(told, 'missing') for told in found]


def training_figures(rows: Sequence[Row], bands: Sequence[Band]) -> list[Figure]:
    """Loss by pass, update norm, learning rate, throughput, gradient norm over the steps; those that there are."""
    train = thinned([row for row in rows if row['split'] == 'train'])
    validation = thinned([row for row in rows if row['split'] == 'validation'])

    def curve(of: Sequence[Row], field: str, name: str, colour: int = 0, style: str = 'line') -> list[Trace]:
        found = [row for row in of if field in row]
        return [Trace(name, [r['step'] for r in found], [r[field] for r in found], colour, style)] if found else []

    losses = [
        trace
        for k in range(1, 1 + max((row['passes'] for row in [*train, *validation]), default=0))
        for trace in (
            *curve(train, f'loss_pass_{k}', f'training, {of_passes(k)}', k - 1, 'thin'),
            *curve(validation, f'loss_pass_{k}', f'validation, {of_passes(k)}', k - 1),
        )
    ]
    updates = [
        trace
        for k in range(2, 1 + max((row['passes'] for row in validation), default=0))
        for trace in curve(validation, f'update_norm_{k}', f'pass {k}', k - 1)
    ]
    last = max((row['step'] for row in [*train, *validation]), default=1)
    bands = [band._replace(end=min(band.end, last)) for band in bands if band.start <= last]
    note = 'Shaded: the phases of the mixture, by the number of passes that their steps draw.'
    below = _loss_range(losses, last)
    hint = ''
    if below is not None:
        note += ' The first steps lie above the frame.'
        hint = 'A double click shows all.'
    made = [
        Figure(
            'loss',
            'Loss over training',
            'step',
            'loss, nats per token',
            losses,
            note,
            bands,
            y_range=below,
            wide=True,
            hint=hint,
        ),
        Figure(
            'learning-rate',
            'Learning rate',
            'step',
            'learning rate of matrices',
            curve(train, 'learning_rate', 'learning rate'),
        ),
        Figure(
            'throughput',
            'Throughput',
            'step',
            'tokens per second',
            curve(train, 'tokens_per_second', 'tokens per second'),
        ),
        Figure('mfu', 'Utilisation', 'step', "MFU, share of the devices' peak", curve(train, 'mfu', 'MFU')),
        Figure('gradient', 'Gradient norm', 'step', 'norm before clipping', curve(train, 'grad_norm', 'gradient norm')),
        Figure('updates', 'Update norm over training', 'step', 'RMS of hᵏ − hᵏ⁻¹', updates),
    ]
    return [figure._replace(whole_x=True) for figure in made if figure.traces]


def _loss_range(traces: Sequence[Trace], last: int) -> tuple[float, float] | None:
    """Of the losses past the first twentieth; None where the first steps reach no further."""
    points = [
        (x, y) for t in traces for x, y in zip(t.x, t.y, strict=True) if x is not None and y is not None and y == y
    ]
    late = [y for x, y in points if x > last / 20]
    if not late or max(y for _, y in points) <= max(late):
        return None
    margin = 0.04 * (max(late) - min(late))
    return min(late) - margin, max(late) + margin


def contraction_figures(figures: dict[str, Any]) -> list[Figure]:
    """Of what `fbt diagnose` found."""
    passes = list(range(1, figures['passes'] + 1))
    update_K = np.array([np.nan if u is None or u <= 0 else u for u in figures['update_norm']])
    first, last = figures['fitted']
    fitted = np.arange(first, last + 1)
    rate, start = figures['rate']['value'], np.mean(np.log(np.maximum(np.nan_to_num(update_K[fitted - 1]), 1e-12)))
    line = np.exp(start + np.log(rate) * (fitted - fitted.mean()))
    sigma, norms = np.array(figures['singular_values']), figures['rollout_state_norm']
    counts, edges = np.histogram(sigma[np.isfinite(sigma)], bins=12)
    return [
        Figure(
            'map-loss',
            'Loss by passes',
            'passes',
            'loss, nats per token',
            [Trace('loss', passes, figures['loss'])],
            whole_x=True,
        ),
        Figure(
            'map-update',
            'Update norm by passes',
            'passes',
            'RMS of hᵏ − hᵏ⁻¹',
            [
                Trace('update norm', passes[1:], update_K[1:].tolist()),
                Trace(f'fit: {rate:.3f} a pass', fitted.tolist(), line.tolist(), 1, 'dash'),
            ],
            log_y=True,
            whole_x=True,
        ),
        Figure(
            'singular',
            'One-token map, from a state to the next',
            'largest singular value',
            'positions',
            [Trace('positions', ((edges[:-1] + edges[1:]) / 2).tolist(), counts.tolist(), 0, 'bars')],
            'Right of the line the map can stretch a difference.',
            x_line=1.0,
        ),
        Figure(
            'rollout',
            'State norm in soft decoding',
            'token',
            'RMS of h',
            [Trace('RMS of h', list(range(1, len(norms) + 1)), norms)],
            y_range=(0.0, 1.1 * max(norms)) if np.isfinite(norms).all() else None,
        ),
    ]


def pass_figure(intervals: dict[str, Any], loss_K: np.ndarray) -> Figure:
    """Validation loss after each number of passes, with the intervals of `intervals.pass_intervals`."""
    passes = [int(k) for k in intervals['loss']]
    ends = list(intervals['loss'].values())
    low, high = ([None if e is None else e[i] for e in ends] for i in (0, 1))
    known = not any(e is None for e in ends)
    trace = Trace(
        'validation',
        passes,
        [float(loss_K[k - 1]) for k in passes],
        0,
        'line',
        low if known else None,
        high if known else None,
    )
    note = 'Bars: 95 % intervals over documents. They are much wider than those of the differences, which are paired.'
    return Figure(
        'passes',
        'Validation loss by passes',
        'passes',
        'loss, nats per token',
        [trace],
        note if known else '',
        whole_x=True,
    )


def position_figure(accuracy_KP: np.ndarray, passes: Sequence[int]) -> Figure:
    shown = [p for p in range(accuracy_KP.shape[1]) if np.isfinite(accuracy_KP[0, p])]
    traces = [
        Trace(of_passes(k), [p + 1 for p in shown], [float(accuracy_KP[k - 1, p]) for p in shown], i)
        for i, k in enumerate(passes)
    ]
    return Figure(
        'positions',
        'Accuracy by position',
        'position in the document',
        'accuracy',
        traces,
        y_range=(0.0, 1.03),
        whole_x=True,
    )


def difference_histogram(differences: np.ndarray, passes: int) -> Figure:
    """How the tokens' differences are spread; what lies beyond the outermost bars is in these."""
    low, high = np.quantile(differences, [0.005, 0.995])
    end = max(abs(low), abs(high), 1e-6)
    counts, edges = np.histogram(np.clip(differences, -end, end), bins=40, range=(-end, end))
    share, centres = (counts / len(differences)).tolist(), ((edges[:-1] + edges[1:]) / 2).tolist()
    cheaper = Trace('cheaper', centres[:20], share[:20], 0, 'bars')
    dearer = Trace('dearer', centres[20:], share[20:], 1, 'bars')
    note = f'Loss after {of_passes(passes)} less that after 1: left of 0 feedback helps.'
    bars, label = [cheaper, dearer], 'difference in loss, nats'
    return Figure('differences', 'How much tokens change', label, 'share of tokens', bars, note)


def comparison_figures(result: Any, name_of: Callable[[int, int], str]) -> list[Figure]:
    """Validation loss by tokens, token-passes and FLOPs; `name_of(group, seed)`: of `training.comparison`'s groups."""
    titles = ('tokens', 'token-passes', 'FLOPs')
    figures = []
    for axis, title in enumerate(titles):
        traces = []
        for g, group in enumerate(result.groups):
            for s in range(len(group.seeds)):
                for k in range(min(group.loss_SKN.shape[1], group.trained_passes)):
                    x_N, y_N = group.axes_SAN[s, axis], group.loss_SKN[s, k]
                    style = ('line', 'dash', 'dot')[min(k, 2)]
                    name = f'{name_of(g, s)}, {of_passes(k + 1)}'
                    traces.append(Trace(name, x_N.tolist(), y_N.tolist(), g + s, style))
        figures.append(
            Figure(f'by-{axis}', f'Validation loss by {title}', title, f'loss, {result.unit}', traces, log_x=True)
        )
    return figures
