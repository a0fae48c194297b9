"""NVIDIA GPUs through NVML (`pynvml`), with a fallback for each thing that a driver may not offer.

- Memory: version 2 of the call, whose `used` leaves out what the driver reserves; version 1 on old drivers.
- N/A (Jetson, GB10, some MIG and WSL2 set-ups): the GPU shares the CPU's memory, or nothing is known.
- Processes: the driver reports PIDs of the host. In another PID namespace they would be mistaken for our
  own, so there the list is left out and holders' own measurements are used.
- One lost card must not take the view of the others with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from gshare.agent.jobs.names import plain
from gshare.agent.vram.devices import (
    ComputeMode,
    Device,
    DeviceReading,
    ProcessUse,
    ReadingState,
    read_host_memory,
)

#: Inode of /proc/self/ns/pid in the host's own namespace: PROC_PID_INIT_INO, linux/proc_ns.h.
HOST_PID_NAMESPACE = 0xEFFFFFFC
#: 16 TiB. NVML marks "not available" with 2^64 - 1 in places.
_MAX_BYTES = 1 << 44
#: nvmlComputeMode_t, nvml.h.
_COMPUTE_MODES: dict[int, ComputeMode] = {
    0: "DEFAULT",
    1: "EXCLUSIVE_THREAD",
    2: "PROHIBITED",
    3: "EXCLUSIVE_PROCESS",
}


class NoNvml(Exception):
    """NVML cannot be used here, or shows no GPU; the text says why."""


def in_host_namespace() -> bool:
    """Whether PIDs that the driver reports mean the same processes to us."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == HOST_PID_NAMESPACE
    except OSError:
        return False


class NvmlDevices:
    """Every GPU and MIG slice that the driver shows. `nvml` is the module `pynvml`, or a test's own."""

    note = ""

    def __init__(self, nvml: Any = None, host_pids: bool | None = None) -> None:
        if nvml is None:
            import pynvml as nvml
        self._nvml = nvml
        self._host_pids = in_host_namespace() if host_pids is None else host_pids
        self._handles: dict[str, Any] = {}
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise NoNvml(self._init_fault(error)) from None
        if count == 0:
            raise NoNvml("the NVIDIA driver runs but shows no GPU")
        self._devices = tuple(device for index in range(count) for device in self._find(index))

    def devices(self) -> tuple[Device, ...]:
        return self._devices

    def read(self, device: Device) -> DeviceReading:
        """One look; never raises for a device in trouble."""
        handle = self._handles.get(device.uuid)
        if handle is None:
            return DeviceReading(state="lost", problem=f"{device.name}: see dmesg, then reboot")
        if device.memory_type == "unified":
            return read_host_memory()
        try:
            total, used = self._memory(handle)
        except self._nvml.NVMLError as error:
            return self._failed(device, error)
        if total is None or used is None:
            return DeviceReading(
                state="no_memory_info", problem=f"{device.name}: the driver reports no memory"
            )
        processes = self._processes(handle) if self._host_pids else None
        return DeviceReading(total_mb=total, used_mb=used, processes=processes)

    def compute_mode(self, device: Device) -> ComputeMode | None:
        """Who may have a context there; None when the driver does not say (lost card, MIG slice, Jetson)."""
        nvml = self._nvml
        handle = self._handles.get(device.uuid)
        if handle is None:
            return None
        try:
            return _COMPUTE_MODES.get(nvml.nvmlDeviceGetComputeMode(handle))
        except nvml.NVMLError:
            return None

    def _init_fault(self, error: Any) -> str:
        nvml = self._nvml
        reasons = {
            nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver",
            nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is there but not loaded: modprobe nvidia",
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
                "the NVIDIA driver's library and kernel module have different versions: reboot"
            ),
            nvml.NVML_ERROR_NO_PERMISSION: (
                "no permission to ask the NVIDIA driver: check the rights of /dev/nvidia*"
            ),
            nvml.NVML_ERROR_GPU_IS_LOST: "a GPU has fallen off the bus: see dmesg, then reboot",
        }
        return reasons.get(error.value, f"NVML does not start: {error}")

    def _find(self, index: int) -> Iterable[Device]:
        """The GPU at `index`, or its MIG slices, or a stand-in for a card that does not answer."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid, name = plain(nvml.nvmlDeviceGetUUID(handle)), plain(nvml.nvmlDeviceGetName(handle))
        except nvml.NVMLError as error:
            yield Device(uuid=f"LOST-{index}", name=f"GPU {index} does not answer ({error})", index=index)
            return
        slices = list(self._slices(handle, index, name))
        if slices:
            yield from slices
            return
        self._handles[uuid] = handle
        unified = self._shares_cpu_memory(handle)
        yield Device(uuid=uuid, name=name, index=index, memory_type="unified" if unified else "discrete")

    def _slices(self, handle: Any, index: int, name: str) -> Iterable[Device]:
        """MIG slices of a GPU: with MIG on, CUDA runs in a slice and never on the whole."""
        nvml = self._nvml
        try:
            current, _pending = nvml.nvmlDeviceGetMigMode(handle)
            most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if current else 0
        except nvml.NVMLError:
            return
        for place in range(most):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
                uuid = plain(nvml.nvmlDeviceGetUUID(part))
            except nvml.NVMLError:
                continue  # places without a slice answer "not found"
            self._handles[uuid] = part
            yield Device(uuid=uuid, name=f"{name} MIG {place}", index=index, mig=True)

    def _shares_cpu_memory(self, handle: Any) -> bool:
        """GB10 and Jetson answer "not supported": the GPU has no memory of its own."""
        nvml = self._nvml
        try:
            self._memory(handle)
        except nvml.NVMLError as error:
            return error.value == nvml.NVML_ERROR_NOT_SUPPORTED
        return False

    def _memory(self, handle: Any) -> tuple[int | None, int | None]:
        """(total, used) in MiB, each None when the driver gives no sensible number."""
        nvml = self._nvml
        old = (nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
        except nvml.NVMLError as error:
            if error.value not in old:
                raise
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total = memory.total >> 20 if 0 < memory.total < _MAX_BYTES else None
        used = -(-memory.used >> 20) if 0 <= memory.used < _MAX_BYTES else None
        return total, used

    def _processes(self, handle: Any) -> tuple[ProcessUse, ...] | None:
        """Who uses the device. One that computes and draws is in two lists with the same number."""
        found: dict[int, int | None] = {}
        answered = False
        for kind in ("Compute", "Graphics", "MPSCompute"):
            listed = self._running(kind, handle)
            answered = answered or listed is not None
            for entry in listed or ():
                used = entry.usedGpuMemory
                mb = -(-used >> 20) if used is not None and used < _MAX_BYTES else None
                before = found.get(entry.pid)
                found[entry.pid] = max(mb, before) if mb is not None and before is not None else mb or before
        return tuple(ProcessUse(pid, mb) for pid, mb in sorted(found.items())) if answered else None

    def _running(self, kind: str, handle: Any) -> list[Any] | None:
        """One list of processes, by the newest version of the call that this driver has."""
        nvml = self._nvml
        for version in ("", "_v2"):
            call = getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses{version}", None)
            if call is None:
                continue
            try:
                return list(call(handle))
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                    return None
        return None

    def _failed(self, device: Device, error: Any) -> DeviceReading:
        nvml = self._nvml
        states: dict[int, tuple[ReadingState, str]] = {
            nvml.NVML_ERROR_GPU_IS_LOST: ("lost", "has fallen off the bus: see dmesg, then reboot"),
            nvml.NVML_ERROR_RESET_REQUIRED: ("lost", "needs a reset: see dmesg"),
            nvml.NVML_ERROR_NOT_SUPPORTED: ("no_memory_info", "the driver reports no memory"),
            nvml.NVML_ERROR_NO_PERMISSION: ("no_memory_info", "no permission to read its memory"),
        }
        state, text = states.get(error.value, ("failed", f"does not answer: {error}"))
        return DeviceReading(state=state, problem=f"{device.name}: {text}")
