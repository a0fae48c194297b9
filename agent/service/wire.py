"""Frames: MessagePack maps, one after the other, bounded at 16 MiB, converted into typed structs.

The streaming `msgpack.Unpacker` finds the borders, so a stream may be cut at any byte. Its own bound covers
the bytes it has not looked at yet, not the half-built object (measured: an array32 header followed by
strings is consumed piece by piece), so the reader counts the bytes since the last border itself.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import msgpack
import msgspec
from gshare.agent.errors import GshareError

MAX_FRAME = 16 * 1024 * 1024  # bytes
#: Elements of one array or map: 2^20 Python objects at most for one header of 5 bytes.
MAX_ELEMENTS = 1 << 20
_CHUNK = 64 * 1024

T = TypeVar("T")


class WireError(GshareError):
    """What came over the wire is no frame of this protocol; the connection cannot be used any further."""


def encode(message: msgspec.Struct) -> bytes:
    """One frame. Raises `WireError` when it would be larger than a reader accepts."""
    frame = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)), use_bin_type=True)
    assert frame is not None
    if len(frame) > MAX_FRAME:
        raise WireError(f"message of {len(frame)} bytes; a frame holds at most {MAX_FRAME}")
    return frame


def convert(message: dict[str, Any], kind: Any) -> Any:
    """A map from the wire as the struct (or tagged union) `kind`; `WireError` names the wrong field."""
    try:
        return msgspec.convert(message, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise WireError(f"unexpected message: {error}") from None


class FrameReader:
    """Bytes in, maps out. After a `WireError` the reader must not be fed again."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._max_frame = max_frame
        self._fed = 0  # bytes given to the unpacker so far
        self._border = 0  # offset where the last complete frame ended
        self._unpacker = msgpack.Unpacker(
            raw=False,
            strict_map_key=True,
            max_buffer_size=max_frame + _CHUNK,
            max_array_len=MAX_ELEMENTS,
            max_map_len=MAX_ELEMENTS,
            ext_hook=_refuse_extension,
        )

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The frames that `data` completes, in order; keeps the rest for the next call."""
        frames: list[dict[str, Any]] = []
        for start in range(0, len(data), _CHUNK):
            chunk = data[start : start + _CHUNK]
            self._fed += len(chunk)
            self._take(chunk, frames)
            if self._fed - self._border > self._max_frame:
                raise WireError(f"frame larger than {self._max_frame} bytes")
        return frames

    def _take(self, chunk: bytes, frames: list[dict[str, Any]]) -> None:
        try:
            self._unpacker.feed(chunk)
            for item in self._unpacker:
                end = self._unpacker.tell()
                if end - self._border > self._max_frame:
                    raise WireError(f"frame larger than {self._max_frame} bytes")
                self._border = end
                if not isinstance(item, dict):
                    raise WireError(f"expected a map, got {type(item).__name__}: not a gshare stream")
                frames.append(item)
        except WireError:
            raise
        except (msgpack.exceptions.UnpackException, ValueError, TypeError, RecursionError) as error:
            # ValueError covers lengths beyond the bounds, broken UTF-8 and the reserved byte 0xc1.
            raise WireError(f"not a MessagePack stream: {type(error).__name__} {error}".rstrip()) from None


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code} ({len(data)} bytes) is not part of the protocol")
