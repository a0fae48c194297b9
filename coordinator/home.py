"""What of the jobs lies at home before it is in its output directory: blobs, and which of them make a result.

    <state dir>/blobs/<sha256>                 pulled files, whole
    <state dir>/brought/<job>-<attempt>.json   the files of a finished attempt, all of them in blobs/

A list is written when its last file is there, and removed when the result has been placed: whoever finds one
after a crash can place it without the node.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from gshare.agent.errors import GshareError
from gshare.agent.node.protocol import BlobRef
from gshare.coordinator.blobs import BlobStore, DiskFull
from gshare.coordinator.results import Result, place_results

#: A transfer that has not gone on for so long is begun anew.
SPARE_SECONDS = 3600.0


class _Brought(msgspec.Struct, frozen=True, kw_only=True):
    files: list[BlobRef]


class Home:
    def __init__(self, state_dir: Path) -> None:
        self.blobs = BlobStore(state_dir / "blobs")
        self._brought = state_dir / "brought"
        self._pulling = 0

    def __enter__(self) -> Home:
        """While a pull runs inside, nothing is collected: its first blobs are on no list yet."""
        self._pulling += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._pulling -= 1

    def note_brought(self, job: str, attempt: int, files: Sequence[BlobRef]) -> None:
        """The list of a result whose every file is in `blobs`. Raises `DiskFull`."""
        path = self._path(job, attempt)
        temporary = path.with_name(f".{path.name}.new")
        try:
            self._brought.mkdir(mode=0o700, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(msgspec.json.encode(_Brought(files=list(files))))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            raise DiskFull(f"{path}: {error.strerror}; free space there") from None

    def place(self, job: str, attempt: int, output_dir: Path, mark: str) -> None:
        """Into the output directory; done before, nothing happens.

        Raises what `place_results` raises, and GshareError when the result is not at home (any more).
        """
        path = self._path(job, attempt)
        try:
            brought = msgspec.json.decode(path.read_bytes(), type=_Brought)
        except (OSError, msgspec.MsgspecError) as error:
            raise GshareError(f"{path}: the list of the result's files cannot be read ({error})") from None
        results = [Result(f.name, self.blobs.path(f.sha256), f.sha256, f.size) for f in brought.files]
        place_results(output_dir, results, mark=mark)

    def forget(self, job: str, attempt: int) -> None:
        """The result has been placed, and the store knows."""
        self._path(job, attempt).unlink(missing_ok=True)

    def collect(
        self, checkpoints: Iterable[str], unplaced: Iterable[tuple[str, int]], *, expecting: bool = False
    ) -> None:
        """Removes all but the blobs with the hashes `checkpoints` and the results of `unplaced` attempts.

        `expecting`: files are on their way, perhaps of a node that is away just now. Which ones is not known
        here, so what came within the last hour is spared: else it would be begun anew. Raises `OSError`.
        """
        if self._pulling:
            return
        keep = set(checkpoints)
        wanted = {self._path(job, attempt).name for job, attempt in unplaced}
        for path in self._brought.glob("*.json"):
            if path.name not in wanted:
                if path.is_symlink() or not path.is_dir():  # a directory is none of ours
                    path.unlink(missing_ok=True)
                continue
            try:
                keep |= {file.sha256 for file in msgspec.json.decode(path.read_bytes(), type=_Brought).files}
            except (OSError, msgspec.MsgspecError):
                return  # `place` will say so; until then nothing is lost
        self.blobs.collect(keep, spare_seconds=SPARE_SECONDS if expecting else 0.0)

    def _path(self, job: str, attempt: int) -> Path:
        return self._brought / f"{job}-{attempt}.json"
