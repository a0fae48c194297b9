"""Small files that must be whole after a crash: temp name, fsync, rename, fsync of the directory."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from gshare.agent.errors import GshareError, RetryLater

T = TypeVar("T")

#: What a full disk, quota or file size limit says.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: Kept free for what runs: a fill-up to the last byte would take the checkpoints of others with it.
FREE_BYTES = 1 << 30
FREE_SHARE = 0.05


#: What a file of JSON that somebody damaged raises: ValueError when it is not UTF-8, RecursionError when it
#: is nested too deep.
UNREADABLE = (OSError, msgspec.MsgspecError, ValueError, RecursionError)


class DiskFull(RetryLater):
    """The node's disk has no room for this now."""


def write_struct(path: Path, value: object) -> None:
    """JSON, whole or not at all. OSError when the disk does not take it; then the old file stands."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    data = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    try:
        write_new(temporary, data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_dir(path.parent)


def read_struct(path: Path, kind: type[T]) -> T | None:
    """The file as `kind`; None when there is none. GshareError naming it when it cannot be read."""
    try:
        return msgspec.json.decode(read_regular(path), type=kind)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise GshareError(f"{path}: cannot be read ({why}); move it away") from None


def read_regular(path: Path) -> bytes:
    """All bytes of a regular file. OSError for a pipe or a device, which would be waited for or never end."""
    # Not blocking: the open itself waits for a pipe's writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        return file.read()


def write_new(path: Path, data: bytes) -> None:
    """A new file with `data`, on the disk when this returns. Follows no link."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Every byte, or an OSError: a nearly full disk takes a part and only then refuses."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_dir(path: Path) -> None:
    """The names in `path` are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def free_bytes(path: Path) -> int:
    """Bytes this user may still write there beyond what is kept free; negative when that is touched."""
    status = os.statvfs(path)
    total = status.f_blocks * status.f_frsize
    return status.f_bavail * status.f_frsize - min(FREE_BYTES, int(total * FREE_SHARE))


def check_room(path: Path, need: int) -> None:
    """Raises `DiskFull` when `need` bytes do not fit in `path`."""
    free = free_bytes(path)
    if need > free:
        raise DiskFull(
            f"the node's disk is full: {path} has room for {max(0, free) >> 20} MiB, "
            f"{-(-need >> 20)} MiB are needed; free some there"
        )


@contextlib.contextmanager
def room_or_refuse(path: Path, *, need: int = 0) -> Iterator[None]:
    """Asks for `need` bytes in `path` first; a disk that fills up inside is `DiskFull` too."""
    check_room(path, need)
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(f"the node's disk is full: {path}: {error.strerror}; free some there") from error
        raise
