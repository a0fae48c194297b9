"""Rounds one after the other, and the next one queued before the last is read.

    run_round:  queue k + 1 | wait for k | tell k's steps, evaluate, save
                            \\_ the device goes on with k + 1 meanwhile

So the device never waits for the host that reads, decides and lays the next round out. Nothing is queued
behind a round after which the host has to look at the weights (`Job.ends_in_host_work`), nor where the
schedule goes by results, nor behind a round that could not be started for want of memory. A job that ends by
what round k gave is in round k + 1 all the same: its adapter is left alone there by the device, and what that
round says of it is dropped.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gshare.agent.jobs.events import Evaluated, Stepped
from gshare.agent.jobs.schedules import JobView
from gshare.agent.trace import STEP_SPAN
from gshare.agent.train.books import Books
from gshare.agent.train.job import Job
from gshare.agent.train.rounds import Round, Rounds, StepOutcome

log = logging.getLogger(__name__)


@dataclass
class _Flight:
    """A round that was begun and not read."""

    jobs: list[Job]
    rates: list[float]
    round: Round
    begun: float  # time.monotonic()


class Pipeline:
    """Runs scheduled rounds of the jobs in the books. `on_pass` is told what is in flight, for the crumb."""

    def __init__(
        self,
        books: Books,
        rounds: Rounds,
        *,
        max_adapters: int,
        on_pass: Callable[[Sequence[tuple[str, int]]], None],
    ) -> None:
        self._books = books
        self._rounds = rounds
        self._max_adapters = max_adapters
        self._on_pass = on_pass
        self._ahead: _Flight | None = None
        self._read_at = -math.inf  # when the last round's results were there
        self._first = True

    def run_round(self) -> bool:
        """One optimizer step of the scheduled jobs, and what falls due after it, or the wait for files that
        are all there is to wait for. False: nothing runnable."""
        self._books.collect_saves()
        flight, self._ahead = self._ahead, None
        jobs = flight.jobs if flight is not None else self._choose(quietly=False)
        if not jobs:
            return self._books.wait_for_files()
        with self._books.tracer.span(STEP_SPAN, adapters=len(jobs)):
            flight = flight or self._begin(jobs, behind=[])
            if self._may_queue_behind(flight):
                following = self._choose(quietly=True)
                if following:
                    self._ahead = self._begin(following, behind=flight.jobs)
            self._read(flight)
        self._follow_up(flight)
        return True

    def drain(self) -> None:
        """Finish what is in flight, so that the jobs are at the steps that their books say."""
        flight, self._ahead = self._ahead, None
        if flight is not None:
            with self._books.tracer.span(STEP_SPAN, adapters=len(flight.jobs)):
                self._read(flight)
            self._follow_up(flight)

    # ------------------------------------------------------------------ choosing and queueing

    def _choose(self, *, quietly: bool) -> list[Job]:
        """The next round's jobs. A job whose rows cannot be read fails; `quietly`: nobody is chosen then,
        and the job fails when it is its turn, after the step that it is in."""
        work = []
        for job in self._books.running():
            try:
                work.append((job, job.next_work()))
            except Exception as error:
                if quietly:
                    return []
                self._books.fail(job, error)
        views = [
            JobView(
                name=job.name,
                client=job.request.client,
                weight=job.spec.weight,
                order=job.order,
                step=job.begun,
                next_tokens=step.tokens,
                last_val_loss=job.last_val_loss,
            )
            for job, step in work
        ]
        chosen = self._books.schedule.next_round(
            views, max_tokens=self._rounds.max_tokens, max_adapters=self._max_adapters
        )
        return [self._books.jobs[name] for name in chosen]

    def _may_queue_behind(self, flight: _Flight) -> bool:
        """Whether the next round needs nothing of what this one gives. The first of all is read by itself:
        what it takes is recorded as the reservation's `first_step`."""
        return (
            self._rounds.engine.queues_ahead
            and not self._first
            and flight.round.error is None
            and not self._books.schedule.by_results
            and not any(job.is_active and job.ends_in_host_work() for job in flight.jobs)
        )

    def _begin(self, jobs: list[Job], *, behind: list[Job]) -> _Flight:
        work, rates = [job.next_work() for job in jobs], [job.learning_rate() for job in jobs]
        # Each job once, at the later of its steps: a trial of a suspect alone must go beyond both.
        in_flight = {job.name: job.begun - 1 for job in behind} | {job.name: job.begun for job in jobs}
        self._on_pass(list(in_flight.items()))
        begun = time.monotonic()
        flight = _Flight(jobs, rates, self._rounds.start(work, rates), begun)
        for job, step in zip(jobs, work, strict=True):
            job.begun += 1
            self._books.schedule.ran(job.name, step.tokens)
        return flight

    # ------------------------------------------------------------------ reading and committing

    def _read(self, flight: _Flight) -> None:
        """Wait for the round and commit it. `seconds` is the time from when it was begun, or from when the
        round before it was there if that is later, until its own results are there."""
        self._leave_out_ended(flight)
        limit = self._rounds.max_tokens
        outcomes = self._rounds.finish(flight.round) if flight.jobs else []
        if self._rounds.max_tokens < limit:
            self._books.say(
                "warning", f"out of memory: going on with {self._rounds.max_tokens} tokens a pass"
            )
        now = time.monotonic()
        seconds = now - max(flight.begun, self._read_at)
        self._read_at = now
        for job, rate, outcome in zip(flight.jobs, flight.rates, outcomes, strict=True):
            if job.is_active:  # what the round before gave, or a failed save, may have ended it
                self._commit(job, outcome, rate, seconds)

    def _leave_out_ended(self, flight: _Flight) -> None:
        """A round that is yet to be started must not have a job that has ended: its adapter is gone."""
        if flight.round.error is None or all(job.is_active for job in flight.jobs):
            return
        kept = [index for index, job in enumerate(flight.jobs) if job.is_active]
        flight.jobs = [flight.jobs[index] for index in kept]
        flight.rates = [flight.rates[index] for index in kept]
        work = [flight.round.work[index] for index in kept]
        flight.round = self._rounds.start(work, flight.rates) if work else flight.round

    def _commit(self, job: Job, outcome: StepOutcome, learning_rate: float, seconds: float) -> None:
        """Update one adapter from its gradients, or end it when they are not finite."""
        if outcome.error is not None:
            self._books.fail(job, outcome.error)
            return
        finite = math.isfinite(outcome.loss) and math.isfinite(outcome.grad_norm)
        if finite:
            try:
                finite = self._rounds.update(outcome, learning_rate)
            except Exception as error:  # of this adapter: its newest checkpoint stands, the others go on
                self._books.fail(job, error)
                return
        job.step += 1
        job.tokens += outcome.work.tokens
        job.last_loss = outcome.loss
        event = Stepped(
            job=job.name,
            step=job.step,
            total_steps=job.total_steps,
            epoch=job.epoch,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            learning_rate=learning_rate,
            tokens=outcome.work.tokens,
            label_tokens=outcome.work.label_tokens,
            seconds=seconds,
            adapters_in_pass=outcome.adapters_in_pass,
            trunk_shared=outcome.trunk.shared,
        )
        if not self._books.record(job, event, type="step"):
            return
        self._books.emit(event)
        if job.patterns is not None:
            job.patterns.handle(event)
        if not finite:
            what = "weights are" if math.isfinite(outcome.loss) else "loss is"
            if math.isfinite(outcome.loss) and not math.isfinite(outcome.grad_norm):
                what = "gradient norm is"
            self._books.diverge(job, what)

    # ------------------------------------------------------------------ what follows a step

    def _follow_up(self, flight: _Flight) -> None:
        books = self._books
        books.guard.keep()
        if self._first:
            self._first = False
            books.guard.record("first_step")
        jobs = flight.jobs
        self.evaluate([job for job in jobs if job.is_active and job.evaluation_is_due])
        for job in jobs:
            if job.is_active and job.due(job.spec.save_steps):
                books.save(job, "step")
            if job.is_active and job.step >= job.total_steps:
                books.finish(job)
            elif job.is_active and job.at_pause:
                books.park(job)
        ahead = self._ahead.jobs if self._ahead is not None else []
        self._on_pass([(job.name, job.begun - 1) for job in ahead])

    def evaluate(self, jobs: Sequence[Job]) -> None:
        """The validation loss of each as it is now, between two of its steps, and what follows from it."""
        books = self._books
        with_rows = [job for job in jobs if len(job.data.val_rows)]
        if not with_rows:
            return
        try:
            with books.tracer.span("Evaluate", adapters=len(with_rows)):
                losses = self._rounds.evaluate([(job.adapter, job.data.validation()) for job in with_rows])
            books.guard.record("eval")
        except Exception as error:
            if len(with_rows) == 1:
                books.fail(with_rows[0], error)
                return
            log.warning("evaluation of %d jobs failed (%s); evaluating each alone", len(with_rows), error)
            for job in with_rows:
                self.evaluate([job])
            return
        for job, loss in zip(with_rows, losses, strict=True):
            if not job.is_active:  # the end of one before it waited for files, and its own were not written
                continue
            best = job.note_evaluation(loss)
            event = Evaluated(
                job=job.name,
                step=job.step,
                val_loss=loss,
                label_tokens=sum(row.label_tokens for row in job.data.validation()),
                best=best,
            )
            if not books.record(job, event, type="eval"):
                continue
            books.emit(event)
            if not math.isfinite(loss):
                books.diverge(job, "validation loss is")
                continue
            if best:
                books.save(job, "best")
            cause = job.patterns.handle(event) if job.patterns is not None else None
            # At its last step it completes: there is nothing left to be spared.
            if cause is not None and job.step < job.total_steps:
                books.leave_early(job, cause)
