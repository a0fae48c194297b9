"""A sweep killed after its ranking whose chosen ones then lose their checkpoints: resumed, the same bytes.

They repeat their warm-up. The evaluation at its end counts there as it did before: for the best adapter, and
for the patience of early exit.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from gshare.agent.data.work import Work
from gshare.agent.errors import EXIT_FAILURE
from gshare.agent.jobs.early_exit import SweepExit
from gshare.agent.jobs.events import Event, JobChanged, TrainerMessage
from gshare.agent.jobs.packing import Packing
from gshare.agent.jobs.spec import AdapterSpec, JobRequest
from gshare.agent.jobs.sweep import Sweep, Trial
from gshare.agent.jobs.sweep_records import Decision, DecisionLog, read_decisions
from gshare.agent.service import registry, sweeping
from gshare.agent.service.deciding import Job
from gshare.agent.service.registry import TrainerConfig
from gshare.agent.service.supervise import Supervisor
from gshare.agent.service.sweeping import SweepRun
from gshare.cli.sweep_board import result_of

WAIT_SECONDS = 300.0
SWEEP = """\
model = "{model}"
base_dtype = "fp32"
[defaults]
data = "data.jsonl"
max_steps = 40
eval_steps = 4
save_steps = 5
max_length = 32
lora_dropout = 0.1
optim = "adamw_8bit"
r = 4
[sweep]
output_dir = "out"
[sweep.grid]
learning_rate = [5e-3, 6e-2, 1e-1]
[early_exit]
warmup = 0.25
keep = 0.5
overfitting_patience = 4
gap_threshold = 0.01
"""
#: `gshare` that is killed when so many have gone on after the ranking, before a trainer hears of it.
KILLED = """
import os, signal, sys
from gshare.agent.jobs.sweep_records import DecisionLog
from gshare.cli.main import main

left = int(sys.argv[1])
append = DecisionLog.append

def counted(self, decision):
    global left
    append(self, decision)
    left -= decision.event == "resumed"
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

DecisionLog.append = counted
sys.exit(main(sys.argv[2:]))
"""
WORDS = ("red", "green", "blue", "one", "two", "three", "cat", "dog", "sun", "moon", "tree", "fish")


def _write(directory: Path, model: Path) -> Path:
    directory.mkdir()
    rows = [
        {"prompt": " ".join(WORDS[(i * k) % 12] for k in (1, 3, 5)), "completion": WORDS[(i * 7) % 12]}
        for i in range(30)
    ]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = directory / "s.toml"
    path.write_text(SWEEP.format(model=model))
    return path


def _sweep(*words: str, program: tuple[str, ...] = ("-m", "gshare.cli.main"), code: int = 0) -> str:
    command = [sys.executable, *program, "sweep", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert done.returncode == code, done.stderr[-2000:]
    deadline = time.monotonic() + WAIT_SECONDS
    while registry.live_trainers():  # until each has noticed that its client is gone
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return done.stderr


def _adapters(out: Path) -> dict[str, bytes]:
    found = sorted(out.rglob("adapter_model.safetensors"))
    return {str(path.relative_to(out)): path.read_bytes() for path in found}


def _evaluated(out: Path) -> dict[str, list[tuple[int, float]]]:
    return {
        path.parent.name: [
            (line["step"], line["val_loss"])
            for line in map(json.loads, path.read_text().splitlines())
            if line["type"] == "eval"
        ]
        for path in sorted(out.glob("*/metrics.jsonl"))
    }


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an undisturbed sweep."""
    path = _write(tmp_path_factory.mktemp("sweep") / "whole", tiny_checkpoint)
    _sweep(str(path))
    return path.parent / "out"


def test_chosen_ones_that_lost_their_checkpoints_repeat_their_warm_up_as_it_was(
    tiny_checkpoint: Path, reference: Path, tmp_path: Path
) -> None:
    path = _write(tmp_path / "killed", tiny_checkpoint)
    out = path.parent / "out"
    _sweep(str(path), program=("-c", KILLED, "2"), code=-signal.SIGKILL)
    one, other = (
        out / decision.job.removeprefix("s-")
        for decision in read_decisions(out)
        if decision.event == "selected"
    )
    shutil.rmtree(one)
    weights = other / "checkpoint-10" / "adapter_model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    # Killed again before it has repeated anything.
    _sweep(str(path), "--resume", program=("-c", KILLED, "2"), code=-signal.SIGKILL)
    err = _sweep(str(path), "--resume")
    assert f"s-{one.name}: warning: its checkpoint of step 10 is gone: it starts again" in err
    assert f"s-{other.name}: warning: its checkpoint of step 10 is gone: it goes on from step 5" in err
    assert _evaluated(out) == _evaluated(reference)
    assert _adapters(out) == _adapters(reference)
    ours, theirs = result_of(out)["jobs"], result_of(reference)["jobs"]
    kept = ("adapter", "state", "pattern", "step", "best_val_loss", "samples", "reason")
    assert [[row[key] for key in kept] for row in ours] == [[row[key] for key in kept] for row in theirs]
    decided = [decision.event for decision in read_decisions(out)]
    assert (decided.count("selected"), decided.count("paused")) == (2, 3)  # nobody was ranked twice
    assert os.path.isfile(Path(result_of(out)["best"]) / "adapter_model.safetensors")


def _job(name: str) -> Job:
    spec = AdapterSpec(name=name, data="d", output_dir=name)
    request = JobRequest(spec=spec, train_store="t", train_hash="t")
    return Job(request, Work(40, 40, rows=40, rows_per_step=1, val_rows=4, mean_tokens=4.0))


@pytest.mark.parametrize(
    ("reason", "stops"), [("run.json: No space left on device", True), ("out of memory", False)]
)
def test_a_refused_file_is_no_decision_and_the_others_are_told_why_they_stop(
    reason: str, stops: bool, tmp_path: Path
) -> None:
    told: list[Event] = []
    with DecisionLog(tmp_path) as log:
        run = SweepRun(
            sweep=Sweep([Trial(name, 1, 40, 10) for name in "ab"], SweepExit(), Packing(lambda names: True)),
            jobs={"a": _job("a"), "b": _job("b")},
            names=[],
            config=cast("TrainerConfig", None),
            log=log,
            on_event=told.append,
        )
        table = SimpleNamespace(get=lambda job: SimpleNamespace(val_loss=None, best_val_loss=None))
        run.supervisor = cast(
            "Supervisor", SimpleNamespace(over=False, table=table, go_on=lambda request: None)
        )
        failed = JobChanged(job="a", state="failed", step=0, total_steps=40, reason=reason)
        run._take(failed)
    assert (run.stop.exit_code == EXIT_FAILURE) == stops
    assert ("stopped by the sweep, since files of a could" in run.stop.reason) == stops
    decided = [one.event for one in read_decisions(tmp_path) if one.job == "a"]
    assert "failed" in decided or stops
    assert not (decided and stops)
    assert any(isinstance(one, TrainerMessage) and one.level == "error" for one in told) == stops


def test_a_trainer_is_asked_for_none_that_has_ended_in_an_earlier_life(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else it is `queued` again for those who look, and after Ctrl-C "stopped before it was started"."""
    asked: list[str] = []

    class Asked(Exception):
        pass

    def supervisor(*, requests: list[JobRequest], **more: object) -> None:
        asked.extend(one.spec.name for one in requests)
        raise Asked

    monkeypatch.setattr(sweeping, "Supervisor", supervisor)
    trials = [Trial(name, 1, 40, 10) for name in "abc"]
    sweep = Sweep(trials, SweepExit(keep=0.5), Packing(lambda names: True))
    loss = {"a": 1.0, "b": 2.0, "c": 3.0}
    sweep.replay(
        [
            *(
                Decision(time=0, job=x, event="paused", step=10, evidence={"val_loss": loss[x]})
                for x in "abc"
            ),
            *(Decision(time=0, job=x, event="selected", step=10) for x in "ab"),
            Decision(time=0, job="c", event="stopped", step=10, pattern="underperformance"),
        ]
    )
    jobs = {name: _job(name) for name in [*loss, "of another arm"]}
    with DecisionLog(tmp_path) as log, pytest.raises(Asked):
        SweepRun(
            sweep=sweep,
            jobs=jobs,
            names=[jobs[name].request for name in loss],
            config=cast("TrainerConfig", None),
            log=log,
            on_event=lambda event: None,
        ).run()
    assert asked == ["a", "b"]
