"""How much memory tensors take at most, on a GPU by its allocator, elsewhere by counting them.

meter = make_meter(device)
with meter.measuring():
    …                       # raises torch.OutOfMemoryError beyond `limit_bytes`
meter.peak_bytes()
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: CUDA's allocator hands out multiples of it.
_BLOCK = 512


class Meter(Protocol):
    """One block at a time is measured."""

    def measuring(self) -> Any:
        """A context manager: the peak starts anew, and what the block has left behind is free after it."""
        ...

    def peak_bytes(self) -> int:
        """The most that was taken from the device in the last block, what was there before included."""
        ...

    def wait(self) -> None:
        """Until the device has done what was asked of it."""
        ...


class CudaMeter:
    """What torch's allocator has reserved at most: its blocks, not only the tensors in them.

    Its free blocks are given back before a block begins, so that the peak is that of the block. With them
    goes what a guard has claimed; the ledger's row stays, and so does the cap.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def measuring(self) -> Iterator[None]:
        self._empty()
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        finally:
            self._empty()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def _empty(self) -> None:
        gc.collect()  # engines and their graphs are cycles
        torch.cuda.empty_cache()


class CountingMeter:
    """Every tensor's memory counted from its making to its end, as if it came from an allocator with
    `limit_bytes` (0: no limit) in which `resident_bytes` are taken already.

    What an operation uses inside itself is not seen.
    """

    def __init__(self, *, resident_bytes: int = 0, limit_bytes: int = 0) -> None:
        self._resident = resident_bytes
        self._limit = limit_bytes
        self._peak = resident_bytes

    @contextmanager
    def measuring(self) -> Iterator[None]:
        gc.collect()
        with _Counter(self._resident, self._limit) as counter:
            try:
                yield
            finally:
                self._peak = counter.peak

    def peak_bytes(self) -> int:
        return self._peak

    def wait(self) -> None:
        pass


class _Counter(TorchDispatchMode):
    """Sees the result of every operation; `weakref` tells when its memory is gone."""

    def __init__(self, resident: int, limit: int) -> None:
        super().__init__()
        self.live = self.peak = resident
        self._limit = limit
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A result may share its memory with an argument (a view, an update in place): that is not new, and
        # where it is from before the block it is a part of what is resident.
        before = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in before and storage._cdata not in self._known:
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        if self._limit and self.live + size > self._limit:
            raise torch.OutOfMemoryError(f"{size} bytes do not fit beside {self.live} of {self._limit}")
        self.live += size
        self.peak = max(self.peak, self.live)

        def gone(_: object) -> None:
            self.live -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    return (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def make_meter(device: torch.device, *, resident_bytes: int, limit_bytes: int = 0) -> Meter:
    """The device's own meter. A GPU's allocator knows what is resident, and has the guard's cap."""
    if device.type == "cuda":
        return CudaMeter(device)
    return CountingMeter(resident_bytes=resident_bytes, limit_bytes=limit_bytes)
