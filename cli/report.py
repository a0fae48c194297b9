"""`gshare report RUN [--html FILE]`: what became of a run, of a folder of runs, or of a sweep.

The table is data, on stdout; `--json` prints it as one object. `--html` writes one file that needs no other.
"""

from __future__ import annotations

import json as json_module
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from gshare.agent.errors import EXIT_OK, GshareError, UsageError
from gshare.agent.jobs.names import plain, shorten
from gshare.agent.report import summary
from gshare.agent.report.model import Report, Run, Samples
from gshare.agent.report.page import render_page
from gshare.agent.report.read import read_report
from gshare.agent.report.text import (
    DEVICE_TIME,
    LEGEND,
    UNKNOWN,
    hyper_text,
    loss_text,
    samples_text,
    seconds_text,
    steps_text,
    time_text,
    why_text,
)
from gshare.agent.service.journal import strict_json
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

#: Of a table that goes to a file or a pipe: nothing of it is cut or folded.
WIDE = 10_000
#: On a terminal that is too narrow these columns go first, then `why` (it is told in lines below), then the
#: hyper-parameters, which a sweep's names hold, and at last these.
_LEFT_OUT_FIRST = ("device time", "at step", "loss", "ended", "val", "samples")
_LEFT_OUT_LAST = ("saved", "steps")
#: `why` folds into so many columns: a reason is a sentence.
_WHY_WIDTH = 32
#: Titles of hyper-parameters where the whole words take too much.
_SHORT = {
    "learning_rate": "lr",
    "lr_scheduler_type": "schedule",
    "per_device_train_batch_size": "batch",
    "gradient_accumulation_steps": "accumulation",
    "num_train_epochs": "epochs",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "weight_decay": "decay",
}


def report(
    run: Path,
    /,
    *,
    html: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Show who was best, what was stopped, when and why, and how many samples that saved.

    Parameters
    ----------
    run
        The output_dir of a run, a folder of several, or a sweep's.
    html
        Write a page with curves and charts to this file too.
    json
        One JSON object instead of the table.
    """
    if html is not None:
        _check_target(html)
    found = read_report(run)
    if html is not None:
        _write(html, render_page(found, now=time.time()))
    if json:
        print(json_module.dumps(strict_json(_as_json(found)), allow_nan=False))
    else:
        _print_tables(found)
    if html is not None:
        print(f"written: {html}", file=sys.stderr)
    return EXIT_OK


def _check_target(html: Path) -> None:
    if html.is_dir():
        raise UsageError(f"--html {html}: is a directory; name a file in it, such as {html / 'report.html'}")
    if not html.parent.is_dir():
        raise UsageError(f"--html {html}: there is no directory {shorten(str(html.parent))}")


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise GshareError(f"--html {path}: {error.strerror}") from None


# ---------------------------------------------------------------------- tables


def _print_tables(found: Report) -> None:
    console = Console(soft_wrap=False) if sys.stdout.isatty() else Console(width=WIDE)
    ranked = summary.leaderboard(found.runs)
    table, left_out = fitting_table(ranked, console)
    console.print(table)
    if "why" in left_out:
        console.print()
        for run in ranked:
            if why := why_text(run):
                console.print(Text(f"{plain(run.name)}: {why}"))
    if saved := summary.savings(found.runs):
        console.print()
        console.print(savings_table(found, saved))
    lines = [LEGEND, *([] if "device time" in left_out else [DEVICE_TIME]), *summary.notes(found)]
    if left_out := [title for title in left_out if title != "why"]:
        lines.append(f"left out on {console.width} columns: {', '.join(left_out)}")
    console.print()
    for line in lines:
        console.print(Text(plain(line)))


def fitting_table(ranked: Sequence[Run], console: Console) -> tuple[Table, Sequence[str]]:
    """The table, and the titles of the columns that had no place on this terminal."""
    wide = console.options.update(max_width=WIDE)

    def width(left_out: Sequence[str], short: bool) -> int:
        table = leaderboard_table(ranked, [*left_out, "why"], short=short)
        needed = Measurement.get(console, wide, table).maximum
        return needed if "why" in left_out else needed + 2 + _WHY_WIDTH

    keys = summary.differing(ranked)
    order = (*_LEFT_OUT_FIRST, "why", *reversed(keys), *_LEFT_OUT_LAST)
    tries = [((), False), *((order[:count], True) for count in range(len(order) + 1))]
    fitting = next((one for one in tries if width(*one) <= console.width), tries[-1])
    left_out, short = list(fitting[0]), fitting[1]
    for title in fitting[0][::-1]:  # a wide column that went last may have made room for narrow ones
        without = [other for other in left_out if other != title]
        if title != "why" and width(without, short) <= console.width:
            left_out = without
    return leaderboard_table(ranked, left_out, short=short), tuple(left_out)


def leaderboard_table(ranked: Sequence[Run], left_out: Sequence[str] = (), *, short: bool = False) -> Table:
    """A row a run, the best first; `short`: with the short titles of hyper-parameters."""
    table = Table(box=None, pad_edge=False)
    keys = summary.differing(ranked)
    rows = [_cells(place, run, keys) for place, run in enumerate(ranked, start=1)]
    for title in rows[0]:
        if title in left_out:
            continue
        if title in ("run", "why"):
            table.add_column(title, overflow="fold", min_width=8)
        else:
            shown = _SHORT.get(title, title) if short else title
            table.add_column(shown, justify="left" if title in ("state", "ended") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for title, cell in row.items() if title not in left_out))
    return table


def _cells(place: int, run: Run, keys: Sequence[str]) -> dict[str, str]:
    return {
        "": str(place),
        "run": plain(run.name),
        **{key: hyper_text(key, summary.hyper(run, key)) for key in keys},
        "best val": loss_text(run.best_val_loss),
        "at step": UNKNOWN if run.best_step is None else str(run.best_step),
        "val": loss_text(run.val_loss),
        "loss": loss_text(run.loss),
        "steps": steps_text(run),
        "samples": samples_text(run.samples),
        "saved": samples_text(run.saved) if run.pattern else "",
        "device time": seconds_text(run.seconds),
        "state": run.state,
        "why": why_text(run),
        "ended": time_text(run.ended),
    }


def savings_table(found: Report, saved: list[summary.Saving]) -> Table:
    """A row a pattern, and all of them together out of the full search."""
    table = Table(box=None, pad_edge=False)
    table.add_column("ended by", no_wrap=True)
    titles = ["runs", "samples trained", "samples saved", "of the full search"]
    all_known = not any(one.unknown for one in saved)
    for title in titles if all_known else [*titles, "length not known"]:
        table.add_column(title, justify="right")
    full = summary.full_length(found.runs)

    def share(part: int) -> str:
        return f"{part / full:.1%}" if full else "-"

    def row(name: str, parts: list[summary.Saving]) -> None:
        count = sum(one.saved for one in parts)
        exact = all(one.exact for one in parts)
        unknown = sum(one.unknown for one in parts)
        cells = [name, str(sum(one.runs for one in parts)), f"{sum(one.trained for one in parts):,}"]
        cells += [samples_text(Samples(count, exact)), share(count)]
        table.add_row(*map(Text, cells if all_known else [*cells, str(unknown) if unknown else ""]))

    for one in saved:
        row(one.pattern, [one])
    if len(saved) > 1:
        row("all", saved)
    return table


# ---------------------------------------------------------------------- json


def _as_json(found: Report) -> dict[str, Any]:
    """NaN and what is not known are both null there; a run's `not_a_number` names those of the first kind."""
    ranked = summary.leaderboard(found.runs)
    keys = summary.differing(ranked)
    return {
        "directory": found.directory,
        "kind": found.kind,
        "name": found.name,
        "runs": [_run_json(run, keys) for run in ranked],
        "savings": [vars(one) for one in summary.savings(found.runs)],
        "full_length": summary.full_length(found.runs),
        "pareto": {
            "samples": [run.name for run in summary.pareto(ranked, summary.samples_cost)],
            "seconds": [run.name for run in summary.pareto(ranked, summary.seconds_cost)],
        },
        "notes": summary.notes(found),
    }


def _run_json(run: Run, keys: list[str]) -> dict[str, Any]:
    plain_fields = ("name", "directory", "state", "pattern", "reason", "ended", "steps", "total_steps")
    losses = ("loss", "val_loss", "best_val_loss")
    return {
        **{key: getattr(run, key) for key in plain_fields},
        "hyper_parameters": {key: summary.hyper(run, key) for key in keys},
        **{key: getattr(run, key) for key in losses},
        "not_a_number": [key for key in losses if math.isnan(getattr(run, key) or 0.0)],
        "best_step": run.best_step,
        "samples": _samples_json(run.samples),
        "samples_total": _samples_json(run.samples_total),
        "samples_saved": _samples_json(run.saved),
        "tokens": run.tokens,
        "device_seconds": run.seconds,
        "evidence": run.evidence,
        "start": run.start.lineage if run.start is not None else None,
    }


def _samples_json(samples: Samples | None) -> dict[str, Any] | None:
    return None if samples is None else vars(samples)
