"""A safetensors file piece by piece: the bytes of `safetensors.torch.save`, with no copy of the whole.

The library makes the file in memory, twice, and holds Python's lock meanwhile: of the 150 ms that 75 MiB take
it, no other thread gets a turn for 70. A sweep writes gigabytes while it trains, and the thread that trains
waited for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

#: Pieces are joined up to this size: hashing and writing give Python's lock back once a piece, and a thread
#: that asks for it again waits for up to 5 ms.
PIECE_BYTES = 8 << 20
#: By safetensors' name, in the order in which a file has them: the widest first.
_NAMES = {torch.float32: "F32", torch.uint8: "U8"}
_ORDER = list(_NAMES)
_ALIGN = 8  # of the header's length


def file_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes]:
    """The file of `tensors` (float32 and uint8, on the host, contiguous), its metadata `{"format": "pt"}`.

    The same tensors give the same bytes. KeyError: a tensor of another dtype.
    """
    ordered = sorted(tensors.items(), key=lambda item: (_ORDER.index(_known(item[1])), item[0]))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in ordered:
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGN)
    gathered: list[bytes | memoryview] = [len(header).to_bytes(8, "little"), header]
    size = 8 + len(header)
    for _, tensor in ordered:
        for start in range(0, tensor.nbytes, PIECE_BYTES):
            part = _bytes(tensor)[start : start + PIECE_BYTES]
            if size + len(part) > PIECE_BYTES:
                yield b"".join(gathered)
                gathered, size = [], 0
            gathered.append(part)
            size += len(part)
    yield b"".join(gathered)


def _known(tensor: Tensor) -> torch.dtype:
    if tensor.dtype not in _NAMES:
        raise KeyError(f"{tensor.dtype} is no dtype of a checkpoint")
    return tensor.dtype


def _bytes(tensor: Tensor) -> memoryview:
    assert tensor.is_contiguous()
    return tensor.detach().numpy().reshape(-1).view(np.uint8).data
