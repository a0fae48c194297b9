"""How often a waiter looks, and for how long, on a clock that only its own sleeping moves."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from gshare.agent.errors import RetryLater
from gshare.agent.vram import queue
from gshare.agent.vram.ledger import Grant, Ledger, Queued
from gshare.agent.vram.queue import FULL_LOOK_S, LOOK_S, wait_for

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import make_ledger, take, wanted


class Clock:
    """Takes the place of `time` in the queue; `at_sleep` runs in every sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []
        self.at_sleep: Callable[[], None] = lambda: None
        monkeypatch.setattr(queue, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds
        self.at_sleep()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return make_ledger(tmp_path)


def looks_at(ledger: Ledger, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times at which the ledger itself is asked."""
    times: list[float] = []
    ask = ledger.reserve

    def reserve(*arguments: object, **keys: object) -> Grant | Queued:
        times.append(clock.now)
        return ask(*arguments, **keys)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(ledger, "reserve", reserve)
    return times


def check(sleeps: list[float], looks: list[float]) -> None:
    """The bounds of the contract; the shortest sleep is the rest until a look or the end, so not bounded."""
    assert max(sleeps) <= LOOK_S
    assert min(sleeps) > 0
    spent = looks[-1] - looks[0]
    assert spent / LOOK_S * 0.9 <= len(sleeps) <= spent / LOOK_S + len(looks) + 1, "it spins, or oversleeps"
    gaps = [after - before for before, after in itertools.pairwise(looks)]
    assert max(gaps) <= FULL_LOOK_S + LOOK_S


def test_the_gaps_between_looks_are_bounded_both_ways(
    ledger: Ledger, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with take(ledger, 8000):
        looks = looks_at(ledger, clock, monkeypatch)
        with pytest.raises(RetryLater):
            wait_for(ledger, wanted(ledger, 1000), timeout_s=61)
    check(clock.sleeps, looks)
    assert 61 / FULL_LOOK_S <= len(looks) <= 61 / FULL_LOOK_S + 3  # nothing moved: no look for nothing


@pytest.mark.parametrize(
    ("sleeps", "looks"),
    [
        ([0.2] * 10, [0.0, 2.0]),
        ([0.0] * 40, [0.0, 2.0]),
        ([LOOK_S] * 60, [0.0, 3.0]),
        ([0.0001] * 4000, [0.0, 0.4]),
    ],
)
def test_a_poll_that_sleeps_too_long_or_not_at_all_would_be_seen(
    sleeps: list[float], looks: list[float]
) -> None:
    with pytest.raises(AssertionError):
        check(sleeps, looks)
    check([LOOK_S] * 40, [0.0, 2.0])


@pytest.mark.parametrize("timeout_s", [0.0, 0.01, LOOK_S, 0.07, 1.0, FULL_LOOK_S, 7.3])
def test_no_wait_is_longer_than_its_timeout(ledger: Ledger, clock: Clock, timeout_s: float) -> None:
    with take(ledger, 8000), pytest.raises(RetryLater):
        wait_for(ledger, wanted(ledger, 1000), timeout_s=timeout_s)
    assert clock.now - 1000.0 == pytest.approx(timeout_s, abs=1e-6)


def test_a_release_wakes_at_the_next_look_at_the_directory(ledger: Ledger, clock: Clock) -> None:
    block = take(ledger, 8000)
    released: list[float] = []

    def release() -> None:
        if len(clock.sleeps) == 10:
            block.release()
            released.append(clock.now)

    clock.at_sleep = release
    grant = wait_for(ledger, wanted(ledger, 1000), timeout_s=60)
    assert clock.now - released[0] <= LOOK_S
    ledger.release(grant)
