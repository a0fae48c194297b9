"""Durable files: what stands under its final name is complete, whatever was killed or filled up meanwhile.

Everything is written under a temporary name in the same directory, fsynced, and renamed; the directory is
fsynced after. A directory that takes another's place is exchanged with it in one system call
(`renameat2(RENAME_EXCHANGE)`, Linux); where the file system or kernel has none, the old one is first renamed
aside, and `recover_dir` puts it back if the process died between the two renames. So at every instant a
complete old or a complete new directory can be had:

    exchange    final = old | final = new, temporary = old (removed)
    aside       final = old | aside = old, no final | final = new, aside = old (removed)

Names of our own start with `.gshare-`; one process at a time writes to a directory (its owner holds a lock).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gshare.agent.errors import GshareError

_TEMPORARY = re.compile(r"\.gshare-tmp-(?P<name>.+)-[0-9a-f]{16}")
_ASIDE = ".gshare-old-"
#: Of a directory's name that are repeated in its temporary one. File systems take 255 bytes, eCryptfs 143.
_NAME_BYTES = 64
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
#: Bytes given to one write call: large enough for full speed, small enough to notice a full disk early.
_WRITE_BYTES = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


@contextmanager
def disk_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError inside into a GshareError of one line that says what stands."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise GshareError(
                f"disk full while {doing} {path}, last checkpoint intact; free space, then run again "
                "(a training run: with --resume)"
            ) from error
        reason = error.strerror or str(error)
        raise GshareError(f"{reason} while {doing} {path}, last checkpoint intact") from error


def temporary_name(final: Path, tag: str = "") -> Path:
    """A name beside `final` that `remove_leftovers` knows; fresh, or the same for the same `tag` (16 digits
    of hex). It is no longer than file systems take, however long `final`'s is."""
    shown = os.fsencode(final.name)[:_NAME_BYTES].decode(errors="ignore")
    return final.parent / f".gshare-tmp-{shown or 'x'}-{tag or secrets.token_hex(8)}"


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Create `path` and write `pieces` to it, fsynced. Never follows a link or opens what exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o666)
    try:
        for piece in pieces:
            rest = memoryview(piece).cast("B")
            while rest:
                rest = rest[os.write(fd, rest[:_WRITE_BYTES]) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def read_file(path: Path) -> bytes:
    """The bytes of a regular file that is not a link; OSError otherwise."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def fsync_path(path: Path) -> None:
    """Flush a file's bytes, or a directory's names."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_bytes_atomic(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Replace or create the file `path`. A link there is replaced, not followed. GshareError on failure."""
    temporary = temporary_name(path)
    with disk_errors("writing", path):
        try:
            write_file(temporary, pieces)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        fsync_path(path.parent)


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """JSON with sorted keys: equal values have equal bytes. Floats come back exactly."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def write_json_atomic(path: Path, value: Mapping[str, Any]) -> None:
    """`write_bytes_atomic` of `json_bytes`."""
    write_bytes_atomic(path, [json_bytes(value)])


def publish_dir(temporary: Path, final: Path) -> None:
    """Make the directory `temporary` (same file system) stand as `final`, in place of one that stands there.

    Flushes every file below `temporary` first. GshareError, and `final` as it was, when that fails or when
    `final` is a file or a link.
    """
    with disk_errors("publishing", final):
        for folder, _, names in os.walk(temporary):
            for name in names:
                fsync_path(Path(folder, name))
            fsync_path(Path(folder))
        recover_dir(final)
        if not _is_directory(final):
            os.rename(temporary, final)
            fsync_path(final.parent)
            return
        if _exchange(temporary, final):
            fsync_path(final.parent)
            remove_dir(temporary)
            return
        aside = final.parent / f"{_ASIDE}{final.name}"
        os.rename(final, aside)
        try:
            os.rename(temporary, final)
        except OSError:
            recover_dir(final)
            raise
        fsync_path(final.parent)
        remove_dir(aside)


def recover_dir(final: Path) -> None:
    """Finish or undo a replacement of `final` that was cut short. Cheap when there is nothing to do."""
    aside = final.parent / f"{_ASIDE}{final.name}"
    if not _is_directory(aside):
        return
    if _is_directory(final):
        remove_dir(aside)
    else:
        os.rename(aside, final)
        fsync_path(final.parent)


def remove_dir(path: Path) -> None:
    """Remove a directory of results; under its own name it is never seen half-removed."""
    if not path.name.startswith(".gshare-tmp-"):
        path = path.rename(temporary_name(path))
    shutil.rmtree(path)


def remove_leftovers(directory: Path) -> None:
    """Clear up after a writer that was killed: recover replaced directories, remove temporary names.

    Only while no one else writes to `directory`. Links are removed, not followed.
    """
    if not directory.is_dir():
        return
    names = sorted(os.listdir(directory))
    for name in names:
        if name.startswith(_ASIDE):
            recover_dir(directory / name.removeprefix(_ASIDE))
    for name in names:
        if _TEMPORARY.fullmatch(name):
            path = directory / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _is_directory(path: Path) -> bool:
    """True for a directory, False for nothing; a file or link in the way is an error."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        raise FileExistsError(errno.EEXIST, "a file or link is in the way", str(path))
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories' names atomically; False where the kernel or file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # another C library, or macOS
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:  # EPERM: some container filters refuse the call as a whole
        return False
    raise OSError(code, os.strerror(code), str(other))
