"""The page of `fbt report` in a headless Chromium without a network: drawn, read by keyboard, on a phone, printed."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_report import NASTY, make_page, rows_of

from fbt_jax.evaluation.report_figures import training_figures
from fbt_jax.evaluation.report_page import Band, Figure, Section, Trace, page

playwright = pytest.importorskip('playwright.sync_api')
CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser')
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason='no chromium')]


@pytest.fixture(scope='module')
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=['--no-sandbox'])
        yield started
        started.close()


@pytest.fixture(scope='module')
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('report') / 'report.html'
    path.write_text(make_page())
    return path


@pytest.fixture
def opened(browser: Any, file: Path) -> Iterator[Any]:
    """Opens the page with a width and a theme; whatever went wrong or was asked of the network fails the test."""
    wrong: list[str] = []
    contexts = []

    def open_(width: int = 1280, scheme: str = 'light', path: Path = file) -> Any:
        context = browser.new_context(viewport={'width': width, 'height': 800}, color_scheme=scheme, offline=True)
        contexts.append(context)
        tab = context.new_page()
        tab.on('console', lambda message: wrong.append(f'{message.type}: {message.text}'))
        tab.on('pageerror', lambda error: wrong.append(str(error)))
        tab.on(
            'request', lambda request: None if request.url.startswith(('file:', 'data:')) else wrong.append(request.url)
        )
        tab.goto(path.as_uri())
        tab.wait_for_selector('html[data-drawn]', timeout=60_000)
        return tab

    yield open_
    for context in contexts:
        context.close()
    assert wrong == []


def ratio(tab: Any, selector: str) -> float:
    """The contrast of an element's text with what is behind it (WCAG 2)."""
    return tab.evaluate(
        """(selector) => {
        const parse = (text) => text.match(/[\\d.]+/g).map(Number);
        const light = (text) => { const [r, g, b] = parse(text).map((x) => x / 255)
            .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        const element = document.querySelector(selector);
        let behind = element;
        while (behind && parse(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
        const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(light);
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); }""",
        selector,
    )


def test_every_figure_is_drawn(opened: Any) -> None:
    tab = opened()
    figures = tab.evaluate('figures.map((f) => [f.name, f.traces.length, f.traces.map((t) => t.style)])')
    assert len(figures) == tab.locator('figure').count() == int(tab.get_attribute('html', 'data-drawn')) >= 14
    for name, traces, styles in figures:
        plot = tab.locator(f'#plot-{name}')
        assert plot.locator('.main-svg').count() >= 2
        drawn = plot.locator('.bars.trace, .barlayer .trace' if 'bars' in styles else '.scatterlayer .trace')
        assert drawn.count() == traces, name
        assert plot.locator('.xtitle').text_content()
        assert plot.locator('.ytitle').text_content()
    # Each phase of the mixture has its name and each but the first a line.
    labels = tab.locator('#plot-loss .annotation-text').all_text_contents()
    assert labels == ['1 pass', '2 passes', '1: 50%, 2: 50%']
    # The frame leaves room for the whole of the first and the last point.
    low, high = tab.evaluate("document.getElementById('plot-loss')._fullLayout.xaxis.range")
    assert low < 1 < 100 < high < 102


def test_hover_shows_numbers(opened: Any) -> None:
    tab = opened()
    box = tab.locator('#plot-gradient').bounding_box()
    tab.mouse.wheel(0, box['y'] - 200)
    tab.wait_for_timeout(200)
    box = tab.locator('#plot-gradient').bounding_box()
    tab.mouse.move(box['x'] + box['width'] / 2, box['y'] + box['height'] / 2)
    tab.wait_for_selector('#plot-gradient .hoverlayer .legend')
    shown = tab.locator('#plot-gradient .hoverlayer').text_content()
    step = int(re.match(r'(\d+)', shown).group(1))
    assert f'{1 + 1 / step:.5g}' in shown

    token = tab.locator('.tokens [role=option]').nth(5)
    token.scroll_into_view_if_needed()
    tab.wait_for_timeout(200)  # a scroll hides the tip
    token.hover()
    losses = [float(x) for x in token.get_attribute('data-losses').split()]
    told = tab.locator('#tip').text_content()
    assert tab.locator('#tip').is_visible()
    for k, loss in enumerate(losses, start=1):
        assert f'after pass {k}: {loss:.3f} nats' in told
    assert f'difference: {losses[-1] - losses[0]:+.3f}' in told
    assert f'id {token.get_attribute("data-id")}' in told


def test_figures_and_tokens_by_keyboard(opened: Any) -> None:
    tab = opened()
    tab.keyboard.press('Tab')
    assert tab.evaluate('document.activeElement.className') == 'skip'
    tab.keyboard.press('Enter')
    assert tab.evaluate('document.activeElement.id') == 'main'

    tab.focus('#plot-learning-rate')
    for key in ('ArrowRight', 'ArrowRight', 'ArrowRight', 'ArrowLeft'):
        tab.keyboard.press(key)
    reading = tab.locator('#figure-learning-rate .reading')
    assert reading.text_content() == 'step 2: learning rate 0.01'
    tab.keyboard.press('End')
    assert reading.text_content().startswith('step 100:')
    tab.keyboard.press('Escape')
    assert reading.text_content() == ''

    lists = tab.locator('.tokens').count()
    assert tab.locator('.tokens [tabindex="0"]').count() == lists
    tab.focus('.tokens [tabindex="0"]')
    where = """() => [...document.querySelector('.tokens').querySelectorAll('[role=option]')]
        .indexOf(document.activeElement)"""
    for key, expected in (('ArrowRight', 1), ('ArrowRight', 2), ('ArrowLeft', 1), ('End', 59), ('Home', 0)):
        tab.keyboard.press(key)
        assert tab.evaluate(where) == expected
        assert tab.locator('#tip').is_visible()
    before = tab.evaluate('document.activeElement.getBoundingClientRect().top + scrollY')
    tab.keyboard.press('ArrowDown')
    assert tab.evaluate('document.activeElement.getBoundingClientRect().top + scrollY') > before
    assert tab.locator('.tokens [tabindex="0"]').count() == lists
    assert tab.evaluate('document.activeElement.ariaSelected') == 'true'
    tab.keyboard.press('Escape')
    assert not tab.locator('#tip').is_visible()


def test_legends_hide_curves(opened: Any) -> None:
    tab = opened()
    button = tab.locator('#figure-loss .legend button').first
    curves = tab.locator('#plot-loss .scatterlayer .trace')
    count = curves.count()
    button.focus()
    tab.keyboard.press('Enter')
    assert button.get_attribute('aria-pressed') == 'false'
    assert curves.count() == count - 1
    tab.keyboard.press('Enter')
    assert curves.count() == count


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_the_theme_is_the_systems_and_can_be_changed(opened: Any, scheme: str) -> None:
    tab = opened(scheme=scheme)
    look = """() => [getComputedStyle(document.body).backgroundColor,
        document.querySelector('#plot-gradient .xtitle').style.fill,
        document.querySelector('#plot-gradient .js-line').style.stroke]"""
    first = tab.evaluate(look)
    assert first[0] == {'light': 'rgb(255, 255, 255)', 'dark': 'rgb(20, 23, 26)'}[scheme]
    tab.click('#theme')
    second = tab.evaluate(look)
    assert all(a != b for a, b in zip(first, second, strict=True))
    for selector in ('h1', '.facts small', 'nav a', 'figcaption summary', '.tokens .plain', '#theme'):
        assert ratio(tab, selector) >= 4.5, selector
    for name in ('c1', 'c2', 'c3', 'd1', 'd2', 'd3'):
        assert ratio(tab, f'.tokens .{name}') >= 4.5, name
    tab.click('#theme')
    assert tab.evaluate(look) == first


@pytest.mark.parametrize('width', [360, 768])
def test_nothing_is_wider_than_the_screen(opened: Any, width: int) -> None:
    tab = opened(width=width)
    assert tab.evaluate('document.documentElement.scrollWidth') == width
    for plot in tab.locator('.plot').all():
        assert plot.locator('.main-svg').first.bounding_box()['width'] <= width
    tab.locator('#config summary').click()
    assert tab.evaluate('document.documentElement.scrollWidth') == width


def test_it_prints(opened: Any, tmp_path: Path) -> None:
    tab = opened(scheme='dark')
    tab.evaluate("addEventListener('afterprint', () => { window.after = true; })")
    tab.evaluate(
        """addEventListener('beforeprint', () => {
            const widths = [...document.querySelectorAll('.plot .main-svg')].map((svg) => svg.clientWidth);
            window.printed = [getComputedStyle(document.body).backgroundColor,
                document.querySelector('#config details').open, Math.max(...widths)]; })"""
    )
    pdf = tab.pdf(prefer_css_page_size=True)
    assert pdf.startswith(b'%PDF')
    assert len(re.findall(rb'/Type\s*/Page\b', pdf)) >= 3
    background, opened_, widest = tab.evaluate('window.printed')
    assert (background, opened_) == ('rgb(255, 255, 255)', True)
    assert widest <= 688  # A4 less its margins
    tab.emulate_media(media='print')
    assert tab.locator('.hint').count() >= 2
    assert not any(hint.is_visible() for hint in tab.locator('.hint').all())
    tab.emulate_media(media='screen')
    assert tab.locator('.hint').first.is_visible()
    tab.wait_for_function('window.after')
    assert tab.evaluate('getComputedStyle(document.body).backgroundColor') == 'rgb(20, 23, 26)'
    assert not tab.evaluate("document.querySelector('#config details').open")


def test_texts_do_nothing(opened: Any) -> None:
    tab = opened()
    assert tab.evaluate('window.hacked') is None
    assert tab.locator('img').count() == 0
    assert NASTY in tab.locator('.prompt').text_content()
    assert any(NASTY in text for text in tab.locator('#figure-by-0 .legend button').all_text_contents())
    assert tab.locator('main a').count() == tab.locator('main b').count() == 0
    # Plotly takes some tags in names for its own.
    tab.focus('#plot-by-0')
    tab.keyboard.press('ArrowRight')
    assert NASTY in tab.locator('#plot-by-0 .hoverlayer').text_content()


def test_holes_and_single_points(opened: Any, tmp_path: Path) -> None:
    """Of a run that diverged, or has just begun."""
    figures = [
        Figure('hole', 'a hole', 'x', 'y', [Trace('a', [1, 2, 3, 4], [1.0, float('nan'), float('inf'), 2.0])]),
        Figure('none', 'nothing finite', 'x', 'y', [Trace('a', [1, 2], [float('nan')] * 2)], log_y=True),
        Figure('one', 'one point', 'x', 'y', [Trace('a', [1], [1.0])], log_x=True),
        *training_figures(rows_of(steps=1), [Band(1, 1, '1 pass')]),
    ]
    path = tmp_path / 'holes.html'
    path.write_text(page(title='t', subtitle='', sections=[Section('s', 'S', figures)]))
    tab = opened(path=path)
    tab.focus('#plot-hole')
    tab.keyboard.press('ArrowRight')
    tab.keyboard.press('ArrowRight')
    assert tab.locator('#figure-hole .reading').text_content() == 'x 2: a not finite'
    # A run's first row is a point, at a whole step.
    for name in ('loss', 'learning-rate', 'gradient'):
        assert tab.locator(f'#plot-{name} .scatterlayer .point').count() >= 1
        assert all(tick.isdigit() for tick in tab.locator(f'#plot-{name} .xtick text').all_text_contents())
