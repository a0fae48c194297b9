"""`gpu run` when things go wrong beside the program: its reservation ends with it, and with nothing else."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from gshare.agent.errors import GshareError
from gshare.agent.vram import guard, store, watch
from gshare.agent.vram.guard import Reservation, reserve
from gshare.agent.vram.ledger import Ledger
from gshare.agent.vram.store import LOCK_SECONDS
from gshare.agent.vram.watch import Program, Watcher, run_program, stop_program

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import (
    Child,
    Say,
    WaitFor,
    child,
    device,
    files,
    make_ledger,
    rows,
    stopped,
    take,
    until,
    write_devices,
)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return make_ledger(tmp_path)


class Run:
    """`run_program` in a process of its own, on a program that uses 1100 of 1000 MiB until it is told to end.

    `before` runs in that process once the memory is reserved. Its lines: what is said, at the end the code.
    """

    def __init__(self, ledger: Ledger, folder: Path, before: Callable[[], None], *, strict: bool) -> None:
        self.folder, self.ledger = folder, ledger
        self._done = folder / "done"
        program = f"echo $$ > {folder}/new; mv {folder}/new {folder}/pid; trap 'exit 5' TERM"
        program += f"; while [ ! -e {self._done} ]; do sleep 0.02; done; exit 7"

        def work(say: Say, wait: WaitFor) -> None:
            code: object = None
            devices = ledger.source.devices()
            with reserve(1000, task="t", devices=devices, ledger=ledger, on_warning=say) as reservation:
                say(reservation.id)
                before()
                try:
                    code = run_program(
                        reservation, ["sh", "-c", program], strict=strict, notify=say, poll_s=0.02
                    )
                except GshareError as error:
                    code = error
            say(f"code {code}")

        self.watcher = Child(work)
        self.row_id = self.watcher.line()
        until((folder / "pid").exists)
        self.pid = int((folder / "pid").read_text(encoding="utf-8"))

    def uses(self, mb: int, **keys: object) -> None:
        listed = f"[{{ pid = {self.pid}, used_mb = {mb} }}]"
        write_devices(self.folder / "devices.toml", device(processes=listed, **keys))

    def holds(self) -> bool:
        """Whether the reservation's flock is held, whatever has become of the ledger."""
        with (self.ledger.directory / f"row-{self.row_id}.life").open("rb") as life:
            try:
                fcntl.flock(life, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    def end(self) -> list[str]:
        """Let the program end; every line until the watcher's end."""
        self._done.touch()
        lines = []
        while line := self.watcher.line():
            lines.append(line)
        return lines


@contextlib.contextmanager
def running(
    ledger: Ledger, folder: Path, before: Callable[[], None] = lambda: None, *, strict: bool = False
) -> Iterator[Run]:
    run = Run(ledger, folder, before, strict=strict)
    try:
        yield run
    finally:
        run.watcher.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.pid, signal.SIGKILL)


# What goes wrong while the program runs. Each says how to begin and how to end it, in the test's process.


@contextlib.contextmanager
def ledger_gone(run: Run) -> Iterator[None]:
    """The watcher stands still meanwhile: a directory that it made anew would be in the way."""
    directory, away = run.ledger.directory, run.folder / "away"
    with stopped(run.watcher.pid):
        directory.rename(away)
        directory.write_text("in the way", encoding="utf-8")
    try:
        yield
    finally:
        with stopped(run.watcher.pid):
            directory.unlink()
            away.rename(directory)


@contextlib.contextmanager
def lock_held(run: Run) -> Iterator[None]:
    fd = os.open(run.ledger.directory / "lock", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def devices_gone(run: Run) -> Iterator[None]:
    path = run.folder / "devices.toml"
    path.rename(run.folder / "away.toml")
    try:
        yield
    finally:
        (run.folder / "away.toml").rename(path)  # whole at once: the watcher reads it all the time


@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        (ledger_gone, "its use is not recorded: cannot use"),
        (lock_held, "its use is not recorded: "),
        (devices_gone, "not watched meanwhile: GSHARE_DEVICES: "),
    ],
)
def test_trouble_beside_the_program_is_said_once_and_watching_goes_on(
    ledger: Ledger,
    tmp_path: Path,
    trouble: Callable[[Run], contextlib.AbstractContextManager[None]],
    text: str,
) -> None:
    # Without that trouble the lock is ours for a moment only, however long a busy machine makes it.
    lock_s = 0.05 if trouble is lock_held else LOCK_SECONDS

    def patience() -> None:
        watch._LOCK_S = guard.KEEP_LOCK_S = lock_s

    with running(ledger, tmp_path, patience) as run:
        with trouble(run):
            if trouble is not devices_gone:
                run.uses(900)
            assert text in run.watcher.line()
            time.sleep(0.5)  # many more looks: another line would come before the next one below
        assert rows(ledger) == {run.row_id: 1000}
        run.uses(1100)
        told = run.watcher.line()
        if trouble is ledger_gone and "they have been put back" in told:
            told = run.watcher.line()  # it saw that its files were gone, and wrote them when they were back
        assert "1100 MiB used, 1000 MiB reserved" in told
        until(lambda: rows(ledger) == {run.row_id: 1100})
        assert run.end() == ["code 7"]
    assert files(ledger) == []


def full_disk() -> None:
    def write(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store.os = SimpleNamespace(**{**vars(os), "write": write})  # pyright: ignore[reportAttributeAccessIssue]


def read_only() -> None:
    def refuse(*args: object, **keys: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    changed = {"write": refuse, "rename": refuse, "unlink": refuse}
    store.os = SimpleNamespace(**{**vars(os), **changed})  # pyright: ignore[reportAttributeAccessIssue]


def driver_bug() -> None:
    def fail(self: Reservation) -> None:
        raise ZeroDivisionError("a bug")

    read = Reservation.read_device
    calls = []

    def first_well(self: Reservation) -> object:
        calls.append(1)
        return read(self) if len(calls) == 1 else fail(self)

    Reservation.read_device = first_well  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        (full_disk, "its use is not recorded: the ledger in {} cannot be changed: No space left on device"),
        (read_only, "its use is not recorded: the ledger in {} cannot be changed: Read-only file system"),
        (driver_bug, "not watched meanwhile: ZeroDivisionError: a bug"),
    ],
)
def test_what_fails_for_good_fails_no_program_and_gives_nothing_back(
    ledger: Ledger, tmp_path: Path, trouble: Callable[[], None], text: str
) -> None:
    with running(ledger, tmp_path, trouble) as run:
        run.uses(900)
        assert text.format(ledger.directory) in run.watcher.line()
        assert rows(ledger) == {run.row_id: 1000}
        assert run.holds()
        assert run.end()[-1] == "code 7"
    assert rows(ledger) == {}


def test_who_is_told_may_fail_too(ledger: Ledger, tmp_path: Path) -> None:
    told = tmp_path / "told"

    def refuse(text: str) -> None:
        told.touch()
        raise OSError(errno.ENOSPC, "no space")

    def work(say: Say, wait: WaitFor) -> None:
        devices = ledger.source.devices()
        with reserve(1000, task="t", devices=devices, ledger=ledger, on_warning=refuse) as reservation:
            say(reservation.id)
            script = f"echo $$ > {tmp_path}/pid; while [ ! -e {tmp_path}/done ]; do sleep 0.02; done; exit 7"
            command = ["sh", "-c", script]
            code = run_program(reservation, command, strict=False, notify=refuse, poll_s=0.02)
        say(f"code {code}")

    with child(work) as watcher:
        row_id = watcher.line()
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip() != "")
        pid = (tmp_path / "pid").read_text(encoding="utf-8").strip()
        write_devices(tmp_path / "devices.toml", device(processes=f"[{{ pid = {pid}, used_mb = 1300 }}]"))
        until(told.exists)  # both by the watcher and, more than 20 % over, by the reservation
        until(lambda: rows(ledger) == {row_id: 1300})
        (tmp_path / "done").touch()
        assert watcher.line() == "code 7"


def test_when_the_watch_itself_is_left_the_row_stays_with_the_program(ledger: Ledger, tmp_path: Path) -> None:
    def leave() -> None:
        def interrupt(self: Watcher, child: int) -> None:
            raise KeyboardInterrupt

        Watcher.look = interrupt  # pyright: ignore[reportAttributeAccessIssue]

    with running(ledger, tmp_path, leave) as run:
        assert run.watcher.line() == "KeyboardInterrupt: "
        assert run.watcher.wait() == 1
        assert rows(ledger) == {run.row_id: 1000}
        os.kill(run.pid, signal.SIGKILL)
        until(lambda: rows(ledger) == {})


def test_a_signal_that_may_not_be_passed_on_is_said(ledger: Ledger, tmp_path: Path) -> None:
    """As for a program that sudo has made another user's."""

    def forbid() -> None:
        def kill(pid: int, number: int) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted")

        watch.os = SimpleNamespace(**{**vars(os), "kill": kill})  # pyright: ignore[reportAttributeAccessIssue]

    with running(ledger, tmp_path, forbid) as run:
        os.kill(run.watcher.pid, signal.SIGTERM)
        line = run.watcher.line()
        assert f"reservation {run.row_id}: SIGTERM is not passed on: " in line
        assert "Operation not permitted" in line
        assert rows(ledger) == {run.row_id: 1000}
        assert run.end() == ["code 7"]


def test_a_watcher_that_was_stopped_and_goes_on_sends_no_signal_of_its_own(
    ledger: Ledger, tmp_path: Path
) -> None:
    """Ctrl-Z and fg. In CPython an interrupted `sigtimedwait` may return what was never received."""
    with running(ledger, tmp_path) as run:
        for _ in range(20):
            os.kill(run.watcher.pid, signal.SIGSTOP)
            until(lambda: "State:\tT" in Path(f"/proc/{run.watcher.pid}/status").read_text(encoding="utf-8"))
            time.sleep(0.05)  # longer than between two looks
            os.kill(run.watcher.pid, signal.SIGCONT)
            time.sleep(0.03)
        assert rows(ledger) == {run.row_id: 1000}
        assert run.end() == ["code 7"]
    assert files(ledger) == []


@pytest.mark.parametrize("ignored", [True, False])
def test_the_code_is_the_programs_also_where_sigchld_is_ignored(
    ledger: Ledger, tmp_path: Path, ignored: bool
) -> None:
    """Inherited, say from a shell's `trap '' CHLD`: the kernel then reaps by itself."""
    disposition = signal.SIG_IGN if ignored else signal.SIG_DFL

    def work(say: Say, wait: WaitFor) -> None:
        signal.signal(signal.SIGCHLD, disposition)
        with take(ledger, 1000) as reservation:
            script = f"grep SigIgn /proc/self/status > {tmp_path}/status; exit 7"
            code = run_program(reservation, ["sh", "-c", script], strict=False, notify=say, poll_s=0.02)
        say(f"code {code}")
        say(str(signal.getsignal(signal.SIGCHLD) == disposition))

    with child(work) as watcher:
        assert watcher.line() == "code 7"
        assert watcher.line() == "True"
    mask = int((tmp_path / "status").read_text(encoding="utf-8").split()[1], 16)
    assert not mask & 1 << signal.SIGCHLD - 1  # the program can wait for its own children


# --strict


def test_strict_says_that_it_is_blind_goes_on_and_stops_once_it_sees(ledger: Ledger, tmp_path: Path) -> None:
    with running(ledger, tmp_path, strict=True) as run:
        run.uses(1100, state='"lost"')
        assert run.watcher.line() == (
            f"reservation {run.row_id}: --strict is not kept meanwhile: Simulated GPU: lost (simulated)"
        )
        assert rows(ledger) == {run.row_id: 1000}
        assert "State:\tZ" not in Path(f"/proc/{run.pid}/status").read_text(encoding="utf-8")
        run.uses(1001)
        lines = []
        while line := run.watcher.line():
            lines.append(line)
        assert len(lines) == 2, "it is said once that it is blind"
        assert "1001 MiB used, 1000 MiB reserved" in lines[0]
        assert "more than the 1000 MiB reserved, and was stopped (--strict)" in lines[1]
    assert rows(ledger) == {}


#: Asked to end, it starts `sleep` in a session of its own and leaves it behind.
LEAVES_ONE_BEHIND = """
import os, signal, subprocess, sys, time
def end(number, frame):
    left = subprocess.Popen(["sleep", "60"], start_new_session=True)
    open(sys.argv[1], "w").write(str(left.pid))
    os._exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(60)
"""

#: In a session of its own, deaf to SIGTERM, it starts another `sleep` whenever one ends.
RESTARTS = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda number, frame: None)
print("up", flush=True)
while True:
    one = subprocess.Popen(["sleep", "60"], start_new_session=True)
    with open(sys.argv[1], "a") as file:
        file.write(f"{one.pid}\\n")
    one.wait()
"""


def started(command: list[str], row_id: str) -> Program:
    """A program as `gpu run` starts it; ready when it has said so."""
    read, write = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, write, 1)]
    environment = {**os.environ, "GSHARE_RESERVATION": row_id}
    pid = os.posix_spawnp(command[0], command, environment, file_actions=actions)
    os.close(write)
    with os.fdopen(read) as output:
        assert output.readline() == "up\n"
    return Program(pid)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # reaped, perhaps just now
        return False


@pytest.mark.parametrize("marked", [True, False])
def test_what_a_program_starts_when_it_is_asked_to_end_is_stopped_too(
    ledger: Ledger, tmp_path: Path, marked: bool
) -> None:
    """Known by the reservation in its environment; the control has another there, and is nobody's."""
    left = tmp_path / "left"
    with take(ledger, 1000) as reservation:
        command = [sys.executable, "-c", LEAVES_ONE_BEHIND, str(left)]
        program = started(command, reservation.id if marked else "0" * 12)
        assert stop_program(program, reservation, grace_s=20) == []
    assert program.code == 0
    until(left.exists)
    pid = int(left.read_text(encoding="utf-8"))
    try:
        assert lives(pid) is not marked
    finally:
        if lives(pid):
            os.kill(pid, signal.SIGKILL)


def test_what_is_started_again_when_it_is_killed_is_killed_again(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, grace_s = tmp_path / "pids", 100.0

    def pids() -> list[int]:
        return [int(line) for line in file.read_text(encoding="utf-8").split()]

    def now() -> float:
        """Its time of grace is over when it has started another, however long that takes."""
        return time.monotonic() + (grace_s if len(pids()) > 1 else 0)

    with take(ledger, 1000) as reservation:
        program = started([sys.executable, "-c", RESTARTS, str(file)], reservation.id)
        until(lambda: file.exists() and len(pids()) == 1)
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
        monkeypatch.setattr(watch, "_KILL_S", 60)
        assert stop_program(program, reservation, grace_s=grace_s) == []
    assert program.code == 128 + signal.SIGKILL
    assert len(pids()) > 1, "SIGTERM alone had it start another"
    assert [pid for pid in pids() if lives(pid)] == []


def test_what_cannot_be_killed_is_named_and_the_rest_is_waited_for(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: psutil.Process) -> None:
        raise psutil.AccessDenied(self.pid)

    with take(ledger, 1000) as reservation:
        program = started(["sh", "-c", "echo up; exec sleep 60"], reservation.id)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(psutil.Process, "terminate", refuse)
                patch.setattr(psutil.Process, "kill", refuse)
                patch.setattr(watch, "_KILL_S", 0.2)
                assert stop_program(program, reservation, grace_s=0.1) == [program.pid]
            assert stop_program(program, reservation, grace_s=10) == []
        finally:
            program.send(signal.SIGKILL)
    assert program.code == 128 + signal.SIGTERM
