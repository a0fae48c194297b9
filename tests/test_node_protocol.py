"""The names of the wire between an agent and its clients, frozen: a change here needs a new version."""

from __future__ import annotations

import typing

import msgspec
import pytest
from gshare.agent.node import protocol
from gshare.agent.node.dial_out import DialIn
from gshare.agent.service.wire import FrameReader, WireError, convert, encode

FROZEN = {
    "node_client_hello": "protocol gshare client role owner session",
    "node_hello": "protocol gshare agent_id journal_id pid hostname draining knows",
    "describe": "id models",  # models: added; who does not know it ignores it
    "hold_blobs": "id blobs",
    "put_chunk": "id sha256 offset total data",
    "start_attempt": "id job attempt spec model base_dtype schedule max_tokens_per_pass "
    "max_adapters_per_pass data val_data checkpoint gpu budget_mb timeout_s early_exit pause_at past",
    "stop_attempts": "id attempts reason",
    "pause_attempts": "id attempts",
    "resume_attempts": "id attempts",
    "forget_attempts": "id attempts",
    "list_attempts": "id",
    "follow_node": "id journal_id after_seq samples",
    "pin_bundle": "id job attempt kind",
    "read_chunk": "id bundle name offset length",
    "release_bundle": "id bundle",
    "read_samples": "id job attempt after_step limit",
    "read_log": "id job attempt max_bytes",
    "end_leases": "id reservations",
    "drain": "id stop",
    "node_refused": "reply_to reason retry",
    "node_info": "reply_to hostname time uptime_s machine python torch driver cpu_cores cpu_percent ram_mb "
    "ram_free_mb disk_free_mb linger gpus reservations problems attempts_running",
    "blobs_held": "reply_to bytes_held complete",
    "received": "reply_to bytes_held complete",
    "attempt_accepted": "reply_to",
    "attempts_done": "reply_to failed",
    "attempts": "reply_to attempts",
    "following_node": "reply_to journal_id next_seq gap",
    "bundle_files": "reply_to bundle files step val_loss",
    "chunk": "reply_to data",
    "samples": "reply_to lines more",
    "log_text": "reply_to text",
    "leases_ended": "reply_to failed",
    "node_done": "reply_to",
    "node_event": "journal_id seq event",
    "attempt_event": "owner attempt event time",
    "node_message": "level text time",
}
FROZEN_PARTS = {
    protocol.BlobRef: "name sha256 size",
    protocol.ModelRef: "name path files",
    protocol.GpuInfo: "uuid name memory_type total_mb used_mb reserved_mb peak_mb outside_mb free_mb "
    "load_percent temperature_c power_w problem",
    protocol.ReservationInfo: "id gpu_uuid budget_mb peak_mb task pid user created state position reason "
    "clients lease",
    protocol.AttemptStatus: "owner job attempt state step total_steps loss val_loss best_val_loss best_step "
    "reason retry gpu position checkpoint_step exit parked",
}


def _fields(union: object) -> dict[str, str]:
    kinds: tuple[type[msgspec.Struct], ...] = typing.get_args(union)
    return {str(kind.__struct_config__.tag): " ".join(kind.__struct_fields__) for kind in kinds}


def test_field_names_of_version_1_are_frozen() -> None:
    assert protocol.NODE_PROTOCOL_VERSION == 1
    events = protocol.AttemptEvent | protocol.NodeMessage
    assert _fields(protocol.FromNodeClient) | _fields(protocol.FromNode) | _fields(events) == FROZEN
    for part, fields in FROZEN_PARTS.items():
        assert " ".join(part.__struct_fields__) == fields
    assert (DialIn.__struct_config__.tag, DialIn.__struct_fields__) == ("dial_in", ("node", "gshare"))


def test_bytes_travel_as_bytes_at_every_cut() -> None:
    message = protocol.PutChunk(id=1, sha256="0" * 64, offset=0, total=4, data=b"\x00\xff\xc1a")
    frame = encode(message)
    for cut in range(1, len(frame)):
        reader = FrameReader()
        frames = reader.feed(frame[:cut]) + reader.feed(frame[cut:])
        assert [convert(one, protocol.FromNodeClient) for one in frames] == [message]


def test_a_later_minor_version_is_understood_and_another_type_is_not() -> None:
    """Unknown fields are ignored; a field of the wrong type is named."""
    message = {"type": "describe", "id": 1, "urgency": 9}
    assert convert(message, protocol.FromNodeClient) == protocol.DescribeNode(id=1)
    with pytest.raises(WireError, match=r"\$\.attempts"):
        convert({"type": "stop_attempts", "id": 1, "attempts": "a"}, protocol.FromNodeClient)
