"""The rules of the cluster machine, one by one; any mixture of them is in test_cluster_properties.py."""

from __future__ import annotations

import ast
import math
import sys
from pathlib import Path

import pytest
from gshare.agent.node.protocol import AttemptStatus
from gshare.coordinator.actions import CheckBest, Forget, Pause, Place, Publish, PullCheckpoint, Start, Stop
from gshare.coordinator.events import (
    AttemptChanged,
    BestSeen,
    BroughtHome,
    Evaluation,
    HoldPlacement,
    NodeBeat,
    NodeDown,
    NodeRemoved,
    NodeUp,
    PauseJob,
    Published,
    PublishFailed,
    ResumeJob,
    StartFailed,
    StopJob,
    Submit,
)
from gshare.coordinator.transfers import Limits

sys.path.insert(0, str(Path(__file__).parent / "support"))
from cluster_model import Model, facts, gpu_node

ROOT = Path(__file__).resolve().parent.parent
PURE = ("cluster", "attempts", "transfers", "placement", "slots", "speeds", "node_state", "leaderboard")
PURE += ("expecting", "events", "actions", "facts")


@pytest.mark.parametrize("module", PURE)
def test_the_machines_know_no_clock_file_or_socket(module: str) -> None:
    tree = ast.parse((ROOT / "coordinator" / f"{module}.py").read_text())
    imported = set()
    for part in ast.walk(tree):
        if isinstance(part, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in part.names}
        elif isinstance(part, ast.ImportFrom):
            imported.add((part.module or "").split(".")[0])
    assert not imported & {"time", "os", "socket", "asyncio", "pathlib", "random", "threading", "subprocess"}


def model_of(*names: str, **limits: object) -> Model:
    values = {"lost_after_s": 60.0, "settle_s": 0.0, "fault_delay_s": 1.0, **limits}
    model = Model([gpu_node(name) for name in names], Limits(**values))  # pyright: ignore[reportArgumentType]
    for name in names:
        model.connect(name)
    return model


def running(model: Model, name: str = "j") -> str:
    """Submits a job and lets it run; its node."""
    model.tell(Submit(facts=facts(name)))
    node = model.cluster.jobs[name].node
    model.work(node)
    model.advance(node, next(a for a in model.agents[node].values() if a.job == name))
    while model.mail:
        model.deliver(model.mail.pop(0))
    assert model.state(name) == "running"
    return node


def status(job: str, attempt: int, state: str, **changes: object) -> AttemptStatus:
    return AttemptStatus(owner="me", job=job, attempt=attempt, state=state, **changes)  # pyright: ignore


def test_a_job_goes_from_submission_to_its_output_directory() -> None:
    model = model_of("a")
    node = running(model)
    say = lambda event: [a for a in model.tell(event) if not hasattr(a, "level")]  # noqa: E731
    assert say(AttemptChanged(node=node, status=status("j", 1, "running", checkpoint_step=5))) == [
        PullCheckpoint(node="a", job="j", attempt=1)
    ]
    done = AttemptChanged(node=node, status=status("j", 1, "completed", step=9))
    assert say(done) == [Publish(node="a", job="j", attempt=1)]
    home = BroughtHome(job="j", attempt=1, val_loss=0.5, best_step=4)
    assert say(home) == [Place(job="j", attempt=1)]
    ended, forget = say(Published(job="j", attempt=1))
    assert (ended.state, forget) == ("completed", Forget(node="a", job="j", attempt=1))
    assert (model.cluster.jobs["j"].best_val_loss, model.cluster.jobs["j"].published) == (0.5, 1)
    # All of it again changes nothing.
    assert [say(event) for event in (home, Published(job="j", attempt=1))] == [[], []]
    assert say(done) == [Forget(node="a", job="j", attempt=1)]


def test_a_silent_node_keeps_its_jobs_for_a_while() -> None:
    model = model_of("a", "b")
    node = running(model)
    other = "b" if node == "a" else "a"
    for _ in range(5):
        model.tick(10)
        model.beat(other)
    assert model.cluster.nodes[node].state == "unreachable"
    assert model.cluster.jobs["j"].node == node
    model.connect(node)
    assert (model.state("j"), model.cluster.jobs["j"].attempt) == ("running", 1)


def test_a_partition_that_heals_after_the_restart_stops_the_old_attempt() -> None:
    model = model_of("a", "b")
    node = running(model)
    other = "b" if node == "a" else "a"
    model.disconnect(node)
    model.tick(61)
    model.connect(other)  # the tick made it unreachable too: its heartbeats are ours to send
    job = model.cluster.jobs["j"]
    assert (job.node, job.attempt) == (other, 2)
    actions = model.tell(NodeUp(node=node, info=model.info(node), attempts=(status("j", 1, "running"),)))
    assert [a for a in actions if isinstance(a, Stop)] == [
        Stop(node=node, job="j", attempt=1, reason="attempt 2 is the current one, the job is starting")
    ]
    over = model.tell(AttemptChanged(node=node, status=status("j", 1, "completed")))
    assert over == [Forget(node=node, job="j", attempt=1)]
    assert model.state("j") == "starting"


def test_a_lost_node_that_returns_first_goes_on_with_its_attempt() -> None:
    model = model_of("a")
    running(model)
    model.disconnect("a")
    model.tick(61)
    assert (model.cluster.nodes["a"].state, model.state("j")) == ("lost", "waiting")
    model.connect("a")
    assert (model.state("j"), model.cluster.jobs["j"].attempt) == ("running", 1)


def test_a_node_that_returns_empty_gets_the_attempt_again() -> None:
    model = model_of("a")
    running(model)
    model.disconnect("a")
    model.agents["a"].clear()
    actions = model.tell(NodeUp(node="a", info=model.info("a")))
    assert [(a.job, a.attempt) for a in actions if isinstance(a, Start)] == [("j", 1)]


def test_a_removed_node_gives_its_jobs_away_at_once() -> None:
    model = model_of("a", "b")
    node = running(model)
    actions = model.tell(NodeRemoved(node=node))
    assert [a.attempt for a in actions if isinstance(a, Start)] == [2]
    assert model.cluster.jobs["j"].node != node


def test_faults_of_nodes_are_bounded_delayed_and_avoided() -> None:
    model = model_of("a", "b", faults=3, fault_delay_s=1.0)
    seen = []
    model.tell(Submit(facts=facts("j")))
    for _ in range(3):
        job = model.cluster.jobs["j"]
        seen.append(job.node)
        model.tell(StartFailed(node=job.node, job="j", attempt=job.attempt, reason="disk full"))
        assert model.cluster.jobs["j"].node == ""
        model.tick(0.5)
        assert model.cluster.jobs["j"].node == ""  # not before its delay is over
        model.tick(10)
    assert seen[0] != seen[1]
    assert (model.state("j"), model.cluster.jobs["j"].attempt) == ("failed", 3)
    assert model.cluster.jobs["j"].reason.startswith("3 attempts failed by their nodes' fault, the last on ")


def test_a_jobs_own_failure_ends_it() -> None:
    model = model_of("a")
    running(model)
    model.tell(AttemptChanged(node="a", status=status("j", 1, "failed", reason="row 3 is no JSON")))
    assert (model.state("j"), model.cluster.jobs["j"].reason) == ("failed", "row 3 is no JSON")
    assert model.tell(ResumeJob(job="j"))[-1] == Start(
        node="a", gpu="GPU-a-0", job="j", attempt=2, budget_mb=3000
    )


def test_disk_full_at_home_keeps_the_files_and_tries_again() -> None:
    model = model_of("a", publish_delay_s=30.0)
    running(model)
    model.tell(AttemptChanged(node="a", status=status("j", 1, "completed")))
    model.tell(PublishFailed(job="j", attempt=1, reason="/out: no space left", retry=True))
    assert "/out: no space left; nothing is lost" in model.said[-1]
    assert model.tell(NodeBeat(node="a", info=model.info("a"))) == []
    model.outbox.clear()
    model.tick(31)
    assert Publish(node="a", job="j", attempt=1) in model.outbox.values()


def test_a_job_at_home_needs_its_node_no_longer() -> None:
    model = model_of("a")
    running(model)
    model.tell(AttemptChanged(node="a", status=status("j", 1, "completed")))
    model.tell(BroughtHome(job="j", attempt=1))
    model.disconnect("a")
    model.tick(61)
    assert model.state("j") == "placing"
    model.tell(Published(job="j", attempt=1))
    assert model.state("j") == "completed"


def test_users_stop_pause_and_resume() -> None:
    model = model_of("a")
    running(model)
    assert model.tell(PauseJob(job="j")) == [Pause(node="a", job="j", attempt=1)]
    model.settle()
    assert model.state("j") == "paused"
    model.tell(ResumeJob(job="j"))
    model.tell(StopJob(job="j"))
    model.work("a")
    assert not model.cluster.still_wanted(Start(node="a", gpu="", job="j", attempt=1, budget_mb=1))
    model.settle()
    assert model.ended[-1] == ("j", "stopped")
    model.tell(ResumeJob(job="j"))
    model.settle()
    assert model.placed == {("j", "first"): [2]}


def test_a_name_in_use_is_refused_and_the_same_order_is_one() -> None:
    model = model_of("a")
    running(model)
    assert model.tell(Submit(facts=facts("j"))) == []
    other = facts("j", submission="second")
    fault = model.cluster.submit_fault(other)
    assert fault == "job j is running: stop it first, or give the new one another name"
    (said,) = model.tell(Submit(facts=other))
    assert said.text == fault  # type: ignore[union-attr]
    model.settle()
    model.tell(Submit(facts=other))
    assert model.cluster.jobs["j"].attempt == 2  # numbers go on


def test_nothing_is_placed_before_the_nodes_were_tried_or_workers_are_there() -> None:
    model = Model([gpu_node("a"), gpu_node("b")], Limits(settle_s=30.0))
    for name in ("j1", "j2"):
        model.tell(Submit(facts=facts(name)))
    model.connect("a")
    assert model.starts == {}
    model.tell(HoldPlacement(on=True))
    model.connect("b")
    assert model.starts == {}
    model.tell(HoldPlacement(on=False))
    assert model.starts == {("j1", 1): "a", ("j2", 1): "b"}


def test_a_node_that_cannot_be_reached_does_not_hold_the_others_up() -> None:
    model = Model([gpu_node("a"), gpu_node("b")], Limits(settle_s=30.0))
    model.tell(Submit(facts=facts("j")))
    model.connect("a")
    model.tell(NodeDown(node="b", reason="connection refused"))
    assert model.starts == {("j", 1): "a"}
    assert (model.cluster.nodes["b"].state, model.cluster.nodes["b"].reason) == ("new", "connection refused")


def test_val_losses_and_the_file_that_wins() -> None:
    model = model_of("a")
    running(model)

    def evaluated(step: int, val_loss: float) -> None:
        model.tell(Evaluation(node="a", job="j", attempt=1, step=step, val_loss=val_loss))

    for step, val_loss in ((1, math.nan), (2, 0.5), (3, 0.5), (4, 0.7)):
        evaluated(step, val_loss)
    job = model.cluster.jobs["j"]
    assert (job.best_val_loss, job.best_step, job.val_loss) == (0.5, 2, 0.7)
    model.beat("a")
    for _ in range(21):
        model.tick(15)
        actions = model.tell(NodeBeat(node="a", info=model.info("a")))
        if actions:
            break
    assert actions == [CheckBest(node="a", job="j", attempt=1)]
    evaluated(5, 0.4)
    # As old as the question: no difference.
    assert model.tell(BestSeen(node="a", job="j", attempt=1, step=2, val_loss=0.5)) == []
    assert job.best_step == 5
    (said,) = model.tell(BestSeen(node="a", job="j", attempt=1, step=3, val_loss=0.3))
    assert "the file counts" in said.text  # type: ignore[union-attr]
    assert (job.best_val_loss, job.best_step) == (0.3, 3)


def test_an_attempt_that_the_store_does_not_know_is_stopped_and_its_number_not_used() -> None:
    model = model_of("a")
    assert [type(a) for a in model.tell(AttemptChanged(node="a", status=status("x", 1, "running")))][
        -1
    ] is Stop
    model.outbox.clear()
    running(model)
    model.tell(AttemptChanged(node="a", status=status("j", 7, "running")))
    model.tell(AttemptChanged(node="a", status=status("j", 1, "failed", retry=True)))
    model.tick(5)
    assert model.cluster.jobs["j"].attempt == 8
