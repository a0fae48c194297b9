"""A shared trainer dies: every client goes on with its jobs, suspects alone first. An engine of straw."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path

import msgspec
import psutil
import pytest
from gshare.agent.jobs.events import Evaluated, Event, JobChanged, Stepped, TrainerMessage
from gshare.agent.service import registry
from gshare.agent.service.breadcrumb import read_breadcrumb
from gshare.agent.service.client import TrainerClient
from gshare.agent.service.finding import Finder
from gshare.agent.service.protocol import PauseJobs, SubmitJobs
from gshare.agent.service.registry import TrainerConfig

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from fake_runner import tell, weights_after  # noqa: E402
from joining_clients import (  # noqa: E402
    LONG,
    Client,
    job,
    make_base,
    make_config,
    stop,
    trainer_pid,
    wait_for,
    weights,
)

SCRIPT = "steps=300,sleep=0.01,save=5,hold=18"


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "GSHARE_FAKE_WORDS"):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(folder))


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    return make_config(make_base(tmp_path / "base", b"weights"))


def deaths(client: Client) -> int:
    return sum(isinstance(e, TrainerMessage) and "the trainer died" in e.text for e in list(client.events))


def nothing_is_lost_or_left() -> bool:
    """Two that leave a dead directory at once may leave it to a collector, who finds nothing to report."""
    wait_for(lambda: registry.live_trainers() == [])
    return collected() == []


def collected() -> list[str]:
    """Jobs that nobody has taken over, once every directory of a dead trainer is gone. A process that is just
    being started has a copy of this one's locks for a moment."""
    lost: list[str] = []

    def nothing_left() -> bool:
        lost.extend(record.status.job for record in registry.collect_dead())
        return list(registry.trainer_dirs()) == registry.live_trainers()

    wait_for(nothing_left)
    return lost


def since_death(client: Client) -> list[Event]:
    """The events after the last death of its trainer."""
    events = list(client.events)
    died = [i for i, e in enumerate(events) if isinstance(e, TrainerMessage) and "the trainer died" in e.text]
    return events[died[-1] :] if died else events


def is_back(client: Client) -> bool:
    """Its trainer has died, and its jobs run in another one."""
    return deaths(client) > 0 and any(isinstance(e, Stepped) for e in since_death(client))


def joined_clients(config: TrainerConfig, tmp_path: Path, scripts: dict[str, str]) -> list[Client]:
    """One client a job, in order; all in one trainer."""
    clients = []
    for name, script in scripts.items():
        client = Client(config, [job(name, tmp_path, script)], name.upper())
        client.steps(name, 8)
        clients.append(client)
    assert len(registry.live_trainers()) == 1
    return clients


def kill_in_flight(*jobs: str) -> None:
    """SIGKILL for the one trainer, in a pass of just these jobs: between two passes nobody is suspected."""
    process = psutil.Process(trainer_pid())
    (directory,) = registry.live_trainers()

    def stopped_in_flight() -> bool:
        process.suspend()
        wait_for(lambda: process.status() == psutil.STATUS_STOPPED)
        if sorted(job for job, _ in read_breadcrumb(directory)) == sorted(jobs):
            return True
        process.resume()
        return False

    wait_for(stopped_in_flight)
    process.kill()


def test_killed_from_outside_it_costs_nobody_anything(config: TrainerConfig, tmp_path: Path) -> None:
    clients = joined_clients(config, tmp_path, {"a": SCRIPT, "b": SCRIPT, "c": SCRIPT})
    for client, name in zip(clients, "abc", strict=True):
        client.steps(name, 18)  # after an evaluation is written down, not in the middle of it
    kill_in_flight("a", "b", "c")
    tell("go")
    for client, name in zip(clients, "abc", strict=True):
        assert client.wait() == 0
        assert deaths(client) == 1
        assert weights(job(name, tmp_path)) == weights_after(name, 300)
        # Durable events of the dead trainer still come, each once.
        evaluated = Counter(e.step for e in client.events if isinstance(e, Evaluated))
        assert set(evaluated) == set(range(5, 301, 5))
        (again,) = [e.step for e in client.events if isinstance(e, JobChanged) and "resumed" in e.reason]
        assert all(count == 1 for step, count in evaluated.items() if step <= again)
    assert nothing_is_lost_or_left()
    assert {record.status.state for record in registry.finished_jobs()} == {"completed"}


def test_a_poisonous_job_takes_the_others_down_once_and_no_more(
    config: TrainerConfig, tmp_path: Path
) -> None:
    bad_script = "steps=300,sleep=0.01,kill_at=60,hold=50"
    a, bad = joined_clients(config, tmp_path, {"a": SCRIPT, "bad": bad_script})
    tell("go")
    assert (a.wait(), bad.wait()) == (0, 1)
    assert weights(job("a", tmp_path)) == weights_after("a", 300)
    assert deaths(a) == 1
    assert deaths(bad) == 2  # with the others, then alone
    (reason,) = [e.reason for e in bad.events if isinstance(e, JobChanged) and e.state == "failed"]
    assert "the trainer died at step 60 of this job, running alone" in reason


def test_the_control_a_client_that_rejoins_with_its_suspect_takes_the_others_down_again(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, clients = Finder.search, []

    def with_the_others(self: Finder, config: TrainerConfig, alone: bool, never_open: bool = False) -> None:
        if self._client == "BAD" and clients:
            # Else it may be faster, and be dead by itself when the other one comes.
            wait_for(lambda: deaths(clients[0]) > 1 or is_back(clients[0]))
        search(self, config, alone=False)

    monkeypatch.setattr(Finder, "search", with_the_others)
    bad_script = "steps=300,sleep=0.01,kill_at=60,hold=50"
    clients += joined_clients(config, tmp_path, {"a": LONG, "bad": bad_script})
    a, bad = clients
    tell("go")
    bad.wait()
    wait_for(lambda: deaths(a) >= 2)
    stop(a)


def test_off_trial_a_trainer_is_open_and_the_clients_are_together_again(
    config: TrainerConfig, tmp_path: Path
) -> None:
    """A client that comes while the only trainer has a suspect in it waits for it to pass."""
    (a,) = joined_clients(config, tmp_path, {"a": f"{LONG},hold=9"})
    pid = trainer_pid()
    kill_in_flight("a")
    wait_for(lambda: deaths(a) == 1 and bool(registry.live_trainers()) and trainer_pid() != pid)
    b = Client(config, [job("b", tmp_path, "steps=9")], "B")
    wait_for(lambda: b.says("waiting until its jobs are off trial"))
    tell("go")
    assert b.wait() == 0
    assert b.supervisor.joined
    stop(a)


def test_a_client_with_nothing_in_flight_is_no_suspects_client(config: TrainerConfig, tmp_path: Path) -> None:
    """Its job is paused when the trainer dies, so it joins or starts one that may be joined at once."""
    a, b = joined_clients(config, tmp_path, {"a": SCRIPT, "b": LONG})
    (directory,) = registry.live_trainers()
    other = TrainerClient(directory, "test")
    other.ask(PauseJobs, jobs=["b"])
    wait_for(lambda: b.states("b")[-1] == "paused")
    kill_in_flight("a")
    other.close()
    tell("go")
    assert a.wait() == 0
    wait_for(lambda: is_back(b))
    assert not b.supervisor._closed
    assert b.supervisor._machine.alone is None
    stop(b)


def test_a_client_that_dies_with_the_trainer_is_reported_the_others_jobs_are_not(
    config: TrainerConfig, tmp_path: Path
) -> None:
    a, b = joined_clients(config, tmp_path, {"a": LONG, "b": LONG})
    (directory,) = registry.live_trainers()
    # A client that holds the directory and reads nothing yet: the others take over theirs meanwhile.
    slow = registry.share_lock(directory / registry.SUPERVISOR)
    assert slow is not None
    lost = TrainerClient(directory, "lost")
    lost.ask(SubmitJobs, jobs=[job("lost", tmp_path, LONG)])
    wait_for(lambda: any(status.step > 1 for status in lost.jobs() if status.job == "lost"))
    os.kill(lost.hello.pid, signal.SIGKILL)
    for client in (a, b):
        wait_for(lambda client=client: is_back(client))
        assert deaths(client) == 1
    assert directory.exists()
    assert registry.collect_dead() == []
    os.close(slow)
    assert collected() == ["lost"]
    assert not directory.exists()
    stop(a, b)


def test_of_two_clients_the_second_reads_what_the_first_has_read(
    config: TrainerConfig, tmp_path: Path
) -> None:
    """The first to have read a dead trainer's directory leaves it to the others."""
    a, b = joined_clients(config, tmp_path, {"a": SCRIPT, "b": SCRIPT})
    kill_in_flight("a", "b")
    tell("go")
    assert (a.wait(), b.wait()) == (0, 0)
    for client in (a, b):
        (text,) = [e.text for e in client.events if isinstance(e, TrainerMessage) and "died" in e.text]
        assert "a at step" in text
        assert "b at step" in text
    assert nothing_is_lost_or_left()


def test_an_isolated_job_runs_where_nobody_is_or_comes(config: TrainerConfig, tmp_path: Path) -> None:
    """Jobs that only crash together: in the end each runs alone, and never in a trainer with others."""
    script = "steps=300,sleep=0.1,save=5"
    requests = [job("a", tmp_path, script), job("b", tmp_path, script)]
    client = Client(config, requests, "A")
    for killed in range(3):
        wait_for(
            lambda n=killed: (
                deaths(client) == n
                and any(isinstance(e, Stepped) and e.adapters_in_pass == 2 for e in since_death(client))
            )
        )
        kill_in_flight("a", "b")
        wait_for(lambda n=killed: deaths(client) == n + 1)
    other = Client(config, [job("c", tmp_path, "steps=9")], "C")
    assert other.wait() == 0
    assert not other.supervisor.joined
    tell("hurry")
    assert client.wait() == 0
    assert {e.adapters_in_pass for e in since_death(client) if isinstance(e, Stepped)} == {1}
    for name in "ab":
        assert weights(job(name, tmp_path)) == weights_after(name, 300)


def test_a_stopped_trainer_stops_everybodys_jobs_in_order(config: TrainerConfig, tmp_path: Path) -> None:
    clients = joined_clients(config, tmp_path, {"a": LONG, "b": LONG})
    os.kill(trainer_pid(), signal.SIGTERM)
    for client, name in zip(clients, "ab", strict=True):
        client.wait()
        assert client.states(name)[-1] == "stopped"
        assert deaths(client) == 0
    wait_for(lambda: list(registry.trainer_dirs()) == [])


def test_an_error_of_the_base_is_each_clients_own(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSHARE_FAKE_LOAD", "error")
    clients = [Client(config, [job(name, tmp_path)], name) for name in "ab"]
    for client in clients:
        assert client.wait() == 1
        (failed,) = [e.reason for e in client.events if isinstance(e, JobChanged) and e.state == "failed"]
        assert "no such model" in failed
    assert msgspec.structs.asdict(clients[0].config)["joinable"]
