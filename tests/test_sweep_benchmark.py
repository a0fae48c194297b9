"""`benchmarks/sweep.py` on a toy base: the whole path, that it can fail, and its arithmetic by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from gshare.agent.jobs.early_exit import SweepExit
from gshare.agent.jobs.packing import Candidate, Packing
from gshare.agent.jobs.sweep import Begin, Paused, Run, Sweep, Trial
from sweep_arms import Arm, Groups, WorstFirst
from sweep_ranking import boundaries, disagreements, ranking, spearman, top, verdict

pytest.importorskip("torch", reason="training needs it")

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
GATES = [
    "winner within 0.5 % of the full search",
    "losses of the sweep are the full search's",
    "every arm did the same work",
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "sweep.py"), "--verify", "--model", "tiny", *arguments],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.timeout(900)
def test_every_gate_holds(tmp_path: Path) -> None:
    done = run("--peft-steps", "2", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["gates"] == dict.fromkeys(GATES, True)
    (seed,) = found["seeds"]
    assert set(seed["full_states"].values()) == {"completed"}
    assert [row["warmup"] for row in seed["ranking"]] == [0.01, 0.02, 0.05, 0.10, 0.20]
    # 8 configurations of 80 samples: two go on, six stop after 5 % (2 of 40 steps, 1 of 20: 4 samples).
    saved = seed["saved"]
    assert {name: part["runs"] for name, part in saved["by_pattern"].items()} == {
        "completed": 2,
        "underperformance": 6,
    }
    assert (saved["samples"], saved["samples_in_full"]) == (2 * 80 + 6 * 4, 8 * 80)
    assert saved["share"] == saved["by_pattern"]["underperformance"]["share"] == 1 - 184 / 640
    # The ranking at the sweep's own boundary is the one that the sweep made.
    at_5 = next(row for row in seed["ranking"] if row["warmup"] == 0.05)
    assert (at_5["steps"], at_5["best_inside"]) == ([1, 2], True)
    seconds, ratios = found["clock"]["seconds"], found["ratios"]
    assert math.prod(list(ratios.values())[:4]) == pytest.approx(ratios["PEFT in full ÷ sweep"])
    assert ratios["PEFT in full ÷ sweep"] == pytest.approx(seconds["peft"] / seconds["sweep"])
    assert "peft is extrapolated: 2 of 8 configurations, 2 steps each" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_that_keeps_the_worst_fails() -> None:
    done = run("--control", "--no-split")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{GATES[0]}: FAILED" in done.stdout
    assert f"{GATES[1]}: ok" in done.stdout  # it trains the wrong ones, but as they are
    assert " times" not in done.stdout


# ---------------------------------------------------------------------- what was measured


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A copy of what the paper's grid gave on a GPU."""
    path = tmp_path / "measured.json"
    path.write_bytes((BENCHMARKS / "results" / "sweep_cuda.json").read_bytes())
    return path


def _report(*paths: Path) -> tuple[int, str]:
    done = run("--report", *map(str, paths))
    return done.returncode, done.stdout + done.stderr


def test_the_paper_s_grid_reaches_its_numbers(measured: Path, tmp_path: Path) -> None:
    """60 configurations, three seeds; judged again from their losses."""
    code, told = _report(measured, measured)
    assert code == 0, told
    found = json.loads(measured.read_text(encoding="utf-8"))
    assert found["work"]["configurations"] == 60
    assert [one["seed"] for one in found["seeds"]] == [0, 1, 2]
    assert all(one["saved"]["share"] >= 0.70 for one in found["seeds"])
    assert all(len(one["full_val_losses"]) == 60 for one in found["seeds"])
    assert told.count(": +0.") == 6
    assert "FAILED" not in told
    assert float(told.rsplit("PEFT in full ÷ sweep: ", 1)[1].split()[0]) >= 30


def test_a_measured_file_with_one_other_loss_fails(measured: Path) -> None:
    """Negative control: of one loss of the full search a bit, or it would have had a better winner."""
    found = json.loads(measured.read_text(encoding="utf-8"))
    losses = found["seeds"][1]["full_val_losses"]["s-lr1e-05-r16-b8"]
    losses[min(losses, key=int)] = 3.0
    measured.write_text(json.dumps(found), encoding="utf-8")
    code, told = _report(measured)
    assert (code, f"{GATES[0]}: FAILED" in told, "PEFT in full" in told) == (1, True, False)

    found["seeds"][1]["full_val_losses"] = found["seeds"][1]["sweep_val_losses"]
    name, losses = next(iter(found["seeds"][1]["full_val_losses"].items()))
    step = next(iter(losses))
    found["seeds"][1]["sweep_val_losses"] = {name: {step: math.nextafter(losses[step], 9.0)}}
    measured.write_text(json.dumps(found), encoding="utf-8")
    code, told = _report(measured)
    assert (code, f"{GATES[1]}: FAILED" in told) == (1, True)


def test_files_of_different_work_are_not_read_together(measured: Path) -> None:
    code, told = _report(measured, BENCHMARKS / "results" / "sweep_cpu.json")
    assert code == 1
    assert "its work is not that of" in told


# ---------------------------------------------------------------------- arithmetic


def test_spearman_by_hand() -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [30, 20, 10]) == pytest.approx(-1.0)
    # Ranks (1, 2.5, 2.5, 4) and (1, 3, 2, 4): 4.5 / sqrt(4.5 · 5).
    assert spearman([0, 5, 5, 9], [1, 3, 2, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert spearman([1], [1]) is None


def test_the_top_is_rounded_up_and_no_number_is_last() -> None:
    assert top({"a": None, "b": 2.0, "c": math.nan, "d": 1.0, "e": 3.0}) == ["d", "b"]


def test_boundaries_are_the_sweep_s() -> None:
    assert boundaries(40) == {0.01: 1, 0.02: 1, 0.05: 2, 0.10: 4, 0.20: 8}
    assert boundaries(1) == {}


def test_a_ranking_that_loses_the_best_says_so() -> None:
    """At 5 % d leads, in the end a: of the true top (a alone) nothing is kept; at 10 % everything is."""
    final = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    late = {4: 0.0, 8: 0.0}
    history = {
        name: {1: early, 2: early, **dict.fromkeys(late, value)}
        for (name, value), early in zip(final.items(), (4.0, 3.0, 2.0, 1.0), strict=True)
    }
    found = {row["warmup"]: row for row in ranking(history, dict.fromkeys(final, 40), final)}
    assert (found[0.05]["spearman"], found[0.05]["coverage"], found[0.05]["best_inside"]) == (
        -1.0,
        0.0,
        False,
    )
    assert (found[0.10]["spearman"], found[0.10]["coverage"], found[0.10]["best_inside"]) == (1.0, 1.0, True)
    assert found[0.05]["steps"] == [2]
    assert (found[0.05]["excess"], found[0.10]["excess"]) == (3.0, 0.0)
    assert all(
        row[key] == row[f"{key}_alike"]
        for row in found.values()
        for key in ("spearman", "coverage", "excess")
    ), "all have made as many steps"


def test_a_batch_of_eight_is_ranked_with_its_like() -> None:
    """It has made an eighth of the steps: behind everybody at the boundary, the best in the end."""
    final = {
        f"{size}-{n}": 2.0 + 0.1 * n + (0.05 if size == "one" else 0.0)
        for size in ("one", "eight")
        for n in range(4)
    }
    totals = {name: 320 if name.startswith("one") else 40 for name in final}
    history = {
        name: {
            step: value + (5.0 if name.startswith("eight") else 0.0)
            for step in boundaries(totals[name]).values()
        }
        for name, value in final.items()
    }
    row = next(one for one in ranking(history, totals, final) if one["warmup"] == 0.05)
    assert row["steps"] == [2, 16]
    assert (row["best_inside"], row["coverage"]) == (False, 0.5)
    assert row["excess"] == pytest.approx(0.05 / 2.0)
    assert (row["best_inside_alike"], row["coverage_alike"], row["excess_alike"]) == (True, 1.0, 0.0)
    assert row["spearman_alike"] == 1.0 > row["spearman"]


def test_the_winner_may_be_half_a_percent_worse() -> None:
    full = {"a": 2.0, "b": 3.0}
    assert verdict(full, {"a": 2.01, "b": 3.0})["passed"]
    assert not verdict(full, {"a": 2.0101, "b": 3.0})["passed"]
    assert not verdict(full, {"a": None, "b": None})["passed"]
    assert not verdict({"a": None}, {"a": 1.0})["passed"]


def test_one_bit_is_a_disagreement() -> None:
    full = {"a": {1: 0.1, 2: 0.2, 3: math.nan}}
    assert disagreements(full, {"a": {1: 0.1, 3: math.nan, 4: 9.0}}) == []
    (fault,) = disagreements(full, {"a": {1: 0.1, 2: math.nextafter(0.2, 1)}})
    assert fault.startswith("a step 2: ")
    assert disagreements(full, {"a": {3: 1.0}})


# ---------------------------------------------------------------------- machines


def test_a_group_begins_when_the_one_before_has_ended() -> None:
    groups = Groups(lambda names: True, most=2)
    waiting = [Candidate(name, 1) for name in "abc"]
    assert groups.admit(waiting, []) == ["a", "b"]
    assert groups.admit(waiting[2:], waiting[:1]) == []
    assert Packing(lambda names: True, most=2).admit(waiting[2:], waiting[:1]) == ["c"]


def test_the_control_goes_on_with_the_last() -> None:
    trials = [Trial(name, 1, 10, 1) for name in "abcd"]

    def goes_on(machine: type[Sweep]) -> list[str]:
        sweep = machine(trials, SweepExit(), Packing(lambda names: True))
        sweep.handle(Begin())
        events = [Paused(name, 1, loss) for name, loss in zip("abcd", (1.0, 2.0, 3.0, 4.0), strict=True)]
        actions = [action for event in events for action in sweep.handle(event)]
        return [action.job for action in actions if isinstance(action, Run)]

    assert goes_on(WorstFirst) == ["d"]
    assert goes_on(Sweep) == ["a"]


def test_the_best_loss_of_an_arm_is_a_number() -> None:
    arm = Arm(vals={"a": {1: math.nan, 2: 3.0, 3: math.nan, 4: 4.0}, "b": {1: math.nan}})
    assert arm.best() == {"a": 3.0, "b": None}
