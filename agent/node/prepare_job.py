"""One attempt's preparation, in a process of its own: model found, data tokenised, memory estimated.

    python -m gshare.agent.node.prepare_job        (PrepareJob in on stdin, PrepareAnswer out, as JSON)

What this imports (transformers and what comes with it, some 300 MiB) goes with the process; the agent stays
small. The answer is all there is on stdout; talk goes to stderr, which the agent keeps.
"""

from __future__ import annotations

import os
import sys
from typing import Literal

import msgspec
from gshare.agent.errors import EXIT_OK, GshareError, RetryLater, UsageError
from gshare.agent.jobs.spec import JobRequest, RunSpec

#: Test hook: the module that is run in this one's place, so that the agent can be tested without a model.
PREPARE_VARIABLE = "GSHARE_TEST_PREPARE"
MODULE = "gshare.agent.node.prepare_job"


class PrepareJob(msgspec.Struct, frozen=True, kw_only=True):
    """`run` has one adapter, its paths absolute."""

    run: RunSpec
    resume: bool
    on_gpu: bool
    gpu: str = ""  # its UUID


class PreparedJob(msgspec.Struct, frozen=True, kw_only=True, tag="prepared"):
    """`budget_mb`: MiB to reserve on a GPU; None on the CPU. `notes`: lines for people.

    `part_mb` of it is what the adapter adds where its base is loaded already, and `resident_mb` of that what
    stays while it is there. `base`: which base it is, by content.
    """

    model_dir: str
    request: JobRequest
    base: str = ""
    budget_mb: int | None = None
    part_mb: int = 0
    resident_mb: int = 0
    notes: list[str] = []


class NotPrepared(msgspec.Struct, frozen=True, kw_only=True, tag="not_prepared"):
    """`fault`: of the node (it lacks the model, its disk is full, …) or of the job itself."""

    reason: str
    fault: Literal["node", "job"]


PrepareAnswer = PreparedJob | NotPrepared


def prepare_job(asked: PrepareJob) -> PrepareAnswer:
    """Loads transformers. Every foreseen error is an answer."""
    from gshare.agent.data.prepare import check_adapters, locate_model, prepare_requests, run_estimate
    from gshare.agent.service.base_identity import base_identity
    from gshare.agent.vram.budget import with_allowance, with_fragmentation
    from gshare.agent.vram.ledger import Ledger

    try:
        model_dir = locate_model(asked.run)
    except GshareError as error:
        return NotPrepared(reason=str(error), fault="node")
    except ModuleNotFoundError as error:
        reason = f"{error.name} is not installed on this node; it needs pip install 'gshare[train]'"
        return NotPrepared(reason=reason, fault="node")
    notes: list[str] = []
    try:
        check_adapters(asked.run, model_dir)
        requests = prepare_requests(asked.run, model_dir, resume=asked.resume, say=notes.append)
        devices = Ledger().list_devices() if asked.on_gpu else ()
        cards = [device.name for device in devices if device.uuid == asked.gpu]
        estimate = run_estimate(asked.run, model_dir, requests, on_gpu=asked.on_gpu, cards=cards)
    except UsageError as error:
        return NotPrepared(reason=str(error), fault="job")
    except (GshareError, RetryLater) as error:
        return NotPrepared(reason=str(error), fault="node")
    except OSError as error:
        return NotPrepared(reason=f"{error.filename or 'the disk'}: {error.strerror}", fault="node")
    return PreparedJob(
        model_dir=str(model_dir.absolute()),
        request=requests[0],
        base=base_identity(model_dir) or "",
        budget_mb=with_allowance(estimate.total, estimate.fragmentation) if asked.on_gpu else None,
        part_mb=with_fragmentation(estimate.added, estimate.fragmentation),
        resident_mb=with_fragmentation(estimate.resident),
        notes=notes,
    )


def main() -> int:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is talk
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=PrepareJob)
    with answers:
        answers.write(msgspec.json.encode(prepare_job(asked)))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
