"""`fbt report` on runs: the page holds their numbers, and says what it lacks."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from helpers_e2e import PLAIN, TEXT, finish, start, train, write_config
from helpers_report import NASTY, figures_in, text_of
from test_comparison import make_run, power_law

from fbt_jax.cli import main
from fbt_jax.errors import UserError
from fbt_jax.evaluation.per_pass import BatchSums, DocumentSums, PassResults
from fbt_jax.evaluation.report_page import (
    Section,
    Table,
    page,
)
from fbt_jax.training import report as report_module
from fbt_jax.training.flops import train_flops
from fbt_jax.training.report import Asked, difference_from, evaluation_blocks, report
from fbt_jax.training.report_tables import difference_blocks, headline
from fbt_jax.training.run_folder import read_config
from fbt_jax.training.scoring import Scored


def test_a_run_without_a_checkpoint_says_what_it_lacks(tmp_path: Path) -> None:
    workdir = make_run(tmp_path / 'a', steps=30, loss=lambda tokens: [power_law(tokens)] * 3)
    html = report(Asked(workdir))
    text = text_of(html)
    assert 'no checkpoint yet' in text
    assert text.count('The run has saved no checkpoint yet.') == 4
    rows = [json.loads(line) for line in (tmp_path / 'a' / 'metrics.jsonl').read_text().splitlines()]
    last = rows[-1]
    assert f'{last["loss_pass_1"]:.4f}' in text
    trace = next(t for t in figures_in(html)['loss']['traces'] if t['name'] == 'validation, 1 pass')
    assert trace['y'] == [row['loss_pass_1'] for row in rows if row['split'] == 'validation']
    (tmp_path / 'a' / 'metrics.jsonl').unlink()
    assert 'metrics.jsonl has no rows yet.' in text_of(report(Asked(workdir)))


def test_another_run_stands_beside_it(tmp_path: Path) -> None:
    base = make_run(tmp_path / 'base', steps=40, loss=lambda tokens: [power_law(tokens)], model__fusion='none')
    run = make_run(tmp_path / 'run', steps=30, loss=lambda tokens: [power_law(2 * tokens)] * 2)
    html = report(Asked(run, against=base))
    figures = figures_in(html)
    assert {'by-0', 'by-1', 'by-2'} <= figures.keys()
    by_tokens = {t['name']: t for t in figures['by-0']['traces']}
    rows = [json.loads(line) for line in (tmp_path / 'base' / 'metrics.jsonl').read_text().splitlines()]
    trace = by_tokens[f'{base}, 1 pass']
    assert trace['y'] == [r['loss_pass_1'] for r in rows if r['split'] == 'validation']
    assert trace['x'] == [r['tokens'] for r in rows if r['split'] == 'train']
    text = text_of(html)
    assert 'Data-efficiency factor' in text
    assert "this run's last evaluation while training (metrics.jsonl, step 30, on all validation rows)" in text
    # The run reads the loss of twice its 30 steps' tokens; the baseline ends at 40 steps.
    assert '> 1.33' in text
    assert "> says that the baseline's curve ends before it comes down to that loss" in text
    assert '< says that' not in text
    marked = re.findall(r'<tr class="marked"><th scope="row">([^<]*)</th>', html)
    assert {'model.fusion', 'passes.phases'} <= set(marked)


def scored(workdir: str, *, step: int, rows: int, tokens: int, documents: int) -> Scored:
    """Losses 3.0 and 2.5, of invented validation rows; 4 bytes a token."""
    tokens_U = np.full(documents, tokens / documents)
    nll_K1 = np.array([[3.0], [2.5]]) * tokens
    sums = BatchSums(nll_K1, nll_K1, nll_K1, np.array([tokens]), 4 * tokens)
    results = PassResults(sums, DocumentSums(nll_K1 / documents * np.ones(documents), tokens_U, 4 * tokens_U))
    data = SimpleNamespace(validation={'validation': SimpleNamespace(num_rows=rows)}, tokenizer=None)
    run = SimpleNamespace(step=step, config=read_config(workdir))
    return Scored(workdir, cast(Any, run), cast(Any, data), [1, 2], {'validation': results}, 2, False)


def test_losses_say_on_which_rows_they_are(tmp_path: Path) -> None:
    """In the headline, in the table, and that so few documents are too few."""
    workdir = make_run(tmp_path / 'a', steps=3, loss=lambda tokens: [power_law(tokens)] * 2, training__eval_rows=64)
    rows = [json.loads(line) for line in (tmp_path / 'a' / 'metrics.jsonl').read_text().splitlines()]
    config, found = read_config(workdir), scored(workdir, step=3, rows=430, tokens=2000, documents=13)

    def remarks(scored_rows: int, of: Scored | None = found) -> list[str]:
        entries = headline(config, rows, None, of, None, scored_rows=scored_rows).entries
        return [remark for label, _, remark in entries if label.startswith('validation loss')]

    best = f'best while training {rows[-1]["loss_pass_1"]:.4f} at step 3, on 64 rows of each validation set'
    assert remarks(16)[0] == f'nats per token, on 16 of 430 validation rows (2,000 tokens); {best}'
    for asked in (0, 430, 500):
        assert remarks(asked)[0].startswith('nats per token, on all 430 validation rows (2,000 tokens); best')
    assert remarks(0, None)[0].startswith('nats per token, logged at step 3, on 64 rows of each validation set; best')
    page_ = page(title='t', subtitle='', sections=[Section('s', 's', evaluation_blocks(found))])
    assert 'Causal: in passes 1 to 2 no loss depends on what comes after its target.' in text_of(page_)
    assert '13 documents; of so few (fewer than 30) they are likely too narrow' in text_of(page_)
    many = page(
        title='t',
        subtitle='',
        sections=[Section('s', 's', evaluation_blocks(scored(workdir, step=3, rows=430, tokens=2000, documents=40)))],
    )
    assert 'too narrow' not in text_of(many)


def test_the_headline_is_of_the_checkpoint(tmp_path: Path) -> None:
    """Step 25 of 40, logged each tenth at 1 s a step: what it cost, and the best loss, until there."""
    common: dict[str, Any] = {
        'loss': lambda tokens: [power_law(tokens)] * 2,
        'drawn': lambda step: 1 + (step > 20),
        'log_every': 10,
        'training__log_every': 10,
        'passes__phases': [[0, [0.5, 0.5]]],
    }
    workdir = make_run(tmp_path / 'a', steps=40, eval_every=8, **common)
    rows = [json.loads(line) for line in (tmp_path / 'a' / 'metrics.jsonl').read_text().splitlines()]

    def entries(step: int | None, of: str = workdir, first: int = 0) -> dict[str, tuple[str, str]]:
        trained = None if step is None else SimpleNamespace(step=step, params={})
        shown = [row for row in rows if row['step'] > first]
        found = headline(read_config(of), shown, cast(Any, trained), None, None, scored_rows=0).entries
        return {label: (value, remark) for label, value, remark in found}

    config = read_config(workdir).model
    one, two = (train_flops(config, seq_len=64, passes=k) for k in (1, 2))
    for step, tokens, late in ((25, '25k', 5), (40, '40k', 20), (None, '40k', 20)):
        found = entries(step)
        assert found['training tokens'][0] == tokens
        token_passes, flops = found['training tokens'][1].removesuffix(' FLOPs').split(' token-passes, ')
        assert token_passes == f'{20 + 2 * late}k'
        digits, exponent = flops.replace('\xa0', '').translate(str.maketrans('⁰¹²³⁴⁵⁶⁷⁸⁹', '0123456789')).split('×10')
        assert float(digits) * 10.0 ** int(exponent) == pytest.approx(20_000 * one + 1000 * late * two, rel=5e-3)
        assert found['time of the steps'][0] == f'{20 + late} s'
        last = max(row['step'] for row in rows if row['split'] == 'validation' and row['step'] <= (step or 40))
        assert f'best while training {power_law(1000 * last):.4f} at step {last}' in found['validation loss, 1 pass'][1]
    assert 'validation loss, 2 passes' in entries(40)
    assert 'validation loss, 2 passes' not in entries(20)  # no step has trained it yet
    # One that continues at step 20 has spent 5 s.
    further = make_run(tmp_path / 'b', steps=40, init__from=workdir, init__schedule='continue', **common)
    assert entries(25, further, first=20)['time of the steps'][0] == '5 s'


def test_curves_are_marked_where_the_checkpoint_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workdir = make_run(tmp_path / 'a', steps=30, loss=lambda tokens: [3.0])
    for step, marked in ((20, True), (30, False)):
        fake = SimpleNamespace(
            step=step, params={}, trained_feedback=False, tokenizer=None, config=read_config(workdir)
        )
        monkeypatch.setattr(report_module, 'load_run', lambda *_, fake=fake: fake)
        html = report(Asked(workdir, step=step))
        told = 'The dashed line: step 20, the checkpoint of this page. Training went on to step 30.'
        assert (told in text_of(html)) == marked
        for name in ('loss', 'learning-rate', 'throughput', 'gradient'):
            assert figures_in(html)[name]['x_line'] == (step if marked else None)


def test_a_difference_says_what_either_was_trained_with(tmp_path: Path) -> None:
    one = make_run(tmp_path / 'one', steps=30, loss=lambda tokens: [3.0] * 2, drawn=lambda step: 2, log_every=10)
    two = make_run(tmp_path / 'two', steps=15, loss=lambda tokens: [3.0])
    a, b = (scored(name, step=step, rows=9, tokens=900, documents=9) for name, step in ((one, 25), (two, 15)))
    entry = {'other_passes': 1, 'difference': -1e-9, 'interval': [-2e-9, 0.5]}
    difference = {'workdir': two, 'step': 15, 'unit': 'nats per token', 'passes': {'1': entry}}
    table, trained = (cast(Table, block) for block in difference_blocks(difference, a, b))
    assert table.rows == [('1', '1', '+0.0000 (+0.0000 to +0.5000)')]
    assert f'Loss at step 25 less that of {two} at step 15' in table.caption
    assert 'over 9 documents; of so few' in table.caption
    assert [row[:4] for row in trained.rows] == [(one, '25', '25,000', '50,000'), (two, '15', '15,000', '15,000')]
    (tmp_path / 'two' / 'metrics.jsonl').unlink()
    assert cast(Table, difference_blocks(difference, a, b)[1]).rows[1][2:] == ('unknown',) * 3


def test_rows_of_another_tokenizer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise UserError('its validation documents are others')

    monkeypatch.setattr(report_module, 'require_same_sets', lambda *_: None)
    monkeypatch.setattr(report_module, 'score', lambda *_, **__: None)
    monkeypatch.setattr(report_module, 'run_difference', refuse)
    monkeypatch.setattr(report_module, 'same_tokenizer', lambda *_: False)
    any_scored = cast(Any, SimpleNamespace(passes=[1]))
    with pytest.raises(UserError, match=r'documents are others; --rows=8 is the likely reason'):
        difference_from(Asked('a', 'b', rows=8), any_scored)
    with pytest.raises(UserError, match=r'documents are others$'):
        difference_from(Asked('a', 'b'), any_scored)


def test_names_of_folders_and_configs_are_text(tmp_path: Path) -> None:
    name = 'a<img src=x onerror=alert(1)>'
    workdir = make_run(tmp_path / name, steps=3, loss=lambda tokens: [3.0], init__from=NASTY)
    html = report(Asked(workdir))
    assert '<img' not in html
    assert name in text_of(html)
    assert json.dumps(NASTY) in text_of(html)


@pytest.mark.parametrize(
    ('arguments', 'told'),
    [
        (['--workdir=none'], 'none: no run here (no config.json)'),
        (['--workdir=a', '--out=none/a.html'], '--out=none/a.html: must be a file in a folder that exists'),
        (['--workdir=a', '--out=a.pdf'], '--out=a.pdf: must end in .html'),
        (['--workdir=a', '--out=/proc/a.html'], '--out=/proc/a.html: cannot be written (%s); name another place'),
        (['--workdir=a', '--against='], '--against=: must be the folder of another run'),
        (['--workdir=a', '--against=./a'], '--against=./a: is the run itself'),
        (['--workdir=a', '--against=none'], 'none: no run here (no config.json)'),
        (['--workdir=a', '--passes=5'], '--passes=5: must be at least 6, of which the second half is looked at apart'),
        (['--workdir=a', '--rows=-1'], '--rows=-1: must not be negative'),
        (['--workdir=a', '--prompt=She'], 'The run has saved no checkpoint yet'),
        (['--workdir=a', '--what'], 'unknown argument --what; see --help'),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path('a'), steps=3, loss=lambda tokens: [3.0])
    assert main(['report', *arguments]) == 2
    out, err = capsys.readouterr()
    pattern = re.escape(f'fbt report: {told}\n').replace('%s', '[A-Z][a-z ]+')
    assert out == ''
    assert re.fullmatch(pattern, err)
    assert not Path('a/report.html').exists()


@pytest.mark.slow
def test_trained_runs(tmp_path: Path) -> None:
    """With feedback on text, without feedback on text, on rows that are no text: everything, or why not."""
    config, small = write_config(tmp_path), ('--config.training.steps=12', '--config.data.batch_size=4')
    text = (*TEXT, '--config.data.seq_len=64', '--config.training.eval_rows=8', *small)
    train(config, tmp_path / 'fed', *text)
    train(config, tmp_path / 'plain', *text, *PLAIN)
    train(config, tmp_path / 'words', *small)

    def reported(*arguments: str) -> tuple[str, dict[str, Any]]:
        result = finish(start('report', *arguments, '--rows=8', '--passes=8', f'--out={tmp_path / "r.html"}'))
        assert result.status == 0, result.text
        html = (tmp_path / 'r.html').read_text()
        return html, figures_in(html)

    html, figures = reported(
        f'--workdir={tmp_path / "fed"}', '--prompt=</script><b>She', f'--against={tmp_path / "plain"}'
    )
    assert figures.keys() >= {'loss', 'passes', 'map-loss', 'map-update', 'singular', 'rollout', 'differences', 'by-0'}
    assert '</script><b>She' in text_of(html)
    for words in ('fused (2 passes over', 'drawn at temperature 0.8', 'intervals, paired, over', 'Verdict: '):
        assert words in text_of(html)
    assert html.count('role="option"') > 100
    for name in ('map-loss', 'passes'):
        assert all(y is not None for y in figures[name]['traces'][0]['y'])

    html, figures = reported(f'--workdir={tmp_path / "plain"}')
    assert 'standard is the only mode' in text_of(html)
    assert text_of(html).count('The run was trained without feedback (one pass only).') == 2
    assert not figures.keys() & {'map-loss', 'passes', 'differences'}

    html, figures = reported(f'--workdir={tmp_path / "words"}')
    assert 'its rows are not text, so there is nothing to read' in text_of(html)
    assert len(figures['positions']['traces'][0]['y']) == 12
