"""The trainer's journal: durable events with sequence numbers, bounded, in memory and in `journal.jsonl`.

The trainer's main thread appends, the server's thread reads, hence the lock. A line is one `write`, without
fsync: the kernel keeps it when the trainer is killed; against a power cut the checkpoints stand, not this.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.jobs.events import Event

#: Durable events kept. An evaluation every 50 steps of 16 jobs writes ~1 event per 3 steps.
JOURNAL_EVENTS = 4096


class Journal:
    """Sequence numbers start at 1; `first_seq` moves up when the oldest events are dropped."""

    def __init__(self, path: Path, journal_id: str, *, keep: int = JOURNAL_EVENTS) -> None:
        self.journal_id = journal_id
        self._keep = keep
        self._path = path
        self._lock = threading.Lock()
        self._events: deque[tuple[int, Event]] = deque(maxlen=keep)
        self._last_seq = 0
        self._lines = 0
        self._torn = False
        #: Why the file has gaps; clients get every event all the same, from memory.
        self.problem = ""
        self._fd = _open_append(path)

    @property
    def last_seq(self) -> int:
        return self._last_seq

    @property
    def first_seq(self) -> int:
        """The oldest sequence number still kept; `last_seq + 1` when there is none."""
        with self._lock:
            return self._events[0][0] if self._events else self._last_seq + 1

    def append(self, event: Event) -> int:
        """Stores the event and returns its sequence number."""
        with self._lock:
            self._last_seq += 1
            self._events.append((self._last_seq, event))
            try:
                if self._lines >= 2 * self._keep:
                    self._rewrite()
                else:
                    # Starts a line of its own after one that a full disk has cut off.
                    line = b"\n" * self._torn + _line(self.journal_id, self._last_seq, event)
                    self._torn = os.write(self._fd, line) != len(line)
                    self._lines += 1
            except OSError as error:
                self.problem = f"{self._path}: {error.strerror}"
            return self._last_seq

    def after(self, seq: int) -> tuple[int, Event] | None:
        """The oldest kept event with a sequence number above `seq`."""
        with self._lock:
            if not self._events or self._events[-1][0] <= seq:
                return None
            first = self._events[0][0]
            return self._events[max(0, seq + 1 - first)]

    def close(self) -> None:
        with self._lock:
            os.close(self._fd)

    def _rewrite(self) -> None:
        """Cut the file back to what is in memory: temp file, then rename."""
        temporary = self._path.with_name(self._path.name + ".new")
        with open(temporary, "wb") as file:
            file.writelines(_line(self.journal_id, seq, event) for seq, event in self._events)
        os.replace(temporary, self._path)
        os.close(self._fd)
        self._fd = _open_append(self._path)
        self._lines = len(self._events)


def read_journal(path: Path, after_seq: int = 0) -> list[Event]:
    """The events after `after_seq` in a dead trainer's journal; torn or foreign lines are skipped."""
    events: list[Event] = []
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            record = json.loads(line)
            if record["seq"] <= after_seq:
                continue
            event = record["event"]
            if event.get("val_loss", 0.0) is None:
                event["val_loss"] = math.nan  # strict JSON has no NaN, see `strict_json`
            events.append(msgspec.convert(event, Event))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # msgspec's ValidationError is a ValueError
    return events


def strict_json(value: Any) -> Any:
    """`value` with NaN and infinities as None: strict JSON has no such numbers, its readers fail on them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    return value


def _line(journal_id: str, seq: int, event: Event) -> bytes:
    record = {"journal_id": journal_id, "seq": seq, "event": strict_json(msgspec.to_builtins(event))}
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _open_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
