"""Any order of what can happen: nothing lost, nothing published twice, limits kept.

Nodes go silent, return or come back empty, messages are late, doubled and out of order, users stop, pause and
resume, attempts fail, and the coordinator is killed and started again from its disk. In the end all is
mended, and every job must have ended, each completed one being at home once. Hypothesis chooses the moves;
dice choose them too, weighted so that long stories are told, such as a partition that heals after its job was
done elsewhere (a thousand of their steps cost what hypothesis needs for fifty).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from gshare.agent.jobs.events import ENDED, Exit
from gshare.agent.node.protocol import AttemptStatus
from gshare.coordinator.actions import ClusterAction, Place, Publish
from gshare.coordinator.cluster import Cluster
from gshare.coordinator.events import BroughtHome, PauseJob, ResumeJob, StopJob, Submit
from gshare.coordinator.facts import ENDED_STATES, JobRecord
from gshare.coordinator.transfers import Limits
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parent / "support"))
from cluster_model import BOUNDARY, Model, facts, gpu_node

T = TypeVar("T")
Pick = Callable[[Sequence[T]], T]

#: Five places on four GPUs.
CONFIGS = [gpu_node("a"), gpu_node("b", max_adapters=1), gpu_node("c", gpus=2, max_adapters=1)]
NODES = [config.name for config in CONFIGS]
JOBS = [f"j{number}" for number in range(7)]
LIMITS = Limits(lost_after_s=60.0, settle_s=0.0, fault_delay_s=1.0, faults=4)


def submit(model: Model, pick: Pick) -> None:
    """The same order again, or another one, perhaps of a name that an ended job had."""
    name = pick(JOBS)
    old = model.cluster.jobs.get(name)
    again = old is not None and pick((True, True, False))
    of_a_sweep = pick(({}, {"early_exit": True, "pause_at": BOUNDARY}))
    order = facts(name, base=pick("xy"), submission=f"of {model.now} and {len(model.starts)}", **of_a_sweep)
    model.tell(Submit(facts=old.facts if old is not None and again else order))


def steer(model: Model, pick: Pick) -> None:
    model.tell(pick((StopJob, PauseJob, ResumeJob))(job=pick(JOBS)))


def connect(model: Model, pick: Pick) -> None:
    model.connect(pick(NODES))


def disconnect(model: Model, pick: Pick) -> None:
    model.disconnect(pick(NODES))


def come_back_empty(model: Model, pick: Pick) -> None:
    node = pick(NODES)
    model.disconnect(node)
    model.agents[node].clear()


def lose(model: Model, pick: Pick) -> None:
    """Its jobs go elsewhere; it runs on without anybody hearing of it."""
    node = pick(NODES)
    model.disconnect(node)
    model.tick(LIMITS.lost_after_s)
    for attempt in model.agents[node].values():
        if attempt.state in ("queued", "running"):
            model.advance(node, attempt)


def let_time_pass(model: Model, pick: Pick) -> None:
    model.tick(pick((1.0, 10.0, 50.0, 70.0)))


def beat(model: Model, pick: Pick) -> None:
    model.beat(pick(NODES))


def work(model: Model, pick: Pick) -> None:
    model.work(pick(NODES))


def place(model: Model, pick: Pick) -> None:
    model.place()


def advance(model: Model, pick: Pick) -> None:
    node = pick(NODES)
    attempts = [attempt for attempt in model.agents[node].values() if attempt.state not in ENDED]
    if attempts:
        attempt = pick(attempts)
        end = pick((None, None, None, None, "failed", "stopped"))
        model.advance(node, attempt, end, retry=True)


def leave_early(model: Model, pick: Pick) -> None:
    """A job of a sweep is stopped by its own losses."""
    attempts = [
        (node, attempt)
        for node in NODES
        for attempt in model.agents[node].values()
        if attempt.exits and attempt.state == "running"
    ]
    if attempts:
        node, attempt = pick(attempts)
        model.advance(node, attempt, "stopped", Exit(pattern="overfitting", step=attempt.step))


def deliver(model: Model, pick: Pick) -> None:
    """Any letter, whatever came before it; perhaps it comes once more."""
    if model.mail:
        letter = pick(model.mail)
        if pick((True, True, False)):
            model.mail.remove(letter)
        model.deliver(letter)


def go_well(model: Model, pick: Pick) -> None:
    """For a while, so that what comes later is reached at all: a node does all it is asked, and goes on."""
    node = pick(NODES)
    while model.work(node):
        pass
    for attempt in model.agents[node].values():
        if attempt.state in ("queued", "running"):
            model.advance(node, attempt)
    for letter in [letter for letter in model.mail if letter.about(node)]:
        model.mail.remove(letter)
        model.deliver(letter)


def kill(model: Model, pick: Pick) -> None:
    """The coordinator; what was on its way to it is perhaps gone."""
    if pick((True, False)):
        model.mail.clear()
    model.boot()


WEIGHTS: dict[Callable[[Model, Pick], None], float] = {
    submit: 3,
    steer: 1,
    connect: 5,
    disconnect: 1,
    come_back_empty: 0.3,
    lose: 1.5,
    let_time_pass: 2,
    beat: 1,
    work: 3,
    place: 4,
    advance: 2,
    leave_early: 2,
    deliver: 6,
    go_well: 12,
    kill: 0.7,
}


def mend(model: Model) -> None:
    """All is well again: nothing may be left over."""
    for node in NODES:
        model.connect(node)
    for _ in range(3):  # out of what they were doing, to their boundary, and on
        for job in list(model.cluster.jobs):
            model.tell(ResumeJob(job=job))
        model.settle()
        model.check()
    for name, job in model.cluster.jobs.items():
        assert job.state in ENDED_STATES, f"{name} is left over: {job}"
        at_home = model.placed.get((name, job.facts.submission), [])
        # One of a sweep that was stopped is at home with what it had: any other was resumed above.
        has_results = job.state in ("completed", "stopped")
        assert at_home == ([job.attempt] if has_results else []), f"{name}: {job}"
        assert job.state != "stopped" or job.facts.early_exit, f"{name}: {job}"


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model(CONFIGS, LIMITS)

    @rule(move=st.sampled_from(list(WEIGHTS)), data=st.data())
    def move(self, move: Callable[[Model, Pick], None], data: st.DataObject) -> None:
        move(self.model, lambda choices: data.draw(st.sampled_from(choices)))

    @invariant()
    def holds(self) -> None:
        self.model.check()

    def teardown(self) -> None:
        mend(self.model)


def test_any_order_that_hypothesis_finds() -> None:
    checks = list(HealthCheck)
    run_state_machine_as_test(
        AnyOrder,
        settings=settings(
            max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=checks
        ),
    )


def walk(seed: int, machine: type[Cluster] = Cluster, steps: int = 200) -> Model:
    dice = random.Random(seed)
    model = Model(CONFIGS, LIMITS, machine)
    for move in dice.choices(list(WEIGHTS), weights=list(WEIGHTS.values()), k=steps):
        move(model, dice.choice)
        model.check()
    mend(model)
    return model


def test_any_order_that_dice_find() -> None:
    """Counted is that the stories were told at all."""
    completed = moved = parked = dropped = by_itself = 0
    for seed in range(100):
        model = walk(seed)
        completed += sum(job.state == "completed" for job in model.cluster.jobs.values())
        moved += sum(job.attempt > 1 for job in model.cluster.jobs.values())
        parked += sum(job.past for job in model.cluster.jobs.values())
        dropped += sum(job.parked for job in model.cluster.jobs.values())
        by_itself += sum(job.exit is not None for job in model.cluster.jobs.values())
    assert completed > 300
    assert moved > 200
    assert parked > 100
    assert dropped > 5
    assert by_itself > 10


class Unfenced(Cluster):
    """Whatever completes is brought home and put into place."""

    def still_wanted(self, action: ClusterAction) -> bool:
        return isinstance(action, (Place, Publish)) or super().still_wanted(action)

    def _not_current(self, job: JobRecord, node: str, status: AttemptStatus) -> None:
        if status.state == "completed":
            self._out.append(Publish(node=node, job=status.job, attempt=status.attempt))

    def _brought_home(self, event: BroughtHome) -> None:
        super()._brought_home(event)
        self._out.append(Place(job=event.job, attempt=event.attempt))


def test_without_fencing_the_dice_find_a_second_publication() -> None:
    def walks() -> None:
        for seed in range(100):
            walk(seed, Unfenced)

    with pytest.raises(AssertionError, match="published twice"):
        walks()


class Forgetful(Cluster):
    """Does not take the jobs off a node that is lost."""

    def _lose_jobs(self, node: str) -> None:
        pass


def test_a_job_that_stays_behind_is_found() -> None:
    """Negative control of `mend`: here one node never comes back."""
    model = Model(CONFIGS[:2], LIMITS, Forgetful)
    model.connect("a")
    model.tell(Submit(facts=facts("j")))
    model.work("a")
    lose(model, lambda choices: choices[0])
    model.connect("b")
    model.settle()
    assert model.state("j") == "running"  # it is still believed to be there
    sound = Model(CONFIGS[:2], LIMITS)
    sound.connect("a")
    sound.tell(Submit(facts=facts("j")))
    sound.work("a")
    lose(sound, lambda choices: choices[0])
    sound.connect("b")
    sound.settle()
    assert (sound.state("j"), sound.placed) == ("completed", {("j", "first"): [2]})
