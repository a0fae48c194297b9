"""The client that answers for its jobs: gets them a trainer, another one when it dies, and stops them.

Which job to blame for a crash is decided by the state machine in `agent/jobs/suspects.py`; here are its
effects. Jobs on trial run on a trainer of this client's own; when they have passed it is opened for others.
Ctrl-C, SIGTERM and SIGHUP stop this client's own jobs with a checkpoint; a second one leaves at once, which
the trainer sees as a client that is gone: it checkpoints and stops the jobs by itself.

Needs no main thread: signals are the caller's (`StopRequest.listening`), and another thread stops it by
`stop.exit_code`.
"""

from __future__ import annotations

import contextlib
import time

import msgspec
from gshare.agent.errors import EXIT_OK, EXIT_RETRY, EXIT_SIGTERM, GshareError, RetryLater
from gshare.agent.jobs import suspects
from gshare.agent.jobs.events import TrainerMessage
from gshare.agent.jobs.spec import JobRequest
from gshare.agent.service.breadcrumb import read_breadcrumb
from gshare.agent.service.client import TrainerClient, TrainerGone
from gshare.agent.service.finding import Finder, Found
from gshare.agent.service.hold import Joined, Spawned
from gshare.agent.service.joining import waiting_on_trial
from gshare.agent.service.journal import read_journal
from gshare.agent.service.own_jobs import OwnJobs
from gshare.agent.service.protocol import OpenTrainer, PauseJobs, ResumeJobs, StopJobs
from gshare.agent.service.registry import ExitRecord, TrainerConfig, leave_dead, read_exit, take_over
from gshare.agent.service.stopping import StopRequest

__all__ = ["StopRequest", "Supervisor"]

#: How long the client waits for a trainer that nobody uses any more: its memory should be free on return.
EXIT_WAIT_SECONDS = 10.0
#: A trainer after a crash waits at least so long for its memory: the driver frees that of the dead one late.
RESTART_WAIT_SECONDS = 60.0
#: While its own trainer waits for memory a client asks the others for room so often, seconds.
SWITCH_SECONDS = 2.0
#: A stop is applied between two rounds, and writes a checkpoint.
MOVE_SECONDS = 60.0
#: A trainer that nobody else uses ends half a second after the last client.
HANG_UP_SECONDS = 2.0
_POLL = 0.1  # seconds; the longest a signal or the screen waits


class Supervisor(OwnJobs):
    """Runs `requests` to their ends. `on_event` gets every event in order; `on_tick` runs every `_POLL` s.

    `client` is this client's name, for people and for its share of a trainer; with `join` its jobs go to a
    trainer that runs with the same base, when there is one, and others may join the one that it starts.
    `first`: the jobs to begin with, the others wait for `go_on`; None: all.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.finder = Finder(self.config, self.client, list(self._by_name), self.on_event)
        #: Jobs to be submitted to the trainer that is looked for.
        self._searching: tuple[str, ...] | None = None
        self._closed = False  # the trainer is ours alone until its jobs are off trial
        self._next_switch = 0.0
        self._stop_sent = False
        self.logs: list[str] = []  # of the trainers that ran, for a last message

    def run(self) -> int:
        """Returns the command's exit code: 0 all completed, 1 some failed or diverged, 130 or 143 stopped,
        75 when those that failed were refused only because another trainer writes to their directories."""
        try:
            self._actions.extend(self._machine.handle(suspects.Begin()))
            while not self._machine.done:
                self._turn()
                self.on_tick()
        finally:
            self._leave()
        return self._code()

    def go_on(self, request: JobRequest) -> None:
        """Train a job that was not among the `first`, or has paused at its `pause_at`: to the end, or to the
        later one that `request` says. `on_event` may call this."""
        job = request.spec.name
        self._by_name[job] = request
        self._actions.extend(self._machine.handle(suspects.Added(job)))

    def drop(self, job: str, reason: str) -> None:
        """Stop a job that has paused at its `pause_at`, here or in a trainer that is gone."""
        if job in self._parked and self._connection is not None:
            with contextlib.suppress(TrainerGone):  # then the next look at it says so
                self._connection.send(StopJobs, jobs=[job], reason=reason)
        else:
            self._end(job, "stopped", reason)

    def _turn(self) -> None:
        if self.stop.exit_code is not None and not self._stop_sent:
            self._stop_own()
            return
        try:
            if self._searching is not None:
                self._search(self._searching)
                return
            if self._actions:
                self._do(self._actions.popleft())
                return
            self._look_elsewhere()
            assert self._connection is not None
            events = self._connection.poll(_POLL)
            for request_id in list(self._waiting):
                self._answered(request_id)
            for event in self._ours(events):
                self._actions.extend(self._take(event))
            if self._closed and self._machine.alone is None and not self._machine.done:
                self._off_trial()
        except TrainerGone:
            self._died()

    def _do(self, action: suspects.Action) -> None:
        if isinstance(action, suspects.StartTrainer):
            self._start(action)
        elif isinstance(action, suspects.Admit):
            self._admit(action)
        elif isinstance(action, suspects.Hold):
            self._send(PauseJobs, (action.job,))
        elif isinstance(action, suspects.MarkFailed):
            self._end(action.job, "failed", action.reason)
        else:
            self.over = True
            for job in action.jobs:
                self._end(job, "failed", action.reason)

    @property
    def joined(self) -> bool:
        """Whether the trainer that runs now was started by another client."""
        return isinstance(self._trainer, Joined)

    def _start(self, action: suspects.StartTrainer) -> None:
        self._here, self._parked = set(), set()
        self._waiting, self._held = {}, []
        self._answered_once = False
        self._closed = action.alone
        self._searching = action.jobs
        self.finder.search(
            self._config(), alone=action.alone, never_open=action.alone and self._machine.isolated
        )

    def _search(self, jobs: tuple[str, ...]) -> None:
        try:
            found = self.finder.poll(_POLL)
        except RetryLater as error:
            self._searching = None
            self._exit_code = EXIT_RETRY
            self._end_all("failed", str(error))
            return
        if found is not None:
            self._searching = None
            self._use(found, jobs)

    def _use(self, found: Found, jobs: tuple[str, ...]) -> None:
        self._trainer, self._connection = found.trainer, found.connection
        self.logs.append(str(self._trainer.log))
        if self._trainer.no_log:
            self._warn(self._trainer.no_log)
        if self._connection is None:
            self._connection = TrainerClient(self._trainer.directory, self.client)
            self._connection.follow(list(self._by_name))
        self._submit(jobs)
        # Answered after the jobs have arrived: from here on the trainer lists them to whoever asks.
        self._connection.jobs()
        self.on_connected()

    def _config(self) -> TrainerConfig:
        """The configuration of the next trainer: after a crash the memory of the dead one is waited for."""
        gpu = self.config.gpu
        if gpu is None or not self.logs:
            return self.config
        gpu = msgspec.structs.replace(gpu, timeout_s=max(gpu.timeout_s, RESTART_WAIT_SECONDS))
        return msgspec.structs.replace(self.config, gpu=gpu)

    def _admit(self, action: suspects.Admit) -> None:
        """The next jobs of the machine, in this trainer if they may run in it."""
        if self._machine.alone is not None and not self._closed:
            self._move()  # others may be here, and nobody may be beside this one
            return
        self._submit(action.submit)
        if action.unpause:
            self._send(ResumeJobs, action.unpause)

    def _off_trial(self) -> None:
        """The jobs that were on trial have passed: others may come, or there is somebody to make room for."""
        assert self._connection is not None
        if self.config.join_key and waiting_on_trial(self.config):
            # Another client's jobs wait, on trial, for the memory that this trainer holds.
            self._move()
            return
        self._closed = False
        self._connection.send(OpenTrainer)

    def _move(self) -> None:
        """Leave the trainer, which checkpoints this client's jobs, and go on with them in another one."""
        assert self._connection is not None
        self._actions.clear()
        with contextlib.suppress(GshareError):
            self._connection.ask(StopJobs, jobs=[], reason="goes on in another trainer", timeout=MOVE_SECONDS)
        self._hang_up()
        self._actions.extend(self._machine.handle(suspects.Moved()))

    def _hang_up(self) -> None:
        """What the trainer says from now on of this client's jobs does not matter: they go on elsewhere."""
        assert self._trainer is not None
        assert self._connection is not None
        self.finder.leave(self._trainer.directory)
        self._connection.close()
        self._trainer.release()
        self._trainer.wait_gone(HANG_UP_SECONDS)
        self._trainer = self._connection = None
        self._parked = set()

    def _look_elsewhere(self) -> None:
        """While this client's own trainer waits for memory: whether another one has room now."""
        own = self._trainer
        if self._answered_once or not isinstance(own, Spawned) or self._closed or not self.config.join_key:
            self.finder.cancel()
            return
        if self.config.gpu is None:
            return  # nothing to wait for
        if not self.finder.asking:
            if time.monotonic() < self._next_switch:
                return
            self._next_switch = time.monotonic() + SWITCH_SECONDS
            assert self._connection is not None
            if not any(status.position for status in self._connection.jobs()):
                return  # it has its memory and loads the base
            self.finder.switch(own)
        found = self.finder.poll_switch()
        if found is not None:
            active = set(self.table.active())  # one may have been stopped while it waited
            jobs = tuple(job for jobs in self._waiting.values() for job in jobs if job in active)
            self._hang_up()
            self._here, self._waiting, self._held = set(), {}, []
            self._use(found, jobs)

    def _stop_own(self) -> None:
        self._stop_sent = True
        self._actions.clear()
        for job in self._by_name:
            if job not in self._here:
                self._end(job, "stopped", "stopped before it was started")
        self.finder.cancel()
        self._searching = None
        if self._connection is None or self._trainer is None:
            return
        if not self._answered_once:
            # The base is still being loaded, perhaps for minutes. Hanging up is enough: the trainer drops
            # these jobs, and ends when nobody else uses it.
            for job in self._here:
                self._end(job, "stopped", "stopped before it was started")
            return
        try:
            self._connection.send(StopJobs, jobs=[], reason=self.stop.reason)
        except TrainerGone:
            self._died()

    def _died(self) -> None:
        """The trainer is gone: takes what it left behind, then lets the machine decide."""
        assert self._trainer is not None
        trainer, connection = self._trainer, self._connection
        code = trainer.wait_dead()
        self._trainer = self._connection = None
        seq = 0
        if connection is not None and connection.directory == trainer.directory:
            self._waiting = {}  # nobody answers any more
            for event in self._ours(connection.pending()):
                self._take(event)
            seq = connection.seq
            connection.close()
        # Durable events that were written down and no longer sent, so that each still comes exactly once.
        for event in read_journal(trainer.directory / "journal.jsonl", after_seq=seq):
            if not event.job or event.job in self._here:
                self._take(event)
        ended_in_order = read_exit(trainer.directory)
        if ended_in_order is None and code in (EXIT_OK, EXIT_SIGTERM):
            ended_in_order = ExitRecord(code=code, reason="it could not write down why")  # a full disk
        in_flight = read_breadcrumb(trainer.directory)
        take_over(trainer.directory, list(self._by_name))
        trainer.release()
        leave_dead(trainer.directory)
        self._actions.clear()
        self._here = set()
        if self._machine.done:
            return
        if ended_in_order is not None:
            if ended_in_order.code == EXIT_RETRY and len(self.logs) == 1:  # no memory within the time
                # It has said why itself, once. After a crash its jobs did run, and fail.
                self._exit_code = EXIT_RETRY
                self.over = True
                for status in self.table.all():
                    self._end(status.job, "stopped", "not started; it can be tried again later", ran=False)
                return
            stopped = ended_in_order.code in (EXIT_OK, EXIT_SIGTERM)
            self._exit_code = None if stopped else ended_in_order.code
            self._end_all("stopped" if stopped else "failed", f"the trainer ended: {ended_in_order.reason}")
            return
        how = trainer.how_it_died(code)
        if self.stop.exit_code is not None:
            self._end_all("failed", f"the trainer died while stopping ({how}); continue with --resume")
            return
        names = ", ".join(f"{job} at step {step}" for job, step in in_flight) or "no job"
        text = f"the trainer died ({how}) with {names} in flight; resuming on a new one (log: {trainer.log})"
        self.on_event(TrainerMessage(level="warning", text=text))
        self._actions.extend(self._machine.handle(suspects.Died(tuple(in_flight), how)))
        while self._machine.done and self._actions:
            self._do(self._actions.popleft())  # the last MarkFailed, or GiveUp: `run` goes no further

    def _leave(self) -> None:
        """Hangs up, which ends the trainer unless others use it, and waits for it."""
        self.finder.cancel()
        others = 0
        if self._connection is not None:
            if self._answered_once and not self.table.active():
                with contextlib.suppress(GshareError):
                    others = self._connection.others()
            self._connection.close()
        if self._trainer is not None:
            self._trainer.release()
            if self.table.active() or others:
                return  # leaving at once: the trainer stops these by itself; or others use it
            self._trainer.wait_gone(EXIT_WAIT_SECONDS)
            leave_dead(self._trainer.directory)
