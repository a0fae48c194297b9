"""Early exit and `pause_at` in the real engine: functions of the job alone; files whole, memory freed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from gshare.agent.base.weights import Base
from gshare.agent.jobs.early_exit import EarlyExit
from gshare.agent.jobs.events import Evaluated, Event, JobChanged, Stepped
from gshare.agent.jobs.spec import JobRequest
from gshare.agent.train.checkpoint import load_checkpoint
from gshare.agent.train.runner import Runner
from toy import make_runner, request, tiny_base

#: Random tokens are learnt by heart: training loss falls, validation loss rises, within a few steps.
EAGER = EarlyExit(divergence=False, gap_threshold=0.0)
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Path) -> Base:
    return tiny_base(tiny_checkpoint)


def _job(
    directory: Path, name: str = "a", *, early: EarlyExit | None = None, pause_at: int = 0, **spec: Any
) -> JobRequest:
    spec = {"max_steps": 20, "learning_rate": 2e-2, "eval_steps": 1, "save_steps": 3, **spec}
    made = request(directory, name, data_seed=1, **spec)
    return msgspec.structs.replace(made, early_exit=early, pause_at=pause_at)


def _run(runner: Runner) -> None:
    while runner.run_round():
        pass


def _last(events: list[Event], job: str = "a") -> JobChanged:
    return [event for event in events if isinstance(event, JobChanged) and event.job == job][-1]


def _together(checkpoint: Path, base: Base, jobs: list[JobRequest]) -> tuple[Runner, list[Event]]:
    events: list[Event] = []
    runner = make_runner(checkpoint, base, events.append)
    for job in jobs:
        runner.admit(job)
    _run(runner)
    runner.close()
    return runner, events


def test_a_job_that_overfits_is_stopped_with_its_best_and_its_last_weights(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    _, events = _together(tiny_checkpoint, base, [_job(tmp_path, early=EAGER)])
    end = _last(events)
    assert end.state == "stopped"
    assert end.exit is not None
    assert (end.exit.pattern, end.exit.step) == ("overfitting", end.step)
    assert end.step < 20
    assert end.reason.startswith(f"overfitting at step {end.step}: validation loss ")
    vals = [event for event in events if isinstance(event, Evaluated)]
    assert end.exit.evidence["val_loss"] == vals[-1].val_loss
    # What stands is what a plain run of so many steps leaves, and the best of its evaluations.
    plain = _job(tmp_path / "plain", max_steps=end.step)
    _together(tiny_checkpoint, base, [plain])
    for file in (WEIGHTS, f"best/{WEIGHTS}"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "plain" / "a" / file).read_bytes(), file
    # The control: at another step the weights are others.
    _together(tiny_checkpoint, base, [_job(tmp_path / "other", max_steps=end.step + 1)])
    assert (tmp_path / "a" / WEIGHTS).read_bytes() != (tmp_path / "other" / "a" / WEIGHTS).read_bytes()


def test_without_early_exit_or_with_a_wide_gap_it_goes_on(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    for number, early in enumerate((None, EarlyExit(divergence=False, gap_threshold=1e6))):
        _, events = _together(tiny_checkpoint, base, [_job(tmp_path / str(number), early=early)])
        assert _last(events).state == "completed"


def test_a_neighbour_changes_neither_the_step_of_an_exit_nor_its_bytes(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    _, alone = _together(tiny_checkpoint, base, [_job(tmp_path / "alone", early=EAGER)])
    beside = _job(tmp_path / "both", "b", learning_rate=1e-3, r=8)
    _, both = _together(tiny_checkpoint, base, [beside, _job(tmp_path / "both", early=EAGER)])
    assert _last(both) == _last(alone)
    assert _last(both, "b").state == "completed"
    for file in (WEIGHTS, f"best/{WEIGHTS}", "metrics.jsonl"):
        one, other = (tmp_path / where / "a" / file for where in ("alone", "both"))
        if file != "metrics.jsonl":  # it tells who shared a pass
            assert one.read_bytes() == other.read_bytes(), file


@pytest.mark.parametrize("kept_steps", [1, 2, 3])
def test_a_job_resumed_from_a_checkpoint_exits_at_the_same_step(
    tiny_checkpoint: Path, base: Base, tmp_path: Path, kept_steps: int
) -> None:
    """Its counters and its smoothed loss are in the checkpoint. The control leaves them out."""
    _, whole = _together(tiny_checkpoint, base, [_job(tmp_path / "whole", early=EAGER, save_steps=1)])
    events: list[Event] = []
    runner = make_runner(tiny_checkpoint, base, events.append)
    job = _job(tmp_path / "cut", early=EAGER, save_steps=1)
    runner.admit(job)
    for _ in range(kept_steps):
        runner.run_round()
    runner.close()
    state = load_checkpoint(tmp_path / "cut" / "a" / f"checkpoint-{kept_steps}").state
    assert state["early_exit"]["train"] is not None
    _, rest = _together(tiny_checkpoint, base, [msgspec.structs.replace(job, resume=True)])
    assert _last(rest) == _last(whole)
    assert (tmp_path / "cut" / "a" / WEIGHTS).read_bytes() == (
        tmp_path / "whole" / "a" / WEIGHTS
    ).read_bytes()


def test_a_job_stopped_by_its_losses_stops_there_again_when_resumed(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    job = _job(tmp_path, early=EAGER)
    _, first = _together(tiny_checkpoint, base, [job])
    before = (tmp_path / "a" / WEIGHTS).read_bytes()
    _, again = _together(tiny_checkpoint, base, [msgspec.structs.replace(job, resume=True)])
    assert _last(again) == _last(first)
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == before


def _pause_and_resume(
    checkpoint: Path, base: Base, directory: Path, *, pause_at: int
) -> tuple[Runner, list[Event]]:
    events: list[Event] = []
    runner = make_runner(checkpoint, base, events.append)
    runner.admit(_job(directory, pause_at=pause_at, max_steps=8, eval_steps=3))
    _run(runner)
    return runner, events


def test_a_job_pauses_exactly_there_evaluated_and_saved_and_its_memory_is_given_back(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    runner, events = _pause_and_resume(tiny_checkpoint, base, tmp_path, pause_at=4)
    paused = _last(events)
    assert (paused.state, paused.step) == ("paused", 4)
    assert [event.step for event in events if isinstance(event, Evaluated)] == [3, 4]
    assert (tmp_path / "a" / "checkpoint-4").is_dir()
    # The next one gets its place: the arena does not grow.
    size = runner.engine.arena.nbytes()
    runner.admit(_job(tmp_path, "b", max_steps=8))
    assert runner.engine.arena.nbytes() == size
    # The control: a pause by hand keeps it.
    runner.pause("b")
    runner.admit(_job(tmp_path, "c", max_steps=8))
    assert runner.engine.arena.nbytes() > size
    runner.close()


def test_resumed_after_its_pause_it_has_the_bytes_of_a_plain_run(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    runner, events = _pause_and_resume(tiny_checkpoint, base, tmp_path / "paused", pause_at=4)
    runner.resume("a")
    _run(runner)
    runner.close()
    assert _last(events).state == "completed"
    plain = _job(tmp_path / "plain", max_steps=8, eval_steps=3)
    _, straight = _together(tiny_checkpoint, base, [plain])
    for file in (WEIGHTS, f"checkpoint-8/{WEIGHTS}", "checkpoint-8/optimizer.safetensors"):
        one, other = (tmp_path / where / "a" / file for where in ("paused", "plain"))
        assert one.read_bytes() == other.read_bytes(), file
    losses = [[event.loss for event in log if isinstance(event, Stepped)] for log in (events, straight)]
    assert losses[0] == losses[1]


def test_resumed_to_a_later_pause_it_pauses_there_too_and_has_the_bytes_of_a_plain_run(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    runner, events = _pause_and_resume(tiny_checkpoint, base, tmp_path / "paused", pause_at=4)
    runner.resume("a", 7)
    _run(runner)
    assert (_last(events).state, _last(events).step) == ("paused", 7)
    assert [event.step for event in events if isinstance(event, Evaluated)] == [3, 4, 6, 7]
    runner.resume("a", 0)
    _run(runner)
    runner.close()
    _together(tiny_checkpoint, base, [_job(tmp_path / "plain", max_steps=8, eval_steps=3)])
    one, other = (tmp_path / where / "a" / WEIGHTS for where in ("paused", "plain"))
    assert one.read_bytes() == other.read_bytes()


def test_killed_at_its_pause_it_pauses_there_again_without_a_step(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    runner, events = _pause_and_resume(tiny_checkpoint, base, tmp_path, pause_at=4)
    runner.close()
    job = _job(tmp_path, pause_at=4, max_steps=8, eval_steps=3)
    _, again = _together(tiny_checkpoint, base, [msgspec.structs.replace(job, resume=True)])
    assert (_last(again).state, _last(again).step) == ("paused", 4)
    assert not [event for event in again if isinstance(event, Stepped)]
    resumed = next(event for event in again if isinstance(event, JobChanged))
    assert resumed.last is not None
    assert resumed.last.val_loss == [e.val_loss for e in events if isinstance(e, Evaluated)][-1]
    # Submitted with no pause it goes on, as a survivor does on a new trainer.
    _, rest = _together(tiny_checkpoint, base, [msgspec.structs.replace(job, resume=True, pause_at=0)])
    assert _last(rest).state == "completed"


def test_a_parked_job_can_be_stopped_and_fails_alone_when_its_checkpoint_is_gone(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    events: list[Event] = []
    runner = make_runner(tiny_checkpoint, base, events.append)
    for name in "abc":
        runner.admit(_job(tmp_path, name, pause_at=2, max_steps=4))
    _run(runner)
    runner.stop("a", "not among the best")
    assert _last(events, "a").state == "stopped"
    (tmp_path / "b" / "checkpoint-2" / "state.json").unlink()
    for name in "bc":
        runner.resume(name)
    _run(runner)
    runner.close()
    assert _last(events, "b").state == "failed"
    assert "checkpoint-2" in _last(events, "b").reason
    assert _last(events, "c").state == "completed"
