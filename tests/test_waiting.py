"""Jobs whose trainer waits for GPU memory: listed, followed, stopped; nothing of them stays.

First the pure part, then real processes on a simulated device.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gshare.agent.jobs.spec import AdapterSpec, JobRequest
from gshare.agent.service import registry
from gshare.agent.service.client import TrainerClient
from gshare.agent.service.protocol import (
    Done,
    JobStatus,
    JoinTrainer,
    PauseJobs,
    Refused,
    Request,
    ResumeJobs,
    Shutdown,
    StopJobs,
    SubmitJobs,
)
from gshare.agent.service.server import Command, Connection
from gshare.agent.service.table import JobTable
from gshare.agent.service.waiting import WaitingRoom
from gshare.agent.vram.ledger import Ledger

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from fake_runner import weights_after  # noqa: E402
from ledger_children import files, holder, until  # noqa: E402
from straw_runs import LONG, flags, gshare, own_ledger, read_until, start, the_device  # noqa: E402


class Room:
    """A waiting room that notes what ends, and clients for it."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.ended: list[tuple[str, str, str]] = []
        self.room = WaitingRoom(
            lambda job, client, why: self.ended.append((job.spec.name, client, why)), is_open=is_open
        )
        self.one, self.two = Connection(key=1, client="one"), Connection(key=2, client="two")

    def submit(self, who: Connection, *names: str, number: int = 1) -> None:
        self.take(who, SubmitJobs(id=number, jobs=[job(name) for name in names]))

    def take(self, who: Connection, request: Request | None) -> None:
        self.room.take(Command(who, request))

    def answers(self) -> list[tuple[str, Done | Refused]]:
        return [(who.client, done) for who, done in self.room.answers()]

    def kept(self) -> list[tuple[str, list[str]]]:
        found = []
        for command in self.room.kept():
            assert isinstance(command.request, SubmitJobs)
            found.append((command.connection.client, [job.spec.name for job in command.request.jobs]))
        return found


def job(name: str) -> JobRequest:
    spec = AdapterSpec(name=name, data="x", output_dir=f"out/{name}", lora_alpha=32, seed=0)
    return JobRequest(spec=spec, train_store="/nonexistent", train_hash="0" * 64)


def test_submissions_are_kept_in_order_for_when_the_memory_is_there() -> None:
    room = Room()
    assert not room.room.over  # nobody has come yet: not the room's matter
    room.submit(room.one, "a", "b")
    room.submit(room.two, "c")
    assert room.room.jobs == ["a", "b", "c"]
    assert (room.answers(), room.room.over) == ([], False)
    assert room.kept() == [("one", ["a", "b"]), ("two", ["c"])]
    assert room.kept() == []
    assert room.ended == []


def test_a_stopped_job_ends_and_is_not_kept_its_neighbours_are() -> None:
    room = Room()
    room.submit(room.one, "a", "b")
    room.take(room.two, StopJobs(id=7, jobs=["a", "x"]))
    assert room.ended == [("a", "one", "stopped by two")]
    assert room.answers() == [
        ("two", Done(reply_to=7, jobs=["a"], failed={"x": "job x is not in this trainer"}))
    ]
    assert not room.room.over
    assert room.kept() == [("one", ["b"])]


def test_a_stop_without_names_is_for_ones_own_jobs() -> None:
    room = Room()
    room.submit(room.one, "a", number=4)
    room.submit(room.two, "b")
    room.take(room.one, StopJobs(id=5, jobs=[], reason="enough"))
    assert room.ended == [("a", "one", "enough")]
    # The submission with nothing left in it is answered too: its client waits for that.
    assert room.answers() == [("one", Done(reply_to=4)), ("one", Done(reply_to=5, jobs=["a"]))]
    assert room.kept() == [("two", ["b"])]


@pytest.mark.parametrize("asks_first", [True, False])
@pytest.mark.parametrize("is_open", [True, False])
def test_who_waits_for_a_trainer_that_nobody_will_open_is_refused(is_open: bool, asks_first: bool) -> None:
    room = Room(is_open=is_open)
    join = JoinTrainer(id=9, jobs=["b"], budget_mb=0, resident_mb=0)
    room.submit(room.one, "a")
    if asks_first:
        room.take(room.two, join)
    room.room.dismiss(late=True)
    assert all(isinstance(reply, Done) for _, reply in room.answers())  # its opener is there
    room.take(room.one, None)
    if not asks_first:
        room.take(room.two, join)
    room.room.dismiss(late=False)
    refused = [(who, reply.reply_to) for who, reply in room.answers() if isinstance(reply, Refused)]
    assert refused == ([] if is_open else [("two", 9)])
    assert room.room.over == (not is_open)


@pytest.mark.parametrize("late", [True, False])
def test_an_opener_that_has_not_come_is_waited_for_while_it_is_not_late(late: bool) -> None:
    room = Room(is_open=False)
    room.take(room.two, JoinTrainer(id=9, jobs=["b"], budget_mb=0, resident_mb=0))
    room.room.dismiss(late=late)
    assert [isinstance(reply, Refused) for _, reply in room.answers()] == [True] * late


def test_it_is_over_when_no_job_is_left_and_who_brought_them_has_gone() -> None:
    room = Room()
    room.submit(room.one, "a")
    room.take(room.two, StopJobs(id=1, jobs=["a"]))
    assert not room.room.over  # its client may hold back others, as after a crash
    room.submit(room.one, "b", number=2)
    assert room.room.jobs == ["b"]
    room.take(room.one, None)
    assert room.ended[1:] == [("b", "one", "its client left")]
    assert room.room.over  # although two is still there: it follows at most


def test_jobs_of_a_detached_client_stay() -> None:
    """The control of the one above."""
    room = Room()
    room.submit(room.one, "a")
    room.one.detached = True
    room.take(room.one, None)
    assert (room.ended, room.room.jobs, room.room.over) == ([], ["a"], False)


@pytest.mark.parametrize("kind", [PauseJobs, ResumeJobs])
def test_there_is_nothing_to_pause_or_resume_yet(kind: type[PauseJobs | ResumeJobs]) -> None:
    room = Room()
    room.submit(room.one, "a")
    room.take(room.two, kind(id=3, jobs=["a", "x"]))
    ((_, done),) = room.answers()
    assert (done.reply_to, done.jobs, done.busy) == (3, [], ["a"])
    assert "waits for GPU memory" in done.failed["a"]
    assert done.failed["x"] == "job x is not in this trainer"
    assert room.room.jobs == ["a"]


def test_a_shutdown_ends_everything() -> None:
    room = Room()
    room.submit(room.one, "a")
    room.take(room.two, Shutdown(id=9))
    assert room.ended == [("a", "one", "the trainer was shut down")]
    assert room.answers() == [("one", Done(reply_to=1)), ("two", Done(reply_to=9))]
    assert room.room.over


def test_the_table_says_where_jobs_that_are_not_admitted_stand() -> None:
    table = JobTable()
    table.arrive(JobStatus(job="a", state="queued"))
    table.add(JobStatus(job="b", state="running"))
    table.waits(2, "so much asked")
    listed = {status.job: (status.state, status.position, status.reason) for status in table.listed()}
    assert listed == {"a": ("queued", 2, "so much asked"), "b": ("running", 0, "")}
    table.waits(0, "")
    assert [status.position for status in table.listed()] == [0, 0]


# ------------------------------------------------------------------------------------ real processes


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    return own_ledger(tmp_path, monkeypatch)


@pytest.fixture
def full(ledger: Ledger) -> Iterator[list[str]]:
    """The device is taken but for 500 MiB; the files of the ledger that are there because of it."""
    with holder(ledger, 8000) as other:
        row = other.line()
        yield [f"row-{row}.json", f"row-{row}.life"]


@contextlib.contextmanager
def waiting(*names: str) -> Iterator[subprocess.Popen[str]]:
    """A client whose jobs wait; killed when the test fails."""
    arguments = flags(names[0], "steps=9", "--vram", "2")
    for name in names[1:]:
        arguments += flags(name, "steps=9")[-2:]
    process = start(*arguments)
    try:
        read_until(process, "waiting for GPU memory")
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def listed() -> dict[str, dict[str, object]]:
    code, out, err = gshare("jobs", "list", "--json")
    assert code == 0, err
    return {row["job"]: row for row in map(json.loads, out.splitlines())}


def left(ledger: Ledger) -> tuple[list[str], list[str]]:
    """The trainers that live, and the ledger's files."""
    return [directory.name for directory in registry.live_trainers()], files(ledger)


def nothing_is_left(ledger: Ledger, before: list[str]) -> bool:
    return left(ledger) == ([], before)


REASON = "2048 MiB asked, 500 of 8500 MiB free (8000 reserved, 0 used outside the ledger)"


def test_a_waiting_job_is_listed_with_its_place_and_the_reason(full: list[str]) -> None:
    with waiting("a"):
        row = listed()["a"]
        assert (row["state"], row["position"]) == ("queued", 1)
        assert row["reason"] == f"waiting for GPU memory, position 1: {REASON}, on GPU-aaaa-1"
        with waiting("b"):
            assert listed()["b"]["position"] == 2
        code, out, _ = gshare("jobs")
        (line,) = (line for line in out.splitlines() if line.startswith("a "))
        assert code == 0
        assert line.split()[1:2] == ["queued"]
        assert line.endswith(f"position 1: {REASON}, on GPU-aaaa-1")


def test_a_running_job_has_no_place(ledger: Ledger) -> None:
    """The control: the same command with room for it."""
    process = start(*flags("a", LONG, "--vram", "2"))
    read_until(process, "step 1 of")
    row = listed()["a"]
    assert (row["state"], row["position"], row["reason"]) == ("running", 0, "")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130


def test_stop_ends_the_waiting_client_with_130_and_leaves_nothing(ledger: Ledger, full: list[str]) -> None:
    with waiting("a") as client:
        assert len(the_device(ledger).queue) == 1
        assert gshare("jobs", "stop", "a") == (0, "", "a: stopped\n")
        out, err = client.communicate(timeout=30)
        assert client.returncode == 130, err
        assert "stopped by gshare jobs" in err
        assert "stopped" in out
        assert left(ledger) == ([], full)  # at once: the client has waited for its trainer
        assert not Path("out").exists()
        assert listed()["a"]["state"] == "stopped"
        assert list(registry.trainer_dirs()) == []


def test_a_client_keeps_its_place_for_the_jobs_that_are_not_stopped(ledger: Ledger) -> None:
    with holder(ledger, 8000) as other:
        other.line()
        with waiting("a", "b") as client:
            assert gshare("jobs", "stop", "a")[0] == 0
            assert {name: row["state"] for name, row in listed().items()} == {"a": "stopped", "b": "queued"}
            assert len(the_device(ledger).queue) == 1
            other.go_on()
            other.wait()
            _, err = client.communicate(timeout=60)
    assert client.returncode == 130, err
    assert Path("out/b/adapter_model.safetensors").read_text() == weights_after("b", 9)
    assert not Path("out/a").exists()
    assert files(ledger) == []


def test_a_waiting_job_cannot_be_paused_now(full: list[str]) -> None:
    with waiting("a"):
        code, _, err = gshare("jobs", "pause", "a")
        assert (code, "job a waits for GPU memory and can only be stopped" in err) == (75, True)
        assert listed()["a"]["state"] == "queued"


def test_a_detached_job_that_waits_is_stopped_too(ledger: Ledger, full: list[str]) -> None:
    assert gshare(*flags("a", "steps=9", "--vram", "2", "--detach"))[0] == 0
    assert listed()["a"]["position"] == 1
    assert gshare("jobs", "stop", "a")[0] == 0
    until(lambda: nothing_is_left(ledger, full))
    assert listed()["a"]["state"] == "stopped"


@pytest.mark.parametrize("how", ["stop", "kill -9"])
def test_attach_says_that_it_waits_and_ends_with_the_job(ledger: Ledger, full: list[str], how: str) -> None:
    """Who only follows keeps no place: without its client the trainer would wait for nobody."""
    with waiting("a") as client:
        following = start("jobs", "attach", "a")
        said = read_until(following, "waiting for GPU memory")
        assert f"position 1: {REASON}" in said
        if how == "stop":
            assert gshare("jobs", "stop", "a")[0] == 0
        else:
            client.kill()
        _, err = following.communicate(timeout=30)
        assert following.returncode == 130, err
        assert ("its client left" if how == "kill -9" else "stopped by gshare jobs") in err
    until(lambda: nothing_is_left(ledger, full))


def test_killed_with_its_trainer_a_waiting_job_is_gone_with_the_next_operation(
    ledger: Ledger, full: list[str]
) -> None:
    with waiting("a") as client:
        (trainer,) = registry.live_trainers()
        connection = TrainerClient(trainer, "test")
        os.kill(client.pid, signal.SIGSTOP)  # so that it does not start another trainer
        os.kill(connection.hello.pid, signal.SIGKILL)
        connection.close()
        client.kill()
        client.communicate()
    until(lambda: not registry.live_trainers())
    assert len(files(ledger)) > len(full)  # the control: its ticket is still there, dead
    ledger.look()
    assert files(ledger) == full
    assert listed() == {}
    assert list(registry.trainer_dirs()) == []
