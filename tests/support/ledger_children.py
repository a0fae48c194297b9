"""Ledgers on simulated devices, and real processes that reserve in them: for the tests of agent/vram."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from gshare.agent.vram import clock
from gshare.agent.vram.guard import Reservation, reserve
from gshare.agent.vram.ledger import Ledger, Wanted
from gshare.agent.vram.rows import Row, encode
from gshare.agent.vram.simulated import SimulatedDevices

TOTAL_MB = 10_000
#: 85 % of it.
USABLE_MB = 8_500

#: The id of a boot that this is not.
ANOTHER_BOOT = "01234567-89ab-cdef-0123-456789abcdef"

#: No configuration file of anybody's.
NO_CONFIG = {"XDG_CONFIG_HOME": "/nonexistent"}


def write_devices(path: Path, *tables: str) -> Path:
    """A simulated devices file; each table is the lines below `[[device]]`."""
    text = "".join(f"[[device]]\n{table}\n" for table in tables)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path


def device(uuid: str = "GPU-aaaa-1", total_mb: int = TOTAL_MB, **keys: object) -> str:
    """One table, with further keys as TOML text."""
    lines = [f'uuid = "{uuid}"', f"total_mb = {total_mb}"]
    return "\n".join(lines + [f"{key} = {value}" for key, value in keys.items()])


def make_ledger(folder: Path, *tables: str) -> Ledger:
    """A ledger in `folder/ledger` on the given devices (one of 10 000 MiB when none is given)."""
    path = folder / "devices.toml"
    if tables or not path.exists():
        write_devices(path, *(tables or (device(),)))
    return Ledger(directory=folder / "ledger", source=SimulatedDevices(path), environ=NO_CONFIG)


def take(ledger: Ledger, mb: int, *, task: str = "test", timeout_s: float = 0.0) -> Reservation:
    """Reserve on any device, without waiting unless told to."""
    return reserve(mb, task=task, devices=ledger.source.devices(), timeout_s=timeout_s, ledger=ledger)


#: What a child's work is given: say a line, and wait until it is told to go on.
Say = Callable[[str], None]
WaitFor = Callable[[], str]


class Child:
    """A forked process that tells us lines of text and goes on when it is told to."""

    def __init__(self, work: Callable[[Say, WaitFor], None]) -> None:
        from_child, to_parent = os.pipe()
        from_parent, to_child = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(from_child)
                os.close(to_child)
                work(
                    lambda line: _write(to_parent, line),
                    lambda: os.read(from_parent, 1).decode(),
                )
                code = 0
            except BaseException as error:
                with contextlib.suppress(OSError):
                    _write(to_parent, f"{type(error).__name__}: {error}")
            finally:
                sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
                os._exit(code)
        os.close(to_parent)
        os.close(from_parent)
        self._read, self._tell = from_child, to_child
        self._buffer = b""
        self.code: int | None = None

    def line(self, timeout_s: float = 30.0) -> str:
        """The next line; "" when the child has ended. AssertionError when none comes in time."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the child says nothing"
            data = os.read(self._read, 65536)
            if not data:
                return ""
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def go_on(self) -> None:
        os.write(self._tell, b".")

    def kill(self) -> None:
        """SIGKILL, and reap."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wait(self) -> int:
        """The exit code, negative for a signal."""
        if self.code is None:
            _, status = os.waitpid(self.pid, 0)
            self.code = os.waitstatus_to_exitcode(status)
            os.close(self._read)
            os.close(self._tell)
        return self.code


def _write(fd: int, line: str) -> None:
    os.write(fd, line.replace("\n", " ").encode() + b"\n")


@contextlib.contextmanager
def child(work: Callable[[Say, WaitFor], None]) -> Iterator[Child]:
    """A child that is gone when the block ends, however it ends."""
    made = Child(work)
    try:
        yield made
    finally:
        made.kill()


@contextlib.contextmanager
def holder(ledger: Ledger, mb: int, task: str = "child") -> Iterator[Child]:
    """A child that holds `mb` until it is told to go on. Its first line is the row's id."""

    def work(say: Say, wait: WaitFor) -> None:
        with take(ledger, mb, task=task) as reservation:
            say(reservation.id)
            wait()

    with child(work) as made:
        yield made


def rows(ledger: Ledger) -> dict[str, int]:
    """Row id → counted MiB, as the ledger sees it now."""
    view, _ = ledger.look()
    return {row.id: row.counted_mb for row in view.rows}


def files(ledger: Ledger) -> list[str]:
    """What lies in the ledger's directory besides the lock."""
    return sorted(name for name in os.listdir(ledger.directory) if name != "lock")


def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Look until it is true; AssertionError when it does not become so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """It stands still while the block changes in two steps what it looks at, and never sees the half."""
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: (clock.stat_fields(pid) or ["?"])[0] == "T")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def wanted(ledger: Ledger, mb: int, **keys: object) -> Wanted:
    """A request for any device; `keys` are further fields."""
    return msgspec.structs.replace(Wanted(mb=mb, devices=ledger.source.devices(), task="test"), **keys)


def plant(ledger: Ledger, **keys: object) -> Row:
    """A row file without a living holder, in the name of this process."""
    rows(ledger)
    base = Row(
        id="0123456789ab",
        gpu_uuid="GPU-aaaa-1",
        budget_mb=700,
        task="planted",
        kind="trainer",
        pid=os.getpid(),
        uid=os.geteuid(),
        created=time.time(),
        boot_id=clock.now().boot_id,
        pid_start=clock.start_ticks(os.getpid()) or 0,
        pid_ns=clock.pid_namespace(os.getpid()) or 0,
    )
    row = msgspec.structs.replace(base, **keys)
    kind = "lease" if row.lease_until_boot_s is not None else "row"
    (ledger.directory / f"{kind}-{row.id}.json").write_bytes(encode(row))
    if kind == "row":
        (ledger.directory / f"row-{row.id}.life").touch()
    return row
