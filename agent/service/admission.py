"""A reservation of ours, a trainer's above all, taken before anything of it touches a GPU.

    admission = admit(config.gpu, device=config.device, say=…, on_place=…, on_look=…, tracer=…)
    Runner(device=admission.device, reservation=admission.reservation, …)

Afterwards this process sees the one device that it has reserved, by its UUID, and nothing else: to be called
before torch, which reads CUDA_VISIBLE_DEVICES and the variables of MPS once. A simulated device is reserved
in the same way, and the computing is done on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from gshare.agent.errors import GshareError
from gshare.agent.service.registry import GpuRequest
from gshare.agent.trace import Tracer
from gshare.agent.vram.budget import show_mb
from gshare.agent.vram.devices import Device
from gshare.agent.vram.guard import Reservation, reserve
from gshare.agent.vram.inherit import Inherited, NotInherited, inherit
from gshare.agent.vram.ledger import Ledger, Queued
from gshare.agent.vram.mps import mps_environment
from gshare.agent.vram.queue import Announcer, OnLook, OnWait
from gshare.agent.vram.rows import Client
from gshare.agent.vram.sources import is_simulated

Say = Callable[[Literal["info", "warning"], str], None]


class Admission(NamedTuple):
    """The reservation, and the device that the runner is told."""

    reservation: Reservation
    device: str


def admit(
    request: GpuRequest, *, device: str, say: Say, on_place: OnWait, on_look: OnLook, tracer: Tracer
) -> Admission:
    """Reserve what `request` asks for, waiting as long as it allows, and set this process's environment.

    Inside `gpu run` its reservation is used, and no second one made. `on_place` hears of every change of
    place or reason, `say` only of what people should read.
    RetryLater (exit 75): not within the time; UsageError (2): can never fit, or MPS as asked for is
    refused; GshareError (1): the device or the ledger is in trouble. Nothing stays reserved then. What
    `on_look` raises passes through.
    """
    ledger = Ledger(tracer=tracer)
    announce = Announcer(lambda line: say("info", line), line=waiting_line)

    def on_wait(queued: Queued) -> None:
        on_place(queued)
        announce(queued)

    devices = _devices(ledger, request)
    # What is not the first client's part is the base's, and stays when that client leaves.
    part_mb = min(request.part_mb or request.budget_mb, request.budget_mb)
    reservation = _inherited(ledger, request, devices, say) or reserve(
        request.budget_mb,
        task=request.task,
        devices=devices,
        timeout_s=request.timeout_s,
        clients=(Client(name=request.client, budget_mb=part_mb),) if request.client else (),
        on_wait=on_wait,
        on_look=on_look,
        on_warning=lambda line: say("warning", line),
        ledger=ledger,
    )
    try:
        os.environ.update(_environment(reservation, request, ledger, say))
    except BaseException:
        reservation.release()
        raise
    where = reservation.device
    how = "using" if isinstance(reservation, Inherited) else "reserved"
    whose = " of `gshare gpu run`" if isinstance(reservation, Inherited) else ""
    say(
        "info",
        f"{how} {show_mb(reservation.budget_mb)} on {where.name}, {where.uuid} "
        f"(reservation {reservation.id}{whose})",
    )
    return Admission(reservation, _runner_device(device))


def _inherited(ledger: Ledger, request: GpuRequest, devices: Sequence[Device], say: Say) -> Inherited | None:
    """The reservation of the `gpu run` around us, when the client found one and it can still be used."""
    if not request.inherit:
        return None
    try:
        return inherit(
            ledger,
            request.inherit,
            devices=devices,
            budget_mb=request.budget_mb,
            on_warning=lambda line: say("warning", line),
        )
    except NotInherited as error:
        say("warning", f"reservation {request.inherit} is not used: {error}; reserving anew")
        return None


def _devices(ledger: Ledger, request: GpuRequest) -> tuple[Device, ...]:
    found = tuple(device for device in ledger.list_devices() if device.uuid in request.gpus)
    if not found:
        note = f" ({ledger.source.note})" if ledger.source.note else ""
        raise GshareError(f"none of {', '.join(request.gpus)} is here any more{note}")
    return found


def _environment(reservation: Reservation, request: GpuRequest, ledger: Ledger, say: Say) -> dict[str, str]:
    visible = reservation.device.cuda_name
    assert visible is not None, "the CPU is not reserved"
    if request.mps_share is None:
        return {"CUDA_VISIBLE_DEVICES": visible}
    plan = mps_environment(
        reservation.device, share=request.mps_share, budget_mb=reservation.budget_mb, ledger=ledger
    )
    say("warning", plan.warning)
    return plan.environment


def _runner_device(device: str) -> str:
    """`auto` stays: a torch that cannot use the GPU then takes the CPU, and the runner gives the GPU back."""
    if is_simulated():
        return "cpu"
    return device if device == "auto" else "cuda:0"


def waiting_line(queued: Queued) -> str:
    """Where the request of a trainer stands, in one line."""
    decision = queued.decision
    return f"waiting for GPU memory, position {decision.position}: {decision.reason}, on {queued.gpu_uuid}"
