"""The examples run as they are, from a copy, so that the repository stays clean."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

pytest.importorskip("torch", reason="training needs it")


def test_multi_adapter_training(tmp_path: Path) -> None:
    """Three data formats on one toy base: every adapter is written, learns, and is as it would be alone."""
    example = tmp_path / "multi_adapter_training"
    shutil.copytree(EXAMPLES / "multi_adapter_training", example, ignore=shutil.ignore_patterns("out"))
    done = subprocess.run(
        [sys.executable, str(example / "run.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name, steps in (("capitals", 12), ("polite", 12), ("opposites", 8)):
        out = example / "out" / name
        assert (out / "adapter_model.safetensors").is_file()
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
        losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
        assert sorted(losses) == list(range(1, steps + 1))
        assert losses[steps] < losses[1]


def test_sweep(tmp_path: Path) -> None:
    """Four configurations, one to the end, and a page of them; what was not trained is what is saved."""
    for name in ("sweep", "demo"):
        shutil.copytree(EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns("out"))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "sweep" / "run.py"), "--toy"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "sweep" / "out"
    steps = {}
    for directory in (out / "sweep").glob("lr*"):
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text("utf-8").splitlines()]
        steps[directory.name] = max(line["step"] for line in lines if "loss" in line)
    assert sorted(steps.values()) == [8, 8, 8, 64]
    assert f"Samples saved: {1 - sum(steps.values()) / (4 * 64):.1%} of a full search of 256" in done.stdout
    (finished,) = (name for name, count in steps.items() if count == 64)
    assert f"Winner: trivia-{finished}," in done.stdout
    assert all(name in (out / "report.html").read_text(encoding="utf-8") for name in steps)


@pytest.mark.slow  # four times the tests' own torch start: agents, trainers, the single run
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("flags", "code", "told"), [((), 0, "9 adapters, 27 files"), (("--tamper",), 1, "DIFFERENT")]
)
def test_cluster_training(tmp_path: Path, flags: tuple[str, ...], code: int, told: str) -> None:
    """Nine adapters over three agents, one killed: the single run's bytes, and a changed byte is found."""
    example = tmp_path / "cluster_training"
    shutil.copytree(EXAMPLES / "cluster_training", example, ignore=shutil.ignore_patterns("out"))
    done = subprocess.run(
        [sys.executable, str(example / "run.py"), "--toy", *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert told in done.stdout
    assert "killed the agent of node b" in done.stdout
