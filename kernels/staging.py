"""Host tables copied to device memory that stays where it is: one upload a refresh.

A captured CUDA graph reads addresses, so what changes from pass to pass lies in one buffer that is written
again in place. Two pinned host buffers take turns: the next pass is laid out while the copy of the last one
may still be waiting for the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

_TORCH = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32, "uint8": torch.uint8}


class Staging:
    """Named sections of one device buffer; `device[name]` are its tensors, valid as long as this object."""

    def __init__(self, sections: Mapping[str, tuple[tuple[int, ...], str]], device: torch.device) -> None:
        """`sections`: name → (shape, dtype name)."""
        self._places: dict[str, tuple[slice, tuple[int, ...], np.dtype]] = {}
        at = 0
        for name, (shape, dtype) in sections.items():
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            self._places[name] = (slice(at, at + nbytes), shape, np.dtype(dtype))
            at += -(-nbytes // 16) * 16
        self._host = [torch.zeros(at, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._buffer = torch.zeros(at, dtype=torch.uint8, device=device)
        self.device = {
            name: self._buffer[place].view(_TORCH[dtype.name]).view(shape)
            for name, (place, shape, dtype) in self._places.items()
        }

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def host(self) -> dict[str, np.ndarray]:
        """Views to fill before `upload`; they hold what was there two uploads ago. Waits for that upload."""
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        host = self._host[self._turn].numpy()
        return {
            name: host[place].view(dtype).reshape(shape)
            for name, (place, shape, dtype) in self._places.items()
        }

    def upload(self) -> None:
        """Copy what `host` was filled with, in stream order."""
        self._buffer.copy_(self._host[self._turn], non_blocking=True)
        if self._buffer.is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._copied[self._turn] = event
        self._turn = 1 - self._turn
