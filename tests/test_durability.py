"""kill -9 of client and trainer at random moments, checkpoint writing included: nothing saved is ever lost.

Real processes, the real engine. 21 kills over one run of two adapters that save every second step; after
each the run is started again with --resume. At the end every byte is what a run gives that nobody killed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gshare.agent.service import registry
from gshare.agent.service.client import TrainerClient

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from fake_runner import let_go_to  # noqa: E402

#: By `make test`, and by `make test-all`.
FEW_KILLS, MANY_KILLS = 6, 21
STEPS = 400
#: From one kill to the next at most; a machine that is slow to look would find the run at its end.
STEPS_BETWEEN = 18
FLAGS = {
    "base-dtype": "fp32",
    "device": "cpu",
    "r": 4,
    "max-steps": STEPS,
    "save-steps": 2,
    "eval-steps": 20,
    "max-length": 32,
    "optim": "adamw_8bit",
    "lora-dropout": 0.1,
}


def start(model: Path, out: str, *more: str) -> subprocess.Popen[str]:
    flags = [text for key, value in FLAGS.items() for text in (f"--{key}", str(value))]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "gshare.cli.main", "finetune", "--model", str(model), *flags, *more),
            *("--adapter", f"a.jsonl:{out}/a", "--adapter", f"b.jsonl:{out}/b"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def step_of(out: str) -> int:
    """Steps that `a` has recorded so far."""
    path = Path(out, "a", "metrics.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except ValueError:
            continue  # torn by a kill
    return 0


def trainer_pids() -> list[int]:
    pids = []
    for trainer in registry.live_trainers():
        try:
            client = TrainerClient(trainer, "test", timeout=2.0)
        except Exception:  # on its way up or down
            continue
        pids.append(client.hello.pid)
        client.close()
    return pids


def answering_trainers(process: subprocess.Popen[str]) -> list[int]:
    """None when the client has ended."""
    deadline = time.monotonic() + 120
    while not (pids := trainer_pids()) and process.poll() is None:
        assert time.monotonic() < deadline, "no trainer answers"
        time.sleep(0.02)
    return pids


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_for_progress(process: subprocess.Popen[str], out: str, beyond: int) -> None:
    deadline = time.monotonic() + 120
    while step_of(out) <= beyond and process.poll() is None:
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.02)


def losses(out: str, name: str) -> list[tuple[str, int, float]]:
    records = [json.loads(line) for line in Path(out, name, "metrics.jsonl").read_text().splitlines()]
    return [
        (r["type"], r["step"], r.get("loss", r.get("val_loss")))
        for r in records
        if r["type"] != "fingerprint"
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("most", [FEW_KILLS, pytest.param(MANY_KILLS, marks=pytest.mark.slow)])
def test_killed_at_random_moments_and_resumed_the_bytes_are_those_of_an_unkilled_run(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        (tmp_path / variable).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    for name in ("a", "b"):
        rows = [{"prompt": f"{name} {i}", "completion": f" answer {i * 7}"} for i in range(30)]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    unkilled = start(tiny_checkpoint, "whole")
    _, err = unkilled.communicate(timeout=300)
    assert unkilled.returncode == 0, err

    upto = tmp_path / "upto"
    monkeypatch.setenv("GSHARE_TEST_RUNNER", "held_runner:HeldRunner")
    monkeypatch.setenv("GSHARE_TEST_UPTO", str(upto))
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    draw = random.Random(5)
    # Never two trainers of one client in a row: in the second a job would be alone, and be blamed.
    order = itertools.islice(itertools.cycle(("client", "trainer", "both")), most)
    let_go_to(upto, STEPS_BETWEEN)
    process = start(tiny_checkpoint, "killed")
    for number, whom in enumerate(order, start=1):
        before = step_of("killed")
        let_go_to(upto, before + STEPS_BETWEEN)
        wait_for_progress(process, "killed", before)
        if step_of("killed") >= STEPS:
            pytest.fail(f"the run ended after {number} kills: make it longer")
        time.sleep(draw.random() * 0.05)
        pids = answering_trainers(process) if whom != "client" else []
        assert process.poll() is None, process.communicate()[1]
        if whom != "trainer":
            kill(process.pid)
        for pid in pids:
            kill(pid)
        if whom == "trainer" and number < most:
            continue  # its client starts another one by itself
        kill(process.pid)
        process.communicate()
        upto.unlink()  # a trainer that is held back cannot leave
        # A trainer whose client is gone saves and leaves; the next one must not race it for the directory.
        deadline = time.monotonic() + 120
        while registry.live_trainers():
            assert time.monotonic() < deadline, "a trainer outlived its client"
            time.sleep(0.05)
        if number < most:
            let_go_to(upto, step_of("killed") + STEPS_BETWEEN)
        process = start(tiny_checkpoint, "killed", "--resume")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    for name in ("a", "b"):
        for file in (
            "adapter_model.safetensors",
            f"checkpoint-{STEPS}/optimizer.safetensors",
            "best/metadata.json",
        ):
            assert Path("killed", name, file).read_bytes() == Path("whole", name, file).read_bytes(), (
                name,
                file,
            )
        assert losses("killed", name) == losses("whole", name)
