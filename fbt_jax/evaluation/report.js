// The page of `fbt report`: figures in the theme's colours, tokens and figures by keyboard, light and dark, print.
'use strict';
const root = document.documentElement;
const figures = JSON.parse(document.getElementById('figures').textContent);
const plain = (text) => text.replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;');
const plotOf = (figure) => document.getElementById('plot-' + figure.name);

// Colours: a browser resolves light-dark() only where a property uses it.
const probe = document.createElement('span');
document.body.append(probe);
function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}
const series = (number) => colour('series-' + (number % 6));

function traceOf(trace, number, figure) {
  const own = { x: trace.x, y: trace.y, name: plain(trace.name), visible: figure.hidden?.has(number) ? 'legendonly' : true };
  const ink = series(trace.colour);
  if (trace.style === 'bars') return { ...own, type: 'bar', marker: { color: ink }, hovertemplate: '%{y:.4~g}<extra></extra>' };
  const thin = trace.style === 'thin';
  const dash = { dash: 'dash', dot: 'dot' }[trace.style] || 'solid';
  const few = trace.x.length === 1 || (trace.style === 'line' && trace.x.length <= 60);
  const made = {
    ...own, type: 'scatter', mode: few ? 'lines+markers' : 'lines', opacity: thin ? 0.4 : 1,
    line: { color: ink, width: thin ? 1 : 2, dash }, marker: { size: 5, color: ink }, hovertemplate: '%{y:.5~g}',
  };
  if (trace.low) {
    const plus = trace.high.map((high, i) => high - trace.y[i]), minus = trace.low.map((low, i) => trace.y[i] - low);
    made.error_y = { type: 'data', symmetric: false, array: plus, arrayminus: minus, color: ink, thickness: 1, width: 4 };
  }
  return made;
}

// Plotly labels a decade's parts in two sizes, or rotates them: ticks at 1, 2 and 5, or at few powers of ten, instead.
const raised = (power) => '10' + String(power).replace('-', '⁻').replace(/\d/g, (digit) => '⁰¹²³⁴⁵⁶⁷⁸⁹'[digit]);
function short(value) {
  const power = Math.floor(Math.log10(value) + 1e-9), digit = Math.round(value / 10 ** power);
  if (power >= 12 || power < -3) return (digit === 1 ? '' : `${digit}×`) + raised(power);
  const [size, unit] = [[1e9, 'B'], [1e6, 'M'], [1e3, 'k'], [1, '']].find(([size]) => value >= size * 0.999) || [1, ''];
  return Number((value / size).toPrecision(3)) + unit;
}
function logTicks(axis, values) {
  const known = values.filter((value) => value > 0);
  if (!known.length) return;
  const low = Math.log10(Math.min(...known)), high = Math.log10(Math.max(...known));
  const every = Math.max(1, Math.ceil((high - low) / 6)), parts = high - low > 2 ? [1] : [1, 2, 5];
  axis.tickvals = [];
  for (let power = Math.floor(low) - 1; power <= high + 1; power++) {
    if (power % every === 0) axis.tickvals.push(...parts.map((part) => Number(`${part}e${power}`)));
  }
  axis.ticktext = axis.tickvals.map(short);
}

function layoutOf(figure, width) {
  const axis = (label, log) => ({
    title: { text: plain(label), standoff: 8 }, type: log ? 'log' : 'linear', gridcolor: colour('grid'), zeroline: false,
    linecolor: colour('rule'), showline: true, ticks: 'outside', tickcolor: colour('rule'), ticklen: 4, automargin: true,
    exponentformat: 'power', minexponent: 4,
  });
  const x = axis(figure.xlabel, figure.log_x), y = axis(figure.ylabel, figure.log_y);
  const values = figure.traces.flatMap((trace) => trace.x);
  if (figure.whole_x && Math.max(...values) - Math.min(...values) <= 12) x.dtick = 1;
  if (figure.log_x) logTicks(x, values);
  if (figure.log_y) logTicks(y, figure.traces.flatMap((trace) => trace.y));
  if (figure.y_range) y.range = figure.y_range;
  const shapes = [], annotations = [];
  if (figure.bands.length) {
    const least = Math.min(1, ...values), most = Math.max(...values), scale = (width - 80) / (most - least);
    const beside = (most - least) / 100 || 0.5; // so that no point is cut in half by the frame
    x.range = [least - beside, most + beside];
    figure.bands.forEach(([start, end, label], i) => {
      const last = i + 1 === figure.bands.length, from = i ? start : x.range[0], until = last ? x.range[1] : figure.bands[i + 1][0];
      shapes.push({
        type: 'rect', xref: 'x', yref: 'paper', x0: from, x1: until, y0: 0, y1: 1, layer: 'below', line: { width: 0 },
        fillcolor: i % 2 ? colour('band') : 'rgba(0,0,0,0)',
      });
      if (i) shapes.push({ type: 'line', xref: 'x', yref: 'paper', x0: start, x1: start, y0: 0, y1: 1, line: { width: 1, dash: 'dot', color: colour('faint') } });
      const fits = (until - from) * scale > 6.5 * label.length;
      annotations.push({
        x: (from + until) / 2, y: 1, xref: 'x', yref: 'paper', yanchor: fits ? 'bottom' : 'top', text: plain(label), showarrow: false,
        textangle: fits ? 0 : -90, font: { size: 11, color: colour('faint') }, bgcolor: fits ? undefined : colour('paper'), opacity: fits ? 1 : 0.85,
      });
    });
  }
  if (figure.x_line !== null) {
    shapes.push({ type: 'line', xref: 'x', yref: 'paper', x0: figure.x_line, x1: figure.x_line, y0: 0, y1: 1, line: { color: series(1), dash: 'dash', width: 2 } });
  }
  return {
    width, height: plotOf(figure).clientHeight || 270, margin: { l: 56, r: 14, t: 24, b: 44 }, xaxis: x, yaxis: y, shapes, annotations, showlegend: false,
    paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', bargap: 0.08, barmode: 'overlay', hovermode: 'x unified',
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour('ink') },
    hoverlabel: { bgcolor: colour('panel'), bordercolor: colour('rule'), font: { color: colour('ink') }, namelength: -1 },
    dragmode: matchMedia('(pointer: coarse)').matches ? false : 'zoom',
  };
}

function draw(figure, width) {
  const plot = plotOf(figure);
  const traces = figure.traces.map((trace, number) => traceOf(trace, number, figure));
  Plotly.react(plot, traces, layoutOf(figure, width || plot.clientWidth), { displayModeBar: false });
  drawLegend(figure);
}

function drawAll(widthOf) {
  if (window.Plotly) figures.forEach((figure) => draw(figure, widthOf?.(figure)));
}

// A legend of buttons: it wraps, and takes the keyboard.
function drawLegend(figure) {
  if (figure.traces.length < 2) return;
  const plot = plotOf(figure);
  let legend = plot.parentElement.querySelector('.legend');
  if (!legend) {
    legend = document.createElement('div');
    legend.className = 'legend';
    figure.hidden = new Set();
    figure.traces.forEach((trace, number) => {
      const button = document.createElement('button');
      button.type = 'button';
      button.innerHTML = '<svg viewBox="0 0 26 10" aria-hidden="true"><line x1="0" x2="26" y1="5" y2="5"/></svg>';
      button.append(trace.name);
      button.addEventListener('click', () => {
        if (!figure.hidden.delete(number)) figure.hidden.add(number);
        draw(figure);
      });
      legend.append(button);
    });
    plot.after(legend);
  }
  figure.traces.forEach((trace, number) => {
    const button = legend.children[number], line = button.querySelector('line');
    button.setAttribute('aria-pressed', String(!figure.hidden.has(number)));
    line.setAttribute('stroke', series(trace.colour));
    line.setAttribute('stroke-width', trace.style === 'thin' ? 1.5 : 3);
    line.setAttribute('opacity', trace.style === 'thin' ? 0.6 : 1);
    line.setAttribute('stroke-dasharray', { dash: '7 4', dot: '2 3' }[trace.style] || '');
  });
}

// Arrow keys step through a figure's points.
function stepThrough(figure) {
  const plot = plotOf(figure), reading = plot.parentElement.querySelector('.reading');
  const xs = [...new Set(figure.traces.flatMap((trace) => trace.x))].sort((a, b) => a - b);
  const number = (value) => (value === null ? 'not finite' : Number(value.toPrecision(5)).toLocaleString('en'));
  let at = -1;
  plot.addEventListener('keydown', (event) => {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: xs.length - 1, PageDown: at + 10, PageUp: at - 10 }[event.key];
    if (event.key === 'Escape') { at = -1; reading.textContent = ''; Plotly.Fx.unhover(plot); }
    if (to === undefined) return;
    event.preventDefault();
    at = Math.max(0, Math.min(xs.length - 1, to));
    const there = figure.traces.filter((trace) => trace.x.includes(xs[at]));
    const told = there.map((trace) => `${trace.name} ${number(trace.y[trace.x.indexOf(xs[at])])}`);
    reading.textContent = `${figure.xlabel} ${number(xs[at])}: ${told.join(', ')}`;
    Plotly.Fx.hover(plot, { xval: xs[at] }, ['xy']);
  });
}

// Theme
const dark = matchMedia('(prefers-color-scheme: dark)');
const button = document.getElementById('theme');
const isDark = () => (root.dataset.theme ? root.dataset.theme === 'dark' : dark.matches);
function themed() {
  button.textContent = isDark() ? 'Light' : 'Dark';
  button.setAttribute('aria-label', `Switch to the ${isDark() ? 'light' : 'dark'} theme`);
  drawAll();
}
button.addEventListener('click', () => { root.dataset.theme = isDark() ? 'light' : 'dark'; themed(); });
dark.addEventListener('change', themed);

// Tokens: one tab stop a passage, arrow keys within it; the numbers on hover, focus or touch.
const tip = document.getElementById('tip');
function tell(token) {
  const losses = token.dataset.losses.split(' ').map(Number);
  const difference = losses[losses.length - 1] - losses[0];
  const lines = losses.map((loss, k) => `after pass ${k + 1}: ${loss.toFixed(3)} nats`);
  const told = `${JSON.stringify(token.textContent.replace('↵', ''))}, id ${token.dataset.id}`;
  tip.textContent = [told, ...lines, `difference: ${difference > 0 ? '+' : ''}${difference.toFixed(3)}`].join('\n');
  tip.hidden = false;
  const box = token.getBoundingClientRect(), own = tip.getBoundingClientRect();
  tip.style.left = Math.max(6, Math.min(box.left, innerWidth - own.width - 6)) + 'px';
  tip.style.top = (box.bottom + own.height + 12 < innerHeight ? box.bottom + 8 : box.top - own.height - 8) + 'px';
}
function lineMove(tokens, from, down) {
  const here = from.getBoundingClientRect(), half = here.height / 2;
  const rows = tokens.map((token) => ({ token, box: token.getBoundingClientRect() }));
  const beyond = rows.filter(({ box }) => (down ? box.top > here.top + half : box.top < here.top - half));
  const cost = ({ box }) => 50 * Math.abs(box.top - here.top) + Math.abs(box.left - here.left);
  return beyond.reduce((best, row) => (!best || cost(row) < cost(best) ? row : best), null)?.token;
}
for (const list of document.querySelectorAll('.tokens')) {
  const tokens = [...list.querySelectorAll('[role=option]')];
  if (!tokens.length) continue;
  tokens[0].tabIndex = 0;
  list.addEventListener('focusin', ({ target }) => {
    for (const token of tokens) { token.tabIndex = token === target ? 0 : -1; token.ariaSelected = String(token === target); }
    tell(target);
  });
  list.addEventListener('focusout', () => { tip.hidden = true; });
  list.addEventListener('mouseover', ({ target }) => { const token = target.closest('[role=option]'); if (token) tell(token); });
  list.addEventListener('mouseout', () => { tip.hidden = true; });
  list.addEventListener('click', ({ target }) => target.closest('[role=option]')?.focus());
  list.addEventListener('keydown', (event) => {
    const at = tokens.indexOf(document.activeElement);
    const ways = {
      ArrowRight: () => tokens[at + 1], ArrowLeft: () => tokens[at - 1], Home: () => tokens[0], End: () => tokens[tokens.length - 1],
      ArrowDown: () => lineMove(tokens, tokens[at], true), ArrowUp: () => lineMove(tokens, tokens[at], false),
    };
    if (event.key === 'Escape') tip.hidden = true;
    if (!ways[event.key]) return;
    event.preventDefault();
    ways[event.key]()?.focus();
  });
}
addEventListener('scroll', () => {
  const token = document.activeElement.closest('.tokens [role=option]');
  if (token && !tip.hidden) tell(token); else tip.hidden = true;
}, { passive: true });

// Print: light, figures as wide as the paper, short tables opened.
let before = null;
addEventListener('beforeprint', () => {
  const closed = [...document.querySelectorAll('section > details:not([open])')].filter((d) => d.querySelectorAll('tr').length <= 60);
  before = { theme: root.dataset.theme, closed };
  root.dataset.theme = 'light';
  closed.forEach((details) => { details.open = true; });
  drawAll((figure) => (figure.wide ? 680 : 330));
});
addEventListener('afterprint', () => {
  if (!before) return;
  if (before.theme) root.dataset.theme = before.theme; else delete root.dataset.theme;
  before.closed.forEach((details) => { details.open = false; });
  before = null;
  themed();
});

let width = innerWidth;
addEventListener('resize', () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });

async function start() {
  const packed = Uint8Array.from(atob(document.getElementById('plotly').textContent), (c) => c.charCodeAt(0));
  const script = document.createElement('script');
  script.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'))).text();
  document.head.append(script);
  themed();
  figures.forEach(stepThrough);
  root.dataset.drawn = String(figures.length);
}
start().catch((error) => {
  for (const plot of document.querySelectorAll('.plot')) plot.textContent = 'This browser cannot draw the figure; its numbers are in the table below.';
  console.error(error);
});
