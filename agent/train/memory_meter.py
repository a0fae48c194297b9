"""How much memory training needs at most, on a GPU by its allocator, elsewhere by counting tensors.

meter = make_meter(device)
with meter.measuring():
    …                       # raises torch.OutOfMemoryError beyond `limit_bytes`
    meter.phase_ended()
meter.peak_bytes()
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from gshare.agent.service.environment import pages_are_mapped
from torch.utils._python_dispatch import TorchDispatchMode

#: CUDA's allocator hands out multiples of it.
_BLOCK = 512


class Meter(Protocol):
    """One block at a time is measured."""

    def measuring(self) -> Any:
        """A context manager: the peak starts anew, and what the block has left behind is free after it."""
        ...

    def phase_ended(self) -> None:
        """To be said after each step of a block: what captured passes keep is told from the rest by it. A
        step in which passes are captured needs one beside it in which they are launched."""
        ...

    def peak_bytes(self) -> int:
        """The most that the last block needed of the device, what was there before included."""
        ...

    def elsewhere(self) -> Any:
        """A context manager for what is copied into main memory: it takes none of the device's."""
        ...

    def wait(self) -> None:
        """Until the device has done what was asked of it."""
        ...


class CudaMeter:
    """What must be reserved: the most that tensors take at once, and beside it all that captured passes keep.

    torch reserves more where there is more: free blocks between tensors that stay. With pages mapped where
    they are needed (`trainer_environment`) it gives them back before it runs out, so they are no need; what
    they come to hangs on the order in which tensors came and went (on an H200 up to a fifth, and no model of
    the pass told it). Graphs keep their pool as long as they live, and passes that are launched have tensors
    beside it.

    Where the user has the allocator keep its blocks whole, what it reserves at most is the need. Of graphs
    that were there before a block begins their tensors count.

    Free blocks are given back before a block begins. With them goes what a guard has claimed; the ledger's
    row stays, and so does the cap.
    """

    def __init__(self, device: torch.device) -> None:
        assert device.index is not None
        self._device = device
        self._tensors = self._graphs = self._graphs_before = self._reserved = 0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        self._empty()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._tensors = self._reserved = 0
        self._graphs = self._graphs_before = self._kept_by_graphs()
        try:
            yield
        finally:
            self._empty()

    def phase_ended(self) -> None:
        graphs = self._kept_by_graphs()
        if graphs > self._graphs:  # captured in this phase: its peak has the tensors of the capture in it
            self._graphs = graphs
        else:
            self._tensors = max(self._tensors, torch.cuda.max_memory_allocated(self._device))
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        if not pages_are_mapped():
            return self._reserved
        return self._tensors + self._graphs - self._graphs_before

    def _kept_by_graphs(self) -> int:
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == self._device.index and tuple(segment["segment_pool_id"]) != (0, 0)
        )

    def elsewhere(self) -> Any:
        return nullcontext()

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
        self._counter: _Counter | None = None

    @contextmanager
    def measuring(self) -> Iterator[None]:
        gc.collect()
        with _Counter(self._resident, self._limit) as counter:
            self._counter = counter
            try:
                yield
            finally:
                self._peak, self._counter = counter.peak, None

    def phase_ended(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return self._peak

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        assert self._counter is not None, "in a block that is measured"
        self._counter.counting = False
        try:
            yield
        finally:
            self._counter.counting = True

    def wait(self) -> None:
        pass


class _Counter(TorchDispatchMode):
    """Sees the result of every operation; `weakref` tells when its memory is gone."""

    def __init__(self, resident: int, limit: int) -> None:
        super().__init__()
        self.live = self.peak = resident
        self.counting = True
        self._limit = limit
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.counting:
            return result
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
    if isinstance(tree, torch.Tensor):
        yield tree.untyped_storage()
    elif isinstance(tree, (tuple, list)):
        for one in tree:
            yield from _storages(one)
    elif isinstance(tree, dict):
        yield from _storages(list(tree.values()))


def make_meter(device: torch.device, *, resident_bytes: int, limit_bytes: int = 0) -> Meter:
    """The device's own meter. A GPU's allocator knows what is resident, and has the guard's cap."""
    if device.type == "cuda":
        return CudaMeter(device)
    return CountingMeter(resident_bytes=resident_bytes, limit_bytes=limit_bytes)
