"""The agent's journal: durable events of all attempts, numbered over the agent's restarts, bounded.

A line is one `write`, without fsync: the kernel keeps it when the agent is killed. What a power cut or a full
disk takes, a client may have seen already, so no number may be given twice: every start goes on at a number
far above the last one in the file. Numbers rise; they do not count.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from bisect import bisect_right
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.jobs.events import ENDED, JobChanged
from gshare.agent.node.protocol import AttemptEvent, NodeMessage
from gshare.agent.service.journal import strict_json

#: Durable events kept: three days of 8 jobs that evaluate or save every four minutes.
JOURNAL_EVENTS = 8192
#: More events than one run of the agent can lose to a power cut or a full disk.
RESTART_JUMP = 1 << 20

NodeEvent = AttemptEvent | NodeMessage


class NodeJournal:
    """Used in the agent's loop alone."""

    def __init__(self, path: Path, *, keep: int = JOURNAL_EVENTS) -> None:
        """Reads what earlier agents wrote; torn or foreign lines are skipped."""
        self._path = path
        self._keep = keep
        self._events: deque[tuple[int, NodeEvent]] = deque(maxlen=keep)
        self._dropped = 0  # the newest sequence number that is no longer kept
        self.journal_id = ""
        #: Why the file has gaps; clients get every event all the same, from memory.
        self.problem = ""
        last = self._load()
        if self.journal_id:
            self._last_seq = last + RESTART_JUMP
        else:
            self.journal_id, self._last_seq = secrets.token_hex(8), 0
        self._torn = True  # whatever the last line is, the next one is its own
        self._lines = len(self._events)
        self._fd = _open_append(path)

    @property
    def last_seq(self) -> int:
        return self._last_seq

    def append(self, event: NodeEvent) -> int:
        """Keeps the event and returns its number."""
        self._last_seq += 1
        if len(self._events) == self._keep:
            self._dropped = self._events[0][0]
        self._events.append((self._last_seq, event))
        try:
            if self._lines >= 2 * self._keep:
                self._rewrite()
            else:
                line = b"\n" * self._torn + self._line(self._last_seq, event)
                self._torn = os.write(self._fd, line) != len(line)
                self._lines += 1
            self.problem = ""
        except OSError as error:
            self._torn = True
            self.problem = f"{self._path}: {error.strerror}"
        return self._last_seq

    def mend(self) -> None:
        """Closes the file's gaps once its disk takes it, for one that hears of no further event."""
        if not self.problem:
            return
        try:
            self._rewrite()
            self.problem = ""
        except OSError as error:
            self.problem = f"{self._path}: {error.strerror}"

    def after(self, seq: int) -> tuple[int, NodeEvent] | None:
        """The oldest kept event with a number above `seq`."""
        if not self._events or self._events[-1][0] <= seq:
            return None
        # Followers are near the end nearly always: a few steps back from there.
        for back, (number, _) in enumerate(reversed(self._events)):
            if number <= seq:
                return self._events[-back]
            if back == 64:
                break
        numbers = [number for number, _ in self._events]
        return self._events[bisect_right(numbers, seq)]

    def ends(self) -> tuple[set[tuple[str, str, int]], float]:
        """(owner, job, attempt) of every end in here, and since when all are in here (Unix time, s)."""
        ends = {
            (event.owner, event.event.job, event.attempt)
            for _, event in self._events
            if isinstance(event, AttemptEvent)
            and isinstance(event.event, JobChanged)
            and event.event.state in ENDED
        }
        return ends, self._events[0][1].time if self._dropped else 0.0

    def start_of(self, journal_id: str, after_seq: int) -> tuple[int, bool]:
        """Where a client goes on: the number that it has everything up to, and whether it missed some."""
        after = after_seq if journal_id == self.journal_id else 0
        # A number that was never given: the client saw events that this file lost.
        lost = after > self._last_seq
        return max(min(after, self._last_seq), self._dropped), lost or after < self._dropped

    def close(self) -> None:
        os.close(self._fd)

    def _load(self) -> int:
        last = 0
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return 0
        for line in islice(lines, max(0, len(lines) - self._keep), None):
            read = _read_line(line)
            if read is None or read[1] <= last:
                continue
            self.journal_id, last, event = read
            self._events.append((last, event))
        if self._events:
            self._dropped = self._events[0][0] - 1
        return last

    def _rewrite(self) -> None:
        """Cut the file back to what is in memory: temp file, then rename."""
        temporary = self._path.with_name(self._path.name + ".new")
        try:
            with open(temporary, "wb") as file:
                file.writelines(self._line(seq, event) for seq, event in self._events)
            os.replace(temporary, self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd = _open_append(self._path)
        self._lines, self._torn = len(self._events), False

    def _line(self, seq: int, event: NodeEvent) -> bytes:
        record = {"journal_id": self.journal_id, "seq": seq, "event": strict_json(msgspec.to_builtins(event))}
        return json.dumps(record, allow_nan=False).encode() + b"\n"


def _read_line(line: bytes) -> tuple[str, int, NodeEvent] | None:
    try:
        record = json.loads(line)
        event: dict[str, Any] = record["event"]
        inner = event.get("event")
        if isinstance(inner, dict) and inner.get("val_loss", 0.0) is None:
            inner["val_loss"] = math.nan  # strict JSON has no NaN, see `strict_json`
        journal_id, seq = str(record["journal_id"]), int(record["seq"])
        return journal_id, seq, msgspec.convert(event, NodeEvent)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # msgspec's ValidationError is a ValueError


def _open_append(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o600)
