"""The checks of `gshare doctor`: each looks at one thing and says what it found and how to mend it.

A check never raises and never changes anything of the user's: directories are tried with a file that is
removed again. torch is looked at in a process of its own (`gshare.agent.base.probe`).
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from gshare.agent.service.environment import trainer_environment, usable_cores

Status = Literal["ok", "warn", "fail"]

#: SmolLM2-135M in bf16 is 260 MiB; with torch itself, three adapters and activations under 2 GiB.
MIN_MEMORY_MIB = 2048
#: Less than this and the next checkpoint or the conversion of a model may not fit.
MIN_DISK_MIB = 2048
#: Importing torch from a cold disk took 20 s at worst.
PROBE_SECONDS = 120
INSTALL = "pip install 'gshare[train]'"


@dataclass(frozen=True)
class Check:
    """One finding. `fail` means that training is not possible; `warn`, that something is missing or slow."""

    name: str
    status: Status
    found: str
    mend: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def check_python() -> Check:
    """The interpreter; pip has already refused one that is too old."""
    return Check("python", "ok", f"{platform.python_version()} ({sys.executable})")


def check_machine() -> Iterator[Check]:
    """Cores and memory that this process may use."""
    cores = usable_cores()
    yield Check("cores", "ok", f"{cores} usable, {platform.machine()}")
    memory = psutil.virtual_memory()
    available, total = memory.available >> 20, memory.total >> 20
    found = f"{available} MiB available of {total} MiB"
    if available < MIN_MEMORY_MIB:
        mend = "end other programs, or take a smaller model; the smallest needs about 2 GiB"
        yield Check("memory", "warn", found, mend)
    else:
        yield Check("memory", "ok", found)


def run_probe() -> dict[str, dict[str, Any]]:
    """What the probe found, or `{"torch": {"ok": False, "error": …}}` when it died.

    It runs in `/`: `python -m` puts the working directory on sys.path, and a folder named `kernels` there
    would hide the package of that name from transformers.
    """
    command = [sys.executable, "-m", "gshare.agent.base.probe"]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **trainer_environment()},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"torch": {"ok": False, "error": f"import torch took more than {PROBE_SECONDS} s"}}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        return {"torch": {"ok": False, "error": f"the probe ended with {how}: {last}"}}
    return json.loads(done.stdout.splitlines()[-1])


def check_libraries(probe: dict[str, dict[str, Any]]) -> Iterator[Check]:
    """torch, the row check and the libraries around it, out of what the probe found."""
    torch = probe["torch"]
    if not torch["ok"]:
        yield Check("torch", "fail", torch["error"], INSTALL)
        return
    build = f"built for CUDA {torch['cuda_build']}" if torch["cuda_build"] else "built without CUDA"
    yield Check("torch", "ok", f"{torch['version']}, {build}")

    rows = probe["rows"]
    if rows["ok"]:
        kind = f"MKL_CBWR={rows['mkl_cbwr']}" if rows["mkl"] else "no MKL"
        yield Check("exact rows", "ok", f"packed rows have their solo bits ({kind})")
    else:
        mend = "training works and stays exact, but slower: the engine multiplies in tiles of one size"
        yield Check("exact rows", "warn", rows["error"], mend)

    for name, needed in (("transformers", True), ("safetensors", True), ("bitsandbytes", False)):
        part = probe[name]
        if part["ok"]:
            yield Check(name, "ok", part["version"])
        else:
            mend = INSTALL if needed else f"{INSTALL}; without it use base_dtype bf16, int8 or fp32"
            yield Check(name, "fail" if needed else "warn", part["error"], mend)
    for name, use in (("triton", "GPU kernels"), ("gguf", "GGUF files"), ("accelerate", "GGUF files")):
        part = probe[name]
        if part["ok"]:
            yield Check(name, "ok", part["version"])
        else:
            yield Check(name, "warn", part["error"], f"{INSTALL}; only {use} need it")


def check_gpus(torch: dict[str, Any], nvml: Any) -> Iterator[Check]:
    """Each NVIDIA GPU as NVML sees it, or why NVML sees none; then whether torch can use them.

    `nvml` is the module `pynvml`. No GPU is a warning: training runs on the CPU.
    """
    cpu = "training runs on the CPU"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        # The driver's library and its kernel module differ after an upgrade without a reboot.
        reasons = {
            nvml.NVML_ERROR_LIBRARY_NOT_FOUND: ("no NVIDIA driver", f"none needed: {cpu}"),
            nvml.NVML_ERROR_DRIVER_NOT_LOADED: (
                "the driver is installed but not loaded",
                "load it (modprobe nvidia) or reboot; in a container, start it with GPU access",
            ),
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
                "the driver's library and kernel module have different versions",
                "reboot, or reload the nvidia kernel modules",
            ),
            nvml.NVML_ERROR_NO_PERMISSION: (
                "no permission to ask the driver",
                "check the rights of /dev/nvidia* (groups video, render)",
            ),
        }
        found, mend = reasons.get(error.value, (str(error), f"see nvidia-smi; until then {cpu}"))
        yield Check("gpu", "warn", found, mend)
        return
    try:
        count = nvml.nvmlDeviceGetCount()
        if count == 0:
            yield Check("gpu", "warn", "the driver runs but shows no GPU", f"check CUDA devices; {cpu}")
        for index in range(count):
            yield _check_gpu(index, nvml)
        if not count or not torch["ok"]:
            return
        if not torch["cuda_available"]:
            reason = "torch was built without CUDA" if not torch.get("cuda_build") else "torch cannot use it"
            mend = "install a torch built for CUDA; `nvidia-smi` shows the newest CUDA that the driver takes"
            yield Check("cuda", "warn", f"{reason}; {cpu}", mend)
        else:
            names = ", ".join(f"{d['name']} (sm {d['capability']})" for d in torch["devices"])
            yield Check("cuda", "ok", f"torch uses {names}")
    finally:
        nvml.nvmlShutdown()


def _check_gpu(index: int, nvml: Any) -> Check:
    """One GPU. NVML answers N/A for memory on boards that share it with the CPU, and under MIG."""
    name = f"gpu {index}"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        title = nvml.nvmlDeviceGetName(handle)
    except nvml.NVMLError as error:
        mend = "the GPU has fallen off the bus or needs a reset: see dmesg, then reboot"
        return Check(name, "warn", f"does not answer: {error}", mend)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
            return Check(name, "ok", f"{title}, memory N/A (shared with the CPU, or MIG)")
        return Check(name, "warn", f"{title}, memory: {error}", "see nvidia-smi")
    return Check(name, "ok", f"{title}, {memory.free >> 20} MiB free of {memory.total >> 20} MiB")


def check_directory(name: str, path: Path, *, needs_disk: bool = True) -> Check:
    """Whether files can be made in `path`, or in the nearest parent that exists, and the room there."""
    where = path
    while not where.exists() and where != where.parent:
        where = where.parent
    try:
        with tempfile.NamedTemporaryFile(dir=where, prefix=".gshare-doctor-"):
            pass
        free = shutil.disk_usage(where).free >> 20
    except OSError as error:
        mend = f"make {path} writable, or move it with the variable or flag that names it"
        return Check(name, "fail", f"{path}: {error.strerror}", mend)
    if needs_disk and free < MIN_DISK_MIB:
        return Check(name, "warn", f"{path}, {free} MiB free", "make room: a checkpoint may not fit")
    return Check(name, "ok", f"{path}, {free} MiB free")


def check_ssh() -> Check:
    """The OpenSSH client and server: only a cluster needs them, and only a node the server."""
    client = shutil.which("ssh")
    server = shutil.which("sshd") or next((p for p in ("/usr/sbin/sshd",) if os.access(p, os.X_OK)), None)
    found = f"client {client or 'missing'}, server {server or 'missing'}"
    if client:
        return Check("ssh", "ok", found)
    return Check("ssh", "warn", found, "only a cluster needs it: install the package openssh-client")


def check_hub() -> Check:
    """Whether models may be fetched by hub id; the hub itself is not asked."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    found = "HF_HUB_OFFLINE is set: only cached models" if offline else "allowed, not asked now"
    return Check("hub", "ok", found)
