"""examples/gpu_ledger runs as it is, without a GPU, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "gpu_ledger"


def test_the_second_job_waits_for_the_first(tmp_path: Path) -> None:
    before = sorted(EXAMPLE.iterdir())
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "run.py")],
        cwd="/",
        env={**os.environ, "TMPDIR": str(tmp_path), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if "runs on" in line or "passes" in line]
    assert said == [
        "support runs on GPU-example",
        "$ gshare gpu run --vram 4 -- echo a small one passes",
        "a small one passes",
        "sales runs on GPU-example",
    ]
    assert "gshare: waiting for GPU-example, place 1: 12288 MiB asked, 7577 of 20889 MiB free" in done.stderr
    assert "(sales), waits" in done.stdout
    assert "40960 MiB can never fit on GPU-example" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert sorted(EXAMPLE.iterdir()) == before


def test_a_python_without_gshare_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(EXAMPLE / "run.py")],  # no site-packages, no PYTHONPATH
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"{sys.executable} has no gshare: pip install")
    assert done.stderr.count("\n") == 1
