"""Joining over processes is exact: the bytes of each adapter are those of a run alone, whatever happened.

Real processes and the real engine. A trains alone; B joins it in the middle and is stopped by Ctrl-C; it
comes back with --resume; the trainer is killed with -9 while both are in a pass. A is paused while B starts,
which takes longer than a tiny model trains.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gshare.agent.service import registry
from gshare.agent.service.client import TrainerClient
from gshare.agent.service.protocol import PauseJobs, ResumeJobs
from gshare.cli import finetune as command

SUPPORT = Path(__file__).parent / "support"
STEPS = 240
FLAGS = {
    "base-dtype": "fp32",
    "device": "cpu",
    "r": 4,
    "max-steps": STEPS,
    "save-steps": 4,
    "eval-steps": 20,
    "max-length": 32,
    "per-device-train-batch-size": 2,
    "lora-dropout": 0.1,
    "val-fraction": 0.2,
}


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    for variable in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        (tmp_path / variable).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    for name in ("a", "b"):
        rows = [{"prompt": f"{name} {i}", "completion": f" answer {i * 7}"} for i in range(30)]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def start(model: Path, out: str, name: str, *more: str) -> subprocess.Popen[str]:
    flags = [text for key, value in FLAGS.items() for text in (f"--{key}", str(value))]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "gshare.cli.main", "finetune", "--model", str(model), *flags, *more),
            *("--adapter", f"{name}.jsonl:{out}/{name}"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def records(out: str, name: str) -> list[dict[str, float]]:
    path = Path(out, name, "metrics.jsonl")
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # just being written
            found.append(json.loads(line))
    return found


def wait_for_step(process: subprocess.Popen[str], out: str, name: str, step: int) -> None:
    deadline = time.monotonic() + 120
    while not any(record["step"] >= step for record in records(out, name)):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.02)


def finish(process: subprocess.Popen[str]) -> str:
    _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    return err


def losses(out: str, name: str) -> list[tuple[str, int, float]]:
    return [
        (r["type"], r["step"], r.get("loss", r.get("val_loss")))  # type: ignore[misc]
        for r in records(out, name)
        if r["type"] != "fingerprint"
    ]


def differences(name: str) -> list[str]:
    """What of an adapter is not as it is alone."""
    files = (
        *("adapter_model.safetensors", "adapter_config.json", "best/metadata.json"),
        f"checkpoint-{STEPS}/optimizer.safetensors",
    )
    found = [f for f in files if Path("shared", name, f).read_bytes() != Path("alone", name, f).read_bytes()]
    return found + ["losses"] * (losses("shared", name) != losses("alone", name))


def train(model: Path) -> None:
    """Both alone into `alone`, then sharing a trainer through all that into `shared`."""
    for name in "ab":
        finish(start(model, "alone", name, "--no-join"))
    a = start(model, "shared", "a")
    wait_for_step(a, "shared", "a", 10)
    (trainer,) = registry.live_trainers()
    client = TrainerClient(trainer, "test")
    client.ask(PauseJobs, jobs=["a"])
    b = start(model, "shared", "b")
    wait_for_step(b, "shared", "b", 5)
    client.ask(ResumeJobs, jobs=["a"])
    wait_for_step(b, "shared", "b", 30)
    b.send_signal(signal.SIGINT)
    client.ask(PauseJobs, jobs=["a"])
    _, err = b.communicate(timeout=60)
    assert b.returncode == 130, err
    assert f"joins trainer {trainer.name} of job a" in err
    assert a.poll() is None
    again = start(model, "shared", "b", "--resume")
    resumed = max(record["step"] for record in records("shared", "b"))
    wait_for_step(again, "shared", "b", int(resumed) + 5)
    client.ask(ResumeJobs, jobs=["a"])
    wait_for_step(again, "shared", "b", int(resumed) + 20)
    os.kill(client.hello.pid, signal.SIGKILL)
    err_a, err_b = finish(a), finish(again)
    assert "the trainer died" in err_a
    assert "the trainer died" in err_b
    assert "joins trainer" in err_b
    fused = [r for r in records("shared", "b") if r.get("adapters_in_pass") == 2]
    assert fused, "no pass ever held both, so this proves nothing"


@pytest.mark.timeout(400)
def test_joined_stopped_crashed_and_resumed_every_byte_is_that_of_a_run_alone(tiny_checkpoint: Path) -> None:
    train(tiny_checkpoint)
    assert {name: differences(name) for name in "ab"} == {"a": [], "b": []}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_control_an_engine_that_is_not_exact_is_found_out(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(command.RUNNER_VARIABLE, "inexact_runner:InexactRunner")
    train(tiny_checkpoint)
    assert "adapter_model.safetensors" in differences("b")
