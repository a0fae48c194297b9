"""The ledger's files: the lock, atomic writes, proof of life. No decision is taken here.

    lock                never replaced, never removed; a flock on it serialises every decision
    (the directory)     a flock on it: whoever has it gets the lock next, see turns.py
    row-ID.json         one reservation       row-ID.life    its holder keeps a flock on it for life
    wait-ID.json        one queued request    wait-ID.life   the same; modified when its holder looked last
    lease-ID.json       a reservation without a process; it runs out instead
    use-ID.life         the gshare that runs inside the `gpu run` of this reservation and uses it: uses.py
    mps-ID.json         the part of the GPU's threads that this reservation's process has under MPS
    passes-UID.json     how often this user's requests passed each waiter
    quarantine/         damaged rows that `gpu repair` took out

- flock, not lockf: a lockf lock is gone when *any* descriptor of the file is closed.
- The lock file is opened anew for every operation, so no two threads or forked processes share a lock, and
  it is unlocked explicitly: a child forked meanwhile keeps the descriptor, but no lock.
- The proof of life is a file beside the row because the row is replaced on every change: a lock stays with
  the old inode, so it would have to be carried over while others probe it, and a child that inherited the
  descriptor (`gpu run`) would be left with a dead one.
- Life before row, and on the way out row before life: a row without life is damage, never a crash.
- In a sticky directory nobody can remove another user's dead files; they are skipped instead.
- Opening files for reading is enough for flock on a local filesystem, so every file is 0644 whatever the
  umask, and the first user's umask locks nobody out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from gshare.agent.errors import GshareError
from gshare.agent.trace import Tracer
from gshare.agent.vram.paths import LOCK, TEMPORARY, make_lock, open_directory
from gshare.agent.vram.turns import take_lock

QUARANTINE = "quarantine"

#: Decisions take about a millisecond; a lock held this long belongs to a stopped process.
LOCK_SECONDS = 30.0
#: The maker of the lock file needs a moment to open it to others; longer, and it died before it did.
_SETTLE_SECONDS = 0.5

MAX_FILE = 64 * 1024
#: Bytes of a damaged file's name that its copy keeps: 255 are allowed, nine are added.
_KEPT_NAME = 246

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

Life = Literal["held", "free", "missing", "unreadable"]


class Stamp(NamedTuple):
    """One state of one file. The time of change is the kernel's own: no program can set it back."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


#: The state of no file: of one that something else changed before it could be looked at.
NEVER = Stamp(0, 0, 0, 0, 0)


class Unreadable(Exception):
    """The file is there and is no small regular file that we may read; the text says what it is."""


class Store:
    """The ledger's directory while its lock is held. Every name is relative to one open descriptor."""

    def __init__(self, directory: int, path: Path) -> None:
        self.directory = directory
        self.path = path

    def names(self) -> list[str]:
        return sorted(os.listdir(self.directory))

    def read(self, name: str) -> bytes | None:
        """The file's bytes, None when it is gone. Unreadable for symlinks, pipes, large and foreign files."""
        try:
            fd = os.open(name, _READ, dir_fd=self.directory)
        except FileNotFoundError:
            return None
        except OSError as error:
            what = "is a symlink" if error.errno == errno.ELOOP else str(error.strerror)
            raise Unreadable(what) from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise Unreadable("is no regular file")
            if status.st_size > MAX_FILE:
                raise Unreadable(f"has {status.st_size} bytes")
            return os.read(fd, MAX_FILE)
        except OSError as error:
            raise Unreadable(str(error.strerror)) from None
        finally:
            os.close(fd)

    def owner(self, name: str) -> int | None:
        """The uid of the file's owner; None when it is gone."""
        try:
            return os.stat(name, dir_fd=self.directory, follow_symlinks=False).st_uid
        except OSError:
            return None

    def write(self, name: str, data: bytes) -> Stamp:
        """Replace or make a file: temp, fsync, rename, fsync of the directory. Old or new, never half.

        Its state with what was written in it; NEVER when something else has changed it since.
        A file of another user (root may replace one) keeps its owner and mode, or they could not change it
        any more. GshareError for more bytes than `read` takes: the file would block everybody.
        """
        if len(data) > MAX_FILE:
            raise GshareError(
                f"{self.path / name} would have {len(data)} bytes and may have {MAX_FILE}: "
                "fewer clients or devices, or shorter names"
            )
        temporary = f"{TEMPORARY}{secrets.token_hex(6)}"
        fd = os.open(temporary, os.O_WRONLY | _CREATE, 0o600, dir_fd=self.directory)
        try:
            try:
                self._set_owner(fd, name)
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                os.fsync(fd)
                made = _stamp_of(os.fstat(fd))
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=self.directory, dst_dir_fd=self.directory)
        except BaseException:
            self.remove(temporary)
            raise
        os.fsync(self.directory)
        named = stamp(name, self.directory)  # the renaming changed it too, but neither content nor its time
        if named is None or named[:-1] != made[:-1] or not self._has(name, data):
            return NEVER  # the content last: its time may have been set back just before the stamp
        return named

    def _has(self, name: str, data: bytes) -> bool:
        try:
            return self.read(name) == data
        except Unreadable:
            return False

    def _set_owner(self, fd: int, replaced: str) -> None:
        mode = 0o644
        with contextlib.suppress(FileNotFoundError):
            old = os.stat(replaced, dir_fd=self.directory, follow_symlinks=False)
            if stat.S_ISREG(old.st_mode) and old.st_uid != os.geteuid():
                os.fchown(fd, old.st_uid, old.st_gid)
                mode = stat.S_IMODE(old.st_mode)
        os.fchmod(fd, mode)

    def remove(self, name: str) -> bool:
        """Whether the file is gone now; False when it is another user's."""
        try:
            os.unlink(name, dir_fd=self.directory)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def set_aside(self, name: str) -> Path | None:
        """Move a damaged file into quarantine; None when it is another user's. OSError when it cannot be.

        The copy's name is the file's, cut where it would be too long, and eight random digits.
        """
        try:
            inside = self._open_quarantine()
        except OSError as error:
            raise GshareError(f"{self.path / QUARANTINE}: {error.strerror}; remove it") from None
        kept = f"{os.fsdecode(os.fsencode(name)[:_KEPT_NAME])}.{secrets.token_hex(4)}"
        try:
            if os.fstat(inside).st_uid == os.geteuid():
                os.fchmod(inside, 0o1777)
            os.rename(name, kept, src_dir_fd=self.directory, dst_dir_fd=inside)
        except PermissionError:
            return None
        finally:
            os.close(inside)
        return self.path / QUARANTINE / kept

    def _open_quarantine(self) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(FileNotFoundError):
            return os.open(QUARANTINE, flags, dir_fd=self.directory)
        made = f"{TEMPORARY}{secrets.token_hex(6)}"  # until it is open to all: its maker may be killed
        os.mkdir(made, 0o700, dir_fd=self.directory)
        os.chmod(made, 0o1777, dir_fd=self.directory)
        os.rename(made, QUARANTINE, src_dir_fd=self.directory, dst_dir_fd=self.directory)
        return os.open(QUARANTINE, flags, dir_fd=self.directory)

    def create_life(self, name: str) -> int:
        """Make a life file and lock it; the descriptor is the proof. Cleaning needs our lock, so no race."""
        fd = os.open(name, os.O_RDWR | _CREATE, 0o600, dir_fd=self.directory)
        try:
            os.fchmod(fd, 0o644)
            fcntl.flock(fd, fcntl.LOCK_EX)
        except BaseException:
            os.close(fd)
            self.remove(name)
            raise
        return fd

    def life(self, name: str) -> Life:
        """Whether somebody holds the file. A shared lock, so that two probes do not look like a holder."""
        try:
            fd = os.open(name, _READ, dir_fd=self.directory)
        except FileNotFoundError:
            return "missing"
        except OSError:
            return "unreadable"
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return "unreadable"
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(fd, fcntl.LOCK_UN)
        except BlockingIOError:
            return "held"
        except OSError:
            return "unreadable"
        finally:
            os.close(fd)
        return "free"

    def looked_s(self, name: str) -> float | None:
        """When a waiter's process looked last, seconds since boot: see `note_look`. None: nobody says."""
        try:
            return os.stat(name, dir_fd=self.directory, follow_symlinks=False).st_mtime
        except OSError:
            return None

    def is_odd(self, name: str) -> bool:
        """Whether something else than a regular file has the name: a directory, a pipe, a symlink."""
        try:
            status = os.stat(name, dir_fd=self.directory, follow_symlinks=False)
        except OSError:
            return False
        return not stat.S_ISREG(status.st_mode)

    def is_same(self, name: str, fd: int) -> bool:
        """Whether `name` is still the file that `fd` has open."""
        return is_same(name, fd, self.directory)


def is_same(path: str | Path, fd: int, directory: int | None = None) -> bool:
    """Whether `path` is still the file that `fd` has open; needs no lock."""
    try:
        there, ours = os.stat(path, dir_fd=directory, follow_symlinks=False), os.fstat(fd)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def stamp(path: str | Path, directory: int | None = None) -> Stamp | None:
    """The file's state now, None when it cannot be looked at; needs no lock."""
    try:
        return _stamp_of(os.stat(path, dir_fd=directory, follow_symlinks=False))
    except OSError:
        return None


def _stamp_of(status: os.stat_result) -> Stamp:
    return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def note_look(life: int, boot_s: float) -> None:
    """Set a waiter's life file to be modified at `boot_s` (seconds since boot, which no clock step moves).

    A file's time, not its content: the directory stays as it was, so no other waiter wakes for it.
    """
    at = int(boot_s * 1e9)
    with contextlib.suppress(OSError):  # then it passes for absent while it cannot be marked
        os.utime(life, ns=(at, at))


@contextlib.contextmanager
def locked(path: Path, tracer: Tracer, timeout_s: float = LOCK_SECONDS) -> Iterator[Store]:
    """Hold the ledger's lock. GshareError when it cannot be had, or when writing fails inside.

    Never fork inside: the child would keep the descriptor. (It would not keep the lock: see above.)
    """
    deadline = time.monotonic() + timeout_s
    with tracer.phase("lock_acq"):
        directory, lock = _acquire(path, deadline)
    try:
        yield Store(directory, path)
    except OSError as error:
        raise GshareError(f"the ledger in {path} cannot be changed: {error.strerror}") from error
    finally:
        with tracer.phase("lock_rel"):
            release_lock(lock)
            os.close(directory)


def release_lock(fd: int) -> None:
    """Unlock, then close: closing alone frees nothing while a forked child has the descriptor too."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _acquire(path: Path, deadline: float) -> tuple[int, int]:
    while True:
        directory = open_directory(path)
        try:
            lock = _open_lock(directory, path)
            if lock is not None:
                try:
                    take_lock(lock, directory, path, deadline)
                    if _is_current(lock, directory, path):
                        return directory, lock
                except BaseException:
                    os.close(lock)
                    raise
                release_lock(lock)  # somebody removed the lock or the directory: look again
        except BaseException:
            os.close(directory)
            raise
        os.close(directory)
        if time.monotonic() > deadline:
            raise GshareError(f"{path} is being replaced all the time; who removes it?")


def _open_lock(directory: int, path: Path) -> int | None:
    """Open, or make where missing; None when the directory itself has been removed.

    Never O_CREAT on an existing file: fs.protected_regular refuses that.
    """
    settled = time.monotonic() + _SETTLE_SECONDS
    while True:
        try:
            fd = os.open(LOCK, _READ, dir_fd=directory)
        except FileNotFoundError:
            try:
                make_lock(directory, f"{TEMPORARY}{secrets.token_hex(6)}")
            except FileNotFoundError:
                return None
            except OSError as error:
                raise GshareError(f"{path / LOCK} cannot be made: {error.strerror}") from None
            continue
        except PermissionError:
            if time.monotonic() < settled:
                time.sleep(0.005)
                continue
            raise GshareError(f"{path / LOCK} cannot be read; ask its owner or root for chmod 644") from None
        except OSError as error:
            what = "is a symlink; remove it" if error.errno == errno.ELOOP else error.strerror
            raise GshareError(f"{path / LOCK} {what}") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise GshareError(f"{path / LOCK} is no regular file; remove it")
        return fd


def _is_current(lock: int, directory: int, path: Path) -> bool:
    """Whether what we locked is still what everybody else will open."""
    try:
        here = os.stat(LOCK, dir_fd=directory, follow_symlinks=False)
        named = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    ours, opened = os.fstat(lock), os.fstat(directory)
    return (
        ours.st_nlink > 0
        and (here.st_dev, here.st_ino) == (ours.st_dev, ours.st_ino)
        and (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)
    )
