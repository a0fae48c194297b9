"""How a node is: GPUs and their ledger, cores, memory, disk, driver, whether its services outlive a login.

What cannot be known is None. `problems` are lines for people that say what to do.
"""

from __future__ import annotations

import contextlib
import os
import platform
import pwd
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil
from gshare.agent.errors import GshareError
from gshare.agent.jobs.names import plain
from gshare.agent.node.durable import free_bytes
from gshare.agent.node.protocol import GpuInfo, NodeInfo, ReservationInfo
from gshare.agent.vram.ledger import Ledger
from gshare.agent.vram.status import DeviceStatus, Status, status

#: With less than this a checkpoint of a larger adapter may fail.
LOW_DISK = 2 << 30
_LOGINCTL_SECONDS = 5.0


@dataclass(frozen=True)
class Devices:
    """One look at GPUs and ledger."""

    gpus: list[GpuInfo] = field(default_factory=list)
    reservations: list[ReservationInfo] = field(default_factory=list)
    driver: str = ""
    problems: list[str] = field(default_factory=list)


class Health:
    """Every method may block: the driver, the ledger's lock, the disk."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._nvml: Any = None
        self._linger: bool | None = None
        self._linger_asked = False
        psutil.cpu_percent()  # the first call begins the interval that the next one tells of

    def devices(self) -> Devices:
        """What driver and ledger say; a driver in trouble may hang here."""
        try:
            seen = status(Ledger())
        except GshareError as error:
            return Devices(problems=[f"the ledger cannot be read: {error}"])
        return Devices(
            gpus=[self._gpu(device) for device in seen.devices if device.memory_type != "cpu"],
            reservations=_reservations(seen),
            driver=self._driver(),
            problems=_ledger_problems(seen),
        )

    def describe(
        self,
        reply_to: int,
        devices: Devices | None,
        *,
        attempts_running: int,
        problems: Sequence[str] = (),
        models: Sequence[str] = (),
    ) -> NodeInfo:
        """The node now; `problems` of the agent itself come first. `devices` None: they did not answer.
        `models` are paths, or hub ids, which are not looked for."""
        found = list(problems)
        if devices is None:
            devices = Devices(
                problems=["the GPU driver or the ledger does not answer: see dmesg and `gshare gpu status`"]
            )
        found += devices.problems
        found += [
            f"{plain(model)[:300]}, in `models` of cluster.toml, is not there; correct the path"
            for model in models
            if model.startswith(("/", "~")) and not os.path.exists(os.path.expanduser(model))
        ]
        memory = psutil.virtual_memory()
        disk_free = self._disk_free(found)
        linger = self._lingers()
        if linger is False:
            found.append(
                "user services end at logout here, and the agent with them: "
                f"loginctl enable-linger {user_name()} keeps them"
            )
        return NodeInfo(
            reply_to=reply_to,
            hostname=socket.gethostname(),
            time=time.time(),
            uptime_s=time.clock_gettime(time.CLOCK_BOOTTIME),
            machine=platform.machine(),
            python=platform.python_version(),
            torch=_torch_version(),
            driver=devices.driver,
            cpu_cores=len(os.sched_getaffinity(0)),
            cpu_percent=psutil.cpu_percent(),
            ram_mb=memory.total >> 20,
            ram_free_mb=memory.available >> 20,
            disk_free_mb=None if disk_free is None else max(0, disk_free) >> 20,
            linger=linger,
            gpus=devices.gpus,
            reservations=devices.reservations,
            problems=found,
            attempts_running=attempts_running,
        )

    def _disk_free(self, problems: list[str]) -> int | None:
        try:
            free = free_bytes(self._state_dir)
        except OSError as error:
            problems.append(f"{self._state_dir}: {error.strerror}")
            return None
        if free < LOW_DISK:
            problems.append(
                f"the disk is nearly full: {self._state_dir} has room for {max(0, free) >> 20} MiB; free some"
            )
        return free

    def _gpu(self, device: DeviceStatus) -> GpuInfo:
        kind: Literal["discrete", "unified"] = "unified" if device.memory_type == "unified" else "discrete"
        rows = device.reservations
        load, temperature, power = self._sensors(device.uuid)
        return GpuInfo(
            uuid=device.uuid,
            name=device.name,
            memory_type=kind,
            total_mb=device.total_mb,
            used_mb=device.used_mb,
            reserved_mb=sum(max(row.budget_mb, row.peak_mb) for row in rows),
            peak_mb=sum(row.peak_mb for row in rows),
            outside_mb=device.outside_mb,
            free_mb=device.available_ledger_mb,
            load_percent=load,
            temperature_c=temperature,
            power_w=power,
            problem=device.problem,
        )

    def _sensors(self, uuid: str) -> tuple[int | None, int | None, float | None]:
        """Load in percent, °C, W; each None where the driver does not say (simulated devices, MIG slices)."""
        nvml = self._driver_library()
        if nvml is None:
            return None, None, None
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError:
            return None, None, None

        def ask(question: Any, *arguments: Any) -> Any:
            try:
                return question(handle, *arguments)
            except nvml.NVMLError:
                return None

        use = ask(nvml.nvmlDeviceGetUtilizationRates)
        power = ask(nvml.nvmlDeviceGetPowerUsage)
        return (
            use.gpu if use is not None else None,
            ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            power / 1000 if power is not None else None,
        )

    def _driver(self) -> str:
        nvml = self._driver_library()
        if nvml is None:
            return ""
        with contextlib.suppress(nvml.NVMLError):
            return str(nvml.nvmlSystemGetDriverVersion())
        return ""

    def _driver_library(self) -> Any:
        """NVML, asked for once; None where there is no driver."""
        if self._nvml is None:
            self._nvml = False
            with contextlib.suppress(ImportError):
                import pynvml

                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlInit()
                    self._nvml = pynvml
        return self._nvml or None

    def _lingers(self) -> bool | None:
        """Asked once: it is an administrator's setting."""
        if not self._linger_asked:
            self._linger_asked = True
            self._linger = lingers()
        return self._linger


def lingers(linger_dir: Path = Path("/var/lib/systemd/linger")) -> bool | None:
    """Whether this user's services run without a login; None: no systemd here, or it does not say."""
    if not Path("/run/systemd/system").is_dir():
        return None
    user = user_name()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["loginctl", "show-user", user, "--property=Linger", "--value"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LOGINCTL_SECONDS,
            check=False,
        )
        if done.stdout.strip() in ("yes", "no"):
            return done.stdout.strip() == "yes"
    try:
        return (linger_dir / user).exists()
    except OSError:
        return None


def user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _torch_version() -> str:
    """By its metadata, without loading it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _reservations(seen: Status) -> list[ReservationInfo]:
    now = time.time()
    found = [
        ReservationInfo(
            id=row.id,
            gpu_uuid=device.uuid,
            budget_mb=row.budget_mb,
            peak_mb=row.peak_mb,
            task=row.task,
            pid=row.pid,
            user=row.user,
            created=now - (row.age_s or 0.0),
            state="held",
            clients={client.name: client.budget_mb for client in row.clients},
            lease=row.lease_left_s is not None,
        )
        for device in seen.devices
        for row in device.reservations
    ]
    found += [
        ReservationInfo(
            id=f"waiting-{waiter.pid}-{waiter.position}",
            gpu_uuid=device.uuid,
            budget_mb=waiter.request_mb,
            peak_mb=None,
            task=waiter.task,
            pid=waiter.pid,
            user=waiter.user,
            created=now - waiter.waited_s,
            state="waiting",
            position=waiter.position,
            reason=waiter.reason,
        )
        for device in seen.devices
        for waiter in device.queue
    ]
    return found


def _ledger_problems(seen: Status) -> list[str]:
    problems = [device.problem for device in seen.devices if device.problem]
    problems += [f"ledger: {damaged.name}: {damaged.reason}; gshare gpu repair" for damaged in seen.damaged]
    if seen.note and not any(device.memory_type != "cpu" for device in seen.devices) and _has_gpu_nodes():
        problems.append(seen.note)
    return problems


def _has_gpu_nodes() -> bool:
    """Whether a driver is meant to be here: then its silence is a problem and not a machine without a GPU."""
    return sys.platform == "linux" and Path("/proc/driver/nvidia").exists()
