"""Where trainers live, which of them are alive, and what became of the jobs of those that ended.

    <runtime>/gshare/trainers/<id>/    trainer.json  socket  lock  supervisor  in_flight  journal.jsonl
                                       jobs.jsonl  taken.jsonl  exit.json
    <runtime>/gshare/joins/<key>       locked by who looks for a trainer to join, until its own is started
    <state>/gshare/jobs.jsonl          the last jobs that ended
    <state>/gshare/logs/<id>.log       output of trainers and detached clients, the newest ones

A trainer holds a flock on `lock` for life; each client that answers for jobs in it holds a shared one on
`supervisor`, until it has read what a dead trainer left behind. A directory whose locks can both be taken
belongs to nobody. No PID is asked: PIDs are reused, and differ between namespaces.
Trust boundary: the directory is 0700 and ours; whoever is this user (or root) may do anything here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from gshare.agent.errors import GshareError
from gshare.agent.jobs.events import ENDED, JobChanged
from gshare.agent.service.journal import read_journal, strict_json
from gshare.agent.service.protocol import JobStatus

FINISHED_KEPT = 200  # records of ended jobs; the file holds at most twice as many
LOGS_KEPT = 20

#: The engine. By name, so that nothing on this side of it imports torch.
RUNNER = "gshare.agent.train.runner:Runner"

LOCK = "lock"
SUPERVISOR = "supervisor"
TAKEN = "taken.jsonl"
#: An asker holds the lock that it asks about for microseconds; a client that comes meanwhile tries again.
_SHARE_TRIES, _SHARE_PAUSE = 50, 0.01

T = TypeVar("T")


class GpuRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trainer reserves before it touches a GPU: `budget_mb` MiB on one of `gpus`, by UUID.

    `may_grow`: the budget is an estimate, which the trainer may correct through the ledger; what the user
    has set stays. `timeout_s` 0: does not wait.
    """

    budget_mb: int
    gpus: tuple[str, ...]
    task: str  # one line for other users
    timeout_s: float
    may_grow: bool = False
    mps_share: int | None = None  # percent of the GPU's threads under MPS; None: without it
    client: str = ""
    inherit: str = ""  # id of the `gpu run` reservation to use instead, when it still can be
    #: Of `budget_mb`: what this client's adapters add to a base that is there already. 0: not known, so
    #: that no client can leave without the base, and nobody joins.
    part_mb: int = 0
    resident_mb: int = 0  # of `part_mb`: adapters and optimizer, whose room the arena keeps


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`trainer.json`: what a trainer process needs to know before its first client comes."""

    model: str  # as the user named it
    model_dir: str
    base_dtype: str
    schedule: str = "synchronized"
    max_tokens_per_pass: int = 16384
    max_adapters_per_pass: int = 0
    trunk_cache: float | str = "auto"
    trunk_cache_host: float = 0.0
    device: str = "auto"
    gpu: GpuRequest | None = None  # None: nothing is reserved
    trace: bool = False
    runner: str = RUNNER  # "module:class"; only tests name another
    base: str = ""  # `base_identity` of the model, for who looks for a trainer to join
    join_key: str = ""  # what a client must have the same to join (joining.py); empty: nobody joins
    joinable: bool = True  # False: only once its first client has opened it (`OpenTrainer`)
    first_client_seconds: float = 60.0  # exits when nobody has connected for so long, or no opener come
    idle_seconds: float = 0.5  # exits this long after the last client and the last job are gone


class NoRoom(GshareError):
    """The runtime directory is full: perhaps of what crashed trainers left, until somebody collects it."""


class ExitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`exit.json`: a trainer that ended in order. Its absence on a dead trainer means it crashed."""

    code: int
    reason: str


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `taken.jsonl`: jobs of a dead trainer that their client goes on with elsewhere."""

    jobs: list[str]


class FinishedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A record of an ended job; `ended` is Unix time in seconds."""

    status: JobStatus
    ended: float
    trainer_id: str


def runtime_dir() -> Path:
    """`$XDG_RUNTIME_DIR/gshare`, else `/tmp/gshare-<uid>`; made 0700, refused when it is not ours."""
    xdg = os.environ.get("XDG_RUNTIME_DIR", "")
    if xdg and os.path.isabs(xdg) and os.path.isdir(xdg):
        return _runtime_part(Path(xdg) / "gshare")
    return _runtime_part(Path(f"/tmp/gshare-{os.getuid()}"))


def state_dir() -> Path:
    """`$XDG_STATE_HOME/gshare`, else `~/.local/state/gshare`."""
    xdg = os.environ.get("XDG_STATE_HOME", "")
    base = Path(xdg) if xdg and os.path.isabs(xdg) else Path.home() / ".local" / "state"
    path = base / "gshare"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def private_dir(path: Path) -> Path:
    """Makes `path` (0700) or checks that it is a directory, no symlink, ours, and closed to others. Raises
    `OSError` when it cannot be made.

    /tmp is everybody's: without the check another user could have made the directory first and read or
    replace the socket in it.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
        raise GshareError(f"{path}: must be a directory, not a link or file; remove it and try again")
    if status.st_uid != os.getuid():
        raise GshareError(
            f"{path}: belongs to user id {status.st_uid}, not to you; "
            "set XDG_RUNTIME_DIR to a directory of yours"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def trainers_dir() -> Path:
    return _runtime_part(runtime_dir() / "trainers")


def _runtime_part(path: Path) -> Path:
    """A private directory that every command needs. NoRoom: there is no room for it."""
    try:
        return private_dir(path)
    except OSError as error:
        raise not_made(path, "a private directory is needed", error) from None


def create_trainer_dir(config: TrainerConfig) -> tuple[Path, int, int]:
    """A new trainer's directory with both locks held: `(directory, lock fd, supervisor fd)`.

    The caller passes the lock's descriptor on to the trainer: a flock belongs to the open file, so there is
    no moment at which a directory that is being set up looks dead and could be collected.
    NoRoom: the disk is full.
    """
    root = trainers_dir()
    directory = root / f".new-{secrets.token_hex(4)}"
    held: list[int] = []
    try:
        directory.mkdir(mode=0o700)
        for lock in (take_lock(directory / LOCK), share_lock(directory / SUPERVISOR)):
            assert lock is not None
            held.append(lock)
        write_json(directory / "trainer.json", config)
        final = root / directory.name.removeprefix(".new-")
        directory.rename(final)
    except OSError as error:
        for lock in held:
            os.close(lock)
        remove_trainer_dir(directory)
        raise not_made(root, "a trainer needs a directory", error) from None
    return final, held[0], held[1]


def not_made(where: Path, what: str, error: OSError) -> GshareError:
    """The error of something that is needed in the runtime directory; NoRoom where the disk is full."""
    kind = NoRoom if error.errno in (errno.ENOSPC, errno.EDQUOT) else GshareError
    return kind(f"{where}: {error.strerror}; {what} there: make room or set XDG_RUNTIME_DIR")


def take_lock(path: Path) -> int | None:
    """An exclusive flock on `path` (made if missing), as a descriptor; None when another holds it."""
    fd = above_stdio(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def share_lock(path: Path) -> int | None:
    """A shared flock on `path` (made if missing), as a descriptor; None when another holds it alone."""
    fd = above_stdio(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    for _ in range(_SHARE_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            time.sleep(_SHARE_PAUSE)
    os.close(fd)
    return None


def above_stdio(fd: int) -> int:
    """`fd`, moved above 2 when it is not: one who was started with a standard stream closed gets 0, 1 or 2
    for what it opens, and a child that is to inherit that number finds its own streams there."""
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def is_held(path: Path) -> bool:
    """Whether some process holds the flock on `path`. A shared try: two who ask do not see each other."""
    return _cannot(fcntl.LOCK_SH, path)


def is_shared(path: Path) -> bool:
    """As `is_held`, for a lock that is held shared; two who ask at once may take each other for a holder."""
    return _cannot(fcntl.LOCK_EX, path)


def _cannot(lock: int, path: Path) -> bool:
    try:
        # Not blocking: a pipe of that name would be waited for.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, lock | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def trainer_dirs() -> Iterator[Path]:
    """Every trainer's directory, dead or alive, oldest first."""
    entries = [entry for entry in trainers_dir().iterdir() if not entry.name.startswith(".")]
    yield from sorted(entries, key=_written)


def _written(path: Path) -> float:
    """Unix time, s; 0 for what is gone: another process may remove it between any two looks."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def live_trainers() -> list[Path]:
    return [directory for directory in trainer_dirs() if is_held(directory / LOCK)]


def collect_dead() -> list[FinishedJob]:
    """Removes the directories that nobody holds any more; their unfinished jobs become records, returned."""
    lost: list[FinishedJob] = []
    for directory in trainer_dirs():
        if is_held(directory / LOCK) or is_shared(directory / SUPERVISOR):
            continue
        try:
            lock = take_lock(directory / LOCK)
        except FileNotFoundError:
            continue  # removed meanwhile
        if lock is None:
            continue  # another collector was faster
        try:
            unfinished = _unfinished(directory)
            try:
                for job in unfinished:
                    record_finished(job)
            except OSError:
                continue  # a full disk: stays for a later collector
            lost += unfinished
            remove_trainer_dir(directory)
        finally:
            os.close(lock)
    return lost


def remove_trainer_dir(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


def take_over(directory: Path, jobs: list[str]) -> None:
    """Note in a dead trainer's directory that these jobs go on elsewhere: no collector is to call them lost.

    A full disk costs the note only.
    """
    with contextlib.suppress(OSError):
        append_line(directory / TAKEN, Taken(jobs=jobs))


def leave_dead(directory: Path) -> None:
    """Removes a dead trainer's directory, unless another of its clients has still to read it."""
    if not is_held(directory / LOCK) and not is_shared(directory / SUPERVISOR):
        remove_trainer_dir(directory)


def _unfinished(directory: Path) -> list[FinishedJob]:
    """Jobs of a dead trainer whose last state is not an end, by its journal."""
    jobs: dict[str, JobStatus] = {}
    for record in read_lines(directory / "jobs.jsonl", JobStatus):
        jobs[record.job] = record
    for event in read_journal(directory / "journal.jsonl"):
        if isinstance(event, JobChanged) and event.job in jobs:
            jobs[event.job] = msgspec.structs.replace(
                jobs[event.job], state=event.state, step=event.step, total_steps=event.total_steps
            )
    taken = {job for line in read_lines(directory / TAKEN, Taken) for job in line.jobs}
    reason = "its trainer and its client died; continue it with --resume"
    return [
        FinishedJob(
            status=msgspec.structs.replace(status, state="failed", reason=reason),
            ended=time.time(),
            trainer_id=directory.name,
        )
        for status in jobs.values()
        if status.state not in ENDED and status.job not in taken
    ]


def record_finished(job: FinishedJob) -> None:
    """Adds a record; the file is cut back to the newest ones under a lock of its own."""
    path = state_dir() / "jobs.jsonl"
    lock = os.open(path.with_name("jobs.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        append_line(path, job)
        lines = path.read_bytes().splitlines(keepends=True)
        if len(lines) > 2 * FINISHED_KEPT:
            temporary = path.with_name("jobs.jsonl.new")
            temporary.write_bytes(b"".join(lines[-FINISHED_KEPT:]))
            os.replace(temporary, path)
    finally:
        os.close(lock)


def not_recorded(error: OSError) -> str:
    """For people: what a failed `record_finished` means."""
    where = error.filename or "the state directory"
    return f"`gshare jobs` will not list jobs that end now: {where}: {error.strerror}"


def finished_jobs() -> list[FinishedJob]:
    """The last record of every ended job's name, newest first."""
    newest: dict[str, FinishedJob] = {}
    for job in read_lines(state_dir() / "jobs.jsonl", FinishedJob):
        newest[job.status.job] = job
    return sorted(newest.values(), key=lambda job: -job.ended)


def log_path(identity: str) -> Path:
    """Where the process `identity` writes its output; the oldest logs beyond `LOGS_KEPT` are removed."""
    logs = state_dir() / "logs"
    logs.mkdir(exist_ok=True, mode=0o700)
    files = sorted(logs.glob("*.log"), key=_written)
    for old in files[: max(0, len(files) - LOGS_KEPT + 1)]:
        old.unlink(missing_ok=True)
    return logs / f"{identity}.log"


def write_json(path: Path, value: msgspec.Struct) -> None:
    """Whole or not at all for readers: temp file, then rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise GshareError(f"{path}: cannot be read: {error}") from None


def read_exit(directory: Path) -> ExitRecord | None:
    """How a dead trainer ended, None when it crashed."""
    path = directory / "exit.json"
    return read_json(path, ExitRecord) if path.exists() else None


def append_line(path: Path, value: msgspec.Struct) -> None:
    line = json.dumps(strict_json(msgspec.to_builtins(value))).encode() + b"\n"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        written = os.write(fd, line)
        if written != len(line):
            os.ftruncate(fd, os.fstat(fd).st_size - written)  # half a line would spoil the next one too
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(fd)


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """The lines of a JSONL file as `kind`; torn or foreign lines are skipped."""
    records: list[T] = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):  # not UTF-8, too deep
                records.append(msgspec.json.decode(line, type=kind))
    return records
