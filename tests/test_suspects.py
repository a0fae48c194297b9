"""The supervising client's state machine: poisonous jobs fail, all others complete, restarts are bounded."""

from __future__ import annotations

import random

import pytest
from gshare.agent.jobs.suspects import (
    FOREIGN_DEATHS,
    STRIKES,
    Action,
    Added,
    Admit,
    Begin,
    Died,
    Ended,
    GiveUp,
    Hold,
    MarkFailed,
    Passed,
    StartTrainer,
    Suspects,
    restart_bound,
)
from hypothesis import given, settings
from hypothesis import strategies as st


def started(*jobs: str) -> Suspects:
    machine = Suspects(jobs)
    assert machine.handle(Begin()) == [StartTrainer(jobs, alone=False)]
    return machine


def test_suspects_run_alone_one_after_the_other_then_the_rest_is_admitted() -> None:
    machine = started("a", "b", "c", "d")
    assert machine.handle(Died((("b", 7), ("c", 3)))) == [StartTrainer(("b",), alone=True)]
    assert machine.handle(Passed("b", 7)) == []  # the step it died at is not enough: one more
    assert machine.handle(Passed("b", 8)) == [Hold("b"), Admit(("c",))]
    assert machine.alone == "c"
    assert machine.handle(Passed("c", 4)) == [Admit(("a", "d"), unpause=("b",))]
    assert machine.alone is None


def test_who_dies_alone_is_failed_and_the_next_suspect_gets_its_turn() -> None:
    machine = started("a", "b", "c")
    machine.handle(Died((("a", 5), ("b", 5))))
    actions = machine.handle(Died((("a", 5),), "killed by SIGSEGV"))
    reason = "the trainer died at step 5 of this job, running alone (killed by SIGSEGV)"
    assert actions == [MarkFailed("a", reason), StartTrainer(("b",), alone=True)]
    assert machine.handle(Passed("b", 6)) == [Admit(("c",))]


def test_one_death_in_flight_alone_is_not_enough_to_fail() -> None:
    machine = started("a", "b")
    assert machine.handle(Died((("a", 1),))) == [StartTrainer(("a",), alone=True)]
    assert machine.handle(Died((("a", 1),)))[0] == MarkFailed(
        "a", "the trainer died at step 1 of this job, running alone"
    )


def test_a_job_that_was_not_in_flight_is_never_tried_alone() -> None:
    machine = started("a", "b")
    machine.handle(Died((("a", 1),)))
    assert machine.handle(Passed("a", 2)) == [Admit(("b",))]


def test_a_suspect_that_ends_on_probation_is_cleared() -> None:
    machine = started("a", "b", "c")
    machine.handle(Died((("a", 9), ("b", 9))))
    assert machine.handle(Ended("a")) == [Admit(("b",))]
    assert machine.handle(Ended("b")) == [Admit(("c",))]
    assert machine.handle(Ended("c")) == []
    assert machine.done


def test_two_idle_deaths_in_a_row_give_up_and_a_step_in_between_starts_the_count_again() -> None:
    machine = started("a", "b")
    assert machine.handle(Died(())) == [StartTrainer(("a", "b"), alone=False)]
    assert machine.handle(Passed("a", 1)) == []
    assert machine.handle(Died(())) == [StartTrainer(("a", "b"), alone=False)]
    (action,) = machine.handle(Died((), "exit code 1"))
    assert isinstance(action, GiveUp)
    assert action.jobs == ("a", "b")
    assert "2 times in a row with no step in flight (exit code 1)" in action.reason
    assert machine.done
    assert machine.handle(Died(())) == []


def test_jobs_that_only_crash_together_end_up_isolated() -> None:
    machine = started("a", "b", "c")
    for _ in range(STRIKES - 1):
        assert machine.handle(Died((("a", 1), ("b", 1)))) == [StartTrainer(("a",), alone=True)]
        assert machine.handle(Passed("a", 2)) == [Hold("a"), Admit(("b",))]
        assert machine.handle(Passed("b", 2)) == [Admit(("c",), unpause=("a",))]
    assert machine.handle(Died((("a", 1), ("b", 1)))) == [StartTrainer(("c",), alone=False)]
    assert machine.handle(Ended("c")) == [Admit(("a",))]
    assert machine.alone == "a"
    assert machine.handle(Ended("a")) == [Admit(("b",))]


def test_other_clients_jobs_in_flight_are_not_ours_to_judge_but_not_for_ever() -> None:
    machine = started("a")
    for _ in range(FOREIGN_DEATHS - 1):
        assert machine.handle(Died((("theirs", 3),))) == [StartTrainer(("a",), alone=False)]
    (action,) = machine.handle(Died((("theirs", 3),)))
    assert isinstance(action, GiveUp)


def simulate(
    totals: dict[str, int],
    poison: dict[str, int],
    *,
    seed: int,
    save_steps: int,
    pairs: frozenset[frozenset[str]] = frozenset(),
    parks: dict[str, int] | None = None,
    machine: type[Suspects] = Suspects,
) -> tuple[set[str], set[str], int]:
    """A trainer that dies when a poisonous job reaches its step, or two of a pair step together.

    Random subsets step in each round; a restart goes back to the last multiple of `save_steps`. A job of
    `parks` pauses after that step, saved, and is added again some time later.
    Returns (completed, failed, trainers started).
    """
    rng = random.Random(seed)
    client = machine(list(totals))
    saved = dict.fromkeys(totals, 0)
    running: dict[str, int] = {}
    held: set[str] = set()
    completed: set[str] = set()
    failed: set[str] = set()
    parked: set[str] = set()
    trainers = 0
    pending = client.handle(Begin())
    while True:
        for action in pending:
            if isinstance(action, StartTrainer):
                trainers += 1
                assert trainers <= restart_bound(len(totals)), "too many trainers"
                running = {job: saved[job] for job in action.jobs}
                held = set()
            elif isinstance(action, Hold):
                held |= {action.job} & set(running)  # it may have parked meanwhile
            elif isinstance(action, Admit):
                assert not set(action.submit) & set(running), "submitted twice"
                assert set(action.unpause) <= held
                running |= {job: saved[job] for job in action.submit}
                held -= set(action.unpause)
            elif isinstance(action, MarkFailed):
                failed.add(action.job)
            else:
                pytest.fail(f"gave up: {action}")
        assert not (set(running) & failed), "a failed job runs again"
        if parked and (client.done or rng.random() < 0.3):
            job = parked.pop()
            pending = client.handle(Added(job))
            continue
        if client.done:
            return completed, failed, trainers
        runnable = sorted(set(running) - held)
        assert runnable, "nothing runs and the machine is not done: stuck"
        if client.alone is not None:
            assert runnable == [client.alone]
        flight = rng.sample(runnable, rng.randint(1, len(runnable)))
        pending = []
        if any(poison.get(job) == running[job] + 1 for job in flight) or any(
            pair <= set(flight) for pair in pairs
        ):
            pending = client.handle(Died(tuple((job, running[job] + 1) for job in flight)))
            running = {}
            continue
        for job in flight:
            running[job] += 1
            if running[job] % save_steps == 0:
                saved[job] = running[job]
            pending += client.handle(Passed(job, running[job]))
            if running[job] == (parks or {}).get(job):
                saved[job] = running.pop(job)
                held.discard(job)
                parked.add(job)
                pending += client.handle(Ended(job))
                continue
            if running[job] == totals[job]:
                del running[job]
                completed.add(job)
                pending += client.handle(Ended(job))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_exactly_the_poisonous_jobs_fail_within_the_bound_of_restarts(data: st.DataObject) -> None:
    names = [f"job{i}" for i in range(data.draw(st.integers(1, 7), "jobs"))]
    totals = {name: data.draw(st.integers(1, 12), name) for name in names}
    poisonous = data.draw(st.sets(st.sampled_from(names)), "poisonous")
    poison = {name: data.draw(st.integers(1, totals[name]), f"poison {name}") for name in sorted(poisonous)}
    completed, failed, _ = simulate(
        totals,
        poison,
        seed=data.draw(st.integers(0, 2**16), "seed"),
        save_steps=data.draw(st.sampled_from([1, 3, 100]), "save"),
    )
    assert failed == poisonous
    assert completed == set(names) - poisonous


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_jobs_that_pause_and_are_added_again_change_nothing(data: st.DataObject) -> None:
    names = [f"job{i}" for i in range(data.draw(st.integers(2, 6), "jobs"))]
    totals = {name: data.draw(st.integers(2, 8), name) for name in names}
    parks = {name: data.draw(st.integers(1, totals[name] - 1), f"park {name}") for name in names}
    poisonous = data.draw(st.sets(st.sampled_from(names)), "poisonous")
    poison = {name: data.draw(st.integers(1, totals[name]), f"poison {name}") for name in sorted(poisonous)}
    pairs = data.draw(st.sets(st.frozensets(st.sampled_from(names), min_size=2, max_size=2), max_size=2))
    completed, failed, _ = simulate(
        totals,
        poison,
        seed=data.draw(st.integers(0, 2**16), "seed"),
        save_steps=data.draw(st.sampled_from([1, 3, 100]), "save"),
        pairs=frozenset(pairs),
        parks=parks,
    )
    assert failed == poisonous
    assert completed == set(names) - poisonous


def test_who_is_added_during_a_trial_waits_for_its_end() -> None:
    machine = started("a", "b")
    assert machine.handle(Ended("a")) == []
    assert machine.handle(Died((("b", 3),))) == [StartTrainer(("b",), alone=True)]
    assert machine.handle(Added("a")) == []
    assert machine.handle(Passed("b", 4)) == [Admit(("a",))]


def test_the_last_one_may_be_added_after_all_had_ended() -> None:
    machine = started("a")
    machine.handle(Ended("a"))
    assert machine.done
    assert machine.handle(Added("a")) == [Admit(("a",))]
    assert not machine.done


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**16), st.sampled_from([1, 100]))
def test_jobs_that_crash_only_together_all_complete(seed: int, save_steps: int) -> None:
    totals = {"a": 6, "b": 6, "c": 9, "d": 2}
    pairs = frozenset({frozenset({"a", "b"}), frozenset({"b", "c"})})
    completed, failed, _ = simulate(totals, {}, seed=seed, save_steps=save_steps, pairs=pairs)
    assert (completed, failed) == (set(totals), set())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.tuples(st.sampled_from(["a", "b", "c", "x"]), st.integers(0, 5)), max_size=4)))
def test_any_sequence_of_breadcrumbs_ends_within_the_bound(deaths: list[list[tuple[str, int]]]) -> None:
    machine = Suspects(["a", "b", "c"])
    machine.handle(Begin())
    starts = 1
    for in_flight in deaths * 40:
        starts += sum(isinstance(a, StartTrainer) for a in machine.handle(Died(tuple(in_flight))))
    assert starts <= restart_bound(3) + 2 * FOREIGN_DEATHS
    if deaths:
        assert machine.done


class BlamesEveryone(Suspects):
    """Fails every job in flight at the first death."""

    def _died(self, event: Died) -> list[Action]:
        failed: list[Action] = [MarkFailed(job, "in flight") for job, _ in event.in_flight]
        for job, _ in event.in_flight:
            self._ended_dead(job)
        return failed + ([self._start()] if self._alive else [])


class BlamesNobody(Suspects):
    """Restarts everybody each time."""

    def _died(self, event: Died) -> list[Action]:
        return [self._start()]


def test_negative_controls_wrong_machines_are_caught_by_the_simulation() -> None:
    totals = {"a": 5, "b": 5, "c": 5}
    outcomes = [
        simulate(totals, {"b": 4}, seed=seed, save_steps=100, machine=BlamesEveryone) for seed in range(20)
    ]
    assert any(failed != {"b"} for _, failed, _ in outcomes)
    with pytest.raises(AssertionError, match="too many trainers"):
        simulate(totals, {"b": 4}, seed=0, save_steps=100, machine=BlamesNobody)
