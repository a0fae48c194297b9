"""Small tables on their way to the device and back, without waiting for it.

A captured CUDA graph reads addresses, so what changes from pass to pass lies in one buffer that is written
again in place. Two pinned host buffers take turns: the next pass is laid out while the copy of the last one
may still be waiting for the device. What the host wants to know comes back the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

_TORCH = {
    "int64": torch.int64,
    "int32": torch.int32,
    "float64": torch.float64,
    "float32": torch.float32,
    "uint8": torch.uint8,
}
#: Sections start at multiples of this many bytes: Triton compiles a pointer that is one as a case of its own.
_ALIGN = 16
#: Smallest pinned buffer that results come back in; larger ones are powers of two.
_LEAST_BYTES = 4096


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class Staging:
    """Named sections of one device buffer; `device[name]` are its tensors, valid as long as this object."""

    def __init__(self, sections: Mapping[str, tuple[tuple[int, ...], str]], device: torch.device) -> None:
        """`sections`: name → (shape, dtype name)."""
        places: dict[str, tuple[slice, tuple[int, ...], np.dtype]] = {}
        at = 0
        for name, (shape, dtype) in sections.items():
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            places[name] = (slice(at, at + nbytes), shape, np.dtype(dtype))
            at += _aligned(nbytes)
        pinned = device.type == "cuda"
        self._host = [torch.zeros(at, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._views = [
            {
                name: host.numpy()[place].view(dtype).reshape(shape)
                for name, (place, shape, dtype) in places.items()
            }
            for host in self._host
        ]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._buffer = torch.zeros(at, dtype=torch.uint8, device=device)
        self.device = {
            name: self._buffer[place].view(_TORCH[dtype.name]).view(shape)
            for name, (place, shape, dtype) in places.items()
        }
        #: Which of the two host buffers `host` gives.
        self.turn = 0

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def host(self) -> Mapping[str, np.ndarray]:
        """Views to fill before `upload`; they hold what was there two uploads ago. Waits for that upload."""
        copied = self._copied[self.turn]
        if copied is not None:
            copied.synchronize()
        return self._views[self.turn]

    def upload(self) -> None:
        """Copy what `host` was filled with, in stream order."""
        self._buffer.copy_(self._host[self.turn], non_blocking=True)
        if self._buffer.is_cuda:
            copied = self._copied[self.turn]
            if copied is None:
                copied = self._copied[self.turn] = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self._buffer.device))
        self.turn = 1 - self.turn


class Readback:
    """Copies of small results in pinned memory, made in stream order; what was read is used again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: defaultdict[int, list[tuple[torch.Tensor, torch.cuda.Event]]] = defaultdict(list)

    def fetch(self, *tensors: torch.Tensor) -> Fetched:
        """Starts copying; what the tensors hold afterwards does not matter."""
        if self.device.type != "cuda":
            return Fetched(self, [tensor.clone() for tensor in tensors])
        buffer, done = self._take(tensors)
        copies, at = [], 0
        for tensor in tensors:
            copy = buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor, non_blocking=True))
            at += _aligned(tensor.nbytes)
        done.record(torch.cuda.current_stream(self.device))
        return Fetched(self, copies, buffer, done)

    def reserve(self, *tensors: torch.Tensor) -> None:
        """See that a `fetch` of such tensors finds its memory: for one behind what cannot be undone."""
        if self.device.type == "cuda":
            self.give_back(*self._take(tensors))

    def _take(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.cuda.Event]:
        needed = sum(_aligned(tensor.nbytes) for tensor in tensors)
        nbytes = max(1 << (needed - 1).bit_length(), _LEAST_BYTES)
        free = self._free[nbytes]
        if free:
            return free.pop()
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()

    def give_back(self, buffer: torch.Tensor, done: torch.cuda.Event) -> None:
        self._free[buffer.numel()].append((buffer, done))


class Fetched:
    """Results under way. Dropping it unread costs its buffer and nothing else."""

    def __init__(
        self,
        owner: Readback,
        copies: list[torch.Tensor],
        buffer: torch.Tensor | None = None,
        done: torch.cuda.Event | None = None,
    ) -> None:
        self._owner, self._copies, self._buffer, self._done = owner, copies, buffer, done

    def read(self) -> list[torch.Tensor]:
        """Waits; CPU tensors in the order of `fetch`, the caller's own."""
        if self._buffer is not None and self._done is not None:
            self._done.synchronize()
            self._copies = [copy.clone() for copy in self._copies]
            self._owner.give_back(self._buffer, self._done)
            self._buffer = None
        return self._copies
