"""The page of `fbt report`: typed blocks in, one HTML file out, with nothing in it that asks the network for anything.

Whatever comes from a run (texts, configs, names of folders) is escaped here and nowhere else: blocks hold plain text.
Figures are drawn by Plotly in the reader's browser, in the colours of the theme; each has its numbers in a table too.
report.html, report.css and report.js lie beside this file.
"""

import base64
import functools
import gzip
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from fbt_jax.files import to_json

HERE = Path(__file__).parent
TABLE_ROWS = 60  # of a figure's table; a longer curve shows that many of its points, evenly spread

Number = float | int | None


class Facts(NamedTuple):
    """What a reader should see first: (label, value, remark) each."""

    entries: Sequence[tuple[str, str, str]]


class Text(NamedTuple):
    """A paragraph. kind: '', missing (why something isn't there), verdict or hint (of no use on paper)."""

    text: str
    kind: str = ''


class Table(NamedTuple):
    """The first column names the rows. `marked`: which rows to bring out; `folded`: shown when asked for."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: frozenset[int] = frozenset()
    folded: bool = False


class Trace(NamedTuple):
    """A curve. colour: which of the theme's; style: line, thin, dash, dot or bars; low and high: an interval's ends."""

    name: str
    x: Sequence[Number]
    y: Sequence[Number]
    colour: int = 0
    style: str = 'line'
    low: Sequence[Number] | None = None
    high: Sequence[Number] | None = None


class Band(NamedTuple):
    """From one x to another, with its name above."""

    start: float
    end: float
    label: str


class Figure(NamedTuple):
    name: str  # its id in the page
    title: str
    xlabel: str
    ylabel: str
    traces: Sequence[Trace]
    note: str = ''
    bands: Sequence[Band] = ()
    log_x: bool = False
    log_y: bool = False
    y_range: tuple[float, float] | None = None  # None: all of it
    x_line: float | None = None
    wide: bool = False
    whole_x: bool = False  # ticks at whole numbers only
    hint: str = ''  # after the note, of no use on paper


class Sample(NamedTuple):
    mode: str
    text: str
    remark: str


class Samples(NamedTuple):
    """Continuations of one prompt, the modes side by side, a row for each (setting, samples)."""

    title: str
    prompt: str
    rows: Sequence[tuple[str, Sequence[Sample]]]


class Token(NamedTuple):
    """What a reader of a passage sees of one token. losses: after passes 1..K, nats; empty where none was counted."""

    text: str
    id: int
    losses: Sequence[Number]


class Passage(NamedTuple):
    """Tokens coloured by how much the last of their losses differs from the first."""

    title: str
    tokens: Sequence[Token]


class Shades(NamedTuple):
    """What the colours of passages mean."""

    cheaper: str
    dearer: str


Block = Facts | Text | Table | Figure | Samples | Shades | Passage


class Section(NamedTuple):
    name: str  # its id in the page
    title: str
    blocks: Sequence[Block]


# Differences in nats at which a token's colour changes; report.css has one colour for each side of each.
SHADES = (0.1, 0.4, 1.0)


def page(*, title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The whole file."""
    figures = [block for section in sections for block in section.blocks if isinstance(block, Figure)]
    return Template(_asset('report.html')).substitute(
        title=escape(title),
        subtitle=escape(subtitle),
        style=_asset('report.css'),
        links=''.join(f'<li><a href="#{s.name}">{escape(s.title)}</a></li>' for s in sections),
        sections='\n'.join(map(_section, sections)),
        figures=_json([figure._asdict() | {'traces': [t._asdict() for t in figure.traces]} for figure in figures]),
        plotly=_plotly(),
        script=_asset('report.js'),
    )


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding='utf-8')


@functools.cache
def _plotly() -> str:
    """The library, compressed, in base64: 2 MB instead of 5, and none of the addresses that its source mentions."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _json(value: Any) -> str:
    """For a script element: nothing in it can end that, and what isn't finite is null."""
    text = to_json(value)
    return text.replace('<', '\\u003c').replace('>', '\\u003e').replace('&', '\\u0026')


def _section(section: Section) -> str:
    parts, figures = [], []
    for block in [*section.blocks, None]:
        if isinstance(block, Figure):
            figures.append(_figure(block))
            continue
        if figures:
            parts.append(f'<div class="figures">{"".join(figures)}</div>')
            figures = []
        if block is not None:
            parts.append(_BLOCKS[type(block)](block))
    head = f'<h2 id="{section.name}-title">{escape(section.title)}</h2>'
    return f'<section id="{section.name}" aria-labelledby="{section.name}-title">{head}{"".join(parts)}</section>'


def _facts(block: Facts) -> str:
    told = []
    for label, value, remark in block.entries:
        small = f'<small>{escape(remark)}</small>' if remark else ''
        told.append(f'<div><dt>{escape(label)}</dt><dd>{escape(value)}{small}</dd></div>')
    return f'<dl class="facts">{"".join(told)}</dl>'


def _text(block: Text) -> str:
    return f'<p{f" class={chr(34)}{block.kind}{chr(34)}" if block.kind else ""}>{escape(block.text)}</p>'


def _table(block: Table) -> str:
    rows = []
    for number, (first, *rest) in enumerate(block.rows):
        marked = ' class="marked"' if number in block.marked else ''
        cells = ''.join(f'<td>{escape(cell)}</td>' for cell in rest)
        rows.append(f'<tr{marked}><th scope="row">{escape(first)}</th>{cells}</tr>')
    head = ''.join(f'<th scope="col">{escape(cell)}</th>' for cell in block.head)
    label = escape(block.caption)
    table = f'<table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    # What scrolls by itself must be reachable by keyboard, and have a name then.
    scrolled = f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">{table}</div>'
    if block.folded:
        return f'<details><summary>{label}</summary>{scrolled}</details>'
    return f'<div class="table"><p class="caption">{label}</p>{scrolled}</div>'


def _figure(block: Figure) -> str:
    name = escape(block.name)
    hint = f' <span class="hint">{escape(block.hint)}</span>' if block.hint else ''
    note = f'<p>{escape(block.note)}{hint}</p>' if block.note or hint else ''
    return (
        f'<figure id="figure-{name}"{" class=wide" if block.wide else ""}>'
        f'<h3 id="label-{name}">{escape(block.title)}</h3>'
        f'<div class="plot" id="plot-{name}" tabindex="0" role="group" aria-roledescription="figure" '
        f'aria-label="{escape(_told(block))}"></div><p class="reading" role="status"></p>'
        f'<figcaption>{note}{_table(figure_table(block))}</figcaption></figure>'
    )


def _told(figure: Figure) -> str:
    """The figure in a sentence, for those who don't see it."""
    ends = []
    for trace in figure.traces:
        known = [(x, y) for x, y in zip(trace.x, trace.y, strict=True) if y is not None and math.isfinite(y)]
        if known and trace.style != 'bars':
            ends.append(f'{trace.name} from {known[0][1]:.4g} to {known[-1][1]:.4g}')
    keys = 'Arrow keys step through the points.'
    return f'{figure.title}. {figure.ylabel} by {figure.xlabel}. {"; ".join(ends)}{"." if ends else ""} {keys}'


def figure_table(figure: Figure) -> Table:
    """Its numbers: a row an x, a column a trace."""
    xs = sorted({x for trace in figure.traces for x in trace.x if x is not None})
    shown = xs if len(xs) <= TABLE_ROWS else [xs[i * (len(xs) - 1) // (TABLE_ROWS - 1)] for i in range(TABLE_ROWS)]
    by_x = [dict(zip(trace.x, trace.y, strict=True)) for trace in figure.traces]
    ends = [
        {} if t.low is None or t.high is None else dict(zip(t.x, zip(t.low, t.high, strict=True), strict=True))
        for t in figure.traces
    ]
    rows = []
    for x in shown:
        cells = []
        for values, intervals in zip(by_x, ends, strict=True):
            interval = f' ({_cell(intervals[x][0])} to {_cell(intervals[x][1])})' if x in intervals else ''
            cells.append(_cell(values[x]) + interval if x in values else '')
        rows.append((_cell(x), *cells))
    some = '' if len(shown) == len(xs) else f', {len(shown)} of {len(xs)} points'
    head = (figure.xlabel, *(trace.name for trace in figure.traces))
    return Table(f'Numbers: {figure.title}{some}', head, rows, folded=True)


def _cell(value: Number) -> str:
    if value is None or not math.isfinite(value):
        return 'not finite'
    return f'{value:,}' if isinstance(value, int) else f'{value:.5g}' if abs(value) < 1e5 else f'{value:.4g}'


def _samples(block: Samples) -> str:
    rows = []
    for setting, samples in block.rows:
        columns = ''.join(
            f'<div class="sample"><h5>{escape(sample.mode)}</h5><p class="text">{escape(sample.text)}</p>'
            f'<p class="remark">{escape(sample.remark)}</p></div>'
            for sample in samples
        )
        rows.append(f'<h4>{escape(setting)}</h4><div class="columns">{columns}</div>')
    prompt = f'<h3>{escape(block.title)}</h3><p class="text prompt">{escape(block.prompt)}</p>'
    return f'<article class="samples">{prompt}{"".join(rows)}</article>'


def shade(difference: float) -> str:
    """The class of a token's colour: c (cheaper) or d (dearer) and how much, or n."""
    size = sum(abs(difference) >= edge for edge in SHADES)
    return f'{"c" if difference < 0 else "d"}{size}' if size else 'n'


def _shades(block: Shades) -> str:
    """From the cheapest to the dearest."""
    entries = [(f'c{n}', f'{block.cheaper} by ≥ {SHADES[n - 1]:g}') for n in (3, 2, 1)]
    entries += [('n', f'within {SHADES[0]:g} nats')]
    entries += [(f'd{n}', f'{block.dearer} by ≥ {SHADES[n - 1]:g}') for n in (1, 2, 3)]
    items = ''.join(f'<li class="{name}">{escape(told)}</li>' for name, told in entries)
    return f'<ul class="shades" aria-label="What the colours mean">{items}</ul>'


def _passage(block: Passage) -> str:
    spans = []
    for token in block.tokens:
        known = [loss for loss in token.losses if loss is not None and math.isfinite(loss)]
        text = escape(token.text).replace('\n', '<i>↵</i>\n')
        if len(known) < 2 or len(known) < len(token.losses):
            spans.append(f'<span class="plain">{text}</span>')
            continue
        difference = known[-1] - known[0]
        losses = ' '.join(f'{loss:.4f}' for loss in known)
        told = (
            f'{token.text!r}: {known[0]:.2f} nats after pass 1, {known[-1]:.2f} after {len(known)}, '
            f'{abs(difference):.2f} {"cheaper" if difference < 0 else "dearer"}'
        )
        spans.append(
            f'<span role="option" aria-selected="false" tabindex="-1" class="{shade(difference)}" '
            f'data-id="{token.id}" data-losses="{losses}" aria-label="{escape(told)}">{text}</span>'
        )
    label = escape(f'{block.title}; arrow keys move from token to token')
    return (
        f'<div class="passage"><h3>{escape(block.title)}</h3>'
        f'<div class="tokens text" role="listbox" aria-label="{label}">{"".join(spans)}</div></div>'
    )


_BLOCKS: dict[type, Callable[[Any], str]] = {
    Facts: _facts,
    Text: _text,
    Table: _table,
    Samples: _samples,
    Shades: _shades,
    Passage: _passage,
}
