"""The shape of a model in a .gguf file, from its header alone and without the package that reads weights.

Format: github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from gshare.agent.errors import UsageError
from gshare.agent.jobs.memory import ModelShape

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: Type of a value → its struct format; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: Bounds for a damaged file: the largest vocabularies have 260,000 words, the largest models 2,000 tensors.
_MOST_ENTRIES, _MOST_BYTES = 1 << 22, 1 << 26


def gguf_shape(path: Path) -> ModelShape:
    """The numbers that memory depends on. UsageError naming the file when it is no GGUF of a decoder."""
    try:
        with open(path, "rb") as file:
            values, tensors = _read(file)
    except (OSError, struct.error, ValueError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a GGUF file that can be read ({error}); fetch it again") from None
    try:
        kind = values["general.architecture"]
        heads = int(values[f"{kind}.attention.head_count"])
        hidden = int(values[f"{kind}.embedding_length"])
        return ModelShape(
            vocab_size=tensors["token_embd.weight"][1],
            hidden_size=hidden,
            intermediate_size=int(values[f"{kind}.feed_forward_length"]),
            num_layers=int(values[f"{kind}.block_count"]),
            num_heads=heads,
            num_kv_heads=int(values.get(f"{kind}.attention.head_count_kv", heads)),
            head_dim=int(values.get(f"{kind}.attention.key_length", hidden // heads)),
            tie_word_embeddings="output.weight" not in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
        )
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UsageError(f"{path}: its header does not describe a decoder ({error!r})") from None


def _read(file: BinaryIO) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """(metadata without arrays, name → dimensions of each tensor)."""
    if file.read(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    if (version := _scalar(file, "I")) not in _VERSIONS:
        raise ValueError(f"version {version}; 2 and 3 can be read")
    n_tensors, n_values = _count(file), _count(file)
    values: dict[str, Any] = {}
    for _ in range(n_values):
        name = _string(file).decode()
        value = _value(file, _scalar(file, "I"))
        if value is not None:
            values[name] = value
    tensors: dict[str, tuple[int, ...]] = {}
    for _ in range(n_tensors):
        name = _string(file).decode()
        dims = tuple(_scalar(file, "Q") for _ in range(min(_scalar(file, "I"), 8)))
        _scalar(file, "I")  # the type of its data
        _scalar(file, "Q")  # and where they are
        tensors[name] = dims
    return values, tensors


def _value(file: BinaryIO, kind: int) -> Any:
    """The value; None for an array, which is passed over."""
    if kind in _SCALARS:
        return _scalar(file, _SCALARS[kind])
    if kind == _STRING:
        return _string(file).decode("utf-8", "replace")
    if kind != _ARRAY:
        raise ValueError(f"a value of the unknown type {kind}")
    of, count = _scalar(file, "I"), _count(file)
    if of in _SCALARS:
        file.seek(count * struct.calcsize(_SCALARS[of]), 1)
    else:
        for _ in range(count):
            _value(file, of)
    return None


def _scalar(file: BinaryIO, form: str) -> Any:
    size = struct.calcsize(f"<{form}")
    return struct.unpack(f"<{form}", file.read(size))[0]


def _count(file: BinaryIO) -> int:
    count = _scalar(file, "Q")
    if count > _MOST_ENTRIES:
        raise ValueError(f"{count} entries")
    return count


def _string(file: BinaryIO) -> bytes:
    length = _scalar(file, "Q")
    if length > _MOST_BYTES:
        raise ValueError(f"a text of {length} bytes")
    text = file.read(length)
    if len(text) < length:
        raise ValueError("it ends in the middle of its header")
    return text
