"""A save that fails while others are under way: nobody else notices, and the name is free once it is."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import pytest
from gshare.agent.base.weights import Base
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.events import Event, JobChanged, Stepped
from gshare.agent.train import checkpoint_writer
from toy import make_runner, request, tiny_base


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Path) -> Base:
    return tiny_base(tiny_checkpoint)


def test_one_diverges_in_the_evaluation_of_another_whose_save_has_failed(
    tiny_checkpoint: Path, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    real, failed = checkpoint_writer.write_checkpoint, threading.Event()

    def write(snapshot: Any, *rest: Any) -> Path:
        if snapshot.job == "b":
            assert failed.wait(30)
            raise GshareError("disk full")
        return real(snapshot, *rest)

    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", write)
    runner = make_runner(tiny_checkpoint, base, events.append)
    for name in "abc":
        runner.admit(request(tmp_path, name, max_steps=6, eval_steps=3))
    evaluate = runner.rounds.evaluate

    def nan_of_a(work: Any) -> list[float]:
        losses = evaluate(work)
        failed.set()
        pairs = zip(work, losses, strict=True)
        return [float("nan") if one[0].name.startswith("a") else loss for one, loss in pairs]

    monkeypatch.setattr(runner.rounds, "evaluate", nan_of_a)
    while runner.run_round():
        pass
    states = [runner.books.jobs[name].state for name in "abc"]
    assert states == ["diverged", "failed", "completed"]
    ended = [isinstance(e, JobChanged) and (e.job, e.state) == ("b", "failed") for e in events].index(True)
    assert [event for event in events[ended + 1 :] if event.job == "b"] == []


def test_a_best_that_could_not_be_written_is_written_by_the_resume(
    tiny_checkpoint: Path, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of its step, queued behind it, would say that it stands."""
    plan = {"max_steps": 6, "eval_steps": 1, "save_steps": 1}

    def train(folder: Path, **more: Any) -> tuple[str, int]:
        runner = make_runner(tiny_checkpoint, base, lambda event: None)
        job = request(folder, "a", **plan)
        runner.admit(msgspec.structs.replace(job, **more))
        while runner.run_round():
            pass
        (ended,) = runner.jobs()
        runner.close()
        return ended.state, ended.best_step or 0

    state, best = train(tmp_path / "alone")
    assert (state, best > 0) == ("completed", True)
    real, failures = checkpoint_writer.write_best, [1]

    def write(snapshot: Any, *rest: Any) -> Path:
        if snapshot.step == best and failures:
            failures.pop()
            raise GshareError("disk full")
        return real(snapshot, *rest)

    monkeypatch.setattr(checkpoint_writer, "write_best", write)
    assert train(tmp_path / "cut")[0] == "failed"
    assert train(tmp_path / "cut", resume=True) == ("completed", best)
    outputs = [Path(request(tmp_path / name, "a", **plan).spec.output_dir) for name in ("alone", "cut")]
    for name in ("best/adapter_model.safetensors", "best/metadata.json", "adapter_model.safetensors"):
        assert (outputs[0] / name).read_bytes() == (outputs[1] / name).read_bytes(), name


def test_a_job_whose_save_failed_ends_when_nothing_writes_for_it(
    tiny_checkpoint: Path, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = threading.Event(), threading.Event()
    real = checkpoint_writer.write_checkpoint

    def write(snapshot: Any, *rest: Any) -> Path:
        if snapshot.step > 2 or second.is_set():
            return real(snapshot, *rest)
        assert (first if snapshot.step == 1 else second).wait(30)
        raise GshareError("disk full")

    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", write)
    runner = make_runner(tiny_checkpoint, base)
    job = request(tmp_path, "b", max_steps=6, save_steps=1, eval_steps=0)
    runner.admit(job)
    runner.run_round()
    runner.run_round()
    first.set()
    while not runner.books.writer._results.qsize():
        pass
    runner.books.collect_saves()
    assert (runner.books.jobs["b"].state, runner.books.jobs["b"].is_active) == ("running", False)
    second.set()
    with pytest.raises(UsageError):
        runner.pause("nobody")
    runner.pause("b")
    assert runner.books.jobs["b"].state == "failed"
    runner.admit(job)
    while runner.run_round():
        pass
    assert runner.books.jobs["b"].state == "completed"


def is_told(event: Event) -> TypeGuard[Stepped | JobChanged]:
    return isinstance(event, (Stepped, JobChanged))


def test_the_others_train_on_while_the_last_files_of_one_are_written(
    tiny_checkpoint: Path, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is `completed` once they stand, and not before."""
    events: list[Event] = []
    real, gate = checkpoint_writer.write_final, threading.Event()

    def write(snapshot: Any, *rest: Any) -> Path:
        assert snapshot.job != "a" or gate.wait(30)
        return real(snapshot, *rest)

    monkeypatch.setattr(checkpoint_writer, "write_final", write)
    runner = make_runner(tiny_checkpoint, base, events.append)
    runner.books.writer.close()
    runner.books.writer = checkpoint_writer.CheckpointWriter(threads=2)
    for name, steps in (("a", 2), ("b", 6)):
        runner.admit(request(tmp_path, name, max_steps=steps, eval_steps=0, save_steps=0))
    for _ in range(5):
        runner.run_round()
    a, b = (runner.books.jobs[name] for name in "ab")
    assert (a.state, a.is_active, a.step) == ("running", False, 2)
    assert b.step >= 4
    gate.set()
    while runner.run_round():
        pass
    assert (a.state, b.state) == ("completed", "completed")
    told = [(e.job, e.state if isinstance(e, JobChanged) else e.step) for e in events if is_told(e)]
    assert told.index(("b", 4)) < told.index(("a", "completed"))
    runner.close()
