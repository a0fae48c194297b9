"""Nobody who waits for the ledger's lock starves, and no dead or stopped process holds the others up.

On a clock of its own: `Clock.sleep` is where everything else happens that a process may sleep through.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from gshare.agent.errors import GshareError
from gshare.agent.vram import turns
from gshare.agent.vram.turns import COURTESY_S, TURN_S, take_lock

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import Say, WaitFor, child, until

#: Pauses are at most a millisecond, half as much again with jitter.
LONGEST_PAUSE_S = 0.0016


class Clock:
    """Stands for `time`: sleeping takes no time, and `meanwhile` is what happens in it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)
        self.meanwhile()


class Process(NamedTuple):
    """What one process has open: descriptors of the lock and of the directory that are its own."""

    lock: int
    directory: int

    def take(self, path: Path, deadline: float) -> None:
        take_lock(self.lock, self.directory, path, deadline)


Opener = Callable[[], Process]


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    """Makes processes of a ledger in `tmp_path`."""
    (tmp_path / "lock").touch()
    made: list[Process] = []

    def one() -> Process:
        made.append(Process(os.open(tmp_path / "lock", os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)))
        return made[-1]

    yield one
    for process in made:
        os.close(process.lock)
        os.close(process.directory)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(turns, "time", made)
    return made


class Later(Exception):
    """A newcomer did not get the lock at once, and would ask again later."""


def wait_among_newcomers(
    opener: Opener, clock: Clock, path: Path, newcomer: Callable[[Process], None]
) -> int:
    """One waits for 2 s at most; while it sleeps, the holder goes and a newcomer comes. How many got it."""
    waiter, held_by, served = opener(), opener(), 0
    held_by.take(path, clock.now)

    def meanwhile() -> None:
        nonlocal held_by, served
        fcntl.flock(held_by.lock, fcntl.LOCK_UN)
        clock.meanwhile = later
        held_by = opener()
        try:
            newcomer(held_by)
            served += 1
        except Later:
            pass
        finally:
            clock.meanwhile = meanwhile

    def later() -> None:
        raise Later

    clock.meanwhile = meanwhile
    waiter.take(path, clock.now + 2)
    return served


def test_a_waiter_gets_the_lock_although_it_is_never_free_when_it_asks(
    opener: Opener, clock: Clock, tmp_path: Path
) -> None:
    begin = clock.now
    served = wait_among_newcomers(opener, clock, tmp_path, lambda one: one.take(tmp_path, clock.now))
    assert served > 10  # it was overtaken until it took the turn
    assert TURN_S <= clock.now - begin < TURN_S + 2 * LONGEST_PAUSE_S


def test_among_newcomers_that_look_for_no_turn_it_starves(
    opener: Opener, clock: Clock, tmp_path: Path
) -> None:
    def ask(one: Process) -> None:
        fcntl.flock(one.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    with pytest.raises(GshareError, match="held too long"):
        wait_among_newcomers(opener, clock, tmp_path, ask)


@pytest.mark.parametrize(("pause", "seldom"), [(turns._PAUSE, False), (0.05, True)])
def test_who_has_waited_for_long_asks_as_often_as_who_has_just_come(
    opener: Opener, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: float, seldom: bool
) -> None:
    monkeypatch.setattr(turns, "_PAUSE", pause)
    holder, first, second = opener(), opener(), opener()
    holder.take(tmp_path, clock.now)
    fcntl.flock(first.directory, fcntl.LOCK_EX)
    with pytest.raises(GshareError, match="held too long"):
        second.take(tmp_path, clock.now + 5)
    assert (max(clock.slept) > LONGEST_PAUSE_S) is seldom


def test_a_stopped_process_with_the_turn_holds_nobody_up_for_long(
    opener: Opener, clock: Clock, tmp_path: Path
) -> None:
    stopped, other = opener(), opener()
    fcntl.flock(stopped.directory, fcntl.LOCK_EX)
    begin = clock.now
    other.take(tmp_path, clock.now + 30)
    assert COURTESY_S <= clock.now - begin < COURTESY_S + LONGEST_PAUSE_S


def test_the_turn_is_given_back_with_the_lock_and_at_the_deadline(
    opener: Opener, clock: Clock, tmp_path: Path
) -> None:
    holder, waiter, looker = opener(), opener(), opener()
    holder.take(tmp_path, clock.now)
    turn_seen: list[bool] = []
    clock.meanwhile = lambda: turn_seen.append(not turns._nobodys_turn(looker.directory))
    with pytest.raises(GshareError, match="held too long"):
        waiter.take(tmp_path, clock.now + 1)
    assert turn_seen[-1]
    assert turns._nobodys_turn(looker.directory)  # although its descriptor is still open
    fcntl.flock(holder.lock, fcntl.LOCK_UN)
    waiter.take(tmp_path, clock.now)
    assert turns._nobodys_turn(looker.directory)


def test_two_who_look_for_a_turn_see_none(opener: Opener) -> None:
    one, other = opener(), opener()
    fcntl.flock(one.directory, fcntl.LOCK_SH)
    assert turns._nobodys_turn(other.directory)
    fcntl.flock(one.directory, fcntl.LOCK_EX)
    assert not turns._nobodys_turn(other.directory)


def test_killed_holders_and_waiters_leave_neither_lock_nor_turn_nor_file(
    opener: Opener, clock: Clock, tmp_path: Path
) -> None:
    before = os.listdir(tmp_path)

    def hold(say: Say, wait: WaitFor) -> None:
        opener().take(tmp_path, clock.now)
        say("has it")
        wait()

    def queue(say: Say, wait: WaitFor) -> None:
        clock.meanwhile = lambda: os.kill(os.getpid(), signal.SIGSTOP) if clock.now > 1001 else None
        opener().take(tmp_path, clock.now + 30)

    looker = opener()
    with child(hold) as holder:
        assert holder.line() == "has it"
        with child(queue) as waiter:
            until(lambda: not turns._nobodys_turn(looker.directory))
            waiter.kill()
        assert turns._nobodys_turn(looker.directory)
        with pytest.raises(GshareError, match="held too long"):
            looker.take(tmp_path, clock.now)
        holder.kill()
        looker.take(tmp_path, clock.now)
    assert os.listdir(tmp_path) == before
