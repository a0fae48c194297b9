"""What people and the followers of the API are told: lines, and the moves of jobs and nodes, each once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from gshare.coordinator.actions import Ended
from gshare.coordinator.api import ApiServer
from gshare.coordinator.api_protocol import ClusterMessage, JobEnded, JobMoved, NodeChanged
from gshare.coordinator.facts import ENDED_STATES, JobRecord
from gshare.coordinator.node_state import NodeMachine

Level = Literal["info", "warning", "error"]
Tell = Callable[[Level, str], None]


class Announcer:
    def __init__(self, tell: Tell, api: ApiServer, jobs: Mapping[str, JobRecord]) -> None:
        """`jobs`: those of the store, which nobody is told of again."""
        self.tell, self._api = tell, api  # `tell`: for people here alone
        self._nodes: dict[str, str] = {}  # the state that was told last
        self._jobs = {name: (job.state, job.node, job.attempt) for name, job in jobs.items()}

    def say(self, level: Level, text: str, job: str = "") -> None:
        """A line for people: here, and for all who follow."""
        self.tell(level, text)
        self._api.publish(ClusterMessage(level=level, text=text, job=job))

    def job(self, job: JobRecord) -> None:
        """Where it is now and how, when that has changed."""
        name = job.facts.name
        now = (job.state, job.node, job.attempt)
        if self._jobs.get(name) == now:
            return
        self._jobs[name] = now
        if job.state not in ENDED_STATES:  # of an end there is `JobEnded`
            self._api.publish(
                JobMoved(
                    job=name,
                    state=job.state,
                    node=job.node,
                    attempt=job.attempt,
                    step=job.step,
                    total_steps=job.total_steps,
                    position=job.position,
                    reason=job.reason,
                )
            )

    def ended(self, action: Ended) -> None:
        why = f": {action.reason}" if action.reason else ""
        self.tell("info", f"{action.job}: {action.state}{why}")
        self._api.publish(JobEnded(job=action.job, state=action.state, reason=action.reason))

    def nodes(self, nodes: Mapping[str, NodeMachine]) -> None:
        """Those whose state has changed."""
        for name, node in nodes.items():
            if self._nodes.get(name) != node.state:
                self._nodes[name] = node.state
                self._api.publish(NodeChanged(node=name, state=node.state, reason=node.reason))

    def forget_node(self, name: str) -> None:
        self._nodes.pop(name, None)
