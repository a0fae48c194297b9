"""The wire's names, frozen: a change here is a change of the protocol and needs a new version."""

from __future__ import annotations

import typing

import msgspec
from gshare.agent.jobs import events, spec
from gshare.agent.service import protocol

FROZEN = {
    "client_hello": "protocol gshare pid client",
    "trainer_hello": "protocol gshare pid trainer_id model base_dtype schedule journal_id ready fingerprint "
    "last_seq joinable waiting gpu jobs",  # these five: added, only who joins asks for them
    "join": "id jobs budget_mb resident_mb",
    "open": "id",
    "submit": "id jobs names",  # names: added; who does not know it keeps none
    "stop": "id jobs reason",
    "pause": "id jobs",
    "resume": "id jobs pause_at",
    "take_weights": "id job directory",  # added, with its answer; who never asks does not meet them
    "weights_taken": "reply_to start",
    "list": "id",
    "follow": "id journal_id after_seq jobs",
    "detach": "id",
    "shutdown": "id",
    "done": "reply_to jobs failed busy seq",  # busy, seq: added; who does not know them ignores them
    "refused": "reply_to reason",
    "jobs": "reply_to jobs clients",  # clients: added; who does not know it ignores it
    "following": "reply_to journal_id next_seq gap",
    "event": "journal_id seq event",
}
FROZEN_EVENTS = {
    # last, exit: added; who does not know them ignores them
    "job": "job state step total_steps reason last exit",
    "step": "job step total_steps epoch loss grad_norm learning_rate tokens label_tokens seconds "
    "adapters_in_pass trunk_shared",  # trunk_shared: added; who does not know it ignores it
    "eval": "job step val_loss label_tokens best",
    "checkpoint": "job step path",
    "message": "level text job",
}


def _fields(union: object) -> dict[str, str]:
    kinds: tuple[type[msgspec.Struct], ...] = typing.get_args(union)
    return {str(kind.__struct_config__.tag): " ".join(kind.__struct_fields__) for kind in kinds}


def test_field_names_of_version_1_are_frozen() -> None:
    assert protocol.PROTOCOL_VERSION == 1
    assert _fields(protocol.FromClient) | _fields(protocol.FromTrainer) == FROZEN
    assert _fields(events.Event) == FROZEN_EVENTS
    assert spec.JobRequest.__struct_fields__ == (
        *("spec", "train_store", "train_hash", "val_store", "val_hash", "resume", "client"),
        *("start", "early_exit", "pause_at"),  # added; who does not know the last two trains on
    )
    assert spec.WarmStart.__struct_fields__ == ("directory", "sha256", "parent", "step")


def test_messages_of_a_later_minor_version_are_understood() -> None:
    """Unknown fields are ignored: a newer client may send some."""
    message = {"type": "stop", "id": 1, "jobs": ["a"], "reason": "", "urgency": 9}
    assert msgspec.convert(message, protocol.FromClient) == protocol.StopJobs(id=1, jobs=["a"])
