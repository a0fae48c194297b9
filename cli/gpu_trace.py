"""`gshare gpu trace`: where a run's time went, and what sharing the GPU cost beside its steps."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.names import plain
from gshare.agent.service.traces import find_trace, known_traces
from gshare.agent.trace import SharingReport
from gshare.agent.trace_file import OLDER, Trace, read_trace
from gshare.cli.gpu_view import show_age

Flag = Annotated[bool, Parameter(negative=())]


def trace(run: str | None = None, *, export: Path | None = None, json: Flag = False) -> None:
    """Phases and spans of a run, and what sharing cost beside its steps.

    Parameters
    ----------
    run
        A job's name, a trainer's id, a trace file, or a directory that holds a trace.jsonl.
    export
        Write the trace to this file too, for chrome://tracing or ui.perfetto.dev.
    json
        Print one JSON object instead.
    """
    if run is None:
        raise UsageError(f"gpu trace: no run; name a job or a trace. Trainers with one: {known_traces()}")
    path = find_trace(run)
    if export is not None:
        _check_target(export, path)
    found = read_trace(path)
    if export is not None:
        write_export(found, export)
    print(json_module.dumps(as_json(path, found)) if json else "\n".join(lines(path, found)))


def _check_target(target: Path, path: Path) -> None:
    """UsageError when the export would take the place of the trace itself, or of its older part."""
    for own in (path, path.with_name(path.name + OLDER)):
        if target.exists() and own.exists() and target.samefile(own):
            raise UsageError(f"--export: {target} is the trace itself; name another file")


def write_export(found: Trace, target: Path) -> None:
    """Chrome's Trace Event Format. GshareError when it cannot be written."""
    try:
        target.write_text(json_module.dumps(found.chrome()), encoding="utf-8")
    except OSError as error:
        raise GshareError(f"--export: {target}: {error.strerror}") from None


def lines(path: Path, found: Trace) -> list[str]:
    """The report, one line each."""
    stats = found.stats()
    widest = max((len(stat.name) for stat in stats), default=0)
    shown = [f"{path}: {len(found.events)} events of {_processes(found)}"]
    if found.forgotten.events:
        shown.append(f"{found.forgotten.events} older events are in the sums below, not in the tables")
    if found.torn:
        shown.append(f"{found.torn} lines could not be read")
    for kind in ("phase", "span"):
        rows = [stat for stat in stats if stat.kind == kind]
        if rows:
            shown.append("")
            shown.append(f"{kind:{widest}}{'count':>9}{'median ms':>12}{'p99 ms':>12}{'total ms':>14}")
        shown.extend(
            f"{row.name:{widest}}{row.times:>9}{row.median_ms:>12.3f}{row.p99_ms:>12.3f}{row.total_ms:>14.1f}"
            for row in rows
        )
    return [plain(line) for line in (*shown, "", *split(found.report))]


def split(report: SharingReport) -> list[str]:
    """Sharing beside productive compute, and the verdict."""
    part = f"{report.overhead:.2%} of the steps" if report.step_ms else "no step was traced"
    shown = [
        f"compute (training steps)  {report.step_ms:>14.1f} ms",
        f"sharing overhead          {report.sharing_ms:>14.1f} ms  {part}",
    ]
    if report.waiting_ms >= 1:  # the look at the directory before a request takes 0.01 ms, and is no wait
        waited = (
            f"{report.waiting_ms:>14.1f} ms  {show_age(report.waiting_ms / 1e3)} in the queue, no overhead"
        )
        shown.append(f"waiting for memory        {waited}")
    return [*shown, report.verdict]


def as_json(path: Path, found: Trace) -> dict[str, object]:
    """The same as data; `overhead` None when no step was traced."""
    report = found.report
    return {
        "trace": str(path),
        "events": len(found.events),
        "forgotten": found.forgotten.events,
        "torn": found.torn,
        "stats": [stat._asdict() for stat in found.stats()],
        "sharing_ms": report.sharing_ms,
        "step_ms": report.step_ms,
        "waiting_ms": report.waiting_ms,
        "overhead": report.overhead if report.step_ms else None,
        "falsified": report.falsified,
        "verdict": report.verdict,
    }


def _processes(found: Trace) -> str:
    number = len({(part.head.pid, part.head.epoch_ns) for part in found.parts})
    return "one process" if number == 1 else f"{number} processes"
