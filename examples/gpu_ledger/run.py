"""Two jobs that do not fit on one GPU together: the second waits for the first, neither runs out of memory.

    python examples/gpu_ledger/run.py

Takes a few seconds and needs no GPU: `devices.toml` stands for one, and the ledger lies in a directory of its
own. On a real machine leave both variables out; then every user of the host shares one ledger.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
GSHARE = (sys.executable, "-m", "gshare.cli.main")

#: A job that says where it runs and goes on until its input ends.
JOB = """
import os, sys
print(sys.argv[1], "runs on", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
sys.stdin.read()
"""


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    """One `gshare gpu` command, shown; its output is ours, its exit code is looked at by the caller."""
    print("$ gshare gpu", *arguments, flush=True)
    return subprocess.run([*GSHARE, "gpu", *arguments], stdin=subprocess.DEVNULL, text=True, check=False)


def start(name: str, gib: int) -> subprocess.Popen[str]:
    """A job under a reservation; closing its input ends it."""
    print(f"$ gshare gpu run --vram {gib} --task {name} -- python job.py {name} &", flush=True)
    command = [
        *GSHARE,
        "gpu",
        "run",
        "--vram",
        str(gib),
        "--task",
        name,
        "--",
        sys.executable,
        "-c",
        JOB,
        name,
    ]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True)


def device() -> dict[str, list[dict[str, object]]]:
    """What `gshare gpu status --json` says of the one device."""
    command = [*GSHARE, "gpu", "status", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)["devices"][0]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.1)


def main() -> None:
    if importlib.util.find_spec("gshare") is None:
        sys.exit(
            f"{sys.executable} has no gshare: pip install -e . in the clone, or take a Python that has it"
        )
    with tempfile.TemporaryDirectory(prefix="gshare-example-") as ledger:
        os.environ.update(GSHARE_DEVICES=str(HERE / "devices.toml"), GSHARE_LEDGER_DIR=ledger)
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)

        first = start("support", 12)
        until(lambda: len(device()["reservations"]) == 1)
        second = start("sales", 12)
        until(lambda: len(device()["queue"]) == 1)
        gpu("status")

        # A third that fits beside the first may pass the one that waits, a bounded number of times.
        assert gpu("run", "--vram", "4", "--", "echo", "a small one passes").returncode == 0
        # What does not fit now and may not wait exits with 75, what can never fit with 2.
        assert gpu("run", "--vram", "12", "--no-wait-gpu", "--", "true").returncode == 75
        assert gpu("run", "--vram", "40", "--", "true").returncode == 2

        print("support ends; sales has waited for its memory", flush=True)
        first.communicate()
        until(lambda: [row["task"] for row in device()["reservations"]] == ["sales"])
        gpu("status")
        second.communicate()
        assert (first.returncode, second.returncode) == (0, 0)
        assert device()["reservations"] == []


if __name__ == "__main__":
    main()
