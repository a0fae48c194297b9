"""The dashboard under load: 1,000 adapters on 64 nodes at 10 events a second each, through a real socket.

    python benchmarks/tui_load.py                      all arms at full size: about four minutes
    python benchmarks/tui_load.py --only pty --seconds 30

Arms, each a process of its own beside `tui_coordinator.py`:

    data    the source and the state alone, in an asyncio loop: what the app is built on
    memory  an hour of frames (a sample a second and an evaluation every 5 s of each job) applied to a state
    start   the command of `pty`, five times to its first picture: the median, and its processor time
    pty     `gshare tui` itself in a pseudo-terminal of 200 × 50, found by its default state directory

Measured: CPU of the process by /proc (a percentage of one core, over the measured seconds), the time from a
change of state being written to the socket to its word arriving at the terminal (or in the state), bytes to
the terminal, resident memory after a minute and after an hour's worth of events (60 times as fast), and the
time from the process's start to the first painted frame. Each figure is held against its limit.

Exit code 0 when all limits hold, 1 when one does not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tui_terminal import COLUMNS, ROWS, Terminal

HERE = Path(__file__).resolve().parent
WARM_SECONDS = 8.0
STARTS = 5

#: name → (limit, unit); a figure has to be at most its limit.
LIMITS = {
    "cpu": (15.0, "% of one core"),
    "latency_p95": (300.0, "ms"),
    "bytes": (20_000.0, "bytes/s"),
    "growth": (10.0, "% more memory after an hour than after a minute"),
    "first_paint": (500.0, "ms"),
}
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """User and system time of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / 2**20


class FakeCoordinator:
    """The process, and when it said to have sent each change."""

    def __init__(self, state_dir: Path, jobs: int, nodes: int, rate: float) -> None:
        state_dir.mkdir(parents=True, mode=0o700)
        self.sent: list[tuple[float, str]] = []
        self.words: list[str] = []
        size = ("--jobs", str(jobs), "--nodes", str(nodes), "--rate", str(rate))
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "tui_coordinator.py"), str(state_dir), *size],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", "the fake coordinator did not start"
        threading.Thread(target=self._read, daemon=True).start()

    def say(self, word: str) -> str:
        """A command, and its answer: how much was sent since the last one."""
        assert self.process.stdin is not None
        count = len(self.words)
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        while len(self.words) == count:
            time.sleep(0.02)
        return self.words[-1]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("sent"):
                self.words.append(line.strip())
            else:
                moment, state = line.split()
                self.sent.append((float(moment), state))


@contextlib.contextmanager
def coordinator(arguments: argparse.Namespace) -> Iterator[tuple[FakeCoordinator, Path]]:
    """It runs where `gshare tui` looks by default, under a home of its own."""
    home = Path(tempfile.mkdtemp(prefix="gshare-tui-load-"))
    fake = FakeCoordinator(
        home / "state" / "gshare" / "coordinator", arguments.jobs, arguments.nodes, arguments.rate
    )
    try:
        yield fake, home
    finally:
        fake.stop()
        shutil.rmtree(home)


def environment(home: Path) -> dict[str, str]:
    keep = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    return {
        **keep,
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "GSHARE_LEDGER_DIR": str(home / "ledger"),
        "PYTHONSAFEPATH": "1",
    }


def latencies(sent: list[tuple[float, str]], seen: list[tuple[float, str]]) -> list[float]:
    """ms from each change to the first time its word was seen before the next change; inf: never."""
    found = []
    for index, (moment, state) in enumerate(sent[:-1]):
        until = sent[index + 1][0]
        times = [at for at, word in seen if word == state and moment <= at < until]
        found.append((times[0] - moment) * 1000 if times else float("inf"))
    return found


def p95(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))] if values else float("nan")


# --- arm: data


def run_data(arguments: argparse.Namespace) -> dict[str, float]:
    with coordinator(arguments) as (fake, home):
        command = [sys.executable, str(HERE / "tui_load.py"), "--child", "data"]
        child = subprocess.Popen(command, cwd="/", env=environment(home), stdout=subprocess.PIPE, text=True)
        seen: list[tuple[float, str]] = []

        def read() -> None:
            assert child.stdout is not None
            for line in child.stdout:
                moment, state = line.split()
                seen.append((float(moment), state))

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        try:
            return measure(fake, child.pid, arguments, seen)
        finally:
            child.kill()
            child.wait()
            reading.join(5)


def measure(
    fake: FakeCoordinator, pid: int, arguments: argparse.Namespace, seen: list[tuple[float, str]]
) -> dict[str, float]:
    """CPU and latency after warming up; memory at the end and after an hour (at 60 times the speed) more."""
    time.sleep(WARM_SECONDS)
    fake.say("normal")
    first = len(fake.sent)
    began, cpu = time.monotonic(), cpu_seconds(pid)
    time.sleep(arguments.seconds)
    ended, cpu = time.monotonic(), cpu_seconds(pid) - cpu
    sent = fake.say("normal")
    found = latencies(fake.sent[first:], seen)
    minute = resident_mb(pid)
    fake.say("hour")
    time.sleep(arguments.hour_seconds)
    fake.say("normal")
    time.sleep(2.0)
    hour = resident_mb(pid)
    return {
        "messages_per_s": float(sent.split()[1]),
        "dropped": float(sent.split()[3]),
        "cpu": 100 * cpu / (ended - began),
        "latency_median": statistics.median(found),
        "latency_p95": p95(found),
        "changes": len(found),
        "rss_minute_mb": minute,
        "rss_hour_mb": hour,
        "growth": 100 * (hour / minute - 1),
        "began": began,
        "ended": ended,
    }


async def child_data() -> None:
    from gshare.coordinator.api_client import default_state_dir
    from gshare.tui.coordinator_source import CoordinatorSource
    from gshare.tui.frames import Frame
    from gshare.tui.model import State

    state = State()
    shown = ""

    def take(frame: Frame) -> None:
        nonlocal shown
        state.apply(frame)
        job = state.jobs.get("adapter-0000")
        if job is not None and job.state != shown:
            shown = job.state
            print(f"{time.monotonic():.6f} {shown}", flush=True)

    await CoordinatorSource(default_state_dir()).run(take)


# --- arm: memory


def run_memory(arguments: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, str(HERE / "tui_load.py"), "--child", "memory", "--jobs", str(arguments.jobs)]
    done = subprocess.run(command, cwd="/", stdout=subprocess.PIPE, text=True, check=True)
    minute, hour, cost = (float(word) for word in done.stdout.split())
    growth = 100 * (hour / minute - 1)
    return {"rss_minute_mb": minute, "rss_hour_mb": hour, "growth": growth, "us_per_sample": cost}


def child_memory(jobs: int) -> None:
    from gshare.tui import frames as f
    from gshare.tui.model import State

    state = State()
    names = [f"adapter-{number:04d}" for number in range(jobs)]
    cpu = time.process_time()
    for second in range(3600):
        at: dict[str, Any] = {"time": float(second), "received": float(second)}
        samples = tuple(
            f.Sample(job=name, step=10 * second, total_steps=500_000, loss=1.0, time=at["time"], tokens=900.0)
            for name in names
        )
        state.apply(f.Samples(**at, samples=samples))
        for name in names[second % 5 :: 5]:
            state.apply(f.Evaluation(**at, job=name, step=10 * second, val_loss=2.0 / (second + 1)))
        if second == 59:
            print(resident_mb(os.getpid()))
    print(resident_mb(os.getpid()), 1e6 * (time.process_time() - cpu) / (3600 * jobs))


# --- arm: pty


def run_pty(arguments: argparse.Namespace) -> dict[str, float]:
    with coordinator(arguments) as (fake, home):
        terminal = Terminal([sys.executable, "-m", "gshare.cli.main", "tui"], environment(home))
        try:
            found = measure(fake, terminal.process.pid, arguments, terminal.seen)
            assert terminal.process.poll() is None, f"the app ended: {terminal.tail()}"
            inside = [size for at, size in terminal.sizes if found["began"] <= at < found["ended"]]
            found["bytes"] = sum(inside) / (found["ended"] - found["began"])
            found["first_paint"] = terminal.first_paint_ms()
            return found
        finally:
            terminal.close()


# --- arm: start


def run_start(arguments: argparse.Namespace) -> dict[str, float]:
    paints: list[float] = []
    cpu: list[float] = []
    with coordinator(arguments) as (_, home):
        for _ in range(STARTS):
            terminal = Terminal([sys.executable, "-m", "gshare.cli.main", "tui"], environment(home))
            try:
                while terminal.first_paint_ms() == float("inf"):
                    assert terminal.process.poll() is None, f"the app ended: {terminal.tail()}"
                    time.sleep(0.005)
                cpu.append(1000 * cpu_seconds(terminal.process.pid))
                paints.append(terminal.first_paint_ms())
            finally:
                terminal.close()
    return {
        "first_paint": statistics.median(paints),
        "first_paint_best": min(paints),
        "cpu_ms": statistics.median(cpu),
    }


# --- all of them


def report(arms: dict[str, dict[str, float]]) -> bool:
    """Prints each figure with its limit; whether all hold."""
    holds = True
    for arm, figures in arms.items():
        print(f"{arm}:")
        for name, value in figures.items():
            if name in ("began", "ended"):
                continue
            limit = LIMITS.get(name)
            if limit is None:
                print(f"  {name:16} {value:12.1f}")
                continue
            good = value <= limit[0]
            holds &= good
            print(
                f"  {name:16} {value:12.1f}   at most {limit[0]:g} {limit[1]}: {'ok' if good else 'MISSED'}"
            )
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["data", "memory", "start", "pty"])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--rate", type=float, default=10.0, help="events a second of each job")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured, after warming up")
    parser.add_argument("--hour-seconds", type=float, default=60.0, help="of the hour, at 60 times the speed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--child", choices=["data", "memory"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child == "data":
        asyncio.run(child_data())
    elif arguments.child == "memory":
        child_memory(arguments.jobs)
    if arguments.child:
        return 0
    arms = {"data": run_data, "memory": run_memory, "start": run_start, "pty": run_pty}
    found = {name: arm(arguments) for name, arm in arms.items() if arguments.only in (None, name)}
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    holds = report(found)
    if arguments.json:
        where: dict[str, Any] = {
            "adapters": arguments.jobs,
            "nodes": arguments.nodes,
            "events_per_s": arguments.jobs * arguments.rate,
            "terminal": [COLUMNS, ROWS],
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "load_average": os.getloadavg(),  # of the machine; figures of a busy one are worse
        }
        arguments.json.write_text(json.dumps({"where": where, "arms": found, "holds": holds}, indent=1))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
