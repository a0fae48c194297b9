"""What an attempt should be, on disk: a restarted agent goes on from these files alone.

    attempts/<owner8>-<job>-<attempt>/attempt.json    what was asked, and how it ended
                                      data/ val/      the data files, under their own names
                                      out/            the output directory of the run

A directory appears under its name only when complete. `fences.json` remembers the highest attempt number of
every (owner, job), after its files were forgotten too: an older one never starts again.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from gshare.agent.errors import GshareError
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.node.blobs import BlobStore
from gshare.agent.node.checks import owner_tag
from gshare.agent.node.durable import read_struct, room_or_refuse, sync_dir, write_new, write_struct
from gshare.agent.node.protocol import AttemptStatus, StartAttempt
from gshare.agent.node.state_dir import NEW
from gshare.agent.service.output_dir import RUN_FILE, RunRecord

RECORD = "attempt.json"
#: (owner, job) pairs whose highest attempt is remembered; the oldest go first.
FENCES_KEPT = 20_000


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`attempt.json`. `ended`: how; None: it should be running (or paused)."""

    owner: str
    request: StartAttempt
    name: str  # of the job inside its trainer: unique among this node's attempts
    created: float  # Unix time, s
    paused: bool = False
    stop: str | None = None  # asked to stop, with this reason
    ended: AttemptStatus | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.owner, self.request.job, self.request.attempt


def attempt_dir(attempts: Path, owner: str, job: str, attempt: int) -> Path:
    return attempts / f"{owner_tag(owner)}-{job}-{attempt}"


def local_spec(record: AttemptRecord, directory: Path) -> AdapterSpec:
    """The job's spec as its trainer gets it: the paths and the name are this node's."""
    request = record.request
    spec = request.spec
    return msgspec.structs.replace(
        spec,
        name=record.name,
        data=str(directory / "data" / request.data.name),
        val_data=str(directory / "val" / request.val_data.name) if request.val_data else None,
        output_dir=str(directory / "out"),
        lora_alpha=spec.lora_alpha if spec.lora_alpha is not None else 2.0 * spec.r,
        seed=spec.seed if spec.seed is not None else 0,
    )


def make_attempt(record: AttemptRecord, attempts: Path, blobs: BlobStore) -> Path:
    """The attempt's directory with its files, whole or not at all. DiskFull: no room."""
    request = record.request
    final = attempt_dir(attempts, record.owner, request.job, request.attempt)
    temporary = attempts / f"{NEW}{secrets.token_hex(6)}"
    try:
        with room_or_refuse(attempts):
            for name in ("", "data", "val", "out"):
                (temporary / name).mkdir(mode=0o700)
            blobs.link([request.data], temporary / "data")
            if request.val_data is not None:
                blobs.link([request.val_data], temporary / "val")
            _place_checkpoint(record, temporary / "out", final, blobs)
            write_new(temporary / RECORD, msgspec.json.encode(record))
            sync_dir(temporary)
            temporary.rename(final)
            sync_dir(attempts)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def write_record(record: AttemptRecord, directory: Path) -> None:
    """OSError when the disk does not take it; then the old one stands."""
    write_struct(directory / RECORD, record)


def read_records(attempts: Path) -> Iterator[tuple[Path, AttemptRecord | str]]:
    """Every attempt's directory, oldest first, with its record, or why it cannot be read."""
    found: list[tuple[float, Path, AttemptRecord | str]] = []
    for directory in attempts.iterdir():
        if directory.name.startswith("."):
            continue
        try:
            record = read_struct(directory / RECORD, AttemptRecord)
        except GshareError as error:
            found.append((0.0, directory, str(error)))
            continue
        if record is None:
            found.append((0.0, directory, f"{directory}: holds no {RECORD}; move it away"))
        else:
            found.append((record.created, directory, record))
    for _, directory, record in sorted(found, key=lambda item: (item[0], item[1].name)):
        yield directory, record


class Fences:
    """The highest attempt number seen of every (owner, job), kept over restarts and forgetting."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._highest = read_struct(path, dict[str, int]) or {}

    def highest(self, owner: str, job: str) -> int:
        """0: none was ever seen."""
        return self._highest.get(f"{owner}/{job}", 0)

    def raise_to(self, owner: str, job: str, attempt: int) -> None:
        """On disk when this returns. OSError: it is not, and nothing has changed."""
        key = f"{owner}/{job}"
        before = self._highest
        if before.get(key, 0) >= attempt:
            return
        after = {name: number for name, number in before.items() if name != key}
        after[key] = attempt
        for old in list(after)[: max(0, len(after) - FENCES_KEPT)]:
            del after[old]
        write_struct(self._path, after)
        self._highest = after


def new_record(owner: str, request: StartAttempt, name: str) -> AttemptRecord:
    return AttemptRecord(owner=owner, request=request, name=name, created=time.time())


def _place_checkpoint(record: AttemptRecord, out: Path, final: Path, blobs: BlobStore) -> None:
    """The pushed files as they lay in the output directory of the attempt before.

    What a trainer appends to is copied: a hard link would change the blob. Its run.json gets this node's
    paths, or is made: without one a trainer goes on from nothing.
    """
    refs = record.request.checkpoint
    if not refs:
        return
    blobs.link(refs, out)
    for ref in refs:
        if "/" not in ref.name:
            path = out / ref.name
            data = path.read_bytes()
            path.unlink()
            write_new(path, data)
    before = read_struct(out / RUN_FILE, RunRecord)
    spec = local_spec(record, final)
    run = (
        msgspec.structs.replace(before, spec=spec)
        if before is not None
        else RunRecord(model=record.request.model.name, base_dtype=record.request.base_dtype, spec=spec)
    )
    write_struct(out / RUN_FILE, run)
