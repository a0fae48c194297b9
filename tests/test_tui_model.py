"""The dashboard's state: what frames make of it, and that it stays bounded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.node.protocol import GpuInfo, NodeInfo, ReservationInfo
from gshare.tui import frames as f
from gshare.tui.curve import Curve
from gshare.tui.model import State
from gshare.tui.ranking import number_key, rank_key
from gshare.tui.speed import Speed
from watching import apply_all

NAN, INF = math.nan, math.inf


def at(time: float) -> dict[str, Any]:
    return {"time": time, "received": time}


def view(job: str, state: str = "running", **fields) -> f.JobView:
    return f.JobView(job=job, state=state, **fields)


def snapshot(time: float, *jobs: f.JobView) -> f.Snapshot:
    return f.Snapshot(**at(time), jobs=jobs)


def samples(time: float, job: str, step: int, **fields) -> f.Samples:
    values = {"total_steps": 1000, "loss": 1.0, "tokens": 100.0, "seconds": 0.5, **fields}
    return f.Samples(**at(time), samples=(f.Sample(job=job, step=step, time=time, **values),))


@dataclass
class Row:
    name: str
    best_val_loss: float | None
    best_step: int | None = 1


def test_rank_of_numbers_that_are_none() -> None:
    rows = [Row("a", NAN), Row("b", 1.0), Row("c", INF), Row("d", 3.0), Row("e", None), Row("f", 2.0)]
    assert [row.name for row in sorted(rows, key=rank_key)] == ["b", "f", "d", "a", "c", "e"]
    assert [row.name for row in sorted(rows, key=lambda row: row.best_val_loss or 0)] != ["b", "f", "d"]


def test_ties_go_to_the_earlier_step_then_the_name() -> None:
    rows = [Row("z", 1.0, 5), Row("b", 1.0, 5), Row("y", 1.0, 4), Row("x", 1.0, None)]
    assert [row.name for row in sorted(rows, key=rank_key)] == ["y", "b", "z", "x"]


def test_number_key_puts_unknown_last() -> None:
    assert sorted([NAN, -1.0, None, INF, 2.0], key=number_key)[:2] == [-1.0, 2.0]


def test_what_is_not_said_is_not_zero() -> None:
    state = State()
    state.apply(snapshot(1.0, view("a")))
    job = state.jobs["a"]
    assert (job.step, job.total_steps, job.loss, job.val_loss, job.best_step) == (None,) * 5
    assert (job.tokens_per_s, job.eta_s, job.epoch, job.gap) == (None,) * 4
    state.apply(f.Snapshot(**at(2.0), nodes=(f.NodeView(node="n", state="new"),)))
    assert (state.nodes["n"].jobs, state.nodes["n"].heard, state.nodes["n"].gpus) == (None, None, [])


def test_a_list_says_who_is_gone_and_keeps_what_it_does_not_say() -> None:
    state = State()
    state.apply(snapshot(1.0, view("a", hyper={"r": 8}, model="m", loss=1.5, step=3), view("b")))
    changes = state.apply(snapshot(2.0, view("a", "paused")))
    assert set(state.jobs) == {"a"}
    assert changes.rows
    assert changes.urgent
    assert changes.jobs == {"a", "b"}
    job = state.jobs["a"]
    assert (job.hyper, job.model, job.loss, job.step, job.state) == ({"r": 8}, "m", 1.5, 3, "paused")


def test_a_list_older_than_the_samples_takes_no_step_back() -> None:
    state = State()
    state.apply(samples(1.0, "a", 50, loss=0.5))
    state.apply(snapshot(1.1, view("a", step=40, loss=0.9)))
    assert (state.jobs["a"].step, state.jobs["a"].loss) == (50, 0.5)
    state.apply(snapshot(1.2, view("a", step=60, loss=0.4)))
    assert (state.jobs["a"].step, state.jobs["a"].loss) == (60, 0.4)


def test_speed_is_not_slower_for_lost_samples() -> None:
    """10 steps a second of 100 tokens: all samples, and every third second only."""
    whole, holes = Speed(), Speed()
    for second in range(60):
        sample = f.Sample(
            job="a", step=1 + 10 * second, total_steps=1000, loss=1.0, time=float(second), tokens=100.0
        )
        whole.add(sample)
        if second % 3 == 0:
            holes.add(sample)
    for speed in (whole, holes):
        assert speed.steps_per_s == pytest.approx(10.0)
        assert speed.tokens_per_s == pytest.approx(1000.0)


def test_time_left_is_of_running_jobs_only() -> None:
    state = State()
    state.apply(snapshot(0.0, view("a")))
    for second in range(3):
        state.apply(samples(float(second), "a", 1 + 10 * second))
    assert state.jobs["a"].eta_s == pytest.approx((1000 - 21) / 10)
    state.apply(f.JobState(**at(3.0), job="a", state="paused", step=21))
    assert (state.jobs["a"].eta_s, state.jobs["a"].tokens_per_s) == (None, None)


def test_evaluations_move_the_best_and_nan_never_does() -> None:
    state = State()
    for step, loss in ((10, 2.0), (20, NAN), (30, 1.5), (40, 1.7)):
        state.apply(f.Evaluation(**at(step), job="a", step=step, val_loss=loss))
    job = state.jobs["a"]
    assert (job.val_loss, job.best_val_loss, job.best_step) == (1.7, 1.5, 30)
    assert job.val.steps() == [10, 20, 30, 40]
    assert [entry.text for entry in state.entries][2] == "val loss 1.5000 at step 30, the best so far"
    assert state.ranked() == [job]


def test_a_job_that_goes_on_from_a_checkpoint_makes_its_steps_again() -> None:
    state = State()
    for step in range(1, 60):
        state.apply(samples(float(step), "a", step))
    state.apply(f.JobState(**at(60.0), job="a", state="running", step=40))
    assert state.jobs["a"].train.steps()[-1] == 40
    state.apply(samples(61.0, "a", 41, loss=7.0))
    assert state.jobs["a"].train.points()[-1] == (41, 7.0)


def test_why_a_job_ended_is_kept() -> None:
    state = State()
    state.apply(snapshot(0.0, view("a")))
    state.apply(f.JobState(**at(1.0), job="a", state="diverged", step=31, reason="loss is not finite"))
    assert state.jobs["a"].ended
    assert state.jobs["a"].reason == "loss is not finite"
    assert [name for _, name, _ in state.jobs["a"].states] == ["running", "diverged"]
    assert state.entries[-1].level == "error"


def test_source_states_make_nothing_younger() -> None:
    state = State()
    state.apply(snapshot(10.0, view("a")))
    state.apply(f.SourceState(**at(30.0), state="lost", text="gone", since=30.0, retry_in=2.0))
    assert state.age(40.0) == 30.0
    assert not state.is_live
    assert state.jobs["a"].state == "running"
    assert state.entries[-1].text == "lost: gone"


def test_journal_is_a_ring_with_growing_numbers() -> None:
    state = State(entries_kept=10)
    for number in range(25):
        state.apply(f.Message(**at(number), level="info", text=f"line {number}"))
    assert [entry.number for entry in state.entries] == list(range(16, 26))


def test_reservations_and_queue_by_age_and_position() -> None:
    def row(id: str, state: str, **fields) -> ReservationInfo:
        values = {"gpu_uuid": "g", "budget_mb": 1, "peak_mb": None, "task": "t", "pid": 1, "user": "u"}
        return ReservationInfo(**{"id": id, "state": state, "created": 5.0, **values, **fields})

    info = NodeInfo(
        reply_to=0,
        hostname="n",
        time=1.0,
        uptime_s=1.0,
        machine="x86_64",
        python="3.12",
        gpus=[GpuInfo(uuid="g", name="G", memory_type="discrete")],
        reservations=[
            row("w2", "waiting", position=2),
            row("new", "held", created=9.0),
            row("w1", "waiting", position=1),
            row("old", "held", created=1.0),
            row("other", "held", gpu_uuid="h"),
        ],
    )
    state = State()
    state.apply(f.Snapshot(**at(1.0), nodes=(f.NodeView(node="n", state="ready", seen_s=2.0, info=info),)))
    node = state.nodes["n"]
    assert [row.id for row in node.held("g")] == ["old", "new"]
    assert [row.id for row in node.queue("g")] == ["w1", "w2"]
    assert [row.id for _, row in state.reservations()] == ["old", "other", "new", "w1", "w2"]
    assert node.heard == -1.0


def test_a_dump_builds_the_same_state() -> None:
    state = State()
    apply_all(
        state,
        [
            f.Found(**at(0.0), kind="coordinator", title="cluster lab", can=("stop",)),
            snapshot(1.0, view("a", hyper={"r": 8}, total_steps=100), view("b", "failed", reason="why")),
            f.Snapshot(**at(1.0), nodes=(f.NodeView(node="n", state="busy", jobs=2, seen_s=1.0),)),
            *(samples(float(step), "a", step, loss=1.0 / step) for step in range(1, 50)),
            f.Evaluation(**at(50.0), job="a", step=49, val_loss=NAN),
            f.SourceState(**at(51.0), state="live", since=51.0),
        ],
    )
    other = State()
    other.apply(snapshot(0.0, view("leftover")))
    apply_all(other, state.dump(51.0, 51.0))
    assert repr(other.dump(51.0, 51.0)) == repr(state.dump(51.0, 51.0))
    assert set(other.jobs) == {"a", "b"}
    assert list(other.entries) == list(state.entries)


def test_an_hour_takes_the_memory_of_a_minute() -> None:
    """A curve's arrays are as large after one point as after a hundred thousand."""
    curve = Curve(2048, reserve=True)
    curve.add(1, 1.0)
    before = len(curve._steps), len(curve._values)
    for step in range(2, 100_000):
        curve.add(step, 1.0 / step)
    assert (len(curve._steps), len(curve._values)) == before
    assert 1024 <= curve.size <= 2048
    steps = curve.steps()
    assert (steps[0], steps[-1]) == (1, 99_999)
    gaps = {b - a for a, b in pairwise(steps[:-1])}
    assert gaps == {64}  # 100,000 / 2,048, rounded up to a power of two: even over the whole length


NO_STEPS = [-1, 2**32, 10**30]


@pytest.mark.parametrize("step", NO_STEPS)
def test_a_step_that_is_none_is_left_out_of_every_curve(step: int) -> None:
    state = State()
    state.apply(samples(1.0, "a", 5))
    state.apply(samples(2.0, "a", step))
    state.apply(f.Evaluation(**at(3.0), job="a", step=step, val_loss=0.5))
    state.apply(f.Evaluation(**at(4.0), job="a", step=2**32 - 1, val_loss=0.25))
    points = tuple(sorted([(step, 9.0), (3, 2.0), (4, 1.5)]))
    state.apply(f.History(**at(5.0), job="a", train=points, val=((step, 1.0),)))
    job = state.jobs["a"]
    assert job.train.points() == [(3, 2.0), (4, 1.5), (5, 1.0)]  # 5 is not covered by the history
    assert job.val.points() == [(2**32 - 1, 0.25)]


def test_history_replaces_only_what_it_covers() -> None:
    curve = Curve(16)
    for step in (1, 2, 9, 20):
        curve.add(step, 0.0)
    curve.merge([(2, 5.0), (5, 5.0), (10, 5.0)])
    assert curve.points() == [(1, 0.0), (2, 5.0), (5, 5.0), (10, 5.0), (20, 0.0)]


def test_hyper_parameters_are_flat_and_without_files() -> None:
    spec = AdapterSpec(name="a", data="d", output_dir="o", r=4, target_modules=("q_proj", "v_proj"))
    hyper = f.hyper_of(spec)
    assert (hyper["r"], hyper["target_modules"]) == (4, "q_proj v_proj")
    assert not {"name", "data", "output_dir", "val_data"} & set(hyper)


def test_every_frame_survives_the_wire() -> None:
    """One of each: a frame that is added and not tested here fails."""
    moment = at(1.0)
    sample = f.Sample(job="a", step=1, total_steps=2, loss=NAN, time=1.0)
    entry = f.Entry(number=1, time=1.0, level="info", kind="job", text="t")
    one_of_each = [
        f.SourceState(**moment, state="live", since=1.0),
        f.Found(**moment, kind="k", title="t"),
        f.Reset(**moment),
        f.Snapshot(**moment, jobs=(view("a"),), nodes=()),
        f.JobState(**moment, job="a", state="running"),
        f.Samples(**moment, samples=(sample,)),
        f.Evaluation(**moment, job="a", step=1, val_loss=INF),
        f.Checkpoint(**moment, job="a", step=1),
        f.NodeState(**moment, node="n", state="ready"),
        f.Message(**moment, level="info", text="t"),
        f.History(**moment, job="a", train=((1, 1.0),)),
        f.Journal(**moment, entries=(entry,)),
    ]
    assert {type(frame) for frame in one_of_each} == set(f.Frame.__args__)  # type: ignore[attr-defined]
    data = msgspec.msgpack.encode(one_of_each)
    assert repr(msgspec.msgpack.decode(data, type=list[f.Frame])) == repr(one_of_each)
    state = State()
    apply_all(state, one_of_each)
