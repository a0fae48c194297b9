"""A sweep's decisions: made by its machine, on the disk before they are carried out.

Who trains (`sweeping.py` here, `coordinator/sweeping.py` on a cluster) tells what happens and gets what is to
be done. So a sweep that is killed anywhere goes on from the same decision: what was decided and not done is
done again, what was done and not written down comes out the same again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gshare.agent.data.work import Work
from gshare.agent.errors import EXIT_FAILURE, EXIT_OK
from gshare.agent.jobs.events import Event, TrainerMessage
from gshare.agent.jobs.selection import describe_rank
from gshare.agent.jobs.spec import JobRequest
from gshare.agent.jobs.sweep import Action, Added, Ask, Note, Run, Stop, Sweep
from gshare.agent.jobs.sweep import Event as SweepEvent
from gshare.agent.jobs.sweep_records import Decision, DecisionLog


@dataclass(frozen=True)
class Job:
    """A configuration as it is sent to a trainer, and what it has to do."""

    request: JobRequest
    work: Work


#: Of a configuration whose files could not be written.
UNRANKED = "its files could not be written: the sweep stops here, since nobody is to be ranked without it"

#: The next configurations of a sampled sweep, with their trials.
Draw = Callable[[], tuple[Added, dict[str, Job]]]


class Deciding:
    """`jobs`: those known so far, of which a sampled sweep gets more. `on_event` hears who goes on."""

    def __init__(
        self,
        sweep: Sweep,
        jobs: dict[str, Job],
        log: DecisionLog,
        on_event: Callable[[Event], None],
        draw: Draw | None = None,
    ) -> None:
        self.sweep = sweep
        self.jobs = jobs
        self._log = log
        self._on_event = on_event
        self._draw = draw
        self._last: dict[str, Decision] = {}  # of this life

    def handle(self, event: SweepEvent) -> Iterator[Run | Stop]:
        """What is to be done, each after what is written down before it. GshareError: a full disk."""
        return self._written(self.sweep.handle(event))

    @property
    def code(self) -> int:
        """The exit code of a sweep that is done: 1 when something failed in this life, or nobody won."""
        failed = any(one.event == "failed" for one in self._last.values())
        return EXIT_FAILURE if failed or self.sweep.winner is None else EXIT_OK

    def _written(self, actions: Iterable[Action]) -> Iterator[Run | Stop]:
        for action in actions:
            if isinstance(action, Note):
                self._note(action)
            elif isinstance(action, Ask):
                assert self._draw is not None
                added, jobs = self._draw()
                self.jobs.update(jobs)
                yield from self.handle(added)
            else:
                assert isinstance(action, Run | Stop), action
                yield action

    def _note(self, note: Note) -> None:
        decision = Decision(
            time=time.time(),
            job=note.job,
            event=note.event,
            step=note.step,
            samples=self.jobs[note.job].work.samples(note.step),
            pattern=note.pattern,
            reason=note.reason,
            evidence=note.evidence,
        )
        self._log.append(decision)
        self._last[note.job] = decision
        if note.event == "selected":
            rank = describe_rank(note.evidence) if note.evidence else note.reason
            text = f"goes on after its warm-up: {rank}"
            self._on_event(TrainerMessage(level="info", text=text, job=note.job))
