"""Real agents, real trainers, an engine of straw: attempts from start to end, through kills and restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gshare.agent.jobs.events import Stepped
from gshare.agent.node import protocol
from gshare.agent.node.checks import owner_tag
from gshare.agent.node.protocol import AttemptEvent, BlobRef, ModelRef, NodeMessage, NodeRefused
from gshare.agent.service import registry
from gshare.agent.service.client import TrainerClient

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from fake_runner import tell, weights_after  # noqa: E402
from node_agents import OWNER, SECONDS, AgentProcess, running_agent, wait_no_trainers  # noqa: E402


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    monkeypatch.setenv("GSHARE_TEST_RUNNER", "fake_runner:FakeRunner")
    monkeypatch.setenv("GSHARE_TEST_PREPARE", "fake_prepare")
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "GSHARE_FAKE_WORDS"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with running_agent(tmp_path / "node") as started:
        yield started


def trainer_pids() -> list[int]:
    pids = []
    for trainer in registry.live_trainers():
        client = TrainerClient(trainer, "test", timeout=5.0)
        pids.append(client.hello.pid)
        client.close()
    return pids


def test_an_attempt_runs_and_its_files_come_back(agent: AgentProcess) -> None:
    client = agent.connect()
    following = client.follow()
    assert not following.gap
    assert isinstance(client.start("support", "steps=7,files=1"), protocol.AttemptAccepted)
    ended = client.wait_end("support")
    assert (ended.state, ended.step, ended.total_steps) == ("completed", 7, 7)
    assert (ended.best_step, ended.checkpoint_step, ended.retry) == (6, 7, False)
    final = client.pull("support", "final")
    assert final["adapter_model.safetensors"].decode() == weights_after("support", 7)
    assert [json.loads(line)["step"] for line in final["metrics.jsonl"].splitlines()] == list(range(1, 8))
    best = client.pull("support", "best")
    assert json.loads(best["best/metadata.json"])["step"] == 6
    checkpoint = client.pull("support", "checkpoint")
    assert {"checkpoint-7/state.json", "checkpoint-7/manifest.json", "best/metadata.json"} < set(checkpoint)
    samples = client.ask(protocol.ReadSamples, job="support", attempt=1, after_step=5)
    assert [json.loads(line)["step"] for line in samples.lines] == [6, 7]
    assert client.states("support", "completed") == ["queued", "running", "completed"]
    seqs = [frame.seq for frame in client.events if frame.seq]
    assert seqs == sorted(set(seqs))
    assert "loaded by process" in client.ask(protocol.ReadLog, job="support", attempt=1).text


def test_accepted_twice_runs_once_and_a_forgotten_one_never_again(agent: AgentProcess) -> None:
    client = agent.connect()
    client.follow()
    for _ in range(2):
        assert isinstance(client.start("a", "steps=3"), protocol.AttemptAccepted)
    client.wait_end("a")
    assert client.states("a", "completed") == ["queued", "running", "completed"]
    assert client.ask(protocol.ForgetAttempts, attempts=[("a", 1)]).failed == {}
    assert client.ask(protocol.ListAttempts).attempts == []
    assert not list((agent.state / "attempts").iterdir())
    refused = client.start("a", "steps=3")
    assert isinstance(refused, NodeRefused)
    assert "attempt 1 has been here" in refused.reason
    assert isinstance(client.start("a", "steps=3", attempt=2), protocol.AttemptAccepted)


def test_a_newer_attempt_stops_the_older_one_and_fences_it(agent: AgentProcess) -> None:
    client = agent.connect()
    client.start("a", "steps=1000,sleep=0.02")
    client.wait("a", lambda status: status.step > 0)
    refused = client.ask(protocol.ForgetAttempts, attempts=[("a", 1)])
    assert "still runs" in refused.failed["a/1"]
    assert isinstance(client.start("a", "steps=4", attempt=3), protocol.AttemptAccepted)
    assert client.wait_end("a", 3).state == "completed"
    older = client.status("a", 1)
    assert (older.state, older.reason) == ("stopped", "attempt 3 of this job was started here")
    late = client.start("a", "steps=4", attempt=2)
    assert isinstance(late, NodeRefused)
    assert not late.retry


def test_pause_resume_stop(agent: AgentProcess) -> None:
    client = agent.connect()
    client.start("a", "steps=100000,sleep=0.01")
    client.wait("a", lambda status: status.state == "running")
    client.ask(protocol.PauseAttempts, attempts=[("a", 1)])
    paused = client.wait("a", lambda status: status.state == "paused")
    client.ask(protocol.ResumeAttempts, attempts=[("a", 1)])
    client.wait("a", lambda status: status.step > paused.step + 2)
    done = client.ask(protocol.StopAttempts, attempts=[("a", 1), ("b", 1)], reason="enough")
    assert list(done.failed) == ["b/1"]
    ended = client.wait_end("a")
    assert (ended.state, ended.reason, ended.retry) == ("stopped", "enough", False)
    again = client.ask(protocol.PauseAttempts, attempts=[("a", 1)])
    assert "has ended" in again.failed["a/1"]


def test_killed_agent_resumes_with_the_steps_that_were_saved(agent: AgentProcess) -> None:
    """The trainers see their client gone, checkpoint and leave; the next agent goes on from there."""
    client = agent.connect()
    journal = client.follow().journal_id
    for job in ("a", "b"):
        client.start(job, "steps=60,sleep=0.03,files=1,hold=50")
    for job in ("a", "b"):
        client.wait(job, lambda status: status.step >= 5)
    seen = max(frame.seq for frame in client.events)
    agent.kill()
    tell("go")  # neither could be at its end before
    agent.start()
    client = agent.connect()
    following = client.follow(journal, seen)
    assert (following.journal_id, following.gap) == (journal, False)
    for job in ("a", "b"):
        assert client.wait_end(job).state == "completed"
        final = client.pull(job, "final")
        assert final["adapter_model.safetensors"].decode() == weights_after(job, 60)
        resumed = [change for change in client.changes(job) if change.reason.startswith("resumed at step")]
        assert len(resumed) == 1
        assert resumed[0].step >= 5
    seqs = [frame.seq for frame in client.events if frame.seq]
    assert min(seqs) > seen


def test_sigterm_drains_and_the_next_start_resumes(agent: AgentProcess) -> None:
    client = agent.connect()
    client.start("a", "steps=80,sleep=0.03,files=1,hold=70")
    client.start("done", "steps=2")
    client.wait("a", lambda status: status.step >= 4)
    client.wait_end("done")
    assert agent.terminate() == 143
    wait_no_trainers()
    tell("go")
    agent.start()
    client = agent.connect()
    assert client.wait_end("a").state == "completed"
    assert client.pull("a", "final")["adapter_model.safetensors"].decode() == weights_after("a", 80)
    client.follow()
    states = client.states("a", "completed")
    assert states == ["queued", "running", "queued", "running", "completed"], client.changes("a")
    assert [change.state for change in client.changes("done")].count("completed") == 1


def test_a_drained_stop_is_not_resumed(agent: AgentProcess) -> None:
    """Negative control of resuming: what was asked to stop stays stopped over a kill."""
    client = agent.connect()
    client.start("a", "steps=100000,sleep=0.02")
    client.wait("a", lambda status: status.step >= 2)
    client.ask(protocol.StopAttempts, attempts=[("a", 1)], reason="stop it")
    agent.kill()
    agent.start()
    client = agent.connect()
    ended = client.wait_end("a")
    assert (ended.state, ended.reason) == ("stopped", "stop it")
    wait_no_trainers()


def test_a_killed_trainer_is_replaced(agent: AgentProcess) -> None:
    client = agent.connect()
    client.follow()
    client.start("a", "steps=60,sleep=0.03,files=1,hold=50")
    client.wait("a", lambda status: status.step >= 5)
    (pid,) = trainer_pids()
    os.kill(pid, signal.SIGKILL)
    tell("go")
    ended = client.wait_end("a")
    assert (ended.state, ended.reason) == ("completed", "")
    assert client.pull("a", "final")["adapter_model.safetensors"].decode() == weights_after("a", 60)
    texts = [
        frame.event.event.text
        for frame in client.events
        if isinstance(frame.event, AttemptEvent) and hasattr(frame.event.event, "text")
    ]
    assert any("the trainer died (killed by SIGKILL)" in text for text in texts)


def test_a_poisonous_job_fails_by_its_own_fault_and_the_node_goes_on(agent: AgentProcess) -> None:
    client = agent.connect()
    client.start("poison", "steps=20,kill_at=3")
    ended = client.wait_end("poison")
    assert (ended.state, ended.retry) == ("failed", False)
    client.start("fine", "steps=3")
    assert client.wait_end("fine").state == "completed"


@pytest.mark.parametrize(
    ("script", "model", "reason", "retry"),
    [
        ("bad_data=1", "fake", "row 1: no text", False),
        ("steps=2", "missing", "not on this node", True),
        ("steps=5,fail_at=2", "fake", "its script says so", False),
        ("steps=5,full_at=2", "fake", "disk full", True),
    ],
)
def test_whose_fault_a_failure_is(
    agent: AgentProcess, script: str, model: str, reason: str, retry: bool
) -> None:
    client = agent.connect()
    client.start("a", script, model=ModelRef(name=model, path=model))
    ended = client.wait_end("a")
    assert (ended.state, ended.retry) == ("failed", retry)
    assert reason in ended.reason
    if script == "bad_data=1":  # as its user calls it; the path is that of this node
        tag, _, rest = ended.reason.removeprefix("adapter a: ").partition("-a-1/")
        assert ended.reason.startswith("adapter a: /"), ended.reason
        assert (tag.rpartition("/")[2], rest) == (owner_tag(OWNER), "data/a.jsonl: row 1: no text")


def test_it_goes_on_from_a_pushed_checkpoint_of_another_node(agent: AgentProcess, tmp_path: Path) -> None:
    client = agent.connect()
    client.start("a", "steps=9,files=1")
    client.wait_end("a")
    files = client.pull("a", "checkpoint")
    data = client.push(b"steps=12,files=1", "a.jsonl")
    refs = [client.push(content, name) for name, content in files.items()]
    with running_agent(tmp_path / "other") as other:
        there = other.connect()
        there.follow()
        missing = there.start("a", "", attempt=2, data=data, checkpoint=refs)
        assert isinstance(missing, NodeRefused)
        assert "files are not here" in missing.reason
        for name, content in [("a.jsonl", b"steps=12,files=1"), *files.items()]:
            there.push(content, name)
        assert isinstance(
            there.start("a", "", attempt=2, data=data, checkpoint=refs), protocol.AttemptAccepted
        )
        assert there.wait_end("a", 2).state == "completed"
        assert there.changes("a")[1].reason == "resumed at step 9"
        final = there.pull("a", "final", 2)
        assert final["adapter_model.safetensors"].decode() == weights_after("a", 12)
        steps = [json.loads(line)["step"] for line in final["metrics.jsonl"].splitlines()]
        assert steps == list(range(1, 13))


def test_a_slow_preparation_can_be_stopped(agent: AgentProcess) -> None:
    client = agent.connect()
    client.start("a", "slow_prepare=600")
    client.ask(protocol.StopAttempts, attempts=[("a", 1)])
    assert client.wait_end("a").state == "stopped"


def test_owners_do_not_see_each_other_and_observers_see_all(agent: AgentProcess) -> None:
    one, two = agent.connect(owner="owner-one"), agent.connect(owner="owner-two")
    observer = agent.connect(role="observer", session="")
    for client in (one, two, observer):
        client.follow()
    one.start("same", "steps=5,sleep=0.05")
    two.start("same", "steps=6,sleep=0.05")
    assert one.wait_end("same").total_steps == 5
    assert two.wait_end("same").total_steps == 6
    assert len(one.ask(protocol.ListAttempts).attempts) == 1
    assert len(observer.ask(protocol.ListAttempts).attempts) == 2
    owners = {frame.event.owner for frame in one.events if isinstance(frame.event, AttemptEvent)}
    assert owners == {"owner-one"}
    observer.until(lambda: sum(change.state == "completed" for change in observer.changes("same")) == 2)
    refused = observer.ask(protocol.StopAttempts, attempts=[("same", 1)])
    assert isinstance(refused, NodeRefused)
    assert "observers" in refused.reason
    both = observer.ask(protocol.PinBundle, job="same", attempt=1, kind="final")
    assert "several owners" in both.reason


def test_two_coordinators_of_one_owner_are_refused(agent: AgentProcess) -> None:
    first = agent.connect(session="first")
    second = agent.connect(session="second")
    assert isinstance(second.hello, NodeRefused)
    assert "two coordinators of one owner: 'test first'" in second.hello.reason
    same = agent.connect(session="first")
    assert isinstance(same.hello, protocol.NodeHello)
    first.close()
    same.close()
    deadline = time.monotonic() + SECONDS
    while isinstance(agent.connect(session="second").hello, NodeRefused):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_drained_node_starts_nothing_and_goes_when_told(agent: AgentProcess) -> None:
    client = agent.connect()
    client.start("a", "steps=100000,sleep=0.02")
    client.wait("a", lambda status: status.step > 1)
    assert isinstance(client.ask(protocol.DrainNode), protocol.NodeDone)
    refused = client.start("b", "steps=2")
    assert (isinstance(refused, NodeRefused), refused.retry) == (True, True)
    other = agent.connect(owner="owner-two")
    held = other.ask(protocol.DrainNode, stop=True)
    assert (isinstance(held, NodeRefused), held.retry) == (True, True)
    client.ask(protocol.DrainNode, stop=True)
    assert agent.process is not None
    assert agent.process.wait(30) == 0
    wait_no_trainers()


def test_one_agent_a_directory(agent: AgentProcess) -> None:
    command = [sys.executable, "-m", "gshare.cli.main", "agent", "--state-dir", str(agent.state)]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 75
    assert f"{agent.state}: an agent runs there already" in done.stderr
    assert done.stderr.count("\n") == 1
    assert isinstance(agent.connect().hello, protocol.NodeHello)


def test_samples_may_be_refused_and_durable_events_come_all_the_same(agent: AgentProcess) -> None:
    client = agent.connect()
    client.follow(samples=False)
    client.start("a", "steps=6")
    client.states("a", "completed")
    assert not [f for f in client.events if f.seq == 0]
    with_samples = agent.connect(role="observer", session="")
    with_samples.follow()
    client.start("b", "steps=6,sleep=0.02")
    client.wait_end("b")
    with_samples.until(
        lambda: any(
            isinstance(f.event, AttemptEvent) and isinstance(f.event.event, Stepped)
            for f in with_samples.events
        )
    )


def test_a_record_that_cannot_be_read_is_told_and_costs_nobody_else(agent: AgentProcess) -> None:
    client = agent.connect()
    client.start("a", "steps=100000,sleep=0.02")
    client.wait("a", lambda status: status.step > 1)
    agent.kill()
    broken = agent.state / "attempts" / "00000000-broken-1"
    broken.mkdir()
    (broken / "attempt.json").write_text("{")
    agent.start()
    client = agent.connect()
    client.follow()
    client.wait("a", lambda status: status.state == "running")
    client.until(
        lambda: any(
            isinstance(f.event, NodeMessage) and "attempt.json: cannot be read" in f.event.text
            for f in client.events
        )
    )
    client.ask(protocol.StopAttempts, attempts=[("a", 1)])
    client.wait_end("a")


def test_hostile_starts_are_refused_before_anything_is_made(agent: AgentProcess) -> None:
    client = agent.connect()
    data = client.push(b"steps=2", "fine.jsonl")
    before = sorted(path.name for path in agent.state.rglob("*"))
    bad_refs = [
        BlobRef(name=name, sha256=data.sha256, size=data.size)
        for name in ("../x", "/etc/passwd", ".hidden", "-rf", "a\nb", "x" * 4096, "a/../../b", "", "a\0b")
    ]
    for ref in bad_refs:
        for fields in (
            {"data": ref},
            {"data": data, "model": ModelRef(name="m", files=[ref])},
            {"data": data, "checkpoint": [ref]},
        ):
            refused = client.start("fine", "", **fields)
            assert isinstance(refused, NodeRefused), fields
            assert len(refused.reason) < 400
    for job in ("../x", "$(touch pwned)", "a b", "[/]", "a\nb", "x" * 4096, "", ".a"):
        refused = client.start(job, "", data=data)
        assert isinstance(refused, NodeRefused), job
        assert len(refused.reason) < 400
    for fields in (
        {"attempt": 0},
        {"gpu": "GPU\n"},
        {"budget_mb": -1},
        {"timeout_s": float("nan")},
        {"model": ModelRef(name="m", path="")},
        {"data": BlobRef(name="a", sha256="../" + "0" * 61, size=3)},
        {"data": BlobRef(name="a", sha256=data.sha256, size=-1)},
        {"checkpoint": [data, data]},
    ):
        refused = client.start("fine", "", **{"data": data, **fields})
        assert isinstance(refused, NodeRefused), fields
        assert not refused.retry
    assert sorted(path.name for path in agent.state.rglob("*")) == before
    assert isinstance(client.start("fine", "", data=data), protocol.AttemptAccepted)


def test_gpu_memory_is_reserved_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On simulated devices: the second attempt waits in the ledger's queue, with its place told."""
    (tmp_path / "devices.toml").write_text('[[device]]\nuuid = "GPU-one"\ntotal_mb = 10000\n')
    monkeypatch.setenv("GSHARE_DEVICES", str(tmp_path / "devices.toml"))
    monkeypatch.setenv("GSHARE_LEDGER_DIR", str(tmp_path / "ledger"))
    monkeypatch.setenv("GSHARE_TEST_RUNNER", "reserved_runner:ReservedRunner")
    with running_agent(tmp_path / "node") as agent:
        client = agent.connect()
        client.start("first", "steps=100000,sleep=0.02", gpu="GPU-one", budget_mb=6000)
        client.wait("first", lambda status: status.step > 1)
        client.start("second", "steps=3", gpu="GPU-one", budget_mb=6000)
        waiting = client.wait("second", lambda status: status.position > 0)
        assert (waiting.position, waiting.state, waiting.gpu) == (1, "queued", "GPU-one")
        client.start("hasty", "steps=3", gpu="GPU-one", budget_mb=6000, timeout_s=0.2)
        hasty = client.wait_end("hasty")
        assert (hasty.state, hasty.retry) == ("failed", True)
        client.start("huge", "steps=3", gpu="GPU-one", budget_mb=20000)
        huge = client.wait_end("huge")
        assert (huge.state, huge.retry) == ("failed", True)  # it may fit on another node
        assert "can never fit" in huge.reason
        info = client.ask(protocol.DescribeNode)
        assert {row.state for row in info.reservations} == {"held", "waiting"}
        assert info.gpus[0].reserved_mb == 6000
        assert info.attempts_running == 2
        client.ask(protocol.StopAttempts, attempts=[("first", 1)])
        assert client.wait_end("second").state == "completed"
        assert client.status("second").position == 0
