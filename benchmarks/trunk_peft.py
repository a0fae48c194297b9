"""The PEFT arms of `benchmarks/trunk.py`: the same jobs, from the same weights, with transformers + PEFT.

    peft   one job after another in one process
    mps    one process a job, as many at once as fit, under stock MPS at 100 % threads

Which attention implementation and whether to recompute activations is what a short trial finds best. Losses
are not gshare's bits (other products, other orders of summation) but agree with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from gpu_peft import SETTINGS, Peft
from gshare.agent.jobs.spec import LINEARS
from gshare.agent.train.adapter import initial_a
from gshare.agent.train.arena import adapter_shapes
from trunk_arms import Clock, Times
from trunk_workload import Cohort

#: Steps of an epoch of the trial of settings, at most.
TRIAL_STEPS = 3


def make_peft(cohort: Cohort, device: torch.device, attention: str, checkpointing: bool) -> Peft:
    layers = list(range(cohort.lowest_layer, cohort.config.num_layers)) if cohort.top else None
    dtype = torch.float32 if cohort.base_dtype == "fp32" else torch.bfloat16
    peft = Peft(cohort.model, attention, checkpointing, cohort.rank, layers, device.type, dtype)
    draw_base(peft, cohort)
    return peft


@torch.no_grad()
def draw_base(peft: Peft, cohort: Cohort) -> None:
    """The weights of `gpu_workload.random_base`: the same draws in the same order."""
    config, named = cohort.config, dict(peft.model.get_base_model().named_parameters())
    device = next(iter(named.values())).device
    generator = torch.Generator(device=device).manual_seed(0)

    def draw(name: str) -> None:
        # An adapted linear has its weight one level deeper.
        inner = name.replace("_proj.", "_proj.base_layer.")
        named[inner if inner in named else name].normal_(0, 0.02, generator=generator)

    for layer in range(config.num_layers):
        for linear in LINEARS:
            block = "mlp" if linear in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            draw(f"model.layers.{layer}.{block}.{linear}.weight")
            if config.has_bias(linear):
                draw(f"model.layers.{layer}.{block}.{linear}.bias")
    draw("model.embed_tokens.weight")
    if not config.tie_word_embeddings:
        draw("lm_head.weight")


class Job:
    """One job on a model that others may have trained on before; base weights are frozen."""

    def __init__(self, peft: Peft, cohort: Cohort, number: int) -> None:
        self.peft, self.cohort, self.number = peft, cohort, number
        spec = cohort.specs()[number]
        self.name = spec.name
        peft.restart(spec.learning_rate)
        named = dict(peft.model.named_parameters())
        assert spec.seed is not None
        with torch.no_grad():
            for key, shape in adapter_shapes(spec, cohort.config).items():
                if key.side == "A":
                    ours = initial_a(spec.seed, key, shape)
                    named[key.peft_name().replace(".weight", ".default.weight")].copy_(ours)
        self.losses: list[float] = []

    def epoch(self) -> None:
        device, losses = self.peft.model.device, []
        for step in range(self.cohort.steps):
            (row,) = self.cohort.rows(step, self.number)
            tokens = torch.from_numpy(row.tokens).long()
            labels = torch.where(torch.from_numpy(row.trained), tokens, -100)
            losses.append(self.peft.step(tokens[None].to(device), labels[None].to(device)))
        self.losses += torch.stack(losses).tolist()


def train_each(
    peft: Peft, cohort: Cohort, numbers: list[int], timed: Callable[[bool], None]
) -> tuple[Times, dict[str, dict[str, Any]]]:
    """One job after another. `timed` is told when timing begins and ends of a last epoch."""
    times, fates = Times(), {}
    clock = Clock(peft.model.device)
    for number in numbers:
        begun = clock()
        job = Job(peft, cohort, number)
        job.epoch()
        times.first += clock() - begun
        for _ in range(cohort.epochs - 2):
            job.epoch()
        timed(True)
        begun = clock()
        job.epoch()
        times.steady += clock() - begun
        timed(False)
        fates[job.name] = {"losses": job.losses}
    return times, fates


def best_settings(cohort: Cohort, device: torch.device) -> dict[str, Any]:
    """Seconds of the first job's second epoch, a short one, in each of `SETTINGS`, and the fastest."""
    cohort = replace(cohort, epochs=2, steps=min(cohort.steps, TRIAL_STEPS))
    seconds = {}
    for attention, checkpointing in SETTINGS:
        peft = make_peft(cohort, device, attention, checkpointing)
        job, clock = Job(peft, cohort, 0), Clock(device)
        job.epoch()
        begun = clock()
        job.epoch()
        seconds[attention, checkpointing] = clock() - begun
        del peft, job
        if device.type == "cuda":
            torch.cuda.empty_cache()
    attention, checkpointing = min(seconds, key=lambda one: seconds[one])
    told = {f"{a}, checkpointing {'on' if c else 'off'}": s for (a, c), s in seconds.items()}
    return {"attention": attention, "checkpointing": checkpointing, "trials_s": told}
