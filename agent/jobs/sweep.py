"""A sweep as a state machine: everything through its warm-up, the best share of it to the end.

    waiting ─Run→ warming ─Paused at its boundary→ ready ─ranked→ chosen ─Run→ training → ended
                     └── a pattern, an error, a person ──────────→ ended ←── ranked: the others

All K configurations go through the warm-up, as many at once as fit; each pauses at its boundary and gives its
memory back. When nobody is left in the warm-up, those at the boundary are ranked by validation loss, like
with like (`selection.py`), and ⌈keep · K⌉ go on, with optimizer and counters as they were. A configuration
whose boundary would be its last step is ranked by its last validation loss.

What a job does in its warm-up, and after it, depends on nothing beside it (its early exit is its own machine,
its boundary a step). So the losses that are ranked, who goes on, and who wins are the same whatever fits at
once, in whatever order things end, and however often somebody is killed: `replay` brings a machine to where
the written decisions say, and what was not written is decided again, equally. A chosen one that lost its
checkpoints repeats its warm-up with the evaluation at its boundary, which its early exit counts, and goes on.

Events in, actions out; no clock, file or socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gshare.agent.jobs.early_exit import SweepExit
from gshare.agent.jobs.events import JobStateName
from gshare.agent.jobs.packing import Candidate, Packing
from gshare.agent.jobs.selection import Contender, describe_drop, evidence_of, select, share_of, standings
from gshare.agent.jobs.sweep_records import Decision, DecisionEvent, Pattern

Phase = Literal["waiting", "warming", "ready", "chosen", "training", "ended"]


@dataclass(frozen=True)
class Trial:
    """One configuration, as the machine sees it."""

    name: str
    batch: int
    total_steps: int
    boundary: int  # steps of its warm-up; 0: it has none, and runs to its end

    @classmethod
    def of(cls, name: str, *, batch: int, total_steps: int, warmup: float) -> Trial:
        """⌈warmup · total_steps⌉ steps of warm-up, where there is a step after them."""
        boundary = share_of(warmup, total_steps)
        return cls(name, batch, total_steps, boundary if boundary < total_steps else 0)


# ---------------------------------------------------------------------- events


@dataclass(frozen=True)
class Begin:
    """First event, after any `replay`."""


@dataclass(frozen=True)
class Added:
    """The configurations that an `Ask` asked for; none: there are no more."""

    trials: tuple[Trial, ...]


@dataclass(frozen=True)
class Paused:
    """A job has paused at `step`; `val_loss` is its last one."""

    job: str
    step: int
    val_loss: float


@dataclass(frozen=True)
class Resumed:
    """A job runs (again)."""

    job: str
    step: int


@dataclass(frozen=True)
class Ended:
    """A job has ended, by itself or by a person (`pattern` "user")."""

    job: str
    state: JobStateName
    step: int
    val_loss: float | None = None
    best_val_loss: float | None = None
    pattern: Pattern = ""
    reason: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------------- actions


@dataclass(frozen=True)
class Run:
    """Train `job` on from wherever it is, to `pause_at`; 0, or a step behind it: to its end."""

    job: str
    pause_at: int


@dataclass(frozen=True)
class Stop:
    """End `job`, which is paused; its files stay."""

    job: str
    reason: str


@dataclass(frozen=True)
class Note:
    """Write this down before the actions after it are carried out."""

    job: str
    event: DecisionEvent
    step: int
    pattern: Pattern = ""
    reason: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ask:
    """Ask the sampler for more configurations, told all losses at the boundary so far. Answer by `Added`."""


Event = Begin | Added | Paused | Resumed | Ended
Action = Run | Stop | Note | Ask


@dataclass
class _Trial:
    trial: Trial
    phase: Phase = "waiting"
    step: int = 0
    loss: float | None = None  # at the boundary
    best: float | None = None
    verdict: Literal["", "chosen", "dropped"] = ""
    arrived: bool = False  # at its boundary, in this life: its checkpoint stands there
    paused: bool = False  # by a person, and not at the boundary; keeps its memory
    before: Phase = "waiting"  # what a failed one goes back to when the sweep is resumed


class Sweep:
    """One sweep. `expects_more`: there is a sampler to ask."""

    def __init__(
        self, trials: Sequence[Trial], settings: SweepExit, packing: Packing, *, expects_more: bool = False
    ) -> None:
        self._settings = settings
        self._packing = packing
        self._trials = {trial.name: _Trial(trial) for trial in trials}
        assert len(self._trials) == len(trials), trials
        self._expects_more = expects_more
        self._asked = False
        self._begun = False

    # ------------------------------------------------------------------ what is known

    @property
    def done(self) -> bool:
        return not self._expects_more and all(one.phase == "ended" for one in self._trials.values())

    @property
    def winner(self) -> str | None:
        """The configuration with the lowest validation loss at any evaluation, the earlier of equals; its
        adapter is in `best/`. None: no validation loss was a number."""
        with_best = [(one.best, name) for name, one in self._trials.items() if one.best is not None]
        return min(with_best, key=lambda pair: pair[0])[1] if with_best else None

    @property
    def ended(self) -> frozenset[str]:
        """Those that nobody trains any more."""
        return frozenset(name for name, one in self._trials.items() if one.phase == "ended")

    def phase(self, job: str) -> Phase:
        return self._trials[job].phase

    def lost(self, job: str, step: int) -> int:
        """The step at which `job` had a checkpoint when it was ranked, if it now runs from an earlier `step`;
        else 0. To be asked before `Resumed` is told."""
        one = self._trials[job]
        reached = min(one.step, one.trial.boundary) if one.verdict == "chosen" else 0
        return reached if step < reached else 0

    def told(self) -> dict[str, float | None]:
        """What a sampler is told of each: lower is better, by its loss at the boundary; None: it has none."""
        contenders = [Contender(one.trial.name, _steps(one.trial), one.loss) for one in self._trials.values()]
        if self._settings.rank == "all":
            return {one.name: one.loss for one in contenders}
        return standings(contenders)

    # ------------------------------------------------------------------ replay

    def replay(self, decisions: Iterable[Decision]) -> None:
        """Take back in what was decided; before `Begin`. A job that had failed is tried again, unless the
        others were ranked without it. Decisions about jobs that are not of this sweep are passed over."""
        assert not self._begun
        for decision in decisions:
            one = self._trials.get(decision.job)
            if one is not None:
                _replay(one, decision)
        ranked = any(one.verdict for one in self._trials.values())
        for one in self._trials.values():
            if one.phase == "ended" and one.before != "ended" and (one.verdict == "chosen" or not ranked):
                one.phase = one.before

    # ------------------------------------------------------------------ events

    def handle(self, event: Event) -> list[Action]:
        """The actions that follow from `event`, to be carried out in order."""
        actions: list[Action] = []
        if isinstance(event, Begin):
            self._begun = True
        elif isinstance(event, Added):
            self._asked, self._expects_more = False, bool(event.trials)
            self._trials.update({trial.name: _Trial(trial) for trial in event.trials})
        elif self._trials[event.job].phase == "ended":
            return []  # our own stop, or what was still said of it
        elif isinstance(event, Paused):
            actions += self._paused(event)
        elif isinstance(event, Resumed):
            actions += self._resumed(event)
        else:
            actions += self._ended(event)
        return [*actions, *self._go_on()]

    def note_best(self, job: str, best_val_loss: float) -> None:
        """A validation loss that was the job's best so far."""
        self._trials[job].best = best_val_loss

    def _paused(self, event: Paused) -> list[Action]:
        one = self._trials[event.job]
        one.step = event.step
        arrives = event.step == one.trial.boundary and not one.arrived
        one.arrived = one.arrived or arrives
        if one.phase == "training" and arrives:
            return [Run(event.job, 0)]  # ranked in an earlier life: it was to be evaluated here, no more
        if one.phase != "warming" or event.step != one.trial.boundary:
            one.paused = True
            return [Note(event.job, "paused", event.step, reason="by the user")]
        one.phase, one.loss = "ready", event.val_loss
        evidence = {"val_loss": event.val_loss, "best_val_loss": one.best}
        return [Note(event.job, "paused", event.step, reason="end of its warm-up", evidence=evidence)]

    def _resumed(self, event: Resumed) -> list[Action]:
        one = self._trials[event.job]
        one.step = event.step
        if one.paused:
            one.paused = False
            return [Note(event.job, "resumed", event.step, reason="by the user")]
        if one.phase == "ready":  # past its boundary by a person's word: nobody's rank stops it
            one.phase, one.verdict = "training", "chosen"
            return [Note(event.job, "selected", event.step, reason="resumed by the user")]
        return []

    def _ended(self, event: Ended) -> list[Action]:
        one = self._trials[event.job]
        one.step = event.step
        if event.best_val_loss is not None:
            one.best = event.best_val_loss
        if event.state == "completed" and not one.trial.boundary and not one.verdict:
            one.loss = event.val_loss
        one.phase = "ended"
        names: dict[str, DecisionEvent] = {
            "completed": "completed",
            "failed": "failed",
            "diverged": "diverged",
        }
        evidence = {**event.evidence, "val_loss": event.val_loss, "best_val_loss": one.best}
        name = names.get(event.state, "stopped")
        return [Note(event.job, name, event.step, event.pattern, event.reason, evidence)]

    # ------------------------------------------------------------------ what follows

    def _go_on(self) -> list[Action]:
        actions: list[Action] = []
        if not any(one.phase in ("waiting", "warming") for one in self._trials.values()):
            if self._expects_more:
                if not self._asked:
                    self._asked = True
                    return [Ask()]
                return []
            actions += self._rank()
        return [*actions, *self._admit()]

    def _admit(self) -> list[Action]:
        waiting = [one.trial for one in self._trials.values() if one.phase in ("waiting", "chosen")]
        running = [one.trial for one in self._trials.values() if one.phase in ("warming", "training")]
        admitted = self._packing.admit(
            [_candidate(one) for one in waiting], [_candidate(one) for one in running]
        )
        actions: list[Action] = []
        for job in admitted:
            one = self._trials[job]
            first = one.phase == "waiting"
            one.phase = "warming" if first else "training"
            actions += [
                Note(job, "started" if first else "resumed", one.step),
                # Chosen in an earlier life, it may have lost its checkpoints since.
                Run(job, 0 if one.arrived else one.trial.boundary),
            ]
        return actions

    def _rank(self) -> list[Action]:
        """Once, when the last one has left the warm-up; nobody is at the boundary afterwards."""
        if not any(one.phase == "ready" for one in self._trials.values()):
            return []
        settings = self._settings
        found = select(
            [_contender(one) for one in self._trials.values()],
            settings.keep if settings.underperformance else 1.0,
            among_all=settings.rank == "all",
        )
        actions: list[Action] = []
        for job, verdict in found.items():
            one = self._trials[job]
            if one.phase != "ready":
                continue
            evidence = {
                "val_loss": one.loss,
                **evidence_of(verdict, _steps(one.trial)),
                "best_val_loss": one.best,
            }
            step = one.step
            if verdict.goes_on:
                one.phase, one.verdict = "chosen", "chosen"
                actions.append(Note(job, "selected", step, evidence=evidence))
            else:
                one.phase, one.verdict = "ended", "dropped"
                reason = (
                    f"underperformance at step {step}: validation loss {one.loss:.4g} is "
                    f"{describe_drop(verdict)}"
                )
                actions += [
                    Note(job, "stopped", step, "underperformance", reason, evidence),
                    Stop(job, reason),
                ]
        return actions


def _contender(one: _Trial) -> Contender:
    return Contender(one.trial.name, _steps(one.trial), one.loss if _is_candidate(one) else None)


def _steps(trial: Trial) -> int:
    """After which it is ranked."""
    return trial.boundary or trial.total_steps


def _candidate(trial: Trial) -> Candidate:
    return Candidate(trial.name, trial.batch)


def _is_candidate(one: _Trial) -> bool:
    """At the boundary now, ranked already (some verdicts were written before a kill), or completed without
    one. Who was stopped at the boundary before the ranking is none."""
    return one.phase == "ready" or bool(one.verdict) or not one.trial.boundary


def _replay(one: _Trial, decision: Decision) -> None:
    if decision.event == "cloned":
        return
    one.step = decision.step
    best = decision.evidence.get("best_val_loss")
    one.best = best if best is not None else one.best
    loss = decision.evidence.get("val_loss")
    if decision.event == "paused" and decision.step == one.trial.boundary and loss is not None:
        one.phase, one.loss = "ready", loss
    elif decision.event == "selected":
        one.phase, one.verdict = "chosen", "chosen"
    elif decision.event == "completed" and not one.trial.boundary:
        one.phase, one.before, one.loss = "ended", "ended", loss
    elif decision.event == "stopped" and decision.pattern == "underperformance":
        one.phase, one.before, one.verdict = "ended", "ended", "dropped"
    elif decision.event == "failed":
        one.before, one.phase = one.phase, "ended"
    elif decision.event in ("stopped", "completed", "diverged"):
        one.phase = one.before = "ended"
    elif decision.event == "started" and one.phase == "ended":
        one.phase = "waiting"
