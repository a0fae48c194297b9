"""Files of runs: `--run out/`, a directory that a job writes to, or one that holds several of those.

    out/support/run.json  metrics.jsonl  best/metadata.json  .lock     ─►  one job "support"

New lines are read as they come; a file that was cut back (a resumed job) is read anew. Nothing is written.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.service.output_dir import LOCK_FILE, RUN_FILE, RunRecord
from gshare.agent.service.registry import is_held
from gshare.tui import frames as f
from gshare.tui.connected import ConnectedSource
from gshare.tui.job_files import (
    MetricsLine,
    Step,
    as_number,
    curves,
    json_file,
    line_text,
    list_directory,
    open_regular,
    read_line,
    tail_text,
)
from gshare.tui.source import FileRow

METRICS = "metrics.jsonl"
LOOK_SECONDS = 1.0
#: Directories looked into below the one that was named.
MAX_RUNS = 2000
#: Read of one file at one look: a million steps are 250 MB, which takes several looks.
READ_BYTES = 16 << 20
#: A line has 300 bytes; what goes on without an end is none, and must not be kept.
MAX_LINE_BYTES = 1 << 20


class BestMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """`best/metadata.json`."""

    step: Step
    val_loss: float | None = None


class _Run:
    """One directory and how far its metrics were read."""

    def __init__(self, directory: Path, key: str) -> None:
        self.directory = directory
        self.key = key
        self.offset = 0
        self.rest = b""
        self.behind = False  # the last look did not reach the end
        self.cut = False  # its file was shorter than before, which was not told yet
        self.record: RunRecord | None = None
        self.step = 0
        self.total_steps = 0
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.best: tuple[float, int] | None = None
        self.view: f.JobView | None = None

    def read(self) -> list[MetricsLine]:
        """The lines that have come since; begins anew where the file is shorter than it was."""
        try:
            with open_regular(self.directory / METRICS) as file:
                if os.fstat(file.fileno()).st_size < self.offset:
                    self.offset, self.rest, self.cut = 0, b"", True
                    self.step, self.loss, self.val_loss, self.best = 0, None, None, None
                file.seek(self.offset)
                data = file.read(READ_BYTES)
        except OSError:
            return []
        self.behind = len(data) == READ_BYTES
        self.offset += len(data)
        lines = (self.rest + data).split(b"\n")
        self.rest = lines.pop()[:MAX_LINE_BYTES]
        found = [line for text in lines if (line := read_line(text)) is not None]
        for line in found:
            self.step = line.step
            self.total_steps = line.total_steps or self.total_steps
            if line.type == "step":
                self.loss = as_number(line.loss)
            elif line.type == "eval":
                self.val_loss = as_number(line.val_loss)
                if line.best or (self.best is None and self.val_loss == self.val_loss):
                    self.best = self.val_loss, line.step
        return found

    def look(self) -> f.JobView:
        """How the job is, by its files."""
        if self.record is None:
            self.record = json_file(self.directory / RUN_FILE, RunRecord)
        best = self.best
        metadata = json_file(self.directory / "best" / "metadata.json", BestMetadata)
        if metadata is not None and metadata.val_loss is not None:
            best = metadata.val_loss, metadata.step
        if is_held(self.directory / LOCK_FILE):
            state = "running"
        elif self.total_steps and self.step >= self.total_steps:
            state = "completed"
        elif self.loss is not None and self.loss != self.loss:
            state = "diverged"
        else:
            state = "stopped"
        record = self.record
        return f.JobView(
            job=self.key,
            state=state,
            step=self.step if self.total_steps else None,
            total_steps=self.total_steps or None,
            loss=self.loss,
            val_loss=self.val_loss,
            best_val_loss=best[0] if best is not None else None,
            best_step=best[1] if best is not None else None,
            output_dir=str(self.directory),
            model=record.model if record is not None else "",
            base_dtype=record.base_dtype if record is not None else "",
            hyper=f.hyper_of(record.spec) if record is not None else {},
        )


class RunSource(ConnectedSource):
    kind = "run"
    can = frozenset({"log", "history", "files"})

    def __init__(self, directory: Path, **options: Any) -> None:
        """UsageError: it is no directory."""
        super().__init__(**options)
        if not directory.is_dir():
            raise UsageError(f"--run {directory}: is no directory; name that of a job, or its parent")
        self._directory = directory.absolute()
        self.title = f"run {directory.name or directory}"
        self.detail = str(self._directory)
        self._runs: dict[Path, _Run] = {}
        self._looked: float | None = None

    def last_heard(self) -> float | None:
        return self._looked

    async def session(self) -> None:
        try:
            while True:
                fresh, read = await asyncio.to_thread(self._look)
                self._tell(fresh, read)
                if self._looked is None:
                    self.say("live")
                self._looked = time.monotonic()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._looked = None

    def _look(self) -> tuple[bool, list[tuple[_Run, list[MetricsLine], bool]]]:
        """In a thread. Whether runs came or went, and of each run: its new lines, and whether all are new."""
        directories = find_runs(self._directory)
        if not directories and not self._directory.is_dir():
            raise GshareError(f"{self._directory} is gone")
        changed = set(directories) != set(self._runs)
        for directory in [known for known in self._runs if known not in directories]:
            del self._runs[directory]
        read: list[tuple[_Run, list[MetricsLine], bool]] = []
        for directory in directories:
            run = self._runs.get(directory)
            if run is None:
                name = (
                    directory.name
                    if directory == self._directory
                    else str(directory.relative_to(self._directory))
                )
                run = self._runs[directory] = _Run(directory, name)
            before, behind = run.offset, run.behind
            lines = run.read()
            read.append((run, lines, before == 0 or behind or run.offset < before))
            view = run.look()
            changed |= run.view is None or run.view.state != view.state or run.cut
            run.view = view
        return changed, read

    def _tell(self, changed: bool, read: list[tuple[_Run, list[MetricsLine], bool]]) -> None:
        moment = self.now()
        for run, _, _ in read:
            if run.cut:
                run.cut = False
                text = f"its metrics were cut back: it goes on after step {run.step}"
                self.emit(f.JobState(**moment, job=run.key, state="running", step=run.step, reason=text))
        if changed:
            views = tuple(run.view for run in self._runs.values() if run.view is not None)
            self.emit(f.Snapshot(**moment, jobs=views, nodes=()))
        for run, lines, whole in read:
            if not lines:
                continue
            if whole:  # thousands of steps of before we came: a curve, and no speed
                train, val = curves(msgspec.json.encode(line) for line in lines)
                self.emit(f.History(**moment, job=run.key, train=tuple(train), val=tuple(val)))
                continue
            self._steps(run, [line for line in lines if line.type == "step"], moment)
            for line in lines:
                if line.type == "eval":
                    loss = as_number(line.val_loss)
                    self.emit(
                        f.Evaluation(**moment, job=run.key, step=line.step, val_loss=loss, best=line.best)
                    )

    def _steps(self, run: _Run, steps: list[MetricsLine], moment: dict[str, Any]) -> None:
        if not steps:
            return
        newest = steps[-1]
        tokens = [step.tokens for step in steps if step.tokens is not None]
        sample = f.Sample(
            job=run.key,
            step=newest.step,
            total_steps=newest.total_steps,
            loss=as_number(newest.loss),
            time=moment["time"],
            epoch=newest.epoch,
            grad_norm=None if newest.grad_norm is None else as_number(newest.grad_norm),
            learning_rate=newest.learning_rate,
            tokens=sum(tokens) / len(tokens) if tokens else None,
            seconds=newest.seconds,
            adapters_in_pass=newest.adapters_in_pass,
            count=len(steps),
        )
        self.emit(f.Samples(**moment, samples=(sample,)))

    async def read_log(self, job: str = "", node: str = "", max_bytes: int = 65536) -> str:
        """The newest lines of its metrics, told as a log tells them: a run has none of its own."""
        text = await asyncio.to_thread(tail_text, self._run(job).directory / METRICS, max_bytes)
        lines = [read_line(line) for line in text.splitlines()]  # the first one may be cut off
        return "".join(f"{line_text(line)}\n" for line in lines if line is not None)

    async def ask_history(self, job: str) -> None:
        return  # everything was read at the first look

    async def list_files(self, job: str) -> list[FileRow]:
        return await asyncio.to_thread(list_directory, self._run(job).directory)

    def _run(self, job: str) -> _Run:
        for run in self._runs.values():
            if run.key == job:
                return run
        raise UsageError(f"{job}: no such run in {self._directory}")


def find_runs(directory: Path) -> list[Path]:
    """`directory` itself when it is a run, else the runs directly below it and one level deeper, by name."""
    if _is_run(directory):
        return [directory]
    found: list[Path] = []
    for child in _folders(directory):
        if _is_run(child):
            found.append(child)
        else:
            found += [grandchild for grandchild in _folders(child) if _is_run(grandchild)]
        if len(found) >= MAX_RUNS:
            break
    return found[:MAX_RUNS]


def _is_run(directory: Path) -> bool:
    return (directory / RUN_FILE).exists() or (directory / METRICS).exists()


def _folders(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            names = [
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []
    return [directory / name for name in sorted(names)]
