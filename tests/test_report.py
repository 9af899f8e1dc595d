"""A page of `fbt report`: it shows any text as text, and needs nothing beside itself.

That it works in a browser is in test_report_browser.py; that it holds the run's numbers in test_report_runs.py.
"""

import itertools
import math
import re

import numpy as np
import pytest
from helpers import make_batch, make_model, make_params
from helpers_report import NASTY, contraction, figures_in, make_page, rows_of, text_of, token_changes

from fbt_jax.config_passes import PassesConfig
from fbt_jax.evaluation import report_figures as draw
from fbt_jax.evaluation.per_pass import make_eval_step
from fbt_jax.evaluation.report_page import (
    TABLE_ROWS,
    Band,
    Facts,
    Figure,
    Passage,
    Sample,
    Samples,
    Section,
    Table,
    Text,
    Token,
    Trace,
    figure_table,
    page,
    shade,
)
from fbt_jax.evaluation.token_changes import Losses, change_blocks, make_token_losses, measure

# The page


def test_text_stays_text_wherever_it_stands() -> None:
    figure = Figure('f', NASTY, NASTY, NASTY, [Trace(NASTY, [1], [2.0])], NASTY, [Band(1, 2, NASTY)])
    blocks = [
        Facts([(NASTY, NASTY, NASTY)]),
        Text(NASTY),
        Text(NASTY, 'missing'),
        Table(NASTY, [NASTY], [[NASTY, NASTY]]),
        Table(NASTY, [NASTY], [[NASTY, NASTY]], folded=True),
        figure,
        Samples(NASTY, NASTY, [(NASTY, [Sample(NASTY, NASTY, NASTY)])]),
        Passage(NASTY, [Token(NASTY, 1, ()), Token(NASTY, 2, (1.0, 2.0))]),
    ]
    html = page(title=NASTY, subtitle=NASTY, sections=[Section('s', NASTY, blocks)])
    assert '<img' not in html
    assert html.count('</script>') == 3
    assert text_of(html).count(NASTY) >= 20
    assert figures_in(html)['f']['traces'][0]['name'] == NASTY


def test_nothing_in_the_page_asks_the_network() -> None:
    html = make_page()
    assert not re.search(r'https?:|//[a-z]+\.[a-z]|@import|url\(|<link rel="stylesheet|<iframe|<base', html)
    assert set(re.findall(r'(?:src|href)="([^"#]*)', html)) <= {'', 'data:,'}
    assert len(html) < 3e6


def test_what_is_not_finite_is_null_and_says_so() -> None:
    figure = Figure('f', 't', 'x', 'y', [Trace('a', [1, 2, 3], [1.0, math.nan, math.inf])])
    html = page(title='t', subtitle='', sections=[Section('s', 's', [figure])])
    assert figures_in(html)['f']['traces'][0]['y'] == [1.0, None, None]
    assert text_of(html).count('not finite') == 2


def test_a_table_of_a_long_curve_shows_its_ends() -> None:
    x = list(range(1000))
    table = figure_table(Figure('f', 't', 'x', 'y', [Trace('a', x, x), Trace('b', [999], [0.5])]))
    assert len(table.rows) == TABLE_ROWS
    assert table.rows[0] == ('0', '0', '')
    assert table.rows[-1] == ('999', '999', '0.5')
    assert '60 of 1000' in table.caption


@pytest.mark.parametrize(
    ('difference', 'name'), [(0.0, 'n'), (-0.09, 'n'), (-0.1, 'c1'), (-0.5, 'c2'), (-9, 'c3'), (0.1, 'd1'), (1.0, 'd3')]
)
def test_shades(difference: float, name: str) -> None:
    assert shade(difference) == name


def test_headings_are_in_order_and_ids_are_unique() -> None:
    html = make_page()
    levels = [int(level) for level in re.findall(r'<h([1-6])', html)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    for name in re.findall(r'(?:href="#|aria-labelledby=")([^"]+)"', html):
        assert name in ids


# Figures


def test_curves_are_the_rows_of_the_metrics() -> None:
    rows = rows_of(steps=40)
    traces = {t.name: t for t in draw.training_figures(rows, [])[0].traces}
    for split in ('train', 'validation'):
        for k in (1, 2):
            own = [r for r in rows if r['split'] == split and f'loss_pass_{k}' in r]
            name = {'train': 'training', 'validation': 'validation'}[split]
            trace = traces[f'{name}, {draw.of_passes(k)}']
            assert list(trace.x) == [r['step'] for r in own]
            assert list(trace.y) == [r[f'loss_pass_{k}'] for r in own]
    others = {figure.name: figure for figure in draw.training_figures(rows, [])}
    for name, field in (
        ('learning-rate', 'learning_rate'),
        ('throughput', 'tokens_per_second'),
        ('gradient', 'grad_norm'),
    ):
        assert list(others[name].traces[0].y) == [r[field] for r in rows if r['split'] == 'train']
    assert 'mfu' not in others


def test_a_diverged_run_is_drawn() -> None:
    rows = rows_of(steps=40)
    for row in rows[5:]:
        row['loss_pass_1'] = row['grad_norm'] = None
    html = page(title='t', subtitle='', sections=[Section('s', 's', draw.training_figures(rows, []))])
    assert None in figures_in(html)['loss']['traces'][0]['y']
    assert draw.training_figures([], []) == []
    assert [text.text.partition(' have')[0] for text in draw.broken_rows(rows)] == [
        'From step 6 on, all of the 35 training rows',
        'From step 10 on, all of the 4 validation rows',
    ]
    assert draw.broken_rows(rows_of(steps=40)) == []
    rows[-1] |= {'loss_pass_1': 2.0, 'grad_norm': 1.0}
    assert draw.broken_rows(rows)[1].text.startswith('From step 10 on, 3 of the 4 validation rows have a loss or norm')
    nothing = {'singular_values': [math.nan], 'rollout_state_norm': [1.0, math.nan], 'loss': [math.nan] * 20}
    nothing |= {'update_norm': [None, *[math.nan] * 19], 'rate': {'value': math.nan}}
    figures = draw.contraction_figures(contraction() | nothing)
    html = page(title='t', subtitle='', sections=[Section('s', 's', figures)])
    assert set(figures_in(html)['map-update']['traces'][0]['y']) == {None}
    losses = token_changes()
    losses.nll_KBT[-1, 0, 0] = math.inf
    assert change_blocks(losses, str) == [Text('Not every loss is finite.', 'missing')]


def test_the_frame_leaves_the_first_steps_out() -> None:
    rows = rows_of(steps=100)
    rows[0]['loss_pass_1'] = 50.0
    low, high = draw.training_figures(rows, [])[0].y_range or (0, 0)
    late = [r[f'loss_pass_{k}'] for r in rows if r['step'] > 5 for k in (1, 2) if f'loss_pass_{k}' in r]
    assert low < min(late)
    assert max(late) < high < 50


def test_long_curves_keep_their_ends() -> None:
    rows = [{'step': n} for n in range(12_345)]
    shown = draw.thinned(rows)
    assert (len(shown), shown[0], shown[-1]) == (draw.POINTS, rows[0], rows[-1])


def test_bands_are_the_phases_of_the_mixture() -> None:
    passes = PassesConfig(phases=((0, (1.0,)), (0.5, (0.0, 1.0)), (90, (0.25, 0.25, 0.5)), (200, (1.0,))))
    assert draw.phase_bands(passes, 100) == [
        Band(1, 50, '1 pass'),
        Band(51, 90, '2 passes'),
        Band(91, 100, '1: 25%, 2: 25%, 3: 50%'),
    ]


# Tokens


def test_token_losses_are_those_of_the_evaluation() -> None:
    model = make_model()
    params, batch = make_params(model), make_batch()
    losses = measure(make_token_losses(model, num_passes=2), params, [batch, batch])
    sums, _ = make_eval_step(model, num_passes=2)(params, batch)
    total_K = np.where(losses.counted_BT, losses.nll_KBT, 0).sum((1, 2))
    np.testing.assert_allclose(total_K, 2 * np.asarray(sums.nll_KP).sum(-1), rtol=1e-5)
    assert losses.counted_BT.sum() == 2 * float(np.asarray(sums.tokens_P).sum())


def test_changes_of_tokens_by_hand() -> None:
    nll_KBT = np.array([[[2.0, 2.0, 2.0, 9.0]], [[1.5, 2.0, 2.2, 9.0]]])
    counted_BT = np.array([[True, True, True, False]])
    losses = Losses(nll_KBT, np.array([[7, 1, 2, 3]]), np.array([[1, 2, 3, 4]]), counted_BT, np.array([[1, 1, 1, 0]]))
    text, histogram, *_, passage = change_blocks(losses, lambda i: f'<{i}>')
    assert isinstance(text, Text)
    assert isinstance(passage, Passage)
    assert isinstance(histogram, Figure)
    assert '3 tokens of 1' in text.text
    assert '-0.1000 nats on average, +0.0000 in the median' in text.text
    assert '33.3% of them got cheaper by 0.1 nats or more, by 0.500 nats' in text.text
    assert '33.3% of them got dearer by 0.1 nats or more, by 0.200 nats' in text.text
    assert passage.title == 'Passage 1: -0.100 nats a token on average'
    assert [(t.text, tuple(t.losses)) for t in passage.tokens] == [
        ('<7>', ()),
        ('<1>', (2.0, 1.5)),
        ('<2>', (2.0, 2.0)),
        ('<3>', (2.0, 2.2)),
    ]
    assert sum(y for trace in histogram.traces for y in trace.y) == pytest.approx(1)


def test_tokens_that_change_most_have_intervals_over_pieces() -> None:
    """Id 1 by -0.2 in each of 60 pieces but for one; id 2, as often, in one piece alone; id 3 too rarely."""
    targets_BT = np.tile([[1, 2, 3, 1]], (60, 1))
    first_BT, segments_BT = np.full((60, 4), 2.0), np.tile([[1, 1, 1, 2]], (60, 1))
    last_BT = first_BT + np.where(targets_BT == 1, -0.2, 0.3)
    last_BT[0, 0] = 2.0
    counted_BT = targets_BT != 3
    counted_BT[:49, 2] = True
    targets_BT[1:, 1] = 9
    targets_BT[0, 1], segments_BT[0] = 2, 1
    losses = Losses(np.stack([first_BT, last_BT]), targets_BT, targets_BT, counted_BT, segments_BT)
    cheaper, dearer = [b for b in change_blocks(losses, str) if isinstance(b, Table)]
    assert 'of the 2 that occur 50 times or more' in cheaper.caption
    [(name, times, *_, change, interval)] = cheaper.rows
    assert (name, times, change) == ("'1'", '120', '-0.198')
    low, high = map(float, interval.split(' to '))
    assert low == -0.2
    assert -0.198 < high < -0.19
    assert [row[0] for row in dearer.rows] == ["'9'"]
    assert dearer.rows[0][-1] == '+0.300 to +0.300'
    one = Losses(losses.nll_KBT[:, :1].repeat(60, 2), *(x[:1].repeat(60, 1) for x in losses[1:]))
    [alone] = [b for b in change_blocks(one, str) if isinstance(b, Table) and 'dearer' in b.caption]
    assert {row[-1] for row in alone.rows} == {'unknown, in one piece'}
