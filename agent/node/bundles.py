"""Files of an attempt, kept as they are while a client reads them chunk by chunk.

What the trainer publishes whole (checkpoints, `best/`, the adapter) is hard-linked: it is replaced by rename,
never written to. `metrics.jsonl` grows, so its whole lines are copied. Hashes of published directories are
those of their manifests; the reader compares them with what it received.

Names are relative to the run's output directory, so that a bundle lies in another one as it lay here.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from gshare.agent.errors import RetryLater, UsageError
from gshare.agent.node.blobs import hash_file
from gshare.agent.node.checks import check_file_name
from gshare.agent.node.durable import room_or_refuse
from gshare.agent.node.progress import checkpoints, read_best
from gshare.agent.node.protocol import CHUNK_BYTES, BlobRef, BundleKind

KEEP_SECONDS = 3600.0
MAX_BUNDLES = 256
MANIFEST = "manifest.json"
METRICS = "metrics.jsonl"
#: Tries to link a directory that the trainer replaces meanwhile.
_TRIES = 10
#: Loose files of a run, in the order of their importance.
_FINAL = ("adapter_config.json", "adapter_model.safetensors")
_RUN = ("run.json", METRICS)


@dataclass(frozen=True)
class Bundle:
    id: str
    owner: str
    directory: Path
    files: dict[str, BlobRef]
    step: int
    val_loss: float | None
    expires: float  # monotonic, s


class Bundles:
    """Thread-safe. Every method may block on the disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._bundles: dict[str, Bundle] = {}

    def pin(self, owner: str, out: Path, kind: BundleKind, step: int) -> Bundle:
        """The files of `kind` in `out` as they are now; `step` is the job's, for a final adapter.

        UsageError: there are none. RetryLater: too many bundles, or a disk without room.
        """
        self.expire()
        with self._lock:
            if len(self._bundles) >= MAX_BUNDLES:
                raise RetryLater(f"{MAX_BUNDLES} bundles are being read here; release some")
        identity = secrets.token_hex(16)
        directory = self._directory / identity
        try:
            with room_or_refuse(self._directory):
                directory.mkdir(mode=0o700)
                files, step, val_loss = _take(out, kind, directory, step)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        bundle = Bundle(identity, owner, directory, files, step, val_loss, time.monotonic() + KEEP_SECONDS)
        with self._lock:
            self._bundles[identity] = bundle
        return bundle

    def read(self, owner: str, bundle: str, name: str, offset: int, length: int) -> bytes:
        """At most `length` bytes; empty at the end. UsageError: no such bundle or file in it."""
        found = self._find(owner, bundle)
        if name not in found.files:
            raise UsageError(f"bundle {bundle[:32]}: holds no such file")
        if offset < 0 or not 0 <= length <= CHUNK_BYTES:
            raise UsageError(f"bundle {bundle[:32]}: at most {CHUNK_BYTES} bytes from an offset of 0 or more")
        fd = os.open(found.directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return os.pread(fd, length, offset)
        finally:
            os.close(fd)

    def release(self, owner: str, bundle: str) -> None:
        found = self._find(owner, bundle)
        with self._lock:
            self._bundles.pop(found.id, None)
        shutil.rmtree(found.directory, ignore_errors=True)

    def expire(self, now: float | None = None) -> None:
        """Removes what was pinned an hour ago."""
        now = time.monotonic() if now is None else now
        with self._lock:
            old = [bundle for bundle in self._bundles.values() if bundle.expires <= now]
            for bundle in old:
                del self._bundles[bundle.id]
        for bundle in old:
            shutil.rmtree(bundle.directory, ignore_errors=True)

    def _find(self, owner: str, bundle: str) -> Bundle:
        with self._lock:
            found = self._bundles.get(bundle)
        if found is None or found.owner != owner:
            raise UsageError("no such bundle here; it is kept for an hour: pin it again")
        return found


def _take(out: Path, kind: BundleKind, into: Path, step: int) -> tuple[dict[str, BlobRef], int, float | None]:
    if kind == "best":
        files = _published(out, "best", into)
        if not files:
            raise UsageError("there is no best checkpoint: the job has had no evaluation yet")
        best = read_best(into / "best" / "metadata.json")
        if best is None:
            raise UsageError("the best checkpoint's metadata.json cannot be read")
        return files, *best
    if kind == "checkpoint":
        for found_step, path in checkpoints(out):
            files = _published(out, path.name, into)
            if files:
                # The best one so far too: a job that goes on elsewhere may never be better.
                return {**files, **_published(out, "best", into), **_loose(out, _RUN, into)}, found_step, None
        raise UsageError("there is no checkpoint yet")
    files = _loose(out, _FINAL, into)
    if len(files) < len(_FINAL):
        raise UsageError("there is no final adapter: the job has not completed")
    best = read_best(out / "best" / "metadata.json")
    return {**files, **_loose(out, _RUN, into)}, step, best[1] if best else None


def _published(out: Path, name: str, into: Path) -> dict[str, BlobRef]:
    """Links a directory with a manifest; {} when there is none, or what is there is not whole.

    By the directory's descriptor: one that is exchanged meanwhile gives no mixture, but a file that is gone,
    and the next look sees the whole new one.
    """
    target = into / name
    for _ in range(_TRIES):
        try:
            source = os.open(out / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return {}
        try:
            target.mkdir(mode=0o700)
            os.link(MANIFEST, target / MANIFEST, src_dir_fd=source)
            manifest = json.loads((target / MANIFEST).read_bytes())
            refs = [
                BlobRef(name=f"{name}/{file}", sha256=str(entry["sha256"]), size=int(entry["size"]))
                for file, entry in manifest["files"].items()
            ]
            for ref in refs:
                file = check_file_name(ref.name).rpartition("/")[2]
                os.link(file, target / file, src_dir_fd=source, follow_symlinks=False)
        except FileNotFoundError:
            shutil.rmtree(target, ignore_errors=True)
            continue
        except (UsageError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        finally:
            os.close(source)
        if any((into / ref.name).stat().st_size != ref.size for ref in refs):
            return {}
        return {ref.name: ref for ref in [*refs, _ref(target / MANIFEST, f"{name}/{MANIFEST}")]}
    return {}


def _loose(out: Path, names: tuple[str, ...], into: Path) -> dict[str, BlobRef]:
    """Files of the output directory itself; those that are not there are left out."""
    files: dict[str, BlobRef] = {}
    for name in names:
        target = into / name
        try:
            if name == METRICS:
                data = (out / name).read_bytes()
                target.write_bytes(data[: data.rfind(b"\n") + 1])
            else:
                os.link(out / name, target, follow_symlinks=False)
        except FileNotFoundError:
            continue
        files[name] = _ref(target, name)
    return files


def _ref(path: Path, name: str) -> BlobRef:
    return BlobRef(name=name, sha256=hash_file(path), size=path.stat().st_size)
