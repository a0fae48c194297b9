"""The order in which rounds are begun, read and followed up, when the next is queued before the last is read.

On the CPU, with an engine that makes its updates when a round is finished, as the CUDA engine does. What the
CUDA engine makes of it is in test_queueing_ahead.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_runs import Bench, run
from gshare.agent.base.weights import Base
from gshare.agent.jobs.events import JobChanged, Stepped
from gshare.agent.train import job as job_module
from gshare.agent.train import pipeline
from gshare.agent.train.engine import Verdict
from gshare.agent.train.runner import Runner
from run_files import run_files
from toy import request, tiny_base


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Path) -> Base:
    return tiny_base(tiny_checkpoint)


@pytest.fixture
def bench(tiny_checkpoint: Path, base: Base, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tiny_checkpoint, base, monkeypatch)


def by_job(told: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """What was said of each, in order."""
    return {job: [one for one in told if one.get("job") == job] for job in {one.get("job") for one in told}}


PLAIN: dict[str, Any] = {"eval_steps": 0, "save_steps": 0}


def test_the_next_round_is_begun_before_the_last_is_read(bench: Bench, tmp_path: Path) -> None:
    """The first is read by itself (its memory is recorded), the last has nothing behind it."""
    runner = bench.runner()
    runner.admit(request(tmp_path, "a", max_steps=4, val_fraction=0.0, **PLAIN))
    bench.log.clear()
    run(runner)
    assert bench.log == [
        *("begin a1", "read a1", "step a1"),
        *("begin a2", "begin a3", "read a2", "step a2"),
        *("begin a4", "read a3", "step a3"),
        *("read a4", "step a4", "completed a4"),
    ]


def test_an_engine_that_does_not_queue_reads_every_round_at_once(bench: Bench, tmp_path: Path) -> None:
    runner = bench.runner(ahead=False)
    runner.admit(request(tmp_path, "a", max_steps=3, val_fraction=0.0, **PLAIN))
    bench.log.clear()
    run(runner)
    assert bench.log[:-1] == [f"{what} a{step}" for step in (1, 2, 3) for what in ("begin", "read", "step")]


@pytest.mark.parametrize(
    ("cadence", "alone"),
    [
        ({"eval_steps": 3, "save_steps": 0}, {1, 3, 6, 7}),
        ({"eval_steps": 0, "save_steps": 2}, {1, 2, 4, 6, 7}),
        ({"eval_steps": 3, "save_steps": 0, "val_fraction": 0.0}, {1, 7}),
    ],
    ids=["evaluation", "checkpoint", "nothing to evaluate"],
)
def test_nothing_is_begun_behind_a_step_that_the_host_looks_at(
    bench: Bench, tmp_path: Path, cadence: dict[str, Any], alone: set[int]
) -> None:
    """Of `bb` the same steps: what one job needs holds the round up for all."""
    runner = bench.runner()
    runner.admit(request(tmp_path, "a", **{"max_steps": 7, **cadence}))
    runner.admit(request(tmp_path, "bb", max_steps=7, **PLAIN))
    bench.log.clear()
    run(runner)
    for step in range(1, 8):
        read = bench.log.index(f"read a{step} bb{step}")
        begun = [line for line in bench.log[:read] if line.startswith("begin")]
        assert len(begun) == (step if step in alone else step + 1), step
    assert not any(line.endswith("a8") for line in bench.log)


@pytest.mark.parametrize("schedule", ["synchronized", "round_robin", "priority_val_loss", "fair"])
def test_files_and_events_are_those_of_a_run_that_waits(bench: Bench, tmp_path: Path, schedule: str) -> None:
    told, written, begun_early = [], [], []
    for ahead in (False, True):
        runner = bench.runner(ahead=ahead, schedule=schedule, max_tokens=60, max_adapters=2)
        for index, name in enumerate(("a", "bb", "ccc")):
            optim = "adamw_8bit" if index == 1 else "adamw"
            options: dict[str, Any] = {"optim": optim, "weight": 1.0 + index, "max_steps": 7 + index}
            runner.admit(
                request(tmp_path / str(ahead), name, eval_steps=4, save_steps=5, lora_dropout=0.1, **options)
            )
        run(runner)
        told.append(bench.told())
        written.append(run_files(tmp_path / str(ahead)))
        kinds = [line.split()[0] for line in bench.log if line.split()[0] in ("begin", "read")]
        begun_early.append(sum(a == b == "begin" for a, b in pairwise(kinds)))
    # Of each job in order: an end is said once its files stand, so between two jobs the disk has its say.
    assert by_job(told[0]) == by_job(told[1])
    assert written[0] == written[1]
    assert len(written[0]) > 20
    assert begun_early[0] == 0
    assert (begun_early[1] > 0) == (schedule != "priority_val_loss")


@pytest.mark.parametrize("command", ["stop", "pause", "admit", "close"])
def test_a_command_waits_for_the_round_in_flight(bench: Bench, tmp_path: Path, command: str) -> None:
    """Its steps are told, and what a stop saves are the weights of the step that it names."""
    runner = bench.runner()
    plain = request(tmp_path / "plain", "a", max_steps=4, **PLAIN)
    runner.admit(plain)
    run(runner)
    expected = run_files(tmp_path / "plain")["a/checkpoint-4/adapter_model.safetensors"]
    runner = bench.runner()
    runner.admit(request(tmp_path, "a", max_steps=9, **PLAIN))
    runner.admit(request(tmp_path, "bb", max_steps=9, **PLAIN))
    for _ in range(3):
        runner.run_round()
    a = runner.jobs()[0]
    assert (a.step, a.begun) == (3, 4)
    if command == "stop":
        runner.stop("a", "test")
        runner.books.writer.flush()
        assert run_files(tmp_path)["a/checkpoint-4/adapter_model.safetensors"] == expected
        assert bench.log[-1] == "stopped a4"
    elif command == "pause":
        runner.pause("a")
        assert bench.log[-1] == "paused a4"
    elif command == "admit":
        runner.admit(request(tmp_path, "c", max_steps=2, **PLAIN))
    else:
        runner.close()
    assert (a.step, a.begun) == (4, 4)
    assert bench.crumbs[-1] == []
    assert [line for line in bench.log if line.startswith("step a")] == [f"step a{n}" for n in (1, 2, 3, 4)]


def test_a_stop_of_a_job_that_ends_in_the_round_in_flight(bench: Bench, tmp_path: Path) -> None:
    runner = bench.runner()
    runner.admit(request(tmp_path, "a", max_steps=3, **PLAIN))
    for _ in range(2):
        runner.run_round()
    runner.stop("a", "test")
    assert runner.jobs()[0].state == "completed"
    assert bench.log[-1] == "completed a3"


def test_the_crumb_names_each_job_in_flight_once_at_its_later_step(bench: Bench, tmp_path: Path) -> None:
    runner = bench.runner(schedule="round_robin", max_adapters=2)
    for name in ("a", "bb", "ccc"):
        runner.admit(request(tmp_path, name, max_steps=3, val_fraction=0.0, **PLAIN))
    bench.crumbs.clear()
    seen: list[list[list[tuple[str, int]]]] = []
    for _ in range(4):
        runner.run_round()
        seen.append([*bench.crumbs])
        bench.crumbs.clear()
    assert seen[0] == [[("a", 0), ("bb", 0)], []]
    assert seen[1] == [
        [("ccc", 0), ("a", 1)],
        [("ccc", 1), ("a", 1), ("bb", 1)],
        [("bb", 1), ("ccc", 1)],
    ]
    runner.close()


def test_seconds_are_the_time_since_the_round_before_was_there(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So they add up to the time that passed, though rounds overlap."""
    runner = bench.runner()
    runner.admit(request(tmp_path, "a", max_steps=5, val_fraction=0.0, **PLAIN))
    ticks = iter(range(1, 100))
    monkeypatch.setattr(pipeline.time, "monotonic", lambda: float(next(ticks)))
    run(runner)
    # Begun and read at: 1, 2 | 3 and (4 begun), 5 | 6 begun, 7 | 8 begun, 9 | 10.
    assert [event.seconds for event in bench.events if isinstance(event, Stepped)] == [1, 2, 2, 2, 1]


# ------------------------------------------------------------------ what goes wrong meanwhile


def test_a_diverged_job_s_round_in_flight_is_dropped(bench: Bench, tmp_path: Path) -> None:
    """Told once, at its step; the others' bits are those of a run that waits."""
    written, ends = [], []
    for ahead in (False, True):
        runner = bench.runner(ahead=ahead)
        runner.admit(request(tmp_path / str(ahead), "a", max_steps=6, **PLAIN))
        wild = {"learning_rate": 1e30, "warmup_ratio": 0.3, "lr_scheduler_type": "linear"}
        runner.admit(request(tmp_path / str(ahead), "bb", max_steps=6, **wild, **PLAIN))
        run(runner)
        ends.append([line for line in bench.log if line.startswith(("step bb", "diverged"))])
        written.append(run_files(tmp_path / str(ahead)))
        early = [line for line in bench.log if line.startswith("begin") and "bb" in line]
        assert len(early) == len(ends[-1]) - 1 + ahead
    assert ends[0] == ends[1]
    assert ends[0][-1].startswith("diverged bb")
    (waiting, queued) = written
    lines, behind = (found.pop("a/metrics.jsonl") for found in (waiting, queued))
    assert waiting == queued
    assert isinstance(lines, list)
    assert isinstance(behind, list)
    last = int(ends[0][-1].removeprefix("diverged bb"))
    for mine, theirs in zip(behind, lines, strict=True):
        # The round that was in flight was shared with it: what a pass held is told as it was.
        shared = mine["type"] == "step" and mine["step"] == last + 1
        assert mine == ({**theirs, "adapters_in_pass": 2} if shared else theirs)


def test_all_diverge_and_the_round_in_flight_ends_with_them(bench: Bench, tmp_path: Path) -> None:
    runner = bench.runner()
    runner.admit(request(tmp_path, "a", max_steps=9, **PLAIN))
    runner.run_round()
    tensor = runner.engine.arena.flat("params", runner.jobs()[0].adapter.name)
    tensor[3] = torch.nan
    run(runner)
    assert bench.log[-6:] == ["begin a2", "begin a3", "read a2", "step a2", "diverged a2", "read a3"]
    assert bench.crumbs[-1] == []


def test_rows_that_cannot_be_read_end_their_job_after_the_step_in_flight(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = job_module.JobData.micro_batches

    def damaged(data: job_module.JobData, step: int) -> Any:
        if "bad" in str(data.train.path) and step == 3:
            raise OSError(5, "Input/output error")
        return honest(data, step)

    monkeypatch.setattr(job_module.JobData, "micro_batches", damaged)
    runner = bench.runner()
    runner.admit(request(tmp_path, "good", max_steps=5, **PLAIN))
    runner.admit(request(tmp_path, "bad", max_steps=5, **PLAIN))
    run(runner)
    log = [line for line in bench.log if line.startswith(("step", "failed", "completed", "begin"))]
    at = log.index("failed bad3")
    assert log[at - 2 : at + 2] == ["step good3", "step bad3", "failed bad3", "begin good4"]
    assert bench.log[-1] == "completed good5"


def fail_once(runner: Runner, at: int, error: Callable[[], Exception], name: str = "") -> list[str]:
    """The `at`-th pass fails, and those after it while they hold as many tokens or `name`'s adapter."""
    passes: list[str] = []

    def before_pass(parts: Sequence[Any]) -> None:
        passes.append(" ".join(f"{part.adapter.name.split('#')[0]}{part.step + 1}" for part in parts))
        held = any(part.adapter.name.startswith(f"{name}#") for part in parts) if name else len(parts) > 1
        if len(passes) >= at and held:
            raise error()

    runner.engine.before_pass = before_pass
    return passes


def no_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory")


def test_out_of_memory_while_queueing_ends_the_step_in_flight_first(bench: Bench, tmp_path: Path) -> None:
    """Then the round is tried again with less, and the bits are those of a run that never failed."""
    written = []
    for fails in (False, True):
        runner = bench.runner()
        for name in ("a", "bb"):
            runner.admit(request(tmp_path / str(fails), name, max_steps=5, val_fraction=0.0, **PLAIN))
        passes = fail_once(runner, 3, no_memory) if fails else []
        bench.log.clear()
        run(runner)
        written.append(run_files(tmp_path / str(fails)))
        if fails:
            steps = bench.log
            assert steps.index("begin a3 bb3") < steps.index("read a2 bb2") < steps.index("step bb2")
            retry = steps.index("begin a3 bb3", steps.index("begin a3 bb3") + 1)
            assert steps.index("step bb2") < steps.index("read a3 bb3") < retry < steps.index("step a3")
            assert not any(line.startswith("begin a4") for line in steps[:retry])
            assert passes[:4] == ["a1 bb1", "a2 bb2", "a3 bb3", "a3 bb3"]
            assert passes[-2:] == ["a5", "bb5"]
            said = [event for event in bench.events if "out of memory" in getattr(event, "text", "")]
            assert len(said) == 1
    for found in written:
        for name in ("a", "bb"):
            lines = found[f"{name}/metrics.jsonl"]
            assert isinstance(lines, list)
            found[f"{name}/metrics.jsonl"] = [{**line, "adapters_in_pass": 0} for line in lines]
    assert written[0] == written[1]


@pytest.mark.parametrize("error", [no_memory, lambda: ValueError("unforeseen")], ids=["memory", "other"])
def test_an_adapter_that_cannot_be_queued_ends_alone_after_its_last_step(
    bench: Bench, tmp_path: Path, error: Callable[[], Exception]
) -> None:
    runner = bench.runner()
    for name in ("a", "bb"):
        runner.admit(request(tmp_path, name, max_steps=5, val_fraction=0.0, **PLAIN))
    fail_once(runner, 3, error, "bb")
    run(runner)
    ends = {event.job: (event.state, event.step) for event in bench.events if isinstance(event, JobChanged)}
    assert ends == {"a": ("completed", 5), "bb": ("failed", 2)}


def test_a_round_that_was_not_started_is_started_without_who_has_ended(bench: Bench, tmp_path: Path) -> None:
    """`bb` diverges in the step before: its adapter is gone when the round is tried again."""
    runner = bench.runner()
    for name in ("a", "bb"):
        runner.admit(request(tmp_path, name, max_steps=4, val_fraction=0.0, **PLAIN))
    runner.run_round()
    runner.engine.arena.flat("params", runner.jobs()[1].adapter.name)[3] = torch.nan
    passes = fail_once(runner, 2, no_memory)
    run(runner)
    ends = {event.job: (event.state, event.step) for event in bench.events if isinstance(event, JobChanged)}
    assert ends == {"a": ("completed", 4), "bb": ("diverged", 2)}
    assert passes[:3] == ["a2 bb2", "a3 bb3", "a3"]
    begun = [line for line in bench.log if line.startswith("begin")]
    assert begun[1:] == ["begin a2 bb2", "begin a3 bb3", "begin a3", "begin a4"]


def test_results_that_cannot_be_read_are_not_computed_again(bench: Bench, tmp_path: Path) -> None:
    """The updates may have been made: a second attempt would be a step more."""
    runner = bench.runner()
    for name in ("a", "bb"):
        runner.admit(request(tmp_path, name, max_steps=4, val_fraction=0.0, **PLAIN))
    runner.run_round()
    honest = runner.engine.finish_round

    def lost(*arguments: Any) -> Callable[[], list[Verdict]]:
        honest(*arguments)
        raise_it = RuntimeError("device lost")
        return lambda: (_ for _ in ()).throw(raise_it)

    runner.engine.finish_round = lost
    bench.log.clear()
    run(runner)
    assert [line for line in bench.log if line.startswith("begin")] == ["begin a2 bb2", "begin a3 bb3"]
    assert {job.name: (job.state, job.step) for job in runner.jobs()} == {
        "a": ("failed", 1),
        "bb": ("failed", 1),
    }
