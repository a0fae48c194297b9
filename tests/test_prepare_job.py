"""Whose fault it is that a job cannot be prepared on a node: only the node's is tried elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.jobs.spec import AdapterSpec, RunSpec
from gshare.agent.node.prepare_job import NotPrepared, PreparedJob, PrepareJob, prepare_job


@pytest.mark.parametrize(
    ("fields", "model", "fault", "reason"),
    [
        ({"max_length": 513}, "tiny", "job", "adapter a: max_length: 513 is beyond"),
        ({"layers_to_transform": (2,)}, "tiny", "job", "adapter a: layers_to_transform: 2 is no layer"),
        ({}, "nosuch", "node", "no such directory"),
        ({"max_length": 512, "layers_to_transform": (1,)}, "tiny", None, ""),
    ],
)
def test_an_adapter_beyond_its_model_is_the_jobs_own_fault(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    model: str,
    fault: str | None,
    reason: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_tiny_checkpoint(tmp_path / "tiny")
    data = tmp_path / "a.jsonl"
    data.write_text("".join(f'{{"text": "row {i}"}}\n' for i in range(20)))
    adapter = AdapterSpec(
        name="a", data=str(data), output_dir=str(tmp_path / "out"), lora_alpha=8.0, seed=0, r=4, **fields
    )
    run = RunSpec(model=str(tmp_path / model), base_dtype="fp32", adapters=(adapter,))
    answer = prepare_job(PrepareJob(run=run, resume=False, on_gpu=False))
    if fault is None:
        assert isinstance(answer, PreparedJob), answer
    else:
        assert isinstance(answer, NotPrepared)
        assert answer.fault == fault, answer
        assert reason in answer.reason
