"""Files by content at home: what was pulled from nodes, `<state dir>/blobs/<sha256>`, partial ones `.part`.

What stands under its hash is whole and has that hash; a part is gone on with at its length, also by the next
process. One process at a time writes here (the coordinator holds the state directory's lock).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import time
from collections.abc import Collection
from pathlib import Path
from weakref import WeakValueDictionary

from gshare.agent.errors import GshareError
from gshare.agent.node.protocol import BlobRef

SHA256 = re.compile(r"[0-9a-f]{64}\Z")
#: Left free on the disk whatever comes: the store beside the blobs has to be able to write.
DISK_RESERVE = 64 << 20
_READ_BYTES = 1 << 20


class DiskFull(GshareError):
    """There is no room at home. What was to be kept stays on its node; try again when there is."""


class Damaged(GshareError):
    """Bytes that do not have the hash they should have."""


class BlobStore:
    """The directory is made by the first write, 0700 as everything below the state directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def lock(self, sha256: str) -> asyncio.Lock:
        """Held by who brings that blob: two nodes may have the same file, and there is one partial one."""
        return self._locks.setdefault(sha256, asyncio.Lock())

    def path(self, sha256: str) -> Path:
        """Where the blob is or would be. `Damaged` for what is no hash: it never becomes a path."""
        if not SHA256.match(sha256):
            raise Damaged(f"{sha256[:80]!r} is no SHA-256 in hex")
        return self.directory / sha256

    def has(self, ref: BlobRef) -> bool:
        try:
            return self.path(ref.sha256).stat().st_size == ref.size
        except FileNotFoundError:
            return False

    def partial(self, ref: BlobRef) -> int:
        """Bytes of the blob that are there already; a part longer than the blob is dropped."""
        part = self._part(ref.sha256)
        try:
            size = part.stat().st_size
        except FileNotFoundError:
            return 0
        if size > ref.size:
            part.unlink()
            return 0
        return size

    def make_room(self, nbytes: int) -> None:
        """Asked before the first byte of `nbytes` more. Raises `DiskFull` naming the directory."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_room(self.directory, nbytes, reserve=DISK_RESERVE)

    def append(self, ref: BlobRef, offset: int, data: bytes) -> None:
        """Writes `data` at the end of the part, which is `offset` long. Raises `DiskFull`."""
        part = self._part(ref.sha256)
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, offset)
                os.lseek(fd, offset, os.SEEK_SET)
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
            finally:
                os.close(fd)
        except OSError as error:
            raise DiskFull(f"{part}: {error.strerror}; free space there") from None

    def finish(self, ref: BlobRef) -> Path:
        """Checks the whole part and gives it its name. A part with another hash is removed: `Damaged`."""
        part = self._part(ref.sha256)
        if ref.size == 0:
            self.append(ref, 0, b"")
        if hash_file(part) != ref.sha256:
            part.unlink()
            raise Damaged(f"{ref.name}: the bytes that came do not have the hash {ref.sha256[:12]}…")
        final = self.path(ref.sha256)
        try:
            fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(part, final)
        except OSError as error:
            raise DiskFull(f"{final}: {error.strerror}; free space there") from None
        return final

    def collect(self, keep: Collection[str], *, spare_seconds: float = 0.0) -> int:
        """Removes every blob and part whose hash is not in `keep` and that was not written to for
        `spare_seconds`; returns how many. What somebody else put there stays. Raises `OSError`."""
        removed, spared = 0, time.time() - spare_seconds
        if not self.directory.is_dir():
            return 0
        for entry in os.scandir(self.directory):
            sha256 = entry.name.removesuffix(".part")
            if sha256 in keep or not SHA256.match(sha256) or not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(FileNotFoundError):  # a pull has just finished it, or dropped it
                if entry.stat(follow_symlinks=False).st_mtime <= spared:
                    os.unlink(entry.path)
                    removed += 1
        return removed

    def _part(self, sha256: str) -> Path:
        return self.path(sha256).with_name(f"{sha256}.part")


def hash_file(path: Path) -> str:
    """SHA-256 in hex of a file's bytes. Raises `OSError`."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def check_room(directory: Path, nbytes: int, *, reserve: int) -> None:
    """`DiskFull` when the file system of `directory` cannot take `nbytes` and keep `reserve` bytes free."""
    found = os.statvfs(directory)
    free, need = found.f_bavail * found.f_frsize, nbytes + reserve
    if need > free:
        raise DiskFull(
            f"{directory}: {-(-need >> 10):,} KiB have to be free, but only {free >> 10:,} KiB are; "
            "free space there"
        )


def path_fault(name: str) -> str | None:
    """What is wrong with a relative path that came from elsewhere; None when it leads nowhere else."""
    if not name or len(name) > 512 or not name.isprintable():
        return "is empty, too long or holds control characters"
    if name.startswith("/") or "\\" in name:
        return "is not relative"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "has an empty part, '.' or '..'"
    if any(len(part.encode("utf-8", "surrogatepass")) > 255 for part in name.split("/")):
        return "has a part that no file system can hold"
    return None
