"""Amounts of memory and spans of time as people write them: `8`, `8GiB`, `8000MiB`; `90s`, `2h`, `1h30m`.

Everything inside is MiB and seconds.
"""

from __future__ import annotations

import math
import re

from gshare.agent.errors import UsageError
from gshare.agent.jobs.names import shorten

#: 16 TiB: more than any device has; a larger number is a unit mixed up.
MAX_MB = 16 * 1024 * 1024
#: A year: a longer wait or lease is a unit mixed up.
MAX_SECONDS = 366 * 86400.0

#: Assumed for what a process takes on a GPU beside its tensors, MiB: the CUDA context with the kernels loaded
#: into it. 644 were measured on an H200. For estimates alone, and for the guard where it cannot measure: its
#: cap goes by what it has measured.
CONTEXT_MB = 768
#: CUBLAS_WORKSPACE_CONFIG=:4096:8 is 32 MiB a handle; as much again for kernels' scratch.
WORKSPACE_MB = 64
#: An allocator's blocks are larger than the tensors in them, and what is free between two cannot be joined.
FRAGMENTATION = 0.10

#: Unit → bytes. A bare number is GiB; GB and MB are powers of ten, as disk and card makers use them.
_BYTES = {
    "": 2**30,
    "g": 2**30,
    "gib": 2**30,
    "gb": 10**9,
    "m": 2**20,
    "mib": 2**20,
    "mb": 10**6,
    "t": 2**40,
    "tib": 2**40,
    "tb": 10**12,
}
_NUMBER = re.compile(r"\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*\Z")
_NOT_A_NUMBER = re.compile(r"\s*[+-]?(nan|inf|infinity)\s*[A-Za-z]*\s*\Z", re.IGNORECASE)

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+\Z")
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


def parse_budget(text: str | float, *, what: str = "--vram") -> int:
    """MiB, rounded up. `what` names the flag or key in the one message of a UsageError.

    >>> parse_budget("8"), parse_budget("8GiB"), parse_budget("8000MiB"), parse_budget(0.5)
    (8192, 8192, 8000, 512)
    """
    written = str(text)
    shown = shorten(written)
    if _NOT_A_NUMBER.match(written):
        raise UsageError(f"{what}: {shown} is not an amount; write 8 (GiB), 8GiB or 8000MiB")
    match = _NUMBER.match(written)
    if match is None:
        raise UsageError(f"{what}: {shown} is not an amount of memory; write 8 (GiB), 8GiB or 8000MiB")
    unit = match[2].lower()
    if unit not in _BYTES:
        raise UsageError(f"{what}: unknown unit in {shown}; write GiB or MiB")
    value = float(match[1])
    if value <= 0:
        raise UsageError(f"{what}: {shown} is not more than zero; write 8 (GiB), 8GiB or 8000MiB")
    mb = value * _BYTES[unit] / 2**20
    if mb > MAX_MB:
        raise UsageError(f"{what}: {shown} is more than any device has; a bare number is GiB")
    if mb < 1:
        raise UsageError(f"{what}: {shown} is less than one MiB; a bare number is GiB")
    return math.ceil(mb)


def with_allowance(tensor_bytes: int, fragmentation: float = FRAGMENTATION) -> int:
    """MiB to reserve for `tensor_bytes` of tensors: context, workspaces and fragmentation on top.

    >>> with_allowance(1000 * 2**20)
    1932
    """
    return with_fragmentation(tensor_bytes, fragmentation) + CONTEXT_MB + WORKSPACE_MB


def with_fragmentation(tensor_bytes: int, fragmentation: float = FRAGMENTATION) -> int:
    """MiB for tensors in a process that has its context and workspaces already.

    >>> with_fragmentation(1000 * 2**20)
    1100
    """
    return math.ceil(tensor_bytes / 2**20 * (1 + fragmentation))


def parse_duration(text: str | float, *, what: str = "--for") -> float:
    """Seconds. A bare number is seconds; zero and below, NaN and more than a year are a UsageError.

    >>> parse_duration("90"), parse_duration("2h"), parse_duration("1h30m")
    (90.0, 7200.0, 5400.0)
    """
    written = str(text).strip().lower()
    shown = shorten(str(text))
    if _DURATION.match(written):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(written))
    else:
        try:
            seconds = float(written)
        except ValueError:
            raise UsageError(f"{what}: {shown} is not a time; write 90 (seconds), 30m or 2h") from None
    if not 0 < seconds <= MAX_SECONDS:
        raise UsageError(f"{what}: {shown} must be more than zero and at most a year")
    return seconds


def show_mb(mb: int) -> str:
    """MiB for people: as GiB with one digit from 1 GiB on.

    >>> show_mb(512), show_mb(8192)
    ('512 MiB', '8.0 GiB')
    """
    return f"{mb} MiB" if mb < 1024 else f"{mb / 1024:.1f} GiB"
