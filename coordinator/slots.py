"""Slots: one GPU of a node, or the CPU and RAM of a node without any; what is on them and what still fits.

All memory in MiB.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from gshare.agent.node.protocol import GpuInfo, NodeInfo
from gshare.agent.vram.settings import RESERVE_FACTOR
from gshare.coordinator.config import GpuConfig, NodeConfig
from gshare.coordinator.speeds import CPU_FACTOR, speed_factor


class SlotView(NamedTuple):
    """What is known of one slot from outside; None: unknown, or (adapters) no limit."""

    gpu: str  # UUID; empty: CPU and RAM
    factor: float
    capacity_mb: int | None  # the most that may be reserved there, when it is empty
    free_mb: int | None  # what the node would grant now
    max_adapters: int | None = None
    usable: bool = True  # False: nothing new there now


class NodeView(NamedTuple):
    """What is known of a node. `slots` None: it was never heard of."""

    name: str
    placeable: bool
    max_adapters: int | None
    models: frozenset[str]
    slots: tuple[SlotView, ...] | None
    early_exit: bool = False  # its agent knows it


def view_of(
    config: NodeConfig, info: NodeInfo | None, *, placeable: bool, early_exit: bool = False
) -> NodeView:
    """The configuration, where it says something, else what the node says itself."""
    slots: tuple[SlotView, ...] | None = None
    if info is not None:
        listed = {gpu.uuid: gpu for gpu in config.gpus or ()}
        chosen = [gpu for gpu in info.gpus if config.gpus is None or gpu.uuid in listed]
        slots = tuple(_gpu_slot(gpu, listed.get(gpu.uuid)) for gpu in chosen)
        if not slots and not listed:
            capacity = int(min(info.ram_mb, config.ram_mb or info.ram_mb) * RESERVE_FACTOR["cpu"])
            slots = (SlotView("", CPU_FACTOR, capacity, info.ram_free_mb),)
    models = frozenset(config.models)
    return NodeView(config.name, placeable, config.max_adapters, models, slots, early_exit)


def _gpu_slot(gpu: GpuInfo, config: GpuConfig | None) -> SlotView:
    memory_type = (config and config.memory_type) or gpu.memory_type
    said = [mb for mb in (gpu.total_mb, config and config.vram_mb) if mb]
    capacity = int(min(said) * RESERVE_FACTOR[memory_type]) if said else None
    return SlotView(
        gpu.uuid,
        speed_factor((config and config.type) or gpu.name),
        capacity,
        gpu.free_mb,
        config.max_adapters if config else None,
        usable=not gpu.problem,
    )


@dataclass(slots=True)
class Held:
    """An attempt on a slot. Until it is settled, the node's free memory does not show it yet."""

    base: str
    budget_mb: int
    running: bool = False
    settled: bool = False


@dataclass(slots=True)
class Slot:
    """One slot and what this coordinator has on it."""

    node: str
    view: SlotView
    held: dict[str, Held] = field(default_factory=dict)  # by job
    bases: dict[str, int] = field(default_factory=dict)  # base → adapters of it here
    available_mb: int = 0  # what a new adapter could get now
    worth: float = 0.0  # available × factor / (1 + adapters)
    listed: bool = False  # stands in the sorted lists

    def measure(self) -> None:
        """Works `available_mb` and `worth` out anew: the least of what the node says and what our own
        budgets leave; 0 when neither is known."""
        ours = sum(held.budget_mb for held in self.held.values())
        said = []
        if self.view.capacity_mb is not None:
            said.append(self.view.capacity_mb - ours)
        if self.view.free_mb is not None:
            coming = sum(held.budget_mb for held in self.held.values() if not held.settled)
            said.append(self.view.free_mb - coming)
        self.available_mb = max(0, min(said)) if said else 0
        self.worth = self.available_mb * self.view.factor / (1 + len(self.held))

    def put(self, job: str, base: str, budget_mb: int, running: bool) -> None:
        self.held[job] = Held(base, budget_mb, running)
        self.bases[base] = self.bases.get(base, 0) + 1

    def take(self, job: str) -> None:
        base = self.held.pop(job).base
        self.bases[base] -= 1
        if not self.bases[base]:
            del self.bases[base]

    def reported(self, view: SlotView) -> None:
        """A new report: what ran before it is in it."""
        self.view = view
        for held in self.held.values():
            held.settled = held.settled or held.running

    @property
    def full(self) -> bool:
        return self.view.max_adapters is not None and len(self.held) >= self.view.max_adapters
