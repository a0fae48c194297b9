"""Which jobs were in flight when a trainer died: a file the trainer writes before every round.

Two slots, written in turn: `crc32 | sequence | length | payload`. A write that SIGKILL tears at a page border
breaks its own slot only, so the other one is read. No fsync: the kernel keeps the pages of a killed process,
and after a power cut nobody asks. One `pwrite` of about 100 bytes a round costs some microseconds.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgpack

FILE_NAME = "in_flight"
_HEADER = struct.Struct("<IQI")  # crc32 of the rest, sequence, payload length
#: Room per slot: 10 000 jobs with names of 64 characters. The file is sparse.
_SLOT = 1 << 20


class Breadcrumb:
    """The writer; owned by the trainer's main thread."""

    def __init__(self, directory: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(directory / FILE_NAME, flags, 0o600)
        self._sequence = 0

    def write(self, in_flight: Sequence[tuple[str, int]]) -> None:
        """`(job, step)` of every job in the round that starts now; empty when none is in flight."""
        payload = msgpack.packb([[job, step] for job, step in in_flight])
        assert payload is not None
        assert len(payload) + _HEADER.size <= _SLOT, "more jobs in flight than a slot holds"
        self._sequence += 1
        record = _pack(self._sequence, payload)
        try:
            whole = os.pwrite(self._fd, record, (self._sequence % 2) * _SLOT) == len(record)
        except OSError:
            whole = False
        if (
            not whole
        ):  # a full disk: nothing known is better than an old round, which would blame the wrong jobs
            os.ftruncate(self._fd, 0)

    def close(self) -> None:
        os.close(self._fd)


def read_breadcrumb(directory: Path) -> list[tuple[str, int]]:
    """`(job, step)` in flight at the last write that is whole; empty when there is none."""
    newest: tuple[int, bytes] | None = None
    try:
        fd = os.open(directory / FILE_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return []
    try:
        for slot in (0, 1):
            found = _unpack(os.pread(fd, _SLOT, slot * _SLOT))
            if found is not None and (newest is None or found[0] > newest[0]):
                newest = found
    finally:
        os.close(fd)
    if newest is None:
        return []
    return [(str(job), int(step)) for job, step in msgpack.unpackb(newest[1])]


def _pack(sequence: int, payload: bytes) -> bytes:
    body = _HEADER.pack(0, sequence, len(payload))[4:] + payload
    return struct.pack("<I", zlib.crc32(body)) + body


def _unpack(slot: bytes) -> tuple[int, bytes] | None:
    if len(slot) < _HEADER.size:
        return None
    crc, sequence, length = _HEADER.unpack_from(slot)
    body = slot[4 : _HEADER.size + length]
    if sequence == 0 or len(body) != _HEADER.size - 4 + length or zlib.crc32(body) != crc:
        return None
    return sequence, slot[_HEADER.size : _HEADER.size + length]
