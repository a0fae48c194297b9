"""A safetensors file piece by piece: the bytes of `safetensors.torch.save`, with no copy of the whole.

The library makes the file in memory, twice, and holds Python's lock meanwhile: of the 150 ms that 75 MiB take
it, no other thread gets a turn for 70. A sweep writes gigabytes while it trains, and the thread that trains
waited for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch
from gshare.agent.train.flat_tensors import FlatTensors, Raw
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
    found = list(tensors.raw() if isinstance(tensors, FlatTensors) else map(_raw, tensors, tensors.values()))
    if unknown := [one for one in found if one.dtype not in _NAMES]:
        raise KeyError(f"{unknown[0].name}: {unknown[0].dtype} is no dtype of a checkpoint")
    ordered = sorted(found, key=lambda one: (_ORDER.index(one.dtype), one.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for one in ordered:
        end = at + len(one.data)
        entries[one.name] = {
            "dtype": _NAMES[one.dtype],
            "shape": one.shape,
            "data_offsets": [at, end],
        }
        at = end
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGN)
    gathered: list[bytes | memoryview] = [len(header).to_bytes(8, "little"), header]
    size = 8 + len(header)
    for one in ordered:
        for start in range(0, len(one.data), PIECE_BYTES):
            part = one.data[start : start + PIECE_BYTES]
            if size + len(part) > PIECE_BYTES:
                yield b"".join(gathered)
                gathered, size = [], 0
            gathered.append(part)
            size += len(part)
    yield b"".join(gathered)


def _raw(name: str, tensor: Tensor) -> Raw:
    assert tensor.is_contiguous()
    data = tensor.detach().view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
    return Raw(name, tensor.dtype, tuple(tensor.shape), data)
