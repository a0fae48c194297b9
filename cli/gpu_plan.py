"""What a command reserves: from its GPU flags to the request that the trainer, or the command itself, takes.

What can be known to be wrong is found here, before anything is started: amounts, names of devices, a budget
that no device can ever hold, MPS where it is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

import msgspec
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.memory import MemoryEstimate
from gshare.agent.jobs.names import shorten
from gshare.agent.jobs.spec import RunSpec
from gshare.agent.service.registry import GpuRequest
from gshare.agent.vram.budget import parse_budget, parse_duration, show_mb, with_allowance, with_fragmentation
from gshare.agent.vram.devices import Device
from gshare.agent.vram.guard import WAIT_SECONDS
from gshare.agent.vram.identify import find_devices, visible_devices
from gshare.agent.vram.inherit import NotInherited, find_inheritable
from gshare.agent.vram.ledger import Ledger
from gshare.agent.vram.machine import DeviceState, Never, Request, available_mb, best_decision, decide
from gshare.agent.vram.mps import SAVE_STEPS, mps_environment
from gshare.agent.vram.owners import RESERVATION_VARIABLE
from gshare.agent.vram.rows import Row
from gshare.agent.vram.sources import is_simulated
from gshare.cli.finetune_flags import GpuFlags, ReserveFlags

#: A task is one line in other users' status.
MAX_TASK = 80
_DEVICE = re.compile(r"auto|cpu|cuda|cuda:([0-9]{1,3})")


@dataclass(frozen=True)
class GpuPlan:
    """The flags read and the devices found: one of `devices` will be used.

    `inherited`: the row of the `gpu run` around us, which is used instead of a new one. `note`: why one that
    is named is not.
    """

    ledger: Ledger
    devices: tuple[Device, ...]
    vram_mb: int | None  # None: what the estimate says
    timeout_s: float
    mps: bool
    mps_share: int | None
    inherited: Row | None = None
    note: str = ""

    @property
    def cards(self) -> tuple[str, ...]:
        """Names of the GPUs on any of which the run may be."""
        return tuple(device.name for device in self.devices)


def plan_gpu(flags: ReserveFlags, device: str, *, outlives: bool = False) -> GpuPlan | None:
    """What to reserve on; None when the run is on the CPU and reserves nothing. UsageError names the flag.

    `outlives`: the run goes on when this process has ended, and so after the `gpu run` around it.
    """
    vram_mb = parse_budget(flags.vram) if flags.vram is not None else None
    if flags.timeout is not None and not flags.wait_gpu:
        raise UsageError("--timeout and --no-wait-gpu: give one of them")
    timeout_s = WAIT_SECONDS if flags.timeout is None else parse_duration(flags.timeout, what="--timeout")
    mps = isinstance(flags, GpuFlags) and flags.experimental_mps
    mps_share = flags.gpu_share if isinstance(flags, GpuFlags) else None
    if mps_share is not None and not mps:
        raise UsageError("--gpu-share is for --experimental-mps; give both or none")
    match = _DEVICE.fullmatch(device)
    if match is None:
        raise UsageError(f"--device: {shorten(device)} is unknown; write auto, cpu, cuda or cuda:N")
    if device != "auto" and flags.gpus is not None:
        raise UsageError(f"--gpus and --device {device}: give one of them")
    if device == "cpu" and not is_simulated():
        _check_cpu(flags, mps=mps)
        return None
    ledger = Ledger()
    devices = _candidates(ledger, flags.gpus, device, match[1])
    if not devices:
        _check_cpu(flags, mps=mps)
        return None
    plan = GpuPlan(
        ledger=ledger,
        devices=devices,
        vram_mb=vram_mb,
        timeout_s=timeout_s if flags.wait_gpu else 0.0,
        mps=mps,
        mps_share=mps_share,
    )
    return _with_inherited(plan, outlives=outlives)


def request_gpu(
    plan: GpuPlan, estimate: Callable[[], MemoryEstimate], task: str, *, shared: bool = False
) -> GpuRequest:
    """The request of a run; `task` is for other users. The estimate is the budget where there is no other,
    and where the trainer may be `shared` it says what the run adds to a base that is loaded already.

    UsageError when no device can ever hold it, or MPS is refused.
    """
    if plan.vram_mb is not None:
        budget_mb = plan.vram_mb
    elif plan.inherited is not None:
        budget_mb = plan.inherited.budget_mb
    else:
        whole = estimate()
        budget_mb = with_allowance(whole.total, whole.fragmentation)
    _check_fits(plan, budget_mb)
    part_mb = min(budget_mb, _added_mb(estimate())) if shared else 0
    devices = _with_mps(plan, budget_mb) if plan.mps else plan.devices
    return GpuRequest(
        budget_mb=budget_mb,
        gpus=tuple(device.uuid for device in devices),
        task=task if len(task) <= MAX_TASK else task[: MAX_TASK - 1] + "…",
        timeout_s=plan.timeout_s,
        may_grow=plan.vram_mb is None and plan.inherited is None,
        mps_share=plan.mps_share if plan.mps else None,
        inherit=plan.inherited.id if plan.inherited is not None else "",
        part_mb=part_mb,
        resident_mb=min(part_mb, with_fragmentation(estimate().resident)) if shared else 0,
    )


def _added_mb(estimate: MemoryEstimate) -> int:
    return with_fragmentation(estimate.added, estimate.fragmentation)


def room_mb(plan: GpuPlan) -> tuple[int, int]:
    """(MiB to be had now, MiB to be had at all) on the best of the plan's devices. Both are the budget where
    `--vram` or a `gpu run` around us sets it."""
    fixed = plan.vram_mb if plan.vram_mb is not None else plan.inherited and plan.inherited.budget_mb
    if fixed is not None:
        return fixed, fixed
    view, readings = plan.ledger.look()
    states = [plan.ledger.state(device, view, readings) for device in plan.devices]
    now = max(available_mb(view.claims, state) or 0 for state in states)
    return now, max(state.usable_mb for state in states)


def budget_line(plan: GpuPlan, request: GpuRequest, estimate: Callable[[], MemoryEstimate]) -> str:
    """The budget, and where it comes from; the estimate is asked only where it is the budget."""
    if plan.inherited is not None:
        return f"GPU memory: {show_mb(request.budget_mb)} of reservation {request.inherit} (`gshare gpu run`)"
    if plan.vram_mb is not None:
        source = "--vram"
    else:
        source = f"{estimate().source}, with CUDA's context, workspaces and fragmentation; --vram sets it"
    return f"GPU memory to reserve: {show_mb(request.budget_mb)} ({source})"


def save_often(run: RunSpec) -> RunSpec:
    """Under MPS a neighbour's fault ends this trainer too: a checkpoint every `SAVE_STEPS` steps at most."""
    adapters = tuple(
        msgspec.structs.replace(spec, save_steps=min(spec.save_steps or SAVE_STEPS, SAVE_STEPS))
        for spec in run.adapters
    )
    return msgspec.structs.replace(run, adapters=adapters)


def _with_inherited(plan: GpuPlan, *, outlives: bool) -> GpuPlan:
    """The plan with the reservation of the `gpu run` around us. UsageError for what cannot be had in it."""
    name = os.environ.get(RESERVATION_VARIABLE)
    if not name:
        return plan
    shown = f"{RESERVATION_VARIABLE}={shorten(name)}"
    if outlives:
        return replace(plan, note=f"{shown} is not used: a detached run outlives it; reserving anew")
    try:
        row = find_inheritable(plan.ledger, name, plan.devices).row
    except NotInherited as error:
        return replace(plan, note=f"{shown} is not used: {error}; reserving anew")
    if plan.mps:
        raise UsageError(
            f"--experimental-mps: this runs under reservation {row.id} of `gshare gpu run`, which has no "
            "share of the GPU's threads; leave one of the two out"
        )
    if plan.vram_mb is not None and plan.vram_mb > row.budget_mb:
        raise UsageError(
            f"--vram: {plan.vram_mb} MiB are more than the {row.budget_mb} MiB of reservation {row.id}, "
            "under which this runs; raise the --vram of `gshare gpu run`"
        )
    return replace(plan, inherited=row)


def _check_cpu(flags: ReserveFlags, *, mps: bool) -> None:
    """What makes no sense without a GPU is an error; a budget alone is not, so that one command fits all."""
    if flags.gpus is not None or mps:
        what = "--gpus" if flags.gpus is not None else "--experimental-mps"
        raise UsageError(f"{what}: the run is on the CPU; leave it out, or see `gshare doctor`")


def _candidates(ledger: Ledger, gpus: str | None, device: str, number: str | None) -> tuple[Device, ...]:
    """The GPUs that the run may be on. `number` is the N of cuda:N, counted as the driver does."""
    found = tuple(one for one in ledger.list_devices() if one.memory_type != "cpu")
    note = ledger.source.note
    if gpus is not None:
        return find_devices(gpus, found, note=note)
    found = visible_devices(found)
    if device == "auto":
        return () if _torch_is_for_the_cpu() and not is_simulated() else found
    if device.startswith("cuda") and not found:
        raise UsageError(f"--device {device}: no GPU here{f' ({note})' if note else ''}")
    if number is None:
        return found
    if int(number) >= len(found):
        raise UsageError(f"--device {device}: there are {len(found)} GPUs, from cuda:0 on")
    return found[int(number) : int(number) + 1]


def _torch_is_for_the_cpu() -> bool:
    """By the local part of its version, without loading it: `2.13.0+cpu`."""
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def _check_fits(plan: GpuPlan, budget_mb: int) -> None:
    """As on empty devices: what cannot be had there can never be had."""
    readings = plan.ledger.read_devices(plan.devices)
    decisions = []
    for device in plan.devices:
        reading = readings[device.uuid]
        state = DeviceState(
            uuid=device.uuid,
            total_mb=reading.total_mb,
            outside_mb=0,
            reserve_factor=plan.ledger.factor(device),
            problem=reading.problem,
        )
        decisions.append((device.uuid, decide([], [], state, Request(mb=budget_mb))))
    _, decision = best_decision(decisions)
    if isinstance(decision, Never):
        raise UsageError(decision.reason) if decision.usage else GshareError(decision.reason)


def _with_mps(plan: GpuPlan, budget_mb: int) -> tuple[Device, ...]:
    """The devices on which MPS is granted; the first refusal when there is none."""
    granted, refused = [], []
    for device in plan.devices:
        try:
            mps_environment(device, share=plan.mps_share, budget_mb=budget_mb, ledger=plan.ledger)
            granted.append(device)
        except GshareError as error:
            refused.append(error)
    if not granted:
        raise refused[0]
    return tuple(granted)
