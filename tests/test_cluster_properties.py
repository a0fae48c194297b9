"""Any order of what can happen: nothing lost, nothing published twice, limits kept.

Hypothesis chooses the events: nodes that go silent, return or come back empty, messages late, twice and out
of order, users who stop, pause and resume, attempts that fail, and a coordinator that is killed and started
again from its disk. In the end all is mended, and every job must have ended as its user wished.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from gshare.agent.jobs.events import ENDED
from gshare.agent.node.protocol import AttemptStatus
from gshare.coordinator.actions import ClusterAction, Place, Publish
from gshare.coordinator.cluster import Cluster
from gshare.coordinator.events import BroughtHome, PauseJob, ResumeJob, StopJob, Submit
from gshare.coordinator.facts import ENDED_STATES, JobRecord
from gshare.coordinator.transfers import Limits
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

sys.path.insert(0, str(Path(__file__).parent / "support"))
from cluster_model import Model, facts, gpu_node

NODES = ("a", "b", "c")
JOBS = ("j1", "j2", "j3", "j4", "j5")
LIMITS = Limits(lost_after_s=60.0, settle_s=0.0, fault_delay_s=1.0, faults=4)


class ClusterMachine(RuleBasedStateMachine):
    """Three nodes with one GPU each, of which `b` takes one adapter; up to five jobs."""

    machine: type[Cluster] = Cluster

    def __init__(self) -> None:
        super().__init__()
        configs = [gpu_node("a"), gpu_node("b", max_adapters=1), gpu_node("c", gpus=2, max_adapters=1)]
        self.model = Model(configs, LIMITS, self.machine)

    @rule(job=st.sampled_from(JOBS), base=st.sampled_from(("x", "y")))
    def submit(self, job: str, base: str) -> None:
        self.model.tell(Submit(facts=facts(job, base=base)))

    @rule(job=st.sampled_from(JOBS), what=st.sampled_from((StopJob, PauseJob, ResumeJob)))
    def steer(self, job: str, what: type[StopJob | PauseJob | ResumeJob]) -> None:
        self.model.tell(what(job=job))

    @rule(node=st.sampled_from(NODES))
    def connect(self, node: str) -> None:
        self.model.connect(node)

    @rule(node=st.sampled_from(NODES))
    def disconnect(self, node: str) -> None:
        self.model.disconnect(node)

    @rule(node=st.sampled_from(NODES))
    def comes_back_empty(self, node: str) -> None:
        self.model.disconnect(node)
        self.model.agents[node].clear()

    @rule(seconds=st.sampled_from((1.0, 10.0, 50.0, 70.0)))
    def time_passes(self, seconds: float) -> None:
        self.model.tick(seconds)

    @rule(node=st.sampled_from(NODES))
    def beat(self, node: str) -> None:
        self.model.beat(node)

    @rule(node=st.sampled_from(NODES))
    def work(self, node: str) -> None:
        self.model.work(node)

    @rule()
    def place(self) -> None:
        self.model.place()

    @rule(node=st.sampled_from(NODES))
    def all_goes_well_for_a_while(self, node: str) -> None:
        """So that what comes later is reached at all: the node does what it is asked to, and goes on."""
        model = self.model
        while model.work(node):
            pass
        for attempt in list(model.agents[node].values()):
            if attempt.state in ("queued", "running"):
                model.advance(node, attempt)
        for letter in [letter for letter in model.mail if letter.about(node)]:
            model.mail.remove(letter)
            model.deliver(letter)

    @rule(node=st.sampled_from(NODES))
    def lost(self, node: str) -> None:
        """Its jobs go elsewhere; it runs on without anybody hearing of it."""
        self.model.disconnect(node)
        self.model.tick(LIMITS.lost_after_s)
        for attempt in list(self.model.agents[node].values()):
            if attempt.state in ("queued", "running"):
                self.model.advance(node, attempt)

    @precondition(lambda self: any(self.model.agents.values()))
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from([node for node in NODES if self.model.agents[node]]))
        attempt = data.draw(st.sampled_from(list(self.model.agents[node].values())))
        if attempt.state not in ENDED:
            ends = (None, None, None, None, "failed", "stopped")
            self.model.advance(node, attempt, data.draw(st.sampled_from(ends)), retry=True)

    @precondition(lambda self: self.model.mail)
    @rule(data=st.data(), twice=st.booleans())
    def deliver(self, data: st.DataObject, twice: bool) -> None:
        """Any letter, whatever came before it; perhaps it comes once more."""
        at = data.draw(st.integers(0, len(self.model.mail) - 1))
        letter = self.model.mail[at] if twice else self.model.mail.pop(at)
        self.model.deliver(letter)

    @precondition(lambda self: self.model.mail)
    @rule()
    def lose_mail(self) -> None:
        """The coordinator is killed: what was on its way to it is gone."""
        self.model.mail.clear()
        self.model.boot()

    @rule()
    def killed(self) -> None:
        self.model.boot()

    @invariant()
    def holds(self) -> None:
        self.model.check()

    def teardown(self) -> None:
        """All is well again: no job may be left over, and each completed one is at home once."""
        model = self.model
        for node in NODES:
            model.connect(node)
        for job in list(model.cluster.jobs):
            model.tell(ResumeJob(job=job))
        model.settle()
        model.check()
        for name, job in model.cluster.jobs.items():
            assert job.state in ENDED_STATES, f"{name} is left over: {job}"
            at_home = model.placed.get((name, job.facts.submission), [])
            assert at_home == ([job.attempt] if job.state == "completed" else []), f"{name}: {job}"


SETTINGS = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_any_order_of_events() -> None:
    run_state_machine_as_test(ClusterMachine, settings=SETTINGS)


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


def test_without_fencing_the_same_finds_a_second_publication() -> None:
    class UnfencedMachine(ClusterMachine):
        machine = Unfenced

    with pytest.raises(AssertionError, match="published twice"):
        run_state_machine_as_test(UnfencedMachine, settings=SETTINGS)
