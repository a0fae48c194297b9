"""Recordings: the frames that the app has seen, in a file.

    magic                  "gshare recording\\n"
    header                 length (uint32), MessagePack of `Header`
    chunk, chunk, …        kind (1 byte: F frames, K keyframe), time of its first frame (float64),
                           bytes packed and unpacked (uint32 each), CRC-32 of the packed bytes (uint32),
                           zlib (level 1) of a MessagePack array of frames

All numbers are big-endian. A keyframe holds the frames that build the whole state anew, so a seek reads one
and what follows it. They are written at most every `KEYFRAME_SECONDS`, and not before the frames since the
last one are twice as many bytes as it was: less than half of a recording is keyframes. A file that ends in
the middle of a chunk (its writer was killed, the disk was full) is read up to there.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import localtime
from types import TracebackType
from typing import BinaryIO

import msgspec
from gshare.agent.errors import UsageError
from gshare.tui.frames import SCHEMA, Frame
from gshare.tui.model import State

MAGIC = b"gshare recording\n"
KEYFRAME_SECONDS = 30.0
#: A chunk is written when it is so old (what a crash loses) or so large.
CHUNK_SECONDS = 1.0
CHUNK_BYTES = 256 << 10
#: Of one chunk; a keyframe of 2,000 full curves is 60 MB.
MAX_CHUNK = 256 << 20
_HEAD = struct.Struct(">cdIII")
_LENGTH = struct.Struct(">I")
_MAX_HEADER = 1 << 20

_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(list[Frame])


class Header(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    gshare: str
    started: float  # Unix s
    title: str = ""


class BadRecording(UsageError):
    """The file is no recording, or one of a newer gshare."""


@dataclass(frozen=True)
class Chunk:
    """Where a chunk lies: `offset` of its packed bytes."""

    keyframe: bool
    time: float  # `received` of its first frame
    offset: int
    packed: int
    unpacked: int
    crc: int


class Recorder:
    """Writes what `write` is given. A full disk ends the recording, not the dashboard: see `problem`."""

    def __init__(self, path: Path, started: float, title: str = "") -> None:
        """A new file. UsageError: there is one already, or it cannot be made there."""
        self.path = path
        self.problem = ""  # why nothing more is written; empty: all is well
        self._state = State()
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._first = 0.0
        self._keyed: float | None = None  # when the last keyframe was written
        self._key_bytes = 0
        self._since = 0  # bytes of frames after it
        header = _encoder.encode(
            Header(schema=SCHEMA, gshare=version("gshare"), started=started, title=title)
        )
        try:
            self._file: BinaryIO = open(path, "xb")  # noqa: SIM115 - open until `close`
            self._file.write(MAGIC + _LENGTH.pack(len(header)) + header)
            self._file.flush()
        except FileExistsError:
            raise UsageError(f"--record {path}: is there already; name a new file") from None
        except OSError as error:
            raise UsageError(f"--record {path}: {error.strerror}") from None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, frame: Frame) -> None:
        """Takes a frame; it is in the file a second later."""
        if self.problem:
            return
        now = frame.received
        if self._held and (now - self._first >= CHUNK_SECONDS or self._held_bytes >= CHUNK_BYTES):
            self._flush()
        if self._is_due(now):
            self._flush()
            self._keyframe(now)
        if not self._held:
            self._first = now
        try:
            encoded = _encoder.encode(frame)
        except OverflowError:
            return  # a number beyond 64 bits, out of a file that nobody of ours wrote: it has no place here
        self._held.append(encoded)
        self._held_bytes += len(encoded)
        self._state.apply(frame)

    def close(self) -> None:
        """Writes what is held; idempotent."""
        if not self._file.closed:
            self._flush()
            try:
                self._file.close()
            except OSError as error:
                self.problem = self.problem or f"{self.path}: {error.strerror}"

    def _is_due(self, now: float) -> bool:
        if self._state.received is None:
            return False
        if self._keyed is None:
            self._keyed = now  # the beginning is a keyframe by itself
        return now - self._keyed >= KEYFRAME_SECONDS and self._since >= 2 * self._key_bytes

    def _keyframe(self, now: float) -> None:
        time = self._state.time if self._state.time is not None else now
        frames = [_encoder.encode(frame) for frame in self._state.dump(time, now)]
        self._key_bytes = self._put(b"K", now, frames)
        self._keyed, self._since = now, 0

    def _flush(self) -> None:
        if self._held:
            self._since += self._put(b"F", self._first, self._held)
            self._held, self._held_bytes = [], 0

    def _put(self, kind: bytes, first: float, encoded: Sequence[bytes]) -> int:
        """Appends a chunk; how many bytes it is."""
        data = b"\xdd" + _LENGTH.pack(len(encoded)) + b"".join(encoded)  # array 32 of MessagePack
        packed = zlib.compress(data, 1)
        head = _HEAD.pack(kind, first, len(packed), len(data), zlib.crc32(packed))
        if self.problem:
            return 0
        try:
            self._file.write(head + packed)
            self._file.flush()
        except OSError as error:
            self.problem = f"{self.path}: {error.strerror}: the recording ends here"
        return len(head) + len(packed)


class Recording:
    """A recording that is read. The index (one small read a chunk) is made when it is opened."""

    def __init__(self, path: Path) -> None:
        """`BadRecording`, or UsageError when the file cannot be read."""
        self.path = path
        try:
            self._file = open(path, "rb")  # noqa: SIM115 - open until `close`
        except OSError as error:
            raise UsageError(f"--replay {path}: {error.strerror}") from None
        try:
            self.header = self._header()
            self.note = ""  # of a file that ends in the middle of something
            self.chunks = self._index()
            if not self.chunks:
                raise BadRecording(
                    f"--replay {path}: holds nothing: its recording ended before the first frame"
                )
            self.start = self.chunks[0].time
            last = [chunk for chunk in self.chunks if not chunk.keyframe] or self.chunks
            self.end = self.frames(last[-1])[-1].received
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def frames(self, chunk: Chunk) -> list[Frame]:
        """The frames of a chunk. `BadRecording`: its bytes are not those that were written."""
        self._file.seek(chunk.offset)
        packed = self._file.read(chunk.packed)
        try:
            if zlib.crc32(packed) != chunk.crc:
                raise BadRecording(f"--replay {self.path}: damaged at byte {chunk.offset}: wrong checksum")
            unpacker = zlib.decompressobj()
            data = unpacker.decompress(packed, max(1, chunk.unpacked))  # 0 would mean: no bound
            found = _frames.decode(data)
        except (zlib.error, msgspec.MsgspecError, RecursionError) as error:
            raise BadRecording(f"--replay {self.path}: damaged at byte {chunk.offset}: {error}") from None
        if not found:
            raise BadRecording(f"--replay {self.path}: damaged at byte {chunk.offset}: an empty chunk")
        return found

    def before(self, moment: float) -> int:
        """Index of the chunk to begin with to know how things were at `moment`: a keyframe, or the first."""
        found = 0
        for index, chunk in enumerate(self.chunks):
            if chunk.time > moment:
                break
            if chunk.keyframe:
                found = index
        return found

    def read(self, first: int = 0) -> Iterator[Frame]:
        """The frames from chunk `first` on, without the keyframes but the one that is `first` itself."""
        for index in range(first, len(self.chunks)):
            if index == first or not self.chunks[index].keyframe:
                yield from self.frames(self.chunks[index])

    def _header(self) -> Header:
        if self._file.read(len(MAGIC)) != MAGIC:
            raise BadRecording(f"--replay {self.path}: is no recording of `gshare tui --record`")
        try:
            (length,) = _LENGTH.unpack(self._file.read(_LENGTH.size))
            if length > _MAX_HEADER:
                raise ValueError("its header is too long")
            header = msgspec.msgpack.decode(self._file.read(length), type=Header)
            localtime(header.started)  # shown as a date: it has to be one
        except (
            struct.error,
            ValueError,
            OverflowError,
            OSError,
            RecursionError,
            msgspec.MsgspecError,
        ) as error:
            raise BadRecording(f"--replay {self.path}: its header cannot be read: {error}") from None
        if header.schema > SCHEMA:
            raise BadRecording(
                f"--replay {self.path}: was made by gshare {header.gshare} (schema {header.schema}); "
                f"this one knows schema {SCHEMA}: use that version or a newer one"
            )
        return header

    def _index(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        size = os.fstat(self._file.fileno()).st_size
        offset = self._file.tell()
        while offset < size:
            self._file.seek(offset)
            head = self._file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                self.note = f"ends in the middle of a chunk at byte {offset}: read up to there"
                break
            kind, time, packed, unpacked, crc = _HEAD.unpack(head)
            if kind not in (b"F", b"K") or unpacked > MAX_CHUNK or packed > MAX_CHUNK:
                raise BadRecording(f"--replay {self.path}: damaged at byte {offset}: no chunk begins there")
            if offset + _HEAD.size + packed > size:
                self.note = f"ends in the middle of a chunk at byte {offset}: read up to there"
                break
            chunks.append(Chunk(kind == b"K", time, offset + _HEAD.size, packed, unpacked, crc))
            offset += _HEAD.size + packed
        return chunks
