"""Where the ledger lies, and whether files there can be trusted.

One directory per host, the same for every user and login: `/run/gshare` when an administrator made it,
else `/dev/shm/gshare`, else `/tmp/gshare` (made by the first user, sticky and world-writable). Only
`GSHARE_LEDGER_DIR` moves it. A container has a /dev/shm of its own: mount the host's /run/gshare into it, or
its jobs and the host's see what the others use, but not what they have reserved.

Refused: a symlink in its place, a directory in which others could delete our rows, a filesystem on which
flock does not exclude everybody (NFS and other shared ones).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from gshare.agent.errors import GshareError, UsageError

ADMINISTRATOR = Path("/run/gshare")
SHARED_MEMORY = Path("/dev/shm")
TMP = Path("/tmp")

LOCK = "lock"
#: What is not whole yet is named so, and removed by the next operation: its maker died.
TEMPORARY = ".tmp-"
_CREATE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

#: Filesystems that several hosts may share, or whose flock a remote side implements as it likes.
SHARED_FILESYSTEMS = frozenset(
    {
        *("nfs", "nfs3", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre"),
        *("gpfs", "gfs2", "ocfs2", "beegfs", "pvfs2", "orangefs", "davfs", "coda", "vboxsf"),
    }
)
#: FUSE says nothing about what is behind it.
_FUSE = "fuse"

#: An administrator makes the directory and then opens it to all: others look again for this long.
_SETTLE_SECONDS = 0.5

#: How often a maker tries again whose file or directory somebody took for a dead one's and removed.
_ATTEMPTS = 100
#: Random bytes of a name that nobody else may have.
_UNIQUE = 6

_checked: set[tuple[int, int]] = set()


def ledger_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory that this host's ledger lies in; it need not exist yet."""
    override = environ.get("GSHARE_LEDGER_DIR")
    if override:
        if not os.path.isabs(override):
            raise UsageError(f"GSHARE_LEDGER_DIR: {override!r} must be an absolute path")
        return Path(override)
    if ADMINISTRATOR.is_dir():
        return ADMINISTRATOR
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK) else TMP
    return base / "gshare"


def open_directory(path: Path) -> int:
    """A descriptor of the ledger's directory, made when it is missing; everything inside goes by it.

    GshareError with one line when it cannot be made or must not be used.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        try:
            fd = _open_or_make(path)
        except OSError as error:
            raise GshareError(_open_fault(path, error)) from None
        try:
            problem = _mode_fault(fd, path)
            if problem is None:
                _check_filesystem(fd, path)
                return fd
            if time.monotonic() > deadline:
                raise GshareError(problem)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        time.sleep(0.01)


def _open_or_make(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, _DIRECTORY)
    # Not only of GSHARE_LEDGER_DIR: a minimal container may lack /tmp.
    path.parent.mkdir(parents=True, exist_ok=True)
    _make(path)
    return os.open(path, _DIRECTORY)


def _make(path: Path) -> None:
    """Make the directory, for everybody, with the lock in it; nothing when somebody else was faster.

    Under another name until it is whole: a maker that is killed midway must not lock the others out. The
    lock is in it from the start because a rename replaces an empty directory, and with it what others had
    begun there.
    """
    for _ in range(_ATTEMPTS):
        made = path.parent / f".{path.name}-{secrets.token_hex(_UNIQUE)}"
        os.mkdir(made, 0o700)
        try:
            fd = os.open(made, _DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # we live: see `_sweep`
            make_lock(fd, LOCK)
            os.fchmod(fd, 0o1777)  # the umask is the user's and stays; only this directory is opened
            os.rename(made, path)
        except (BlockingIOError, FileNotFoundError):
            continue
        except OSError as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(LOCK, dir_fd=fd)
            os.rmdir(made)
            # What there is now is another maker's: not empty, or (in a sticky directory) not ours to replace.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EPERM, errno.EACCES):
                raise
        finally:
            os.close(fd)
        return


def _sweep(path: Path) -> None:
    """Remove what makers of the directory that were killed left beside it, as far as it is ours.

    A maker that lives has a flock on what it makes, or notices that it is gone and begins again.
    """
    unfinished = re.compile(rf"\.{re.escape(path.name)}-[0-9a-f]{{{2 * _UNIQUE}}}")
    for name in filter(unfinished.fullmatch, os.listdir(path.parent)):
        with contextlib.suppress(OSError):
            fd = os.open(path.parent / name, _DIRECTORY)
            try:
                if os.fstat(fd).st_uid == os.geteuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove_unfinished(fd, path.parent / name)
            finally:
                os.close(fd)


def _remove_unfinished(fd: int, made: Path) -> None:
    """Only while the name is still `fd`'s: when it has become the ledger's directory, it has another."""
    if os.path.samestat(os.fstat(fd), os.stat(made, follow_symlinks=False)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(LOCK, dir_fd=fd)
        os.rmdir(made)


def make_lock(directory: int, temporary: str) -> None:
    """The lock file, readable for all or not there at all; nothing when somebody else was faster.

    `temporary` is its name until it is whole; FileNotFoundError when the directory itself is gone.
    """
    fd = os.open(temporary, os.O_RDWR | _CREATE, 0o600, dir_fd=directory)
    try:
        os.fchmod(fd, 0o644)
        if temporary != LOCK:
            # A link, not a rename: that would replace a lock that somebody else has just made and taken. The
            # first one who takes that lock may have cleaned our file away.
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.link(temporary, LOCK, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
    finally:
        os.close(fd)
        if temporary != LOCK:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=directory)


def _open_fault(path: Path, error: OSError) -> str:
    if path.is_symlink():
        return f"{path} is a symlink; remove it: the ledger must lie in a directory of its own"
    return f"cannot use {path} for the ledger: {error.strerror}; make it writable, or set GSHARE_LEDGER_DIR"


def _mode_fault(fd: int, path: Path) -> str | None:
    """What is wrong with the directory's rights, None when it may be used."""
    status = os.fstat(fd)
    mode = stat.S_IMODE(status.st_mode)
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return f"{path} lets everybody delete everybody's rows; chmod +t {path}"
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=fd, effective_ids=True):
        if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
            return f"{path} is on a read-only filesystem; set GSHARE_LEDGER_DIR"
        return f"{path} (uid {status.st_uid}, mode {mode:04o}) is not writable for you; ask for chmod 1777"
    return None


def _check_filesystem(fd: int, path: Path) -> None:
    """GshareError where locks may not hold. Each directory is looked at once a process."""
    status = os.fstat(fd)
    key = (status.st_dev, status.st_ino)
    if key in _checked:
        return
    elsewhere = "set GSHARE_LEDGER_DIR to a local directory"
    kind = filesystem_of(path)
    if kind in SHARED_FILESYSTEMS or kind.startswith(_FUSE):
        raise GshareError(f"{path} is on {kind}, where locks may not hold; {elsewhere}")
    problem = flock_fault(fd)
    if problem is not None:
        raise GshareError(f"{path}: {problem}; {elsewhere}")
    with contextlib.suppress(OSError):
        _sweep(path)
    _checked.add(key)


def filesystem_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The filesystem's type as the kernel names it (`tmpfs`, `nfs4`); empty when it cannot be told."""
    real = os.path.realpath(path)
    best, kind = -1, ""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        # 36 35 98:0 /root /mount/point options - type source super; see proc_pid_mountinfo(5)
        left, _, right = line.partition(" - ")
        fields, after = left.split(), right.split()
        if len(fields) < 5 or not after:
            continue
        point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # a later line of the same point is mounted over it
            best, kind = len(point), after[0]
    return kind


def flock_fault(directory: int) -> str | None:
    """Whether flock excludes another open of the same file: tried, on a file that is gone at once.

    Nobody has the lock yet, so whoever has it may remove the file, as one of a dead process; then again."""
    for _ in range(_ATTEMPTS):
        name = f"{TEMPORARY}{secrets.token_hex(_UNIQUE)}"
        try:
            first = os.open(name, os.O_RDWR | _CREATE, 0o600, dir_fd=directory)
        except OSError as error:
            return f"no file can be made ({error.strerror})"
        try:
            second = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            break
        except FileNotFoundError:
            os.close(first)  # who holds the lock has taken it for a dead process's
        except OSError as error:
            os.close(first)
            return f"a new file cannot be opened ({error.strerror})"
    else:
        return "new files disappear at once"
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _can_lock(second):
            return "flock does not exclude"
        fcntl.flock(first, fcntl.LOCK_UN)
        return None if _can_lock(second) else "flock is not given back"
    except OSError as error:
        return f"flock does not work ({error.strerror})"
    finally:
        os.close(second)
        os.close(first)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)


def _can_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True
