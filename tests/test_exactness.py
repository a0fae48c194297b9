"""The promise, attacked: falsification tests 1–12 and 16 of the exactness list, on a small model.

Each compares bytes: every loss, gradient norm, validation loss, adapter and optimizer tensor of a job that
trained alone with the same job in some company. `test_the_control_fails` switches exactness off and must
find a difference, or these tests could not find one either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gshare.agent.base.weights import Base
from gshare.agent.jobs.spec import JobRequest, RunSpec
from gshare.agent.train.audit import Trace, audit
from gshare.agent.train.engine import Engine
from gshare.agent.train.engines import make_engine
from gshare.agent.train.part import Part, Row
from gshare.agent.train.passes import StepWork
from gshare.agent.train.rounds import Rounds
from toy import BASE_DTYPE, DEVICE, changed, make_runner, new_backend, random_rows, request, tiny_base, train


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Path) -> Base:
    return tiny_base(tiny_checkpoint)


@dataclass
class Bench:
    """Trains the subject alone once, then in company, and says what differs."""

    checkpoint: Path
    base: Base
    directory: Path
    runs: int = 0

    def train(self, requests: Sequence[JobRequest], **options: Any) -> dict[str, Trace]:
        self.runs += 1
        return train(requests, self.directory / str(self.runs), self.checkpoint, self.base, **options)

    def request(self, name: str, **options: Any) -> JobRequest:
        return request(self.directory, name, **options)

    def assert_undisturbed(self, subject: JobRequest, company: Sequence[JobRequest], **options: Any) -> None:
        alone = self.train([subject])[subject.spec.name]
        assert len(alone.losses) > 0
        for order in ([subject, *company], [*company, subject]):
            together = self.train(order, **options)[subject.spec.name]
            assert max(together.adapters_in_pass) > 1, "was never packed: proves nothing"
            assert together.differences(alone) == []


@pytest.fixture
def bench(tiny_checkpoint: Path, base: Base, tmp_path: Path) -> Bench:
    return Bench(tiny_checkpoint, base, tmp_path)


LONG = (70, 650, 90, 12, 33, 700, 8, 20)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 6])
def test_1_more_sequences_in_the_pass(bench: Bench, batch: int) -> None:
    subject = bench.request("subject", per_device_train_batch_size=2, max_steps=2)
    other = bench.request("other", lengths=LONG, per_device_train_batch_size=batch, r=8, max_steps=2)
    bench.assert_undisturbed(subject, [other])


def test_2_any_order_of_adapters(bench: Bench) -> None:
    jobs = [bench.request(f"job{i}", data_seed=i, r=2 ** (i + 1)) for i in range(4)]
    first = bench.train(jobs)
    for order in ([3, 2, 1, 0], [1, 3, 0, 2]):
        again = bench.train([jobs[i] for i in order])
        for name, trace in first.items():
            assert again[name].differences(trace) == []


@pytest.mark.parametrize("total", [1, 16, 17, 64, 65, 128, 129, 255, 256, 1000, 16000])
def test_3_total_tokens_of_the_pass(base: Base, total: int) -> None:
    """Gradients of a 23-token subject beside a neighbour that fills the pass up to and over each boundary."""
    subject = Row(*_row(23, seed=1))
    alone, _ = _gradients(base, [[subject]])
    neighbour = [
        Row(*_row(min(500, total - start), seed=2)) for start in range(0, total, 500) if total - start > 1
    ]
    together, _ = _gradients(base, [[subject], neighbour or [Row(*_row(2, seed=2))]])
    _assert_equal(together[0], alone[0])


@pytest.mark.parametrize("offset", range(1, 16))
def test_4_token_offset_in_the_pass(base: Base, offset: int) -> None:
    subject = Row(*_row(23, seed=1))
    alone, losses = _gradients(base, [[subject]])
    shifted, shifted_losses = _gradients(base, [[Row(*_row(offset + 1, seed=3))], [subject]])
    _assert_equal(shifted[1], alone[0])
    assert shifted_losses[1] == losses[0]


@pytest.mark.parametrize("longest", [2, 9, 10, 2048])
def test_5_the_neighbour_s_longest_row(base: Base, longest: int) -> None:
    rows = [Row(*_row(length, seed=length)) for length in (23, 40)]
    alone, _ = _gradients(base, [rows])
    together, _ = _gradients(base, [rows, [Row(*_row(longest, seed=5))]])
    _assert_equal(together[0], alone[0])


@pytest.mark.parametrize("rank", [1, 8, 64, 256])
def test_6_the_neighbour_s_rank(bench: Bench, rank: int) -> None:
    bench.assert_undisturbed(bench.request("subject"), [bench.request("other", r=rank, max_steps=2)])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_7_a_neighbour_full_of_nan_or_inf(bench: Bench, base: Base, value: float) -> None:
    """The neighbour's weights turn non-finite after its first step: it ends as diverged, nobody notices."""
    subject, other = bench.request("subject"), bench.request("other", r=8)
    alone = bench.train([subject])["subject"]
    events: list[Any] = []
    runner = make_runner(bench.checkpoint, base, events.append)
    together = changed(subject, output_dir=str(bench.directory / "subject-together"))
    runner.admit(together)
    runner.admit(changed(other, output_dir=str(bench.directory / "other-together")))
    assert runner.run_round()
    victim = runner.jobs()[1].adapter
    for key, _ in victim.arena.matrices(victim.name):
        victim.arena.view("params", victim.name, key).fill_(value)
    victim.arena.publish(victim.name)
    while runner.run_round():
        pass
    runner.close()
    states = {job.name: (job.state, job.step) for job in runner.jobs()}
    assert states == {"subject": ("completed", 4), "other": ("diverged", 2)}
    losses = [e.loss for e in events if type(e).__name__ == "Stepped" and e.job == "subject"]
    assert losses == alone.losses
    final = (Path(together.spec.output_dir) / "adapter_model.safetensors").read_bytes()
    assert final == (bench.directory / "1" / "subject" / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_8_the_neighbour_s_label_share(base: Base, share: float) -> None:
    subject = Row(*_row(23, seed=1))
    alone, _ = _gradients(base, [[subject]])
    tokens, _ = _row(31, seed=2)
    trained = np.full(31, share > 0)
    trained[0] = False
    together, losses = _gradients(base, [[subject], [Row(tokens, trained)]])
    _assert_equal(together[0], alone[0])
    assert len(losses[1]) == (30 if share else 0)


def test_9_join_leave_and_slot_reuse(bench: Bench, base: Base) -> None:
    """The subject joins at step 2 in the slot that a leaver freed, beside one that stays."""
    subject = bench.request("subject", r=8)
    alone = bench.train([subject])["subject"]
    events: list[Any] = []
    runner = make_runner(bench.checkpoint, base, events.append)
    out = bench.directory / "joined"
    runner.admit(changed(bench.request("leaver", r=8), output_dir=str(out / "leaver")))
    runner.admit(changed(bench.request("stayer", r=3, max_steps=9), output_dir=str(out / "stayer")))
    leaver_slot = runner.engine.arena.slot(runner.jobs()[0].adapter.name)
    runner.run_round()
    runner.run_round()
    runner.stop("leaver", "test")
    runner.admit(changed(subject, output_dir=str(out / "subject")))
    assert runner.engine.arena.slot(runner.jobs()[2].adapter.name).start == leaver_slot.start
    while runner.run_round():
        pass
    runner.close()
    assert [e.loss for e in events if type(e).__name__ == "Stepped" and e.job == "subject"] == alone.losses
    assert (out / "subject/adapter_model.safetensors").read_bytes() == (
        bench.directory / "1/subject/adapter_model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit"])
def test_10_stop_and_resume_in_another_slot(bench: Bench, base: Base, optim: str) -> None:
    """Stopped at step 3 (no save falls there), resumed by another runner behind another adapter."""
    subject = bench.request("subject", r=16, optim=optim, max_steps=6, lora_dropout=0.1)
    alone = bench.train([subject])["subject"]
    moved = changed(subject, output_dir=str(bench.directory / "moved"))
    losses: list[float] = []

    def listen(event: Any) -> None:
        if type(event).__name__ == "Stepped" and event.job == "subject":
            losses.append(event.loss)

    first = make_runner(bench.checkpoint, base, listen)
    first.admit(moved)
    for _ in range(3):
        first.run_round()
    first.stop("subject", "test")
    first.close()
    second = make_runner(bench.checkpoint, base, listen)
    other = bench.request("other", r=5, max_steps=2)
    second.admit(changed(other, output_dir=str(bench.directory / "other")))
    second.admit(JobRequest(**{**_fields(moved), "resume": True}))
    while second.run_round():
        pass
    second.close()
    assert losses == alone.losses
    for name in ("adapter_model.safetensors", "checkpoint-6/optimizer.safetensors"):
        assert (bench.directory / "moved" / name).read_bytes() == (
            bench.directory / "1/subject" / name
        ).read_bytes()


@pytest.mark.parametrize(("batch", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_11_micro_batch_partition(bench: Bench, batch: int, accumulation: int) -> None:
    """4 = 2+2 = 1×4, dropout on, alone and co-scheduled with micro-batches of another number."""
    options: dict[str, Any] = {"max_steps": 3, "lora_dropout": 0.2}
    whole = bench.train(
        [bench.request("subject", per_device_train_batch_size=4, gradient_accumulation_steps=1, **options)]
    )["subject"]
    parts = bench.request(
        "subject", per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, **options
    )
    other = bench.request("other", per_device_train_batch_size=3, gradient_accumulation_steps=2, max_steps=3)
    assert bench.train([parts])["subject"].differences(whole) == []
    assert bench.train([other, parts])["subject"].differences(whole) == []


@pytest.mark.parametrize("limit", [1, 50, 100])
def test_11_passes_cut_anywhere(bench: Bench, limit: int) -> None:
    subject = bench.request("subject", per_device_train_batch_size=3)
    other = bench.request("other", per_device_train_batch_size=2, r=8)
    alone = bench.train([subject])["subject"]
    assert bench.train([other, subject], max_tokens_per_pass=limit)["subject"].differences(alone) == []


def test_12_checkpointing_on_and_off(bench: Bench) -> None:
    subject = bench.request("subject", lora_dropout=0.1)
    kept = bench.train([subject])["subject"]
    recomputed = bench.train([changed(subject, gradient_checkpointing=True)])["subject"]
    assert recomputed.differences(kept) == []
    beside = bench.train([subject, bench.request("other", gradient_checkpointing=True)])["subject"]
    assert beside.differences(kept) == []


@pytest.mark.parametrize("schedule", ["synchronized", "round_robin", "priority_val_loss", "fair"])
def test_schedules_never_change_bits(bench: Bench, schedule: str) -> None:
    jobs = [bench.request(f"job{i}", data_seed=i, r=4 + i, weight=1.0 + i) for i in range(3)]
    together = bench.train(jobs, schedule=schedule, max_tokens_per_pass=60)
    for job in jobs:
        assert together[job.spec.name].differences(bench.train([job])[job.spec.name]) == []


def test_mixed_everything_one_joining_late(bench: Bench) -> None:
    """Case 17: rank 8 without dropout beside rank 64 with, a third joins at step 2, clipping and 8-bit."""
    jobs = [
        bench.request("a", r=8, max_steps=5),
        bench.request("b", r=64, lora_dropout=0.1, optim="adamw_8bit", max_grad_norm=0.05, max_steps=5),
        bench.request(
            "c",
            target_modules=("q_proj", "down_proj"),
            layers_to_transform=(1,),
            use_rslora=True,
            lr_scheduler_type="cosine",
            warmup_ratio=0.3,
            weight_decay=0.0,
        ),
    ]
    together = bench.train(jobs, joins={"c": 2})
    for job in jobs:
        assert together[job.spec.name].differences(bench.train([job])[job.spec.name]) == []


def test_out_of_memory_changes_nothing_but_the_pass(base: Base) -> None:
    """An OOM in the second pass of a step: the step is retried with less, with the same bits."""
    rows = [[Row(*_row(30, seed=i), sample=i)] for i in range(4)]

    def losses_and_gradients(limit: int | None) -> tuple[list[float], list[torch.Tensor], int]:
        engine = make_engine(base, new_backend())
        adapter = engine.new_adapter("a", _spec())
        attempts = 0

        def before_pass(parts: Sequence[Part]) -> None:
            nonlocal attempts
            attempts += 1
            if limit is not None and sum(part.tokens for part in parts) > limit:
                raise torch.OutOfMemoryError("simulated")

        engine.before_pass = before_pass
        batches = [[row for one in rows[:3] for row in one], rows[3]]
        outcome = Rounds(engine, 16384).run([StepWork(adapter, 0, batches)])[0]
        assert outcome.error is None
        return outcome.losses, _all_gradients(engine, "a"), attempts

    plain, expected, passes = losses_and_gradients(None)
    assert passes == 2
    retried, gradients, attempts = losses_and_gradients(40)
    assert attempts > 4
    assert retried == plain
    _assert_equal(gradients, expected)


def test_a_row_that_never_fits_ends_its_own_job_only(base: Base) -> None:
    engine = make_engine(base, new_backend())
    small, large = engine.new_adapter("small", _spec()), engine.new_adapter("large", _spec())

    def before_pass(parts: Sequence[Part]) -> None:
        if any(len(row.tokens) > 50 for part in parts for row in part.rows):
            raise torch.OutOfMemoryError("simulated")

    engine.before_pass = before_pass
    work = [StepWork(small, 0, [[Row(*_row(30, seed=1))]]), StepWork(large, 0, [[Row(*_row(60, seed=2))]])]
    outcomes = Rounds(engine, 16384).run(work)
    assert outcomes[0].error is None
    assert "one row of 60 tokens" in str(outcomes[1].error)


def test_a_packed_pass_is_packed(base: Base) -> None:
    """One base product per linear and pass, whatever the number of adapters."""
    for adapters in (1, 5):
        backend = new_backend()
        engine = make_engine(base, backend)
        parts = [
            Part(engine.new_adapter(str(i), _spec(r=i + 1)), [Row(*_row(9, seed=i))]) for i in range(adapters)
        ]
        engine.forward_backward(parts)
        layers = base.config.num_layers
        # The top layer's queries are a product of their own: only rows that predict a label have them.
        assert backend.calls["linear"] == 4 * layers + 1
        # The lowest layer's q, k and v need no dX: nothing below is trained.
        assert backend.calls["linear_dx"] == 4 * layers - 1
        assert backend.calls["cross_entropy"] == 1
        assert backend.calls["lora_forward"] == 4 * layers


def test_every_adapter_moves_and_nobody_else_s_does(bench: Bench, base: Base) -> None:
    """Fault 4 of the list: a step of A changes all of A's matrices and none of B's."""
    engine = make_engine(base, new_backend())
    a, b = engine.new_adapter("a", _spec()), engine.new_adapter("b", _spec(seed=1))
    before = {name: _flat(engine, name) for name in ("a", "b")}
    row = Row(*_row(20, seed=1))
    engine.arena.zero_grads("a")
    engine.forward_backward([Part(a, [row], label_tokens=row.label_tokens)])
    for key, _ in engine.arena.matrices("a"):
        if key.side == "B":
            assert engine.arena.view("grads", "a", key).abs().max() > 0, key
    a.update(step=1, learning_rate=1e-2, norm=a.gradient_norm())
    engine.arena.zero_grads("a")
    engine.forward_backward([Part(a, [row], label_tokens=row.label_tokens)])
    a.update(step=2, learning_rate=1e-2, norm=a.gradient_norm())
    for old, new in zip(before["a"], _flat(engine, "a"), strict=True):
        assert not torch.equal(old, new)
    _assert_equal(_flat(engine, "b"), before["b"])
    del b


def test_16_the_control_fails(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """With split-K switched on for large batches the audit must notice; without it must pass."""
    # Alone at most 128 rows also after padding, together more.
    lengths = (60, 75, 90, 81, 66, 58, 72, 85)
    jobs = [
        request(tmp_path, f"job{i}", lengths=lengths, data_seed=i, r=4 * (i + 1), max_steps=3, max_length=96)
        for i in range(3)
    ]
    run = RunSpec(model=str(tiny_checkpoint), base_dtype=BASE_DTYPE)

    def report(exact: bool):
        return audit(
            run,
            jobs,
            model_dir=tiny_checkpoint,
            device=torch.device(DEVICE),
            backend_factory=lambda: new_backend(exact=exact),
            directory=tmp_path / str(exact),
        )

    good, bad = report(True), report(False)
    assert good.passed
    assert good.most_adapters == 3
    assert not bad.identical
    assert not bad.passed
    assert any("adapter bytes differ" in text for texts in bad.differences.values() for text in texts)


def test_an_audit_that_never_packed_fails(tiny_checkpoint: Path, tmp_path: Path) -> None:
    report = audit(
        RunSpec(
            model=str(tiny_checkpoint), base_dtype=BASE_DTYPE, schedule="round_robin", max_adapters_per_pass=1
        ),
        [request(tmp_path, name, max_steps=2) for name in ("a", "bb")],
        model_dir=tiny_checkpoint,
        device=torch.device(DEVICE),
        backend_factory=new_backend,
        directory=tmp_path,
    )
    assert report.identical
    assert not report.passed


def test_case_5_a_row_without_targets_changes_nothing(base: Base) -> None:
    good = [Row(*_row(length, seed=length)) for length in (23, 31)]
    tokens, _ = _row(40, seed=9)
    empty = Row(tokens, np.zeros(40, dtype=bool))
    (without,), (losses,) = _gradients(base, [good])
    (beside,), (losses_beside,) = _gradients(base, [[good[0], empty, good[1]]])
    assert losses_beside == losses
    _assert_equal(beside, without)


def test_case_6_lengths_3_and_60_in_one_pass_or_two(base: Base) -> None:
    """1 × 2 and 2 × 1 give one gradient: each token weighs 1 / (label tokens of the whole step)."""
    short, long = Row(*_row(3, seed=1), sample=0), Row(*_row(60, seed=2), sample=1)
    found = []
    for batches in ([[short, long]], [[short], [long]]):
        engine = make_engine(base, new_backend())
        adapter = engine.new_adapter("a", _spec(lora_dropout=0.1))
        outcome = Rounds(engine, 16384).run([StepWork(adapter, 0, batches)])[0]
        labels = short.label_tokens + long.label_tokens
        assert outcome.loss == pytest.approx(sum(outcome.losses) / labels)
        found.append((outcome.loss, outcome.grad_norm, _all_gradients(engine, "a")))
    assert found[0][:2] == found[1][:2]
    _assert_equal(found[0][2], found[1][2])


def test_case_8_packed_sequences_do_not_see_each_other(base: Base) -> None:
    rows = [Row(np.arange(a, b, dtype=np.int32), np.arange(b - a) > 0) for a, b in ((3, 6), (6, 11))]
    engine = make_engine(base, new_backend())
    adapter = engine.new_adapter("a", _spec())
    (together,) = engine.evaluate([Part(adapter, rows)])
    apart = [loss for row in rows for loss in engine.evaluate([Part(adapter, [row])])[0]]
    assert together == apart
    assert len(together) == 2 + 4
    joined = Row(np.arange(3, 11, dtype=np.int32), np.arange(8) > 0)
    (one_sequence,) = engine.evaluate([Part(adapter, [joined])])
    assert one_sequence[-1] != together[-1], "a target that crosses the boundary would look like this"


# ---------------------------------------------------------------------- helpers


def _spec(**changes: Any):
    from gshare.agent.jobs.spec import AdapterSpec

    values: dict[str, Any] = {
        "name": "x",
        "data": "x",
        "output_dir": "x",
        "r": 4,
        "lora_alpha": 8.0,
        "seed": 0,
    }
    return AdapterSpec(**{**values, **changes})


def _fields(job: JobRequest) -> dict[str, Any]:
    return {name: getattr(job, name) for name in job.__struct_fields__}


def _row(length: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    tokens, trained = random_rows([max(2, length)], seed=seed)[0]
    return np.asarray(tokens, dtype=np.int32), np.asarray(trained)


def _gradients(
    base: Base, adapters: Sequence[Sequence[Row]]
) -> tuple[list[list[torch.Tensor]], list[list[float]]]:
    """One fused pass; B is made non-zero so that A's gradients are too. Same adapter for same row set."""
    engine = make_engine(base, new_backend())
    parts = []
    for index, rows in enumerate(adapters):
        subject = rows[0].tokens.shape[0] == 23
        adapter = engine.new_adapter(str(index), _spec(r=4 if subject else 8))
        for key, shape in list(engine.arena.matrices(str(index))):
            if key.side == "B":
                draw = np.random.default_rng(key.layer).standard_normal(shape).astype(np.float32)
                engine.arena.view("params", str(index), key).copy_(torch.from_numpy(draw * 0.1))
        parts.append(Part(adapter, rows, label_tokens=7))
    losses = engine.forward_backward(parts)
    return [_all_gradients(engine, str(index)) for index in range(len(adapters))], losses


def _all_gradients(engine: Engine, name: str) -> list[torch.Tensor]:
    return [engine.arena.view("grads", name, key).clone() for key, _ in engine.arena.matrices(name)]


def _flat(engine: Engine, name: str) -> list[torch.Tensor]:
    return [engine.arena.view("params", name, key).clone() for key, _ in engine.arena.matrices(name)]


def _assert_equal(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b), float((a - b).abs().max())
    assert any(b.abs().max() > 0 for b in expected), "all zero: proves nothing"
