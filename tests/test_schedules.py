"""The four schedules: exact orders, starvation, shares, determinism."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from gshare.agent.errors import UsageError
from gshare.agent.jobs.schedules import JobView, PriorityValLoss, Schedule, make_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = ["synchronized", "round_robin", "priority_val_loss", "fair"]


@dataclass
class Job:
    tokens: int = 100
    weight: float = 1.0
    client: str = "local"
    loss: float | None = None
    steps: int = 0
    served: int = 0
    paused: bool = False


@dataclass
class Bench:
    """Runs a schedule as the runner does. Jobs are admitted in the order of `jobs`."""

    schedule: Schedule
    jobs: dict[str, Job]
    max_tokens: int = 1000
    max_adapters: int = 0
    orders: dict[str, int] = field(default_factory=dict)

    def views(self) -> list[JobView]:
        for name in self.jobs:
            self.orders.setdefault(name, max(self.orders.values(), default=-1) + 1)
        return [
            JobView(name, job.client, job.weight, self.orders[name], job.steps, job.tokens, job.loss)
            for name, job in self.jobs.items()
            if not job.paused
        ]

    def round(self) -> list[str]:
        limits = {"max_tokens": self.max_tokens, "max_adapters": self.max_adapters}
        chosen = self.schedule.next_round(self.views(), **limits)
        assert chosen == self.schedule.next_round(self.views()[::-1], **limits), "asking twice changed it"
        for name in chosen:
            self.jobs[name].steps += 1
            self.jobs[name].served += self.jobs[name].tokens
            self.schedule.ran(name, self.jobs[name].tokens)
        return chosen

    def rounds(self, n: int) -> str:
        """n rounds as text: "ab c" is a and b fused, then c."""
        return " ".join("".join(self.round()) for _ in range(n))

    def leave(self, name: str) -> None:
        del self.jobs[name]
        self.orders.pop(name, None)
        self.schedule.forget(name)


def bench(name: str, jobs: dict[str, Job], **limits: int) -> Bench:
    return Bench(make_schedule(name), jobs, **limits)


# synchronized


def test_synchronized_steps_everybody_whatever_the_limits() -> None:
    it = bench("synchronized", {"b": Job(900), "a": Job(900), "c": Job(5, loss=math.nan)}, max_adapters=1)
    assert it.rounds(2) == "bac bac"
    it.jobs["d"] = Job()
    it.jobs["a"].paused = True
    assert it.rounds(2) == "bcd bcd"
    it.jobs["a"].paused = False
    it.leave("b")
    assert it.rounds(1) == "acd"


# round_robin


def test_round_robin_of_sets_of_one() -> None:
    it = bench("round_robin", {"a": Job(), "b": Job(), "c": Job()}, max_adapters=1)
    assert it.rounds(7) == "a b c a b c a"


def test_round_robin_rotates_the_sets_that_fit() -> None:
    it = bench("round_robin", {"a": Job(400), "b": Job(400), "c": Job(400)})
    assert it.rounds(5) == "ab ca bc ab ca"


def test_round_robin_does_not_reach_past_the_first_that_does_not_fit_and_runs_a_giant_alone() -> None:
    it = bench("round_robin", {"a": Job(600), "b": Job(5000), "c": Job(300)})
    assert it.rounds(4) == "a b ca b"


def test_round_robin_joins_leaves_and_pauses() -> None:
    it = bench("round_robin", {"a": Job(), "b": Job(), "c": Job()}, max_adapters=1)
    assert it.rounds(1) == "a"
    it.jobs["d"] = Job()  # joins behind a, which has just run
    it.jobs["b"].paused = True
    assert it.rounds(4) == "c a d c"
    it.jobs["b"].paused = False
    assert it.rounds(3) == "b a d"
    it.leave("a")
    assert it.rounds(4) == "c b d c"


# priority_val_loss


def test_priority_before_the_first_evaluation_takes_turns() -> None:
    it = bench("priority_val_loss", {"a": Job(), "b": Job(), "c": Job()})
    assert it.rounds(5) == "a b c a b"


def test_priority_goes_to_the_highest_loss_and_never_evaluated_come_first() -> None:
    it = bench("priority_val_loss", {"a": Job(loss=1.0), "b": Job(loss=3.0), "c": Job(loss=2.0)})
    assert it.rounds(3) == "b b b"
    it.jobs["b"].loss = 1.5
    assert it.rounds(2) == "c c"
    it.jobs["d"] = Job()
    assert it.rounds(2) == "d d"
    it.jobs["d"].loss = 0.1
    assert it.rounds(1) == "c"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_priority_puts_a_non_finite_loss_last(bad: float) -> None:
    it = bench("priority_val_loss", {"a": Job(loss=bad), "b": Job(loss=0.5)})
    assert it.rounds(7) == "b b b b b b b"


def test_priority_exact_order_with_ageing() -> None:
    # Two jobs: after 8 rounds of b, a is due once.
    it = bench("priority_val_loss", {"a": Job(loss=1.0), "b": Job(loss=2.0)})
    assert it.rounds(18) == "b b b b b b b b a b b b b b b b b a"


def test_priority_with_a_diverged_job_taken_out_and_a_pause() -> None:
    it = bench("priority_val_loss", {"a": Job(loss=1.0), "b": Job(loss=9.0), "c": Job(loss=2.0)})
    assert it.rounds(2) == "b b"
    it.leave("b")  # diverged
    assert it.rounds(2) == "c c"
    it.jobs["a"].paused = True  # a paused job does not age
    assert it.rounds(20) == " ".join("c" * 20)
    it.jobs["a"].paused = False
    assert it.rounds(1) == "c"


# fair


def test_fair_equal_jobs_run_fused_every_round() -> None:
    it = bench("fair", {"a": Job(), "b": Job(), "c": Job()})
    assert it.rounds(3) == "abc abc abc"


def test_fair_weight_two_takes_part_twice_as_often() -> None:
    it = bench("fair", {"a": Job(weight=1.0), "b": Job(weight=2.0)})
    assert it.rounds(6) == "ba b ba b ba b"


def test_fair_short_rows_step_more_often_than_long_ones() -> None:
    it = bench("fair", {"L": Job(400), "s": Job(100)})
    assert it.rounds(8) == "s s sL s s s sL s"


def test_fair_sets_of_one() -> None:
    it = bench("fair", {"a": Job(100, weight=2.0), "b": Job(100), "c": Job(200)}, max_adapters=1)
    assert it.rounds(10) == "a a b a a b c a a b"


def test_fair_diverged_and_joining_jobs() -> None:
    it = bench("fair", {"a": Job(), "b": Job()})
    it.rounds(50)
    it.leave("a")  # diverged
    assert it.rounds(2) == "b b"
    it.jobs["c"] = Job()  # starts level with b: no credit for the 52 rounds before
    assert it.rounds(3) == "bc bc bc"
    it.jobs["c"].paused = True
    it.rounds(40)
    it.jobs["c"].paused = False  # nor for its pause
    assert it.rounds(3) in ("bc bc bc", "cb cb cb")


def shares(it: Bench, names: list[str], rounds: int) -> list[float]:
    before = {name: it.jobs[name].served for name in names}
    for _ in range(rounds):
        it.round()
    served = [it.jobs[name].served - before[name] for name in names]
    return [tokens / sum(served) for tokens in served]


def test_fair_is_fair_between_clients_first_then_by_weight_inside() -> None:
    jobs = {
        "a": Job(50, client="x"),
        "b": Job(120, client="y", weight=3.0),
        "c": Job(70, client="y"),
        "d": Job(90, client="y", weight=100.0),
    }
    it = bench("fair", jobs)
    a, b, c, d = shares(it, list("abcd"), 20000)
    assert a == pytest.approx(0.5, rel=0.05)
    assert (b / c, d / b) == pytest.approx((3.0, 100.0 / 3.0), rel=0.05)


def test_fair_negative_control_round_robin_is_not_fair_in_tokens() -> None:
    it = bench("round_robin", {"a": Job(10), "b": Job(900)})
    assert shares(it, ["a", "b"], 1000)[0] < 0.05


weights = st.sampled_from([0.25, 0.5, 1.0, 1.0, 2.0, 5.0])
lengths = st.integers(5, 2000)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(lengths, weights), min_size=2, max_size=6), st.integers(0, 3), st.integers(0, 200))
def test_fair_shares_are_within_5_percent_of_the_weights_over_any_long_window(
    jobs: list[tuple[int, float]], max_adapters: int, warm: int
) -> None:
    names = [f"j{i}" for i in range(len(jobs))]
    it = bench(
        "fair",
        {name: Job(tokens, weight) for name, (tokens, weight) in zip(names, jobs, strict=True)},
        max_adapters=max_adapters,
    )
    for _ in range(warm):
        it.round()
    # Long: every job gets at least 40 of its own steps.
    before = {name: (job.steps, job.served) for name, job in it.jobs.items()}
    while any(job.steps - before[name][0] < 40 for name, job in it.jobs.items()):
        it.round()
    got = {name: job.served - before[name][1] for name, job in it.jobs.items()}
    for name, job in it.jobs.items():
        assert got[name] / sum(got.values()) == pytest.approx(
            job.weight / sum(other.weight for other in it.jobs.values()), rel=0.05
        )


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(0, 2**16))
def test_fair_holds_its_bound_when_row_lengths_change_every_step(data: st.DataObject, seed: int) -> None:
    rng = random.Random(seed)
    jobs = {f"j{i}": Job(weight=data.draw(weights)) for i in range(data.draw(st.integers(2, 5)))}
    it = bench("fair", jobs, max_adapters=data.draw(st.integers(0, 3)))
    bound = max(2000 / job.weight for job in jobs.values())
    for _ in range(300):
        for name in it.round():
            jobs[name].tokens = rng.randint(1, 2000)
        clocks = [job.served / job.weight for job in jobs.values()]
        assert max(clocks) - min(clocks) <= bound + 1e-6


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_rounds_are_valid_whatever_joins_leaves_and_pauses(name: str, data: st.DataObject) -> None:
    it = bench(name, {}, max_adapters=data.draw(st.integers(0, 3)))
    again = bench(name, it.jobs, max_adapters=it.max_adapters)  # determinism: a twin sees the same jobs
    again.orders = it.orders
    for number in range(data.draw(st.integers(1, 25))):
        event = data.draw(st.sampled_from(["join", "join", "leave", "pause", "none"]))
        if event == "join" or not it.jobs:
            it.jobs[f"j{number}"] = Job(
                data.draw(lengths),
                data.draw(weights),
                data.draw(st.sampled_from("xy")),
                data.draw(st.none() | st.floats(allow_nan=True)),
            )
        elif event == "leave":
            gone = data.draw(st.sampled_from(sorted(it.jobs)))
            again.schedule.forget(gone)
            it.leave(gone)
        elif event == "pause":
            job = it.jobs[data.draw(st.sampled_from(sorted(it.jobs)))]
            job.paused = not job.paused
        limits = {"max_tokens": it.max_tokens, "max_adapters": it.max_adapters}
        twin = again.schedule.next_round(it.views(), **limits)
        chosen = it.round()
        assert chosen == twin
        for ran in twin:
            again.schedule.ran(ran, it.jobs[ran].tokens)
        runnable = {view.name for view in it.views()}
        assert set(chosen) <= runnable
        assert len(set(chosen)) == len(chosen)
        assert bool(chosen) == bool(runnable)
        if name != "synchronized" and len(chosen) > 1:
            assert sum(it.jobs[ran].tokens for ran in chosen) <= it.max_tokens
            assert it.max_adapters == 0 or len(chosen) <= it.max_adapters


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.lists(st.tuples(lengths, st.none() | st.floats()), min_size=1, max_size=6))
def test_nobody_starves(name: str, jobs: list[tuple[int, float | None]]) -> None:
    it = bench(
        name, {f"j{i}": Job(tokens, loss=loss) for i, (tokens, loss) in enumerate(jobs)}, max_adapters=1
    )
    n = len(jobs)
    # fair: every n rounds each other job catches up by at least its own step; 2000 is the longest row.
    longest = 1 if name == "synchronized" else n
    if name == "priority_val_loss":
        longest = (PriorityValLoss.AGE + 1) * n
    if name == "fair":
        longest = 1 + sum(2 * 2000 // tokens + 1 for tokens, _ in jobs)
    waited = dict.fromkeys(it.jobs, 0)
    for _ in range(4 * longest):
        chosen = it.round()
        waited = {job: 0 if job in chosen else rounds + 1 for job, rounds in waited.items()}
        assert max(waited.values()) < longest


def test_negative_control_without_ageing_the_lowest_loss_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PriorityValLoss, "AGE", 10**9)
    it = bench("priority_val_loss", {"a": Job(loss=1.0), "b": Job(loss=2.0)})
    for _ in range(1000):
        it.round()
    assert it.jobs["a"].steps == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_job_that_ends_in_the_middle_of_its_round_leaves_nothing_behind(name: str) -> None:
    it = bench(name, {"a": Job(loss=2.0), "b": Job(loss=1.0)})
    it.rounds(1)
    it.leave("a")
    it.schedule.ran("a", 100)
    assert it.rounds(2) == "b b"
    it.jobs["a"] = Job(loss=2.0)  # the same name again is a new job
    fresh = bench(name, {"b": Job(loss=1.0), "a": Job(loss=2.0)})
    assert it.rounds(3) == fresh.rounds(3)


def test_unknown_schedule_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean 'round_robin'"):
        make_schedule("roundrobin")
