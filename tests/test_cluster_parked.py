"""Jobs of a sweep: parked where a warm-up ends, resumed, dropped, stopped by their own losses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from gshare.agent.jobs.events import Exit
from gshare.coordinator.actions import Ended, Place, Publish, PullCheckpoint, Start
from gshare.coordinator.events import (
    BroughtHome,
    NodeDown,
    NodeUp,
    Published,
    PublishFailed,
    ResumeJob,
    StopJob,
    Submit,
    Tick,
)

sys.path.insert(0, str(Path(__file__).parent / "support"))
from cluster_model import BOUNDARY, Attempt, Model, facts, gpu_node

WHY = "number 3 of 4 at the end of the warm-up"


def model_of(*names: str, **fields: Any) -> Model:
    model = Model([gpu_node(name, max_adapters=1) for name in names], **fields)
    for name in names:
        model.connect(name)
    return model


def submit(model: Model, name: str = "j") -> None:
    model.tell(Submit(facts=facts(name, early_exit=True, pause_at=BOUNDARY)))


def attempt_of(model: Model, name: str = "j") -> tuple[str, Attempt]:
    job = model.cluster.jobs[name]
    node = job.node or job.last_node
    return node, model.agents[node][name, job.attempt]


def deliver(model: Model) -> None:
    while model.mail:
        model.deliver(model.mail.pop(0))


def park(model: Model, name: str = "j", *, home: bool = True) -> str:
    """Trains it to its boundary; the node. `home`: its checkpoint has come."""
    node = model.cluster.jobs[name].node
    model.work(node)
    for _ in range(BOUNDARY + 1):
        model.advance(*attempt_of(model, name))
    deliver(model)
    if home:
        model.work(node)
        deliver(model)
        assert model.cluster.jobs[name].checkpoint is not None
    assert (model.state(name), model.cluster.jobs[name].parked) == ("paused", True)
    return node


def lose(model: Model, node: str) -> None:
    model.disconnect(node)
    for _ in range(61):
        model.tick(model.limits.lost_after_s / 60)
        for other in model.connected:
            model.beat(other)


def test_a_parked_job_gives_its_place_to_the_next_one() -> None:
    model = model_of("a")
    submit(model)
    submit(model, "next")
    assert model.state("next") == "waiting"
    park(model)
    assert (model.state("next"), model.cluster.jobs["j"].node) == ("starting", "")
    model.check()
    model.boot()  # and after a restart of the coordinator it is parked still
    model.connect("a")
    assert (model.state("j"), model.cluster.jobs["j"].parked) == ("paused", True)


def test_a_resumed_one_goes_on_anywhere_from_what_came_home() -> None:
    model = model_of("a", "b")
    submit(model)
    first = park(model)
    lose(model, first)
    (start,) = [one for one in model.tell(ResumeJob(job="j")) if isinstance(one, Start)]
    assert start.node != first
    assert start.checkpoint is not None
    assert start.checkpoint.step == BOUNDARY
    assert model.cluster.jobs["j"].past
    model.settle()
    assert (model.state("j"), model.placed) == ("completed", {("j", "first"): [2]})


def test_one_whose_checkpoint_was_lost_begins_anew_and_does_not_park_again() -> None:
    model = model_of("a", "b")
    submit(model)
    first = park(model, home=False)
    lose(model, first)
    (start,) = [one for one in model.tell(ResumeJob(job="j")) if isinstance(one, Start)]
    assert start.checkpoint is None
    model.settle()
    assert model.state("j") == "completed"
    assert model.cluster.jobs["j"].past


def test_a_checkpoint_that_was_cut_off_comes_when_the_node_is_back() -> None:
    model = model_of("a", "b")
    submit(model)
    node = park(model, home=False)
    lose(model, node)
    assert not model.cluster.jobs["j"].pulling
    model.connect(node)
    assert any(isinstance(one, PullCheckpoint) for one in model.pending(node))


def test_one_before_its_boundary_is_trained_to_it_elsewhere() -> None:
    model = model_of("a", "b")
    submit(model)
    node = model.cluster.jobs["j"].node
    model.work(node)
    model.advance(*attempt_of(model))
    deliver(model)
    lose(model, node)
    assert not model.cluster.jobs["j"].past
    assert park(model) != node


def test_a_dropped_one_leaves_what_it_has_at_home_and_cannot_go_on() -> None:
    model = model_of("a")
    submit(model)
    node = park(model)
    actions = model.tell(StopJob(job="j", reason=WHY))
    assert [type(one) for one in actions] == [Place]
    lose(model, node)  # no node is needed
    (ended,) = [one for one in model.tell(Published(job="j", attempt=1)) if isinstance(one, Ended)]
    assert (ended.state, ended.reason) == ("stopped", WHY)
    assert model.cluster.jobs["j"].published == 1
    model.connect(node)
    model.tell(ResumeJob(job="j"))
    assert model.state("j") == "stopped"
    model.settle()
    assert model.agents[node] == {}  # its files there may go


@pytest.mark.parametrize("lost", [False, True])
def test_dropped_while_its_checkpoint_is_on_its_way(lost: bool) -> None:
    model = model_of("a")
    submit(model)
    node = park(model, home=False)
    assert model.tell(StopJob(job="j", reason=WHY)) == []
    if lost:
        lose(model, node)
        assert (model.state("j"), model.placed) == ("stopped", {})
        told = f"{WHY}; its checkpoint has not come home from node a"
        assert model.cluster.jobs["j"].reason == told
        return
    model.settle()
    assert (model.state("j"), model.cluster.jobs["j"].reason) == ("stopped", WHY)
    assert model.placed == {("j", "first"): [1]}


def test_stopped_by_its_own_losses_it_is_published_and_not_made_again() -> None:
    model = model_of("a")
    submit(model)
    node = model.cluster.jobs["j"].node
    model.work(node)
    cause = Exit(pattern="overfitting", step=1, evidence={"gap": 0.5})
    _, attempt = attempt_of(model)
    model.advance(node, attempt, "stopped", cause, step=1, reason="overfitting at step 1")
    deliver(model)
    assert (model.state("j"), model.cluster.jobs["j"].exit) == ("publishing", cause)
    assert any(isinstance(one, Publish) for one in model.pending(node))
    model.settle()
    job = model.cluster.jobs["j"]
    assert (job.state, job.reason, job.attempt) == ("stopped", "overfitting at step 1", 1)
    assert model.placed == {("j", "first"): [1]}


def test_the_same_end_without_a_pattern_is_made_again() -> None:
    """Negative control: somebody on the node has stopped it, which is no decision."""
    model = model_of("a")
    submit(model)
    node = model.cluster.jobs["j"].node
    model.work(node)
    _, attempt = attempt_of(model)
    model.advance(node, attempt, "stopped", step=1)
    deliver(model)
    assert (model.cluster.jobs["j"].exit, model.state("j")) == (None, "waiting")


def test_a_person_s_stop_of_a_running_one_brings_home_what_it_has() -> None:
    model = model_of("a")
    submit(model)
    node = model.cluster.jobs["j"].node
    model.work(node)
    for _ in range(2):
        model.advance(*attempt_of(model))
    deliver(model)
    model.tell(StopJob(job="j"))
    model.settle()
    assert model.state("j") == "stopped"
    assert model.cluster.jobs["j"].reason == "stopped by its user"
    assert model.placed == {("j", "first"): [1]}


def test_results_that_cannot_be_placed_are_tried_again_until_a_person_gives_them_up() -> None:
    model = model_of("a")
    submit(model)
    park(model)
    model.tell(StopJob(job="j", reason=WHY))
    job = model.cluster.jobs["j"]
    for _ in range(2):
        model.tell(PublishFailed(job="j", attempt=1, reason="disk full", retry=True))
        assert (job.state, job.publish_again) == ("placing", True)
    model.tell(StopJob(job="j"))
    assert job.state == "stopped"
    assert job.reason.startswith(f"{WHY}; its results stay on node a")
    model.tell(ResumeJob(job="j"))  # `gshare jobs resume` places them, as of any job
    assert model.state("j") == "publishing"
    model.tell(BroughtHome(job="j", attempt=1, val_loss=1.0, best_step=1))
    model.tell(Published(job="j", attempt=1))
    assert (model.state("j"), model.cluster.jobs["j"].reason) == ("stopped", WHY)


def test_results_that_cannot_be_placed_come_when_there_is_room() -> None:
    """A sweep stops whom it leaves behind while the disk at home is full: that is no wish to leave them."""
    model = model_of("a")
    submit(model)
    park(model)
    model.tell(StopJob(job="j", reason=WHY))
    model.tell(PublishFailed(job="j", attempt=1, reason="disk full", retry=True))
    model.settle()
    assert (model.state("j"), model.cluster.jobs["j"].reason) == ("stopped", WHY)
    assert ("j", "first") in model.placed


@pytest.mark.parametrize("knows", [(), ("early_exit",)])
def test_an_agent_that_knows_no_early_exit_gets_none_of_them(knows: tuple[str, ...]) -> None:
    model = Model([gpu_node("a")])
    info = model.info("a")
    model.tell(Tick(now=model.now, wall=model.now))
    model.tell(NodeUp(node="a", info=info, knows=knows))
    submit(model)
    model.tell(Submit(facts=facts("plain")))
    assert model.state("plain") == "starting"
    if knows:
        assert model.state("j") == "starting"
        return
    assert model.state("j") == "failed"
    reason = model.cluster.jobs["j"].reason
    assert "a: its agent is of an older gshare that knows no early exit" in reason
    # Updated, it gets them.
    model.tell(NodeDown(node="a", reason="update"))
    model.tell(NodeUp(node="a", info=info, knows=("early_exit",)))
    model.tell(ResumeJob(job="j"))
    assert model.state("j") == "starting"
