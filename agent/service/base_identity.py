"""Which base a run was trained on, told from its content in a moment: for `run.json`, without torch.

A path says nothing: a directory of the same name may hold other weights. The whole content would take
minutes to read. So: the configuration, and of every tensor its name, type, shape and a few KiB from its
middle. Training changes weights everywhere, so that another model differs in these; the engine compares the
whole fingerprint when it loads a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path

#: Bytes hashed of each tensor. 300 tensors of a 7B model: about a megabyte.
SAMPLE = 4096
#: The longest header that safetensors itself accepts.
_MAX_HEADER = 100_000_000
#: Keys of config.json that change when a model is moved or saved again, and say nothing about its weights.
_NO_IDENTITY = ("_name_or_path", "transformers_version")


def base_identity(directory: Path) -> str | None:
    """SHA-256 in hex of a model directory's configuration and samples of its weights.

    Moving a model or distributing its tensors over other files does not change it. None when there is nothing
    to tell it from (no config.json, no safetensors file, or one that cannot be read).
    """
    try:
        config = json.loads((directory / "config.json").read_bytes())
        files = sorted(directory.glob("*.safetensors"))
        if not files or not isinstance(config, dict):
            return None
        kept = {key: value for key, value in config.items() if key not in _NO_IDENTITY}
        tensors: list[str] = []
        for file in files:
            tensors += _tensors(file)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, struct.error):
        return None  # the loader says what is wrong with it
    whole = [json.dumps(kept, sort_keys=True), *sorted(tensors)]
    return hashlib.sha256("\n".join(whole).encode("utf-8", "surrogatepass")).hexdigest()


def _tensors(file: Path) -> list[str]:
    """One line a tensor: name, type, shape and the hash of its sample."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        (length,) = struct.unpack("<Q", os.pread(fd, 8, 0))
        if length > _MAX_HEADER:
            raise ValueError("no safetensors file")
        header = json.loads(os.pread(fd, length, 8))
        lines: list[str] = []
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            middle = begin + max(0, end - begin - SAMPLE) // 2
            sample = os.pread(fd, min(SAMPLE, end - middle), 8 + length + middle)
            digest = hashlib.sha256(sample).hexdigest()
            lines.append(json.dumps([name, entry["dtype"], entry["shape"], digest]))
        return lines
    finally:
        os.close(fd)
