"""The runner with the real engine: order of steps, shares, cadence of evaluations and saves, and failures."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.base.weights import Base
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.events import CheckpointSaved, Evaluated, Event, JobChanged, Stepped
from gshare.agent.service.protocol import JobStatus
from gshare.agent.service.table import JobTable
from gshare.agent.train import checkpoint, job
from gshare.agent.train.runner import Runner
from gshare.cli.board import Board
from toy import changed, make_runner, request, tiny_base


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Path) -> Base:
    return tiny_base(tiny_checkpoint)


class Log(list[Event]):
    """Events as they come; steps as (job, step)."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    def steps(self) -> list[str]:
        return [event.job for event in self if isinstance(event, Stepped)]

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self if isinstance(event, kind)]

    def ends(self) -> dict[str, str]:
        return {event.job: event.state for event in self if isinstance(event, JobChanged)}


def run_all(runner: Runner) -> None:
    while runner.run_round():
        pass
    runner.close()


ROWS = (12, 12, 12, 12, 12, 12, 12, 12)


@pytest.mark.parametrize(
    ("schedule", "options", "expected"),
    [
        ("synchronized", {}, ["a", "b", "c"] * 3),
        ("round_robin", {"max_adapters": 1}, ["a", "b", "c"] * 3),
        ("round_robin", {"max_adapters": 2}, ["a", "b", "c", "a", "b", "c", "a", "b", "c"]),
        # Never evaluated first, in turn; from the first evaluation on the highest loss. Below.
        ("fair", {"max_tokens": 24}, ["a", "b", "c"] * 3),
    ],
)
def test_order_of_steps(
    tiny_checkpoint: Path,
    base: Base,
    tmp_path: Path,
    schedule: str,
    options: dict[str, int],
    expected: list[str],
) -> None:
    log = Log()
    runner = make_runner(tiny_checkpoint, base, log, schedule=schedule, **options)
    for name in "abc":
        runner.admit(request(tmp_path, name, lengths=ROWS, max_steps=3, eval_steps=0, val_fraction=0.0))
    run_all(runner)
    assert log.steps() == expected


def test_order_of_priority_val_loss(tiny_checkpoint: Path, base: Base, tmp_path: Path) -> None:
    """Each is evaluated after every step: the never-evaluated come first, then the worst loss."""
    log = Log()
    runner = make_runner(tiny_checkpoint, base, log, schedule="priority_val_loss")
    for i, name in enumerate("abc"):
        runner.admit(request(tmp_path, name, lengths=ROWS, data_seed=i, max_steps=3, eval_steps=1))
    run_all(runner)
    order = log.steps()
    assert order[:3] == ["a", "b", "c"]
    losses: dict[str, float] = {}
    left = Counter({"a": 3, "b": 3, "c": 3})
    evaluations = iter(log.of(Evaluated))
    for index, name in enumerate(order):
        if index >= 3:
            waiting = {n: loss for n, loss in losses.items() if left[n]}
            assert name == max(waiting, key=lambda n: waiting[n])
        left[name] -= 1
        evaluation = next(evaluations)
        assert evaluation.job == name
        losses[name] = evaluation.val_loss


@pytest.mark.parametrize("schedule", ["synchronized", "round_robin", "priority_val_loss", "fair"])
def test_a_diverged_adapter_leaves_the_rotation(
    tiny_checkpoint: Path, base: Base, tmp_path: Path, schedule: str
) -> None:
    """lr 1e30 overflows at once: quarantined, named, its last weights finite; the others run to their end."""
    log = Log()
    runner = make_runner(tiny_checkpoint, base, log, schedule=schedule, max_adapters=1)
    for name, rate in (("a", 1e-3), ("wild", 1e30), ("c", 1e-3)):
        runner.admit(request(tmp_path, name, lengths=ROWS, learning_rate=rate, max_steps=4))
    run_all(runner)
    assert log.ends() == {"a": "completed", "wild": "diverged", "c": "completed"}
    steps = Counter(log.steps())
    assert steps["a"] == steps["c"] == 4
    assert steps["wild"] < 4
    end = next(event for event in log.of(JobChanged) if event.state == "diverged")
    assert "not finite" in end.reason
    assert "learning_rate" in end.reason
    assert not (tmp_path / "wild" / "adapter_model.safetensors").exists()


def test_fair_shares_are_within_five_percent_of_the_weights(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    """Rows of 8, 20 and 44 tokens, weights 1, 2 and 3; shares measured while all three run."""
    log = Log()
    runner = make_runner(tiny_checkpoint, base, log, schedule="fair", max_tokens=128)
    for name, length, weight in (("a", 8, 1.0), ("b", 20, 2.0), ("c", 44, 3.0)):
        lengths = [length] * 8
        runner.admit(
            request(
                tmp_path,
                name,
                lengths=lengths,
                weight=weight,
                max_steps=5000,
                eval_steps=0,
                save_steps=0,
                val_fraction=0.0,
            )
        )
    for _ in range(250):
        runner.run_round()
    tokens: Counter[str] = Counter()
    for event in log.of(Stepped):
        tokens[event.job] += event.tokens
    assert max(event.adapters_in_pass for event in log.of(Stepped)) > 1
    total = sum(tokens.values())
    for name, share in (("a", 1 / 6), ("b", 2 / 6), ("c", 3 / 6)):
        assert abs(tokens[name] / total - share) <= 0.05 * share, (name, tokens)


def test_evaluations_and_saves_fall_where_the_spec_says(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    log = Log()
    runner = make_runner(tiny_checkpoint, base, log)
    runner.admit(request(tmp_path, "a", max_steps=7, eval_steps=3, save_steps=2, save_total_limit=2))
    run_all(runner)
    assert [event.step for event in log.of(Evaluated)] == [3, 6, 7]
    saved = [int(Path(e.path).name.split("-")[1]) for e in log.of(CheckpointSaved) if "checkpoint-" in e.path]
    assert saved == [2, 4, 6, 7]
    assert sorted(path.name for path in (tmp_path / "a").glob("checkpoint-*")) == [
        "checkpoint-6",
        "checkpoint-7",
    ]
    best = min(log.of(Evaluated), key=lambda event: event.val_loss)
    metadata = json.loads((tmp_path / "a/best/metadata.json").read_text())
    assert (metadata["step"], metadata["val_loss"]) == (best.step, best.val_loss)
    lines = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["type"] == "step"] == [1, 2, 3, 4, 5, 6, 7]


def test_paused_jobs_wait_and_resume_with_their_bits(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    files = []
    for pausing in (False, True):
        log = Log()
        runner = make_runner(tiny_checkpoint, base, log)
        folder = tmp_path / str(pausing)
        runner.admit(request(folder, "a", max_steps=5))
        runner.admit(request(folder, "bb", max_steps=5))
        runner.run_round()
        if pausing:
            runner.pause("a")
            runner.run_round()
            runner.run_round()
            assert log.steps() == ["a", "bb", "bb", "bb"]
            runner.resume("a")
        run_all(runner)
        files.append((folder / "a/adapter_model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_a_refused_job_leaves_nothing_and_a_name_is_taken_once(
    tiny_checkpoint: Path, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(tiny_checkpoint, base)
    runner.admit(request(tmp_path, "a", max_steps=2))
    before = runner.engine.arena.nbytes()
    with pytest.raises(UsageError, match="already running"):
        runner.admit(request(tmp_path, "a"))
    with pytest.raises(UsageError, match=r"layers_to_transform \[7\]"):
        runner.admit(request(tmp_path, "deep", layers_to_transform=(7,)))
    with pytest.raises(UsageError, match="max_length 4096"):
        runner.admit(request(tmp_path, "long", max_length=4096))
    with monkeypatch.context() as patch:
        patch.setattr(runner.engine, "most_rank", 16)  # as an engine on CUDA has one
        with pytest.raises(UsageError, match="r 17: is beyond 16"):
            runner.admit(request(tmp_path, "wide", r=17))
    gone = request(tmp_path, "gone")
    (Path(gone.train_store) / "tokens.bin").unlink()
    with pytest.raises(GshareError, match=r"tokens\.bin"):
        runner.admit(gone)
    assert [j.name for j in runner.jobs()] == ["a"]
    assert runner.engine.arena.nbytes() == before
    with pytest.raises(UsageError, match="its jobs: a"):
        runner.stop("nobody", "")
    run_all(runner)
    assert runner.jobs()[0].state == "completed"


def test_an_exception_in_one_job_s_rows_ends_that_job_only(
    tiny_checkpoint: Path, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = job.JobData.micro_batches

    def damaged(self: job.JobData, step: int):
        if "bad" in str(self.train.path) and step == 2:
            raise OSError(5, "Input/output error")
        return honest(self, step)

    monkeypatch.setattr(job.JobData, "micro_batches", damaged)
    log = Log()
    runner = make_runner(tiny_checkpoint, base, log)
    runner.admit(request(tmp_path, "good", max_steps=4))
    runner.admit(request(tmp_path, "bad", max_steps=4))
    run_all(runner)
    assert log.ends() == {"good": "completed", "bad": "failed"}
    assert Counter(log.steps()) == {"good": 4, "bad": 2}


def test_a_job_that_goes_on_tells_the_losses_of_its_checkpoint(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    """Of a finished one above all: it makes no step that would tell them."""

    def run_to_the_end(resume: bool) -> tuple[Log, Board]:
        log, board = Log(), Board([("a", "out")])
        runner = make_runner(tiny_checkpoint, base, log)
        runner.admit(request(tmp_path, "a", resume=resume))
        run_all(runner)
        table = JobTable()
        table.add(JobStatus(job="a", state="queued"))
        for event in log:
            board.take(event, 0.0)
            table.update(event)
        (status,) = table.all()
        row = board.rows["a"]
        assert (status.loss, status.val_loss) == (row.loss, row.val_loss)
        assert status.best_val_loss == row.best_val_loss
        return log, board

    log, first = run_to_the_end(resume=False)
    assert all(event.last is None for event in log.of(JobChanged))
    log, again = run_to_the_end(resume=True)
    assert log.steps() == []
    shown = [(b.rows["a"].loss, b.rows["a"].val_loss, b.rows["a"].best_val_loss) for b in (first, again)]
    assert shown[0] == shown[1]
    assert None not in shown[1]
    assert again.rows["a"].state == "completed"


def test_a_full_disk_ends_its_job_with_the_last_checkpoint_intact(
    tiny_checkpoint: Path, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync
    log = Log()
    runner = make_runner(tiny_checkpoint, base, log)
    runner.admit(request(tmp_path, "full", max_steps=6, save_steps=2, eval_steps=0))
    runner.admit(request(tmp_path, "other", max_steps=6, save_steps=2, eval_steps=0))
    for _ in range(3):
        runner.run_round()
    runner.books.writer.flush()  # the checkpoint of step 2 is written before the disk is full

    def no_space(fd: int) -> None:
        if "/full/" in os.readlink(f"/proc/self/fd/{fd}") + "/":
            raise OSError(28, "No space left on device")
        real(fd)

    monkeypatch.setattr(os, "fsync", no_space)
    run_all(runner)
    assert log.ends() == {"full": "failed", "other": "completed"}
    reason = next(event.reason for event in log.of(JobChanged) if event.state == "failed")
    assert "disk full" in reason
    monkeypatch.undo()
    last = checkpoint.latest_checkpoint(tmp_path / "full")
    assert last is not None
    assert checkpoint.load_checkpoint(last).step == 2


def test_a_job_resumed_on_other_data_or_shape_is_refused(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    runner = make_runner(tiny_checkpoint, base)
    runner.admit(request(tmp_path, "a", max_steps=2))
    run_all(runner)
    runner = make_runner(tiny_checkpoint, base)
    other = request(tmp_path / "elsewhere", "a", data_seed=99, resume=True)
    other = changed(other, output_dir=str(tmp_path / "a"), max_steps=4)
    with pytest.raises(UsageError, match="trained on other data"):
        runner.admit(other)
    with pytest.raises(UsageError, match="does not fit this spec"):
        runner.admit(request(tmp_path, "a", r=9, max_steps=4, resume=True))
    assert runner.engine.arena.names() == []
    runner.close()


def test_resumed_under_other_numerics_is_said_and_recorded(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    runner = make_runner(tiny_checkpoint, base)
    runner.admit(request(tmp_path, "a", max_steps=2))
    run_all(runner)
    log = Log()
    runner = make_runner(tiny_checkpoint, base, log)
    runner.books.fingerprint = {**runner.fingerprint, "torch": "9.9"}
    runner.admit(request(tmp_path, "a", max_steps=4, resume=True))
    run_all(runner)
    assert any("torch: " in event.text for event in log if hasattr(event, "text"))
    lines = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["type"] == "fingerprint"] == [2]
    assert log.ends() == {"a": "completed"}


def test_weights_that_overflow_in_the_last_step_are_not_a_success(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    """Loss and gradient are finite, the update is not: diverged, and no file holds what is no number."""
    log = Log()
    runner = make_runner(tiny_checkpoint, base, log)
    runner.admit(request(tmp_path, "wild", learning_rate=1e38, weight_decay=1e3, max_steps=1, save_steps=1))
    runner.admit(request(tmp_path, "tame", max_steps=1))
    run_all(runner)
    assert log.ends() == {"wild": "diverged", "tame": "completed"}
    assert not list((tmp_path / "wild").rglob("*.safetensors"))


@pytest.mark.parametrize("purpose", ["weights", "moments", "codes", "floats"])
def test_an_adapter_that_does_not_fit_is_refused_and_the_arena_is_as_before(
    tiny_checkpoint: Path, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, purpose: str
) -> None:
    log = Log()
    runner = make_runner(tiny_checkpoint, base, log)
    runner.admit(request(tmp_path, "a", max_steps=2))
    arena = runner.engine.arena
    region = getattr(arena, f"_{purpose}")
    optim = "adamw_8bit" if purpose in ("codes", "floats") else "adamw"

    def no_memory(needed: int) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(region, "_grow", no_memory)
        with pytest.raises(GshareError, match=r"adapter huge: cannot be admitted.*allocate memory"):
            runner.admit(request(tmp_path, "huge", r=512, max_steps=2, optim=optim))
    assert len(arena.names()) == 1
    assert not any(len(slots) > 1 for slots in (r.slots for r in arena._regions))
    runner.admit(request(tmp_path, "bb", max_steps=2))
    run_all(runner)
    assert log.ends() == {"a": "completed", "bb": "completed"}


def test_a_resume_that_would_be_another_job_is_refused(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    runner = make_runner(tiny_checkpoint, base)
    runner.admit(request(tmp_path, "flat", max_steps=4))
    runner.admit(request(tmp_path, "curve", max_steps=4, lr_scheduler_type="cosine"))
    run_all(runner)
    runner = make_runner(tiny_checkpoint, base)
    with pytest.raises(UsageError, match="has done 4 steps already"):
        runner.admit(request(tmp_path, "flat", max_steps=2, resume=True))
    with pytest.raises(UsageError, match="laid out over 4 steps"):
        runner.admit(request(tmp_path, "curve", max_steps=8, lr_scheduler_type="cosine", resume=True))
    runner.admit(request(tmp_path, "flat", max_steps=6, resume=True))
    run_all(runner)
    other = tiny_base(make_tiny_checkpoint(tmp_path / "other", seed=5))
    runner = make_runner(tmp_path / "other", other)
    with pytest.raises(UsageError, match="trained on another base"):
        runner.admit(request(tmp_path, "flat", max_steps=8, resume=True))
    runner.close()


def test_a_damaged_checkpoint_is_told(tiny_checkpoint: Path, base: Base, tmp_path: Path) -> None:
    runner = make_runner(tiny_checkpoint, base)
    runner.admit(request(tmp_path, "a", max_steps=4))
    run_all(runner)
    for step, expected in ((4, "going on from step 2"), (2, "going on from step 0")):
        (tmp_path / f"a/checkpoint-{step}/optimizer.safetensors").write_bytes(b"x")
        log = Log()
        runner = make_runner(tiny_checkpoint, base, log)
        runner.admit(request(tmp_path, "a", max_steps=4, resume=True))
        runner.close()
        assert any(expected in event.text for event in log if hasattr(event, "text"))
