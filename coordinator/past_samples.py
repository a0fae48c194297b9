"""The per-step metrics of a job that its node keeps no longer, or while it is away: those that came home.

A node forgets an attempt once its end is at home. Then `metrics.jsonl` lies in the job's output_dir, or, of a
job that did not complete, among the files of its newest checkpoint, and reaches as far as that.
"""

from __future__ import annotations

from pathlib import Path

from gshare.agent.errors import UsageError
from gshare.agent.node.bundles import METRICS
from gshare.agent.node.samples import read_samples
from gshare.agent.service.output_dir import read_record
from gshare.coordinator.blobs import BlobStore
from gshare.coordinator.facts import JobRecord
from gshare.coordinator.orders import checkpoint_refs, read_order


def samples_at_home(
    job: JobRecord, blobs: BlobStore, after_step: int, limit: int
) -> tuple[list[str], bool] | None:
    """As `read_samples`; None: nothing of it is here. Blocks on the disk."""
    for path in _places(job, blobs):
        if path.is_file():
            return read_samples(path, after_step, limit)
    return None


def _places(job: JobRecord, blobs: BlobStore) -> list[Path]:
    """The fullest first."""
    found: list[Path] = []
    if job.published:
        directory = Path(read_order(job.facts).job.spec.output_dir)
        try:
            record = read_record(directory)
        except UsageError:
            record = None  # no gshare's any more, or damaged: then so may be what lies beside it
        if record is not None and record.spec.name == job.facts.name:  # else another job trained there since
            found.append(directory / METRICS)
    return found + [blobs.path(ref.sha256) for ref in checkpoint_refs(job.checkpoint) if ref.name == METRICS]
