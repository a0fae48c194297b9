"""Frames: any cut works, what is no frame is told apart, nothing grows without bound."""

from __future__ import annotations

import math
import os

import msgpack
import msgspec
import pytest
from gshare.agent.jobs import events
from gshare.agent.service import protocol
from gshare.agent.service.wire import MAX_FRAME, FrameReader, WireError, convert, encode
from hypothesis import given
from hypothesis import strategies as st

EVENT = protocol.EventFrame(
    journal_id="j", seq=3, event=events.JobChanged(job="a", state="running", step=1, total_steps=2)
)
STREAM = encode(EVENT) + encode(protocol.ListJobs(id=7)) + encode(protocol.Done(reply_to=7, jobs=["ü"]))


def _read_all(chunks: list[bytes]) -> list[dict[str, object]]:
    reader = FrameReader()
    return [frame for chunk in chunks for frame in reader.feed(chunk)]


def test_a_stream_may_be_cut_at_every_byte() -> None:
    whole = _read_all([STREAM])
    assert [frame["type"] for frame in whole] == ["event", "list", "done"]
    for cut in range(len(STREAM) + 1):
        assert _read_all([STREAM[:cut], STREAM[cut:]]) == whole
    assert _read_all([bytes([byte]) for byte in STREAM]) == whole


def test_round_trip_through_typed_structs_keeps_nan() -> None:
    frame = protocol.EventFrame(
        journal_id="j",
        seq=1,
        event=events.Evaluated(job="a", step=1, val_loss=math.nan, label_tokens=1, best=False),
    )
    (message,) = FrameReader().feed(encode(frame))
    back = convert(message, protocol.FromTrainer)
    assert isinstance(back, protocol.EventFrame)
    assert isinstance(back.event, events.Evaluated)
    assert math.isnan(back.event.val_loss)
    (message,) = FrameReader().feed(encode(EVENT))
    assert convert(message, protocol.FromTrainer) == EVENT


@given(st.binary(max_size=200), st.integers(1, 50))
def test_garbage_gives_a_wire_error_or_maps_and_nothing_else(data: bytes, size: int) -> None:
    reader = FrameReader(max_frame=1000)
    try:
        frames = [frame for i in range(0, len(data), size) for frame in reader.feed(data[i : i + size])]
    except WireError:
        return
    assert all(isinstance(frame, dict) for frame in frames)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "expected a map, got int"),
        (b"\xc1", "not a MessagePack stream"),
        (b"\x81\xa1\xff\x00", "not a MessagePack stream"),  # a key that is no UTF-8
        (b"\x81\x01\x00", "not a MessagePack stream"),  # a key that is no string
        (b"\xd4\x05\x00", "extension type 5"),
        (b"\xdd\xff\xff\xff\xff", "not a MessagePack stream"),  # an array of 4 billion
        (b"\x81\xa1a" * 2000, "not a MessagePack stream"),  # nested without end
    ],
)
def test_what_is_no_frame_is_refused_with_the_reason(data: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        FrameReader().feed(data)


def test_an_oversized_frame_is_refused_on_both_sides_and_the_largest_passes() -> None:
    overhead = len(encode(protocol.Refused(reply_to=0, reason="x" * 100_000))) - 100_000
    largest = protocol.Refused(reply_to=0, reason="x" * (MAX_FRAME - overhead))
    data = encode(largest)
    assert len(data) == MAX_FRAME
    (message,) = FrameReader().feed(data)
    assert convert(message, protocol.FromTrainer) == largest
    too_large = msgspec.structs.replace(largest, reason=largest.reason + "x")
    with pytest.raises(WireError, match="at most"):
        encode(too_large)
    raw = msgpack.packb(msgspec.to_builtins(too_large))
    assert raw is not None
    with pytest.raises(WireError, match=r"larger than|not a MessagePack stream"):
        FrameReader().feed(raw)


def test_a_frame_that_trickles_in_pieces_is_bounded_too() -> None:
    """The unpacker's own bound does not see this one: it consumes each string as it comes."""
    piece = msgpack.packb(os.urandom(900))
    assert piece is not None
    reader = FrameReader(max_frame=10_000)
    reader.feed(b"\x81\xa1a\xdc\xff\xff")
    for _ in range(11):
        assert reader.feed(piece) == []  # 903 bytes each: 9,939 so far
    with pytest.raises(WireError, match="larger than 10000 bytes"):
        reader.feed(piece)
    # The control: as many bytes in frames that end are no frame too large.
    reader = FrameReader(max_frame=10_000)
    assert sum(len(reader.feed(encode(EVENT))) for _ in range(1000)) == 1000


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(WireError, match=r"id"):
        convert({"type": "list", "id": "seven"}, protocol.FromClient)
    with pytest.raises(WireError, match="unexpected message"):
        convert({"type": "format_disk", "id": 1}, protocol.FromClient)
