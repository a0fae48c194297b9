"""Packed against everything else on a GPU: workload W16 at three model sizes.

    python benchmarks/gpu.py [--cells 8b-bf16-n16 …] [--smollm2 DIR] [--out FILE] [--again]

A cell is one model, dtype and number of adapters, about a minute; cells already in FILE are kept, so a run
that was cut short is taken up by the same command. Workload: batch 1, lognormal lengths (median 170,
64–512), r = 16 on all linears, AdamW, loss on all tokens.

    floor       the base GEMMs and the head of as many tokens, forward and dX, one CUDA graph
    packed      gshare, all adapters in one pass; steady: after the first steps
    solo        gshare, the same jobs one after another
    ungrouped   packed with one LoRA launch an adapter and op
    no graphs, no overlap   packed with that switched off
    PEFT        transformers + PEFT, one job after another at its best settings; six processes; six under MPS

Gate: losses and bytes (weights and moments) of every arm equal solo's. When it fails the cell prints no ratio
and the exit code is 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_lora
import gpu_peft
from gpu_arms import (
    Trainer,
    UngroupedBackend,
    UngroupedEngine,
    differing,
    gemm_floor,
    outcomes,
    outcomes_alone,
    remember_initial_weights,
)
from gpu_workload import Workload, make_base, shape_config
from gshare.agent.base.weights import Base
from gshare.agent.train.device_engine import DeviceEngine
from gshare.kernels.numerics import NUMERICS
from gshare.kernels.triton_backend import TritonBackend

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Cell:
    model: str
    base_dtype: str
    adapters: int
    steps: int
    rehearsals: int  # the same steps before the timed ones: kernels, plans, then graphs
    gate: int  # steps after which packed and solo are compared


CELLS = {
    "8b-bf16-n1": Cell("llama-3.1-8b", "bf16", 1, 16, 2, 4),
    "8b-bf16-n4": Cell("llama-3.1-8b", "bf16", 4, 10, 2, 3),
    "8b-bf16-n16": Cell("llama-3.1-8b", "bf16", 16, 12, 1, 3),
    "8b-bf16-n32": Cell("llama-3.1-8b", "bf16", 32, 8, 1, 2),
    "8b-nf4-n16": Cell("llama-3.1-8b", "nf4", 16, 10, 1, 2),
    "qwen0.5b-bf16-n1": Cell("qwen2.5-0.5b", "bf16", 1, 24, 2, 4),
    "qwen0.5b-bf16-n16": Cell("qwen2.5-0.5b", "bf16", 16, 24, 2, 4),
    "smollm2-bf16-n1": Cell("smollm2", "bf16", 1, 24, 2, 4),
    "smollm2-bf16-n16": Cell("smollm2", "bf16", 16, 24, 2, 4),
}
#: Cells of gpu_lora.py.
SMALL_CELLS = ("lora-path", "8b-bf16-memory")
PEFT_CELLS = ("8b-bf16-peft", "8b-bf16-peft-six", "8b-bf16-peft-six-mps")

ALL = ("lora-path", *CELLS, "8b-bf16-memory", *PEFT_CELLS)


def versions() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "numerics": str(NUMERICS),
    }


def run_cell(cell: Cell, base: Base) -> dict[str, Any]:
    """Every gshare arm of a cell, and whether their bytes agree."""
    vocabulary = base.config.vocab_size
    load = Workload(cell.adapters, cell.steps, vocabulary)
    short = Workload(cell.adapters, cell.gate, vocabulary)
    everyone = range(cell.adapters)
    tokens = load.mean_tokens(0)
    floor = tokens / gemm_floor(base, tokens)

    engine = DeviceEngine(base, TritonBackend())
    trainer = Trainer(engine, load, everyone)
    cold = trainer.run()
    for _ in range(cell.rehearsals - 1):
        trainer.run()
    main = trainer.run()
    report: dict[str, Any] = {
        "tokens_per_step": tokens,
        "floor": floor,
        "packed": main.rate,
        "packed_step_ms": [round(s * 1000, 2) for s in main.step_seconds],
        "cold": cold.rate,
        "peak_mb": main.peak_mb,
        "no_overlap": trainer.run(overlap=False).rate,
    }
    trainer.close()
    alone = outcomes_alone(engine, short)
    report["solo"] = steady_solo(engine, load) if cell.adapters > 1 else main.rate
    report["differing"] = {"packed": differing(alone, outcomes(engine, short, everyone))}
    report["replays"] = engine.replays
    backend = engine.backend
    assert isinstance(backend, TritonBackend)
    report["plans"] = sorted({*backend.gemm.plans().values()})
    captured = engine.replays > 0
    del engine, trainer
    release()

    if captured:
        eager = DeviceEngine(base, TritonBackend())
        eager.graphs = False
        report["no_graphs"] = steady(eager, load)
        report["differing"]["no graphs"] = differing(alone, outcomes(eager, short, everyone))
        del eager
        release()
    if cell.adapters == 16:
        one_by_one = UngroupedEngine(base, UngroupedBackend())
        few = Workload(cell.adapters, 6, vocabulary)
        report["ungrouped"] = steady(one_by_one, few, cell.rehearsals)
        report["differing"]["ungrouped"] = differing(alone, outcomes(one_by_one, short, everyone))
        del one_by_one
        release()
    report["of_floor"] = report["packed"] / floor
    report["gate"] = not any(report["differing"].values())
    return report


def steady(engine: DeviceEngine, load: Workload, rehearsals: int = 1) -> float:
    """Tokens per second of the workload after it was run `rehearsals` times."""
    trainer = Trainer(engine, load, range(load.adapters))
    try:
        for _ in range(rehearsals):
            trainer.run()
        return trainer.run().rate
    finally:
        trainer.close()


def steady_solo(engine: DeviceEngine, load: Workload) -> float:
    """Tokens per second of the first two jobs one after another, their shapes met before."""
    tokens = seconds = 0.0
    for number in (0, 1):
        trainer = Trainer(engine, load, [number])
        for _ in range(2):
            trainer.run()
        one = trainer.run()
        trainer.close()
        tokens, seconds = tokens + one.tokens, seconds + one.seconds
    return tokens / seconds


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def run_peft(name: str, results: dict[str, Any]) -> dict[str, Any]:
    load = Workload(16, 16, shape_config("llama-3.1-8b").vocab_size)
    if name == "8b-bf16-peft":
        return gpu_peft.sequential("llama-3.1-8b", load, 25.0)
    settings = results.get("8b-bf16-peft", {}).get("settings", "sdpa, checkpointing off")
    return gpu_peft.six("llama-3.1-8b", load, settings, 20.0, mps=name.endswith("mps"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cells", nargs="*", default=ALL)
    parser.add_argument("--smollm2", default="", help="checkpoint directory for the cells with real weights")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu.json")
    parser.add_argument("--again", action="store_true", help="measure cells that FILE has already")
    given = parser.parse_args()
    unknown = set(given.cells) - set(ALL)
    if unknown:
        parser.error(f"unknown cells {sorted(unknown)}; known: {', '.join(ALL)}")
    results: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    remember_initial_weights()
    base: tuple[tuple[str, str], Base] | None = None
    device = torch.device("cuda")
    for name in given.cells:
        if name in results and not given.again:
            continue
        started = time.perf_counter()
        if name in PEFT_CELLS:
            base = None
            release()
            found = run_peft(name, results)
        elif name == "lora-path":
            found = gpu_lora.lora_path()
        else:
            cell = CELLS[name] if name in CELLS else CELLS["8b-bf16-n16"]
            key = (cell.model, cell.base_dtype)
            if cell.model == "smollm2" and not given.smollm2:
                print(f"{name}: left out; give --smollm2 DIR", file=sys.stderr)
                continue
            if base is None or base[0] != key:
                base = None
                release()
                where = given.smollm2 if cell.model == "smollm2" else cell.model
                base = (key, make_base(where, cell.base_dtype, device))
            found = run_cell(cell, base[1]) if name in CELLS else gpu_lora.adapter_memory(base[1])
        results[name] = found | {"versions": versions(), "wall_s": round(time.perf_counter() - started, 1)}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(results, indent=1) + "\n")
        print(line(name, results[name]), flush=True)
    print(table(results))
    return 0 if all(cell.get("gate", True) for cell in results.values()) else 1


def line(name: str, cell: dict[str, Any]) -> str:
    if name == "lora-path":
        shapes = [
            f"{shape} ×{found['forward']:.3f} / ×{found['backward']:.3f}"
            for shape, found in cell.items()
            if "->" in shape
        ]
        return f"{name} (forward / backward over the bare GEMM): {', '.join(shapes)}"
    if name == "8b-bf16-memory":
        return (
            f"{name}: one more adapter {cell['one_more_mb']:,.0f} MiB, ×{cell['ratio']:.3f} what it must hold"
        )
    if "floor" not in cell:
        return f"{name}: {cell['tokens_per_s']:,.0f} tokens/s ({cell['settings']})"
    if not cell["gate"]:
        return f"{name}: GATE FAILED, no ratios: {cell['differing']}"
    arms = {arm: cell[arm] for arm in ("solo", "cold", "no_overlap", "no_graphs", "ungrouped") if arm in cell}
    rest = ", ".join(f"{arm} {rate / cell['packed']:.2f}×" for arm, rate in arms.items())
    return (
        f"{name}: {cell['packed']:,.0f} tokens/s, {cell['of_floor']:.3f} of the floor {cell['floor']:,.0f}, "
        f"{rest}, peak {cell['peak_mb']:,.0f} MiB, {cell['wall_s']:.0f} s"
    )


def table(results: dict[str, Any]) -> str:
    lines = [line(name, cell) for name, cell in results.items()]
    main_cell = results.get("8b-bf16-n16")
    if main_cell and main_cell["gate"]:
        for name in PEFT_CELLS:
            if name in results:
                ratio = main_cell["packed"] / results[name]["tokens_per_s"]
                lines.append(f"8b-bf16-n16 ÷ {name}: {ratio:.2f}×")
    return "\n".join(["", *lines])


if __name__ == "__main__":
    sys.exit(main())
