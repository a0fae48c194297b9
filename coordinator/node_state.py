"""How a node is: a machine without a clock or socket.

                NodeDeploying            NodeUp                    problems of TABLE
        new ─────────────────► deploying ─────► ready ⇄ busy ⇄ degraded
         ▲  NodeDown (never up) │                 │   NodeDown, or three heartbeats missed
         └──────────────────────┘                 ▼
                                    NodeUp ◄─ unreachable ── ten minutes ──► lost ─► NodeUp

A node that was never up stays `new` with the reason of the last try: there is nothing on it to lose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gshare.agent.node.protocol import NodeInfo

NodeStateName = Literal["new", "deploying", "ready", "busy", "degraded", "unreachable", "lost"]

#: States in which the channel stands.
UP_STATES: frozenset[str] = frozenset({"ready", "busy", "degraded"})

HEARTBEAT_S = 15.0
#: A node that missed so many heartbeats is unreachable.
MISSED_BEATS = 3
#: Seconds unreachable after which it is lost and its jobs go elsewhere.
LOST_AFTER_S = 600.0
#: Clocks that differ by more are told: the times of events and logs are then wrong, training is not.
CLOCK_OFF_S = 300.0
#: MiB free where the state directory is. Below the first an upload is refused by the agent anyway (it keeps
#: 1 GiB free), so placing something there would only fail.
DISK_FULL_MB, DISK_LOW_MB = 1024, 5 * 1024


class Problem(NamedTuple):
    """`forbids`: nothing new is placed on the node. `degrades`: the node's state says so."""

    text: str
    forbids: bool
    degrades: bool = True


@dataclass(frozen=True)
class Became:
    """The node entered `state`; `was` is the one before."""

    node: str
    state: NodeStateName
    was: NodeStateName
    reason: str


def problems_of(
    info: NodeInfo, *, wall: float, draining: bool = False, listed: frozenset[str] = frozenset()
) -> list[Problem]:
    """What is wrong with a node that is up, the worst first; `wall` is the coordinator's Unix time, `listed`
    are the GPUs that cluster.toml names.

    | | forbids | degrades |
    | --- | --- | --- |
    | draining; no torch; disk full; every GPU in trouble or missing | yes | yes |
    | clock off; disk low; one GPU in trouble or missing; what the agent reports itself | | yes |
    | user services end at logout | | |
    """
    found: list[Problem] = []
    if draining:
        found.append(Problem("the agent is draining: it takes nothing new until it was started again", True))
    if not info.torch:
        found.append(
            Problem("its Python has no torch: name one that has with `python` in cluster.toml", True)
        )
    if info.disk_free_mb is not None and info.disk_free_mb < DISK_LOW_MB:
        full = info.disk_free_mb < DISK_FULL_MB
        found.append(Problem(f"only {info.disk_free_mb} MiB of disk free: make room, or set state_dir", full))
    used = [gpu for gpu in info.gpus if not listed or gpu.uuid in listed]
    ill = [f"GPU {gpu.uuid}: {gpu.problem}" for gpu in used if gpu.problem]
    missing = sorted(listed - {gpu.uuid for gpu in info.gpus})
    ill += [f"GPU {uuid} of cluster.toml is not there: see `nvidia-smi -L` on it" for uuid in missing]
    found += [Problem(text, len(ill) == len(used) + len(missing)) for text in ill]
    off = info.time - wall
    if abs(off) > CLOCK_OFF_S:
        way = "ahead" if off > 0 else "behind"
        found.append(Problem(f"its clock is {abs(off):.0f} s {way}: set it, for instance by NTP", False))
    found += [Problem(text, False) for text in info.problems]
    if info.linger is False:
        text = "user services end with the login: `loginctl enable-linger` keeps the agent running"
        found.append(Problem(text, False, degrades=False))
    return sorted(found, key=lambda problem: (not problem.forbids, not problem.degrades))


@dataclass
class NodeMachine:
    """One node. Methods are its events and return what it became, None when its state stayed."""

    name: str
    lost_after_s: float = LOST_AFTER_S
    heartbeat_s: float = HEARTBEAT_S
    state: NodeStateName = "new"
    since: float = 0.0  # when it entered the state, monotonic s
    reason: str = ""
    heard: float = 0.0  # when it last said something
    info: NodeInfo | None = None  # the last word, of an unreachable node too
    problems: list[Problem] = field(default_factory=list)
    draining: bool = False
    listed: frozenset[str] = frozenset()  # GPUs that cluster.toml names
    tried: bool = False  # since the coordinator's start: it came up, or could not be reached

    @property
    def up(self) -> bool:
        return self.state in UP_STATES

    @property
    def placeable(self) -> bool:
        """Whether new attempts may be placed here."""
        return self.up and not any(problem.forbids for problem in self.problems)

    @property
    def undecided(self) -> bool:
        """Whether the coordinator, since its start, does not know yet how the node is."""
        return self.state == "deploying" or (self.state in ("new", "unreachable") and not self.tried)

    def restarted(self, now: float, *, has_jobs: bool) -> Became | None:
        """The coordinator starts. A node with jobs gets its whole time again before it counts as lost."""
        self.tried = False
        return self._enter("unreachable" if has_jobs else "new", now, "not connected yet")

    def deploying(self, now: float, text: str) -> Became | None:
        return self._enter("deploying", now, text) if not self.up and self.state != "lost" else None

    def came_up(self, now: float, wall: float, info: NodeInfo, running: int, draining: bool) -> Became | None:
        self.draining, self.tried = draining, True
        return self._heard(now, wall, info, running)

    def beat(self, now: float, wall: float, info: NodeInfo, running: int) -> Became | None:
        """A heartbeat. One that comes over a channel that broke already is not counted: `came_up` is."""
        return self._heard(now, wall, info, running) if self.up else None

    def counts(self, now: float, running: int) -> Became | None:
        """How many attempts run there now."""
        return self._enter(self._up_state(running), now, self._worst()) if self.up else None

    def went_down(self, now: float, reason: str) -> Became | None:
        self.tried = True
        if self.state in ("new", "deploying"):
            return self._enter("new" if self.info is None else "unreachable", now, reason)
        if self.state == "unreachable":
            self.reason = reason  # the newest try says best what is wrong; the time runs on
            return None
        return self._enter("unreachable", now, reason) if self.up else None

    def tick(self, now: float) -> Became | None:
        if self.up and now - self.heard > MISSED_BEATS * self.heartbeat_s:
            return self._enter("unreachable", now, f"no heartbeat for {now - self.heard:.0f} s")
        if self.state == "unreachable" and now - self.since >= self.lost_after_s:
            away = f"unreachable for {now - self.since:.0f} s"
            return self._enter("lost", now, f"{away}: {self.reason}" if self.reason else away)
        return None

    def due(self) -> float:
        """When `tick` may have something to say, if nothing is heard until then; inf: never."""
        if self.up:
            return self.heard + MISSED_BEATS * self.heartbeat_s
        return self.since + self.lost_after_s if self.state == "unreachable" else float("inf")

    def _heard(self, now: float, wall: float, info: NodeInfo, running: int) -> Became | None:
        self.heard, self.info = now, info
        self.problems = problems_of(info, wall=wall, draining=self.draining, listed=self.listed)
        return self._enter(self._up_state(running), now, self._worst())

    def _up_state(self, running: int) -> NodeStateName:
        if any(problem.degrades for problem in self.problems):
            return "degraded"
        return "busy" if running else "ready"

    def _worst(self) -> str:
        return self.problems[0].text if self.problems and self.problems[0].degrades else ""

    def _enter(self, state: NodeStateName, now: float, reason: str) -> Became | None:
        was, self.reason = self.state, reason
        if state == was:
            return None
        self.state, self.since = state, now
        return Became(self.name, state, was, reason)
