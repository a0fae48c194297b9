"""Bases that were pushed: `models/<hash of names and contents>/`, hard links to blobs, shared by attempts."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Collection
from pathlib import Path

import msgspec
from gshare.agent.node.blobs import BlobStore
from gshare.agent.node.durable import room_or_refuse, sync_dir
from gshare.agent.node.protocol import ModelRef
from gshare.agent.node.state_dir import NEW

#: A base that no attempt uses is kept so long: the next job is often of the same one.
KEEP_SECONDS = 7 * 24 * 3600.0


def model_path(model: ModelRef, models: Path) -> str:
    """What `resolve_model` is given: the node's own path or hub id, the pushed directory or .gguf file."""
    if model.path:
        return model.path
    directory = models / model_hash(model)
    if len(model.files) == 1 and model.files[0].name.endswith(".gguf"):
        return str(directory / model.files[0].name)
    return str(directory)


def model_hash(model: ModelRef) -> str:
    """The same for the same files under the same names."""
    files = sorted((ref.name, ref.sha256) for ref in model.files)
    return hashlib.sha256(msgspec.json.encode(files)).hexdigest()[:32]


def place_model(model: ModelRef, models: Path, blobs: BlobStore) -> None:
    """The pushed files in their directory, whole or not at all. Nothing to do for a path of the node."""
    if not model.files:
        return
    directory = models / model_hash(model)
    if directory.is_dir():
        os.utime(directory)
        return
    temporary = models / f"{NEW}{secrets.token_hex(6)}"
    try:
        with room_or_refuse(models):
            temporary.mkdir(mode=0o700)
            blobs.link(model.files, temporary)
        try:
            os.rename(temporary, directory)
        except OSError:
            if (
                not directory.is_dir()
            ):  # else another attempt of the same base was faster, with the same files
                raise
        sync_dir(models)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def collect_models(models: Path, used: Collection[str], now: float | None = None) -> int:
    """Removes those that are not `used` (by hash) and were last placed a week ago. How many."""
    now = time.time() if now is None else now
    removed = 0
    for entry in os.scandir(models):
        if entry.name in used or not entry.is_dir(follow_symlinks=False):
            continue
        if now - entry.stat(follow_symlinks=False).st_mtime > KEEP_SECONDS:
            shutil.rmtree(entry.path, ignore_errors=True)
            removed += 1
    return removed
