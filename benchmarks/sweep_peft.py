"""The PEFT arm of `benchmarks/sweep.py`: a sample of configurations, one after another, extrapolated to all.

transformers + PEFT (sdpa, torch.optim.AdamW, clipping at the spec's norm) on the rows of the same jobs,
padded to the longest of a batch. The base is loaded once and not timed, the first step of each configuration
is not timed, and there is no evaluation and no save: all of that is in PEFT's favour.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gshare.agent.jobs.spec import JobRequest
from gshare.agent.train.job_data import JobData
from gshare.agent.train.part import Row

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Of the first step's loss, relative; B is zero there, so it is the base's, whatever A was drawn.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}


@dataclass(frozen=True)
class Sampled:
    """One configuration: seconds of `steps` steps, and the loss of the one before them."""

    name: str
    steps: int
    seconds: float
    first_loss: float


def run_peft(
    model: Path, base_dtype: str, device: str, jobs: Sequence[JobRequest], steps: int
) -> list[Sampled]:
    """Each of `jobs` for one untimed step and `steps` timed ones."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    where = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    base: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=DTYPES[base_dtype], attn_implementation="sdpa"
    )
    base.to(where)
    found = []
    for job in jobs:
        spec, data = job.spec, JobData.open(job)
        config = LoraConfig(
            r=spec.r,
            lora_alpha=int(spec.lora_alpha or 2 * spec.r),
            target_modules=list(spec.targets),
            task_type="CAUSAL_LM",
        )
        net = get_peft_model(base, config)
        net.train()
        parameters = [p for p in net.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=spec.learning_rate, weight_decay=spec.weight_decay)
        first, started = 0.0, 0.0
        for step in range(steps + 1):
            if step == 1:
                started = _now(where)
            ids, labels, mask = _padded([row for micro in data.micro_batches(step) for row in micro], where)
            loss = net(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, spec.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step == 0:
                first = float(loss.detach())
        found.append(Sampled(spec.name, steps, _now(where) - started, first))
        base = net.unload()
    return found


def _padded(rows: Sequence[Row], where: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, labels, mask), each (rows, longest)."""
    longest = max(len(row.tokens) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        tokens = torch.tensor(row.tokens, dtype=torch.int64)
        ids[i, : len(tokens)] = tokens
        labels[i, : len(tokens)] = torch.where(torch.tensor(row.trained), tokens, -100)
        mask[i, : len(tokens)] = 1
    return ids.to(where), labels.to(where), mask.to(where)


def _now(where: torch.device) -> float:
    if where.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
