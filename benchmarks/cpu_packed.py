"""Packed against sequential on CPU: SmolLM2-135M, N adapters, the demo's short rows.

    python benchmarks/cpu_packed.py [--adapters 1 4 16] [--batch 1] [--steps 4] [--json FILE]

Arms, all in one process on the same jobs (same rows, order, initial weights, optimizer), steady: the first
step of every arm is not timed, loading is not timed, evaluation and saving are off.

    packed            gshare, all N adapters in one fused pass
    gshare solo       gshare, the N jobs one after another
    PEFT sequential   transformers + PEFT (sdpa, fp32, torch.optim.AdamW), the N jobs one after another

Gate: every loss and every adapter's bytes of `packed` equal `gshare solo`, and PEFT's losses agree within
1e-4. When it fails, no ratio is printed and the exit code is 1.

A packed run of its own says how a step's time divides. It is made under a reservation on a simulated device,
as a trainer's is on a GPU: the ledger's own cost may be 5 % of the steps; above that, the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gshare.agent.service.environment import trainer_environment

os.environ.update(trainer_environment())

import msgspec
import torch
from gshare.agent.base.load import load_base
from gshare.agent.base.resolve import find_demo_model, resolve_model
from gshare.agent.base.weights import Base
from gshare.agent.data.build import build_token_store
from gshare.agent.jobs.events import Event, Stepped
from gshare.agent.jobs.spec import AdapterSpec, JobRequest
from gshare.agent.trace import DISABLED, SharingReport, Tracer, sharing_report
from gshare.agent.train.job_data import JobData
from gshare.agent.train.runner import Runner
from gshare.agent.vram.guard import Reservation, reserve
from gshare.agent.vram.ledger import Ledger
from gshare.agent.vram.simulated import SimulatedDevices
from gshare.agent.xdg import cache_dir
from gshare.cli.gpu_trace import split
from gshare.kernels.reference_backend import ReferenceBackend

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 1e-4  # PEFT against gshare, relative, per step

#: Where the packed run reserves, so that the ledger's cost is in its trace.
SIMULATED = '[[device]]\nuuid = "GPU-simulated"\ntotal_mb = 143360\n'
RESERVED_MB = 65536


@dataclass
class Arm:
    """What one arm did."""

    tokens: int = 0
    seconds: float = 0.0
    losses: dict[str, list[float]] = field(default_factory=dict)
    adapters: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    most_adapters: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def make_jobs(model: Path, directory: Path, count: int, *, batch: int, steps: int) -> list[JobRequest]:
    """`count` jobs over the demo's three data sets, ranks 4, 8 and 16 in turn, a seed each."""
    data = ROOT / "demo-run" / "data"
    if not (data / "trivia.jsonl").is_file():
        raise SystemExit(
            "the demo's data is missing: run `make demo` or python examples/demo/prepare.py demo-run/data"
        )
    stores = {
        name: build_token_store(data / f"{name}.jsonl", model, cache_dir=directory / "tokens", max_length=160)
        for name in ("robot", "trivia", "chitchat")
    }
    jobs = []
    for index in range(count):
        source = ("robot", "trivia", "chitchat")[index % 3]
        spec = AdapterSpec(
            name=f"{source}-{index}",
            data=str(data / f"{source}.jsonl"),
            output_dir=str(directory / f"{source}-{index}"),
            r=(4, 8, 16)[index % 3],
            lora_alpha=2.0 * (4, 8, 16)[index % 3],
            learning_rate=5e-4,
            per_device_train_batch_size=batch,
            max_steps=steps + 2,  # one untimed, and one never reached: no evaluation, no save
            max_length=160,
            eval_steps=0,
            save_steps=0,
            val_fraction=0.0,
            seed=index,
        )
        store = stores[source]
        jobs.append(JobRequest(spec=spec, train_store=str(store.path), train_hash=store.hash))
    return jobs


class TimedBackend(ReferenceBackend):
    """Adds up wall time by op; the parts that are not ops are the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.spent: dict[str, float] = defaultdict(float)
        for name in [
            "linear",
            "linear_dx",
            "lora_forward",
            "lora_dx",
            "lora_grads",
            "attention",
            "attention_backward",
            "add_rms_norm",
            "rms_norm_apply",
            "rms_norm_backward",
            "rope",
            "rope_backward",
            "swiglu",
            "swiglu_backward",
            "cross_entropy",
        ]:
            setattr(self, name, self._timed(name, getattr(self, name)))

    def _timed(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = op(*args, **options)
            self.spent[name] += time.perf_counter() - start
            return result

        return run


def run_gshare(
    model: Path, base: Base, groups: Sequence[Sequence[JobRequest]], steps: int, label: str
) -> Arm:
    """Each group packed, the groups one after another."""
    arm = Arm()
    for group in groups:
        arm_losses: dict[str, list[float]] = {job.spec.name: [] for job in group}
        counted: dict[str, int] = defaultdict(int)

        def listen(
            event: Event, losses: dict[str, list[float]] = arm_losses, counted: dict[str, int] = counted
        ) -> None:
            if isinstance(event, Stepped):
                losses[event.job].append(event.loss)
                counted[event.job] += event.tokens if event.step > 1 else 0

        runner = _runner(model, base, ReferenceBackend(), listen)
        for job in group:
            output = Path(job.spec.output_dir).parent / label / job.spec.name
            runner.admit(
                msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, output_dir=str(output)))
            )
        runner.run_round()
        start = time.perf_counter()
        for _ in range(steps):
            runner.run_round()
        arm.seconds += time.perf_counter() - start
        arm.tokens += sum(counted.values())
        arm.most_adapters = max(arm.most_adapters, runner.engine.most_adapters)
        arm.losses |= arm_losses
        arm.adapters |= {job.name: job.adapter.parameters() for job in runner.jobs()}
        runner.close()
    return arm


def _runner(
    model: Path,
    base: Base,
    backend: ReferenceBackend,
    listen: Callable[[Event], None],
    reservation: Reservation | None = None,
    tracer: Tracer = DISABLED,
) -> Runner:
    return Runner(
        model_dir=model,
        base_dtype="fp32",
        schedule="synchronized",
        max_tokens_per_pass=16384,
        max_adapters_per_pass=0,
        device="cpu",
        on_event=listen,
        on_pass=lambda in_flight: None,
        backend=backend,
        base=base,
        reservation=reservation,
        tracer=tracer,
    )


def run_peft(
    model: Path, jobs: Sequence[JobRequest], initial: dict[str, dict[str, torch.Tensor]], steps: int
) -> Arm:
    """Every job alone by PEFT, padded to its own batch's longest row, from gshare's initial weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    arm = Arm()
    for job in jobs:
        spec, data = job.spec, JobData.open(job)
        net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        config = LoraConfig(
            r=spec.r,
            lora_alpha=int(spec.lora_alpha or 0),
            target_modules=list(spec.targets),
            task_type="CAUSAL_LM",
        )
        net = get_peft_model(net, config)
        named = {k.replace(".weight", ".default.weight"): v for k, v in initial[spec.name].items()}
        assert not net.load_state_dict(named, strict=False).unexpected_keys
        net.train()
        parameters = [p for p in net.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=spec.learning_rate, weight_decay=spec.weight_decay)
        losses: list[float] = []
        start = time.perf_counter()
        for step in range(steps + 1):
            if step == 1:
                start = time.perf_counter()
            rows = [row for micro in data.micro_batches(step) for row in micro]
            longest = max(len(row.tokens) for row in rows)
            ids = torch.zeros(len(rows), longest, dtype=torch.int64)
            labels = torch.full_like(ids, -100)
            mask = torch.zeros_like(ids)
            for i, row in enumerate(rows):
                tokens = torch.tensor(row.tokens, dtype=torch.int64)
                ids[i, : len(tokens)] = tokens
                labels[i, : len(tokens)] = torch.where(torch.tensor(row.trained), tokens, -100)
                mask[i, : len(tokens)] = 1
            loss = net(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, spec.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))
            if step > 0:
                arm.tokens += sum(len(row.tokens) for row in rows)
        arm.seconds += time.perf_counter() - start
        arm.losses[spec.name] = losses
    return arm


def initial_weights(
    model: Path, base: Base, jobs: Sequence[JobRequest]
) -> dict[str, dict[str, torch.Tensor]]:
    runner = _runner(model, base, ReferenceBackend(), lambda event: None)
    for job in jobs:
        runner.admit(job)
    found = {job.name: job.adapter.parameters() for job in runner.jobs()}
    runner.close()
    return found


def profile(
    model: Path, base: Base, jobs: Sequence[JobRequest], folder: Path
) -> tuple[dict[str, float], SharingReport]:
    """Share of a packed step by part, percent, from two profiled rounds after one warm-up; and what the
    ledger (in `folder`) cost beside all three, from the reservation to its release."""
    backend, tracer = TimedBackend(), Tracer()
    devices = folder / "devices.toml"
    devices.write_text(SIMULATED, encoding="utf-8")
    ledger = Ledger(directory=folder / "ledger", source=SimulatedDevices(devices), tracer=tracer, environ={})
    candidates = ledger.list_devices()
    with reserve(
        RESERVED_MB, task="benchmark", devices=candidates, timeout_s=0, ledger=ledger
    ) as reservation:
        runner = _runner(model, base, backend, lambda event: None, reservation, tracer)
        for job in jobs:
            runner.admit(job)
        runner.run_round()
        backend.spent.clear()
        start = time.perf_counter()
        runner.run_round()
        runner.run_round()
        total = time.perf_counter() - start
        runner.close()
    grouped = {
        "base GEMM forward": ("linear",),
        "base GEMM dX": ("linear_dx",),
        "LoRA": ("lora_forward", "lora_dx", "lora_grads"),
        "attention": ("attention", "attention_backward"),
        "head and loss": ("cross_entropy",),
        "norm, rope, swiglu": (
            *("add_rms_norm", "rms_norm_apply", "rms_norm_backward", "rope", "rope_backward"),
            *("swiglu", "swiglu_backward"),
        ),
    }
    found = {name: 100 * sum(backend.spent[op] for op in ops) / total for name, ops in grouped.items()}
    found["optimizer, norms, rest"] = 100 - sum(found.values())
    return found, sharing_report(tracer.events)


def gate(packed: Arm, solo: Arm, peft: Arm) -> list[str]:
    """What is wrong; empty when every arm did the same work."""
    faults = []
    for name, losses in packed.losses.items():
        if losses != solo.losses[name]:
            faults.append(f"{name}: packed and solo losses differ")
        for tensor, value in packed.adapters[name].items():
            if not torch.equal(value, solo.adapters[name][tensor]):
                faults.append(f"{name}: packed and solo bytes differ in {tensor}")
                break
        for ours, theirs in zip(losses, peft.losses[name], strict=True):
            if abs(ours - theirs) > TOLERANCE * abs(theirs):
                faults.append(f"{name}: loss {ours} against PEFT's {theirs}")
                break
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    resolved = resolve_model(str(find_demo_model()), cache_dir=cache_dir(), base_dtype="fp32")
    base = load_base(resolved.path, base_dtype="fp32", device=torch.device("cpu"))
    cells, failed = [], False
    with tempfile.TemporaryDirectory() as folder:
        for count in options.adapters:
            directory = Path(folder) / str(count)
            jobs = make_jobs(resolved.path, directory, count, batch=options.batch, steps=options.steps)
            initial = initial_weights(resolved.path, base, jobs)
            packed = run_gshare(resolved.path, base, [jobs], options.steps, "packed")
            solo = run_gshare(resolved.path, base, [[job] for job in jobs], options.steps, "solo")
            peft = run_peft(resolved.path, jobs, initial, options.steps)
            faults = gate(packed, solo, peft)
            shares, sharing = profile(resolved.path, base, jobs, directory)
            failed |= bool(faults) or sharing.falsified
            cells.append(
                {
                    "adapters": count,
                    "adapters_in_pass": packed.most_adapters,
                    "tokens": packed.tokens,
                    "gate": faults or "passed",
                    "tokens_per_second": {
                        "packed": packed.rate,
                        "gshare solo": solo.rate,
                        "PEFT sequential": peft.rate,
                    },
                    "share_of_step_percent": shares,
                    "sharing": {**sharing._asdict(), "verdict": sharing.verdict},
                    "losses": packed.losses,
                }
            )
            report(cells[-1])
            print("\n".join(f"  {line}" for line in split(sharing)))
    about = {
        "work": "SmolLM2-135M-Instruct fp32, demo rows, "
        f"batch {options.batch}, {options.steps} timed steps a job",
        "cpu": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, "
        f"{torch.get_num_threads()} threads",
        "versions": {"torch": torch.__version__, **_versions("transformers", "peft")},
        "base": base.fingerprint,
    }
    print(json.dumps(about))
    if options.json:
        options.json.write_text(json.dumps({**about, "cells": cells}, indent=1), encoding="utf-8")
    return 1 if failed else 0


def report(cell: dict[str, Any]) -> None:
    rates = cell["tokens_per_second"]
    print(f"N = {cell['adapters']}: {cell['tokens']} tokens, {cell['adapters_in_pass']} adapters in a pass")
    for arm, rate in rates.items():
        print(f"  {arm:16} {rate:8.1f} tok/s")
    if cell["gate"] != "passed":
        print("  GATE FAILED, no ratio:", *cell["gate"], sep="\n    ")
        return
    print(f"  gate passed; packed / PEFT sequential = {rates['packed'] / rates['PEFT sequential']:.2f}")
    print(f"               packed / gshare solo     = {rates['packed'] / rates['gshare solo']:.2f}")
    print(
        "  step:", ", ".join(f"{name} {share:.0f} %" for name, share in cell["share_of_step_percent"].items())
    )


def _versions(*packages: str) -> dict[str, str]:
    from importlib.metadata import version

    return {package: version(package) for package in packages}


if __name__ == "__main__":
    sys.exit(main())
