"""Equal shares of a trainer's tokens between its clients, whatever the schedule of their jobs: pure.

While the jobs of all clients fit into one pass, everybody runs fused and nothing is counted: nobody is held
up by anybody. When they do not fit, clients take turns by tokens: each has a schedule of its own for its
jobs, and the next round goes to the client for which (tokens served + tokens of its next round) is least,
then to the others in that order as long as they fit beside it. Who takes part in a round is not held up
either, so it gathers no credit against those who are.

Bound: while a client that has something to run is left out, no other one is served more than two of the
largest rounds. Clients whose rounds never fit beside each other get the same number of tokens, to within one
such round; one that fits beside some rounds and not beside others may get less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gshare.agent.jobs.job_view import JobView, Schedule


@dataclass
class Group:
    """Service received by the members of a group: jobs of a client, or clients of a trainer.

    `used` is tokens / weight. A member that comes (back) starts at the virtual time `now`, the least `used`
    of those who stayed, unless it is ahead of it already: so it gets its share from now on and no credit
    for the time it was away.
    """

    used: dict[str, float] = field(default_factory=dict)
    present: frozenset[str] = frozenset()
    now: float = 0.0

    def enter(self, members: frozenset[str]) -> None:
        stayed = [self.used[member] for member in members & self.present]
        if stayed:
            self.now = max(self.now, min(stayed))
        for member in members - self.present:
            self.used[member] = max(self.used.get(member, 0.0), self.now)
        self.present = members

    def drop(self, member: str) -> None:
        self.used.pop(member, None)
        self.present -= {member}


class BetweenClients:
    """One schedule a client, made by `make`. With `fused` rounds of several clients may be one."""

    def __init__(self, make: Callable[[], Schedule], *, fused: bool) -> None:
        self.by_results = make().by_results
        self._make = make
        self._fused = fused
        self._schedules: dict[str, Schedule] = {}
        self._clients = Group()
        self._owner: dict[str, str] = {}
        self._counted = False  # whether the round that was decided last counts
        self._held: frozenset[str] = frozenset()  # clients that it left out
        self._took: set[str] = set()  # those that have run in it

    def next_round(self, jobs: Sequence[JobView], *, max_tokens: int, max_adapters: int) -> list[str]:
        by_client: dict[str, list[JobView]] = {}
        for job in sorted(jobs, key=lambda job: job.order):
            self._owner[job.name] = job.client
            by_client.setdefault(job.client, []).append(job)
        self._settle()
        self._clients.enter(frozenset(by_client))
        together = self._fused and _fit(jobs, max_tokens=max_tokens, max_adapters=max_adapters)
        self._counted = len(by_client) > 1 and not together

        # What each client would run if the pass were its own.
        wanted = {
            client: self._schedule(client).next_round(own, max_tokens=max_tokens, max_adapters=max_adapters)
            for client, own in by_client.items()
        }
        by_name = {job.name: job for job in jobs}
        tokens = {client: sum(by_name[name].next_tokens for name in wanted[client]) for client in wanted}
        first = {client: own[0].order for client, own in by_client.items()}
        turn = sorted(wanted, key=lambda client: (self._clients.used[client] + tokens[client], first[client]))
        chosen: list[str] = []
        for client in turn:
            if chosen and not self._fused:
                break
            both = [by_name[name] for name in (*chosen, *wanted[client])]
            # Nobody behind may pass: who does not fit now is the first of the next round.
            if chosen and not _fit(both, max_tokens=max_tokens, max_adapters=max_adapters):
                break
            chosen += wanted[client]
        self._held = frozenset(by_client) - {self._owner[name] for name in chosen}
        return sorted(chosen, key=lambda name: by_name[name].order) if together else chosen

    def ran(self, name: str, tokens: int) -> None:
        client = self._owner.get(name)
        if client is None:
            return
        self._schedules[client].ran(name, tokens)
        if self._counted:
            self._clients.used[client] += tokens
            self._took.add(client)

    def forget(self, name: str) -> None:
        client = self._owner.pop(name, None)
        if client is None:
            return
        self._schedules[client].forget(name)
        if client not in self._owner.values():
            del self._schedules[client]
            self._clients.drop(client)

    def _settle(self) -> None:
        """After a round: who took part has no credit against those who did not."""
        used = self._clients.used
        floor = min((used[client] for client in self._held if client in used), default=None)
        if self._took and floor is not None:
            for client in self._took & used.keys():
                used[client] = max(used[client], floor)
        self._took = set()

    def _schedule(self, client: str) -> Schedule:
        if client not in self._schedules:
            self._schedules[client] = self._make()
        return self._schedules[client]


def _fit(jobs: Sequence[JobView], *, max_tokens: int, max_adapters: int) -> bool:
    tokens = sum(job.next_tokens for job in jobs)
    return tokens <= max_tokens and (max_adapters == 0 or len(jobs) <= max_adapters)
