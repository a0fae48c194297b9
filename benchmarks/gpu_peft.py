"""The PEFT arms of `benchmarks/gpu.py`: one process, and six processes at once, plain and under stock MPS.

python benchmarks/gpu_peft.py '{"model": …}'      a worker of the six; prints one JSON line
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gpu_workload import SHAPES, Workload
from gshare.agent.jobs.spec import LINEARS

#: What a person would try: attention implementation × gradient checkpointing.
SETTINGS = tuple(product(("sdpa", "eager"), (False, True)))


def make_model(model: str, attention: str, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Any:
    """The shape with random weights, or a checkpoint directory."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    if model not in SHAPES:
        return AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation=attention, device_map={"": device}
        )
    values: dict[str, Any] = dict(SHAPES[model])
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    config = (Qwen2Config if model.startswith("qwen2") else LlamaConfig)(**values)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    finally:
        torch.set_default_dtype(torch.float32)


class Peft:
    """transformers + PEFT at batch 1: LoRA r 16 on all linears, fp32 adapters, fused AdamW, sdpa or eager."""

    def __init__(
        self,
        model: str,
        attention: str,
        checkpointing: bool,
        rank: int,
        layers: list[int] | None = None,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """`layers`: those that are adapted; None: all."""
        from peft import LoraConfig, get_peft_model

        base = make_model(model, attention, device, dtype)
        base.config.use_cache = False
        if checkpointing:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            base.enable_input_require_grads()
        config = LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules=list(LINEARS),
            task_type="CAUSAL_LM",
            layers_to_transform=layers,
        )
        self.model = get_peft_model(base, config)
        self.model.train()
        self.config = config

    def restart(self, rate: float = 1e-4) -> None:
        """A fresh adapter and optimizer on the same base, as a next job would have."""
        self.model.delete_adapter("default")
        self.model.add_adapter("default", self.config)
        self.model.set_adapter("default")
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        on_cuda = parameters[0].is_cuda
        self.optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01, fused=on_cuda)
        self.parameters = parameters

    def step(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """The loss. `labels`: −100 where there is none; left out: every token is one."""
        loss = self.model(input_ids=tokens, labels=tokens if labels is None else labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def run(self, load: Workload, adapters: list[int], first: int, last: int) -> tuple[int, float]:
        """(tokens, seconds) of steps first..last of each of the adapters, one job after another."""
        tokens, seconds = 0, 0.0
        for adapter in adapters:
            self.restart()
            for step in range(last):
                row = torch.from_numpy(load.rows(step, adapter)[0].tokens).long()[None].cuda()
                if step == first:
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                self.step(row)
                if step >= first:
                    tokens += row.numel()
            torch.cuda.synchronize()
            seconds += time.perf_counter() - started
        return tokens, seconds


def sequential(model: str, load: Workload, seconds: float) -> dict[str, Any]:
    """The best of `SETTINGS` by a short trial, then as many jobs as fit into `seconds`."""
    trials = {}
    for attention, checkpointing in SETTINGS:
        peft = Peft(model, attention, checkpointing, load.rank)
        tokens, spent = peft.run(load, [0, 1], 1, 3)
        trials[f"{attention}, checkpointing {'on' if checkpointing else 'off'}"] = tokens / spent
        del peft
        torch.cuda.empty_cache()
    best = max(trials, key=lambda name: trials[name])
    attention, checkpointing = best.split(",")[0], best.endswith("on")
    peft = Peft(model, attention, checkpointing, load.rank)
    tokens, spent, begun = 0, 0.0, time.perf_counter()
    for adapter in range(load.adapters):
        more, took = peft.run(load, [adapter], 2, min(load.steps, 8))
        tokens, spent = tokens + more, spent + took
        if time.perf_counter() - begun > seconds:
            break
    return {"tokens_per_s": tokens / spent, "settings": best, "trials": trials, "tokens": tokens}


def worker(task: dict[str, Any]) -> None:
    """Train until told to stop by the clock; print how many tokens fell into the common window."""
    load = Workload(**task["workload"])
    peft = Peft(task["model"], task["attention"], task["checkpointing"], load.rank)
    peft.restart()
    for step in range(3):
        peft.step(torch.from_numpy(load.rows(step, task["adapter"])[0].tokens).long()[None].cuda())
    torch.cuda.synchronize()
    Path(task["ready"]).touch()
    while not Path(task["go"]).exists():
        time.sleep(0.01)
    tokens, started = 0, time.perf_counter()
    step = 0
    while time.perf_counter() - started < task["seconds"]:
        row = load.rows(step % load.steps, task["adapter"])[0].tokens
        peft.step(torch.from_numpy(row).long()[None].cuda())
        tokens += len(row)
        step += 1
    torch.cuda.synchronize()
    print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - started}))


@contextmanager
def mps_daemon(directory: Path) -> Iterator[dict[str, str]]:
    """A stock MPS daemon of this benchmark's own, its files in `directory`; the clients' environment."""
    pipe, log = directory / "pipe", directory / "log"
    env = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
    pipe.mkdir()
    log.mkdir()
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, check=True)
    try:
        yield env
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=env, check=False)


def six(model: str, load: Workload, settings: str, seconds: float, *, mps: bool) -> dict[str, Any]:
    """Six processes at once, each its own base and job; with `mps` under a daemon of this benchmark's own."""
    with tempfile.TemporaryDirectory(prefix="gshare-six-") as where:
        directory = Path(where)
        with mps_daemon(directory) if mps else nullcontext(dict(os.environ)) as env:
            return _race(model, load, settings, seconds, directory, env)


def _race(
    model: str, load: Workload, settings: str, seconds: float, directory: Path, env: dict[str, str]
) -> dict[str, Any]:
    workers = []
    for adapter in range(6):
        task = {
            "model": model,
            "workload": {"adapters": 6, "steps": load.steps, "vocabulary": load.vocabulary},
            "adapter": adapter,
            "attention": settings.split(",", maxsplit=1)[0],
            "checkpointing": settings.endswith("on"),
            "seconds": seconds,
            "ready": str(directory / f"ready-{adapter}"),
            "go": str(directory / "go"),
        }
        command = [sys.executable, __file__, json.dumps(task)]
        workers.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    deadline = time.monotonic() + 240
    while not all((directory / f"ready-{adapter}").exists() for adapter in range(6)):
        if time.monotonic() > deadline or any(process.poll() is not None for process in workers):
            for process in workers:
                process.kill()
            raise RuntimeError("a PEFT process did not come up")
        time.sleep(0.05)
    (directory / "go").touch()
    results = [json.loads(process.communicate()[0].splitlines()[-1]) for process in workers]
    rate = sum(result["tokens"] / result["seconds"] for result in results)
    return {"tokens_per_s": rate, "processes": 6, "settings": settings, "each": results}


if __name__ == "__main__":
    worker(json.loads(sys.argv[1]))
