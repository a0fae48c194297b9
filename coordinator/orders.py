"""A job's whole order, as the store keeps it, and what becomes of it on a node.

SubmitToCluster ──► Order of each job ──► StartAttempt on the node where it was placed
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.jobs.spec import BaseDtype, ScheduleName
from gshare.agent.node.protocol import BlobRef, ModelRef
from gshare.coordinator.api_protocol import JobSubmission, LocalFile, ModelSource, SubmitToCluster
from gshare.coordinator.blobs import BlobStore
from gshare.coordinator.config import NodeConfig
from gshare.coordinator.facts import CheckpointRef, JobFacts
from gshare.coordinator.file_transfer import Source


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a node has to be told of one job."""

    job: JobSubmission
    model: ModelSource
    base_dtype: BaseDtype
    schedule: ScheduleName
    max_tokens_per_pass: int
    max_adapters_per_pass: int


def orders_of(request: SubmitToCluster) -> list[Order]:
    """One for each job of a submission."""
    return [
        Order(
            job=job,
            model=request.model,
            base_dtype=request.base_dtype,
            schedule=request.schedule,
            max_tokens_per_pass=request.max_tokens_per_pass,
            max_adapters_per_pass=request.max_adapters_per_pass,
        )
        for job in request.jobs
    ]


def facts_of(order: Order, submission: str) -> JobFacts:
    """What placement needs of it, with the order as payload."""
    return JobFacts(
        name=order.job.spec.name,
        submission=submission,
        base=base_key(order),
        base_mb=order.job.base_mb,
        adapter_mb=order.job.adapter_mb,
        parameters=order.model.parameters or None,
        model=order.model.name,
        early_exit=order.job.early_exit is not None or order.job.pause_at > 0,
        pause_at=order.job.pause_at,
        sendable=bool(order.model.files) or not order.model.name.startswith("/"),
        payload=msgspec.msgpack.encode(order),
    )


def read_order(facts: JobFacts) -> Order:
    return msgspec.msgpack.decode(facts.payload, type=Order)


def base_key(order: Order) -> str:
    """Equal for jobs whose base is the same: one trainer can serve them."""
    content = [f"{file.name} {file.sha256}" for file in order.model.files] or [order.model.name]
    return hashlib.sha256("\n".join([order.base_dtype, *content]).encode()).hexdigest()[:32]


def model_for(order: Order, node: NodeConfig) -> ModelRef:
    """The node's own path for it (its `models`), a hub id, or files that are sent."""
    name = order.model.name
    if name in node.models:
        return ModelRef(name=name, path=node.models[name])
    if order.model.files:
        return ModelRef(name=name, files=[blob_ref(file) for file in order.model.files])
    return ModelRef(name=name, path=name)


def blob_ref(file: LocalFile) -> BlobRef:
    return BlobRef(name=file.name, sha256=file.sha256, size=file.size)


def checkpoint_refs(checkpoint: CheckpointRef | None) -> list[BlobRef]:
    files = checkpoint.files if checkpoint is not None else ()
    return [BlobRef(name=name, sha256=sha256, size=size) for name, sha256, size in files]


def sources_for(
    order: Order, model: ModelRef, checkpoint: Sequence[BlobRef], blobs: BlobStore
) -> list[Source]:
    """The files here that the node needs before the attempt: data first, the largest last."""
    files = [order.job.data, *((order.job.val_data,) if order.job.val_data else ())]
    sources = [Source(Path(file.path), file.sha256, file.size) for file in files]
    sources += [Source(blobs.path(ref.sha256), ref.sha256, ref.size) for ref in checkpoint]
    if model.files:
        sources += [Source(Path(file.path), file.sha256, file.size) for file in order.model.files]
    return sources


def start_fields(order: Order, model: ModelRef, checkpoint: Sequence[BlobRef]) -> dict[str, Any]:
    """The fields of `StartAttempt` that the order decides."""
    return {
        "job": order.job.spec.name,
        "spec": order.job.spec,
        "model": model,
        "base_dtype": order.base_dtype,
        "schedule": order.schedule,
        "max_tokens_per_pass": order.max_tokens_per_pass,
        "max_adapters_per_pass": order.max_adapters_per_pass,
        "data": blob_ref(order.job.data),
        "val_data": blob_ref(order.job.val_data) if order.job.val_data else None,
        "checkpoint": list(checkpoint),
        "early_exit": order.job.early_exit,
        "pause_at": order.job.pause_at,
    }
