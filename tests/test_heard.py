"""A node that says what store and machine cannot take loses its connection; the coordinator and the others
lose nothing, also when it is started again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster_of_straw import Straw, agents_of_straw
from fake_agent import FakeAgent, FakeAttempt
from gshare.agent.jobs.events import Evaluated, TrainerMessage
from gshare.agent.node import protocol as p
from gshare.agent.node.checks import MAX_ATTEMPT
from gshare.agent.node.protocol import AttemptStatus
from gshare.agent.service.wire import WireError, encode
from gshare.coordinator.heard import (
    LARGEST_NUMBER,
    LEAST_NUMBER,
    MAX_TEXT,
    REASON_KEPT,
    check_node_message,
    check_numbers,
    checked_attempts,
)


def run(tmp_path: Path, test: Callable[[Straw], Awaitable[None]], *names: str, **fields: Any) -> None:
    async def main() -> None:
        async with agents_of_straw(tmp_path, *names, **fields) as it:
            await asyncio.wait_for(test(it), 60)

    asyncio.run(main())


def evaluated(agent: FakeAgent, attempt: FakeAttempt) -> None:
    step = 2**63 + 5
    agent.publish(
        attempt, Evaluated(job=attempt.request.job, step=step, val_loss=1.0, label_tokens=1, best=True)
    )


def numbered(agent: FakeAgent, attempt: FakeAttempt) -> None:
    told = p.NodeMessage(level="info", text="x", time=1.0)
    for writer, _ in agent._followers:
        writer.write(encode(p.NodeEventFrame(journal_id="j", seq=2**63 + 1, event=told)))


def dated(agent: FakeAgent, attempt: FakeAttempt) -> None:
    event = Evaluated(job=attempt.request.job, step=1, val_loss=1.0, label_tokens=1, best=True)
    told = p.AttemptEvent(owner=attempt.owner, attempt=attempt.request.attempt, event=event, time=math.nan)
    agent.events.append(told)
    for writer, _ in agent._followers:
        writer.write(encode(p.NodeEventFrame(journal_id=agent.journal_id, seq=len(agent.events), event=told)))


def stepped(agent: FakeAgent, attempt: FakeAttempt) -> None:
    attempt.step = 2**64 - 1
    agent.change(attempt, "running")


def counted(agent: FakeAgent, attempt: FakeAttempt) -> None:
    request = msgspec.structs.replace(attempt.request, attempt=MAX_ATTEMPT)
    agent.attempts[attempt.owner, request.job, MAX_ATTEMPT] = FakeAttempt(attempt.owner, request)
    agent.change(attempt, "running")


def described(agent: FakeAgent, attempt: FakeAttempt) -> None:
    agent.node_info["time"] = math.inf


def talked(agent: FakeAgent, attempt: FakeAttempt) -> None:
    agent.publish(attempt, TrainerMessage(level="info", text="x" * (MAX_TEXT + 1), job=attempt.request.job))


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (evaluated, "64 bits"),
        (numbered, "64 bits"),
        (dated, "time nan"),
        (stepped, "64 bits"),
        (counted, "counted"),
        (described, "no measurement"),
        (talked, "a text of"),
    ],
)
def test_one_node_that_says_too_much_costs_its_own_connection_alone(
    tmp_path: Path, says: Callable[[FakeAgent, FakeAttempt], None], told: str
) -> None:
    async def test(it: Straw) -> None:
        it.agents["b"].auto = True
        async with it.running():
            await it.submit("job0", "job1")
            evil = it.agents["a"]
            await it.until(lambda: bool(evil.attempts) and bool(evil._followers))
            says(evil, next(iter(evil.attempts.values())))
            await it.until(lambda: any("a cannot be reached" in text and told in text for text in it.said))
            it.unreachable.add("a")
            await it.until(lambda: all(it.job(name).state == "completed" for name in ("job0", "job1")))
            assert max(it.job(name).attempt for name in ("job0", "job1")) == 2
        it.unreachable.clear()
        async with it.running():  # and it starts again
            await it.until(lambda: not it.coordinator.store.pending() or it.job("job0").published > 0)
            await asyncio.sleep(0.3)
            assert not it.task.done()

    run(tmp_path, test, "a", "b")


def test_the_bounds_are_those_of_the_store() -> None:
    for number in (LEAST_NUMBER, -1, 0, LARGEST_NUMBER):
        check_numbers({"a": [{"b": number}]})
    for number in (LARGEST_NUMBER + 1, 2**64 - 1):
        with pytest.raises(WireError, match="64 bits"):
            check_numbers({"a": [{"b": number}]})


def test_what_is_asked_for_may_be_long_and_losses_may_be_nan() -> None:
    check_node_message({"type": "log_text", "text": "x" * (MAX_TEXT + 1)})
    check_node_message({"type": "node_event", "event": {"val_loss": math.nan}})
    with pytest.raises(WireError, match="characters"):
        check_node_message({"type": "node_info", "problems": ["x" * MAX_TEXT] * 17})


def status(**fields: Any) -> AttemptStatus:
    return AttemptStatus(**{"owner": "o", "job": "j", "attempt": 1, "state": "running", **fields})


def test_attempts_that_follow_a_high_one_are_still_taken() -> None:
    """A store that once went on above a high number knows its own attempts."""
    high = MAX_ATTEMPT // 2 + 1
    assert checked_attempts([status(attempt=high)], lambda job: high)[0].attempt == high
    with pytest.raises(WireError, match="counted"):
        checked_attempts([status(attempt=high)], lambda job: 1)
    with pytest.raises(WireError, match="counted"):
        checked_attempts([status(attempt=-1)], lambda job: 1)
    with pytest.raises(WireError, match="path separator"):
        checked_attempts([status(job="../x")], lambda job: 1)


def test_a_reason_without_end_is_cut() -> None:
    long, short = status(reason="r" * MAX_TEXT), status(reason="two\nlines")
    found = checked_attempts([long, short], lambda job: 1)
    assert (len(found[0].reason), found[1]) == (REASON_KEPT, short)
