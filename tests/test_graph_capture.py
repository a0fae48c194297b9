"""CUDA graphs as the engine captures them: on a device, while another thread waits for copies."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from gshare.agent.train import graph_capture
from gshare.agent.train.graph_capture import GraphCapture
from gshare.agent.train.host_copy import copied
from gshare.agent.train.memory_meter import CudaMeter

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
def test_graphs_are_captured_again_when_none_is_left_and_whoever_waits_for_copies() -> None:
    device = torch.device("cuda")
    x, captures = torch.zeros(1 << 22, device=device), GraphCapture(device)
    waiting: queue.Queue[tuple[torch.Tensor, float, Callable[[], None]] | None] = queue.Queue()
    wrong: list[object] = []

    def write() -> None:  # as the threads do that write checkpoints
        while (one := waiting.get()) is not None:
            copy, value, wait = one
            try:
                wait()
                if not bool((copy == value).all()):
                    wrong.append(value)
            except Exception as error:
                wrong.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    for number in range(20):
        (copy,), wait = copied([x])
        waiting.put((copy, float(number), wait))
        captured = captures.capture(lambda: x.add_(1).mul(2.0))
        assert captured is not None
        graph, output = captured
        graph.replay()
        assert float(output[0]) == 2.0 * (number + 1)
        del graph, output, captured  # none is left, as when the arena has grown
    waiting.put(None)
    thread.join(60)
    assert wrong == []
    assert float(x[-1]) == 20.0


@needs_cuda
def test_the_meter_tells_what_graphs_keep_from_the_tensors_of_launched_passes() -> None:
    """A pass that takes 64 MiB beside 32 that stay: launched, captured, replayed."""
    device, mib = torch.device("cuda", 0), 1 << 20
    meter, captures = CudaMeter(device), GraphCapture(device)
    before = torch.cuda.memory_allocated(device)

    def launch() -> torch.Tensor:
        return torch.ones(64 * mib, dtype=torch.uint8, device=device)[:1].clone()

    with meter.measuring():
        stays = torch.zeros(32 * mib, dtype=torch.uint8, device=device)
        launch()
        meter.phase_ended()
        assert meter.peak_bytes() - before == pytest.approx((32 + 64) * mib, abs=mib)
        captured = captures.capture(launch)
        assert captured is not None
        meter.phase_ended()
        captured[0].replay()
        meter.phase_ended()
        # Pools grow by 20 MiB, and small tensors have one of their own.
        assert 64 * mib <= meter.peak_bytes() - before - (32 + 64) * mib <= (64 + 24) * mib
        assert len(stays) == 32 * mib
        del captured, captures, stays


@needs_cuda
def test_captures_that_are_gone_leave_no_memory() -> None:
    """cuBLAS's workspace for the stream they are made on is in nobody's graph."""
    device = torch.device("cuda", 0)
    x = torch.ones(256, 256, device=device, dtype=torch.bfloat16)

    def left() -> tuple[int, int]:
        captures = GraphCapture(device)
        captured = captures.capture(lambda: x @ x)
        assert captured is not None
        captured[0].replay()
        del captured, captures
        gc.collect()
        torch.cuda.empty_cache()
        pools = [
            s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)
        ]
        return torch.cuda.memory_allocated(device), sum(pools)

    first = left()
    assert first[1] == 0
    for _ in range(3):
        assert left() == first


def test_a_stream_that_had_no_memory_to_be_made_ready_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the workspace would be made in the next capture. A stand-in for CUDA's streams, on any machine."""
    made: list[torch.dtype] = []
    memory = [False]

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if not memory[0]:
            raise torch.OutOfMemoryError("no memory for a workspace")
        made.append(a.dtype)
        return a

    monkeypatch.setattr(graph_capture, "_known", threading.local())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "mm", product)
    device = torch.device("cpu")
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            graph_capture._stream(device)
    memory[0] = True
    stream = graph_capture._stream(device)
    assert made == [torch.bfloat16, torch.float32]
    assert graph_capture._stream(device) is stream
    assert len(made) == 2
