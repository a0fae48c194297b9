"""GPU memory for a command that computes in its own process: `gshare audit`, `gshare generate`.

    plan = plan_gpu(gpu_flags, device)
    …                                   # the model found, the data read: what the estimate needs
    with hold_gpu(plan, estimate, "generate", flags=gpu_flags, device=device) as admission:
        from gshare.agent.base.device import pick_device
        …                               # here torch may look for a GPU, and sees the one that is reserved

The same ledger, queue and exit codes as `gshare finetune`; without a GPU nothing is reserved.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from gshare.agent.jobs.memory import MemoryEstimate
from gshare.agent.service.admission import admit
from gshare.agent.trace import DISABLED
from gshare.agent.vram.guard import Reservation
from gshare.cli.finetune_flags import ReserveFlags
from gshare.cli.gpu_plan import GpuPlan, budget_line, request_gpu

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Held(NamedTuple):
    """What `make_guard` is given: `device` is the name for `pick_device`."""

    reservation: Reservation | None
    device: str
    may_grow: bool


@contextmanager
def hold_gpu(
    plan: GpuPlan | None,
    estimate: Callable[[], MemoryEstimate],
    task: str,
    *,
    flags: ReserveFlags,
    device: str,
) -> Iterator[Held]:
    """Reserve before torch touches a GPU, until the block ends.

    To be entered before anything has asked torch for a GPU: CUDA reads CUDA_VISIBLE_DEVICES once. RetryLater
    (exit 75) when it does not fit within the time, UsageError (2) when it never can.
    """
    if plan is None:
        if flags.vram is not None:
            say("info", "--vram is not used: the run is on the CPU, where nothing is reserved")
        yield Held(None, device, may_grow=False)
        return
    if plan.note:
        say("warning", plan.note)
    request = request_gpu(plan, estimate, task)
    say("info", budget_line(plan, request, estimate))
    with _visible_again():
        reservation, device = admit(
            request,
            device=device,
            say=say,
            on_place=lambda queued: None,
            on_look=lambda: None,
            tracer=DISABLED,
        )
        with reservation:
            yield Held(reservation, device, request.may_grow)


@contextmanager
def without_gpu() -> Iterator[None]:
    """No GPU is visible inside: for what computes on the CPU and reserves nothing."""
    with _visible_again():
        os.environ[VISIBLE] = ""
        yield


@contextmanager
def _visible_again() -> Iterator[None]:
    """The user's CUDA_VISIBLE_DEVICES as it was, at the end of the block."""
    before = os.environ.get(VISIBLE)
    try:
        yield
    finally:
        os.environ.pop(VISIBLE, None)
        if before is not None:
            os.environ[VISIBLE] = before


def say(level: Literal["info", "warning"], text: str) -> None:
    """One line on stderr."""
    print(f"{'warning: ' if level == 'warning' else ''}{text}", file=sys.stderr, flush=True)
