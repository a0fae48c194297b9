"""Which jobs take the next optimizer step: four pure state machines (architecture, *The job spec*).

A *round* is a set of jobs that each do one optimizer step, fused. The runner asks `next_round` with the
jobs that could run now, does the round, and reports each finished step by `ran`. `next_round` only
decides: asked again before anything ran (a pass retried after OOM) it gives the same answer. The order
never changes a job's bits, only who waits for whom.

    synchronized        every job, every round
    round_robin         sets that fit rotate: the longest stretch of the queue that fits, then to its end
    priority_val_loss   the one job with the highest last validation loss; nobody starves
    fair                tokens in proportion to weight; between clients first, then inside each

Where several clients' jobs do not fit into one pass, the first three give each client the same share of
tokens too (`shares.py`).

`max_tokens` bounds the sum of `next_tokens` of a round (a job above the bound runs alone, the engine
splits its step into passes); `max_adapters` bounds its size, 0 meaning no bound. `synchronized` always
returns everybody: there the engine splits.

Names: F finish tag (tokens / weight), V virtual time of a group, both as in weighted fair queueing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gshare.agent.errors import UsageError
from gshare.agent.jobs.job_view import JobView, Schedule
from gshare.agent.jobs.names import nearest
from gshare.agent.jobs.shares import BetweenClients, Group


def _fits(tokens: int, members: int, job: JobView, *, max_tokens: int, max_adapters: int) -> bool:
    """Whether `job` may join a round of `members` jobs holding `tokens` tokens."""
    if members == 0:
        return True
    return tokens + job.next_tokens <= max_tokens and (max_adapters == 0 or members < max_adapters)


def _by_order(jobs: Sequence[JobView]) -> list[JobView]:
    return sorted(jobs, key=lambda job: job.order)


class Synchronized:
    """Every runnable job takes one step in every round, in order of admission."""

    def next_round(self, jobs: Sequence[JobView], *, max_tokens: int, max_adapters: int) -> list[str]:
        return [job.name for job in _by_order(jobs)]

    def ran(self, name: str, tokens: int) -> None:
        """Nothing to remember."""

    def forget(self, name: str) -> None:
        """Nothing to forget."""


class RoundRobin:
    """A queue: the round is its longest head that fits; who ran goes to the end; newcomers too.

    The head is not searched past the first job that does not fit, so the rotation is strict: between two
    steps of one job every other runnable job steps exactly once.
    """

    def __init__(self) -> None:
        self._queue: list[str] = []

    def next_round(self, jobs: Sequence[JobView], *, max_tokens: int, max_adapters: int) -> list[str]:
        known = set(self._queue)
        self._queue += [job.name for job in _by_order(jobs) if job.name not in known]
        runnable = {job.name: job for job in jobs}
        chosen: list[str] = []
        tokens = 0
        for name in self._queue:
            if name not in runnable:  # paused: keeps its place
                continue
            job = runnable[name]
            if not _fits(tokens, len(chosen), job, max_tokens=max_tokens, max_adapters=max_adapters):
                break
            chosen.append(name)
            tokens += job.next_tokens
        return chosen

    def ran(self, name: str, tokens: int) -> None:
        if name in self._queue:
            self._queue.remove(name)
            self._queue.append(name)

    def forget(self, name: str) -> None:
        if name in self._queue:
            self._queue.remove(name)


class PriorityValLoss:
    """One job per round: never evaluated first (they take turns), then the highest last validation loss.

    A non-finite loss ranks last. Ageing: a job that was runnable during `AGE` · n rounds of others (n jobs
    runnable now) goes ahead of all, the one that waited longest first. Bound: with n jobs, none waits for
    more than (AGE + 1) · n - 1 rounds. Proof: once it has waited AGE · n, only jobs that waited at least as
    long go ahead; there are n - 1 at most, and each that ran is young again for AGE · n rounds.
    """

    #: Of every AGE · n rounds at most n - 1 go to ageing, so at least 3/4 follow the losses.
    AGE = 4

    def __init__(self) -> None:
        self._waited: dict[str, int] = {}
        self._runnable: tuple[str, ...] = ()  # as of the last decision: paused jobs do not age

    def next_round(self, jobs: Sequence[JobView], *, max_tokens: int, max_adapters: int) -> list[str]:
        self._runnable = tuple(job.name for job in jobs)
        if not jobs:
            return []
        limit = self.AGE * len(jobs)

        def rank(job: JobView) -> tuple[int, float, int, int]:
            waited = self._waited.get(job.name, 0)
            loss = job.last_val_loss
            if waited >= limit:
                return (0, 0.0, -waited, job.order)
            if loss is None:
                return (1, 0.0, -waited, job.order)
            if math.isfinite(loss):
                return (2, -loss, -waited, job.order)
            return (3, 0.0, -waited, job.order)

        return [min(jobs, key=rank).name]

    def ran(self, name: str, tokens: int) -> None:
        for other in self._runnable:
            self._waited[other] = self._waited.get(other, 0) + 1
        if name in self._runnable:
            self._waited[name] = 0

    def forget(self, name: str) -> None:
        self._waited.pop(name, None)
        self._runnable = tuple(other for other in self._runnable if other != name)


class Fair:
    """Deficit round robin in tokens by weight, fused: the proportional share of compute.

    Every client has the same share, whatever its jobs weigh; inside a client, `weight` divides its share
    among its jobs. A step cannot be cut, so the next step goes where F = (tokens served + tokens of the
    next step) / weight is least: deficit round robin whose quantum is always the smallest that lets one
    job run. Steps are taken in that order; a round is the longest stretch of it that fits and names no
    job twice, so a job of short rows simply takes part in more rounds than one of long rows.

    Bound: while two jobs of a client are both runnable, tokens / weight of the two never differ by more
    than the larger next_tokens / weight of either; shares over n steps of the longest job are within about
    1/n of the weights.
    """

    def __init__(self) -> None:
        self._clients = Group()
        self._jobs: dict[str, Group] = {}
        self._owner: dict[str, tuple[str, float]] = {}  # job: (client, weight)

    def next_round(self, jobs: Sequence[JobView], *, max_tokens: int, max_adapters: int) -> list[str]:
        by_client: dict[str, list[JobView]] = {}
        for job in _by_order(jobs):
            assert job.weight > 0, job
            self._owner[job.name] = (job.client, job.weight)
            by_client.setdefault(job.client, []).append(job)
        self._clients.enter(frozenset(by_client))
        for client in self._jobs.keys() | by_client.keys():
            members = frozenset(job.name for job in by_client.get(client, ()))
            self._jobs.setdefault(client, Group()).enter(members)

        # Charges of this round, tentative until `ran`.
        clients = {client: self._clients.used[client] for client in by_client}
        used = {job.name: self._jobs[job.client].used[job.name] for job in jobs}
        chosen: list[str] = []
        tokens = 0
        while len(chosen) < len(jobs):
            firsts = [
                min(members, key=lambda job: (used[job.name] + job.next_tokens / job.weight, job.order))
                for members in by_client.values()
            ]
            job = min(firsts, key=lambda job: (clients[job.client] + job.next_tokens, job.order))
            # A second step of one job needs the first one's update: the round ends here.
            if job.name in chosen:
                break
            if not _fits(tokens, len(chosen), job, max_tokens=max_tokens, max_adapters=max_adapters):
                break
            chosen.append(job.name)
            tokens += job.next_tokens
            clients[job.client] += job.next_tokens
            used[job.name] += job.next_tokens / job.weight
        return chosen

    def ran(self, name: str, tokens: int) -> None:
        if name not in self._owner:
            return
        client, weight = self._owner[name]
        self._clients.used[client] += tokens
        self._jobs[client].used[name] += tokens / weight

    def forget(self, name: str) -> None:
        if name not in self._owner:
            return
        client, _ = self._owner.pop(name)
        self._jobs[client].drop(name)
        if not self._jobs[client].used:
            del self._jobs[client]
            self._clients.drop(client)


_SCHEDULES: dict[str, type[Synchronized | RoundRobin | PriorityValLoss | Fair]] = {
    "synchronized": Synchronized,
    "round_robin": RoundRobin,
    "priority_val_loss": PriorityValLoss,
    "fair": Fair,
}


def make_schedule(name: str) -> Schedule:
    """A fresh schedule by its name in the job spec. UsageError for an unknown name."""
    if name not in _SCHEDULES:
        hint = nearest(name, _SCHEDULES)
        raise UsageError(
            f"schedule: unknown schedule {name!r}; known: {', '.join(_SCHEDULES)}"
            + (f". Did you mean {hint!r}?" if hint else "")
        )
    kind = _SCHEDULES[name]
    if kind is Fair:  # by client already
        return Fair()
    return BetweenClients(kind, fused=kind is not PriorityValLoss)
