"""Phases and spans: what is recorded, that a disabled tracer reads no clock, the sharing report."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from gshare.agent import trace
from gshare.agent.trace import DISABLED, FALSIFIED, PHASES, SHARING_SPANS, STEP_SPAN, Tracer, sharing_report
from gshare.agent.vram.queue import wait_for

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import make_ledger, take


class Clock:
    """Counts how often it is read; each reading is a millisecond later."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self) -> int:
        self.read += 1
        return self.read * 1_000_000


def test_spans_and_phases_are_recorded_with_their_detail_and_errors() -> None:
    tracer = Tracer(Clock())
    with tracer.span("LedgerReserve", budget_mb=5), tracer.phase("lock_acq"):
        pass
    with pytest.raises(KeyError), tracer.span("LedgerRelease"):
        raise KeyError
    phase, span, failed = tracer.events
    assert (phase.kind, phase.name, phase.duration_ns) == ("phase", "lock_acq", 1_000_000)
    assert (span.name, span.duration_ns, span.detail, span.outermost) == (
        "LedgerReserve",
        3_000_000,
        {"budget_mb": 5},
        True,
    )
    assert failed.detail == {"error": "KeyError"}
    assert tracer.durations_ms() == {"lock_acq": [1.0], "LedgerReserve": [3.0], "LedgerRelease": [1.0]}
    tracer.clear()
    assert tracer.events == []


def test_what_is_kept_is_bounded_and_what_is_dropped_is_counted() -> None:
    tracer = Tracer(Clock(), max_events=3)
    for _ in range(5):
        with tracer.phase("lock_acq"):
            pass
    assert (len(tracer.events), tracer.dropped) == (3, 2)


def forbid_clocks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make every clock that a tracer could use note that it was read."""
    read: list[str] = []
    for name in ("perf_counter", "perf_counter_ns", "time_ns", "process_time_ns", "thread_time_ns"):
        monkeypatch.setattr(time, name, lambda name=name: read.append(name) or 0)
    return read


def test_a_disabled_tracer_reads_no_clock_in_a_whole_reservation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = make_ledger(tmp_path)
    assert ledger.tracer is DISABLED
    read = forbid_clocks(monkeypatch)
    take(ledger, 100).release()
    assert read == []
    assert DISABLED.events == []
    assert DISABLED.span("LedgerReserve", a=1) is DISABLED.phase("lock_acq")  # one object for everybody
    # The control: an enabled one does read it.
    ledger.tracer = Tracer(time.perf_counter_ns)
    take(ledger, 100).release()
    assert read


def test_a_reservation_a_wait_and_a_release_have_every_span_and_phase(tmp_path: Path) -> None:
    from gshare.agent.errors import RetryLater
    from gshare.agent.vram.ledger import Wanted

    ledger = make_ledger(tmp_path)
    ledger.tracer = Tracer()
    wanted = Wanted(mb=8000, devices=ledger.source.devices(), task="t")
    with take(ledger, 8000), pytest.raises(RetryLater):
        wait_for(ledger, wanted, timeout_s=0.1)
    names = {event.name for event in ledger.tracer.events}
    assert names == {*PHASES, *SHARING_SPANS}


def test_the_export_is_what_perfetto_reads(tmp_path: Path) -> None:
    tracer = Tracer(Clock())
    with tracer.span("VramQuery", devices=2), tracer.phase("vram_qry"):
        pass
    tracer.write_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert [event["name"] for event in events] == ["VramQuery", "vram_qry"]
    assert {event["ph"] for event in events} == {"X"}
    assert events[0]["ts"] == 1000.0
    assert events[0]["dur"] == 3000.0
    assert events[0]["args"] == {"devices": 2}
    outer, inner = events
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def spans(*named: tuple[str, int, bool]) -> list[trace.Event]:
    return [trace.Event("span", name, 0, ms * 1_000_000, 1, outermost, {}) for name, ms, outermost in named]


def test_above_5_percent_of_step_time_sharing_is_falsified() -> None:
    good = sharing_report(spans((STEP_SPAN, 1000, True), ("LedgerReserve", 50, True)))
    assert good.verdict.startswith("GPU sharing overhead is within budget")
    bad = sharing_report(spans((STEP_SPAN, 1000, True), ("LedgerReserve", 51, True)))
    assert bad.verdict.startswith(FALSIFIED)
    assert "51.00 ms of sharing in 1000.00 ms" in bad.verdict


def test_the_queue_is_shown_and_is_no_overhead() -> None:
    report = sharing_report(spans((STEP_SPAN, 1000, True), ("WaitPoll", 9000, True), ("VramQuery", 10, True)))
    assert (report.waiting_ms, report.sharing_ms, report.overhead) == (9000.0, 10.0, 0.01)


def test_what_the_ledger_does_inside_a_step_is_overhead_too() -> None:
    tracer = Tracer(Clock())
    with (
        tracer.span(STEP_SPAN),
        tracer.span("LedgerReserve"),
        tracer.span("VramQuery"),
        tracer.phase("vram_qry"),
    ):
        pass
    report = sharing_report(tracer.events)
    assert (report.sharing_ms, report.step_ms) == (5.0, 7.0)


def test_draining_takes_everything_once() -> None:
    tracer = Tracer(Clock(), max_events=2)
    for _ in range(3):
        with tracer.phase("lock_acq"):
            pass
    events, dropped = tracer.drain()
    assert ([event.name for event in events], dropped) == (["lock_acq"] * 2, 1)
    assert tracer.drain() == ([], 0)
    assert DISABLED.drain() == ([], 0)


def test_spans_inside_a_ledger_span_count_once_and_phases_and_other_spans_do_not() -> None:
    nested = spans(
        (STEP_SPAN, 100, True), ("VramQuery", 4, False), ("LedgerReserve", 5, True), ("Other", 90, True)
    )
    nested.append(trace.Event("phase", "lock_acq", 0, 90_000_000, 1, False, {}))
    assert sharing_report(nested).overhead == 0.05


def test_sharing_without_a_step_is_falsified_and_nothing_is_not() -> None:
    assert sharing_report(spans(("LedgerReserve", 1, True))).verdict.startswith(FALSIFIED)
    assert not sharing_report([]).verdict.startswith(FALSIFIED)
