"""Which job crashed the trainer: the pure state machine of the client that supervises it.

The trainer's breadcrumb names the jobs of the pass in flight. After a death those are *suspects*: on a
new trainer they run first, alone, one after the other, each through the step it was at and one more.
Who dies alone has failed (twice in flight, the second time with nobody else to blame); who passes goes
back with the rest. Jobs that were not in flight are never suspects.

    StartTrainer(all) ── Died(a, b) ──> StartTrainer(a, alone)
      a passes: Hold(a), Admit(b, alone); b passes: Admit(rest, a resumed)
      a dies:   MarkFailed(a), StartTrainer(b, alone)

No endless loop: a job that was in flight at `STRIKES` deaths with others, surviving alone in between (jobs
that only crash together), is *isolated*: it runs after the rest, alone, to its end, where it finishes
or fails. Two deaths in a row with nobody in flight (loading the base) end the run. So n jobs see at most
`restart_bound(n)` trainers.

Deterministic, no clock, no I/O: `handle(event)` gives the actions to carry out, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STRIKES = 3
#: Deaths in a row with none of our jobs in flight and nobody else's, before giving up.
IDLE_DEATHS = 2
#: Deaths in all that say nothing about a job of ours: another client's job was in flight (its own client
#: sorts that out), or only isolated ones that should not have been together.
FOREIGN_DEATHS = 20


@dataclass(frozen=True)
class Begin:
    """First event: start the first trainer."""


@dataclass(frozen=True)
class Passed:
    """`job` has done `step` optimizer steps (`Stepped.step`)."""

    job: str
    step: int


@dataclass(frozen=True)
class Ended:
    """`job` completed, was stopped, diverged or failed by itself, or has paused where it was asked to: it
    will not run again, unless it is `Added`."""

    job: str


@dataclass(frozen=True)
class Added:
    """`job` is to run from now on: a new one, or one that has ended here before. It keeps its strikes."""

    job: str


@dataclass(frozen=True)
class Died:
    """The trainer is dead. `in_flight` is its breadcrumb: (job, step) pairs, other clients' jobs included;
    `detail` is how it died ("killed by SIGSEGV"), for the reasons."""

    in_flight: tuple[tuple[str, int], ...]
    detail: str = ""


@dataclass(frozen=True)
class Moved:
    """The client has left the trainer, which was well: its jobs are checkpointed and run in none."""


@dataclass(frozen=True)
class StartTrainer:
    """Start a new trainer and submit `jobs` to it, resumed from their checkpoints where they have one.
    `alone`: they are on probation or isolated, nobody may be added but by `Admit`."""

    jobs: tuple[str, ...]
    alone: bool


@dataclass(frozen=True)
class Hold:
    """Pause `job` in the running trainer: it is cleared and waits for the other suspects."""

    job: str


@dataclass(frozen=True)
class Admit:
    """In the running trainer: submit the jobs of `submit` (with resume), un-pause those of `unpause`."""

    submit: tuple[str, ...]
    unpause: tuple[str, ...] = ()


@dataclass(frozen=True)
class MarkFailed:
    job: str
    reason: str


@dataclass(frozen=True)
class GiveUp:
    """Stop trying. `jobs` have not ended: report them as failed with `reason`."""

    jobs: tuple[str, ...]
    reason: str


Event = Begin | Passed | Ended | Added | Died | Moved
Action = StartTrainer | Hold | Admit | MarkFailed | GiveUp


def restart_bound(n_jobs: int) -> int:
    """The most trainers that n jobs can need while no other client's job is in flight.

    Each death with jobs in flight fails a job (n at most) or gives a strike to one that is not yet
    isolated (STRIKES · n at most); before each, and at the end, one idle death may stand. Other clients'
    jobs add at most 2 · `FOREIGN_DEATHS`. A job that was added after it had ended counts once.
    """
    return 2 * ((STRIKES + 1) * n_jobs + 1)


class Suspects:
    def __init__(self, jobs: Sequence[str]) -> None:
        assert len(set(jobs)) == len(jobs), jobs
        self._alive: list[str] = list(jobs)  # not ended, in the order given
        self._strikes: dict[str, int] = dict.fromkeys(jobs, 0)
        self._queue: list[tuple[str, int]] = []  # suspects still to be tried: (job, step to reach)
        self._in_trainer: set[str] = set()  # submitted to the running trainer and not ended
        self._held: list[str] = []
        self._alone: str | None = None  # the one job that runs now on probation or isolated
        self._idle_deaths = 0
        self._foreign_deaths = 0
        self._gave_up = False
        self._has_trainer = False  # one runs, or is being started

    @property
    def done(self) -> bool:
        """Every job has ended, or the machine gave up."""
        return self._gave_up or not self._alive

    @property
    def alone(self) -> str | None:
        """The job that runs alone now, None when the jobs run together."""
        return self._alone

    @property
    def isolated(self) -> bool:
        """Whether the job that runs alone does so to its end."""
        return self._alone is not None and self._isolated(self._alone)

    def handle(self, event: Event) -> list[Action]:
        if isinstance(event, Died | Moved):
            self._has_trainer = False
        if isinstance(event, Added) and not self._gave_up:
            return self._added(event.job)
        if self.done:
            return []
        if isinstance(event, Begin | Moved):
            return [self._start()]
        if isinstance(event, Passed):
            return self._passed(event.job, event.step)
        if isinstance(event, Ended):
            return self._ended(event.job)
        assert isinstance(event, Died), event
        return self._died(event)

    def _isolated(self, job: str) -> bool:
        return self._strikes[job] >= STRIKES

    def _next_group(self) -> tuple[str, ...]:
        """Who runs next: the first suspect alone, else all that are not isolated, else one isolated."""
        if self._queue:
            return (self._queue[0][0],)
        together = tuple(job for job in self._alive if not self._isolated(job))
        return together or tuple(self._alive[:1])

    def _start(self) -> StartTrainer:
        group = self._next_group()
        self._enter(group)
        self._in_trainer = set(group)
        self._has_trainer = True
        self._held = []
        return StartTrainer(group, alone=self._alone is not None)

    def _enter(self, group: tuple[str, ...]) -> None:
        on_trial = bool(self._queue) or self._isolated(group[0])
        self._alone = group[0] if on_trial else None

    def _admit_next(self) -> list[Action]:
        """In the running trainer, go on to the next group; nothing when it runs already."""
        group = self._next_group()
        self._enter(group)
        submit = tuple(job for job in group if job not in self._in_trainer)
        unpause = tuple(job for job in group if job in self._held)
        self._in_trainer |= set(submit)
        self._held = [job for job in self._held if job not in unpause]
        return [Admit(submit, unpause)] if submit or unpause else []

    def _passed(self, job: str, step: int) -> list[Action]:
        self._idle_deaths = 0
        if not self._queue or self._queue[0][0] != job or step < self._queue[0][1]:
            return []
        del self._queue[0]
        group = self._next_group()
        hold: list[Action] = []
        # It stays only if it belongs to what runs next.
        if job not in group:
            self._held.append(job)
            hold = [Hold(job)]
        return hold + self._admit_next()

    def _ended(self, job: str) -> list[Action]:
        if job not in self._alive:
            return []
        self._alive.remove(job)
        self._in_trainer.discard(job)
        if job in self._held:
            self._held.remove(job)
        self._queue = [(name, step) for name, step in self._queue if name != job]
        if not self._alive:
            self._alone = None
            return []
        # The others go on by themselves, unless what ended was what they waited for.
        running = self._in_trainer - set(self._held)
        return [] if running else self._admit_next()

    def _added(self, job: str) -> list[Action]:
        assert job not in self._alive, job
        self._alive.append(job)
        self._strikes.setdefault(job, 0)
        if not self._has_trainer:
            return [self._start()]
        # Beside a job on trial, or an isolated one, nobody may run: it is admitted with the next group.
        return [] if self._alone is not None else self._admit_next()

    def _died(self, event: Died) -> list[Action]:
        how = f" ({event.detail})" if event.detail else ""
        ours = [(job, step) for job, step in event.in_flight if job in self._alive]
        foreign = len(event.in_flight) - len(ours)
        if not event.in_flight:
            self._idle_deaths += 1
            if self._idle_deaths >= IDLE_DEATHS:
                return self._give_up(
                    f"the trainer died {self._idle_deaths} times in a row with no step in flight{how}; "
                    "its log says why"
                )
            return [self._start()]
        self._idle_deaths = 0
        if not foreign and [job for job, _ in ours] == [self._alone]:
            (job, step) = ours[0]
            failed = MarkFailed(job, f"the trainer died at step {step} of this job, running alone{how}")
            self._ended_dead(job)
            self._alone = None
            return [failed, self._start()] if self._alive else [failed]
        if foreign or all(self._isolated(job) for job, _ in ours):
            self._foreign_deaths += 1
            if self._foreign_deaths >= FOREIGN_DEATHS:
                return self._give_up(
                    f"the trainer died {self._foreign_deaths} times in steps of other clients' jobs{how}"
                )
        for job, _ in ours:
            self._strikes[job] += 1
        waiting = [(job, step) for job, step in self._queue if job not in dict(ours)]
        # An isolated job needs no trial of its own: it runs alone to its end anyway.
        trials = [(job, step + 1) for job, step in ours if not self._isolated(job)]
        self._queue = trials + [(job, step) for job, step in waiting if not self._isolated(job)]
        return [self._start()]

    def _ended_dead(self, job: str) -> None:
        self._alive.remove(job)
        self._queue = [(name, step) for name, step in self._queue if name != job]

    def _give_up(self, reason: str) -> list[Action]:
        self._gave_up = True
        return [GiveUp(tuple(self._alive), reason)]
