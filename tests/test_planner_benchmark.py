"""`benchmarks/planner.py` at a small size, that it can fail, and that its simulation is one of the rates."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from planner_ablation import SAMPLES, Executor, Exits, Measured, Sweep, in_turn

pytest.importorskip("ortools", reason="the extra `plan`")

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
CARD_MB = 143_771


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Speed is judged at full size only."""
    small = ["--random", "3", "--small", "12", "--seeds", "1", "--no-speed"]
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "planner.py"), *small, *arguments],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_every_gate_holds(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["small"] == {"instances": 12, "agreed": 12}
    assert all(found["gates"].values())
    assert len(found["gates"]) == 4
    ratios = {arm: ratio["mean"] for arm, ratio in found["ablation"]["batching_over"].items()}
    assert 1.0 == ratios["batching"] < ratios["+ planner between sweeps"] < ratios["+ early exit"]


def test_a_broken_planner_fails() -> None:
    done = run("--broken")
    assert done.returncode == 1, done.stdout
    assert "never worse than longest-first: FAILED" in done.stdout
    assert "as short as the exhaustive search: FAILED" in done.stdout
    assert "every plan valid: ok" in done.stdout


def test_nothing_is_saved_when_nobody_leaves() -> None:
    """Negative control of the ablation: its gain comes from the exits that it is given."""
    done = run("--warmup", "0.5", "--keep", "1", "--diverging", "0", "--overfitting", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "samples saved 0.0%" in done.stdout


@pytest.fixture
def measured() -> Measured:
    return Measured(BENCHMARKS / "results" / "gpu.json")


def sweep(batches: tuple[int, ...], *, rates: int = 1, gpus: int = 1, parameters: float = 8.03e9) -> Sweep:
    return Sweep("s", parameters, gpus, (1e-4,) * rates, (16,), batches)


def seconds(measured: Measured, it: Sweep, exits: Exits | None = None, *, backfill: bool = True) -> float:
    return Executor(it, measured, CARD_MB, backfill=backfill).run(exits, random.Random(0))


def test_one_configuration_takes_what_its_rate_says(measured: Measured) -> None:
    """32 rows a pass is a measured point: so many tokens, at its tokens a second."""
    tokens, pass_s = measured.seconds_at[-1]
    assert tokens == pytest.approx(32 * measured.row_tokens)
    expected = SAMPLES * measured.row_tokens / (tokens / pass_s)
    assert seconds(measured, sweep((32,))) == pytest.approx(expected, rel=0.01)  # the last pass is not full
    twice = sweep((32,), parameters=2 * 8.03e9)
    assert seconds(measured, twice) == pytest.approx(2 * expected, rel=0.01)
    assert seconds(measured, sweep((32,), parameters=2 * 8.03e9, gpus=2)) == pytest.approx(expected, rel=0.01)


def test_small_passes_are_not_taken_for_fast(measured: Measured) -> None:
    """Alone, batch 1 has the rate of one adapter: 32 of them one after another take longer than together."""
    alone = seconds(measured, sweep((1,)))
    together = seconds(measured, sweep((1,), rates=32))
    assert 1.5 < 32 * alone / together < 2.0  # 9,560 and 16,804 tokens a second were measured


def test_the_scheduler_fills_what_leaves(measured: Measured) -> None:
    """Without it a group waits for its slowest; with everything in one group there is nothing to fill."""
    mixed = sweep((1, 8, 64), rates=6)
    assert seconds(measured, mixed) < seconds(measured, mixed, backfill=False)
    alike = sweep((8,), rates=3)
    assert seconds(measured, alike) == seconds(measured, alike, backfill=False)


def test_what_exits_save_is_what_they_say(measured: Measured) -> None:
    it = sweep((8,), rates=40)
    exits = Exits(warmup=0.1, keep=0.25, diverging=0.25, overfitting=0.0)
    full, early = seconds(measured, it), seconds(measured, it, exits)
    saved = {pattern: samples / SAMPLES for pattern, samples in it.saved.items()}
    assert 9.0 <= saved["divergence"] <= 10.0  # ten leave within the first tenth
    assert saved["underperformance"] == pytest.approx(20 * 0.9, rel=0.01)
    assert saved["overfitting"] == 0.0
    assert early / full == pytest.approx(1 - sum(saved.values()) / 40, rel=0.05)


def test_in_turn_nobody_overtakes() -> None:
    wide, narrow = sweep((1,), gpus=4), sweep((1,))
    # The second wide one waits for the first, and the narrow one behind it waits with it.
    assert in_turn([(wide, 5.0), (wide, 5.0), (narrow, 3.0)], 4) == 13.0
    assert in_turn([(narrow, 3.0), (narrow, 5.0)], 4) == 5.0
