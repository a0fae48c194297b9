"""How much memory an answer will take, from a model's config; and what `--dry-run --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gshare.agent.jobs.memory import (
    MemoryEstimate,
    ModelShape,
    estimate_generation,
)
from gshare.agent.jobs.spec import BaseDtype, JobRequest, RunSpec
from gshare.agent.service.registry import GpuRequest


def generation_estimate(
    model_dir: Path, adapter: Path | None, *, base_dtype: BaseDtype, prompt_tokens: int, new_tokens: int
) -> MemoryEstimate:
    """Of answering one prompt on a GPU; `adapter` is a directory in PEFT's layout."""
    from gshare.agent.base.config import read_config

    config = read_config(model_dir)
    weights = adapter / "adapter_model.safetensors" if adapter is not None else None
    return estimate_generation(
        ModelShape.of(config),
        base_dtype=base_dtype,
        device="cuda",
        prompt_tokens=prompt_tokens,
        positions=min(prompt_tokens + new_tokens, config.max_position_embeddings),
        adapter_bytes=weights.stat().st_size if weights is not None and weights.is_file() else 0,
    )


def dry_run_json(
    run: RunSpec,
    model_dir: Path,
    requests: Sequence[JobRequest],
    estimate: MemoryEstimate,
    gpu: GpuRequest | None,
) -> dict[str, Any]:
    """What `finetune --dry-run --json` prints, one object; amounts in bytes, the budget in MiB.

    `gpu` null: the run is on the CPU and reserves nothing. `reservation`: the `gpu run` that it would use.
    """
    return {
        "type": "dry_run",
        "model": run.model,
        "model_dir": str(model_dir),
        "base_dtype": run.base_dtype,
        "schedule": run.schedule,
        "adapters": [
            {"name": request.spec.name, "data": request.spec.data, "output_dir": request.spec.output_dir}
            for request in requests
        ],
        "gpu": None
        if gpu is None
        else {"budget_mb": gpu.budget_mb, "gpus": list(gpu.gpus), "reservation": gpu.inherit or None},
        "memory": {
            "device": estimate.device,
            "total_bytes": estimate.total,
            "parts": [
                {"name": part.name, "bytes": part.nbytes, "note": part.note, "host": part.host}
                for part in estimate.parts
            ],
        },
    }
