"""Simulated devices: `GSHARE_DEVICES=file.toml`, so that sharing can be tried and tested without a GPU.

    [[device]]
    uuid = "GPU-sim-0"
    name = "Simulated 24 GB"
    total_mb = 24576
    memory_type = "discrete"        # discrete | unified
    mig = false
    used_by_others_mb = 0           # memory of programs outside the ledger
    state = "ok"                    # ok | no_memory_info | lost | failed
    compute_mode = "DEFAULT"        # DEFAULT | EXCLUSIVE_THREAD | PROHIBITED | EXCLUSIVE_PROCESS
    processes = [{ pid = 4711, used_mb = 300 }]     # what the driver would list

The file is read again whenever it changes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.errors import UsageError
from gshare.agent.jobs.names import nearest, shorten
from gshare.agent.vram.budget import MAX_MB
from gshare.agent.vram.devices import ComputeMode, Device, DeviceReading, ProcessUse, ReadingState
from gshare.agent.vram.rows import MAX_UUID
from gshare.agent.vram.settings import read_toml

#: No process has it: the owner of `used_by_others_mb`.
OTHERS_PID = 0

#: PID_MAX_LIMIT of a 64-bit kernel.
_MAX_PID = 1 << 22


class SimulatedProcess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pid: int
    used_mb: int | None = None


class SimulatedDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[device]]` table."""

    uuid: str
    name: str = "Simulated GPU"
    total_mb: int
    memory_type: str = "discrete"
    mig: bool = False
    used_by_others_mb: int = 0
    state: ReadingState = "ok"
    compute_mode: ComputeMode = "DEFAULT"
    processes: tuple[SimulatedProcess, ...] = ()


class SimulatedDevices:
    """The devices of one file. UsageError naming file, device and key when it is not such a file."""

    note = ""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._tables: dict[str, SimulatedDevice] = {}
        self._load()

    def devices(self) -> tuple[Device, ...]:
        self._load()
        return tuple(
            Device(
                uuid=table.uuid,
                name=table.name,
                index=index,
                memory_type="unified" if table.memory_type == "unified" else "discrete",
                mig=table.mig,
            )
            for index, table in enumerate(self._tables.values())
        )

    def read(self, device: Device) -> DeviceReading:
        self._load()
        table = self._tables.get(device.uuid)
        if table is None:
            return DeviceReading(state="lost", problem=f"{device.name}: gone from {self._path}")
        if table.state == "no_memory_info":
            problem = f"{device.name}: the driver reports no memory (simulated)"
            return DeviceReading(state=table.state, problem=problem)
        if table.state != "ok":
            return DeviceReading(state=table.state, problem=f"{device.name}: {table.state} (simulated)")
        listed = tuple(ProcessUse(process.pid, process.used_mb) for process in table.processes)
        used = table.used_by_others_mb + sum(process.used_mb or 0 for process in listed)
        others = (ProcessUse(OTHERS_PID, table.used_by_others_mb),) if table.used_by_others_mb else ()
        return DeviceReading(total_mb=table.total_mb, used_mb=used, processes=(*others, *listed))

    def compute_mode(self, device: Device) -> ComputeMode | None:
        self._load()
        table = self._tables.get(device.uuid)
        return table.compute_mode if table is not None and table.state == "ok" else None

    def _load(self) -> None:
        try:
            status = os.stat(self._path)
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp == self._stamp:
                return
            parsed = read_toml(self._path, what=f"GSHARE_DEVICES: {self._path}")
        except OSError as error:
            raise UsageError(f"GSHARE_DEVICES: {self._path}: {error.strerror}") from None
        self._tables = self._parse(parsed)
        self._stamp = stamp

    def _parse(self, parsed: dict[str, Any]) -> dict[str, SimulatedDevice]:
        where = f"GSHARE_DEVICES: {self._path}"
        for key in parsed:
            if key != "device":
                raise UsageError(f"{where}: unknown key {key!r}; devices are [[device]] tables")
        tables = parsed.get("device", [])
        if not isinstance(tables, list) or not tables:
            raise UsageError(f"{where}: no [[device]] table")
        found: dict[str, SimulatedDevice] = {}
        known = SimulatedDevice.__struct_fields__
        for number, table in enumerate(tables, 1):
            if not isinstance(table, dict):
                raise UsageError(f"{where}: device {number}: {shorten(table)} is no [[device]] table")
            for key in table:
                if key not in known:
                    near = nearest(key, known)
                    hint = f"; did you mean {near!r}?" if near else f"; known: {', '.join(known)}"
                    raise UsageError(f"{where}: device {number}: unknown key {key!r}{hint}")
            try:
                device = msgspec.convert(table, SimulatedDevice)
            except msgspec.ValidationError as error:
                raise UsageError(f"{where}: device {number}: {error}") from None
            if device.memory_type not in ("discrete", "unified"):
                raise UsageError(f"{where}: device {number}: memory_type must be discrete or unified")
            problem = _fault(device)
            if problem is None and device.uuid in found:
                problem = f"uuid {shorten(device.uuid)} is taken"
            if problem is not None:
                raise UsageError(f"{where}: device {number}: {problem}")
            found[device.uuid] = device
        return found


def _fault(device: SimulatedDevice) -> str | None:
    """What no driver would say, None when all of it could be."""
    for key, text in (("uuid", device.uuid), ("name", device.name)):
        if not text.isprintable() or not 0 < len(text) <= MAX_UUID:
            return f"{key} = {shorten(text)} must be 1 to {MAX_UUID} printable characters"
    amounts = [("total_mb", device.total_mb, 1), ("used_by_others_mb", device.used_by_others_mb, 0)]
    amounts += [("used_mb of a process", process.used_mb or 0, 0) for process in device.processes]
    for key, mb, least in amounts:
        if not least <= mb <= MAX_MB:
            return f"{key} = {shorten(mb)} must be {least} to {MAX_MB} MiB"
    for process in device.processes:
        if not 0 < process.pid <= _MAX_PID:
            return f"pid = {shorten(process.pid)} is no process's"
    return None
