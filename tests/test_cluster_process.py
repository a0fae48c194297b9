"""Coordinator, agents and commands as real processes on this machine, with engines of straw."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_runner import let_go_to, weights_after
from gshare.coordinator.api_client import connect_coordinator
from local_cluster import LocalCluster


@pytest.fixture
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(folder))


@pytest.fixture
def cluster(tmp_path: Path, own_directories: None) -> Iterator[LocalCluster]:
    """Two nodes with room for two adapters each."""
    made = LocalCluster(tmp_path / "it", "a", "b", max_adapters=2)
    yield made
    made.close()


def test_an_agent_and_the_coordinator_are_killed_and_everything_comes_home(cluster: LocalCluster) -> None:
    names = [f"job{number}" for number in range(4)]
    upto = cluster.root / "upto"
    cluster.write_jobs(dict.fromkeys(names, f"steps=30,sleep=0.1,save=5,files=1,{let_go_to(upto, 20)}"))
    done = cluster.gshare("submit", "--adapters-config", cluster.spec)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == names
    cluster.until(lambda: all(job.step >= 6 for job in cluster.jobs().values()))
    assert {job.node for job in cluster.jobs().values()} == {"a", "b"}
    agent, coordinator = cluster.agent_pid("a"), cluster.coordinator_pid()
    assert agent
    assert coordinator
    os.kill(agent, signal.SIGKILL)
    os.kill(coordinator, signal.SIGKILL)
    upto.unlink()
    again = cluster.start("coordinator")
    cluster.until_ended(*names)
    jobs = cluster.jobs()
    assert {job.state for job in jobs.values()} == {"completed"}, jobs
    assert all(job.placed for job in jobs.values())
    assert {job.attempt for job in jobs.values()} == {1}  # the agent took its own up again
    for name in names:
        assert cluster.adapter(name).decode() == weights_after(name, 30)
        manifest = cluster.root / "out" / name / "best" / "manifest.json"
        assert json.loads(manifest.read_text())["files"]
    again.send_signal(signal.SIGINT)
    assert again.wait(30) == 130


def test_the_commands_of_a_cluster(cluster: LocalCluster) -> None:
    """One cluster for all of them: starting it is what takes the time."""
    nothing = cluster.gshare("cluster", "status")
    assert (nothing.returncode, nothing.stdout) == (75, "")
    assert "gshare coordinator" in nothing.stderr

    checked = cluster.gshare("cluster", "check", "--json")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert [json.loads(line)["ok"] for line in checked.stdout.splitlines()] == [True, True]

    cluster.write_jobs({"long": "steps=100000,sleep=0.05,save=5,files=1", "brief": "steps=6,files=1"})
    watch = cluster.start("submit", "--adapters-config", cluster.spec, "--watch", "--json")
    cluster.until(lambda: "brief" in (jobs := cluster.jobs()) and jobs["brief"].state == "completed")
    cluster.until(lambda: cluster.jobs()["long"].step > 5)
    assert watch.stdout is not None
    assert watch.stderr is not None
    events = []
    for line in watch.stdout:
        events.append(json.loads(line))
        if (events[-1].get("job"), events[-1].get("state")) == ("brief", "completed"):
            break  # what has happened is told a little later
    watch.send_signal(signal.SIGINT)
    events += [json.loads(line) for line in watch.stdout]
    err = watch.stderr.read()
    assert watch.wait(30) == 130, err
    assert "left 1 job running" in err
    states = [e["state"] for e in events if e["type"] == "job" and e["job"] == "brief"]
    assert (states[-1], states.count("completed")) == ("completed", 1)
    assert cluster.jobs()["long"].state == "running"
    assert cluster.adapter("brief").decode() == weights_after("brief", 6)

    status = cluster.status()
    assert {node["node"]: node["info"]["hostname"] != "" for node in status["nodes"]} == {
        "a": True,
        "b": True,
    }
    assert {job["job"]: job["state"] for job in status["jobs"]} == {"long": "running", "brief": "completed"}
    assert {row["job"] for row in status["leaderboard"]} == {"long", "brief"}
    table = cluster.gshare("jobs", "list")
    assert "completed" in table.stdout, table.stderr

    cloned = cluster.gshare("jobs", "clone", "brief", "--set", "learning_rate=1e-3", "--detach")
    assert (cloned.returncode, cloned.stdout) == (0, "brief-clone\n"), cloned.stderr
    cluster.until_ended("brief-clone")
    assert cluster.adapter("brief-clone").decode() == weights_after("brief-clone", 6)
    record = json.loads((cluster.root / "out" / "brief-clone" / "run.json").read_text())
    assert record["spec"]["learning_rate"] == 1e-3

    second = cluster.gshare("coordinator")
    assert second.returncode == 75
    assert "another coordinator runs" in second.stderr
    again = cluster.gshare("submit", "--adapters-config", cluster.spec)
    assert again.returncode == 2  # brief's directory holds its results
    assert "already holds this run" in again.stderr
    assert "`gshare jobs resume brief --cluster FILE` continues a stopped job" in again.stderr
    assert "--resume" not in again.stderr  # a flag that `submit` does not have
    unknown = cluster.gshare("jobs", "stop", "lnog")
    assert unknown.returncode == 2
    assert "did you mean long?" in unknown.stderr

    assert cluster.gshare("jobs", "pause", "long").returncode == 0
    cluster.until(lambda: cluster.jobs()["long"].state == "paused")
    again = cluster.gshare("jobs", "pause", "long")
    assert (again.returncode, again.stderr) == (0, "long: paused already\n")
    assert cluster.gshare("jobs", "resume", "long").returncode == 0
    cluster.until(lambda: cluster.jobs()["long"].state == "running")
    alone = _jobs_of_this_machine("stop", "long")
    assert (alone.returncode, "if it is a cluster's job, add --cluster FILE" in alone.stderr) == (2, True)
    other = _jobs_of_this_machine("stop", "nothing")  # the negative control
    assert (other.returncode, "--cluster" in other.stderr) == (2, False), other.stderr
    log = cluster.gshare("jobs", "logs", "long")
    assert log.returncode == 0, log.stderr
    to = cluster.root / "fetched"
    fetched = cluster.gshare("jobs", "fetch", "long", str(to))
    assert (fetched.returncode, fetched.stdout.strip()) == (0, str(to)), fetched.stderr
    assert (to / "best" / "adapter_model.safetensors").stat().st_size > 0
    assert cluster.gshare("jobs", "stop", "long").returncode == 0
    cluster.until_ended("long")
    assert cluster.jobs()["long"].state == "stopped"
    _check_left_behind(cluster)
    attached = cluster.gshare("jobs", "attach", "long")
    assert attached.returncode == 130, attached.stderr

    pid = cluster.coordinator_pid()
    stopped = cluster.gshare("coordinator", "stop")
    assert stopped.returncode == 0, stopped.stderr
    assert f"coordinator {pid} has ended" in stopped.stderr
    none = cluster.gshare("coordinator", "stop")
    assert (none.returncode, none.stderr) == (75, f"gshare: no coordinator runs on {cluster.home}\n")


@pytest.mark.parametrize("asked", [True, False])
def test_a_coordinator_that_was_asked_to_stop_has_not_failed(
    tmp_path: Path, own_directories: None, asked: bool
) -> None:
    """With a client that is there and says nothing. Negative control: SIGTERM is 143."""
    cluster = LocalCluster(tmp_path / "it", "a")
    cluster.home.mkdir(mode=0o700, parents=True)
    cluster.file.write_text('[[node]]\nname = "far"\nhost = "127.0.0.1"\nport = 1\n')
    running = cluster.start("coordinator")
    try:
        cluster.until(lambda: cluster.coordinator_pid() == running.pid)
        with connect_coordinator(cluster.home):
            if asked:
                stopped = cluster.gshare("coordinator", "stop")
                assert stopped.returncode == 0, stopped.stderr
            else:
                running.terminate()
            _, said = running.communicate(timeout=30)
        assert running.returncode == (0 if asked else 143)
        assert "Traceback" not in said
        assert "the coordinator leaves; jobs run on" in said
    finally:
        cluster.close()


def _jobs_of_this_machine(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gshare.cli.main", "jobs", *words]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60, check=False)


def _check_left_behind(cluster: LocalCluster) -> None:
    """What the nodes have forgotten: told with what there is instead. `brief` completed, `long` stopped."""
    for node in cluster.nodes:
        cluster.until(lambda node=node: not cluster.attempts(node))
    to = str(cluster.root / "left")
    for words, told in (
        (("fetch", "brief", to), f"keeps its files no longer; its results are in {cluster.root}/out/brief"),
        (("logs", "brief"), f"keeps its log no longer; its results are in {cluster.root}/out/brief"),
        (("fetch", "long", to), "--kind checkpoint` brings its newest checkpoint; `gshare jobs resume long"),
        (("logs", "long"), "job long is stopped, and its node keeps its log no longer; "),
    ):
        asked = cluster.gshare("jobs", *words)
        assert (asked.returncode, told in asked.stderr) == (1, True), asked.stderr
        assert "attempt" not in asked.stderr
    fetched = cluster.gshare("jobs", "fetch", "long", to, "--kind", "checkpoint")
    assert fetched.returncode == 0, fetched.stderr


def test_workers_that_do_not_come_are_named_with_the_reason(tmp_path: Path, own_directories: None) -> None:
    cluster = LocalCluster(tmp_path / "it")
    cluster.file.write_text('[[node]]\nname = "far"\nhost = "127.0.0.1"\nport = 1\n')
    more = cluster.gshare("coordinator", "--expect-workers", "3", "--timeout", "1")
    assert more.returncode == 75, more.stderr
    said = "names 1 node: waiting 1 s for 2 more to dial in"
    assert said in more.stderr.splitlines()[1], "before the wait, not after it"
    done = cluster.gshare("coordinator", "--expect-workers", "1", "--timeout", "2")
    assert done.returncode == 75, done.stderr
    assert "to dial in" not in done.stderr
    assert "0 of 1 workers are ready" in done.stderr
    assert "far: new" in done.stderr
    assert "127.0.0.1" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("coordinator", "--expect-workers", "-1"), "--expect-workers"),
        (("coordinator", "--timeout", "soon"), "--timeout"),
        (("submit",), "--model is missing"),
        (("jobs", "stop"), "name at least one job"),
        (("jobs", "logs", "x", "--max-bytes", "0"), "--max-bytes"),
    ],
)
def test_wrong_flags_are_one_message_and_nothing_is_started(
    tmp_path: Path, own_directories: None, words: tuple[str, ...], told: str
) -> None:
    cluster = LocalCluster(tmp_path / "it", "a")
    done = cluster.gshare(*words)
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not cluster.home.exists()


def test_a_wrong_cluster_file_is_told_whole_by_submit(tmp_path: Path, own_directories: None) -> None:
    cluster = LocalCluster(tmp_path / "it", "a")
    cluster.write_jobs({"job": "steps=1"})
    cluster.file.write_text('[[node]]\nname = "../x"\ntransport = "local"\nprot = 1\n[[node]]\n')
    done = cluster.gshare("submit", "--adapters-config", cluster.spec)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) >= 3
    assert not cluster.home.exists()
