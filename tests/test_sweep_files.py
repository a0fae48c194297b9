"""What a sweep's files may take: against the files that one has left, and by counting every save."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gshare.agent.jobs.memory import ModelShape, saved_bytes
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.jobs.sweep import Trial
from gshare.cli import sweep_files
from gshare.cli.sweep_files import Files, files_of
from hypothesis import given
from hypothesis import strategies as st

SHAPE = ModelShape(
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=256,
    tie_word_embeddings=True,
)
SWEEP = """\
model = "{model}"
base_dtype = "fp32"
[defaults]
data = "data.jsonl"
max_steps = 12
eval_steps = 3
save_steps = {save_steps}
save_total_limit = {limit}
max_length = 32
r = 32
optim = "{optim}"
[sweep]
output_dir = "out"
[sweep.grid]
learning_rate = [1e-4, 1e-3, 5e-3, 1e-2]
[early_exit]
warmup = 0.25
keep = 0.5
divergence = false
overfitting = false
"""


@pytest.mark.parametrize(("save_steps", "limit", "optim"), [(0, 2, "adamw"), (2, 3, "adamw_8bit")])
def test_a_sweep_leaves_what_its_plan_says(
    tiny_checkpoint: Path, tmp_path: Path, save_steps: int, limit: int, optim: str
) -> None:
    rows = [{"prompt": f"{a} and {b}", "completion": f"{a + b}"} for a in range(6) for b in range(5)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "s.toml"
    path.write_text(SWEEP.format(model=tiny_checkpoint, save_steps=save_steps, limit=limit, optim=optim))

    def sweep(*arguments: str) -> str:
        command = [sys.executable, "-m", "gshare.cli.main", "sweep", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr
        return done.stdout

    planned = json.loads(sweep("plan", str(path), "--json"))["files_bytes"]
    sweep(str(path))
    left = sum(file.stat().st_size for file in (tmp_path / "out").rglob("*.safetensors"))
    # Every tensor has a line of about 100 bytes in its file's header.
    assert planned <= left <= 1.1 * planned


@dataclass
class Case:
    trials: list[Trial]
    specs: dict[str, AdapterSpec]
    places: int


@st.composite
def cases(draw: Any) -> Case:
    trials, specs = [], {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        total = draw(st.integers(1, 20))
        trials.append(Trial(name, 1, total, draw(st.integers(0, total - 1))))
        specs[name] = AdapterSpec(
            name=name,
            data="d",
            output_dir=name,
            r=draw(st.sampled_from((2, 8))),
            save_steps=draw(st.integers(0, 6)),
            save_total_limit=draw(st.integers(1, 3)),
            optim=draw(st.sampled_from(("adamw", "adamw_8bit"))),
        )
    return Case(trials, specs, draw(st.integers(1, len(trials))))


def _saved(case: Case, trial: Trial, *, goes_on: bool) -> int:
    """By walking through its steps."""
    spec = case.specs[trial.name]
    end = trial.total_steps if goes_on or not trial.boundary else trial.boundary
    saves = [
        step
        for step in range(1, end + 1)
        if step in (trial.boundary, trial.total_steps) or (spec.save_steps and step % spec.save_steps == 0)
    ]
    kept = saves[-spec.save_total_limit :]
    whole = end == trial.total_steps
    return len(kept) * saved_bytes(SHAPE, spec, moments=True) + (1 + whole) * saved_bytes(SHAPE, spec)


@given(cases())
def test_it_is_the_most_that_any_choice_leaves(case: Case) -> None:
    found = files_of(
        Path("/nowhere"), SHAPE, case.trials, case.specs, places=case.places, count=len(case.trials)
    )
    names = [trial.name for trial in case.trials]
    left = []
    for chosen in range(2 ** len(names)):
        on = {name for bit, name in enumerate(names) if chosen >> bit & 1}
        if len(on) == case.places:
            left.append(sum(_saved(case, trial, goes_on=trial.name in on) for trial in case.trials))
    assert found.most == max(left)


def test_those_still_to_be_drawn_count_as_the_largest() -> None:
    trial = Trial("a", 1, 10, 2)
    specs = {"a": AdapterSpec(name="a", data="d", output_dir="a", r=8)}
    one = files_of(Path("/nowhere"), SHAPE, [trial], specs, places=1, count=1).most
    four = files_of(Path("/nowhere"), SHAPE, [trial], specs, places=1, count=4).most
    behind = saved_bytes(SHAPE, specs["a"]) + saved_bytes(SHAPE, specs["a"], moments=True)
    assert four == one + 3 * behind


def test_what_is_there_already_counts_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_files.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "adapter").write_bytes(b"x" * 500)
    trial = Trial("a", 1, 10, 2)
    specs = {"a": AdapterSpec(name="a", data="d", output_dir="a", r=8)}
    found = files_of(tmp_path, SHAPE, [trial], specs, places=1, count=1)
    assert found.room == 1500
    assert found.warning()
    assert not Files(tmp_path, 1500, 1500).warning()
    assert files_of(tmp_path / "none" / "yet", SHAPE, [trial], specs, places=1, count=1).room == 1000


def test_files_that_go_while_they_are_counted_and_disks_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_files.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    (tmp_path / "renamed").write_bytes(b"x")
    (tmp_path / "stays").write_bytes(b"xx")
    lstat = Path.lstat

    def gone(path: Path) -> os.stat_result:
        if path.name == "renamed":
            raise FileNotFoundError(path)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", gone)
    trial = Trial("a", 1, 10, 2)
    specs = {"a": AdapterSpec(name="a", data="d", output_dir="a", r=8)}
    assert files_of(tmp_path, SHAPE, [trial], specs, places=1, count=1).room == 1002

    def refused(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(sweep_files.shutil, "disk_usage", refused)
    found = files_of(tmp_path, SHAPE, [trial], specs, places=1, count=1)
    assert (found.room, found.warning()) == (None, "")
    assert "free" not in found.told()
