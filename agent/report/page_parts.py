"""The style and the script of a report's page. The script sorts the table, switches charts and marks a run
everywhere when one of its marks is pointed at; without it everything is there to read.

It gets no text to build markup from: it moves what is there, and sets classes and attributes.
"""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5c6670; --line: #d8dee4; --ground: #fff;
  --blue: #0b62c4; --red: #c62828; --amber: #9a6700; --violet: #7b3fb5; --grey: #7d8590; --green: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa5b1; --line: #30363d;
  --ground: #0d1117; --blue: #58a6ff; --red: #ff7b72; --amber: #d29922; --violet: #bc8cff; --grey: #8b949e;
  --green: #3fb950; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); margin: 0 auto;
  max-width: 1180px; padding: 24px 16px; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 32px 0 8px; }
p { margin: 4px 0; max-width: 80ch; overflow-wrap: anywhere; }
.soft, caption, .legend { color: var(--soft); font-size: 13px; }
.scroll { overflow: auto; max-height: 75vh; }
.sortable th { position: sticky; top: 0; background: var(--ground); }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th.text, td.text { text-align: left; }
td.why { white-space: normal; min-width: 18em; overflow-wrap: anywhere; }
th button { font: inherit; font-weight: 600; color: inherit; background: none; border: 0; padding: 0;
  cursor: pointer; }
th[aria-sort=ascending] button::after { content: " ▲"; }
th[aria-sort=descending] button::after { content: " ▼"; }
.missing { color: var(--soft); font-style: italic; }
.switch button { font: inherit; font-size: 13px; padding: 2px 10px; border: 1px solid var(--line);
  border-radius: 6px; background: none; color: inherit; cursor: pointer; }
.switch button[aria-pressed=true] { background: var(--blue); color: var(--ground);
  border-color: var(--blue); }
svg { width: 100%; height: auto; display: block; max-width: 900px; }
svg text { fill: var(--soft); font-size: 12px; }
svg.symbol { display: inline-block; width: 16px; height: 16px; vertical-align: -3px; }
.grid { stroke: var(--line); stroke-width: 1; fill: none; }
.line polyline, .front { fill: none; stroke-width: 1.6; stroke: currentColor; }
.train polyline { stroke-width: 1; opacity: .45; }
.front { stroke: var(--ink); stroke-dasharray: 5 4; }
.mark path, .mark circle { fill: currentColor; stroke: currentColor; stroke-width: 2; }
.mark circle.open { fill: none; }
.ground { fill: var(--line); } .bar { fill: var(--blue); }
.completed { color: var(--blue); } .divergence, .non-finite, .failed { color: var(--red); }
.overfitting { color: var(--violet); } .underperformance { color: var(--grey); }
.user { color: var(--amber); } .best { color: var(--green); } .other { color: var(--soft); }
.best polyline { stroke-width: 3; }
.on polyline { stroke-width: 4; opacity: 1; }
tr.on td { background: color-mix(in srgb, var(--blue) 15%, transparent); }
.on .mark { outline: 2px solid currentColor; }
[hidden] { display: none !important; }
"""

SCRIPT = """
'use strict';
(() => {
  for (const table of document.querySelectorAll('table.sortable')) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector('button').addEventListener('click', () => {
      const up = head.getAttribute('aria-sort') !== 'ascending';
      for (const other of heads) other.removeAttribute('aria-sort');
      head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
      const numeric = head.dataset.kind === 'number';
      const key = row => row.cells[column].dataset.value;
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => {
        const x = key(a), y = key(b);
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
        const order = numeric ? Number(x) - Number(y) : x.localeCompare(y);
        return up ? order : -order;
      });
      table.tBodies[0].append(...rows);
    }));
  }
  for (const group of document.querySelectorAll('.switch')) {
    const buttons = [...group.querySelectorAll('button')];
    const show = chosen => {
      for (const button of buttons) {
        const on = button === chosen;
        button.setAttribute('aria-pressed', String(on));
        document.getElementById(button.dataset.shows).hidden = !on;
      }
    };
    for (const button of buttons) button.addEventListener('click', () => show(button));
    group.hidden = false;
    if (buttons.length) show(buttons[0]);
  }
  const marked = new Map();
  for (const one of document.querySelectorAll('[data-run]')) {
    const run = one.dataset.run;
    if (!marked.has(run)) marked.set(run, []);
    marked.get(run).push(one);
    for (const [name, on] of [['mouseenter', true], ['mouseleave', false]])
      one.addEventListener(name, () => marked.get(run).forEach(each => each.classList.toggle('on', on)));
  }
  document.documentElement.dataset.ready = 'yes';
})();
"""
