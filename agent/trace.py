"""Phases and spans: where time goes in the ledger and in training, for reports and for Perfetto.

A *span* is one operation (`LedgerReserve`), a *phase* one part of it (`lock_acq`). Both are context
managers of a `Tracer`, which is handed to whatever is measured; `DISABLED`, the default everywhere, hands
back one shared object that does nothing and never reads a clock.

    tracer = Tracer()
    with tracer.span("LedgerReserve", budget_mb=8192), tracer.phase("lock_acq"): ...
    tracer.write_chrome(Path("trace.json"))      # chrome://tracing, ui.perfetto.dev

A run keeps its trace in a file (`trace_file.py`), which `gshare gpu trace` shows.

Format of the export: Chrome's Trace Event Format, complete events ("ph": "X"), times in microseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

#: Parts of a ledger operation, in the order they run.
PHASES = ("lock_acq", "ledger_rd", "vram_qry", "ledger_wr", "lock_rel", "wait_poll")
#: Operations of the ledger: what sharing a device costs.
SHARING_SPANS = ("LedgerReserve", "LedgerCleanup", "VramQuery", "WaitPoll", "LedgerRelease")
#: Of these, the one in which nothing is done: the wait for a neighbour to give memory back. It is shown by
#: itself: a job that waits an hour for its turn has not been slowed down by the ledger.
WAIT_SPAN = "WaitPoll"
#: One training step with everything in it: what the cost of sharing is measured against.
STEP_SPAN = "TrainStep"

#: Sharing may cost at most this part of the time of the steps.
OVERHEAD_BUDGET = 0.05
FALSIFIED = "falsified: GPU sharing overhead exceeds budget"

#: Events kept; older ones are dropped and counted. 200 000 are about 40 MB.
MAX_EVENTS = 200_000


class Event(NamedTuple):
    """One finished span or phase; times in nanoseconds of `time.perf_counter_ns`."""

    kind: str  # "span" | "phase"
    name: str
    start_ns: int
    duration_ns: int
    thread: int
    outermost: bool  # a span of SHARING_SPANS inside no other of them in its thread; of the others, likewise
    detail: dict[str, object]


class NoSpan:
    """The context manager of a disabled tracer: one object for everybody, which does nothing."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


_NO_SPAN = NoSpan()


class _Running:
    __slots__ = ("_detail", "_kind", "_name", "_outermost", "_start", "_tracer")

    def __init__(self, tracer: Tracer, kind: str, name: str, detail: dict[str, object]) -> None:
        self._tracer, self._kind, self._name, self._detail = tracer, kind, name, detail

    def __enter__(self) -> None:
        self._outermost = self._kind == "span" and self._tracer.enter(self._name)
        self._start = self._tracer.clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        duration = self._tracer.clock() - self._start
        if self._kind == "span":
            self._tracer.leave(self._name)
        if error is not None:
            self._detail["error"] = type(error).__name__
        thread = threading.get_native_id()
        self._tracer.add(
            Event(self._kind, self._name, self._start, duration, thread, self._outermost, self._detail)
        )


class Tracer:
    """Collects events in memory. Appending is atomic, so threads may share one tracer."""

    enabled = True

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns, max_events: int = MAX_EVENTS) -> None:
        self.clock = clock
        self.dropped = 0
        self._events: deque[Event] = deque(maxlen=max_events)
        self._depth = threading.local()

    def span(self, name: str, **detail: object) -> _Running | NoSpan:
        """One operation; `detail` is shown beside it (numbers and short strings)."""
        return _Running(self, "span", name, detail)

    def phase(self, name: str) -> _Running | NoSpan:
        """One part of an operation."""
        return _Running(self, "phase", name, {})

    def enter(self, name: str) -> bool:
        """Count one span in; whether it is its thread's outermost, sharing and other spans apart.

        Apart, so that what the ledger does inside a training step is found inside it.
        """
        kind = "sharing" if name in SHARING_SPANS else "other"
        depth = getattr(self._depth, kind, 0)
        setattr(self._depth, kind, depth + 1)
        return depth == 0

    def leave(self, name: str) -> None:
        kind = "sharing" if name in SHARING_SPANS else "other"
        setattr(self._depth, kind, getattr(self._depth, kind) - 1)

    def add(self, event: Event) -> None:
        if len(self._events) == self._events.maxlen:
            self.dropped += 1
        self._events.append(event)

    def clear(self) -> None:
        """Forget what was collected: after a warm-up."""
        self._events.clear()
        self.dropped = 0

    def drain(self) -> tuple[list[Event], int]:
        """Take everything that was collected out, in the order it ended, and how many had been dropped."""
        taken: list[Event] = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._events.popleft())
        dropped, self.dropped = self.dropped, 0
        return taken, dropped

    @property
    def events(self) -> list[Event]:
        """What is kept, in the order it ended."""
        return list(self._events)

    def durations_ms(self) -> dict[str, list[float]]:
        """Name → durations in milliseconds, of phases and spans alike."""
        found: dict[str, list[float]] = {}
        for event in self._events:
            found.setdefault(event.name, []).append(event.duration_ns / 1e6)
        return found

    def write_chrome(self, path: Path) -> None:
        """Write the trace for chrome://tracing and Perfetto."""
        path.write_text(json.dumps(chrome_trace(self.events)), encoding="utf-8")


class Disabled(Tracer):
    """No event, no clock: what a ledger has unless somebody asked for a trace."""

    enabled = False

    def __init__(self) -> None:
        super().__init__(clock=_no_clock, max_events=0)

    def span(self, name: str, **detail: object) -> NoSpan:
        return _NO_SPAN

    def phase(self, name: str) -> NoSpan:
        return _NO_SPAN


def _no_clock() -> int:
    raise AssertionError("a disabled tracer reads no clock")


DISABLED = Disabled()


def chrome_trace(events: Iterable[Event], *, pid: int | None = None, epoch_ns: int = 0) -> dict[str, object]:
    """Events in Chrome's Trace Event Format; `ts` and `dur` are microseconds, `ts` from `epoch_ns` on."""
    pid = os.getpid() if pid is None else pid
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            {
                "ph": "X",
                "cat": event.kind,
                "name": event.name,
                "ts": (event.start_ns + epoch_ns) / 1e3,
                "dur": event.duration_ns / 1e3,
                "pid": pid,
                "tid": event.thread,
                "args": event.detail,
            }
            for event in sorted(events, key=lambda event: event.start_ns)
        ],
    }


class SharingReport(NamedTuple):
    """What sharing cost beside the steps it served, in milliseconds; `waiting_ms` is not a part of it."""

    sharing_ms: float
    step_ms: float
    waiting_ms: float = 0.0

    @property
    def overhead(self) -> float:
        """Sharing time as a part of step time; 0 when nothing was traced, infinite without a step."""
        if self.sharing_ms == 0:
            return 0.0
        return self.sharing_ms / self.step_ms if self.step_ms else float("inf")

    @property
    def falsified(self) -> bool:
        """Whether sharing cost more than `OVERHEAD_BUDGET` of the steps."""
        return self.overhead > OVERHEAD_BUDGET

    @property
    def verdict(self) -> str:
        """One line: the overhead, and whether it is within `OVERHEAD_BUDGET`."""
        shown = f"{self.sharing_ms:.2f} ms of sharing in {self.step_ms:.2f} ms of steps"
        if self.falsified:
            return f"{FALSIFIED} ({shown}, allowed {OVERHEAD_BUDGET:.0%})"
        return f"GPU sharing overhead is within budget ({shown}, {self.overhead:.2%})"


def sharing_report(events: Iterable[Event]) -> SharingReport:
    """Separate the ledger's time from the steps'. Spans inside a ledger span count once."""
    sharing = step = waiting = 0
    for event in events:
        if event.kind != "span":
            continue
        if event.name == STEP_SPAN:
            step += event.duration_ns
        elif event.name == WAIT_SPAN:
            waiting += event.duration_ns
        elif event.name in SHARING_SPANS and event.outermost:
            sharing += event.duration_ns
    return SharingReport(sharing / 1e6, step / 1e6, waiting / 1e6)
