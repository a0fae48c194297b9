"""`benchmarks/trunk.py` at a tiny shape on a CPU: its path, its gate, and that the gate can fail."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gshare.agent.train.engine import Engine
from gshare.kernels.reference_backend import ReferenceBackend

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import trunk
import trunk_arms
import trunk_gate
import trunk_processes
import trunk_worker
from gpu_workload import make_base
from trunk_operations import EACH, HEAD, KEPT, ONCE, expected, multiplications, pass_products
from trunk_worker import Task
from trunk_workload import SCALES, Cohort

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "trunk.py"
CPU = torch.device("cpu")
CELL = "n4-top1-two"
COHORT = Cohort.of(CELL, SCALES["tiny"])


def here(task: Task) -> dict[str, Any]:
    """A process's work in this one: the seconds are wrong, the rest is right."""
    return trunk_worker.run(replace(task, spawned=time.monotonic()))


def measured(out: Path, *arguments: str, launch: trunk_processes.Launch = here) -> tuple[int, dict[str, Any]]:
    """Exit code and the cell's result."""
    options = ["--shape", "tiny", "--device", "cpu", "--cells", CELL, "--out", str(out), *arguments]
    code = trunk.run(trunk.parse(options), launch)
    return code, json.loads(out.read_text())[f"tiny-{CELL}"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    code, found = measured(tmp_path_factory.mktemp("trunk") / "out.json")
    assert code == 0
    return found


# ------------------------------------------------------------------ the whole path


def test_every_arm_trains_the_same_jobs_to_the_same_bits(result: dict[str, Any]) -> None:
    arms = result["arms"]
    assert list(arms) == ["dedicated", "packed", "shared", "cached", "peft"]
    assert result["gate"] == "passed"
    jobs = arms["dedicated"]["jobs"]
    assert all(len(job["losses"]) == COHORT.steps * COHORT.epochs for job in jobs.values())
    # Learning rates and data differ: the gate compares jobs that are not one another's.
    assert len({job["adapter_sha256"] for job in jobs.values()}) == len(jobs) == 4
    assert [arms[arm]["trunk_shared"] for arm in ("packed", "shared", "cached")] == [0.0, 0.5, 1.0]
    assert all(arms[arm]["most_jobs_in_pass"] == 4 for arm in ("packed", "shared", "cached"))
    assert {"shared ÷ dedicated", "cached ÷ dedicated", "shared ÷ packed"} <= set(result["ratios"])
    assert result["ratios"]["packed ÷ dedicated"]["operations"] == 1.0
    assert arms["dedicated"]["of_floor"] > 0


def command_line(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Two arms, in processes of their own."""
    command = [sys.executable, str(SCRIPT), "--shape", "tiny", "--device", "cpu", "--cells", CELL]
    command += ["--arms", "dedicated", "shared", "--out", str(out), *options]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=300, check=False)


def test_in_processes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second time nothing is run, and the answer is the same."""
    out = tmp_path / "out.json"
    done = command_line(out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("measured") == 2
    assert "shared ÷ dedicated" in done.stdout
    written = out.read_bytes()

    def never(task: Task) -> dict[str, Any]:
        raise AssertionError(task)

    assert measured(out, "--arms", "dedicated", "shared", launch=never)[0] == 0
    assert capsys.readouterr().out == done.stdout
    assert out.read_bytes() == written


def test_a_broken_key_fails_the_gate(tmp_path: Path) -> None:
    """Negative control: rows that are only as long as each other are taken for one."""
    out = tmp_path / "out.json"
    done = command_line(out, "--break-dedup")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "GATE FAILED" in done.stdout
    assert "shared: j01 differs from dedicated in losses" in done.stdout
    assert "÷" not in done.stdout
    assert not out.exists()


def test_what_was_measured_is_not_run_again(
    tmp_path: Path,
    result: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only what is missing, what failed, and what was measured under other versions."""
    out, ran = tmp_path / "out.json", []
    again = told_again(result, ran)

    def failing(task: Task) -> dict[str, Any]:
        if task.arm == "shared":
            raise trunk_processes.Failed("exit code 1", "RuntimeError: out of luck")
        return again(task)

    arms = ("--arms", "dedicated", "packed", "shared")
    code, found = measured(out, *arms, launch=failing)
    assert (code, ran) == (1, ["dedicated", "packed"])
    assert "ratios" not in found
    assert "shared: exit code 1: RuntimeError: out of luck" in capsys.readouterr().out
    code, found = measured(out, *arms, launch=again)
    assert (code, ran[2:]) == (0, ["shared"])
    assert found["gate"] == "passed"
    monkeypatch.setattr(trunk, "NUMERICS", "another")
    measured(out, *arms[:3], launch=again)
    assert ran[3:] == ["dedicated", "packed"]
    # What is left of the old versions is no part of the new comparison.
    assert "shared ÷ dedicated" not in json.loads(out.read_text())[f"tiny-{CELL}"]["ratios"]


# ------------------------------------------------------------------ in pieces


def told_again(result: dict[str, Any], ran: list[str]) -> trunk_processes.Launch:
    """Processes that say at once what those of `result` said."""

    def again(task: Task) -> dict[str, Any]:
        ran.append(task.arm)
        old = result["arms"][task.arm]
        return {"setup_s": 1.0, "first": 1.0, "steady": old["steady_s"], "jobs": old["jobs"]} | {
            key: old[key] for key in ("floor_tokens_per_s", "trunk_shared") if key in old
        }

    return again


def clocked(out: Path, limit: str, launch: trunk_processes.Launch, seconds: float) -> int:
    """The exit code of a run whose clock goes on by so many seconds each time that it is read."""
    options = [
        "--shape",
        "tiny",
        "--device",
        "cpu",
        "--cells",
        CELL,
        "--out",
        str(out),
        "--time-limit",
        limit,
    ]
    ticks = itertools.count(0.0, seconds)
    return trunk.run(trunk.parse(options), launch, lambda: next(ticks))


def test_it_stops_before_an_arm_that_would_not_end_in_time_and_goes_on(
    tmp_path: Path, result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock is read once at first and once before each arm: two of five begin before 25 s."""
    out, ran = tmp_path / "out.json", []
    again = told_again(result, ran)
    assert clocked(out, "25", again, 10.0) == trunk.GO_ON == 75
    assert ran == ["dedicated", "packed"]
    told = capsys.readouterr()
    assert f"for want of time in 25 s: tiny-{CELL} shared, " in told.err
    assert "peft; the same command goes on" in told.err
    assert "packed ÷ dedicated" in told.out
    assert clocked(out, "25", again, 10.0) == 75
    assert clocked(out, "25", again, 1.0) == 0
    assert ran == ["dedicated", "packed", "shared", "cached", "peft"]
    assert json.loads(out.read_text())[f"tiny-{CELL}"]["gate"] == "passed"


def test_an_arm_is_judged_by_the_last_like_it(
    tmp_path: Path, result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Another cell's arm of the name took 400 s; a fault and other versions say nothing."""
    out, ran = tmp_path / "out.json", []
    other = Cohort.of("n8-top1-two", SCALES["tiny"])
    under = {"versions": trunk.versions("cpu"), "workload": asdict(other), "device": "cpu"}
    dedicated = result["arms"]["dedicated"] | {"under": under, "wall_s": 400.0}
    results = {"tiny-n8-top1-two": {"arms": {"dedicated": dedicated}}}
    out.write_text(json.dumps(results))
    assert clocked(out, "100", told_again(result, ran), 1.0) == 75
    assert ran == []
    said = capsys.readouterr().err
    assert "the first takes longer by itself: raise --time-limit" in said
    (took,) = re.findall(r"dedicated \(about (\d+) s\)", said)
    assert 200 < int(took) <= 400, "half as many jobs, the same process"
    for change in ({"error": "exit code 1"}, {"under": under | {"versions": {}}}):
        dedicated = result["arms"]["dedicated"] | {"under": under, "wall_s": 400.0} | change
        out.write_text(json.dumps({"tiny-n8-top1-two": {"arms": {"dedicated": dedicated}}}))
        ran.clear()
        assert clocked(out, "100", told_again(result, ran), 1.0) == 0
        assert ran[0] == "dedicated"


def test_what_an_arm_takes_is_reckoned_before_it_ever_ran(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["trunk.py", "--reckon", "--cells", "n16-top1", "n8-all-own"])
    assert trunk.main() == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    took = {(cell, arm): int(seconds) for cell, arm, seconds, _ in lines[:-1]}
    assert [arm for cell, arm in took if cell == "n16-top1"] == list(trunk.ARMS)
    assert int(lines[-1][1]) == pytest.approx(sum(took.values()), abs=len(took) / 2), "each is rounded"
    assert took["n16-top1", "shared"] < took["n16-top1", "dedicated"] < took["n16-top1", "peft"]
    assert took["n8-all-own", "mps"] < took["n8-all-own", "peft"], "side by side, not one after another"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--steps", "63"], "--steps 63: 1 to 62"),
        (["--time-limit", "0"], "more than 0 seconds"),
        (["--time-limit", "9", "--again"], "would begin anew each time"),
        (["--reckon", "--shape", "tiny"], "--shape 8b only"),
    ],
)
def test_options_that_make_no_sense(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        trunk.parse(["--device", "cpu", *options])
    assert refused.value.code == 2
    assert told in capsys.readouterr().err


def test_fewer_steps_are_another_workload() -> None:
    given = trunk.parse(["--device", "cpu", "--shape", "tiny", "--steps", "1", "--cells", CELL])
    assert given.cells == [(CELL, replace(COHORT, steps=1))]


# ------------------------------------------------------------------ the gate

Change = Callable[[dict[str, dict[str, Any]]], object]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda arms: arms["shared"]["jobs"]["j01"]["losses"].__setitem__(3, 5.0),
            "j01 differs from dedicated",
        ),
        (lambda arms: arms["packed"]["jobs"]["j00"].update(adapter_sha256="0"), "in adapter_sha256"),
        (lambda arms: arms["cached"]["jobs"]["j02"].update(moments_sha256="0"), "in moments_sha256"),
        (lambda arms: arms["shared"]["jobs"]["j03"].update(held_out=5.0), "in held_out"),
        (
            lambda arms: arms["shared"]["jobs"]["j03"].update(token_losses_sha256="0"),
            "in token_losses_sha256",
        ),
        (lambda arms: arms["shared"]["jobs"].pop("j03"), "trained 3 jobs"),
        (lambda arms: arms["shared"]["jobs"]["j03"]["losses"].pop(), "3 losses"),
        (lambda arms: arms["peft"]["jobs"]["j00"]["losses"].__setitem__(0, math.nan), "no number"),
        (
            lambda arms: _scale(arms["peft"]["jobs"]["j00"]["losses"], 1 + 2e-4),
            "2.0e-04 of it apart at step",
        ),
        (lambda arms: arms["packed"].update(error="exit code 1"), "packed: exit code 1"),
        (lambda arms: arms.pop("dedicated"), "nothing to compare"),
    ],
)
def test_each_difference_is_seen(result: dict[str, Any], change: Change, told: str) -> None:
    arms = copy.deepcopy(result["arms"])
    operations = expected(COHORT)
    assert trunk_gate.faults(COHORT, arms) == []
    assert "shared ÷ dedicated" in trunk_gate.report(CELL, COHORT, arms, operations)
    change(arms)
    (fault,) = trunk_gate.faults(COHORT, arms)
    assert told in fault
    assert "÷" not in trunk_gate.report(CELL, COHORT, arms, operations)


def _scale(losses: list[float], factor: float) -> None:
    losses[:] = [loss * factor for loss in losses]


@pytest.mark.parametrize(("share", "slow"), [(0.44, True), (0.46, False)])
def test_no_ratio_comes_from_a_slow_baseline(result: dict[str, Any], share: float, slow: bool) -> None:
    arms = copy.deepcopy(result["arms"])
    arms["dedicated"] |= {"of_floor": share, "peak_mb": 20_000.0}
    large = replace(COHORT, model="llama-3.1-8b")
    assert any("slow baseline" in fault for fault in trunk_gate.faults(large, arms)) is slow
    assert trunk_gate.faults(COHORT, arms) == []


def test_numbers_to_reach_are_held_against_the_shape_they_are_for(result: dict[str, Any]) -> None:
    operations = expected(COHORT)
    large = replace(COHORT, model="llama-3.1-8b")
    rates = {"dedicated": 100.0, "shared": 479.0}
    arms = {arm: result["arms"][arm] | {"steady_tokens_per_s": rate} for arm, rate in rates.items()}
    told = trunk_gate.report("n16-top1", large, arms, operations)
    assert "steady 4.79× (to reach: 4.8×, NOT reached)" in told
    arms["shared"]["steady_tokens_per_s"] = 481.0
    assert "4.81× (to reach: 4.8×, reached)" in trunk_gate.report("n16-top1", large, arms, operations)
    assert "to reach" not in trunk_gate.report("n16-top1", COHORT, arms, operations)


def test_what_is_to_be_reached_stands_line_by_line() -> None:
    """Measured and reached, missed, not measured, and behind a gate that failed."""
    results = {
        "n16-top1": {
            "gate": "passed",
            "arms": {"dedicated": {}, "shared": {}, "cached": {}},
            "ratios": {
                "shared ÷ dedicated": {"steady": 4.9, "cold": 3.0},
                "cached ÷ dedicated": {"steady": 6.99, "cold": 3.0},
            },
        },
        "n8-top1": {"gate": ["shared: j01 differs"], "arms": {"dedicated": {}, "shared": {}}},
    }
    first, *lines = [line.split() for line in trunk_gate.targets(results).splitlines()]
    assert first[:3] == ["cell", "arm", "rate"]
    assert len(lines) == sum(map(len, trunk_gate.TARGETS.values())) == 9
    found = {tuple(line[:5]): line[5:] for line in lines}
    assert found["n16-top1", "shared", "÷", "dedicated", "steady"] == ["4.90×", "4.8×", "reached"]
    assert found["n16-top1", "cached", "÷", "dedicated", "steady"] == ["6.99×", "7.0×", "NOT", "reached"]
    assert found["n16-top1", "shared", "÷", "mps", "steady"] == ["-", "5.0×", "not", "measured"]
    assert found["n8-top1", "shared", "÷", "dedicated", "steady"] == ["-", "3.8×", "gate", "failed"]
    assert found["n16-all-own", "packed", "÷", "peft", "cold"] == ["-", "8.0×", "not", "measured"]


# ------------------------------------------------------------------ the workload and its operation count


@pytest.mark.parametrize("cell", ["n4-top1-two", "n4-top2", "n3-all-own", "n2-top4"])
@pytest.mark.parametrize("trunk_of", [EACH, ONCE, KEPT])
def test_the_operation_count_is_what_the_engine_multiplies(
    cell: str, trunk_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = 0
    backend = ReferenceBackend()

    def counting(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor, w: torch.Tensor, *rest: Any) -> torch.Tensor:
            nonlocal counted
            counted += len(x) * w.numel()
            return op(x, w, *rest)

        return run

    cohort = Cohort.of(cell, SCALES["tiny"])
    arm = {EACH: "packed", ONCE: "shared", KEPT: "cached"}[trunk_of]
    engine = trunk_arms.make_engine(cohort, arm, CPU)
    for name in ("linear", "linear_dx"):
        monkeypatch.setattr(engine.backend, name, counting(getattr(backend, name)))
    group = trunk_arms.Group(engine, cohort, range(cohort.jobs))
    group.epoch()
    counted = 0
    group.epoch()
    products = []
    for step in range(cohort.steps):
        rows = [row for job in range(cohort.jobs) for row in cohort.rows(step, job)]
        products += pass_products(cohort.config, cohort.lowest_layer, rows, trunk_of)
    body = [product for product in products if product.layer != HEAD]
    assert counted == multiplications(cohort.config, body) > 0


def test_expectations_at_8b() -> None:
    """By operation count; the head and the top layer only at the 60 % that are labelled."""
    found = {}
    for cell in ("n8-top1", "n16-top1", "n32-top1", "n16-top2"):
        count = expected(Cohort.of(cell, SCALES["8b"]))
        assert count["packed"] == count["dedicated"] < count["peft"]
        found[cell] = round(count["dedicated"] / count["shared"], 1)
    assert found == {"n8-top1": 4.4, "n16-top1": 5.9, "n32-top1": 7.0, "n16-top2": 4.6}


def test_who_sees_what() -> None:
    def seen(cell: str) -> list[bytes]:
        cohort = Cohort.of(cell, SCALES["8b"])
        return [cohort.rows(1, job)[0].content for job in range(4)]

    one, two, own = (seen(f"n4-top1{data}") for data in ("", "-two", "-own"))
    assert len(set(one)) == 1
    assert (two[0], two[1]) == (two[2], two[3])
    assert len(set(two)) == 2
    assert len(set(own)) == 4
    cohort = Cohort.of("n4-top1-own", SCALES["8b"])
    for job in range(4):
        (row,) = cohort.rows(1, job)
        length = len(row.tokens)
        assert row.label_tokens == int(0.6 * length)
        assert not row.trained[: length * 2 // 5].any()
        assert row.content not in {one.content for one in cohort.held_out(job)}
    assert len({spec.seed for spec in cohort.specs()}) == 4
    sweep = Cohort.of("n4-top2", SCALES["8b"]).specs()
    assert {(spec.seed, spec.layers_to_transform) for spec in sweep} == {(0, (30, 31))}
    assert len({spec.learning_rate for spec in sweep}) == 4


@pytest.mark.parametrize("cell", ["n0-top1", "n65-all", "n4-top33", "16-top1", "n4-top1-three", "n4"])
def test_a_cell_that_is_none_is_refused(cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        trunk.parse(["--cells", cell])
    assert refused.value.code == 2
    assert f"{cell}: a cell is n<jobs>-top<layers>" in capsys.readouterr().err


def test_the_control_needs_a_cell_that_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        trunk.parse(["--break-dedup", "--cells", "n4-top1"])
    assert "not in n4-top1" in capsys.readouterr().err
    (only,) = trunk.parse(["--break-dedup", "--device", "cpu"]).cells
    assert only[1].data == "two"


def test_without_a_gpu_it_says_what_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trunk, "_gpu_name", lambda: "")
    with pytest.raises(SystemExit) as refused:
        trunk.parse([])
    assert refused.value.code == 2
    assert "--device cpu" in capsys.readouterr().err


def test_the_floor_is_of_the_products_that_a_solo_step_makes() -> None:
    base = make_base("tiny", "fp32", CPU)
    assert isinstance(trunk_arms.make_engine(COHORT, "dedicated", CPU), Engine)
    assert 0 < trunk_arms.solo_floor(base, COHORT) < math.inf


@pytest.mark.slow
def test_waves_of_processes(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Arm mps, but for MPS: four jobs, three at once."""
    monkeypatch.setattr(trunk_processes, "mps_daemon", lambda directory: nullcontext(dict(os.environ)))
    monkeypatch.setattr(trunk_processes, "at_once", lambda known, jobs: 3)
    task = Task(COHORT, "mps", "cpu", [0, 1, 2, 3], 0.0)
    record = trunk_processes.run_arm(task, trunk_processes.launch, {})
    assert trunk_gate.faults(COHORT, result["arms"] | {"mps": record}) == []
    assert record["jobs"] == {name: {"losses": job["losses"]} for name, job in _peft(result).items()}
    assert 0 < record["steady_s"] < record["cold_s"]


def _peft(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return result["arms"]["peft"]["jobs"]


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    task = Task(replace(COHORT, model="no such shape"), "shared", "cpu", [0], 0.0)
    with pytest.raises(trunk_processes.Failed, match="no such shape"):
        trunk_processes.launch(task)


def test_processes_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = trunk_worker.Meeting(tmp_path, 3)
    monkeypatch.setattr(trunk_worker, "PATIENCE_S", 0.02)
    with pytest.raises(TimeoutError, match="first epoch"):
        meeting.wait("first")
    assert (tmp_path / "first-3").exists()
    (tmp_path / "first-go").touch()
    meeting.wait("first")


COMMITTED = [
    ("8b", "cuda", ["n8-top1", "n16-top1", "n32-top1", "n16-top2", "n16-all-own"]),
    ("smollm2", "cpu", ["n8-top1", "n16-top1", "n8-top1-two"]),
]


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize(("shape", "device", "cells"), COMMITTED)
def test_what_is_committed_is_judged_again(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    shape: str,
    device: str,
    cells: list[str],
    broken: bool,
) -> None:
    """Gate and ratios of the records as they are. Control: one byte of one adapter was another."""
    results = json.loads((trunk.ROOT / f"benchmarks/results/trunk_{device}.json").read_text())
    if broken:
        job = results[f"{shape}-{cells[0]}"]["arms"]["packed"]["jobs"]["j03"]
        job["adapter_sha256"] = "0" * 64
    out = tmp_path / "judged.json"
    out.write_text(json.dumps(results))
    options = ["--report", "--shape", shape, "--device", device, "--out", str(out), "--cells", *cells]
    assert trunk.judge(trunk.parse(options)) == int(broken)
    told = capsys.readouterr().out
    assert ("packed: j03 differs from dedicated in adapter_sha256" in told) == broken
    assert told.count("gate passed") == len(cells) - broken
    if shape == "8b":
        assert sum(line.endswith(" reached") for line in told.splitlines()) == 9 - broken
    judged = json.loads(out.read_text())
    assert ("ratios" in judged[f"{shape}-{cells[0]}"]) != broken


def test_without_peft_its_arms_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trunk, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        trunk.parse(["--device", "cpu", "--shape", "tiny", "--cells", CELL])
    assert "need peft (extra dev)" in capsys.readouterr().err
    assert trunk.parse(["--device", "cpu", "--shape", "tiny", "--arms", "dedicated", "shared"])


def test_the_sample_of_peft_is_even_and_has_the_first() -> None:
    assert trunk.sample(16, 4) == [0, 4, 8, 12]
    assert trunk.sample(3, 0) == trunk.sample(3, 9) == [0, 1, 2]
