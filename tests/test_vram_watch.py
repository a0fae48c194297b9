"""`gpu run`: a foreign program under a reservation, watched through the driver's list of processes."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.vram.devices import CPU_UUID, Device, HostMemory
from gshare.agent.vram.guard import reserve
from gshare.agent.vram.ledger import Ledger
from gshare.agent.vram.watch import resident_mb, run_program

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import NO_CONFIG, child, device, files, make_ledger, rows, take, until

#: A program that "allocates": it rewrites the simulated device so that the driver lists it, then waits until
#: somebody has made the third file, a minute at most.
USES = """
import os, sys, time
path, used, seen = sys.argv[1], sys.argv[2], sys.argv[3]
text = '[[device]]\\nuuid = "GPU-aaaa-1"\\ntotal_mb = 10000\\n'
text += f'processes = [{{ pid = {os.getpid()}, used_mb = {used} }}]\\n'
open(path + '.new', 'w').write(text)
os.replace(path + '.new', path)
end = time.monotonic() + 60
while not os.path.exists(seen) and time.monotonic() < end:
    time.sleep(0.01)
"""


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return make_ledger(tmp_path)


def run(ledger: Ledger, *command: str, mb: int = 1000, strict: bool = False) -> tuple[int, list[str], int]:
    """(exit code, what was said, the row's peak)."""
    said: list[str] = []
    with take(ledger, mb) as reservation:
        record = reservation.record_use

        def and_tell(phase: str, used_mb: int) -> None:
            record(phase, used_mb)
            if used_mb:
                seen(ledger.directory.parent).touch()

        reservation.record_use = and_tell
        code = run_program(reservation, command, strict=strict, notify=said.append, poll_s=0.02)
        return code, said, reservation.row.peak_mb


def seen(folder: Path) -> Path:
    """There once a use has been recorded."""
    return folder / "seen"


def uses(folder: Path, mb: int, until: Path | None = None) -> tuple[str, ...]:
    """Until its use has been recorded, or there is another file."""
    ends = until if until is not None else seen(folder)
    return (sys.executable, "-c", USES, str(folder / "devices.toml"), str(mb), str(ends))


def test_the_program_gets_its_gpu_by_uuid_and_its_reservation_and_its_code_is_ours(
    ledger: Ledger, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    script = f'echo "$CUDA_VISIBLE_DEVICES $GSHARE_RESERVATION" > {out}; exit 7'
    assert run(ledger, "sh", "-c", script)[0] == 7
    uuid, reservation = out.read_text(encoding="utf-8").split()
    assert uuid == "GPU-aaaa-1"
    assert len(reservation) == 12
    assert run(ledger, "sh", "-c", "kill -9 $$")[0] == 128 + 9
    assert files(ledger) == []


@pytest.mark.parametrize("name", ["/nonexistent/program", "/etc/hostname", "a\0b"])
def test_a_program_that_cannot_be_started_is_one_line(ledger: Ledger, name: str) -> None:
    with pytest.raises(UsageError, match="cannot run"):
        run(ledger, name)
    assert rows(ledger) == {}


def test_what_it_uses_is_recorded_and_over_budget_only_warned_about(ledger: Ledger, tmp_path: Path) -> None:
    code, said, peak = run(ledger, *uses(tmp_path, 1100))
    assert (code, peak) == (0, 1100)
    assert len(said) == 1
    assert "1100 MiB used, 1000 MiB reserved" in said[0]


def test_below_the_budget_nothing_is_said(ledger: Ledger, tmp_path: Path) -> None:
    assert run(ledger, *uses(tmp_path, 900), strict=True) == (0, [], 900)


def test_a_grandchild_is_the_programs_too(ledger: Ledger, tmp_path: Path) -> None:
    code, said, peak = run(ledger, "sh", "-c", f"{shlex.join(uses(tmp_path, 1100))}; true")
    assert (code, peak, len(said)) == (0, 1100, 1)


def test_strict_stops_the_program_and_its_descendants_at_the_limit(ledger: Ledger, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {pid_file}; {shlex.join(uses(tmp_path, 1001, tmp_path / 'never'))}"
    with pytest.raises(GshareError, match="sh used 1001 MiB, more than the 1000 MiB reserved, and was stop"):
        run(ledger, "sh", "-c", script, strict=True)
    sleeper = int(pid_file.read_text(encoding="utf-8"))
    until(lambda: not Path(f"/proc/{sleeper}").exists() or "State:\tZ" in state(sleeper))
    assert rows(ledger) == {}


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return "State:\tZ"


def test_strict_is_refused_where_the_driver_lists_no_processes(ledger: Ledger) -> None:
    unified = HostMemory(Device(uuid="TEGRA-1", name="Orin", index=0, memory_type="unified"))
    with take(ledger, 100) as reservation:
        reservation._grant.device, ledger.source = unified.devices()[0], unified
        said: list[str] = []
        with pytest.raises(UsageError, match="--strict: the driver does not say what a program uses on Orin"):
            run_program(reservation, ["true"], strict=True, notify=said.append)
        assert run_program(reservation, ["true"], strict=False, notify=said.append) == 0
        assert "not watched" in said[-1]


def test_killing_the_watcher_leaves_the_reservation_with_the_program(ledger: Ledger, tmp_path: Path) -> None:
    out = tmp_path / "pid"

    def work(say: Callable[[str], None], wait: Callable[[], str]) -> None:
        with take(ledger, 1000) as reservation:
            say(reservation.id)
            command = ["sh", "-c", f"echo $$ > {out}.new; mv {out}.new {out}; exec sleep 60"]
            run_program(reservation, command, strict=False, notify=say, poll_s=0.02)

    with child(work) as watcher:
        row_id = watcher.line()
        until(out.exists)
        program = int(out.read_text(encoding="utf-8"))
        try:
            watcher.kill()
            assert rows(ledger) == {row_id: 1000}
        finally:
            os.kill(program, signal.SIGKILL)
    until(lambda: rows(ledger) == {})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_and_the_program_may_end_in_order(
    ledger: Ledger, tmp_path: Path, number: signal.Signals
) -> None:
    ready = tmp_path / "ready"

    def work(say: Callable[[str], None], wait: Callable[[], str]) -> None:
        with take(ledger, 1000) as reservation:
            name = number.name.removeprefix("SIG")
            # A minute at most: a signal that does not arrive must not leave it running for ever.
            loop = "n=0; while [ $n -lt 3000 ]; do sleep 0.02; n=$((n + 1)); done"
            command = ["sh", "-c", f"trap 'exit 5' {name}; touch {ready}; {loop}"]
            code = run_program(reservation, command, strict=False, notify=say, poll_s=0.02)
        say(f"code {code}")

    with child(work) as watcher:
        until(ready.exists)
        os.kill(watcher.pid, number)
        assert watcher.line() == "code 5"
        assert watcher.wait() == 0
    assert files(ledger) == []


def test_on_the_cpu_the_resident_memory_of_the_tree_counts(tmp_path: Path) -> None:
    cpu = HostMemory(Device(uuid=CPU_UUID, name="CPU", index=0, memory_type="cpu"))
    ledger = Ledger(directory=tmp_path / "ledger", source=cpu, environ=NO_CONFIG)
    assert resident_mb(os.getpid()) > 10
    with reserve(1, task="t", ledger=ledger, timeout_s=0) as reservation:
        program = [sys.executable, "-c", "import time; x = bytearray(50 << 20); time.sleep(60)"]
        with pytest.raises(GshareError, match="more than the 1 MiB reserved"):
            run_program(reservation, program, strict=True, notify=lambda _: None, poll_s=0.05)
        assert reservation.row.peak_mb > 1


def test_the_device_of_a_simulated_file_is_as_the_tests_think(ledger: Ledger) -> None:
    """The control of this file: a program that the driver does not list is not seen."""
    assert device().startswith('uuid = "GPU-aaaa-1"')
    assert run(ledger, "sleep", "0.2") == (0, [], 0)
