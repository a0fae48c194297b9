"""A report as one HTML file: no network, no data for a script to read, every text escaped.

Its Content-Security-Policy names the hashes of its one style and its one script: markup that slipped through
from a name or a reason could neither run nor load anything.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Sequence
from html import escape

from gshare.agent.jobs.names import plain
from gshare.agent.report import charts, summary
from gshare.agent.report.model import PATTERN_LINES, PATTERNS, Report, Run, Samples
from gshare.agent.report.page_parts import SCRIPT, STYLE
from gshare.agent.report.text import (
    evidence_text,
    hyper_text,
    loss_text,
    samples_text,
    seconds_text,
    steps_text,
    time_text,
    why_text,
)

#: What stands where a number would be.
NEVER, NOT_KNOWN, NOT_A_NUMBER = "never evaluated", "not known", "not a number"


def render_page(report: Report, *, now: float) -> str:
    """The page; `now`: seconds since the epoch, when it was made."""
    ranked = summary.leaderboard(report.runs)
    place = {id(run): index for index, run in enumerate(ranked)}
    title = f"gshare report: {report.name or report.directory}"
    body = [
        _head(report, title, ranked, now),
        _savings(report.runs),
        _table(ranked),
        _curves(ranked),
        _pareto(ranked, place),
        _notes(report),
    ]
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src {_hash(STYLE)}",
            f"script-src {_hash(SCRIPT)}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + f"\n<script>{SCRIPT}</script>\n</body></html>\n"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _text(value: str) -> str:
    """For an element or an attribute: nothing that a browser would obey, in markup or in direction."""
    return escape(plain(value), quote=True)


# ---------------------------------------------------------------------- parts


def _head(report: Report, title: str, ranked: Sequence[Run], now: float) -> str:
    runs = report.runs
    models = sorted({f"{run.model} ({run.base_dtype})" for run in runs if run.model})
    lines = [f"{len(runs)} run{'s' if len(runs) != 1 else ''} in {report.directory}"]
    lines += [f"base: {', '.join(models)}"] if models else ["base: not known"]
    if report.created is not None:
        lines.append(f"sweep begun {time_text(report.created)}")
    lines.append(f"this page: {time_text(now)}")
    best = ranked[0] if ranked else None
    if best is not None and best.best_val_loss is not None and math.isfinite(best.best_val_loss):
        loss = loss_text(best.best_val_loss)
        first = f"Best: {best.name}, validation loss {loss} at step {best.best_step}."
    else:
        first = "No run has a validation loss that is a number."
    details = "".join(f'<p class="soft">{_text(line)}</p>' for line in lines)
    return f"<h1>{_text(title)}</h1><p>{_text(first)}</p>{details}"


def _savings(runs: Sequence[Run]) -> str:
    found = summary.savings(runs)
    if not found:
        return "<h2>Samples saved</h2><p>No run was ended early.</p>"
    full = summary.full_length(runs)
    saved = sum(one.saved for one in found)
    if full:
        line = f"{saved:,} of {full:,} samples were not trained: {saved / full:.1%}."
    else:
        line = f"{saved:,} samples were not trained; no share is given: not every run's length is known."
    rows = "".join(
        f'<tr><td class="text">{_symbol(one.pattern)} {_text(one.pattern)}</td><td>{one.runs}</td>'
        f"<td>{one.trained:,}</td><td>{'' if one.exact else '≤ '}{one.saved:,}</td>"
        f"<td>{one.unknown or ''}</td>"
        f'<td class="text">{_text(PATTERN_LINES[one.pattern])}</td></tr>'
        for one in found
    )
    drawn = charts.bars([(one.pattern, one.saved) for one in found], full or max(saved, 1))
    return (
        f'<h2>Samples saved</h2><p id="saved">{_text(line)}</p>{drawn}'
        '<div class="scroll"><table id="savings">'
        '<thead><tr><th class="text">ended by</th><th>runs</th><th>samples trained</th><th>samples saved</th>'
        f'<th>length not known</th><th class="text"></th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _table(ranked: Sequence[Run]) -> str:
    keys = summary.differing(ranked)
    heads = [
        ("#", "number"),
        ("run", "text"),
        ("best val loss", "number"),
        ("state", "text"),
        ("why", "text"),
    ]
    heads += [(key, _kind(ranked, key)) for key in keys]
    heads += [("at step", "number"), ("last val loss", "number"), ("last train loss", "number")]
    heads += [("steps", "number"), ("samples", "number"), ("saved", "number"), ("device time", "number")]
    heads += [("ended", "number")]
    head = "".join(
        f'<th scope="col" data-kind="{kind}"{_class(kind)}><button type="button">{_text(name)}</button></th>'
        for name, kind in heads
    )
    rows = []
    for index, run in enumerate(ranked):
        cells = [_number(str(index + 1), index + 1.0), _words(run.name)]
        cells += [_loss(run.best_val_loss, NEVER), _words(run.state), _why(run)]
        cells += [_hyper(run, key, _kind(ranked, key)) for key in keys]
        cells += [_number(str(run.best_step), run.best_step), _loss(run.val_loss, NEVER)]
        cells += [_loss(run.loss, NOT_KNOWN), _number(steps_text(run), run.steps), _samples(run.samples)]
        cells.append(_samples(run.saved) if run.pattern else "<td></td>")
        cells += [_number(seconds_text(run.seconds), run.seconds), _number(time_text(run.ended), run.ended)]
        rows.append(f'<tr data-run="{index}">{"".join(cells)}</tr>')
    return (
        '<h2>Leaderboard</h2><p class="soft">By the best validation loss. A heading sorts; what is not known '
        'comes last.</p><div class="scroll"><table class="sortable" id="runs"><thead><tr>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _curves(ranked: Sequence[Run]) -> str:
    if not any(run.val or run.train for run in ranked):
        return "<h2>Curves</h2><p>No run has recorded a loss.</p>"
    x_title, scale = _x_axis(ranked)
    panels, buttons = [], []
    for kind, what in (("val", "validation loss"), ("train", "training loss")):
        lines = [
            charts.Line(
                index,
                _hover(run),
                kind,
                [(step * scale(run), loss) for step, loss in (run.val if kind == "val" else run.train)],
                _css(run, index),
                _end(run),
            )
            for index, run in enumerate(ranked)
        ]
        lines.reverse()  # the best is drawn last, above the others
        drawn = charts.curves(lines, x_title, what)
        panels.append(f'<div id="curves-{kind}">{drawn}{_left_out(lines)}</div>')
        buttons.append(f'<button type="button" data-shows="curves-{kind}">{what}</button>')
    return (
        f'<h2>Curves</h2><div class="switch" hidden>{" ".join(buttons)}</div>{"".join(panels)}'
        f"{_legend(ranked)}"
        f'<p class="soft">Long curves are drawn as means of {charts.MAX_POINTS} equal parts.</p>'
    )


def _left_out(lines: Sequence[charts.Line]) -> str:
    odd = sum(1 for line in lines if any(not math.isfinite(loss) for _, loss in line.points))
    if not odd:
        return ""
    return (
        f'<p class="soft">Not drawn: losses that are not a number, of {odd} run{"s" if odd > 1 else ""}.</p>'
    )


def _pareto(ranked: Sequence[Run], place: dict[int, int]) -> str:
    panels, buttons = [], []
    costs: list[tuple[str, str, Callable[[Run], float | None]]] = [
        ("samples", "samples trained", summary.samples_cost),
        ("seconds", "seconds of the device", summary.seconds_cost),
    ]
    for name, what, cost in costs:
        dots, missing = [], 0
        for index, run in enumerate(ranked):
            at, loss = cost(run), run.best_val_loss
            if at is None or loss is None or not math.isfinite(at) or not math.isfinite(loss):
                missing += 1
            else:
                dots.append(charts.Dot(index, _hover(run), (at, loss), _css(run, index), _end(run)))
        front = summary.pareto(ranked, cost)
        steps = [(at, run.best_val_loss) for run in front if (at := cost(run)) is not None]
        drawn = charts.scatter(
            dots, [(at, loss) for at, loss in steps if loss is not None], what, "best validation loss"
        )
        names = ", ".join(f"{run.name} (#{place[id(run)] + 1})" for run in front) or "none"
        left = f" Not drawn: {missing}, whose cost or loss is not known, or not a number." if missing else ""
        front_line = f"Not beaten in both, cheapest first: {names}.{left}"
        panels.append(f'<div id="pareto-{name}">{drawn}<p>{_text(front_line)}</p></div>')
        buttons.append(f'<button type="button" data-shows="pareto-{name}">{what}</button>')
    return (
        f'<h2>Validation loss against cost</h2><div class="switch" hidden>{" ".join(buttons)}</div>'
        f'{"".join(panels)}<p class="soft">Of the time of a round that several adapters shared, each has an '
        "equal part.</p>"
    )


def _notes(report: Report) -> str:
    found = summary.notes(report)
    items = "".join(f"<li>{_text(note)}</li>" for note in found)
    return f'<h2>Notes</h2><ul id="notes">{items}</ul>' if found else ""


def _legend(ranked: Sequence[Run]) -> str:
    ends = {_end(run) for run in ranked}
    known = [end for end in ("completed", *PATTERNS) if end in ends]
    shown = [f"{_symbol(end)} {_text(end)}" for end in known]
    if ends - set(known):
        shown.append(f"{_symbol('')} anything else: still running, failed, or not known")
    return f'<p class="legend">Marks where a run ended: {", ".join(shown)}.</p>'


def _symbol(end: str) -> str:
    return f'<span class="{end or "other"}">{charts.symbol(end)}</span>'


# ---------------------------------------------------------------------- cells


def _class(kind: str) -> str:
    return ' class="text"' if kind == "text" else ""


def _words(value: str) -> str:
    return f'<td class="text" data-value="{_text(value)}">{_text(value)}</td>'


def _number(shown: str, value: float | None) -> str:
    """What is missing has no value to be sorted by."""
    if value is None:
        return f'<td><span class="missing">{NOT_KNOWN}</span></td>'
    return f'<td data-value="{value!r}">{_text(shown)}</td>'


def _samples(samples: Samples | None) -> str:
    return _number(samples_text(samples), samples.count if samples is not None else None)


def _why(run: Run) -> str:
    evidence = evidence_text(run)
    more = f'<br><span class="soft">{_text(evidence)}</span>' if evidence else ""
    why = _text(why_text(run))
    return f'<td class="text why" data-value="{why}">{why}{more}</td>'


def _loss(value: float | None, missing: str) -> str:
    if value is None:
        return f'<td><span class="missing">{missing}</span></td>'
    if not math.isfinite(value):
        return f'<td><span class="missing">{NOT_A_NUMBER}</span></td>'
    return f'<td data-value="{value!r}">{loss_text(value)}</td>'


def _hyper(run: Run, key: str, kind: str) -> str:
    value = summary.hyper(run, key)
    if kind == "number":
        return _number(hyper_text(key, value), value)
    return _words(hyper_text(key, value)) if value is not None else _number("", None)


def _kind(runs: Sequence[Run], key: str) -> str:
    values = [value for run in runs if (value := summary.hyper(run, key)) is not None]
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    return "number" if numbers and values else "text"


# ---------------------------------------------------------------------- marks


def _end(run: Run) -> str:
    return run.pattern or (run.state if run.state == "completed" else "")


def _css(run: Run, index: int) -> str:
    if index == 0 and run.best_val_loss is not None and math.isfinite(run.best_val_loss):
        return "best"
    return _end(run) or ("failed" if run.state == "failed" else "other")


def _hover(run: Run) -> str:
    return f"{run.name}: best {loss_text(run.best_val_loss)}, {run.state}" + (
        f" ({run.pattern})" if run.pattern else ""
    )


def _x_axis(runs: Sequence[Run]) -> tuple[str, Callable[[Run], float]]:
    """Samples where every run's are known, so that batch sizes compare; else steps."""
    if not all(run.samples is not None and run.steps for run in runs if run.val or run.train):
        return "optimizer steps", lambda run: 1.0

    def samples_a_step(run: Run) -> float:
        return run.samples.count / run.steps if run.samples and run.steps else 0.0

    return "samples trained", samples_a_step
