"""A sweep whose disk is full: it stops, nobody is ranked, and with room again it is the same sweep.

A limit on the size of files stands for the full disk: adapters of rank 64 do not fit, those of rank 2 do.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gshare.agent.jobs.sweep_records import read_decisions
from gshare.cli.sweep_board import result_of

WAIT_SECONDS = 300.0
SWEEP = """\
model = "{model}"
base_dtype = "fp32"
[defaults]
data = "data.jsonl"
max_steps = 8
eval_steps = 2
max_length = 32
[sweep]
output_dir = "out"
max_concurrent = {at_once}
[sweep.grid]
learning_rate = [1e-4, 5e-3]
r = [2, 64]
[early_exit]
warmup = 0.25
keep = 0.5
gap_threshold = 10.0
"""
#: Files of at most so many bytes, here and in the trainer, on a disk of little room; then `gshare`.
LIMITED = """
import resource, sys
from types import SimpleNamespace
from gshare.cli import sweep_files
from gshare.cli.main import main

sweep_files.shutil = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=1_500_000))
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
{and_so}
sys.exit(main(sys.argv[1:]))
"""
#: Negative control: a configuration that met the full disk counts as one that failed.
UNHEEDED = "from gshare.agent.service import sweeping; sweeping.NOT_SAVED = 'none of these words'"


def _write(directory: Path, model: Path, at_once: int) -> Path:
    directory.mkdir()
    rows = [{"prompt": f"{a} and {b}", "completion": f"{a + b}"} for a in range(6) for b in range(5)]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = directory / "s.toml"
    path.write_text(SWEEP.format(model=model, at_once=at_once))
    return path


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )


def _sweep(*arguments: str) -> str:
    done = _run("-m", "gshare.cli.main", "sweep", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _adapters(out: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("adapter_model.safetensors")}
    return {name: content for name, content in found.items() if "/checkpoint-" not in name}


@pytest.mark.parametrize("at_once", [0, 1])
def test_it_stops_and_goes_on_when_there_is_room(tiny_checkpoint: Path, tmp_path: Path, at_once: int) -> None:
    path = _write(tmp_path / "full", tiny_checkpoint, at_once)
    done = _run("-c", LIMITED.format(and_so=""), "sweep", str(path))
    assert done.returncode == 1, done.stderr
    assert re.search(r"warning: .*/out: .* may take up to \d\.\d MB, and 1\.5 MB are free", done.stderr)
    assert "disk full while writing" in done.stderr
    assert done.stderr.count("the sweep stops here, since nobody is to be ranked without it") == 1
    assert "--resume goes on with it" in done.stderr
    assert done.stdout.splitlines()[-1].endswith(" samples so far")
    out = path.parent / "out"
    assert not {one.event for one in read_decisions(out)} & {"selected", "failed", "stopped"}

    _sweep(str(path), "--resume")
    whole = _write(tmp_path / "whole", tiny_checkpoint, at_once)
    _sweep(str(whole))
    assert result_of(out)["winner"] == result_of(whole.parent / "out")["winner"]
    assert _adapters(out) == _adapters(whole.parent / "out")
    assert len(_adapters(out)) == 6  # two that completed, and the best of all four


def test_a_sweep_that_does_not_heed_it_ranks_the_rest(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = _write(tmp_path / "unheeded", tiny_checkpoint, 0)
    done = _run("-c", LIMITED.format(and_so=UNHEEDED), "sweep", str(path))
    assert done.returncode == 1, done.stderr
    decisions = read_decisions(path.parent / "out")
    assert {"selected", "failed"} <= {one.event for one in decisions}
    assert not any("r64" in one.job for one in decisions if one.event == "selected")
