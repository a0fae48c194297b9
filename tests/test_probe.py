"""The probe sees what torch can do, and notices packed rows that lose their solo bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch
from gshare.agent.base.probe import probe
from gshare.agent.service.environment import trainer_environment


def run_probe(environment: dict[str, str]) -> dict[str, dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-m", "gshare.agent.base.probe"],
        cwd="/",
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_everything_that_is_installed_is_found() -> None:
    found = run_probe(trainer_environment())
    assert {name: part["ok"] for name, part in found.items()} == dict.fromkeys(
        (
            *("torch", "rows", "transformers", "safetensors", "bitsandbytes"),
            *("triton", "gguf", "accelerate"),
        ),
        True,
    )
    assert found["torch"]["version"] == torch.__version__


def test_rows_are_compared(monkeypatch) -> None:
    """Negative control that needs no particular CPU: a comparison that always differs is reported."""
    monkeypatch.setattr(torch, "equal", lambda a, b: False)
    rows = probe()["rows"]
    assert rows["ok"] is False
    assert "16 of 16" in rows["error"]


def test_an_import_error_is_a_finding(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    found = probe()["bitsandbytes"]
    assert found["ok"] is False
    assert "bitsandbytes" in found["error"]
