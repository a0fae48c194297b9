"""`benchmarks/cluster_sim.py` at a small size, and that it can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "cluster_sim.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Speed is judged at full size only."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--nodes", "20", "--jobs", "150", "--no-speed", *arguments],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_nothing_is_lost_or_doubled() -> None:
    done = run("--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout[: done.stdout.index("}\n0 lost") + 1])
    assert report["placements"] >= 150
    assert report["happened"]["coordinator killed"] > 0
    assert report["happened"]["partition"] > 0
    assert report["happened"]["node died for good"] > 0


def test_without_fencing_results_are_doubled() -> None:
    done = run("--seed", "1", "--no-fencing")
    assert done.returncode == 1, done.stdout
    assert "0 doubled: FAILED" in done.stdout


def test_without_the_outbox_jobs_are_lost() -> None:
    done = run("--seed", "1", "--no-outbox")
    assert done.returncode == 1, done.stdout
    assert "0 lost: FAILED" in done.stdout
