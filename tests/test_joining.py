"""Clients that join a running trainer instead of loading the base again: real processes, engine of straw."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gshare.agent.jobs.events import JobChanged, Stepped, TrainerMessage
from gshare.agent.service import protocol, registry
from gshare.agent.service.client import Reply, TrainerClient
from gshare.agent.service.hold import spawn_trainer
from gshare.agent.service.joining import with_identity
from gshare.agent.service.own_jobs import OwnJobs
from gshare.agent.service.registry import TrainerConfig
from gshare.agent.service.supervise import Supervisor

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from fake_runner import tell, weights_after  # noqa: E402
from joining_clients import (  # noqa: E402
    LONG,
    SECONDS,
    Client,
    job,
    make_base,
    make_config,
    stop,
    trainer_pid,
    wait_for,
    weights,
)


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    # A trainer that is just starting is asked to make room too: it may take a while to be there.
    monkeypatch.setattr("gshare.agent.service.finding.HELLO_SECONDS", SECONDS)
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "GSHARE_FAKE_WORDS"):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(folder))


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    return make_config(make_base(tmp_path / "base", b"weights"))


# ---------------------------------------------------------------------- one trainer for many


def test_a_second_client_joins_and_both_are_trained_fused_in_one_process(
    config: TrainerConfig, tmp_path: Path
) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 3)
    b = Client(config, [job("b", tmp_path, "steps=20,sleep=0.01")], "B")
    assert b.wait() == 0
    assert len(registry.live_trainers()) == 1
    assert b.says(f"joins trainer {registry.live_trainers()[0].name} of job a")
    assert b.supervisor.joined
    assert any(isinstance(e, Stepped) and e.adapters_in_pass == 2 for e in b.events)
    assert {e.job for e in a.events if not isinstance(e, TrainerMessage)} == {"a"}
    assert weights(job("b", tmp_path)) == weights_after("b", 20)
    stop(a)
    assert list(registry.trainer_dirs()) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schedule": "fair"}, "its schedule is synchronized, not fair"),
        ({"max_tokens_per_pass": 7}, "its max_tokens_per_pass is 16384, not 7"),
        ({"base_dtype": "nf4"}, "its base_dtype is fp32, not nf4"),
    ],
)
def test_other_settings_mean_another_trainer_and_the_reason_is_said(
    config: TrainerConfig, tmp_path: Path, change: dict[str, object], says: str
) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    b = Client(msgspec.structs.replace(config, **change), [job("b", tmp_path, LONG)], "B")
    b.steps("b", 1)
    assert len(registry.live_trainers()) == 2
    assert b.says(says)
    stop(a, b)


def test_another_base_in_the_same_directory_is_not_joined(config: TrainerConfig, tmp_path: Path) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    other = make_base(tmp_path / "other", b"WEIGHTS")
    (other / "m.safetensors").replace(Path(config.model_dir) / "m.safetensors")
    b = Client(config, [job("b", tmp_path, LONG)], "B")
    b.steps("b", 1)
    assert len(registry.live_trainers()) == 2
    stop(a, b)


@pytest.mark.parametrize("which", ["first", "second"])
def test_no_join_forbids_both_ways(config: TrainerConfig, tmp_path: Path, which: str) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A", join=which != "first")
    a.steps("a", 1)
    b = Client(config, [job("b", tmp_path, LONG)], "B", join=which != "second")
    b.steps("b", 1)
    assert len(registry.live_trainers()) == 2
    assert b.says("it was started with --no-join") == (which == "first")
    stop(a, b)


def test_a_traced_trainer_is_its_clients_alone(config: TrainerConfig) -> None:
    assert with_identity(config, join=True).join_key
    assert not with_identity(msgspec.structs.replace(config, trace=True), join=True).join_key


def test_four_started_at_once_share_one_trainer_that_is_still_loading(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSHARE_FAKE_LOAD", "sleep=1")
    clients = [Client(config, [job(name, tmp_path, LONG)], name) for name in "abcd"]
    for client in clients:
        client.steps(client.name, 1)
    assert len(registry.live_trainers()) == 1
    assert sum(client.supervisor.joined for client in clients) == 3
    stop(*clients)
    wait_for(lambda: not list(registry.trainer_dirs()))


# ---------------------------------------------------------------------- clients that go away


def test_ctrl_c_of_one_takes_out_its_own_jobs_only_whoever_started_the_trainer(
    config: TrainerConfig, tmp_path: Path
) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 3)
    b = Client(config, [job("b", tmp_path, LONG)], "B")
    b.steps("b", 3)
    c = Client(config, [job("c", tmp_path, LONG)], "C")
    c.steps("c", 3)
    pid = trainer_pid()
    stop(a)
    assert a.states("a")[-1] == "stopped"
    b.steps("b", int(max(e.step for e in b.events if isinstance(e, Stepped))) + 5)
    stop(c)
    assert trainer_pid() == pid
    assert b.states("b") == ["running"]
    stop(b)
    assert list(registry.trainer_dirs()) == []


def test_a_stop_while_the_base_is_loaded_leaves_the_trainer_to_the_others(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSHARE_FAKE_LOAD", "hold")
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    wait_for(lambda: bool(registry.live_trainers()))
    b = Client(config, [job("b", tmp_path, "steps=9")], "B")
    wait_for(lambda: b.supervisor.finder.asking)
    (directory,) = registry.live_trainers()
    looker = TrainerClient(directory, "looks")
    wait_for(lambda: looker.others() == 1)  # A and B
    a.stop.exit_code = 130
    wait_for(lambda: looker.others() == 0)  # B
    looker.close()
    tell("go")
    assert b.wait() == 0
    assert b.supervisor.joined
    assert a.wait() == 130
    assert not (tmp_path / "out" / "a").exists()


def test_everybody_stopping_while_the_base_is_loaded_ends_the_trainer(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSHARE_FAKE_LOAD", "sleep=600")
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    wait_for(lambda: bool(registry.live_trainers()))
    b = Client(config, [job("b", tmp_path, LONG)], "B")
    wait_for(lambda: b.supervisor.finder.asking)
    stop(a, b)
    wait_for(lambda: not list(registry.trainer_dirs()))


def test_who_only_looks_does_not_end_a_trainer_that_loads(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gshare jobs` may be there and gone before the client that has started the trainer."""
    monkeypatch.setenv("GSHARE_FAKE_LOAD", "hold")
    spawned = spawn_trainer(config)
    TrainerClient(spawned.directory, "looks").close()
    client = TrainerClient(spawned.directory, "owner")
    wait_for(lambda: client.others() == 0)  # the trainer has seen it go
    request = client.send(protocol.SubmitJobs, jobs=[job("a", tmp_path, "steps=3")])
    tell("go")
    replies: list[Reply | None] = []

    def answered() -> bool:
        client.poll(0.05)
        replies.append(client.reply(request))
        return replies[-1] is not None

    wait_for(answered)
    done = replies[-1]
    assert isinstance(done, protocol.Done)
    assert done.jobs == ["a"]
    client.close()
    assert spawned.process.wait(SECONDS) == 0
    spawned.release()


def test_a_trainer_that_is_just_exiting_costs_no_error(config: TrainerConfig, tmp_path: Path) -> None:
    """Clients that come as the last one leaves, again and again: each is trained, by whatever trainer."""
    for number in range(8):
        first = Client(config, [job(f"a{number}", tmp_path, "steps=3")], "A")
        wait_for(lambda first=first: first.supervisor.table.active() == [])
        time.sleep(0.03 * number)
        second = Client(config, [job(f"b{number}", tmp_path, "steps=3")], "B")
        assert (first.wait(), second.wait()) == (0, 0)


def test_a_trainer_that_hangs_is_passed_over(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With half a second it failed once on a loaded machine, and not again when that was tried.
    monkeypatch.setattr("gshare.agent.service.finding.HELLO_SECONDS", 4.0)
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    pid = trainer_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        b = Client(config, [job("b", tmp_path, "steps=3")], "B")
        assert b.wait() == 0
        assert b.says("cannot be joined: the trainer did not say hello in time"), b.events
    finally:
        os.kill(pid, signal.SIGCONT)
    stop(a)


# ---------------------------------------------------------------------- names and directories


def test_a_job_of_the_same_name_elsewhere_gets_a_trainer_of_its_own(
    config: TrainerConfig, tmp_path: Path
) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    b = Client(config, [job("a", tmp_path / "2", "steps=9")], "B")
    assert b.wait() == 0
    assert b.says("a job named a runs in it")
    assert not b.supervisor.joined
    stop(a)


def test_a_name_that_a_sweep_is_still_to_bring_is_its_own(config: TrainerConfig, tmp_path: Path) -> None:
    """Whoever else has a job of that name gets a trainer of its own, also when the sweep's has ended."""
    late = job("late", tmp_path, "steps=20")
    a = Client(config, [job("a", tmp_path, LONG), late], "A", first=["a"])
    a.steps("a", 1)
    for folder, states in (("2", []), ("3", ["completed"])):
        b = Client(config, [job("late", tmp_path / folder, "steps=9,loss=0.5")], "B")
        assert b.wait() == 0
        assert b.says("a job named late runs in it, or is to")
        assert not b.supervisor.joined
        assert a.states("late")[-1:] == states
        if not states:
            a.go_on(late)
            a.until(lambda events: "completed" in a.states("late"))
    assert weights(late) == weights_after("late", 20)
    stop(a)


def test_a_stop_is_told_while_the_trainer_waits_for_memory(config: TrainerConfig, tmp_path: Path) -> None:
    """It answers a submission when it has its memory. Later ones it answers between two rounds, and until
    then nobody knows whose a job of that name is."""
    jobs = [job("a", tmp_path), job("b", tmp_path)]
    client = Supervisor(config=config, requests=jobs, on_event=lambda event: None)
    client._here, client._waiting = {"a", "b"}, {1: ("a", "b")}
    stopped = JobChanged(job="a", state="stopped", step=0, total_steps=0, reason="stopped by B")
    assert list(client._ours([stopped])) == [stopped]
    client._answered_once = True
    assert list(client._ours([stopped])) == []
    client._waiting = {}
    assert list(client._ours([])) == [stopped]


@pytest.mark.parametrize("looked_at", [True, False])
def test_another_s_job_is_never_told_of_as_one_s_own(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_at: bool
) -> None:
    """With a trainer that keeps no names, another client's job is there first, and one's own is refused. The
    control tells of events by their names alone."""
    send = TrainerClient.send

    def without_names(self: TrainerClient, make: type, **fields: Any) -> int:
        fields.pop("names", None)
        return send(self, make, **fields)

    monkeypatch.setattr(TrainerClient, "send", without_names)
    if not looked_at:
        monkeypatch.setattr(OwnJobs, "_is_ours", lambda self, event: True)
    late = job("late", tmp_path, "steps=20")
    a = Client(config, [job("a", tmp_path, LONG), late], "A", first=["a"])
    a.steps("a", 1)
    b = Client(config, [job("late", tmp_path / "2", f"{LONG},eval=1")], "B")
    b.steps("late", 3)
    assert b.supervisor.joined
    a.go_on(late)
    a.until(lambda events: "failed" in a.states("late"))
    seen = len(b.events)
    wait_for(lambda: len(b.events) > seen + 20)
    told = [e for e in a.events if isinstance(e, Stepped) and e.job == "late"]
    status = a.supervisor.table.get("late")
    assert status is not None
    if looked_at:
        assert a.states("late") == ["failed"]
        assert (status.state, status.step, status.val_loss, told) == ("failed", 0, None, [])
    else:
        assert told
    stop(a, b)


def test_a_directory_in_use_means_try_again_later_when_joined_too(
    config: TrainerConfig, tmp_path: Path
) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    request = job("b", tmp_path)
    spec = msgspec.structs.replace(request.spec, output_dir=str(tmp_path / "out" / "a"))
    b = Client(config, [msgspec.structs.replace(request, spec=spec)], "B")
    assert b.wait() == 75
    assert b.supervisor.joined
    stop(a)


def test_a_job_is_resumed_in_the_trainer_it_was_stopped_in(config: TrainerConfig, tmp_path: Path) -> None:
    """The trainer's journal still tells of its first life, which must not be taken for the second's."""
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    script = "steps=60,sleep=0.01,save=5,hold=40"
    b = Client(config, [job("b", tmp_path, script)], "B")
    b.steps("b", 12)
    stop(b)
    tell("go")  # it could not be at its end before
    again = Client(config, [job("b", tmp_path, script, resume=True)], "B2")
    assert again.wait() == 0
    assert again.supervisor.joined
    assert again.states("b") == ["running", "completed"]
    assert weights(job("b", tmp_path)) == weights_after("b", 60)
    stop(a)


def test_a_full_trainer_is_not_joined(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    (directory,) = registry.live_trainers()
    crowd = [TrainerClient(directory, "crowd") for _ in range(63)]
    b = Client(config, [job("b", tmp_path, "steps=9")], "B")
    assert b.wait() == 0
    assert b.says("this trainer has 64 clients already")
    for client in crowd:
        client.close()
    stop(a)
