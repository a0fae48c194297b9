"""A warm clone over processes: its bytes are those of a run alone from the same weights, whatever happened.

Real processes and the real engine. b is cloned from a while a trains; the trainer is killed with -9 while
both are in a pass; then b's client is killed too, and `gshare finetune` goes on with what it left.
"""

from __future__ import annotations

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

STEPS = 200
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
FILES = ("adapter_model.safetensors", "best/metadata.json", f"checkpoint-{STEPS}/optimizer.safetensors")


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        (tmp_path / variable).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    rows = [{"prompt": f"a {i}", "completion": f" answer {i * 7}"} for i in range(30)]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)))


def gshare(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gshare.cli.main", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finetune(model: Path, out: str, *more: str) -> subprocess.Popen[str]:
    flags = [text for key, value in FLAGS.items() for text in (f"--{key}", str(value))]
    return gshare("finetune", "--model", str(model), *flags, *more, "--adapter", f"a.jsonl:{out}/a")


def step_of(directory: str) -> int:
    path = Path(directory, "metrics.jsonl")
    return path.read_text().count('"type":"step"') if path.exists() else 0


def wait_for_step(process: subprocess.Popen[str], directory: str, step: int) -> None:
    deadline = time.monotonic() + 120
    while step_of(directory) < step:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.02)


def finish(process: subprocess.Popen[str]) -> str:
    _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    return err


def differing(one: str, other: str) -> list[str]:
    return [file for file in FILES if Path(one, file).read_bytes() != Path(other, file).read_bytes()]


def alone(clone: str, out: str, *, weights: bool = True) -> None:
    """Make the clone again from what it recorded, by itself; without the `weights` it is a cold one."""
    Path(out).mkdir(parents=True)
    if weights:
        Path(out, "start").mkdir()
        for file in Path(clone, "start").iterdir():
            Path(out, "start", file.name).write_bytes(file.read_bytes())
        record = Path(clone, "run.json").read_text()
        Path(out, "run.json").write_text(record.replace(clone, out))
    spec = Path(clone, "clone.toml").read_text()
    Path(out, "clone.toml").write_text(
        spec.replace(f'output_dir = "{Path(clone).absolute()}"', 'output_dir = "."')
    )
    more = ["--resume"] if weights else []
    finish(
        gshare("finetune", "--no-join", "--device", "cpu", "--adapters-config", f"{out}/clone.toml", *more)
    )


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_cloned_killed_and_resumed_every_byte_is_that_of_a_run_alone(tiny_checkpoint: Path) -> None:
    finish(finetune(tiny_checkpoint, "alone", "--no-join"))
    a = finetune(tiny_checkpoint, "shared")
    wait_for_step(a, "shared/a", 10)
    (trainer,) = registry.live_trainers()
    client = TrainerClient(trainer, "test")
    client.ask(PauseJobs, jobs=["a"])  # a tiny model trains faster than a clone starts
    b = gshare(
        "jobs", "clone", "a", "--warm", "--set", "learning_rate=1e-3", "--set", "seed=5", "--name", "b"
    )
    wait_for_step(b, "shared/b", 5)
    client.ask(ResumeJobs, jobs=["a"])
    wait_for_step(b, "shared/b", 20)
    os.kill(client.hello.pid, signal.SIGKILL)
    assert "the trainer died" in finish(a)
    wait_for_step(b, "shared/b", 30)
    b.kill()
    _, err = b.communicate()
    assert f"joins trainer {trainer.name} of job a" in err
    deadline = time.monotonic() + 60
    while registry.live_trainers() and time.monotonic() < deadline:
        time.sleep(0.05)  # it sees that its last client is gone, and checkpoints
    if not Path("shared/b/adapter_model.safetensors").exists():  # killed before its end: on most machines
        finish(gshare("finetune", "--device", "cpu", "--resume", "--adapters-config", "shared/b/clone.toml"))

    assert differing("shared/a", "alone/a") == []
    alone("shared/b", "alone/b")
    assert differing("shared/b", "alone/b") == []
    alone("shared/b", "cold/b", weights=False)
    assert differing("shared/b", "cold/b") == list(FILES)  # the control
    lines = [json.loads(line) for line in Path("shared/b/metrics.jsonl").read_text().splitlines()]
    assert any(line.get("adapters_in_pass") == 2 for line in lines), "no pass held both: this proves nothing"


def test_a_warm_clone_of_a_job_that_has_ended_starts_from_what_it_saved_last(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FLAGS, "max-steps", 12)
    finish(finetune(tiny_checkpoint, "runs"))
    deadline = time.monotonic() + 60
    while registry.live_trainers() and time.monotonic() < deadline:
        time.sleep(0.05)
    b = ["jobs", "clone", "a", "--warm", "--set", "learning_rate=1e-3", "--set", "max_steps=6", "--name", "b"]
    assert "its clone is a run of its own" in finish(gshare(*b))
    start, last = Path("runs/b/start"), Path("runs/a/checkpoint-12")
    weights = "adapter_model.safetensors"
    assert (start / weights).read_bytes() == (last / weights).read_bytes()
    record = json.loads(Path("runs/b/run.json").read_text())
    assert (record["start"]["parent"], record["start"]["step"]) == ("a", 12)
    alone("runs/b", "alone/b")
    same = [weights, "checkpoint-6/optimizer.safetensors"]
    assert [Path("runs/b", file).read_bytes() == Path("alone/b", file).read_bytes() for file in same] == [
        True
    ] * 2
    alone("runs/b", "cold/b", weights=False)
    assert Path("runs/b", weights).read_bytes() != Path("cold/b", weights).read_bytes()  # the control
