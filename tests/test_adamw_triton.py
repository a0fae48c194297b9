"""AdamW over the arena in one launch: each adapter gets the bits of clipping, `adamw_step_` and rounding."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ieee_sqrt import ieee_sqrt
from row_company import same_bytes

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where the kernels are decorated

from gshare.kernels.adamw import adamw_step_
from gshare.kernels.adamw_triton import adamw_, hyper_row
from gshare.kernels.grad_norm import clip_coefficient
from gshare.kernels.slot_table import BLOCK, slot_tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GAP = 48


@pytest.fixture(autouse=True)
def _reference_rounds_square_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "sqrt", ieee_sqrt)


@dataclass
class Job:
    """One adapter: its operands, hyper-parameters, and what the host would have seen."""

    length: int
    norm: float = 3.7
    finite: int = 1
    max_grad_norm: float = 1.0
    hyper: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        defaults = {"lr": 2e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "step": 7}
        self.hyper = {**defaults, **self.hyper}
        generator = torch.Generator().manual_seed(self.length)
        param, grad, exp_avg = (torch.randn(self.length, generator=generator) for _ in range(3))
        exp_avg_sq = torch.rand(self.length, generator=generator) * 1e-3
        self.operands = [param, grad * 0.1, exp_avg * 0.01, exp_avg_sq]
        # The gaps between matrices, and values near the ends of fp32's range.
        for operand in self.operands:
            operand[-5:] = 0.0
        self.operands[1][:3] = torch.tensor([1e-30, -1e18, 1e-45])

    def expected(self) -> list[torch.Tensor]:
        """param, grad, exp_avg, exp_avg_sq after the step of `Adapter.update`."""
        param, grad, exp_avg, exp_avg_sq = (operand.clone() for operand in self.operands)
        if self.finite and abs(self.norm) < float("inf"):
            clip = clip_coefficient(self.norm, self.max_grad_norm)
            adamw_step_(param, grad * clip, exp_avg, exp_avg_sq, **self.hyper)
        return [param, grad, exp_avg, exp_avg_sq]


JOBS = [
    Job(BLOCK + 16),
    Job(16, norm=0.5, hyper={"step": 1, "lr": 1e-2}),
    Job(2 * BLOCK, max_grad_norm=0.0, hyper={"weight_decay": 0.0, "beta2": 0.95, "eps": 1e-6}),
    Job(BLOCK - 16, max_grad_norm=0.3, norm=1e-3, hyper={"step": 100_000, "beta1": 0.0}),
    Job(32, norm=1e12, max_grad_norm=1e-3),
]


def run(
    jobs: list[Job],
    *,
    first: int = 0,
    compute_dtype: torch.dtype | None = torch.bfloat16,
    zero_grads: bool = False,
    max_blocks: int = 0,
) -> tuple[list[list[torch.Tensor]], list[int]]:
    """Step `jobs` in one arena whose gaps hold 77; each job's operands and compute copy, and overflow marks.

    Weights begin at `first`, moments lie in the reverse order in arenas of their own.
    """
    starts, at = [], first
    for job in jobs:
        starts.append(at)
        at += job.length + GAP
    moments, at_moments = [0] * len(jobs), 32
    for i in reversed(range(len(jobs))):
        moments[i] = at_moments
        at_moments += jobs[i].length + GAP
    flats = [torch.full((size,), 77.0) for size in (at, at, at_moments, at_moments)]
    for i, job in enumerate(jobs):
        for flat, operand, where in zip(flats, job.operands, (starts, starts, moments, moments), strict=True):
            flat[where[i] : where[i] + job.length] = operand
    flats = [flat.to(DEVICE) for flat in flats]
    compute = None if compute_dtype is None else torch.full((at,), 77.0, device=DEVICE, dtype=compute_dtype)
    tables = slot_tables(
        list(zip(starts, moments, [job.length for job in jobs], strict=True)), max_blocks=max_blocks
    )
    hyper = [hyper_row(**job.hyper, max_grad_norm=job.max_grad_norm) for job in jobs]
    overflow = torch.zeros(len(jobs), dtype=torch.int32, device=DEVICE)
    adamw_(
        *flats,
        compute,
        *(table.to(DEVICE) for table in tables),
        torch.tensor(hyper, dtype=torch.float64, device=DEVICE),
        torch.tensor([job.norm for job in jobs], dtype=torch.float64, device=DEVICE),
        torch.tensor([job.finite for job in jobs], dtype=torch.int32, device=DEVICE),
        overflow=overflow,
        zero_grads=zero_grads,
    )
    flats = [flat.cpu() for flat in flats] + ([] if compute is None else [compute.cpu()])
    places = (starts, starts, moments, moments, starts)
    found = [
        [flat[where[i] : where[i] + job.length] for flat, where in zip(flats, places, strict=False)]
        for i, job in enumerate(jobs)
    ]
    inside = [torch.zeros(len(flat), dtype=torch.bool) for flat in flats]
    for i, job in enumerate(jobs):
        for marks, where in zip(inside, places, strict=False):
            marks[where[i] : where[i] + job.length] = True
    for flat, marks in zip(flats, inside, strict=True):
        assert bool((flat[~marks] == 77.0).all()), "something outside the slots was written"
    return found, overflow.tolist()


def agree(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("first", [0, 16, 240])
def test_every_adapter_has_the_bits_of_the_reference(first: int) -> None:
    found, overflow = run(JOBS, first=first)
    for job, (*operands, compute) in zip(JOBS, found, strict=True):
        expected = job.expected()
        assert agree(operands, expected), job.length
        assert same_bytes(compute, expected[0].to(torch.bfloat16))
        assert not same_bytes(operands[0], job.operands[0])
    assert overflow == [0] * len(JOBS)


def test_alone_in_another_order_and_in_padded_tables_the_bits_are_the_same() -> None:
    together, _ = run(JOBS)
    backwards, _ = run(JOBS[::-1], first=64)
    padded, _ = run(JOBS, max_blocks=23)
    for i, job in enumerate(JOBS):
        alone, _ = run([job], first=32)
        assert agree(alone[0], together[i])
        assert agree(backwards[len(JOBS) - 1 - i], together[i])
        assert agree(padded[i], together[i])


@pytest.mark.parametrize(
    "spoilt", [{"norm": float("nan")}, {"norm": float("inf")}, {"finite": 0}], ids=["nan", "inf", "loss"]
)
def test_a_step_that_is_not_finite_changes_nothing_of_its_adapter(spoilt: dict[str, Any]) -> None:
    jobs = [Job(BLOCK), Job(BLOCK + 32, **spoilt), Job(64)]
    jobs[1].operands[1][5] = float("nan")
    found, overflow = run(jobs, zero_grads=True)
    assert agree(found[1][:4], jobs[1].operands)
    assert bool((found[1][4] == 77.0).all())
    for i in (0, 2):
        expected = jobs[i].expected()
        expected[1].zero_()
        assert agree(found[i][:4], expected)
    assert overflow == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_weight_that_overflows_is_marked_for_its_adapter_alone() -> None:
    jobs = [Job(64), Job(2 * BLOCK, hyper={"lr": 1e38, "step": 1, "weight_decay": 0.0}), Job(48)]
    jobs[1].operands[0][BLOCK + 9] = 3e38
    jobs[1].operands[1][BLOCK + 9] = -1.0
    jobs[1].operands[2][BLOCK + 9] = 0.0
    jobs[1].operands[3][BLOCK + 9] = 0.0
    _, overflow = run(jobs)
    assert overflow == [0, 1, 0]


def test_without_a_compute_copy_only_the_masters_are_written() -> None:
    found, _ = run(JOBS[:2], compute_dtype=None)
    for job, operands in zip(JOBS, found, strict=False):
        assert agree(operands, job.expected())


def test_negative_control_a_contracted_multiply_add_is_noticed() -> None:
    job = JOBS[2]
    _, grad, exp_avg, _ = job.operands
    beta1 = torch.tensor(job.hyper["beta1"])
    scaled = grad * (1.0 - job.hyper["beta1"])
    fused = (exp_avg.double() * beta1.double() + scaled.double()).float()
    assert not same_bytes(fused, job.expected()[2])
