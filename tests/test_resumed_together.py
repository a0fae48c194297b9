"""Parked jobs resumed together: the bits of those resumed alone, and each one's damage its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gshare.agent.base.weights import Base
from gshare.agent.errors import UsageError
from gshare.agent.jobs.events import Event, JobChanged
from gshare.agent.service.desk import Desk
from gshare.agent.service.protocol import Done, JobStatus, PauseJobs, ResumeJobs, StopJobs
from gshare.agent.service.registry import TrainerConfig
from gshare.agent.service.server import Command, Connection
from gshare.agent.service.table import JobTable
from gshare.agent.train import checkpoint_writer, read_ahead
from gshare.agent.train.checkpoint import Snapshot, load_checkpoint, write_checkpoint
from gshare.agent.train.read_ahead import AHEAD
from gshare.agent.train.runner import Runner
from toy import make_runner, request, tiny_base

#: More than are read at once.
NAMES = "abcdef"
assert len(NAMES) > AHEAD
#: For what comes at once unless the guarantee is broken.
PATIENCE = 30.0


class Told(list[JobChanged]):
    def __call__(self, event: Event) -> None:
        if isinstance(event, JobChanged):
            self.append(event)

    def last(self) -> dict[str, str]:
        return {event.job: event.state for event in self}


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Path) -> Base:
    return tiny_base(tiny_checkpoint)


def parked(checkpoint: Path, base: Base, folder: Path, told: Told, **more: Any) -> Runner:
    """A runner whose jobs stand at step 2 of 4, their checkpoints written."""
    runner = make_runner(checkpoint, base, told)
    for seed, name in enumerate(NAMES):
        job = request(folder, name, data_seed=seed, seed=seed, **more)
        runner.admit(msgspec.structs.replace(job, pause_at=2))
    while runner.run_round():
        pass
    assert all(job.parked and job.settling is None for job in runner.jobs())
    return runner


def damage(path: Path) -> None:
    weights = path / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def finish(runner: Runner) -> None:
    while runner.run_round():
        pass
    runner.close()


def adapters(folder: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in folder.glob("*/adapter_model.safetensors")}


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]])
def test_jobs_that_come_back_together_have_the_bits_of_those_that_come_back_alone(
    tiny_checkpoint: Path, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """One of them has a damaged checkpoint, and fails as it does alone."""
    here = threading.current_thread()
    read: dict[str, list[bool]] = {}  # by job: whether another thread did

    def load(path: Path) -> Snapshot:
        read.setdefault(path.parent.name, []).append(threading.current_thread() is not here)
        return load_checkpoint(path)

    monkeypatch.setattr(read_ahead, "load_checkpoint", load)
    failures = []
    for together in (False, True):
        folder, told = tmp_path / str(together), Told()
        runner = parked(tiny_checkpoint, base, folder, told)
        damage(folder / "c" / "checkpoint-2")
        read.clear()
        if together:
            with runner.about_to_resume(list(NAMES)):
                for name in order:
                    runner.resume(name)
            ahead = NAMES if order == NAMES else NAMES[:AHEAD]  # the last ones are wanted before their turn
            assert all(read[name] == [True] for name in ahead)
        else:
            for name in order:
                runner.resume(name)
            assert read == {name: [False] for name in NAMES}
        finish(runner)
        assert told.last() == {name: "failed" if name == "c" else "completed" for name in NAMES}
        failures += [event.reason.replace(str(folder), "") for event in told if event.state == "failed"]
    assert len(failures) == 2
    assert failures[0] == failures[1]
    assert "/c/checkpoint-2/adapter_model.safetensors: its bytes are not those" in failures[0]
    alone, found = adapters(tmp_path / "False"), adapters(tmp_path / "True")
    assert found == alone
    assert sorted(found) == sorted(set(NAMES) - {"c"})
    assert len(set(found.values())) == len(found), "the control: no two have the same bits"


def test_jobs_that_are_unknown_run_or_have_ended_do_no_harm_in_the_list(
    tiny_checkpoint: Path, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    runner = parked(tiny_checkpoint, base, tmp_path, told)
    runner.stop("a", "")  # parked, and has ended
    runner.resume("b")
    runner.run_round()
    runner.pause("b")  # paused with its adapter
    runner.resume("c")  # runs
    read: list[Path] = []
    monkeypatch.setattr(
        read_ahead, "load_checkpoint", lambda path: read.append(path) or load_checkpoint(path)
    )
    with runner.about_to_resume(["nobody", *NAMES, "d"]):
        with pytest.raises(UsageError, match="no job named 'nobody'"):
            runner.resume("nobody")
        with pytest.raises(UsageError, match="has ended as stopped"):
            runner.resume("a")
        for name in ("c", "b", "e", "d", "d"):  # f stays where it is
            runner.resume(name)
    # f's turn may not have come before the end of the block.
    assert {"d", "e"} <= {path.parent.name for path in read} <= {"d", "e", "f"}
    with runner.about_to_resume([]):
        runner.run_round()
    finish(runner)
    ends = dict.fromkeys("bcde", "completed")
    assert told.last() == {"a": "stopped", "f": "paused", **ends}
    assert adapters(tmp_path).keys() == ends.keys()


def test_one_whose_checkpoint_is_being_written_is_not_read_before_it_stands(
    tiny_checkpoint: Path, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pauses, and comes back before that has been said."""
    stands = threading.Event()

    def write(*arguments: Any) -> Path:
        assert stands.wait(PATIENCE)
        return write_checkpoint(*arguments)

    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", write)
    told = Told()
    runner = make_runner(tiny_checkpoint, base, told)
    for name in ("a", "bb"):
        runner.admit(msgspec.structs.replace(request(tmp_path, name, eval_steps=0), pause_at=2))
    while not all(job.parked for job in runner.jobs()):
        runner.run_round()
    assert all(job.settling is not None for job in runner.jobs())
    with runner.about_to_resume(["a", "bb"]):
        stands.set()
        for name in ("a", "bb"):
            runner.resume(name)
    finish(runner)
    assert told.last() == {"a": "completed", "bb": "completed"}


def test_an_error_in_the_block_leaves_a_runner_that_resumes(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    told = Told()
    runner = parked(tiny_checkpoint, base, tmp_path, told)

    def resume_one() -> None:
        with runner.about_to_resume(NAMES):
            runner.resume("a")
            raise KeyError("a fault of whoever asked")

    with pytest.raises(KeyError, match="whoever asked"):
        resume_one()
    for name in NAMES[1:]:
        runner.resume(name)
    finish(runner)
    assert set(told.last().values()) == {"completed"}


# ---------------------------------------------------------------------- the desk


class StandIn:
    """A runner that writes down what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    @contextmanager
    def about_to_resume(self, jobs: Sequence[str]) -> Iterator[None]:
        self.asked.append(("about to resume", *jobs))
        yield
        self.asked.append(("resumed",))

    def pause(self, job: str) -> None:
        self.asked.append(("pause", job))

    def stop(self, job: str, reason: str) -> None:
        self.asked.append(("stop", job))

    def resume(self, job: str, pause_at: int | None = None) -> None:
        self.asked.append(("resume", job, pause_at))


def desk_with(directory: Path, jobs: str) -> tuple[Desk, StandIn, list[Any]]:
    table, runner, replies = JobTable(), StandIn(), []
    for job in jobs:
        table.add(JobStatus(job=job, state="paused"))
    desk = Desk(
        directory,
        TrainerConfig(model="m", model_dir="/m", base_dtype="fp32"),
        table,
        reply=lambda connection, reply: replies.append(reply),
        on_event=lambda event: None,
        warn=pytest.fail,
        last_seq=lambda: 0,
    )
    desk.runner = runner  # type: ignore[assignment]
    return desk, runner, replies


def test_the_desk_says_which_jobs_it_resumes_before_it_applies_the_first_command(tmp_path: Path) -> None:
    desk, runner, replies = desk_with(tmp_path, "abcd")
    client, other = Connection(1, "one"), Connection(2, "other")
    desk.apply_all(
        [
            Command(client, PauseJobs(id=1, jobs=["d"])),
            Command(client, ResumeJobs(id=2, jobs=["b", "nobody", "a"])),
            Command(other, None),  # has left
            Command(client, StopJobs(id=3, jobs=["d"])),
            Command(client, ResumeJobs(id=4, jobs=["c"], pause_at=5)),
        ]
    )
    assert runner.asked == [
        ("about to resume", "b", "nobody", "a", "c"),
        ("pause", "d"),
        *(("resume", "b", None), ("resume", "a", None)),
        ("stop", "d"),
        ("resume", "c", 5),
        ("resumed",),
    ]
    assert [(reply.reply_to, reply.jobs) for reply in replies if isinstance(reply, Done)] == [
        *((1, ["d"]), (2, ["b", "a"]), (3, ["d"]), (4, ["c"]))
    ]
    assert list(replies[1].failed) == ["nobody"]


def test_the_desk_resumes_none_where_none_is_to_be_resumed(tmp_path: Path) -> None:
    desk, runner, _ = desk_with(tmp_path, "a")
    desk.apply_all([Command(Connection(1, "one"), PauseJobs(id=1, jobs=["a"]))])
    assert runner.asked == [("about to resume",), ("pause", "a"), ("resumed",)]
