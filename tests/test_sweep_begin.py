"""What `gshare sweep` makes sure of before its first job: the same sweep as before, and nobody beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gshare.agent.errors import UsageError
from gshare.agent.jobs.sweep_records import Configuration, SweepRecord, read_sweep, write_sweep
from gshare.cli import sweep as sweep_command
from gshare.cli import sweep_prepared
from gshare.cli.main import main

SWEEP = """\
model = "{model}"
base_dtype = "fp32"
[defaults]
data = "data.jsonl"
max_steps = 4
eval_steps = 2
max_length = 32
[sweep]
output_dir = "out"
[sweep.grid]
r = [2, 4]
"""


def _record(*values: dict[str, Any]) -> SweepRecord:
    return SweepRecord(
        name="s",
        model="m",
        base_dtype="fp32",
        early_exit={},
        created=1.0,
        configurations=[
            Configuration(
                name=f"s-c{number}",
                hyper_parameters=hyper,
                total_steps=10,
                samples_total=40,
                output_dir=f"/o/c{number}",
            )
            for number, hyper in enumerate(values, start=1)
        ],
    )


def test_a_value_that_was_changed_under_a_numbered_name_is_not_the_same_sweep() -> None:
    q, qv = ["q_proj"], ["q_proj", "v_proj"]
    before = _record({"target_modules": q}, {"target_modules": qv})
    # As it comes back from the file.
    before = msgspec.json.decode(msgspec.json.encode(before), type=SweepRecord)
    sweep_prepared.check_same(before, _record({"target_modules": q}, {"target_modules": qv}))
    with pytest.raises(UsageError, match=r"configuration s-c2: target_modules: .* → \['k_proj'\]; restore"):
        sweep_prepared.check_same(before, _record({"target_modules": q}, {"target_modules": ["k_proj"]}))
    sweep_prepared.check_same(_record({"data": "/a"}), _record({"data": "/moved/a"}))


@pytest.fixture
def file(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    rows = [{"prompt": f"red {i}", "completion": "blue"} for i in range(30)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "s.toml"
    path.write_text(SWEEP.format(model=tiny_checkpoint))
    return path


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_sweep_that_began_while_this_one_was_prepared_is_not_overwritten(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    resume: bool,
    meanwhile: bool,
) -> None:
    out = file.parent / "out"
    other = _record({"r": 8})
    take = sweep_prepared.take_lock

    def take_later(path: Path) -> int | None:
        if meanwhile:
            write_sweep(out, other)
        return take(path)

    monkeypatch.setattr(sweep_prepared, "take_lock", take_later)
    monkeypatch.setattr(sweep_command, "_run", lambda *_, **__: 0)
    code = main(["sweep", str(file), "--device", "cpu", *(["--resume"] if resume else [])])
    err = capsys.readouterr().err
    if not meanwhile:
        assert code == 0, err
        found = read_sweep(out)
        assert found is not None
        assert [one.name for one in found.configurations] == ["s-r2", "s-r4"]
        return
    assert code == (75 if resume else 2), err
    assert ("has gone on there meanwhile" if resume else "already holds a sweep") in err
    assert read_sweep(out) == other
