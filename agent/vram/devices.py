"""Devices and what they say of their memory.

A device that does not answer, or answers "N/A", is a state of its own: never 0 and never 2^64, so that
nobody takes it for free. MiB throughout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

import msgspec
import psutil
from gshare.agent.jobs.names import plain

MemoryType = Literal["discrete", "unified", "cpu"]
#: `no_memory_info`: the driver answers N/A. `lost`: the card has fallen off the bus. `failed`: anything else.
ReadingState = Literal["ok", "no_memory_info", "lost", "failed"]
#: Who may have a context on the device; NVML's names. None: the driver does not say.
ComputeMode = Literal["DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS"]

#: The one device of a machine without a GPU: its main memory.
CPU_UUID = "CPU"


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that memory can be reserved on. `index` is the driver's, for people only."""

    uuid: str
    name: str
    index: int
    memory_type: MemoryType = "discrete"
    mig: bool = False

    @property
    def cuda_name(self) -> str | None:
        """What CUDA_VISIBLE_DEVICES takes: the UUID, an index on a Tegra board, None on the CPU."""
        if self.memory_type == "cpu":
            return None
        return str(self.index) if self.uuid.startswith("TEGRA-") else self.uuid


class ProcessUse(msgspec.Struct, frozen=True):
    """One process as the driver lists it; `used_mb` None where the driver does not say."""

    pid: int
    used_mb: int | None


class DeviceReading(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a device. `processes` None: this machine cannot tell who uses what."""

    state: ReadingState = "ok"
    problem: str = ""  # one line for people, when `state` is not "ok"
    total_mb: int | None = None
    used_mb: int | None = None
    processes: tuple[ProcessUse, ...] | None = None


class DeviceSource(Protocol):
    """Where devices come from: NVML, a file of simulated ones, or the CPU."""

    note: str  # why there is no GPU; empty when there is one

    def devices(self) -> tuple[Device, ...]: ...

    def read(self, device: Device) -> DeviceReading: ...

    def compute_mode(self, device: Device) -> ComputeMode | None: ...


class HostMemory:
    """A machine whose only memory is the CPU's: no GPU, or one Tegra board that NVML does not show."""

    def __init__(self, device: Device, note: str = "") -> None:
        self.note = note
        self._device = device

    def devices(self) -> tuple[Device, ...]:
        return (self._device,)

    def read(self, device: Device) -> DeviceReading:
        return read_host_memory()

    def compute_mode(self, device: Device) -> ComputeMode | None:
        return None


def read_host_memory() -> DeviceReading:
    """Main memory: used is what is not available without swapping. No list of processes."""
    memory = psutil.virtual_memory()
    total, available = memory.total >> 20, memory.available >> 20
    return DeviceReading(total_mb=total, used_mb=total - available)


def tegra_board(device_tree: Path = Path("/proc/device-tree")) -> Device | None:
    """The Jetson that this is, by its device tree; None on any other machine."""

    def text(name: str) -> str:
        try:
            return plain(
                (device_tree / name).read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
            )
        except OSError:
            return ""

    if "nvidia,tegra" not in text("compatible"):
        return None
    serial = text("serial-number") or "0"
    name = text("model") or "NVIDIA Tegra"
    return Device(uuid=f"TEGRA-{serial}", name=name, index=0, memory_type="unified")
