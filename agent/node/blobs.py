"""Files by content: `blobs/<sha256>`, sent in chunks, resumed where they stopped, shared by hard links.

A file stands under its hash only after the hash was checked and its bytes were synced; before that it is
`<sha256>.part`. Whoever uses one links it, so removing it here takes nothing from them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gshare.agent.errors import UsageError
from gshare.agent.node.checks import check_sha256, check_size
from gshare.agent.node.durable import check_room, room_or_refuse, sync_dir, write_all
from gshare.agent.node.protocol import CHUNK_BYTES, BlobRef

#: Half-sent files whose hash is kept in step, so that the last chunk does not read the whole again.
_HASHES_KEPT = 16
#: A file that nobody links is kept so long after it was last asked for.
KEEP_SECONDS = 24 * 3600.0
_READ_BYTES = 1 << 20
_NO_LINK = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP)


class BlobStore:
    """Thread-safe. Every method may block on the disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._hashes: OrderedDict[str, tuple[int, Any]] = OrderedDict()  # sha256 → (bytes hashed, hash)
        self._roomy: dict[str, int] = {}  # partial files whose `total` was asked of the disk

    def held(self, sha256: str) -> tuple[int, bool]:
        """Bytes of it that are there, and whether that is all. What is asked for is kept for a day."""
        whole, part = self._paths(sha256)
        for path, complete in ((whole, True), (part, False)):
            try:
                os.utime(path, follow_symlinks=False)
                return path.lstat().st_size, complete
            except FileNotFoundError:
                continue
        return 0, False

    def put(self, sha256: str, offset: int, total: int, data: bytes) -> tuple[int, bool]:
        """Takes a chunk: as `held` afterwards. Bytes that were there already are not written again.

        UsageError: an offset beyond what is there, more bytes than `total`, a hash that does not fit (then
        the partial file is dropped). DiskFull: no room; what was there stays.
        """
        check_size(total, what="total")
        if len(data) > CHUNK_BYTES or not 0 <= offset <= total or offset + len(data) > total:
            raise UsageError(
                f"blob {sha256[:12]}: {len(data)} bytes at {offset} of {total}; "
                f"a chunk lies inside its file and has at most {CHUNK_BYTES} bytes"
            )
        with self._lock:
            have, complete = self.held(sha256)
            if complete:
                return have, True
            if offset > have:
                raise UsageError(f"blob {sha256[:12]}: {have} bytes are here, the chunk begins at {offset}")
            if have > total:
                self._drop(sha256)
                raise UsageError(f"blob {sha256[:12]}: more than {total} bytes were sent; send it anew")
            if self._roomy.get(sha256) != total:
                check_room(self._directory, total - have)
                self._roomy[sha256] = total
            self._append(sha256, have, data[have - offset :])
            have = max(have, offset + len(data))
            if have < total:
                return have, False
            self._finish(sha256, total)
            return total, True

    def missing(self, refs: Iterable[BlobRef]) -> list[BlobRef]:
        """Those that are not here whole, with that size."""
        return [ref for ref in refs if self.held(ref.sha256) != (ref.size, True)]

    def link(self, refs: Sequence[BlobRef], directory: Path) -> None:
        """Each blob under its name in `directory`; a copy where the file system has no hard links."""
        for ref in refs:
            target = directory / ref.name
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                os.link(self._paths(ref.sha256)[0], target)
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                with room_or_refuse(directory, need=ref.size):
                    shutil.copyfile(self._paths(ref.sha256)[0], target)

    def collect(self, now: float | None = None) -> int:
        """Removes what nobody links and nobody has asked for in a day. How many."""
        now = time.time() if now is None else now
        removed = 0
        with self._lock:
            for entry in os.scandir(self._directory):
                if not entry.is_file(follow_symlinks=False):
                    continue  # somebody else's
                status = entry.stat(follow_symlinks=False)
                if status.st_nlink == 1 and now - status.st_mtime > KEEP_SECONDS:
                    os.unlink(entry.path)
                    self._forget(entry.name.removesuffix(".part"))
                    removed += 1
        return removed

    def _append(self, sha256: str, have: int, data: bytes) -> None:
        part = self._paths(sha256)[1]
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with room_or_refuse(self._directory):
            fd = os.open(part, flags, 0o600)
            try:
                os.lseek(fd, have, os.SEEK_SET)
                write_all(fd, data)
            except OSError:
                os.ftruncate(fd, have)  # half a chunk is no place to go on from
                self._roomy.pop(sha256, None)
                raise
            finally:
                os.close(fd)
        hashed, running = self._hashes.pop(sha256, (0, hashlib.sha256()))
        if hashed == have:
            running.update(data)
            self._hashes[sha256] = (have + len(data), running)
            while len(self._hashes) > _HASHES_KEPT:
                self._hashes.popitem(last=False)

    def _finish(self, sha256: str, total: int) -> None:
        whole, part = self._paths(sha256)
        hashed, running = self._hashes.get(sha256, (-1, None))
        digest = running.hexdigest() if running is not None and hashed == total else hash_file(part)
        if digest != sha256:
            self._drop(sha256)
            raise UsageError(f"blob {sha256[:12]}: the bytes that came have another hash; send it anew")
        with room_or_refuse(self._directory):
            fd = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fchmod(fd, 0o400)  # linked into many places: written to by none
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(part, whole)
            sync_dir(self._directory)
        self._forget(sha256)

    def _drop(self, sha256: str) -> None:
        self._paths(sha256)[1].unlink(missing_ok=True)
        self._forget(sha256)

    def _forget(self, sha256: str) -> None:
        self._hashes.pop(sha256, None)
        self._roomy.pop(sha256, None)

    def _paths(self, sha256: str) -> tuple[Path, Path]:
        check_sha256(sha256)
        return self._directory / sha256, self._directory / f"{sha256}.part"


def hash_file(path: Path) -> str:
    """SHA-256 in hex; follows no link."""
    digest = hashlib.sha256()
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while data := os.read(fd, _READ_BYTES):
            digest.update(data)
    finally:
        os.close(fd)
    return digest.hexdigest()
