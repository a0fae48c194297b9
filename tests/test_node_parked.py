"""Attempts that pause where a warm-up ends, or that their own losses stop: a real agent, no real engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gshare.agent.jobs.early_exit import EarlyExit
from gshare.agent.jobs.events import Evaluated
from gshare.agent.node import protocol
from gshare.agent.node.protocol import EARLY_EXIT, AttemptEvent, NodeRefused

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from fake_runner import tell, weights_after  # noqa: E402
from node_agents import AgentProcess, NodeClient, running_agent, wait_no_trainers  # noqa: E402

SCRIPT = "steps=9,save=4,files=1"


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentProcess]:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    monkeypatch.setenv("GSHARE_TEST_RUNNER", "fake_runner:FakeRunner")
    monkeypatch.setenv("GSHARE_TEST_PREPARE", "fake_prepare")
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "GSHARE_FAKE_WORDS"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    with running_agent(tmp_path / "node") as started:
        yield started


def _evaluated(client: NodeClient, attempt: int) -> list[int]:
    events = [frame.event for frame in client.events]
    return [
        event.event.step
        for event in events
        if isinstance(event, AttemptEvent) and event.attempt == attempt and isinstance(event.event, Evaluated)
    ]


def test_it_ends_parked_holds_no_trainer_and_goes_on_from_its_checkpoint(agent: AgentProcess) -> None:
    client = agent.connect()
    assert client.hello.knows == [EARLY_EXIT]
    client.follow()
    client.start("a", SCRIPT, pause_at=5)
    parked = client.wait_end("a")
    assert (parked.state, parked.parked, parked.step, parked.checkpoint_step) == ("stopped", True, 5, 5)
    assert (parked.reason, parked.val_loss) == ("it was to pause here", 0.4)
    assert client.states("a", "paused") == ["queued", "running", "paused"]
    wait_no_trainers()
    files = client.pull("a", "checkpoint")
    assert {"checkpoint-5/state.json", "best/metadata.json"} < set(files)
    # As after a restart of the agent: it stays where it is, and nobody is told of it again.
    agent.kill()
    agent.start()
    client = agent.connect()
    client.follow()
    assert client.status("a") == parked
    assert client.states("a", "paused") == ["queued", "running", "paused"]
    refs = [client.push(data, name) for name, data in files.items()]
    client.start("a", SCRIPT, attempt=2, pause_at=5, past=True, checkpoint=refs)
    ended = client.wait_end("a", 2)
    assert (ended.state, ended.parked, ended.step) == ("completed", False, 9)
    assert client.pull("a", "final", 2)["adapter_model.safetensors"].decode() == weights_after("a", 9)
    assert "paused" not in client.states("a", "completed")[3:]


@pytest.mark.parametrize("pause_at", [5, 0])
def test_one_that_was_let_go_on_begins_anew_and_still_evaluates_there(
    agent: AgentProcess, pause_at: int
) -> None:
    """Its node was lost with the checkpoint. Negative control: a job that never was to pause does not."""
    client = agent.connect()
    client.follow()
    client.start("a", SCRIPT, attempt=2, pause_at=pause_at, past=True)
    ended = client.wait_end("a", 2)
    assert (ended.state, ended.step) == ("completed", 9)
    assert _evaluated(client, 2) == ([4, 5, 8] if pause_at else [4, 8])
    assert client.states("a", "completed") == (
        ["queued", "running", "running", "completed"] if pause_at else ["queued", "running", "completed"]
    )


def test_a_person_s_pause_is_none_at_the_boundary(agent: AgentProcess) -> None:
    client = agent.connect()
    client.start("a", "steps=100000,sleep=0.02,save=3,hold=150", pause_at=200)
    client.wait("a", lambda status: status.step > 1)
    client.ask(protocol.PauseAttempts, attempts=[("a", 1)])
    paused = client.wait("a", lambda status: status.state == "paused")
    assert not paused.parked
    assert paused.step <= 150
    tell("go")
    client.ask(protocol.ResumeAttempts, attempts=[("a", 1)])
    parked = client.wait_end("a")
    assert (parked.parked, parked.step) == (True, 200)
    done = client.ask(protocol.ResumeAttempts, attempts=[("a", 1)])
    assert "has ended" in done.failed["a/1"]


def test_its_own_losses_end_it_for_good(agent: AgentProcess) -> None:
    client = agent.connect()
    client.follow()
    client.start("a", f"{SCRIPT},exit_at=6", pause_at=8, early_exit=EarlyExit())
    ended = client.wait_end("a")
    assert ended.exit is not None
    assert (ended.state, ended.retry, ended.step, ended.exit.pattern) == ("stopped", False, 6, "overfitting")
    assert ended.exit.evidence == {"gap": 0.5}
    client.states("a", "stopped")
    assert client.changes("a")[-1].exit == ended.exit
    assert client.pull("a", "final")["adapter_model.safetensors"].decode() == weights_after("a", 6)
    agent.kill()
    agent.start()
    assert agent.connect().status("a") == ended


def test_what_no_job_can_have_is_refused(agent: AgentProcess) -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"pause_at": -1}, "job a: pause_at: must be from 0 to"),
        ({"early_exit": EarlyExit(window=1)}, "job a: early_exit, window: must be at least 2"),
        ({"early_exit": EarlyExit(ema_alpha=float("nan"))}, "early_exit, ema_alpha: must be above 0"),
    ]
    for fields, told in cases:
        refused = agent.connect().start("a", SCRIPT, **fields)
        assert isinstance(refused, NodeRefused)
        assert told in refused.reason
