"""Per-step metrics and logs of an attempt, read back from its files: what the lossy stream left out."""

from __future__ import annotations

import json
import os
from pathlib import Path

from gshare.agent.errors import UsageError
from gshare.agent.node.protocol import MAX_LOG_BYTES

MAX_LINES = 10_000
#: Of one reply, well below the largest frame.
MAX_BYTES = 4 << 20


def read_samples(metrics: Path, after_step: int, limit: int) -> tuple[list[str], bool]:
    """Lines with step > `after_step`, oldest first, and whether there are more. Torn lines are left out."""
    if not 1 <= limit <= MAX_LINES:
        raise UsageError(f"limit: must be from 1 to {MAX_LINES}")
    lines: list[str] = []
    total = 0
    try:
        with open(metrics, "rb") as file:
            for line in file:
                if not line.endswith(b"\n") or not _is_after(line, after_step):
                    continue
                total += len(line)
                if len(lines) == limit or total > MAX_BYTES:
                    return lines, True
                lines.append(line.decode("utf-8", "replace").rstrip("\n"))
    except FileNotFoundError:
        pass
    return lines, False


def read_log(path: Path, max_bytes: int) -> str:
    """The last bytes of a log as text; empty when there is none."""
    if not 1 <= max_bytes <= MAX_LOG_BYTES:
        raise UsageError(f"max_bytes: must be from 1 to {MAX_LOG_BYTES}")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        end = os.fstat(fd).st_size
        return os.pread(fd, max_bytes, max(0, end - max_bytes)).decode("utf-8", "replace")
    finally:
        os.close(fd)


def _is_after(line: bytes, step: int) -> bool:
    try:
        return json.loads(line)["step"] > step
    except (ValueError, TypeError, KeyError):
        return False
