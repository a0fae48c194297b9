"""What a node wrote with its own names and paths, as a run on this machine would have written it.

    run.json              job, data, directory and model: or the directory would count as another run's
    adapter_config.json   base_model_name_or_path: the node's copy of the model does not exist here
    manifest.json         size and hash of the above, where it lies beside it

Weights, losses and everything else stay byte for byte. What cannot be read is left as it is: it was checked
against its hash, and is not ours to judge.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec
from gshare.agent.base.resolve import converted_dir
from gshare.agent.node.protocol import BlobRef
from gshare.agent.service.output_dir import RUN_FILE, RunRecord
from gshare.agent.train.files import json_bytes
from gshare.agent.xdg import cache_dir
from gshare.coordinator.blobs import BlobStore
from gshare.coordinator.orders import Order

CONFIG, MANIFEST, BASE_KEY = "adapter_config.json", "manifest.json", "base_model_name_or_path"
#: Such files are some KiB.
_MOST_BYTES = 1 << 20


def come_home(files: Sequence[BlobRef], order: Order, blobs: BlobStore) -> list[BlobRef]:
    """The files of pulled bundles, those above replaced in the list; the new ones are whole in `blobs`.

    Raises `DiskFull`.
    """
    own = {ref.name: ref for ref in files}
    for name, ref in list(own.items()):
        folder, _, last = name.rpartition("/")
        if ref.size > _MOST_BYTES:
            continue
        if name == RUN_FILE:
            own[name] = _keep(name, home_record(_read(ref, blobs), order), blobs)
        elif last == CONFIG:
            own[name] = _keep(name, home_config(_read(ref, blobs), order), blobs)
            manifest = f"{folder}/{MANIFEST}" if folder else MANIFEST
            if manifest in own and own[manifest].size <= _MOST_BYTES:
                listed = home_manifest(_read(own[manifest], blobs), own[name])
                own[manifest] = _keep(manifest, listed, blobs)
    return list(own.values())


def home_record(raw: bytes, order: Order) -> bytes:
    """A run.json with the job's spec and the model as they are named here."""
    try:
        record = msgspec.json.decode(raw, type=RunRecord)
    except msgspec.MsgspecError:
        return raw
    own = msgspec.structs.replace(record, model=order.model.name, spec=order.job.spec)
    return msgspec.json.format(msgspec.json.encode(own), indent=2) + b"\n"


def home_config(raw: bytes, order: Order) -> bytes:
    """An adapter_config.json that names the base as the user did; of a .gguf file its conversion, as
    `finetune` does, where there is one on this machine: PEFT cannot load the file."""
    config = _object(raw)
    if config is None or BASE_KEY not in config:
        return raw
    return json_bytes({**config, BASE_KEY: _base_here(order)})


def _base_here(order: Order) -> str:
    name, files = order.model.name, order.model.files
    if name.endswith(".gguf") and len(files) == 1:
        converted = converted_dir(cache_dir(), files[0].sha256, order.base_dtype)
        if converted.is_dir():
            return str(converted)
    return name


def home_manifest(raw: bytes, config: BlobRef) -> bytes:
    """A manifest.json with the size and hash of the new adapter_config.json beside it."""
    manifest = _object(raw)
    files = manifest.get("files") if manifest is not None else None
    if manifest is None or not isinstance(files, dict) or CONFIG not in files:
        return raw
    entry = {"sha256": config.sha256, "size": config.size}
    return json_bytes({**manifest, "files": {**files, CONFIG: entry}})


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _read(ref: BlobRef, blobs: BlobStore) -> bytes:
    return blobs.path(ref.sha256).read_bytes()


def _keep(name: str, data: bytes, blobs: BlobStore) -> BlobRef:
    ref = BlobRef(name=name, sha256=hashlib.sha256(data).hexdigest(), size=len(data))
    if not blobs.has(ref):
        blobs.append(ref, 0, data)
        blobs.finish(ref)
    return ref
