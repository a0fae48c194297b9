"""Two small cells of `benchmarks/gpu.py`: what LoRA adds to a GEMM, and what an adapter adds to memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gpu_arms import Trainer, graph_seconds
from gpu_workload import Workload
from gshare.agent.base.weights import Base
from gshare.agent.train.device_engine import DeviceEngine
from gshare.agent.train.part import Part, Row
from gshare.kernels.gemm_cuda import CudaGemm
from gshare.kernels.grouped_lora_backward_triton import lora_ds, lora_dx
from gshare.kernels.grouped_lora_grads_triton import lora_grads
from gshare.kernels.grouped_lora_triton import lora_expand, lora_shrink
from gshare.kernels.lora_tables import GroupShape, LoraWorkspace, PassAdapter, PassTables
from gshare.kernels.triton_backend import TritonBackend

#: LoRAFusion's setting: four adapters of 768 rows each.
ADAPTERS, ROWS, RANK = 4, 768, 16
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096))


def lora_path() -> dict[str, Any]:
    """Kernel time of base product plus LoRA over the base product alone, per (in, out) shape."""
    device = torch.device("cuda")
    found = {}
    for inputs, outputs in SHAPES:
        tokens = ADAPTERS * ROWS
        gemm, workspace = CudaGemm(), LoraWorkspace(device)
        tables = PassTables(
            [GroupShape(inputs, (outputs,))],
            device,
            max_adapters=ADAPTERS,
            max_sequences=ADAPTERS,
            max_blocks=tokens // 64 + ADAPTERS,
            max_rank=RANK,
        )
        each = RANK * (inputs + outputs)
        adapters = [
            PassAdapter(
                ((n * ROWS, (n + 1) * ROWS),),
                2.0,
                np.array([[n * each, n * each + RANK * inputs, RANK]], dtype=np.int64),
            )
            for n in range(ADAPTERS)
        ]
        tables.refresh(adapters)
        flat = torch.randn(ADAPTERS * each, device=device).bfloat16() * 0.02
        grads = torch.zeros(ADAPTERS * each, device=device)
        x = torch.randn(tokens, inputs, device=device).bfloat16()
        dy = torch.randn(tokens, outputs, device=device).bfloat16()
        w = torch.randn(outputs, inputs, device=device).bfloat16() * 0.02
        s = lora_shrink(x, flat, tables, 0, workspace)

        def forward(x=x, w=w, flat=flat, tables=tables, workspace=workspace, gemm=gemm) -> None:
            y = gemm.linear(x, w)
            lora_expand(y, lora_shrink(x, flat, tables, 0, workspace), flat, tables, 0)

        def backward(
            x=x, w=w, dy=dy, s=s, flat=flat, grads=grads, tables=tables, workspace=workspace, gemm=gemm
        ) -> None:
            dx = gemm.linear_dx(dy, w)
            ds = lora_ds(dy, flat, tables, 0, workspace)
            lora_dx(dx, ds, flat, tables, 0)
            lora_grads(x, dy, s, ds, grads, tables, 0)

        bare = graph_seconds(lambda x=x, w=w, gemm=gemm: gemm.linear(x, w))
        bare_dx = graph_seconds(lambda dy=dy, w=w, gemm=gemm: gemm.linear_dx(dy, w))
        found[f"{inputs}->{outputs}"] = {
            "forward": graph_seconds(forward) / bare,
            "backward": graph_seconds(backward) / bare_dx,
            "gemm_us": bare * 1e6,
            "gemm_dx_us": bare_dx * 1e6,
        }
    return found


def adapter_memory(base: Base) -> dict[str, Any]:
    """Peak of a step with 9 adapters less that with 8, at equal tokens, over what an adapter must hold."""
    peaks, total = {}, 9 * 8 * 24
    for count in (8, 9):
        engine = DeviceEngine(base, TritonBackend())
        load = Workload(count, 1, base.config.vocab_size)
        trainer = Trainer(engine, load, range(count))
        length = total // count
        parts = [
            Part(a, [Row(np.full(length, 7, dtype=np.int32), np.ones(length, dtype=bool))], 0, length - 1)
            for a in trainer.adapters
        ]
        for _ in range(2):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            pending, verdicts = trainer.step(parts)
            pending.losses()
            verdicts.wait()
        peaks[count] = torch.cuda.max_memory_allocated()
        elements = engine.arena.slot(trainer.adapters[0].name).length
        trainer.close()
        del engine, trainer, parts, pending, verdicts
        torch.cuda.empty_cache()
    # bf16 copy, fp32 master, gradient, two moments
    must = elements * (2 + 4 + 4 + 8)
    return {
        "one_more_mb": (peaks[9] - peaks[8]) / 2**20,
        "must_mb": must / 2**20,
        "ratio": (peaks[9] - peaks[8]) / must,
    }
