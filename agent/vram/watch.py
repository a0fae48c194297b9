"""`gshare gpu run`: any program under a reservation, watched but not capped.

The program inherits the reservation's proof of life, so the reservation stands while either of the two
lives: killing the watcher does not free memory that the program still uses. Its processes are known by
descent and by `GSHARE_RESERVATION` in their environment; what they use is read from the driver every
`POLL_S`. A program can therefore overrun its reservation for up to that long before it is noticed.

No signal handlers: SIGTERM, SIGHUP and SIGINT are blocked and taken by `sigtimedwait`, then passed on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import psutil
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.vram.guard import Reservation
from gshare.agent.vram.owners import RESERVATION_VARIABLE, Owners, used_by_row

POLL_S = 0.5
#: Between asking a program to end and killing it: a checkpoint of an adapter takes seconds.
STOP_GRACE_S = 10.0

#: `si_code` of a signal sent with kill(2). One from the terminal reaches the program by itself.
_SI_USER = 0
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


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
    watcher = Watcher(reservation, notify)
    if strict and not watcher.can_see:
        name = reservation.device.name
        raise UsageError(f"--strict: the driver does not say what a program uses on {name}; leave it out")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        child = _start(reservation, command, environ, before)
        while child.poll() is None:
            info = signal.sigtimedwait(_SIGNALS, poll_s)
            if info is not None and info.si_signo != signal.SIGCHLD:
                if info.si_signo != signal.SIGINT or info.si_code == _SI_USER:
                    child.send(info.si_signo)
                continue
            used = watcher.look(child.pid)
            if strict and used is not None and used > reservation.budget_mb:
                stop_tree(child)
                raise GshareError(
                    f"reservation {reservation.id}: {command[0]} used {used} MiB, more than the "
                    f"{reservation.budget_mb} MiB reserved, and was stopped (--strict)"
                )
        return child.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    """Reads what the reservation's processes use, keeps the row's peak, warns when it is over budget."""

    def __init__(self, reservation: Reservation, notify: Callable[[str], None]) -> None:
        self._reservation = reservation
        self._notify = notify
        self._warned_mb = reservation.budget_mb
        reading = reservation.read_device()
        #: Whether the driver (on the CPU: /proc) says what one program uses.
        self.can_see = reservation.device.memory_type == "cpu" or reading.processes is not None
        if not self.can_see:
            notify(f"the driver does not say what a program uses on {reservation.device.name}: not watched")

    def look(self, child: int) -> int | None:
        """MiB in use by the processes now; None when nobody says."""
        used = self._used(child)
        if used is None:
            return None
        budget = self._reservation.budget_mb
        self._reservation.record_use("run", used)
        if used > self._warned_mb:
            self._notify(f"reservation {self._reservation.id}: {used} MiB used, {budget} MiB reserved")
            self._warned_mb = used + budget // 10  # again after another tenth of the budget
        return used

    def _used(self, child: int) -> int | None:
        if not self.can_see:
            return None
        with self._reservation.tracer.span("VramQuery"):
            if self._reservation.device.memory_type == "cpu":
                return resident_mb(child)
            reading = self._reservation.read_device()
            return used_by_row(reading, self._reservation.id, Owners([self._reservation.row]))


def resident_mb(pid: int) -> int:
    """Main memory of a process and its descendants, MiB; pages that they share count more than once."""
    total = 0
    for process in _tree(pid):
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total >> 20


def stop_tree(child: Program, grace_s: float = STOP_GRACE_S) -> None:
    """End the program and its descendants: SIGTERM, and SIGKILL for what is left after `grace_s`."""
    processes = _tree(child.pid)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and (child.poll() is None or any(map(_runs, processes))):
        time.sleep(0.02)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    child.wait()


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
