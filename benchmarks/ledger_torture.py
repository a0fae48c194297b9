"""The ledger under fire: random SIGKILL, nothing over-committed, no live row lost; and what it costs.

    python benchmarks/ledger_torture.py                     both parts at full size
    python benchmarks/ledger_torture.py --repeat 100 --only torture
    python benchmarks/ledger_torture.py --no-lock --only torture        negative control: must fail

Torture: 32 processes do 200 reserve/release each while others of them are killed at random and started
again. Each notes in shared memory when it held what; afterwards the intervals are laid over each other:
their sum may never exceed what the device may hand out. An interval begins after `reserve` came back and
ends before `release` is called or the kill is sent, so it is never longer than the truth. After each kill
one operation is done, and no row of the dead process may be left. A holder looks for its own row before it
releases.

Cost: reserve plus release, alone, and with 32 processes that pause 50 ms between operations; by phase.

Exit code 0 when every gate holds, 1 when one fails.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
from gshare.agent.errors import GshareError
from gshare.agent.trace import DISABLED, PHASES, Tracer
from gshare.agent.vram import paths, store
from gshare.agent.vram.ledger import Grant, Ledger, Wanted
from gshare.agent.vram.queue import wait_for
from gshare.agent.vram.rows import Row, decode_row
from gshare.agent.vram.simulated import SimulatedDevices

TOTAL_MB = 100 * 1024
CAPACITY_MB = int(TOTAL_MB * 0.85)
DEVICE = f'[[device]]\nuuid = "GPU-torture"\nname = "Simulated 100 GiB"\ntotal_mb = {TOTAL_MB}\n'

#: No configuration file of the user's: the reserve factor is the default.
NO_CONFIG = {"XDG_CONFIG_HOME": "/nonexistent"}

MEDIAN_LIMIT_MS = 3.0
P99_LIMIT_MS = 50.0
PAUSE_S = 0.05

#: No operation ends for so long: without the lock, rows that nobody clears may fill the device for good.
STUCK_S = 20.0

#: linux/prctl.h: the signal that a process gets when its parent ends.
PR_SET_PDEATHSIG = 1

# One record an operation, in 64-bit words: MiB, acquired (ns), given back (ns). Then one line a worker.
_RECORD = 3
_DONE, _LOST, _ERRORS, _REFUSED, _WORKER = 0, 1, 2, 3, 4


class Board:
    """Shared memory of the torture: what each worker held and when, and its counters."""

    def __init__(self, processes: int, operations: int) -> None:
        self.processes, self.operations = processes, operations
        self._records = processes * operations * _RECORD
        words = self._records + processes * _WORKER
        self._words = memoryview(mmap.mmap(-1, words * 8)).cast("q")

    def acquired(self, worker: int, operation: int, mb: int) -> None:
        at = (worker * self.operations + operation) * _RECORD
        self._words[at] = mb
        self._words[at + 2] = 0
        self._words[at + 1] = time.monotonic_ns()

    def given_back(self, worker: int, operation: int, at_ns: int | None = None) -> None:
        at = (worker * self.operations + operation) * _RECORD
        if self._words[at + 1] and not self._words[at + 2]:
            self._words[at + 2] = at_ns if at_ns is not None else time.monotonic_ns()

    def count(self, worker: int, what: int) -> None:
        self._words[self._records + worker * _WORKER + what] += 1

    def counted(self, worker: int, what: int) -> int:
        return self._words[self._records + worker * _WORKER + what]

    def total(self, what: int) -> int:
        return sum(self.counted(worker, what) for worker in range(self.processes))

    def most_at_once(self) -> tuple[int, int]:
        """(MiB, holders) at the fullest moment; what ends at an instant ends before what begins there."""
        events: list[tuple[int, int, int]] = []
        for at in range(0, self._records, _RECORD):
            mb, start, end = self._words[at], self._words[at + 1], self._words[at + 2]
            if start and end:
                events += [(start, 1, mb), (end, 0, mb)]
        held = holders = most = most_holders = 0
        for _, begins, mb in sorted(events):
            held += mb if begins else -mb
            holders += 1 if begins else -1
            most, most_holders = max(most, held), max(most_holders, holders)
        return most, most_holders


class Outcome(NamedTuple):
    """One torture run; every field but the first three must be as its gate says."""

    operations: int
    kills: int
    refused: int
    most_mb: int
    most_holders: int
    lost_rows: int
    dead_rows: int
    errors: int
    leftovers: tuple[str, ...]

    @property
    def faults(self) -> list[str]:
        found = []
        if self.most_mb > CAPACITY_MB:
            found.append(f"over-committed: {self.most_mb} of {CAPACITY_MB} MiB")
        for name, count in (
            ("live rows lost", self.lost_rows),
            ("dead rows after the next operation", self.dead_rows),
            ("errors", self.errors),
            (f"files left at the end ({', '.join(self.leftovers)})", len(self.leftovers)),
        ):
            if count:
                found.append(f"{count} {name}")
        return found


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a forked child, which never returns into the caller's frames; the child's PID.

    The child is killed when we end in any way: without the lock a worker may wait for ever for rows that
    nobody clears, and whoever stops the run by a timeout would leave it behind.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(code)  # it ended before that call
        work()
        code = 0
    except BaseException as error:
        sys.stderr.write(f"worker {os.getpid()}: {type(error).__name__}: {error}\n")
    os._exit(code)


def torture_worker(ledger: Ledger, board: Board, worker: int, seed: int) -> None:
    """The operations that this worker has still to do, as a new process: it probes the directory first."""
    paths._checked.clear()
    devices = ledger.source.devices()
    first = board.counted(worker, _DONE)
    rng = random.Random(seed * 1_000_003 + worker * 1009 + first)
    for operation in range(first, board.operations):
        wanted = Wanted(mb=rng.randint(1, 16) * 1024, devices=devices, task=f"torture {worker}")
        try:
            grant = _take(ledger, wanted, rng, board, worker)
            board.acquired(worker, operation, wanted.mb)
            if rng.random() < 0.3:
                _write_use(ledger, grant, rng.randint(1, wanted.mb))
            time.sleep(rng.uniform(0, 0.02))
            if not (ledger.directory / f"row-{grant.row.id}.json").exists():
                board.count(worker, _LOST)
            board.given_back(worker, operation)
            ledger.release(grant)
        except GshareError as error:
            board.given_back(worker, operation)
            board.count(worker, _ERRORS)
            if board.counted(worker, _ERRORS) == 1:
                sys.stderr.write(f"worker {worker}: {error}\n")
        board.count(worker, _DONE)


def _take(ledger: Ledger, wanted: Wanted, rng: random.Random, board: Board, worker: int) -> Grant:
    """One time in five through the queue, else by asking until it fits."""
    if rng.random() < 0.2:
        return wait_for(ledger, wanted, timeout_s=120)
    while True:
        answer = ledger.reserve(wanted)
        if isinstance(answer, Grant):
            return answer
        board.count(worker, _REFUSED)
        time.sleep(rng.uniform(0.001, 0.01))


def _write_use(ledger: Ledger, grant: Grant, mb: int) -> None:
    ledger.change(grant, lambda row: msgspec.structs.replace(row, peak_mb=mb))


def torture(processes: int, operations: int, kills: int, seed: int, folder: Path) -> Outcome:
    """One run in a new ledger below `folder`."""
    ledger = make_ledger(folder)
    board = Board(processes, operations)
    rng = random.Random(seed)

    def start(worker: int) -> int:
        return forked(lambda: torture_worker(ledger, board, worker, seed))

    running = {start(worker): worker for worker in range(processes)}
    killed = dead_rows = crashed = 0
    progress = (0, time.monotonic())
    while running:
        done = board.total(_DONE)
        if done != progress[0]:
            progress = (done, time.monotonic())
        elif time.monotonic() - progress[1] > STUCK_S:
            crashed += stop_all(running)
            break
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            del running[ended]
            crashed += status != 0
            continue
        time.sleep(rng.uniform(0, 0.02))
        if killed >= kills or not running:
            continue
        pid = rng.choice(list(running))
        at_ns = time.monotonic_ns()
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        worker = running.pop(pid)
        if not os.WIFSIGNALED(status):
            crashed += status != 0
            continue  # it had just finished
        killed += 1
        operation = board.counted(worker, _DONE)
        if operation < operations:
            board.given_back(worker, operation, at_ns)
        ledger.look()
        dead_rows += sum(row.pid == pid for row in rows_on_disk(ledger.directory))
        if operation < operations:
            board.count(worker, _DONE)
            running[start(worker)] = worker
    ledger.look()
    names = os.listdir(ledger.directory)
    left = [name for name in names if name != store.LOCK and not name.startswith("passes-")]
    left += [path.name for path in folder.glob(f".{ledger.directory.name}-*")]
    most, holders = board.most_at_once()
    return Outcome(
        operations=board.total(_DONE),
        kills=killed,
        refused=board.total(_REFUSED),
        most_mb=most,
        most_holders=holders,
        lost_rows=board.total(_LOST),
        dead_rows=dead_rows,
        errors=board.total(_ERRORS) + crashed,
        leftovers=tuple(sorted(left)),
    )


def stop_all(running: dict[int, int]) -> int:
    """Kill the workers that nothing comes of any more; how many there were."""
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return len(running)


def rows_on_disk(directory: Path) -> list[Row]:
    """Every row file, whether its holder lives or not."""
    found = []
    for path in directory.glob("row-*.json"):
        try:
            found.append(decode_row(path.read_bytes()))
        except FileNotFoundError:
            continue
    return found


def make_ledger(folder: Path, tracer: Tracer = DISABLED) -> Ledger:
    """A ledger of its own on a simulated device."""
    devices = folder / "devices.toml"
    if not devices.exists():
        devices.write_text(DEVICE, encoding="utf-8")
    source = SimulatedDevices(devices)
    return Ledger(directory=folder / "ledger", source=source, tracer=tracer, environ=NO_CONFIG)


class Cost(NamedTuple):
    """Milliseconds of reserve plus release, and of every phase."""

    pairs: list[float]
    phases: dict[str, list[float]]


def measure(folder: Path, operations: int, pause_s: float, seed: int) -> Cost:
    """`operations` pairs by one process. Every tenth of them is a warm-up that is left out."""
    tracer = Tracer()
    ledger = make_ledger(folder, tracer)
    rng = random.Random(seed)
    wanted = Wanted(mb=1024, devices=ledger.source.devices(), task="cost")
    time.sleep(rng.uniform(0, pause_s))
    warm = max(1, operations // 10)
    pairs: list[float] = []
    for number in range(operations + warm):
        if number == warm:
            tracer.clear()
        start = time.perf_counter()
        grant = ledger.reserve(wanted)
        assert isinstance(grant, Grant)
        ledger.release(grant)
        if number >= warm:
            pairs.append((time.perf_counter() - start) * 1e3)
        time.sleep(pause_s)
    return Cost(pairs, tracer.durations_ms())


def measure_together(folder: Path, processes: int, operations: int) -> Cost:
    """The same by many processes at once on one ledger."""
    make_ledger(folder).look()

    def work(worker: int) -> Callable[[], None]:
        def run() -> None:
            cost = measure(folder, operations, PAUSE_S, worker)
            (folder / f"cost-{worker}.json").write_text(json.dumps(cost._asdict()), encoding="utf-8")

        return run

    children = [forked(work(worker)) for worker in range(processes)]
    for child in children:
        _, status = os.waitpid(child, 0)
        assert status == 0, "a worker failed"
    merged = Cost([], {})
    for worker in range(processes):
        part = json.loads((folder / f"cost-{worker}.json").read_text(encoding="utf-8"))
        merged.pairs.extend(part["pairs"])
        for name, values in part["phases"].items():
            merged.phases.setdefault(name, []).extend(values)
    return merged


def percentile(values: list[float], part: float) -> float:
    """Nearest rank."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def show_cost(title: str, cost: Cost) -> None:
    print(f"{title}: {len(cost.pairs)} pairs")
    print(f"  {'':16}{'median ms':>10}{'p99 ms':>10}")
    print(
        f"  {'reserve+release':16}{statistics.median(cost.pairs):>10.3f}{percentile(cost.pairs, 0.99):>10.3f}"
    )
    for name in PHASES:
        if name in cost.phases:
            values = cost.phases[name]
            print(f"  {name:16}{statistics.median(values):>10.3f}{percentile(values, 0.99):>10.3f}")


def run_cost(processes: int, operations: int, base: Path) -> list[str]:
    """Both cost measurements; the gates that failed."""
    faults = []
    with tempfile.TemporaryDirectory(dir=base) as folder:
        alone = measure(Path(folder), max(200, operations), 0.0, 0)
    show_cost("cost, uncontended", alone)
    median = statistics.median(alone.pairs)
    if median > MEDIAN_LIMIT_MS:
        faults.append(f"median {median:.2f} ms uncontended, allowed {MEDIAN_LIMIT_MS}")
    with tempfile.TemporaryDirectory(dir=base) as folder:
        together = measure_together(Path(folder), processes, operations)
    show_cost(f"cost, {processes} processes pausing {PAUSE_S * 1e3:.0f} ms", together)
    p99 = percentile(together.pairs, 0.99)
    if p99 > P99_LIMIT_MS:
        faults.append(f"p99 {p99:.1f} ms with {processes} processes, allowed {P99_LIMIT_MS}")
    return faults


def run_torture(arguments: argparse.Namespace, base: Path) -> list[str]:
    """Every repetition of the torture; the gates that failed."""
    faults = []
    for number in range(arguments.repeat):
        folder = Path(tempfile.mkdtemp(dir=base))
        start = time.monotonic()
        outcome = torture(
            arguments.processes, arguments.operations, arguments.kills, arguments.seed + number, folder
        )
        shutil.rmtree(folder)
        verdict = "; ".join(outcome.faults) or "ok"
        seconds = time.monotonic() - start
        print(
            f"torture {number + 1}/{arguments.repeat}: {outcome.operations} operations, "
            f"{outcome.kills} kills, {outcome.refused} refusals, at most {outcome.most_mb} of "
            f"{CAPACITY_MB} MiB by {outcome.most_holders} holders, {seconds:.1f} s: {verdict}",
            flush=True,
        )
        faults += [f"run {number + 1}: {fault}" for fault in outcome.faults]
    return faults


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--processes", type=int, default=32)
    parser.add_argument("--operations", type=int, default=200, help="reserve/release a process")
    parser.add_argument("--kills", type=int, default=100, help="at most so many a run")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("torture", "cost"))
    parser.add_argument("--no-lock", action="store_true", help="negative control: decide without the lock")
    parser.add_argument("--dir", type=Path, help="where the ledgers are made; default /dev/shm, else /tmp")
    arguments = parser.parse_args(argv)
    base = arguments.dir or Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
    if arguments.no_lock:
        store.take_lock = lambda fd, directory, path, deadline: None
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, ledger on {base}, lock {'off' if arguments.no_lock else 'on'}"
    )
    faults: list[str] = []
    if arguments.only != "cost":
        faults += run_torture(arguments, base)
    if arguments.only != "torture":
        faults += run_cost(arguments.processes, arguments.operations, base)
    for fault in faults:
        print(f"FAILED {fault}")
    print("failed" if faults else "all gates hold")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
