"""A sweep on a cluster, steered by rows: whatever is killed, it decides as a sweep of one machine does."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from gshare.agent.errors import GshareError
from gshare.agent.jobs.early_exit import SweepExit
from gshare.agent.jobs.sweep_records import Decision
from gshare.coordinator import sweeping
from gshare.coordinator.api_client import NoCoordinator

sys.path.insert(0, str(Path(__file__).parent / "support"))
from straw_sweep import StrawCluster
from sweep_engine import Curve, Engine


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(sweeping, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(sweeping.time, "sleep", lambda seconds: None)


def _case(seed: int) -> tuple[dict[str, Curve], SweepExit]:
    dice = random.Random(seed)
    curves = {}
    for number in range(dice.randint(2, 6)):
        steps = dice.randint(1, 12)
        exit_at = dice.randint(1, steps) if dice.random() < 0.3 else 0
        nan_at = dice.randint(2, steps) if steps > 2 and dice.random() < 0.15 else 0
        losses = tuple(round(dice.uniform(1, 3), 2) for _ in range(steps))
        curves[f"c{number}"] = Curve(losses, exit_at, nan_at)
    return curves, SweepExit(warmup=dice.choice((0.1, 0.3, 0.5)), keep=dice.choice((0.25, 0.5, 1.0)))


def _decided(decisions: list[Decision]) -> set[tuple[object, ...]]:
    keys = ("val_loss", "best_val_loss", "rank", "of", "kept", "last_kept_val_loss")
    return {
        (one.job, one.event, one.step, one.pattern, *(one.evidence.get(key) for key in keys))
        for one in decisions
        if one.event not in ("started", "resumed")
    }


def _alone(curves: dict[str, Curve], settings: SweepExit) -> tuple[str | None, set[tuple[object, ...]]]:
    engine = Engine(curves, settings, most=0, kills=0, seed=1)
    winner = engine.run().winner
    return winner, _decided(engine.decisions)


def _differ(seed: int, *, kills: int = 0, full_disks: int = 0, **fields: bool) -> bool:
    curves, settings = _case(seed)
    cluster = StrawCluster(curves, settings, seed=seed, kills=kills, full_disks=full_disks, **fields)
    winner = cluster.run(most=random.Random(seed).choice((0, 1, 3))).winner
    return (winner, _decided(cluster.decisions)) != _alone(curves, settings)


@pytest.mark.parametrize("kills", [0, 3, 20])
def test_it_decides_what_one_machine_decides(kills: int) -> None:
    """Nodes are lost all along. With kills, of the sweep and of its coordinator, as many as are said."""
    assert [seed for seed in range(150) if _differ(seed, kills=kills)] == []


def test_without_what_was_decided_before_a_kill_it_is_another_sweep() -> None:
    """Negative control: who was left behind would be taken for stopped by a person."""
    assert any(_differ(seed, kills=20, replays=False) for seed in range(150))


def test_without_early_exit_on_the_nodes_it_is_another_sweep() -> None:
    """Negative control of its transport."""
    assert any(_differ(seed, exits=False) for seed in range(150))


def test_full_disks_change_nothing() -> None:
    """Each leaves the sweep, which goes on when it is resumed."""
    assert [seed for seed in range(150) if _differ(seed, full_disks=3)] == []
    assert [seed for seed in range(150) if _differ(seed, kills=10, full_disks=3)] == []


def test_ranked_without_those_that_met_a_full_disk_it_is_another_sweep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control."""
    monkeypatch.setattr(sweeping, "is_of_machine", lambda reason: False)
    assert any(_differ(seed, full_disks=3) for seed in range(150))


def _straw(**fields: bool) -> StrawCluster:
    curves = {name: Curve(tuple(float(place) for _ in range(10))) for place, name in enumerate("abcd")}
    return StrawCluster(curves, SweepExit(warmup=0.3, keep=0.5), seed=1, **fields)


def test_a_word_is_said_once_when_it_arrives() -> None:
    cluster = _straw()
    cluster.run()
    assert sorted(cluster.asked) == [
        "ResumeClusterJobs a",
        "ResumeClusterJobs b",
        "StopClusterJobs c",
        "StopClusterJobs d",
        *(f"submit {name}" for name in "abcd"),
    ]
    assert cluster.looks > 2  # who waits may be told why after each
    reasons = {name: job.reason for name, job in cluster.jobs.items() if job.state == "stopped"}
    assert reasons["c"].startswith("underperformance at step 3: validation loss 2 is number 3 of 4")


def test_a_person_pauses_resumes_and_stops_as_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gshare jobs … --cluster` changes the rows; the sweep sees that it was not its own word."""
    cluster = _straw()
    script = iter(("pause", "resume", "stop"))
    poll = cluster.poll

    def steered(timeout: float) -> list[object]:
        told = poll(timeout)
        job = cluster.jobs.get("a")
        events = [one.event for one in cluster.decisions if one.job == "a"]
        if job is not None and job.state == "running" and job.step == 1 and events == ["started"]:
            assert next(script) == "pause"
            job.state = "paused"
        elif job is not None and events == ["started", "paused"] and job.state == "paused":
            assert next(script) == "resume"
            job.state = "running"
        elif job is not None and events == ["started", "paused", "resumed"] and job.parked:
            assert next(script) == "stop"
            job.state, job.parked, job.reason = "stopped", False, "stopped by its user"
        return told

    monkeypatch.setattr(cluster, "poll", steered)
    sweep = cluster.run()
    mine = [(one.event, one.step, one.pattern, one.reason) for one in cluster.decisions if one.job == "a"]
    assert mine == [
        ("started", 0, "", ""),
        ("paused", 1, "", "by the user"),
        ("resumed", 1, "", "by the user"),
        ("stopped", 3, "user", "stopped by its user"),
    ]
    chosen = {one.job for one in cluster.decisions if one.event == "selected"}
    assert (chosen, sweep.winner) == ({"b", "c"}, "a")


def test_let_go_on_by_a_person_nobody_s_rank_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = _straw()
    poll = cluster.poll

    def steered(timeout: float) -> list[object]:
        job = cluster.jobs.get("d")
        noted = any((one.job, one.event) == ("d", "paused") for one in cluster.decisions)
        if job is not None and noted and not job.past:
            job.parked, job.past, job.state = False, True, "waiting"
        return poll(timeout)

    monkeypatch.setattr(cluster, "poll", steered)
    monkeypatch.setattr(
        cluster._dice, "choice", lambda names: "d" if not cluster.jobs["d"].past else random.choice(names)
    )
    cluster.run()
    by_hand = next(one for one in cluster.decisions if (one.job, one.event) == ("d", "selected"))
    assert by_hand.reason == "resumed by the user"
    assert cluster.jobs["d"].state == "completed"


def test_a_job_that_failed_in_an_earlier_life_is_tried_again() -> None:
    cluster = _straw()
    cluster.run()
    job = cluster.jobs["b"]
    job.state, job.step, job.reason = "failed", 5, "disk full"
    cluster.decisions = [one for one in cluster.decisions if (one.job, one.event) != ("b", "completed")]
    cluster.decisions.append(Decision(time=0.0, job="b", event="failed", step=5))
    cluster.asked.clear()
    resumed = []

    def answer(make: type, fields: dict[str, object]) -> object:
        if make is sweeping.ResumeClusterJobs:
            resumed.append(fields["jobs"])
            job.state = "waiting"
        return StrawCluster._answer(cluster, make, fields)

    cluster._answer = answer  # type: ignore[method-assign]
    assert cluster.run().winner == "a"
    assert (resumed, job.state) == ([["b"]], "completed")


def test_a_coordinator_that_does_not_come_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(sweeping.time, "monotonic", lambda: float(next(clock)))
    cluster = _straw()

    def gone() -> StrawCluster:
        raise NoCoordinator(Path("/nowhere"))

    monkeypatch.setattr(StrawCluster, "__enter__", lambda self: gone())
    with pytest.raises(GshareError, match=r"no coordinator has answered for 60 s.*go on with --resume"):
        cluster.run()
