"""A sweep's files: whole after a kill at any byte, strict JSON, damage named by line."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from gshare.agent.errors import GshareError
from gshare.agent.jobs.sweep_records import (
    DECISIONS_FILE,
    SWEEP_FILE,
    Configuration,
    Decision,
    DecisionLog,
    SweepRecord,
    read_decisions,
    read_sweep,
    write_sweep,
)

RECORD = SweepRecord(
    name="s",
    model="m",
    base_dtype="fp32",
    early_exit={"window": 2},
    created=1.0,
    configurations=[
        Configuration(
            name="r16", hyper_parameters={"r": 16}, total_steps=10, samples_total=40, output_dir="/o/r16"
        )
    ],
)


def _decision(step: int) -> Decision:
    return Decision(time=2.0, job="a", event="stopped", step=step, pattern="divergence", evidence={"x": 1.5})


def _write(directory: Path, count: int) -> list[Decision]:
    decisions = [_decision(step) for step in range(count)]
    with DecisionLog(directory) as log:
        for decision in decisions:
            log.append(decision)
    return decisions


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_sweep(tmp_path) is None
    assert read_decisions(tmp_path) == []
    write_sweep(tmp_path, RECORD)
    assert read_sweep(tmp_path) == RECORD
    assert read_decisions(tmp_path) == []
    decisions = _write(tmp_path, 3)
    assert read_decisions(tmp_path) == decisions
    assert _write(tmp_path, 1) == read_decisions(tmp_path)[3:]


def test_a_kill_at_any_byte_costs_only_the_line_it_cuts(tmp_path: Path) -> None:
    decisions = _write(tmp_path, 2)
    path = tmp_path / DECISIONS_FILE
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        kept = 0 if length < first else 1 if length < len(whole) else 2
        assert read_decisions(tmp_path) == decisions[:kept], length
        with DecisionLog(tmp_path) as log:
            log.append(_decision(9))
        assert read_decisions(tmp_path) == [*decisions[:kept], _decision(9)], length


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    _write(tmp_path, 2)
    path = tmp_path / DECISIONS_FILE
    path.write_bytes(b"{nonsense\n" + path.read_bytes())
    with pytest.raises(GshareError, match=r"decisions\.jsonl:1: not a decision"):
        read_decisions(tmp_path)


@pytest.mark.parametrize("key", ["val_loss", "best_val_loss"])
def test_a_loss_that_is_no_number_is_damage(tmp_path: Path, key: str) -> None:
    """A resumed sweep ranks by it. The control: null, and whole numbers as people write them."""
    path = tmp_path / DECISIONS_FILE
    for value in ('"low"', "[1.0]", "true"):
        _write(tmp_path, 1)
        with path.open("a") as file:
            file.write(f'{{"time": 1.0, "job": "a", "event": "paused", "evidence": {{"{key}": {value}}}}}\n')
        with pytest.raises(GshareError, match=r"decisions\.jsonl:2: not a decision of a sweep .*; remove"):
            read_decisions(tmp_path)
        path.unlink()
    path.write_text(
        "".join(
            f'{{"time": 1.0, "job": "a", "event": "paused", "evidence": {{"{key}": {value}}}}}\n'
            for value in ("null", "2", "2.5")
        )
    )
    assert [one.evidence[key] for one in read_decisions(tmp_path)] == [None, 2, 2.5]


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    with DecisionLog(tmp_path) as log:
        log.append(Decision(time=1.0, job="a", event="diverged", evidence={"val_loss": math.nan}))

    def refuse(word: str) -> None:
        raise AssertionError(word)

    line = json.loads((tmp_path / DECISIONS_FILE).read_text(), parse_constant=refuse)
    assert line["evidence"] == {"val_loss": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "sweep.json: cannot be read"), ("version", "version 99 is newer than the 1 known here")],
)
def test_a_sweep_that_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    write_sweep(tmp_path, RECORD)
    path = tmp_path / SWEEP_FILE
    path.write_text(path.read_text().replace('"version": 1', '"version": 99') if text == "version" else text)
    with pytest.raises(GshareError, match=message):
        read_sweep(tmp_path)


@pytest.mark.parametrize("name", [SWEEP_FILE, DECISIONS_FILE])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(GshareError, match=f"{name}: .*is no regular file"):
        read_sweep(tmp_path) if name == SWEEP_FILE else read_decisions(tmp_path)
    if name == DECISIONS_FILE:
        with pytest.raises(GshareError, match=f"{name}: is no regular file"):
            DecisionLog(tmp_path)


@pytest.mark.parametrize("damage", [b'{"a":' * 5000, b'{"name": "\xff"}'], ids=["deep", "not UTF-8"])
def test_files_that_are_deep_or_no_text_are_named(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / SWEEP_FILE).write_bytes(damage)
    with pytest.raises(GshareError, match=r"sweep\.json: cannot be read"):
        read_sweep(tmp_path)
    (tmp_path / DECISIONS_FILE).write_bytes(damage + b"\n")
    with pytest.raises(GshareError, match=r"decisions\.jsonl:1: not a decision"):
        read_decisions(tmp_path)
