"""`gshare sweep --cluster` with real processes and the real engine: two agents, and one machine to compare.

Whoever is killed, an agent, the client or the coordinator: the same winner, ranking, decisions and bytes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gshare.agent.jobs.sweep_records import read_decisions
from gshare.agent.report.read import read_report
from gshare.cli.sweep_board import result_of
from local_cluster import LocalCluster

SECONDS = 240.0
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
learning_rate = [5e-3, 3e-2, 6e-2, 1.0]
[early_exit]
warmup = 0.25
keep = 0.5
overfitting_patience = 1
"""
WORDS = ("red", "green", "blue", "one", "two", "three", "cat", "dog", "sun", "moon", "tree", "fish")


def _write(directory: Path, model: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": " ".join(WORDS[(i * k) % 12] for k in (1, 3, 5)), "completion": WORDS[(i * 7) % 12]}
        for i in range(30)
    ]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = directory / "s.toml"
    path.write_text(SWEEP.format(model=model))
    return path


def _own_directories(folder: Path) -> dict[str, str]:
    found = {}
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (folder / name).mkdir(mode=0o700, parents=True)
        found[name] = str(folder / name)
    return found


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a sweep on this machine alone, undisturbed. Every kind of end is in it."""
    directory = tmp_path_factory.mktemp("local")
    path = _write(directory / "s", tiny_checkpoint)
    command = [sys.executable, "-m", "gshare.cli.main", "sweep", str(path)]
    environment = {**os.environ, **_own_directories(directory)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    out = path.parent / "out"
    ends = [(row["state"], row["pattern"], row["step"]) for row in result_of(out)["jobs"]]
    assert sorted((state, pattern, step > 10) for state, pattern, step in ends) == [
        ("completed", "", True),
        # In its warm-up, by its own losses: they are looked at on the node.
        ("stopped", "overfitting", False),
        ("stopped", "overfitting", True),
        ("stopped", "underperformance", False),
    ]
    assert {step for _, pattern, step in ends if pattern != "overfitting"} == {10, 40}
    # By the processor's rounding: 36 on Intel's, 32 on an AMD EPYC.
    assert {step for _, pattern, step in ends if pattern == "overfitting"} in ({10, 32}, {10, 36})
    return out


@pytest.fixture
def cluster(tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    for name, folder in _own_directories(tmp_path).items():
        monkeypatch.setenv(name, folder)
    # One at a time on each: while the first ones wait at their boundary, others have not begun.
    made = LocalCluster(tmp_path / "it", "a", "b", straw=False, max_adapters=1)
    _write(made.root, tiny_checkpoint)
    yield made
    made.close()


def _sweep(cluster: LocalCluster, *words: str) -> subprocess.Popen[str]:
    return cluster.start("sweep", str(cluster.root / "s.toml"), *words)


def _finish(process: subprocess.Popen[str], code: int = 0) -> str:
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == code, err[-3000:]
    return err


def _decided(out: Path) -> list[tuple[str, str, int, str, object]]:
    """What each configuration came to, with the numbers that it followed from."""
    keys = ("val_loss", "best_val_loss", "rank", "kept", "last_kept_val_loss")
    return sorted(
        (one.job, one.event, one.step, one.pattern, [one.evidence.get(key) for key in keys])
        for one in read_decisions(out)
        if one.event not in ("started", "resumed")
    )


def _adapters(out: Path) -> dict[str, bytes]:
    names = ("adapter_model.safetensors", "adapter_config.json")
    return {
        str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.name in names
    }


def _check_same(out: Path, reference: Path) -> None:
    ours, theirs = result_of(out), result_of(reference)
    assert ours["winner"] == theirs["winner"]
    assert [row["adapter"] for row in ours["jobs"]] == [row["adapter"] for row in theirs["jobs"]]
    assert (ours["samples"], ours["samples_total"]) == (theirs["samples"], theirs["samples_total"])
    assert _decided(out) == _decided(reference)
    mine, others = _adapters(out), _adapters(reference)
    # Older checkpoints do not come home.
    assert {name for name in others if "/checkpoint-" not in name} <= mine.keys() <= others.keys()
    assert [name for name in mine if mine[name] != others[name]] == []


def test_two_agents_give_the_sweep_of_one_machine(cluster: LocalCluster, reference: Path) -> None:
    err = _finish(_sweep(cluster))
    assert "goes on after its warm-up" in err
    assert {job.node for job in cluster.jobs().values()} == {"a", "b"}
    out = cluster.root / "out"
    _check_same(out, reference)
    assert all(job.placed for job in cluster.jobs().values())
    # What a report is made of came home with the results.
    report = read_report(out)
    assert [(run.state, run.pattern, run.steps) for run in report.runs] == [
        (run.state, run.pattern, run.steps) for run in read_report(reference).runs
    ]
    assert all(run.train and run.val and run.seconds for run in report.runs)
    # A finished one says its result again and does nothing.
    before = read_decisions(out)
    again = _sweep(cluster, "--resume", "--json")
    said, err = again.communicate(timeout=SECONDS)
    assert (again.returncode, json.loads(said.splitlines()[-1])["winner"]) == (0, result_of(out)["winner"]), (
        err
    )
    assert read_decisions(out) == before


def _paused(out: Path) -> int:
    return sum(one.event == "paused" for one in read_decisions(out)) if out.exists() else 0


@pytest.mark.slow
def test_the_client_killed_in_the_warm_up_and_resumed(cluster: LocalCluster, reference: Path) -> None:
    out = cluster.root / "out"
    process = _sweep(cluster)
    cluster.until(lambda: _paused(out) >= 1, SECONDS)
    process.kill()
    process.communicate()
    assert _decided(out) != _decided(reference)  # it was in the middle
    # It goes on without its client, and no further than to the end of the warm-up.
    waits = {"s-lr0.005", "s-lr0.06", "s-lr1"}
    cluster.until(lambda: {j.job for j in cluster.jobs().values() if j.parked} == waits, SECONDS)
    cluster.until_ended("s-lr0.03")
    assert {job.step for job in cluster.jobs().values()} == {10}
    _finish(_sweep(cluster), 2)
    _finish(_sweep(cluster, "--resume"))
    _check_same(out, reference)


@pytest.mark.slow
def test_an_agent_killed_in_the_warm_up(cluster: LocalCluster, reference: Path) -> None:
    cluster.start_coordinator()
    process = _sweep(cluster)
    cluster.until(lambda: any(job.step >= 5 and job.node == "a" for job in cluster.jobs().values()), SECONDS)
    agent = cluster.agent_pid("a")
    assert agent
    os.kill(agent, signal.SIGKILL)
    _finish(process)
    assert cluster.agent_pid("a") != agent
    _check_same(cluster.root / "out", reference)


@pytest.mark.slow
def test_the_coordinator_killed_in_the_warm_up_and_after_it(cluster: LocalCluster, reference: Path) -> None:
    out = cluster.root / "out"
    running = cluster.start_coordinator()
    process = _sweep(cluster)
    for paused in (1, 3):
        cluster.until(lambda: _paused(out) >= paused, SECONDS)  # noqa: B023
        running.kill()
        running.wait()
        running = cluster.start_coordinator()
    err = _finish(process)
    assert "the coordinator is gone; jobs run on; waiting for it to come back" in err
    _check_same(out, reference)
