"""A page with every kind of block and figure that `fbt report` makes, of invented numbers, for tests of the page."""

import json
import math
import re
from html import unescape
from types import SimpleNamespace
from typing import Any

import numpy as np

from fbt_jax.evaluation import report_figures as draw
from fbt_jax.evaluation.report_page import Band, Facts, Sample, Samples, Section, Table, Text, page
from fbt_jax.evaluation.token_changes import Losses, change_blocks
from fbt_jax.training.metrics import train_row, validation_row

NASTY = '</script><img src=x onerror="window.hacked=1"><b>no</b>'
COUNTS = {'tokens_per_second': 1000.0, 'step_seconds': 1.0}


def rows_of(steps: int) -> list[dict[str, Any]]:
    """Of metrics.jsonl: each second step draws two passes, each tenth is evaluated."""
    rows = []
    for step in range(1, steps + 1):
        losses = [2 + 5 / step + k / 10 for k in range(1 + step % 2)]
        counts = {'tokens': 1000 * step, 'token_passes': 1500 * step, **COUNTS}
        rows.append(
            train_row(step=step, loss=3.0, pass_losses=losses, grad_norm=1 + 1 / step, learning_rate=0.01, **counts)
        )
        if step % 10 == 0:
            losses = [2.1 + 5 / step, 2.2 + 5 / step]
            rows.append(validation_row(step=step, pass_losses=losses, update_norms=[1 / step], bytes_per_token=4.0))
    return rows


def contraction() -> dict[str, Any]:
    return {
        'passes': 20,
        'loss': [3 + 0.5 ** (k + 1) for k in range(20)],
        'update_norm': [None, *(0.5**k for k in range(1, 20))],
        'fitted': (2, 20),
        'rate': {'value': 0.5},
        'singular_values': [0.5, 0.7, 0.8, 1.4, 2.5],
        'rollout_state_norm': [1 + math.sin(t) / 20 for t in range(60)],
    }


def token_changes() -> Losses:
    rng = np.random.default_rng(0)
    nll_KBT = rng.gamma(2.0, 1.5, (3, 4, 60))
    tokens_BT = rng.integers(0, 30, (4, 61))
    ones_BT = np.ones((4, 60), int)
    return Losses(nll_KBT, tokens_BT[:, :-1], tokens_BT[:, 1:], ones_BT > 0, ones_BT)


def name_of(token: int) -> str:
    return NASTY if token == 3 else '\n' if token == 4 else f' w{token}'


def _group(name: str, seeds: int, passes: int) -> Any:
    axes_SAN = np.multiply.outer(np.ones(seeds), np.outer([1e5, 2e5, 1e12], [1.0, 2.0, 4.0]))
    loss_SKN = np.array([[[5.0, 4.0, 3.5] for _ in range(passes)] for _ in range(seeds)])
    return SimpleNamespace(
        seeds=range(seeds),
        workdirs=[f'{name}{s}' for s in range(seeds)],
        trained_passes=passes,
        axes_SAN=axes_SAN,
        loss_SKN=loss_SKN,
    )


def _sections() -> list[Section]:
    bands = [Band(1, 3, '1 pass'), Band(4, 90, '2 passes'), Band(91, 100, '1: 50%, 2: 50%')]
    samples = [
        Sample(mode, f'a text {NASTY}\nof two lines', '9 tokens, cut off') for mode in ('standard', 'soft', 'fused')
    ]
    compared = SimpleNamespace(unit='nats per token', groups=[_group('base', 1, 1), _group(f'run {NASTY}', 1, 2)])
    intervals = {'loss': {'1': [2.9, 3.1], '2': [2.8, 3.0]}}
    return [
        Section('summary', 'Summary', [Facts([('loss', '3.0', 'nats per token'), (NASTY, NASTY, NASTY)])]),
        Section('training', 'Training', draw.training_figures(rows_of(100), bands)),
        Section(
            'evaluation',
            'Loss by passes',
            [
                Table('losses', ['passes', 'nats per token'], [['1', '3.0 (2.9 to 3.1)'], ['2', '2.9 (2.8 to 3.0)']]),
                draw.pass_figure(intervals, np.array([3.0, 2.9])),
                draw.position_figure(np.array([[0.9, 0.5, 0.1], [1.0, 0.8, 0.6]]), [1, 2]),
            ],
        ),
        Section('map', 'The map', [Text('Verdict: contracting.', 'verdict'), *draw.contraction_figures(contraction())]),
        Section('samples', 'Samples', [Samples('Prompt 1', NASTY, [('greedy', samples)])]),
        Section('tokens', 'Token by token', change_blocks(token_changes(), name_of)),
        Section(
            'comparison',
            'Beside another',
            draw.comparison_figures(compared, lambda g, s: compared.groups[g].workdirs[s]),
        ),
        Section(
            'config', 'Configuration', [Table('keys', ['key', 'value'], [['a.b', '1' * 300]], frozenset([0]), True)]
        ),
    ]


SECTIONS = _sections()


def make_page() -> str:
    return page(title='a run: a report', subtitle='runs/a, step 100', sections=SECTIONS)


def figures_in(html: str) -> dict[str, Any]:
    """The figures' data by name, as the page's script reads them."""
    [text] = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', html, re.DOTALL)
    return {figure['name']: figure for figure in json.loads(text)}


def text_of(html: str) -> str:
    return unescape(re.sub(r'<[^>]*>', ' ', re.sub(r'<(script|style).*?</\1>', '', html, flags=re.DOTALL)))
