"""A job's files into its `output_dir` at home: whole or not at all, once, never over anything else.

Everything is copied beside the directory first, under a temporary name that says whose it is, checked against
its hash, flushed; then it gets its name. Where the directory is new or empty that is one rename. Where
something stands in it already (a note, a lock), each entry is renamed by itself; what stands there under the
same name with the same bytes is ours from an interrupted call, and with other bytes it is of another run and
never replaced.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gshare.agent.errors import GshareError
from gshare.agent.service.output_dir import LOCK_FILE
from gshare.agent.service.registry import take_lock
from gshare.agent.train.files import temporary_name
from gshare.coordinator.blobs import Damaged, DiskFull, check_room, hash_file

_COPY_BYTES = 1 << 20
_BLOCK_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class OutputTaken(GshareError):
    """The directory holds something else meanwhile, or cannot be written. The files stay where they are."""


@dataclass(frozen=True)
class Result:
    """A file of the result: `name` is relative to the output directory, `source` where it lies now."""

    name: str
    source: Path
    sha256: str
    size: int


def place_results(output_dir: Path, results: Sequence[Result], *, mark: str) -> None:
    """Makes `results` stand in `output_dir`; nothing happens when they do already.

    Args:
        output_dir: absolute; made where it is missing.
        results: at least one; names as checked by `file_transfer.check_bundle`.
        mark: which coordinator's job this is; a call cleans up after one of the same mark that was killed.

    Raises `DiskFull`, `OutputTaken`, `Damaged` (a source without its hash); all may be tried again.
    """
    tag = hashlib.sha256(os.fsencode(f"{mark}/{output_dir.name}")).hexdigest()[:16]
    staged = temporary_name(output_dir, tag)
    try:
        if _stands(output_dir, results):
            shutil.rmtree(staged, ignore_errors=True)
            return
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staged, ignore_errors=True)  # of a call that was killed
        check_room(output_dir.parent, _room_for(results), reserve=0)
        _stage(staged, results)
        if not output_dir.exists() or not os.listdir(output_dir):
            os.rename(staged, output_dir)
            _flush(output_dir.parent)
        else:
            _place_each(output_dir, staged, results)
            _flush(output_dir)
            shutil.rmtree(staged, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(staged, ignore_errors=True)
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            raise DiskFull(f"{output_dir}: {reason}; free space there") from None
        raise OutputTaken(f"{output_dir}: {reason}") from None
    except GshareError:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def _room_for(results: Sequence[Result]) -> int:
    """Bytes that they take on a disk: in whole blocks, with folders and names, and a sixteenth more."""
    blocks = sum(-(-result.size // _BLOCK_BYTES) for result in results) + 2 * len(results)
    return (blocks + blocks // 16) * _BLOCK_BYTES


def _stands(output_dir: Path, results: Sequence[Result]) -> bool:
    return output_dir.is_dir() and all(
        _same(output_dir.joinpath(*result.name.split("/")), result) for result in results
    )


def _same(path: Path, result: Result) -> bool:
    try:
        return path.stat().st_size == result.size and hash_file(path) == result.sha256
    except FileNotFoundError:
        return False


def _stage(staged: Path, results: Sequence[Result]) -> None:
    staged.mkdir()
    for result in results:
        target = staged.joinpath(*result.name.split("/"))
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with open(result.source, "rb") as source, open(target, "xb") as file:
            while block := source.read(_COPY_BYTES):
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != result.sha256:
            raise Damaged(f"{result.source} is damaged: it does not have the hash it had")
    for folder, _, _ in os.walk(staged):
        _flush(Path(folder))


def _place_each(output_dir: Path, staged: Path, results: Sequence[Result]) -> None:
    """Under the directory's lock: whoever trains there now keeps what is his."""
    lock = take_lock(output_dir / LOCK_FILE)
    if lock is None:
        raise OutputTaken(f"{output_dir}: a trainer is writing there; it is tried again when it has ended")
    try:
        missing: list[Result] = []
        for result in results:
            path = output_dir.joinpath(*result.name.split("/"))
            if _same(path, result):
                continue
            if os.path.lexists(path):
                raise OutputTaken(f"{path} is of another run; move {output_dir} away, and it is tried again")
            missing.append(result)
        for entry in sorted({result.name.split("/")[0] for result in missing}):
            if (staged / entry).is_dir() and not os.path.lexists(output_dir / entry):
                os.rename(staged / entry, output_dir / entry)
        for result in missing:
            path = output_dir.joinpath(*result.name.split("/"))
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                os.rename(staged.joinpath(*result.name.split("/")), path)
                _flush(path.parent)
    finally:
        os.close(lock)


def _flush(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
