"""`gshare doctor`: every state of a GPU, of torch and of a directory has its own finding and mending."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from gshare.cli import doctor as command
from gshare.cli import doctor_checks as checks
from rich.console import Console

CPU_TORCH = {"ok": True, "version": "2.13.0", "cuda_build": None, "cuda_available": False, "devices": []}
CUDA_TORCH = {
    **CPU_TORCH,
    "cuda_build": "13.0",
    "cuda_available": True,
    "devices": [{"name": "Card", "capability": "9.0", "memory_mib": 80_000}],
}
GOOD_PROBE: dict[str, dict[str, Any]] = {
    "torch": CPU_TORCH,
    "rows": {"ok": True, "mkl": True, "mkl_cbwr": "AVX2,STRICT"},
    **{
        name: {"ok": True, "version": "1"}
        for name in ("transformers", "safetensors", "bitsandbytes", "triton", "gguf", "accelerate")
    },
}


class FakeNvml:
    """The part of pynvml that doctor uses, with one error at one place."""

    def __init__(self, *, count: int = 1, init: int = 0, handle: int = 0, memory: int = 0) -> None:
        self._count, self._errors = count, {"init": init, "handle": handle, "memory": memory}
        self.shut_down = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("NVML_ERROR_", "NVMLError")):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def _raise(self, where: str) -> None:
        if self._errors[where]:
            raise pynvml.NVMLError(self._errors[where])

    def nvmlInit(self) -> None:
        self._raise("init")

    def nvmlShutdown(self) -> None:
        self.shut_down = True

    def nvmlDeviceGetCount(self) -> int:
        return self._count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._raise("handle")
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "Card"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        self._raise("memory")
        return SimpleNamespace(free=10 << 30, total=80 << 30)


@pytest.mark.parametrize(
    ("error", "found", "mend"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver", "CPU"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded", "modprobe"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "different versions", "reboot"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "permission", "/dev/nvidia"),
        (pynvml.NVML_ERROR_UNKNOWN, "Unknown", "nvidia-smi"),
    ],
)
def test_no_gpu_for_each_reason(error: int, found: str, mend: str) -> None:
    (check,) = checks.check_gpus(CPU_TORCH, FakeNvml(init=error))
    assert check.status == "warn"
    assert found in check.found
    assert mend in check.mend


def test_a_good_gpu() -> None:
    nvml = FakeNvml()
    gpu, cuda = checks.check_gpus(CUDA_TORCH, nvml)
    assert (gpu.status, gpu.found) == ("ok", "Card, 10240 MiB free of 81920 MiB")
    assert (cuda.status, cuda.found) == ("ok", "torch uses Card (sm 9.0)")
    assert nvml.shut_down


@pytest.mark.parametrize(
    ("nvml", "status", "part"),
    [
        (FakeNvml(memory=pynvml.NVML_ERROR_NOT_SUPPORTED), "ok", "N/A"),
        (FakeNvml(memory=pynvml.NVML_ERROR_UNKNOWN), "warn", "memory: "),
        (FakeNvml(handle=pynvml.NVML_ERROR_GPU_IS_LOST), "warn", "does not answer"),
        (FakeNvml(count=0), "warn", "shows no GPU"),
    ],
)
def test_a_gpu_in_trouble(nvml: FakeNvml, status: str, part: str) -> None:
    first = next(checks.check_gpus(CUDA_TORCH, nvml))
    assert first.status == status
    assert part in first.found


@pytest.mark.parametrize(
    ("torch", "reason"),
    [(CPU_TORCH, "without CUDA"), ({**CPU_TORCH, "cuda_build": "13.0"}, "cannot use it")],
)
def test_a_gpu_that_torch_cannot_use(torch: dict[str, Any], reason: str) -> None:
    _, cuda = checks.check_gpus(torch, FakeNvml())
    assert cuda.status == "warn"
    assert reason in cuda.found


def test_a_gpu_without_torch_says_nothing_of_cuda() -> None:
    names = [check.name for check in checks.check_gpus({"ok": False, "error": "x"}, FakeNvml())]
    assert names == ["gpu 0"]


def test_libraries() -> None:
    assert [c.status for c in checks.check_libraries(GOOD_PROBE)] == ["ok"] * 8


@pytest.mark.parametrize(
    ("name", "status"),
    [
        *((name, "fail") for name in ("torch", "transformers", "safetensors")),
        *((name, "warn") for name in ("bitsandbytes", "triton", "gguf", "accelerate", "rows")),
    ],
)
def test_a_missing_library(name: str, status: str) -> None:
    probe = {**GOOD_PROBE, name: {"ok": False, "error": "ImportError: no"}}
    (bad,) = (check for check in checks.check_libraries(probe) if check.status != "ok")
    assert bad.status == status
    assert bad.mend


@pytest.mark.parametrize(
    ("program", "part"),
    [
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("raise SystemExit('bad wheel')", "exit code 1: bad wheel"),
        ("import time; time.sleep(60)", "more than"),
    ],
)
def test_a_probe_that_dies_is_a_finding(monkeypatch: pytest.MonkeyPatch, program: str, part: str) -> None:
    real = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", program], **options)

    monkeypatch.setattr(checks.subprocess, "run", run)
    if part == "more than":  # the others are to end by themselves, and a start may take ten seconds
        monkeypatch.setattr(checks, "PROBE_SECONDS", 2)
    assert part in checks.run_probe()["torch"]["error"]


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = checks.check_directory("cache", tmp_path / "not" / "yet")
    assert there.status == "ok"
    assert not (tmp_path / "not").exists()
    assert list(tmp_path.iterdir()) == []

    # A file cannot be made in /proc, whoever asks; root may write anywhere else.
    assert checks.check_directory("cache", Path("/proc/gshare")).status == "fail"

    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    full = checks.check_directory("output", tmp_path)
    assert (full.status, "1 MiB free" in full.found) == ("warn", True)
    assert checks.check_directory("state", tmp_path, needs_disk=False).status == "ok"


@pytest.mark.parametrize(("value", "part"), [("1", "only cached"), ("0", "not asked"), ("", "not asked")])
def test_hub(monkeypatch: pytest.MonkeyPatch, value: str, part: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert part in checks.check_hub().found


def test_json_and_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run_probe", lambda: GOOD_PROBE)
    assert command.doctor(json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["training_possible"] is True
    assert {"python", "torch", "memory", "output", "cache", "runtime", "ssh"} <= {
        check["name"] for check in report["checks"]
    }

    monkeypatch.setattr(command, "run_probe", lambda: {"torch": {"ok": False, "error": "ImportError: no"}})
    assert command.doctor(json=True) == 1
    assert json.loads(capsys.readouterr().out)["training_possible"] is False


def test_report_shows_names_as_they_are() -> None:
    console = Console(width=40, record=True, file=io.StringIO())
    found = [checks.Check("gpu 0", "warn", "[bold]Card[/bold]", "mend [it]")]
    command.render(found, True, console)
    text = console.export_text()
    assert "warn gpu 0  [bold]Card[/bold]" in text
    assert "→ mend [it]" in text
