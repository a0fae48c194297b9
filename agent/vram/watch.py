"""`gshare gpu run`: any program under a reservation, watched but not capped.

The reservation is given back when the program has been reaped, and for nothing else: what goes wrong with the
ledger, the driver or stderr meanwhile is said once, and watching goes on.

The program inherits the descriptor that proves the reservation's life, so killing the watcher alone gives
nothing back: the row stands until the last process with that descriptor ends. One that closes descriptors it
does not know (a daemon; what Python's subprocess starts) does not keep it, nor does any once the row's files
were removed and put back: with the watcher dead, such memory counts as used outside the ledger.

The program's processes are known by descent and by `GSHARE_RESERVATION` in their environment; what they use
is read from the driver every `POLL_S`. A program can therefore overrun its reservation for up to that long
before it is noticed.

No signal handlers: SIGTERM, SIGHUP and SIGINT are blocked, taken by `sigtimedwait` and passed on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import psutil
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.vram.guard import Reservation
from gshare.agent.vram.owners import RESERVATION_VARIABLE, Owners, named_reservation, used_by_row

POLL_S = 0.5
#: Between asking a program to end and killing it: a checkpoint of an adapter takes seconds.
STOP_GRACE_S = 10.0
#: For killing what appears while it is killed. What is left then cannot be killed by us: another user's.
_KILL_S = 2.0
_STOP_POLL_S = 0.05
#: A look at the program must not wait long for the ledger: `--strict` and the program's end wait for it.
_LOCK_S = 1.0

#: `si_code` of a signal sent with kill(2). One from the terminal reaches the program by itself.
_SI_USER = 0
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
#: Between two looks whether a signal came or the program ended. Slept, not waited for in `sigtimedwait`: when
#: that is interrupted (Ctrl-Z and fg) and its time is over, CPython 3.11 returns a signal that nobody sent.
_TURN_S = 0.05

T = TypeVar("T")


def run_program(
    reservation: Reservation,
    command: Sequence[str],
    *,
    strict: bool,
    notify: Callable[[str], None],
    poll_s: float = POLL_S,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Run `command` under the reservation; its exit code, 128 + N when signal N ended it.

    UsageError when it cannot be started, or when `strict` cannot be kept; GshareError when `strict` stopped
    it. Only for the main thread: signals are blocked meanwhile.
    """
    watcher = Watcher(reservation, notify, strict=strict)
    if strict and not watcher.can_see:
        name = reservation.device.name
        raise UsageError(f"--strict: the driver does not say what a program uses on {name}; leave it out")
    reservation.lock_s = _LOCK_S
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    # Where SIGCHLD is ignored (inherited, say from a shell's trap) the kernel throws the exit code away.
    ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        child = _start(reservation, command, environ, before)
        try:
            return _watch(child, watcher, command[0], poll_s)
        finally:
            if child.code is None:
                reservation.forget()  # it runs on: the row stands on the descriptor that it has inherited
    finally:
        if ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(child: Program, watcher: Watcher, name: str, poll_s: float) -> int:
    """Until the program is reaped: pass signals on, look at what it uses, stop it where that is too much."""
    stopped, next_look = "", time.monotonic()
    while child.poll() is None:
        info = signal.sigtimedwait(_SIGNALS, 0)
        if info is not None and (info.si_signo != signal.SIGINT or info.si_code == _SI_USER):
            watcher.send(child, info.si_signo)
        if time.monotonic() >= next_look:
            used = watcher.look(child.pid)
            if not stopped and used is not None and watcher.is_too_much(used):
                stopped = watcher.stop(child, name, used)
            next_look = time.monotonic() + poll_s
        time.sleep(min(_TURN_S, poll_s))
    if stopped:
        raise GshareError(stopped)
    return child.wait()


class Program:
    """The child by its PID. `code` is its exit code, 128 + N when signal N ended it; None while it runs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        code = self._reap(0)
        assert code is not None
        return code

    def send(self, number: int) -> None:
        """Only while it is not reaped: its PID is its own until then."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _reap(self, options: int) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self.code = code if code >= 0 else 128 - code
        return self.code


class Watcher:
    """Reads what the reservation's processes use, keeps row and peak, warns when it is over budget.

    While the program runs nothing here raises: what goes wrong is said, each thing once.
    """

    def __init__(self, reservation: Reservation, notify: Callable[[str], None], *, strict: bool) -> None:
        self._reservation = reservation
        self._notify = notify
        self._strict = strict
        self._said: set[str] = set()
        self._warned_mb = reservation.budget_mb
        reading = reservation.read_device()
        #: Whether the driver (on the CPU: /proc) says what one program uses.
        self.can_see = reservation.device.memory_type == "cpu" or reading.processes is not None
        if not self.can_see:
            name = reservation.device.name
            self._say(f"the driver does not say what a program uses on {name}: not watched")

    def look(self, child: int) -> int | None:
        """MiB in use by the processes now; None when nobody says."""
        blind = "--strict is not kept meanwhile" if self._strict else "not watched meanwhile"
        used = self._attempt(blind, lambda: self._used(child)) if self.can_see else None
        if used is None:
            self._attempt("its row cannot be put back", self._reservation.keep)
            return None
        self._attempt("its use is not recorded", lambda: self._reservation.record_use("run", used))
        budget = self._reservation.budget_mb
        if used > self._warned_mb:
            self._say(f"reservation {self._reservation.id}: {used} MiB used, {budget} MiB reserved")
            self._warned_mb = used + budget // 10  # again after another tenth of the budget
        return used

    def is_too_much(self, used_mb: int) -> bool:
        """Whether `--strict` ends a program that uses this."""
        return self._strict and used_mb > self._reservation.budget_mb

    def stop(self, child: Program, name: str, used_mb: int) -> str:
        """Stop the program for that; what to tell its user."""
        row = self._reservation
        left = self._attempt(f"{name} cannot be stopped", lambda: stop_program(child, row))
        rest = f"; still running: {', '.join(map(str, left))}" if left else ""
        return (
            f"reservation {row.id}: {name} used {used_mb} MiB, more than the {row.budget_mb} MiB reserved, "
            f"and was stopped (--strict){rest}"
        )

    def send(self, child: Program, number: int) -> None:
        """Pass a signal on. A program that has become another user's (sudo) does not take it."""
        self._attempt(f"{signal.Signals(number).name} is not passed on", lambda: child.send(number))

    def _used(self, child: int) -> int:
        """MiB in use. GshareError when nobody says."""
        with self._reservation.tracer.span("VramQuery"):
            if self._reservation.device.memory_type == "cpu":
                return resident_mb(child)
            reading = self._reservation.read_device()
            used = used_by_row(reading, self._reservation.id, Owners([self._reservation.row]))
        if used is None:
            raise GshareError(reading.problem or "the driver does not say what the program uses now")
        return max(used, self._reservation.inside_mb())

    def _attempt(self, fault: str, action: Callable[[], T]) -> T | None:
        """What `action` returns; None when it fails, whatever the reason: the program runs on regardless, and
        leaving the watch would give back memory that it uses."""
        try:
            return action()
        except Exception as error:
            known = isinstance(error, (GshareError, OSError))
            what = str(error) if known else f"{type(error).__name__}: {error}"
            self._say(f"reservation {self._reservation.id}: {fault}: {what}")
            return None

    def _say(self, text: str) -> None:
        """Once. Who is told may fail too: a full disk under stderr."""
        if text not in self._said:
            self._said.add(text)
            with contextlib.suppress(Exception):
                self._notify(text)


def resident_mb(pid: int) -> int:
    """Main memory of a process and its descendants, MiB; pages that they share count more than once."""
    total = 0
    for process in _tree(pid):
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total >> 20


def stop_program(child: Program, reservation: Reservation, grace_s: float = STOP_GRACE_S) -> list[int]:
    """End the program, its descendants and what carries its reservation: SIGTERM, SIGKILL after `grace_s`.

    Looked for again and again: a program may start another when it is asked to end, in a session of its own.
    Done when two looks find nothing: one may miss what a process started just before it ended. The PIDs of
    what cannot be ended.
    """
    begin = time.monotonic()
    asked: set[psutil.Process] = set()
    quiet = 0
    while quiet < 2:
        members = {process for process in (*asked, *_members(child.pid, reservation)) if _runs(process)}
        late = time.monotonic() - begin
        if late > grace_s + _KILL_S:
            return sorted(process.pid for process in members)
        for process in members:
            with contextlib.suppress(psutil.Error):
                if late > grace_s:
                    process.kill()
                elif process not in asked:
                    process.terminate()
        asked |= members
        child.poll()
        quiet = 0 if members else quiet + 1
        time.sleep(_STOP_POLL_S)
    return []


def _members(pid: int, reservation: Reservation) -> list[psutil.Process]:
    """The process, its descendants, and whoever names the reservation in the environment."""
    with reservation.tracer.span("VramQuery"):
        found = _tree(pid)
        for other in psutil.pids():
            if named_reservation(other) == reservation.id:
                with contextlib.suppress(psutil.Error):
                    found.append(psutil.Process(other))
    return found


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _start(
    reservation: Reservation, command: Sequence[str], environ: Mapping[str, str], mask: Iterable[int]
) -> Program:
    """Start it with our usual signal mask, our files, and a copy of the proof of life.

    posix_spawn rather than subprocess: with that, the program would inherit the blocked signals, or a signal
    between its start and the blocking would end us and give back a reservation that is in use.
    """
    environment = {**environ, RESERVATION_VARIABLE: reservation.id}
    visible = reservation.device.cuda_name
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    life = os.dup(reservation.life)
    try:
        os.set_inheritable(life, True)
        defaults = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores them; the program should not
        pid = os.posix_spawnp(command[0], list(command), environment, setsigmask=mask, setsigdef=defaults)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"cannot run {command[0]!r}: {reason}") from None
    finally:
        os.close(life)
    return Program(pid)
