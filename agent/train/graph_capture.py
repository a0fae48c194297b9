"""Capturing launches as a CUDA graph while other threads use the device.

Not by `torch.cuda.graph`: that empties torch's caches before each capture, of device memory (allocated
again by the next pass that is launched) and of pinned memory (pinned again by the next checkpoint), and by
default no thread may wait for a copy while one captures, as those do that write checkpoints.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from gshare.agent.train.out_of_memory import is_out_of_memory

_known = threading.local()


class GraphCapture:
    """Captures one after the other, on this thread's stream for it; all graphs share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Whose memory the others share. It is kept: torch refuses a pool of which no graph is left, and all
        # graphs of an engine go when its arena grows.
        self._first: torch.cuda.CUDAGraph | None = None

    def capture(self, launch: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor] | None:
        """The graph, not yet run, and what `launch` gave, in its memory; None when there is no memory for it:
        graphs have memory of their own, which nothing else can use, beside what is kept for passes that are
        launched."""
        torch.cuda.synchronize(self._device)
        for again in (True, False):
            try:
                return self._try(launch)
            except Exception as error:
                if not is_out_of_memory(error):
                    # The end of a capture that was broken off may fail too, and is raised instead. For torch
                    # it is still under way then: no cache may be emptied.
                    if error.__context__ is not None and is_out_of_memory(error.__context__):
                        return None
                    raise
            if again:
                torch.cuda.empty_cache()  # what launched passes left: under a cap it counts
        return None

    def _try(self, launch: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        pool = () if self._first is None else (self._first.pool(),)
        with torch.cuda.stream(_stream(self._device)):
            graph.capture_begin(*pool, capture_error_mode="thread_local")
            try:
                output = launch()
            finally:
                graph.capture_end()
        if self._first is None:
            self._first = graph
        return graph, output


def _stream(device: torch.device) -> torch.cuda.Stream:
    """On which this thread captures, whoever asks.

    cuBLAS keeps a workspace for each stream and thread that it has worked for, for ever: 33 MiB as the
    trainer has it set. It is made here and not in a capture: in a graph's memory it would keep that from
    being given back, long after the graph.
    """
    streams: dict[torch.device, torch.cuda.Stream] = _known.__dict__.setdefault("streams", {})
    if device not in streams:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            for dtype in (torch.bfloat16, torch.float32):
                square = torch.zeros(64, 64, dtype=dtype, device=device)
                torch.mm(square, square)
        torch.cuda.synchronize(device)
        streams[device] = stream  # last: where there was no memory for it the next capture tries again
    return streams[device]
