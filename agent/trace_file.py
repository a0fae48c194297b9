"""The file in which a run keeps its trace: `trace.jsonl`, bounded, readable after any kind of end.

    with TraceFile(directory / TRACE_NAME, tracer) as file:
        …; file.flush()                 # every few seconds: that much is lost with a kill

    trace = read_trace(directory / TRACE_NAME)
    trace.report.verdict; trace.stats(); trace.chrome()

One JSON line each: first a `TraceHead`, then events as arrays in the order of `trace.Event`'s fields. When
the file is full, and when a resumed run finds one, it becomes `trace.jsonl.1` and a new one is begun, so at
most twice `MAX_FILE_BYTES` are kept. What falls off the end is still counted in the head's sums.
"""

from __future__ import annotations

import errno
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec
from gshare.agent.errors import UsageError
from gshare.agent.trace import (
    PHASES,
    SHARING_SPANS,
    Event,
    SharingReport,
    Tracer,
    chrome_trace,
    sharing_report,
)

SCHEMA = 1
#: What a run's trace is called in its directory.
TRACE_NAME = "trace.jsonl"
#: Added to the name of the part before.
OLDER = ".1"
#: About 150 000 events; a run keeps two such parts.
MAX_FILE_BYTES = 16 << 20

_encode = msgspec.json.Encoder(enc_hook=str).encode
_decode_event = msgspec.json.Decoder(Event).decode


class Sums(msgspec.Struct):
    """What a number of events come to."""

    events: int = 0
    sharing_ms: float = 0.0
    step_ms: float = 0.0
    waiting_ms: float = 0.0

    def add(self, events: Sequence[Event]) -> None:
        report = sharing_report(events)
        self.add_sums(Sums(len(events), report.sharing_ms, report.step_ms, report.waiting_ms))

    def add_sums(self, more: Sums) -> None:
        self.events += more.events
        self.sharing_ms += more.sharing_ms
        self.step_ms += more.step_ms
        self.waiting_ms += more.waiting_ms


class TraceHead(msgspec.Struct, kw_only=True, tag="trace", tag_field="kind"):
    """First line of a part. `epoch_ns` + an event's start is Unix time in nanoseconds.

    `forgotten` sums up what this process had traced before the oldest part that is kept.
    """

    schema: int = SCHEMA
    pid: int
    epoch_ns: int
    forgotten: Sums = msgspec.field(default_factory=Sums)


_decode_head = msgspec.json.Decoder(TraceHead).decode


class TraceFile:
    """Writes a tracer's events down. Never fails a run: `problem` says why nothing is written any more."""

    def __init__(self, path: Path, tracer: Tracer, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.problem = ""
        self._path, self._tracer, self._max_bytes = path, tracer, max_bytes
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._forgotten, self._before, self._current = Sums(), Sums(), Sums()
        self._file: FileIO | None = None
        self._size = 0
        try:
            self._begin()
        except OSError as error:
            self._give_up(error)

    def flush(self) -> None:
        """Write what was traced since the last time."""
        events, dropped = self._tracer.drain()
        self._forgotten.events += dropped
        if self._file is None:
            return
        try:
            lines = [_encode(event) + b"\n" for event in events]
            first = 0
            for number, line in enumerate(lines):
                if self._size + len(line) > self._max_bytes:
                    self._write(lines[first:number], events[first:number])
                    first = number
                    self._begin()
                self._size += len(line)
            self._write(lines[first:], events[first:])
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write the rest; a second call does nothing."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, lines: Sequence[bytes], events: Sequence[Event]) -> None:
        assert self._file is not None
        _write_all(self._file, b"".join(lines))
        self._current.add(events)

    def _begin(self) -> None:
        """A new part; the one that is there, ours or a run's before, becomes the older one."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._path.exists():
            if not self._path.is_file():
                raise OSError(errno.EEXIST, "is no regular file")  # a pipe or device must stay where it is
            os.replace(self._path, f"{self._path}{OLDER}")
        self._forgotten.add_sums(self._before)
        self._before, self._current = self._current, Sums()
        head = TraceHead(pid=os.getpid(), epoch_ns=self._epoch_ns, forgotten=self._forgotten)
        line = _encode(head) + b"\n"
        # Unbuffered: what a full disk did not take would be tried again, and fail, when the file is closed.
        self._file = self._path.open("xb", buffering=0)
        _write_all(self._file, line)
        self._size = len(line)

    def _give_up(self, error: OSError) -> None:
        self.problem = f"{self._path}: {error.strerror}; no more is traced"
        if self._file is not None:
            self._file.close()
            self._file = None


def _write_all(file: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


class Stat(NamedTuple):
    """All events of one name. Milliseconds."""

    name: str
    kind: str
    times: int
    median_ms: float
    p99_ms: float
    total_ms: float


class Part(NamedTuple):
    """One file of a trace."""

    head: TraceHead
    events: list[Event]


class Trace(NamedTuple):
    """A trace as it was read, the oldest part first. `torn`: lines that could not be read."""

    parts: list[Part]
    torn: int

    @property
    def events(self) -> list[Event]:
        return [event for part in self.parts for event in part.events]

    @property
    def forgotten(self) -> Sums:
        """What each process had traced before what is kept of it: said by its newest part."""
        newest = {(part.head.pid, part.head.epoch_ns): part.head.forgotten for part in self.parts}
        sums = Sums()
        for one in newest.values():
            sums.add_sums(one)
        return sums

    @property
    def report(self) -> SharingReport:
        """Sharing against steps over everything, forgotten events too."""
        sums = self.forgotten
        sums.add(self.events)
        return SharingReport(sums.sharing_ms, sums.step_ms, sums.waiting_ms)

    def stats(self) -> list[Stat]:
        """Of the kept events: the ledger's phases in order, other phases, the ledger's spans, others."""
        found: dict[tuple[str, str], list[float]] = {}
        for event in self.events:
            found.setdefault((event.kind, event.name), []).append(event.duration_ns / 1e6)

        def place(key: tuple[str, str]) -> tuple[bool, int, str]:
            kind, name = key
            known = SHARING_SPANS if kind == "span" else PHASES
            return kind == "span", known.index(name) if name in known else len(known), name

        return [_stat(name, kind, found[kind, name]) for kind, name in sorted(found, key=place)]

    def chrome(self) -> dict[str, object]:
        """For chrome://tracing and Perfetto; several processes stand on one clock."""
        events: list[object] = []
        for part in self.parts:
            made = chrome_trace(part.events, pid=part.head.pid, epoch_ns=part.head.epoch_ns)["traceEvents"]
            assert isinstance(made, list)
            events.extend(made)
        return {"displayTimeUnit": "ms", "traceEvents": events}


def read_trace(path: Path) -> Trace:
    """The trace at `path` with the part before it. UsageError when it is none.

    A line that a kill has torn is counted and skipped.
    """
    parts, torn = [], 0
    for file in (path.with_name(path.name + OLDER), path):
        try:
            lines = file.read_bytes().splitlines()
        except FileNotFoundError:
            if file == path:
                raise UsageError(f"{path}: there is no such trace") from None
            continue
        except OSError as error:
            raise UsageError(f"{file}: {error.strerror}") from None
        try:
            head = _decode_head(lines[0] if lines else b"")
        except msgspec.MsgspecError:
            raise UsageError(f"{file}: row 1: not the head of a trace that this version writes") from None
        if head.schema != SCHEMA:
            raise UsageError(f"{file}: row 1: schema {head.schema} is not {SCHEMA}; another gshare wrote it")
        events, bad = _events(lines[1:])
        parts.append(Part(head, events))
        torn += bad
    return Trace(parts, torn)


def _events(lines: Iterable[bytes]) -> tuple[list[Event], int]:
    events, torn = [], 0
    for line in lines:
        try:
            events.append(_decode_event(line))
        except msgspec.MsgspecError:
            torn += 1
    return events, torn


def _stat(name: str, kind: str, durations: list[float]) -> Stat:
    durations = sorted(durations)
    p99 = durations[min(len(durations) - 1, int(0.99 * len(durations)))]  # nearest rank
    return Stat(name, kind, len(durations), statistics.median(durations), p99, sum(durations))
