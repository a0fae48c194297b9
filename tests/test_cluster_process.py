"""Coordinator, agents and commands as real processes on this machine, with engines of straw."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_runner import weights_after
from local_cluster import LocalCluster


@pytest.fixture
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(folder))


@pytest.fixture
def cluster(tmp_path: Path, own_directories: None) -> Iterator[LocalCluster]:
    made = LocalCluster(tmp_path / "it", "a", "b", "c")
    yield made
    made.close()


def adapter_of(cluster: LocalCluster, name: str, steps: int) -> None:
    assert cluster.adapter(name).decode() == weights_after(name, steps)


def test_an_agent_and_the_coordinator_are_killed_and_everything_comes_home(cluster: LocalCluster) -> None:
    names = [f"job{number}" for number in range(6)]
    cluster.write_jobs({name: "steps=30,sleep=0.1,save=5,files=1" for name in names})
    done = cluster.gshare("submit", "--adapters-config", cluster.spec)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == names
    cluster.until(lambda: all(job.step >= 6 for job in cluster.jobs().values()))
    node = cluster.jobs()["job0"].node
    agent, coordinator = cluster.agent_pid(node), cluster.coordinator_pid()
    assert agent
    assert coordinator
    os.kill(agent, signal.SIGKILL)
    os.kill(coordinator, signal.SIGKILL)
    watch = cluster.start("coordinator")
    cluster.until_ended(*names)
    jobs = cluster.jobs()
    assert {job.state for job in jobs.values()} == {"completed"}, jobs
    assert all(job.placed for job in jobs.values())
    for name in names:
        adapter_of(cluster, name, 30)
        adapter_of_best = cluster.root / "out" / name / "best" / "manifest.json"
        assert json.loads(adapter_of_best.read_text())["files"]
    watch.send_signal(signal.SIGINT)
    assert watch.wait(30) == 130
