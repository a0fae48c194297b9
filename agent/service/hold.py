"""A client's hold on a trainer process: one that it started, or one that it joined.

Both keep the trainer's directory from being collected, by a shared flock, until the client has read what a
dead trainer left behind; and both tell how it ended, as far as that can be known.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gshare.agent.service.breadcrumb import FILE_NAME as IN_FLIGHT
from gshare.agent.service.environment import trainer_environment
from gshare.agent.service.log_stream import open_log
from gshare.agent.service.registry import (
    LOCK,
    SUPERVISOR,
    TrainerConfig,
    above_stdio,
    create_trainer_dir,
    is_held,
    not_made,
    remove_trainer_dir,
    share_lock,
    state_dir,
)
from gshare.agent.service.server import bound_socket

#: How long a trainer that hung up on its client is waited for.
DEATH_SECONDS = 10.0
_POLL = 0.02


@dataclass
class Spawned:
    """A trainer that this process started."""

    directory: Path
    process: subprocess.Popen[bytes]
    log: Path
    supervisor_fd: int  # the flock that keeps the directory from being collected
    no_log: str = ""  # why `log` is /dev/null
    joined = False

    def wait_dead(self, timeout: float = DEATH_SECONDS) -> int | None:
        """The exit code (negative: the signal). One that hangs after hanging up is killed."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def wait_gone(self, timeout: float) -> None:
        """For its memory to be free; one that stays longer is left to itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)

    def how_it_died(self, code: int | None) -> str:
        """For people: the signal's name or the exit code, and the last line of the log."""
        assert code is not None
        if code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        else:
            last = _last_line(self.log)
            how = f"exit code {code}" + (f": {last}" if last else "")
        return how

    def release(self) -> None:
        """Nothing is read from its directory any more."""
        os.close(self.supervisor_fd)


@dataclass
class Joined:
    """A trainer that another client started: not our child, so its exit status is not known."""

    directory: Path
    log: Path
    supervisor_fd: int
    no_log: str = ""
    joined = True

    @classmethod
    def hold(cls, directory: Path) -> Joined | None:
        """None when it is gone, or another gshare keeps its directory to itself."""
        try:
            fd = share_lock(directory / SUPERVISOR)
        except OSError:
            return None
        if fd is None:
            return None
        try:
            log = state_dir() / "logs" / f"{directory.name}.log"
        except OSError:  # no room for it: the one who started the trainer has said so
            log = Path(os.devnull)
        return cls(directory, log, fd)

    def wait_dead(self, timeout: float = DEATH_SECONDS) -> int | None:
        """None: how it ended is in its directory, if anywhere. One that lives on is not ours to kill: it has
        stopped the jobs of a client that is gone."""
        self.wait_gone(timeout)
        return None

    def wait_gone(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while is_held(self.directory / LOCK) and time.monotonic() < deadline:
            time.sleep(_POLL)

    def how_it_died(self, code: int | None) -> str:
        last = _last_line(self.log)
        return "it left no exit code" + (f": {last}" if last else "")

    def release(self) -> None:
        """Nothing is read from its directory any more."""
        os.close(self.supervisor_fd)


def spawn_trainer(config: TrainerConfig) -> Spawned:
    """Starts a trainer in a session of its own, so that the terminal's signals do not reach it.

    NoRoom: the disk is full.
    """
    directory, lock, supervisor = create_trainer_dir(config)
    try:
        bound = _make_files(directory)
    except OSError as error:
        for fd in (lock, supervisor):
            os.close(fd)
        remove_trainer_dir(directory)
        raise not_made(directory.parent, "a trainer needs its files", error) from None
    log, output, no_log = open_log(directory.name)
    try:
        with output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gshare.agent.service.trainer"),
                    *("--dir", str(directory), "--lock-fd", str(lock), "--socket-fd", str(bound)),
                ],
                # `-m` puts the working directory on sys.path (Python 3.10 has no PYTHONSAFEPATH), and in a
                # clone of gshare the room `kernels` would hide the package that transformers imports.
                cwd=directory,
                env={**os.environ, **trainer_environment(), "PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(lock, bound),
            )
    finally:
        # The trainer has its own copies, and must be the only one who keeps the lock and the socket.
        os.close(lock)
        os.close(bound)
    return Spawned(directory, process, log, supervisor, no_log)


def _make_files(directory: Path) -> int:
    """What a trainer does not start without, made here, where a full disk can be waited for: in the trainer
    it would be a crash, and its jobs would be blamed. Returns the descriptor of its bound socket."""
    for name in (IN_FLIGHT, "journal.jsonl"):
        os.close(os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    return above_stdio(bound_socket(directory / "socket").detach())


def _last_line(log: Path) -> str:
    """What the log ends with; empty when that tells how things went well, which is no reason."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
    except OSError:
        return ""
    last = next((line[:300] for line in reversed(lines) if line), "")
    return "" if last.startswith("info:") else last
