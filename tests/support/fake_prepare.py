"""Preparation without a model or tokenizer, for agents with the engine of straw (`GSHARE_TEST_PREPARE`).

The data file holds the job's script, so it is its own token file. A script with `slow_prepare=S` takes S
seconds; `bad_data=1` is refused as the job's fault; the model "missing" as the node's.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
from gshare.agent.jobs.spec import JobRequest
from gshare.agent.node.prepare_job import NotPrepared, PrepareAnswer, PreparedJob, PrepareJob


def answer(asked: PrepareJob) -> PrepareAnswer:
    (spec,) = asked.run.adapters
    if asked.run.model == "missing":
        return NotPrepared(reason="model missing: not on this node", fault="node")
    script = dict(part.split("=") for part in Path(spec.data).read_text().split(",") if part)
    time.sleep(float(script.get("slow_prepare", 0)))
    if "bad_data" in script:
        return NotPrepared(reason=f"adapter {spec.name}: {spec.data}: row 1: no text", fault="job")
    return PreparedJob(
        model_dir="/nonexistent",
        request=JobRequest(spec=spec, train_store="/nonexistent", train_hash="0" * 64, resume=asked.resume),
        budget_mb=1024 if asked.on_gpu else None,
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(
        msgspec.json.encode(answer(msgspec.json.decode(sys.stdin.buffer.read(), type=PrepareJob)))
    )
