"""Pictures of runs, by matplotlib: loss over training and by number of passes, accuracy by position, runs compared."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fbt_jax.evaluation.per_pass import PassResults
from fbt_jax.evaluation.report_figures import of_passes

COLOURS = ('#0b5394', '#c55a11', '#38761d', '#741b47', '#7f6000', '#134f5c')
LINES = ('-', '--', ':', '-.')


class Shown(NamedTuple):
    """A curve of `draw_curves`, of S seeds: `loss_SN` over `x_SPN`, P panels. `style`: which of LINES."""

    label: str
    colour: int
    style: int
    x_SPN: np.ndarray
    loss_SN: np.ndarray


class Panel(NamedTuple):
    """Accuracies of `draw_panels`: a curve a label, its runs (seeds) over `x`, which are positions or names."""

    title: str
    xlabel: str
    x: Sequence[Any]
    curves: dict[str, list[np.ndarray]]


def draw_run(path: str, rows: Sequence[dict[str, Any]], results: PassResults, passes: Iterable[int]) -> None:
    """A PNG of two panels.

    Left: validation loss over training by number of passes, with the training loss after one pass behind. Right: what
    `results` say after each of `passes` passes: nats per byte for text, accuracy by position elsewhere.

    Args:
      rows: of metrics.jsonl, both splits.
    """
    figure, (left, right) = _figure(2)
    train = [row for row in rows if row['split'] == 'train' and row['loss_pass_1'] is not None]
    seen, losses = [row['tokens'] for row in train], [row['loss_pass_1'] for row in train]
    left.plot(seen, losses, color='0.75', linewidth=1, label='training, 1 pass')
    # Evaluations may fall between two logged steps; tokens grow evenly from one to the next.
    shown = [row for row in rows if row['split'] == 'validation'] if train else []
    tokens = np.interp([row['step'] for row in shown], [row['step'] for row in train], seen) if shown else []
    logged = max((row['passes'] for row in shown), default=0)
    for k, look in enumerate(_looks(logged), start=1):
        left.plot(
            tokens, [row[f'loss_pass_{k}'] for row in shown], marker='.', label=f'validation, {of_passes(k)}', **look
        )
    left.set(xlabel='training tokens', ylabel='loss, nats per token', title='Loss over training')
    _legend(left)

    passes = list(passes)
    if results.nats_per_byte_K is None:
        curves = {of_passes(k): [results.accuracy_KP[k - 1]] for k in passes}
        _draw_panel(right, Panel('Accuracy by position', 'position', range(1, 1 + len(results.accuracy_KP[0])), curves))
    else:
        right.plot(passes, results.nats_per_byte_K[[k - 1 for k in passes]], color=COLOURS[0], marker='.')
        right.set(xscale='log', xlabel='passes', ylabel='nats per byte', title='Validation loss by passes')
        right.set_xticks(passes, [str(k) for k in passes])
        right.minorticks_off()
    figure.savefig(path, dpi=130)


def draw_panels(path: str, panels: Sequence[Panel]) -> None:
    """A PNG of accuracies, three panels a row; a label's runs are thin lines around their mean."""
    columns = min(len(panels), 3)
    figure, axes = _figure(columns, rows=-(-len(panels) // columns))
    for panel, ax in zip(panels, axes, strict=False):
        _draw_panel(ax, panel)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    figure.savefig(path, dpi=130)


def draw_contraction(path: str, figures: dict[str, Any]) -> None:
    """A PNG of four panels of what `fbt diagnose` found: loss, update norm and its fit, singular values, a rollout."""
    figure, axes = _figure(4)
    passes, fitted = np.arange(1, figures['passes'] + 1), np.arange(figures['fitted'][0], figures['fitted'][1] + 1)
    axes[0].plot(passes, figures['loss'], color=COLOURS[0], marker='.')
    axes[0].set(xlabel='passes', ylabel='nats per token', title='Loss by passes')
    update_K = np.array(figures['update_norm'][1:])
    axes[1].plot(
        passes[1:], np.where(update_K > 0, update_K, np.nan), color=COLOURS[0], marker='.', label='update norm'
    )
    rate, start = figures['rate']['value'], np.mean(np.log(np.maximum(update_K[fitted - 2], 1e-12)))
    line = np.exp(start + np.log(rate) * (fitted - fitted.mean()))
    axes[1].plot(fitted, line, color=COLOURS[1], linestyle='--', label=f'{rate:.3f} a pass')
    axes[1].set(
        xlabel='passes', ylabel='RMS of h^k - h^(k-1)', title=f'Update norm: {figures["verdict"]}', yscale='log'
    )
    axes[1].legend(frameon=False, fontsize=8)
    axes[2].hist(figures['singular_values'], bins=12, color=COLOURS[0])
    axes[2].axvline(1, color=COLOURS[1], linestyle='--')
    axes[2].set(xlabel='largest singular value', ylabel='positions', title='One-token map h_(t-1) to h_t')
    norms = figures['rollout_state_norm']
    axes[3].plot(np.arange(1, len(norms) + 1), norms, color=COLOURS[0])
    axes[3].set(xlabel='token', ylabel='RMS of h', title='State norm in soft decoding', ylim=(0, None))
    for ax in axes[:2]:
        ax.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=130)


def draw_curves(path: str, curves: Iterable[Shown], *, xlabels: Sequence[str], ylabel: str) -> None:
    """A PNG of a panel for each of `xlabels`, x on a log scale: means over seeds, in bands from least to most."""
    figure, panels = _figure(len(xlabels))
    curves = list(curves)
    looks = _looks(1 + max(curve.colour for curve in curves))
    for curve in curves:
        look = looks[curve.colour] | {'linestyle': LINES[curve.style % len(LINES)]}
        for p, axes in enumerate(panels):
            x_N = curve.x_SPN[:, p].mean(axis=0)
            axes.plot(x_N, curve.loss_SN.mean(axis=0), marker='.', label=curve.label, **look)
            if len(curve.loss_SN) > 1:
                low_N, high_N = curve.loss_SN.min(axis=0), curve.loss_SN.max(axis=0)
                axes.fill_between(x_N, low_N, high_N, color=look['color'], alpha=0.2, linewidth=0)
    for axes, label in zip(panels, xlabels, strict=True):
        axes.set(xscale='log', xlabel=label, ylabel=ylabel, title=f'Validation loss by {label}')
        axes.tick_params(axis='x', which='both', labelsize=7)  # less than a decade labels its minor ticks, densely
    _legend(panels[0])
    figure.savefig(path, dpi=130)


def draw_probes(path: str, figures: dict[str, Any]) -> None:
    """A PNG of what `fbt diagnose --probes` found: accuracy by depth, a row of panels a task, a line a mode."""
    by_task: dict[str, list[Any]] = {}
    for result in figures['results']:
        by_task.setdefault(result['task'], []).append(result)
    figure, axes = _grid(len(by_task), max(map(len, by_task.values())), size=(3.0, 2.6))
    depths = np.arange(len(figures['depths']))
    for row, results in zip(axes, by_task.values(), strict=True):
        for panel, result in zip(row, results, strict=False):
            for i, (mode, found) in enumerate(result['modes'].items()):
                colour = COLOURS[(i - 1) % len(COLOURS)] if i else '0.2'  # the first is the plain one
                panel.plot(depths, found['accuracy'], color=colour, marker='.', linestyle=LINES[i == 0], label=mode)
                low, high = zip(*(ends or (np.nan, np.nan) for ends in found['interval']), strict=True)
                panel.fill_between(depths, low, high, color=colour, alpha=0.1, linewidth=0)
            panel.axhline(figures['chance'], color='0.4', linestyle=':', linewidth=1)
            panel.set_title(f'{result["task"]}\n{result["setting"]}', fontsize=9)
            shown = [*depths[:: 1 + (len(depths) - 2) // 8]]
            panel.set_xticks(shown, [figures['depths'][d] for d in shown])
            panel.set_ylim(0.4, 1.03)
        for unused in row[len(results) :]:
            unused.set_axis_off()
        row[0].set_ylabel('accuracy')
    for panel in axes[-1]:
        panel.set_xlabel('depth')
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside upper center', ncols=len(labels), frameon=False, fontsize=9)
    figure.savefig(path, dpi=80)


def _draw_panel(axes: Any, panel: Panel) -> None:
    x = np.arange(len(panel.x)) if isinstance(panel.x[0], str) else np.array(panel.x)
    for (label, runs), look in zip(panel.curves.items(), _looks(len(panel.curves)), strict=True):
        if len(runs) > 1:
            for run in runs:
                axes.plot(x, run, linewidth=0.7, alpha=0.5, **look)
        axes.plot(x, np.mean(runs, axis=0), marker='.', label=label, **look)
    few = np.arange(len(x)) if len(x) <= 12 else np.arange(len(x) // 12 - 1, len(x), len(x) // 12)
    axes.set(xlabel=panel.xlabel, ylabel='accuracy', title=panel.title, ylim=(0, 1.03))
    axes.set_xticks(x[few], [str(panel.x[i]) for i in few.tolist()])
    _legend(axes, loc='lower left')


def _looks(count: int) -> list[dict[str, Any]]:
    """Of so many curves, no two alike: past COLOURS from dark to light, neighbours in other LINES."""
    if count <= len(COLOURS):
        return [{'color': colour, 'linestyle': '-'} for colour in COLOURS[:count]]
    from matplotlib import colormaps

    shades = colormaps['viridis'](np.linspace(0, 0.9, count))
    return [{'color': tuple(shade), 'linestyle': LINES[i % len(LINES)]} for i, shade in enumerate(shades)]


def _legend(axes: Any, loc: str = 'best') -> None:
    """Ten entries a column, so that it stays within the panel."""
    columns = -(-len(axes.get_legend_handles_labels()[0]) // 10)
    axes.legend(frameon=columns > 1, fontsize=8, loc=loc, ncols=columns)


def _figure(columns: int, rows: int = 1) -> tuple[Any, Any]:
    """Panels in one row after the other."""
    figure, axes = _grid(rows, columns, size=(5.6, 3.8))
    return figure, axes.ravel()


def _grid(rows: int, columns: int, *, size: tuple[float, float]) -> tuple[Any, Any]:
    """`size`: of each panel, in inches."""
    import matplotlib

    matplotlib.use('agg')
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=(size[0] * columns, size[1] * rows), layout='constrained', squeeze=False
    )
    for ax in axes.flat:
        ax.spines[['top', 'right']].set_visible(False)
        ax.grid(alpha=0.25)
    return figure, axes
