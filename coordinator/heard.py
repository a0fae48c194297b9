"""What came over a wire, looked at before machine, store or file system get it: whoever sends more than these
can take ends its own connection, not the coordinator.

SQLite holds signed integers of 64 bits and no NaN in a column that may not be NULL; MessagePack brings
unsigned ones, and floats of any kind. Losses may be NaN, times may not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from gshare.agent.jobs.names import name_fault, shorten
from gshare.agent.node.checks import MAX_ATTEMPT
from gshare.agent.node.protocol import AttemptStatus, NodeEventFrame
from gshare.agent.service.wire import MAX_FRAME, WireError

#: What SQLite, and every reader of JSON that counts in 64 bits, can hold.
LEAST_NUMBER, LARGEST_NUMBER = -(2**63), 2**63 - 1
#: Characters of a text from a node that is kept or told; a trainer's last words have some thousand.
MAX_TEXT = 1 << 16
#: Of one description of a node, all of them together: 16 frames of the API would hold it.
MAX_INFO_TEXT = 1 << 20
#: Messages whose texts are asked for, and bounded, by their length.
_LONG_TEXTS = frozenset({"log_text", "samples"})
#: Of an attempt that this store never started. Attempts that follow it stay within what agents accept.
MAX_UNKNOWN_ATTEMPT = MAX_ATTEMPT // 2
#: Characters of a reason that a job's record keeps: all records have to fit into one answer.
REASON_KEPT = 4000


def check_numbers(message: dict[str, Any]) -> None:
    """WireError for an integer beyond 64 bits, wherever it stands."""
    _walk(message, MAX_FRAME, finite=False)


def check_node_message(message: dict[str, Any]) -> None:
    """WireError for what no agent sends: such integers, texts without end, a measurement that is NaN."""
    kind = message.get("type")
    info = kind == "node_info"
    total = _walk(message, MAX_FRAME if kind in _LONG_TEXTS else MAX_TEXT, finite=info)
    if info and total > MAX_INFO_TEXT:
        raise WireError(f"a description with {total} characters; at most {MAX_INFO_TEXT} are taken")


def _walk(message: dict[str, Any], longest: int, *, finite: bool) -> int:
    """Characters of all texts. Not recursive: a frame may be nested as deep as its bytes allow."""
    todo: list[Any] = [message]
    total = 0
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            todo += value
            todo += value.values()
        elif isinstance(value, list):
            todo += value
        elif isinstance(value, str):
            total += len(value)
            if len(value) > longest:
                raise WireError(f"a text of {len(value)} characters; at most {longest} are taken")
        elif isinstance(value, int):
            if not LEAST_NUMBER <= value <= LARGEST_NUMBER:
                raise WireError(f"the number {value} has more than 64 bits")
        elif finite and isinstance(value, float) and not math.isfinite(value):
            raise WireError(f"{value} is no measurement")
    return total


def check_event(frame: NodeEventFrame) -> None:
    """WireError: its time is none, and the store could not keep it."""
    if not math.isfinite(frame.event.time):
        raise WireError(f"an event of the time {frame.event.time}")


def checked_attempts(attempts: Sequence[AttemptStatus], known: Callable[[str], int]) -> list[AttemptStatus]:
    """The attempts with reasons that can be kept; `known`: the newest number of a job that the store knows.

    WireError: a number that no coordinator has counted to. The job would go on above it, where agents refuse
    every attempt.
    """
    for status in attempts:
        if (fault := name_fault(status.job)) is not None:
            raise WireError(f"a job named {fault}")
        if status.attempt < 0 or status.attempt > max(MAX_UNKNOWN_ATTEMPT, known(status.job)):
            raise WireError(f"attempt {status.attempt} of a job: nobody has counted so far")
        if status.exit is not None and len(msgspec.json.encode(status.exit)) > MAX_TEXT:
            raise WireError(f"evidence of more than {MAX_TEXT} bytes for the exit of {shorten(status.job)}")
    return [
        status
        if len(status.reason) <= REASON_KEPT
        else msgspec.structs.replace(status, reason=f"{status.reason[: REASON_KEPT - 1]}…")
        for status in attempts
    ]
