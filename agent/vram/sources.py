"""Which source of devices this machine has: simulated ones, NVML's, a Tegra board, or the CPU alone."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from gshare.agent.vram.devices import CPU_UUID, Device, DeviceSource, HostMemory, tegra_board
from gshare.agent.vram.nvml import NoNvml, NvmlDevices
from gshare.agent.vram.simulated import SimulatedDevices


def is_simulated(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `GSHARE_DEVICES` puts simulated devices in the place of this machine's."""
    return bool(environ.get("GSHARE_DEVICES"))


def open_devices(environ: Mapping[str, str] = os.environ) -> DeviceSource:
    """Simulated devices when `GSHARE_DEVICES` names a file, else NVML's, else a Tegra board, else the CPU.

    A driver that is there but does not work is no error here: its reason becomes the source's `note`,
    which `gpu status` shows and which a request for a GPU fails with.
    """
    simulated = environ.get("GSHARE_DEVICES")
    if simulated:
        return SimulatedDevices(Path(simulated))
    try:
        return NvmlDevices()
    except NoNvml as error:
        note = str(error)
    board = tegra_board()
    if board is not None:
        return HostMemory(board)
    name = f"{platform.machine()} CPU"
    return HostMemory(Device(uuid=CPU_UUID, name=name, index=0, memory_type="cpu"), note)
