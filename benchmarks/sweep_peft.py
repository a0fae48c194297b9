"""The PEFT arm of `benchmarks/sweep.py`: a sample of configurations, one after another, extrapolated to all.

transformers + PEFT (sdpa, torch.optim.AdamW, clipping at the spec's norm) on the rows of the same jobs,
padded to the longest of a batch. The base is loaded once and not timed, the first step of each configuration
is not timed, and there is no evaluation and no save: all of that is in PEFT's favour. So is the process, one
of its own without what gshare sets in its environment: in the benchmark's a step took 1.6 times as long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from gshare.agent.jobs.spec import JobRequest

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
    """Each of `jobs` for one untimed step and `steps` timed ones. CalledProcessError when it fails."""
    from gshare.agent.service.environment import trainer_environment

    work = {
        "model": str(model),
        "base_dtype": base_dtype,
        "device": device,
        "steps": steps,
        "jobs": [_job(request, steps + 1) for request in jobs],
    }
    ours = trainer_environment()
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(work),
        stdout=subprocess.PIPE,
        text=True,
        env={key: value for key, value in os.environ.items() if key not in ours},
        check=True,
    )
    return [Sampled(**found) for found in json.loads(done.stdout.splitlines()[-1])]


def _job(request: JobRequest, steps: int) -> dict[str, Any]:
    """A job as plain data; `batches`: of each step the rows, each (tokens, whether it is a label)."""
    from gshare.agent.train.job_data import JobData

    spec, data = request.spec, JobData.open(request)
    return {
        "name": spec.name,
        "r": spec.r,
        "lora_alpha": int(spec.lora_alpha or 2 * spec.r),
        "target_modules": list(spec.targets),
        "learning_rate": spec.learning_rate,
        "weight_decay": spec.weight_decay,
        "max_grad_norm": spec.max_grad_norm,
        "batches": [
            [
                ([int(token) for token in row.tokens], [bool(one) for one in row.trained])
                for micro in data.micro_batches(step)
                for row in micro
            ]
            for step in range(steps)
        ],
    }


# ---------------------------------------------------------------------- in its own process


def main() -> None:
    """The work as JSON on stdin, what was found as JSON on stdout."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    work = json.load(sys.stdin)
    where = torch.device("cuda" if work["device"] != "cpu" and torch.cuda.is_available() else "cpu")
    base: Any = AutoModelForCausalLM.from_pretrained(
        work["model"],
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[work["base_dtype"]],
        attn_implementation="sdpa",
    )
    base.to(where)
    found = []
    for job in work["jobs"]:
        config = LoraConfig(
            r=job["r"],
            lora_alpha=job["lora_alpha"],
            target_modules=job["target_modules"],
            task_type="CAUSAL_LM",
        )
        net = get_peft_model(base, config)
        net.train()
        found.append(_train(net, job, where))
        base = net.unload()
    json.dump(found, sys.stdout)


def _train(net: Any, job: Mapping[str, Any], where: torch.device) -> dict[str, Any]:
    """The fields of `Sampled`."""
    import torch

    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=job["learning_rate"], weight_decay=job["weight_decay"])
    first, started = 0.0, 0.0
    for step, rows in enumerate(job["batches"]):
        if step == 1:
            started = _now(where)
        ids, labels, mask = _padded(rows, where)
        loss = net(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, job["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 0:
            first = float(loss.detach())
    seconds = _now(where) - started
    return {"name": job["name"], "steps": len(job["batches"]) - 1, "seconds": seconds, "first_loss": first}


def _padded(
    rows: Sequence[tuple[list[int], list[bool]]], where: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, labels, mask), each (rows, longest)."""
    import torch

    longest = max(len(tokens) for tokens, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    mask = torch.zeros_like(ids)
    for i, (row, trained) in enumerate(rows):
        tokens = torch.tensor(row, dtype=torch.int64)
        ids[i, : len(tokens)] = tokens
        labels[i, : len(tokens)] = torch.where(torch.tensor(trained), tokens, -100)
        mask[i, : len(tokens)] = 1
    return ids.to(where), labels.to(where), mask.to(where)


def _now(where: torch.device) -> float:
    import torch

    if where.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
