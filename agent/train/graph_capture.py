"""Capturing launches as a CUDA graph while other threads use the device.

Not by `torch.cuda.graph`: that empties torch's caches before each capture, of device memory (allocated
again by the next pass that is launched) and of pinned memory (pinned again by the next checkpoint), and by
default no thread may wait for a copy while one captures, as those do that write checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gshare.agent.train.out_of_memory import is_out_of_memory


class GraphCapture:
    """Captures one after the other, on a stream of its own; all graphs share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
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
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        pool = () if self._first is None else (self._first.pool(),)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(*pool, capture_error_mode="thread_local")
            try:
                output = launch()
            finally:
                graph.capture_end()
        if self._first is None:
            self._first = graph
        return graph, output
