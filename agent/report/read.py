"""From a directory to a report: one run's output_dir, a folder of several, or a sweep's.

    sweep.json        the configurations, where there is one; their directories may have been moved with it
    decisions.jsonl   what the sweep did with each, and why
    <dir>/run.json, metrics.jsonl, .lock, adapter_model.safetensors     as of any run

How a run outside a sweep ended is in this user's list of ended jobs, as far as that goes back; without it a
written adapter says "completed", a held lock "running", and nothing says "unknown". Nothing is written.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.events import ENDED
from gshare.agent.jobs.names import shorten
from gshare.agent.jobs.sweep_records import (
    DECISIONS_FILE,
    SWEEP_FILE,
    Configuration,
    Decision,
    SweepRecord,
    directory_of,
    read_decisions,
    read_sweep,
)
from gshare.agent.report.metrics import METRICS_FILE, read_metrics
from gshare.agent.report.model import Report, Run, Samples
from gshare.agent.service.output_dir import LOCK_FILE, RUN_FILE, RunRecord, read_record
from gshare.agent.service.protocol import STOPPED_BY
from gshare.agent.service.registry import FinishedJob, is_held, read_lines, state_dir

FINAL = "adapter_model.safetensors"
#: A folder of runs is looked through so deep: RUN/name, RUN/group/name.
DEPTH = 2
#: Of a configuration that no decision has ended.
GO_ON = "gshare sweep --resume goes on"
#: A finished record is written within so many seconds of the run's last line of metrics, or after it.
_SLACK = 60.0


def read_report(path: Path) -> Report:
    """UsageError: `path` holds no run. GshareError: a sweep's own files are damaged."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "no such directory"
        raise UsageError(f"{path}: {what}; name a run's output_dir, a folder of them, or a sweep's")
    sweep, decisions = read_sweep(path), read_decisions(path)
    finished = _finished()
    if sweep is not None or decisions:
        return _sweep_report(path, sweep, decisions, finished)
    if _is_run(path):
        return Report(str(path), "run", [_read_run(path, path.name, finished)])
    found = _runs_below(path)
    if not found:
        raise UsageError(
            f"{path}: no run here: no {SWEEP_FILE} in it, and no {RUN_FILE} or {METRICS_FILE} up to "
            f"{DEPTH} folders below"
        )
    runs = [_read_run(one, one.name, finished) for one in found]
    names = [run.name for run in runs]
    for run, one in zip(runs, found, strict=True):
        if names.count(run.name) > 1:
            run.name = str(one.relative_to(path))
    return Report(str(path), "runs", runs)


def _is_run(path: Path) -> bool:
    return any(_is_file(path / name) for name in (RUN_FILE, METRICS_FILE))


def _is_file(path: Path) -> bool:
    """A pipe of that name would be waited for."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):  # ValueError: a NUL in its name
        return False


def _runs_below(path: Path, depth: int = DEPTH) -> list[Path]:
    found: list[Path] = []
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except OSError:
        return []
    for entry in entries:
        if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
            continue
        below = Path(entry.path)
        if _is_run(below):
            found.append(below)
        elif depth > 1:
            found += _runs_below(below, depth - 1)
    return found


# ---------------------------------------------------------------------- one run


def _read_run(path: Path, name: str, finished: dict[str, FinishedJob]) -> Run:
    run = Run(name=name, directory=str(path))
    if fault := _out_of_reach(path):
        run.reason = "nothing can be read of it"
        run.notes.append(f"its directory {shorten(str(path))} cannot be read: {fault}")
        return run
    record = _record(path, run)
    if record is not None:
        _take_record(run, record)
    metrics = None
    if _is_file(path / METRICS_FILE):
        try:
            metrics = read_metrics(path / METRICS_FILE)
        except GshareError as error:
            run.notes.append(f"its losses cannot be read: {error}")
    if metrics is not None:
        metrics.fill(run)
    _count_samples(run, metrics.steps_per_epoch if metrics is not None else None)
    _take_end(run, path, finished.get(str(path.resolve())))
    return run


def _out_of_reach(path: Path) -> str:
    """Why nothing below `path` can be looked at; "" where it can, or nothing is there. A name out of a file
    may be none that a file system takes."""
    try:
        os.stat(path / RUN_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return error.strerror or str(error)
    except ValueError:
        return "there is a NUL in its name"
    return ""


def _record(path: Path, run: Run) -> RunRecord | None:
    if not _is_file(path / RUN_FILE):
        run.notes.append(f"no {RUN_FILE}: its hyper-parameters are not known")
        return None
    try:
        return read_record(path)
    except UsageError:
        run.notes.append(f"{RUN_FILE} cannot be read: its hyper-parameters are not known")
        return None


def _take_record(run: Run, record: RunRecord) -> None:
    spec = record.spec
    run.name, run.spec, run.start = spec.name, spec, record.start
    run.model, run.base_dtype = record.model, record.base_dtype
    if record.val_hash is not None:
        run.data_key = record.val_hash
    elif record.train_hash is not None:
        run.data_key = f"{record.train_hash} {spec.val_fraction} {spec.seed}"


def _count_samples(run: Run, steps_per_epoch: int | None) -> None:
    """Rows of the steps: batch × accumulation each, but that an epoch's last step may hold fewer."""
    if run.spec is None:
        return
    rows = run.spec.per_device_train_batch_size * run.spec.gradient_accumulation_steps

    def count(steps: int | None) -> Samples | None:
        if steps is None:
            return None
        full = steps_per_epoch is not None and steps < steps_per_epoch
        return Samples(steps * rows, rows == 1 or full or steps == 0)

    run.samples, run.samples_total = count(run.steps), count(run.total_steps)


def _take_end(run: Run, path: Path, record: FinishedJob | None) -> None:
    """How it ended, by what is there; a sweep's decisions go over it."""
    if _is_file(path / LOCK_FILE) and _held(path / LOCK_FILE):
        run.state = "running"
        return
    if record is not None and _is_of_this_run(record, run, path):
        run.state, run.reason, run.ended = record.status.state, record.status.reason, record.ended
        run.total_steps = run.total_steps or record.status.total_steps or None
        run.pattern = _pattern(run.state, run.reason)
        return
    if _is_file(path / FINAL) and (run.steps is None or run.steps == run.total_steps):
        run.state, run.ended = "completed", (path / FINAL).stat().st_mtime
        return
    run.reason = "nothing says how it ended"


def _pattern(state: str, reason: str) -> str:
    """Of an ended job, by the words of `describe_exit` or of who stopped it; "" of one that was cut off."""
    if state == "diverged":
        return "non-finite"
    if state != "stopped":
        return ""
    if reason.startswith(STOPPED_BY):
        return "user"
    return next((name for name in ("divergence", "overfitting") if reason.startswith(f"{name} at ")), "")


def _held(path: Path) -> bool:
    try:
        return is_held(path)
    except OSError:
        return False


def _is_of_this_run(record: FinishedJob, run: Run, path: Path) -> bool:
    """Not of an earlier try in the same directory, which has been resumed since."""
    if record.status.step < (run.steps or 0):
        return False
    metrics = path / METRICS_FILE
    return not metrics.exists() or record.ended >= metrics.stat().st_mtime - _SLACK


def _finished() -> dict[str, FinishedJob]:
    """The last record of every output_dir."""
    try:
        records = read_lines(state_dir() / "jobs.jsonl", FinishedJob)
    except OSError:
        return {}
    return {os.path.realpath(job.status.output_dir): job for job in records if job.status.output_dir}


# ---------------------------------------------------------------------- a sweep


def _sweep_report(
    path: Path, sweep: SweepRecord | None, decisions: Sequence[Decision], finished: dict[str, FinishedJob]
) -> Report:
    report = Report(str(path), "sweep", [], name=sweep.name if sweep is not None else path.name)
    if sweep is None:
        report.notes.append(f"no {SWEEP_FILE}: configurations are those that {DECISIONS_FILE} names")
        names = dict.fromkeys(decision.job for decision in decisions)
        report.runs = [_read_run(_inside(path, name), name, finished) for name in names]
    else:
        if not sweep.configurations:
            raise GshareError(f"{path / SWEEP_FILE}: names no configuration; move it away")
        report.created = sweep.created
        for configuration in sweep.configurations:
            run = _read_run(directory_of(path, configuration), configuration.name, finished)
            _take_configuration(run, configuration, sweep)
            report.runs.append(run)
    by_job: dict[str, list[Decision]] = {}
    for decision in decisions:
        by_job.setdefault(decision.job, []).append(decision)
    for run in report.runs:
        _take_decisions(run, by_job.pop(run.name, []))
    for stray in by_job:
        report.notes.append(f"{DECISIONS_FILE} names {stray}, which is no configuration of this sweep")
    return report


def _inside(path: Path, name: str) -> Path:
    """A name out of a file must not lead elsewhere."""
    if "/" in name or name in ("", ".", ".."):
        raise GshareError(f"{path / DECISIONS_FILE}: names a job {name!r}, which is no name")
    return path / name


def _take_configuration(run: Run, configuration: Configuration, sweep: SweepRecord) -> None:
    run.name, run.hyper = configuration.name, dict(configuration.hyper_parameters)
    run.model, run.base_dtype = run.model or sweep.model, run.base_dtype or sweep.base_dtype
    run.total_steps = configuration.total_steps
    run.samples_total = Samples(configuration.samples_total)
    if run.steps is None and not os.path.isdir(run.directory) and not _out_of_reach(Path(run.directory)):
        run.state, run.reason, run.notes = "waiting", "", []
        run.steps, run.samples = 0, Samples(0)


def _take_decisions(run: Run, decisions: Sequence[Decision]) -> None:
    """The last word of the sweep on a run; one that is written to now is running whatever was decided."""
    running = run.state == "running"
    by_itself = run.state, run.reason, run.ended  # as its trainer wrote it down, which no sweep decided
    for decision in decisions:
        if decision.event == "selected":
            run.selected = True
            continue
        if decision.event == "cloned":
            continue
        run.state = {"started": "running", "resumed": "running"}.get(decision.event, decision.event)
        over = run.state in ENDED
        run.reason, run.pattern = decision.reason, decision.pattern if over else ""
        run.ended, run.evidence = (decision.time, decision.evidence) if over else (None, {})
        if run.state == "diverged" and not run.pattern:
            run.pattern = "non-finite"
        if decision.samples and decision.step == run.steps:
            run.samples = Samples(decision.samples)
    if running:
        run.state, run.pattern, run.ended, run.reason = "running", "", None, ""
    elif run.state == "running" and by_itself[0] in ENDED:
        run.state, reason, run.ended = by_itself
        run.reason = "; ".join(filter(None, (reason, GO_ON)))
    elif run.state == "running":
        run.state, run.reason = "unknown", f"its trainer is gone; {GO_ON}"
