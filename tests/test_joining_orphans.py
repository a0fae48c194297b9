"""A trainer on trial whose client is gone will never be opened: who wants to join is told at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gshare.agent.service.client import Reply, TrainerClient
from gshare.agent.service.hold import Spawned, spawn_trainer
from gshare.agent.service.protocol import Detach, Done, JoinTrainer, OpenTrainer, Refused, SubmitJobs

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from fake_runner import tell  # noqa: E402
from joining_clients import LONG, SECONDS, job, make_base, make_config, wait_for  # noqa: E402

LEFT = "the client whose jobs were on trial has left it"


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    monkeypatch.setenv("GSHARE_FAKE_LOAD", "hold")  # until the clients of a test are there
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "GSHARE_FAKE_WORDS"):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(folder))


@pytest.fixture
def on_trial(tmp_path: Path) -> Iterator[Spawned]:
    """A trainer that is not open; its opener has two seconds to come."""
    base = make_base(tmp_path / "base", b"weights")
    spawned = spawn_trainer(
        make_config(base, join_key="key", joinable=False, first_client_seconds=2.0, idle_seconds=0.5)
    )
    yield spawned
    spawned.process.terminate()
    spawned.process.wait(SECONDS)
    spawned.release()


def ask_to_join(client: TrainerClient) -> int:
    return client.send(JoinTrainer, jobs=["b"], budget_mb=0, resident_mb=0)


def answer(client: TrainerClient, request_id: int) -> Reply:
    replies: list[Reply] = []

    def heard() -> bool:
        client.poll(0.05)
        reply = client.reply(request_id)
        replies.extend([reply] if reply is not None else [])
        return bool(replies)

    wait_for(heard)
    return replies[0]


def wait_ended(client: TrainerClient, name: str) -> None:
    wait_for(lambda: any(status.job == name and status.state == "stopped" for status in client.jobs()))


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("first", ["the joiner asks", "the opener leaves"])
def test_an_opener_that_leaves_refuses_the_others_whichever_was_first(
    on_trial: Spawned, tmp_path: Path, first: str, detached: bool
) -> None:
    opener = TrainerClient(on_trial.directory, "A")
    joiner = TrainerClient(on_trial.directory, "B")
    tell("go")
    assert isinstance(opener.ask(SubmitJobs, jobs=[job("a", tmp_path, LONG)]), Done)
    # Keeps the trainer there when nobody who has brought jobs is left but it, and is not its opener.
    keeper = TrainerClient(on_trial.directory, "C")
    assert isinstance(keeper.ask(SubmitJobs, jobs=[job("c", tmp_path, LONG)]), Done)
    if detached:
        opener.ask(Detach)
    request = 0
    if first == "the joiner asks":
        request = ask_to_join(joiner)
        joiner.poll(0.3)
        assert joiner.reply(request) is None  # waits for the jobs of A to be off trial
    opener.close()
    if first == "the opener leaves":
        wait_for(lambda: joiner.others() == 0)
        request = ask_to_join(joiner)
    assert answer(joiner, request) == Refused(reply_to=request, reason=LEFT)
    joiner.close()
    keeper.close()
    if not detached:
        assert on_trial.process.wait(SECONDS) == 0  # nothing keeps it


def test_an_opener_that_is_gone_before_its_jobs_were_looked_at(on_trial: Spawned, tmp_path: Path) -> None:
    opener = TrainerClient(on_trial.directory, "A")
    joiner = TrainerClient(on_trial.directory, "B")
    opener.send(SubmitJobs, jobs=[job("a", tmp_path, LONG)])
    request = ask_to_join(joiner)
    wait_for(lambda: joiner.others() == 1)
    opener.close()
    wait_for(lambda: joiner.others() == 0)
    tell("go")
    assert isinstance(answer(joiner, request), Refused)
    wait_ended(joiner, "a")
    joiner.close()
    assert on_trial.process.wait(SECONDS) == 0


def test_an_opener_that_never_brings_jobs_is_not_waited_for(on_trial: Spawned) -> None:
    looker = TrainerClient(on_trial.directory, "A")
    joiner = TrainerClient(on_trial.directory, "B")
    looker.close()
    tell("go")
    reply = answer(joiner, ask_to_join(joiner))
    assert isinstance(reply, Refused)
    assert "has not come" in reply.reason
    joiner.close()
    assert on_trial.process.wait(SECONDS) == 0


def test_the_control_an_opener_that_stays_lets_them_in_however_late(
    on_trial: Spawned, tmp_path: Path
) -> None:
    opener = TrainerClient(on_trial.directory, "A")
    joiner = TrainerClient(on_trial.directory, "B")
    tell("go")
    assert isinstance(opener.ask(SubmitJobs, jobs=[job("a", tmp_path, LONG)]), Done)
    request = ask_to_join(joiner)
    joiner.poll(2.5)  # longer than an opener may take to come
    assert joiner.reply(request) is None
    opener.ask(OpenTrainer)
    assert isinstance(answer(joiner, request), Done)
    opener.close()
    assert isinstance(joiner.ask(SubmitJobs, jobs=[job("b", tmp_path, "steps=3")]), Done)
    joiner.close()
