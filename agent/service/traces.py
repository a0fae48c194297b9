"""Where runs keep their traces, and which one a user means.

    <state>/gshare/traces/<trainer id>.jsonl    of a trainer; the newest ones are kept
    DIRECTORY/trace.jsonl                       of anything else that traces into a directory of its own

The state directory, because a trainer's own goes when the trainer does, and no adapter's output directory
is the whole run's.
"""

from __future__ import annotations

from pathlib import Path

from gshare.agent.errors import UsageError
from gshare.agent.jobs.names import shorten
from gshare.agent.service.protocol import JobStatus
from gshare.agent.service.registry import finished_jobs, read_lines, state_dir, trainer_dirs
from gshare.agent.trace_file import OLDER, TRACE_NAME

TRACES_KEPT = 20


def trace_path(identity: str) -> Path:
    """Where the trainer `identity` writes its trace; the oldest ones beyond `TRACES_KEPT` are removed."""
    traces = state_dir() / "traces"
    traces.mkdir(exist_ok=True, mode=0o700)
    files = _oldest_first(traces)
    for old in files[: max(0, len(files) - TRACES_KEPT + 1)]:
        old.unlink(missing_ok=True)
        old.with_name(old.name + OLDER).unlink(missing_ok=True)
    return traces / f"{identity}.jsonl"


def find_trace(run: str) -> Path:
    """The trace that `run` names: a file, a directory with one, a trainer's id, or the name of a job.

    UsageError when there is none. Of a job that ran more than once the last one is meant.
    """
    path = Path(run)
    if path.is_file():
        return path
    if (path / TRACE_NAME).is_file():
        return path / TRACE_NAME
    traces = state_dir() / "traces"
    for identity in (run, *_trainers_of(run)):
        found = traces / f"{identity}.jsonl"
        if "/" not in identity and found.is_file():
            return found
    looked = f"no file or directory with a {TRACE_NAME}, no trainer or job with a trace"
    raise UsageError(f"gpu trace: {shorten(run)}: {looked}; trainers with one: {known_traces()}")


def known_traces() -> str:
    """The ids of the trainers that have a trace, the newest last, on one line; `none`."""
    return ", ".join(file.stem for file in _oldest_first(state_dir() / "traces")) or "none"


def _oldest_first(traces: Path) -> list[Path]:
    return sorted(traces.glob("*.jsonl"), key=lambda file: file.stat().st_mtime if file.exists() else 0.0)


def _trainers_of(job: str) -> list[str]:
    """Ids of the trainers that have, or had, a job of this name; the newest first."""
    live = [
        directory.name
        for directory in trainer_dirs()
        if any(record.job == job for record in read_lines(directory / "jobs.jsonl", JobStatus))
    ]
    ended = [record.trainer_id for record in finished_jobs() if record.status.job == job]
    return [*reversed(live), *ended]
