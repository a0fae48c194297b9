"""A client gets a trainer: it joins one that runs with the same base, else it starts its own.

    finder = Finder(config, client, jobs, on_event)
    finder.search(config, alone=False)
    while (found := finder.poll(0.1)) is None: …        # signals and the screen come in between

`alone`: jobs on trial run on a trainer of this client's own, which the others may join once it is opened.
A trainer that refuses, is just exiting, does not answer or hangs costs a try and never an error: the next
one is asked, and in the end one is started.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec
from gshare.agent.errors import GshareError, RetryLater
from gshare.agent.jobs.events import Event, TrainerMessage
from gshare.agent.service.client import Reply, TrainerClient, TrainerGone
from gshare.agent.service.hold import Joined, Spawned, spawn_trainer
from gshare.agent.service.joining import Candidate, candidates, looking, right_gpu, why_not
from gshare.agent.service.protocol import Done, JoinTrainer, Refused, TrainerHello
from gshare.agent.service.registry import NoRoom, TrainerConfig, collect_dead

#: How long a trainer that hangs is waited for before another one is asked.
HELLO_SECONDS = 10.0
#: A trainer that has its memory answers when the base is loaded: from a slow disk that may take long.
LOAD_SECONDS = 3600.0
#: A full runtime directory is waited for: clients of a crashed trainer clear it away within a second or two,
#: and it was not this client's jobs that filled it.
ROOM_SECONDS = 20.0
#: Between two tries to make a directory in it.
_ROOM_PAUSE = 0.2
#: Names of another client's jobs in a message.
_NAMES_SHOWN = 3
#: Follows what concerns no job in particular; no job has this name.
_NO_JOB = [""]


@dataclass(frozen=True)
class Found:
    """A trainer; of one that was joined, the connection too, which follows this client's jobs."""

    trainer: Spawned | Joined
    connection: TrainerClient | None = None


@dataclass
class _Asked:
    """A trainer that has been asked to make room and has not answered."""

    trainer: Joined
    connection: TrainerClient
    request_id: int
    deadline: float
    limited: bool  # by this client's own time to wait for memory

    def hang_up(self) -> None:
        self.connection.close()
        self.trainer.release()


class Finder:
    """One search at a time. `config` has its identity (`joining.with_identity`)."""

    def __init__(
        self, config: TrainerConfig, client: str, jobs: Sequence[str], on_event: Callable[[Event], None]
    ) -> None:
        self._config = config
        self._never_open = False
        self._client = client
        self._jobs = list(jobs)
        self._on_event = on_event
        self._alone = False
        self._timeout_s = 0.0
        self._asked: _Asked | None = None
        self._room_until: float | None = None  # a full runtime directory is given up then
        self._refused: set[str] = set()
        self._left: set[str] = set()
        self._told: set[str] = set()

    @property
    def asking(self) -> bool:
        return self._asked is not None

    def search(self, config: TrainerConfig, *, alone: bool, never_open: bool = False) -> None:
        """Begin. `never_open`: what runs alone does so to its end, so nobody need wait for the trainer."""
        self.cancel()
        self._config, self._alone, self._never_open = config, alone, never_open
        self._timeout_s = config.gpu.timeout_s if config.gpu is not None else 0.0
        self._refused = set()
        self._room_until = None

    def leave(self, directory: Path) -> None:
        """This trainer is not asked again: the client has left it for good."""
        self._left.add(directory.name)

    def cancel(self) -> None:
        if self._asked is not None:
            self._asked.hang_up()
            self._asked = None

    def poll(self, timeout: float) -> Found | None:
        """Go on; waits up to `timeout` seconds for an answer. RetryLater: not within the time; NoRoom: the
        runtime directory stayed full."""
        if self._asked is not None:
            return self._hear(self._asked, timeout)
        try:
            return self._join_or_spawn()
        except NoRoom as error:
            self._clear_away(error)
        time.sleep(min(timeout, _ROOM_PAUSE))
        return None

    def _join_or_spawn(self) -> Found | None:
        if not self._config.join_key or self._alone:
            return self._spawn()
        with looking(self._config.join_key):
            found = next(iter(candidates(self._config, but=self._refused | self._left)), None)
            spawned = self._spawn() if found is None else None
        if found is not None:
            self._ask(found)
        return spawned

    def _clear_away(self, full: NoRoom) -> None:
        """Makes room of what dead trainers left, for the next try; raises `full` when its time is over."""
        now = time.monotonic()
        if self._room_until is None:
            self._room_until = now + ROOM_SECONDS
            self._say(f"{full}; trying again for {ROOM_SECONDS:.0f} s")
        elif now > self._room_until:
            raise full
        with contextlib.suppress(OSError, NoRoom):
            collect_dead()

    def switch(self, own: Spawned | Joined) -> None:
        """Look for room elsewhere while `own` trainer waits for memory: `poll_switch` goes on."""
        self._refused = {own.directory.name}

    def poll_switch(self) -> Found | None:
        """As `poll`, without waiting and without starting anything; None: nobody has room now."""
        if self._asked is not None:
            return self._hear(self._asked, 0.0)
        for found in candidates(self._config, but=self._refused | self._left):
            self._ask(found, only_now=True)
            if self._asked is not None:
                break
        return None

    def _spawn(self) -> Found:
        if self._config.join_key and not self._alone and (reason := why_not(self._config)):
            self._say(f"{reason}; starting another one")
        config = msgspec.structs.replace(self._config, joinable=not self._alone)
        if self._never_open:
            config = msgspec.structs.replace(config, join_key="")
        return Found(spawn_trainer(config))

    def _ask(self, candidate: Candidate, *, only_now: bool = False) -> None:
        """Ask a trainer to make room. Where that fails at once it is not asked again."""
        directory = candidate.directory
        self._refused.add(directory.name)
        trainer = Joined.hold(directory)
        if trainer is None:
            return
        connection = None
        try:
            connection = TrainerClient(
                directory, self._client, timeout=HELLO_SECONDS, reply_seconds=HELLO_SECONDS
            )
            hello = connection.hello
            waits = not hello.joinable or bool(hello.waiting)
            if refusal := self._refusal(candidate, hello, waits=waits, only_now=only_now):
                raise GshareError(refusal)
            connection.follow(_NO_JOB, journal_id=hello.journal_id, after_seq=hello.last_seq)
            gpu = self._config.gpu
            request_id = connection.send(
                JoinTrainer,
                jobs=self._jobs,
                budget_mb=gpu.part_mb if gpu else 0,
                resident_mb=gpu.resident_mb if gpu else 0,
            )
        except GshareError as error:
            if connection is not None:
                connection.close()
            trainer.release()
            if not isinstance(error, TrainerGone) and not only_now:
                self._say(f"trainer {directory.name} cannot be joined: {error}")
            return
        limited = waits and self._config.gpu is not None
        seconds = self._timeout_s if limited else LOAD_SECONDS
        self._asked = _Asked(trainer, connection, request_id, time.monotonic() + seconds, limited)
        if hello.waiting:
            self._say(f"trainer {directory.name} has the same base; it is {hello.waiting}")
        elif not hello.joinable:
            self._say(f"trainer {directory.name} has the same base; waiting until its jobs are off trial")

    def _refusal(self, candidate: Candidate, hello: TrainerHello, *, waits: bool, only_now: bool) -> str:
        """Why this trainer is not asked at all; empty when it is."""
        if hello.gshare != version("gshare"):
            return f"it is gshare {hello.gshare}, this is {version('gshare')}"
        if not right_gpu(self._config, candidate.config, hello.gpu):
            return f"it is on another GPU ({hello.gpu or ', '.join(_gpus(candidate.config))})"
        if taken := sorted(set(hello.jobs) & set(self._jobs)):
            return f"a job named {taken[0]} runs in it, or is to"
        if waits and (only_now or (self._config.gpu is not None and self._timeout_s <= 0)):
            return "it waits for GPU memory itself"
        return ""

    def _hear(self, asked: _Asked, timeout: float) -> Found | None:
        """What the trainer that was asked says."""
        connection, name = asked.connection, asked.trainer.directory.name
        reply: Reply | None = None
        try:
            for event in connection.poll(timeout):
                self._on_event(event)
            reply = connection.reply(asked.request_id)
            if isinstance(reply, Done):
                after = max(reply.seq, connection.seq)
                connection.follow(self._jobs, journal_id=connection.hello.journal_id, after_seq=after)
        except GshareError as error:
            self.cancel()
            if not isinstance(error, TrainerGone):
                self._say(f"trainer {name} cannot be joined: {error}")
            return None
        if isinstance(reply, Done):
            self._asked = None
            self._say(f"joins trainer {name}{_of(connection.hello.jobs)}", again=True)
            return Found(asked.trainer, connection)
        if isinstance(reply, Refused):
            self.cancel()
            self._say(f"trainer {name} cannot be joined: {reply.reason}")
        elif time.monotonic() > asked.deadline:
            self.cancel()
            if asked.limited:
                raise RetryLater(
                    f"waited {self._timeout_s:.0f} s for trainer {name}, which has the same base; try again "
                    "later, with --resume where a checkpoint is kept, or with a longer --timeout"
                )
            self._say(f"trainer {name} did not answer within {LOAD_SECONDS:.0f} s")
        return None

    def _say(self, text: str, *, again: bool = False) -> None:
        if again or text not in self._told:
            self._told.add(text)
            self._on_event(TrainerMessage(level="info", text=text))


def _gpus(config: TrainerConfig) -> Sequence[str]:
    return config.gpu.gpus if config.gpu is not None else ()


def _of(jobs: Sequence[str]) -> str:
    """Whose trainer it is, for people."""
    if not jobs:
        return ""
    more = f" and {len(jobs) - _NAMES_SHOWN} more" if len(jobs) > _NAMES_SHOWN else ""
    return f" of job {', '.join(jobs[:_NAMES_SHOWN])}{more}"
