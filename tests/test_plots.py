"""The pictures hold the numbers they were given, and come out as PNG files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fbt_jax.evaluation import plots
from fbt_jax.evaluation.per_pass import BatchSums, PassResults

ROWS: list[dict[str, Any]] = [
    {'step': 1, 'split': 'train', 'tokens': 100, 'loss_pass_1': 3.0},
    {'step': 2, 'split': 'train', 'tokens': 200, 'loss_pass_1': 2.5},
    {'step': 3, 'split': 'validation', 'passes': 2, 'loss_pass_1': 2.6, 'loss_pass_2': 2.4},
    {'step': 4, 'split': 'train', 'tokens': 400, 'loss_pass_1': 2.3},
]


def results(num_bytes: int | None) -> PassResults:
    nll_KP = np.array([[4.0, 2.0], [3.0, 1.0]])
    return PassResults(BatchSums(nll_KP, np.array([[1.0, 0.0], [2.0, 1.0]]), nll_KP, np.array([2.0, 2.0]), num_bytes))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are made, so that a test can look at their lines."""
    figures: list[Any] = []
    make = plots._figure

    def keep(columns: int, **kwargs: int) -> Any:
        figure, axes = make(columns, **kwargs)
        figures.append(figure)
        return figure, axes

    monkeypatch.setattr(plots, '_figure', keep)
    return figures


def lines(axes: Any) -> dict[str, list[list[float]]]:
    return {line.get_label(): [list(line.get_xdata()), list(line.get_ydata())] for line in axes.get_lines()}


def test_run_of_text(tmp_path: Path, drawn: list[Any]) -> None:
    plots.draw_run(str(tmp_path / 'a.png'), ROWS, results(8), [1, 2])
    assert (tmp_path / 'a.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'
    left, right = drawn[0].axes
    assert lines(left) == {
        'training, 1 pass': [[100, 200, 400], [3.0, 2.5, 2.3]],
        'validation, 1 pass': [[300], [2.6]],
        'validation, 2 passes': [[300], [2.4]],
    }
    [curve] = lines(right).values()
    assert curve == [[1, 2], [6 / 8, 4 / 8]]


def test_run_without_text_shows_accuracy_by_position(tmp_path: Path, drawn: list[Any]) -> None:
    plots.draw_run(str(tmp_path / 'a.png'), ROWS, results(None), [2])
    assert lines(drawn[0].axes[1]) == {'2 passes': [[1, 2], [1.0, 0.5]]}


def test_of_many_passes_each_has_a_curve_of_its_own(tmp_path: Path, drawn: list[Any]) -> None:
    """Also where there are more than colours; in both panels."""
    accuracy_KP = np.linspace(0, 1, 60).reshape(30, 2)
    sums = BatchSums(accuracy_KP, accuracy_KP, accuracy_KP, np.ones(2), None)
    row = {'step': 4, 'split': 'validation', 'passes': 9} | {f'loss_pass_{k}': 3.0 + k for k in range(1, 10)}
    plots.draw_run(str(tmp_path / 'a.png'), [*ROWS[:2], row], PassResults(sums), range(1, 31))
    left, right = drawn[0].axes
    names = ['1 pass', *(f'{k} passes' for k in range(2, 31))]
    assert lines(right) == {name: [[1, 2], list(accuracy_KP[k])] for k, name in enumerate(names)}
    assert list(lines(left)) == ['training, 1 pass', *(f'validation, {name}' for name in names[:9])]
    for axes, count in ((left, 10), (right, 30)):
        assert len({(str(line.get_color()), line.get_linestyle()) for line in axes.get_lines()}) == count
        assert len(axes.get_legend().get_texts()) == count


def test_runs_beside_each_other_look_unlike(tmp_path: Path, drawn: list[Any]) -> None:
    x_SPN = np.ones((1, 1, 3)) * [1, 2, 3]
    curves = [plots.Shown(f'{g} {k}', g, k, x_SPN, np.full((1, 3), g)) for g in range(9) for k in range(2)]
    plots.draw_curves(str(tmp_path / 'a.png'), curves, xlabels=['tokens'], ylabel='loss')
    found = drawn[0].axes[0].get_lines()
    assert len({(str(line.get_color()), line.get_linestyle()) for line in found}) == 18
    assert [line.get_linestyle() for line in found[:4]] == ['-', '--', '-', '--']


def test_panels_show_each_seed_and_the_mean(tmp_path: Path, drawn: list[Any]) -> None:
    runs = [np.array([1.0, 0.5]), np.array([0.8, 0.1])]
    by_position = plots.Panel('t', 'position', [1, 2], {'fed back': runs})
    by_name = plots.Panel('u', 'group', ['Z2', 'S3'], {'fed back': runs[:1], 'plain': runs[1:]})
    plots.draw_panels(str(tmp_path / 'a.png'), [by_position, by_name, by_name, by_name])
    assert len(drawn[0].axes) == 6  # two rows of three, the last two empty
    curves = [list(line.get_ydata()) for line in drawn[0].axes[0].get_lines()]
    assert curves[:2] == [[1.0, 0.5], [0.8, 0.1]]
    np.testing.assert_allclose(curves[2], [0.9, 0.3])
    assert lines(drawn[0].axes[1]) == {'fed back': [[0, 1], [1.0, 0.5]], 'plain': [[0, 1], [0.8, 0.1]]}
    assert [text.get_text() for text in drawn[0].axes[1].get_xticklabels()] == ['Z2', 'S3']
    assert [text.get_text() for text in drawn[0].axes[0].get_xticklabels()] == ['1', '2']


def test_contraction(tmp_path: Path, drawn: list[Any]) -> None:
    figures = {
        'passes': 4,
        'loss': [3.0, 2.0, 2.1, 2.2],
        'update_norm': [None, 0.4, 0.2, 0.1],
        'fitted': (2, 4),
        'rate': {'value': 0.5},
        'verdict': 'contracting',
        'singular_values': [0.5, 0.7],
        'rollout_state_norm': [1.0, 1.1],
    }
    plots.draw_contraction(str(tmp_path / 'a.png'), figures)
    assert (tmp_path / 'a.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'
    loss, update, _, rollout = drawn[0].axes
    assert next(iter(lines(loss).values())) == [[1, 2, 3, 4], [3.0, 2.0, 2.1, 2.2]]
    assert lines(update)['update norm'] == [[2, 3, 4], [0.4, 0.2, 0.1]]
    np.testing.assert_allclose(lines(update)['0.500 a pass'], [[2, 3, 4], [0.4, 0.2, 0.1]])
    assert next(iter(lines(rollout).values())) == [[1, 2], [1.0, 1.1]]
