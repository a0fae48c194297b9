"""`gshare finetune` as a process with an engine of straw, under a ledger of its own on a simulated device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gshare.agent.vram.ledger import Ledger
from gshare.agent.vram.status import DeviceStatus, status
from gshare.cli import finetune as command
from ledger_children import make_ledger

SUPPORT = Path(__file__).parent

#: `gshare` without tokenising: a job's data file holds its script. STRAW_BASE: the base.
GSHARE = """
import os, sys
from pathlib import Path
from gshare.agent.jobs.spec import JobRequest
from gshare.cli import clone, finetune, main

def prepare(run, console, *, resume):
    return Path(os.environ.get("STRAW_BASE", "/nonexistent")), [
        JobRequest(spec=spec, train_store="/nonexistent", train_hash="0" * 64, resume=resume)
        for spec in run.adapters
    ]

finetune.prepare = prepare
clone.find_base = lambda run: prepare(run, None, resume=False)[0]
clone.prepare = lambda run, model_dir, console: prepare(run, console, resume=False)[1][0]
sys.exit(main.main(sys.argv[1:]))
"""

#: No test lets it come to its end: a loaded machine may take a minute to start six commands.
LONG = "steps=100000,sleep=0.01,save=5"


def own_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """One simulated device of 8500 usable MiB, and directories of this test's own."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv(command.RUNNER_VARIABLE, "reserved_runner:ReservedRunner")
    monkeypatch.setenv("GSHARE_LEDGER_DIR", str(tmp_path / "ledger"))
    monkeypatch.setenv("GSHARE_DEVICES", str(tmp_path / "devices.toml"))
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    return make_ledger(tmp_path)


def flags(name: str, script: str, *more: str) -> list[str]:
    Path(f"{name}.jsonl").write_text(script)
    return ["finetune", "--model", "fake", "--adapter", f"{name}.jsonl:out/{name}", *more]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", GSHARE, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def gshare(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; killed, and an error, when it takes a minute."""
    with start(*arguments) as process:
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, out, err


def the_device(ledger: Ledger) -> DeviceStatus:
    return status(ledger).devices[0]


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Its stderr up to the line with `text`."""
    assert process.stderr is not None
    seen = ""
    while text not in seen:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    return seen
