"""Nothing of agent/vram touches a file, the driver or another process without a span, the ledger's files not
without a phase. The search is `support/traced_walk.py`; here it also has to find what is planted for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from traced_walk import Package, imported_from

ROOT = Path(__file__).resolve().parent.parent
VRAM = ROOT / "agent" / "vram"
ROOMS = ("agent", "cli", "coordinator", "tui")

#: Modules whose every public function is an operation that somebody may call.
OPERATIONS = ("ledger", "guard", "queue", "status", "repair", "watch", "mps")
#: Modules that touch the ledger's own files: there a span alone does not say which part is slow.
PHASED = ("store", "paths", "turns", "uses")

#: Own I/O of these is no cost of sharing, or cannot be measured; what they call is looked at all the same.
EXEMPT = {
    "clock.stat_fields": "/proc of one process: no ledger, no device",
    "guard.Reservation.forget": "runs in a forked child, whose copy of the tracer nobody reads",
    "status.user_name": "a login name, for people",
    "watch._watch": "waits for the program: the program's time, not sharing's",
    "watch.Program.send": "a signal to the program",
    "watch.Program._reap": "the program's end",
    "watch._start": "the program's start",
    "watch.stop_program": "waits for the program to end",
}


def the_package() -> Package:
    return Package({path.stem: path.read_text(encoding="utf-8") for path in sorted(VRAM.glob("*.py"))})


def others() -> list[Path]:
    return [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if VRAM not in path.parents]


def test_every_public_function_and_io_call_has_its_span_and_phase() -> None:
    package = the_package()
    entries = package.entries(OPERATIONS, imported_from("gshare.agent.vram", others()))
    names = {entry.key for entry in entries}
    assert {"ledger.Ledger.reserve", "guard.reserve", "queue.wait_for", "clock.start_ticks"} <= names
    faults = package.faults(entries, exempt=EXEMPT, phased=PHASED)
    assert not faults, "\n".join(map(str, faults))


def test_the_walk_sees_the_io_of_every_module_that_has_some() -> None:
    """Else "no fault" could be had by not looking: one known I/O function of each."""
    found = the_package().io_functions()
    assert {
        *("store.Store.write", "turns._try_flock", "paths.flock_fault", "clock.stat_fields"),
        *("queue._sleep", "nvml.NvmlDevices._memory", "simulated.SimulatedDevices._load"),
        *("settings.read_toml", "owners.named_reservation", "watch._watch"),
        "devices.read_host_memory",
    } <= found


def test_no_exemption_is_left_over() -> None:
    """An exemption for what has no I/O any more, or is gone, would hide the next one of that name."""
    assert set(EXEMPT) <= the_package().io_functions()


@pytest.mark.parametrize("name", sorted(EXEMPT))
def test_without_its_exemption_each_is_found(name: str) -> None:
    package = the_package()
    entries = package.entries(OPERATIONS, imported_from("gshare.agent.vram", others()))
    kept = set(EXEMPT) - {name}
    assert {fault.function for fault in package.faults(entries, exempt=kept, phased=PHASED)} == {name}


def test_a_span_taken_out_of_the_ledger_is_found() -> None:
    sources = {path.stem: path.read_text(encoding="utf-8") for path in VRAM.glob("*.py")}
    span = 'with self.tracer.span("LedgerReserve", budget_mb=wanted.mb, task=wanted.task):'
    assert span in sources["ledger"]
    sources["ledger"] = sources["ledger"].replace(span, "if True:")
    package = Package(sources)
    faults = package.faults(package.entries(["ledger"], []), exempt=EXEMPT, phased=PHASED)
    assert {fault.lacks for fault in faults} == {"span"}
    assert "turns._try_flock" in {fault.function for fault in faults}


#: A module as agent/vram's are; each case below takes one thing out of it.
GOOD = """
import os

class Box:
    def __init__(self, tracer): self.tracer = tracer
    def put(self, data):
        with self.tracer.span("Put"):
            def write(fd):
                os.write(fd, data)
            with self.tracer.phase("write"):
                each(write)
                _helper(self)
    def _unused(self): os.unlink("x")

def each(work): work(3)

def _helper(box):
    os.stat("x")
"""


@pytest.mark.parametrize(
    ("old", "new", "function", "lacks"),
    [
        ("", "", None, None),
        ('with self.tracer.span("Put"):', "if True:", "box._helper", "span"),
        ('with self.tracer.span("Put"):', "if True:", "box.Box.put.write", "span"),
        ('with self.tracer.phase("write"):', "if True:", "box._helper", "phase"),
        ("def _unused", "def used", "box.Box.used", "span"),
        ("def _helper(box):", "def helper(): _helper(0)\ndef _helper(box):", "box._helper", "span"),
        ("def each(work): work(3)", "def each(work): work(open(3))", "box.each", "span"),
        ("def each(work): work(3)", "os.mkdir('x')\ndef each(work): work(3)", "box.<module>", "span"),
    ],
)
def test_a_synthetic_module_that_lacks_one_is_caught(
    old: str, new: str, function: str | None, lacks: str | None
) -> None:
    assert old in GOOD
    package = Package({"box": GOOD.replace(old, new) if old else GOOD})
    faults = package.faults(package.entries(["box"], []), phased=["box"])
    found = {(fault.function, fault.lacks) for fault in faults}
    assert (function, lacks) in found if function else found == set()


def test_what_another_room_imports_is_an_entry(tmp_path: Path) -> None:
    user = tmp_path / "user.py"
    user.write_text("from gshare.agent.vram.low import look\n", encoding="utf-8")
    package = Package({"low": "import os\ndef look(): os.stat('x')\ndef other(): os.stat('x')\n"})
    entries = package.entries([], imported_from("gshare.agent.vram", [user]))
    assert [fault.function for fault in package.faults(entries)] == ["low.look"]
