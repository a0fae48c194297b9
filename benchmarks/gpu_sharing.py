"""Two jobs on one GPU that do not fit together, a program outside the ledger, a job over its reservation.

    python benchmarks/gpu_sharing.py                a GPU with at least 16 GiB free; takes a few minutes
    python benchmarks/gpu_sharing.py --simulate     the same on a simulated device, computed on the CPU

Random models, made here; nothing is downloaded. What is looked at:

    wait       two `gshare finetune` of different bases start at once, each reserves 60 % of what the ledger
               may hand out: one runs, the other waits with its position and then runs; they never overlap;
               the traces of both say that the ledger cost at most 5 % of the time of their steps
    outside    a program that allocates outside the ledger shows in `gshare gpu status --json`, and a request
               that would fit without it is refused (exit 75)
    overrun    an adapter with rows too long for the reservation fails with a message that names it; its
               co-tenant in the same trainer and a neighbour with a reservation of its own complete

PASS, FAIL or SKIP a line; the exit code is 1 when one fails. With the real ledger of the host: other users'
reservations make the budgets smaller, and may make it fail.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gshare.agent
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.trace import SharingReport
from gshare.cli.gpu_trace import split

#: Where `gshare` was found: the commands run elsewhere, and must find it too.
PACKAGES = Path(gshare.agent.__file__).parents[2]

SIMULATED = (
    '[[device]]\nuuid = "GPU-simulated"\nname = "Simulated 140 GiB"\ntotal_mb = 143360\n'
    "used_by_others_mb = {others}\n"
)
OUTSIDE_MB = 2048
#: What a program outside the ledger does, on the GPU that CUDA_VISIBLE_DEVICES names.
OUTSIDER = f"""
import sys, torch
block = torch.ones({OUTSIDE_MB} << 20, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("allocated", flush=True)
sys.stdin.read()
"""

#: The overrun: 252 MB of bf16 weights, a context of about 600 MiB; a row of 16384 tokens keeps 3.5 GB.
OVERRUN_VRAM = "2560MiB"
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 4,
    "dtype": "bfloat16",
    "max_position_embeddings": 16384,
}
LONG_ROW, SHORT_ROW = 40_000, 60  # characters; the toy tokenizer makes about two of three a token

WAITING = "waiting for GPU memory, position 1: "
TIMEOUT_S = 600.0


class Checks:
    """Prints what held and what did not."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, name: str, good: bool, detail: str) -> None:
        self.failed += not good
        print(f"{'PASS' if good else 'FAIL'} {name}: {detail}", flush=True)


class Run:
    """One `gshare` command; its stderr goes to a file, so that nobody has to read while it runs."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.name = name
        self._log = folder / f"{name}.err"
        with self._log.open("w") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gshare.cli.main", *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def end(self) -> int:
        """Its exit code; killed, and a failure, when it takes too long."""
        try:
            self.out, _ = self._process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.out, _ = self._process.communicate()
        return self._process.returncode


def finetune(folder: Path, name: str, model: Path, adapters: dict[str, Path], *more: str) -> Run:
    """One trainer on bf16 with one step a row, nothing evaluated."""
    data = [word for job, file in adapters.items() for word in ("--adapter", f"{file}:out/{name}-{job}")]
    common = ("--base-dtype", "bf16", "--r", "4", "--eval-steps", "0", "--save-steps", "0")
    return Run(folder, name, "finetune", "--model", str(model), *data, *common, "--val-fraction", "0", *more)


def device(folder: Path) -> dict[str, Any]:
    """The first device of `gshare gpu status --json`."""
    run = Run(folder, "status", "gpu", "status", "--json")
    assert run.end() == 0, run.said
    return json.loads(run.out)["devices"][0]


def until(condition: Callable[[], bool]) -> bool:
    """Look until it holds; False when it did not come about in time."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def rows(path: Path, characters: int, count: int) -> Path:
    """A data file of `count` different rows of plain text."""
    word = "gshare trains many adapters "
    lines = [json.dumps({"text": f"{i} " + word * (characters // len(word) + 1)}) for i in range(count)]
    path.write_text("\n".join(lines))
    return path


def check_wait(folder: Path, check: Checks, steps: int) -> None:
    """Two trainers at once, of which only one fits."""
    models = [make_tiny_checkpoint(folder / family, family) for family in ("llama", "qwen2")]
    usable = device(folder)["available_ledger_mb"]
    budget = int(usable * 0.6)
    data = rows(folder / "short.jsonl", SHORT_ROW, 40)
    more = ("--vram", f"{budget}MiB", "--max-steps", str(steps), "--max-length", "128", "--trace")
    runs = [finetune(folder, model.name, model, {"a": data}, *more) for model in models]
    most, reserved_at_once, position = 0, 0, 0
    while any(run.runs for run in runs):
        now = device(folder)
        most = max(most, sum(row["budget_mb"] for row in now["reservations"]))
        reserved_at_once = max(reserved_at_once, len(now["reservations"]))
        position = max([position, *(waiter["position"] for waiter in now["queue"])])
    codes = [run.end() for run in runs]
    waited = [run.name for run in runs if WAITING in run.said]
    check("both end well", codes == [0, 0], f"exit codes {codes}, {budget} MiB each of {usable} MiB")
    check("one waits and says so", len(waited) == 1, f"waited: {', '.join(waited) or 'nobody'}")
    check("the queue shows it", position == 1, f"position {position} in gpu status")
    fits = reserved_at_once == 1 and most <= usable
    check("never both at once", fits, f"at most {reserved_at_once} reservations, {most} MiB")
    done = [(folder / f"out/{model.name}-a/adapter_model.safetensors").exists() for model in models]
    check("both are trained", all(done), f"adapters written: {sum(done)} of 2")
    if not all(done) or codes != [0, 0]:
        print("\n".join(run.said for run in runs), file=sys.stderr)
        return
    for run in runs:
        check_overhead(folder, check, f"{run.name}-a")


def check_overhead(folder: Path, check: Checks, job: str) -> None:
    """What sharing cost beside the steps of `job`, by its trace (the job's name, or a trace's file)."""
    run = Run(folder, "trace", "gpu", "trace", job, "--json")
    assert run.end() == 0, run.said
    found = json.loads(run.out)
    report = SharingReport(found["sharing_ms"], found["step_ms"], found["waiting_ms"])
    check(f"sharing costs {Path(job).stem} little", not report.falsified, report.verdict)
    print("\n".join(f"INFO {line}" for line in split(report)[:-1]))


def tell_context() -> None:
    """What the trainers measured, by their logs: the figures behind the allowance of the estimate."""
    for log in sorted(Path(os.environ["XDG_STATE_HOME"]).rglob("*.log")):
        for found in re.findall(r"at most \d+ MiB of tensors.* reserved$", log.read_text(), re.MULTILINE):
            print(f"INFO trainer {log.stem}: {found}")


@contextlib.contextmanager
def outsider(folder: Path, uuid: str, *, simulate: bool) -> Iterator[None]:
    """A program of 2 GiB that reserves nothing; on a simulated device the driver says so."""
    if simulate:
        path = Path(os.environ["GSHARE_DEVICES"])
        path.write_text(SIMULATED.format(others=OUTSIDE_MB))
        yield
        path.write_text(SIMULATED.format(others=0))
        return
    child = subprocess.Popen(
        [sys.executable, "-c", OUTSIDER],
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "allocated\n"
        yield
    finally:
        child.communicate()


def check_outside(folder: Path, check: Checks, *, simulate: bool) -> None:
    """A program that nobody has asked for memory."""
    before = device(folder)
    with outsider(folder, before["uuid"], simulate=simulate):
        during = device(folder)
        grown = during["outside_mb"] - before["outside_mb"]
        check("it is seen", grown >= OUTSIDE_MB, f"used outside the ledger: {grown} MiB more")
        lost = before["available_ledger_mb"] - during["available_ledger_mb"]
        check("it is counted", lost >= OUTSIDE_MB, f"available by the ledger: {lost} MiB less")
        ask = f"{before['available_ledger_mb'] - OUTSIDE_MB // 2}MiB"
        code = Run(folder, "ask", "gpu", "run", "--vram", ask, "--no-wait-gpu", "--", "true").end()
        check("its memory is nobody else's", code == 75, f"a request for {ask}: exit code {code}")
    back = until(lambda: device(folder)["outside_mb"] < before["outside_mb"] + OUTSIDE_MB // 2)
    check("and comes back with its end", back, f"outside now: {device(folder)['outside_mb']} MiB")
    code = Run(folder, "ask", "gpu", "run", "--vram", ask, "--no-wait-gpu", "--", "true").end()
    check("control: without it the request fits", code == 0, f"a request for {ask}: exit code {code}")


def check_overrun(folder: Path, check: Checks, steps: int) -> None:
    """One adapter that needs more than its trainer has reserved."""
    wide = make_tiny_checkpoint(folder / "wide", "llama", **WIDE)
    tiny = make_tiny_checkpoint(folder / "neighbour-base", "llama", seed=1)
    short = rows(folder / "few.jsonl", SHORT_ROW, 20)
    long = rows(folder / "long.jsonl", LONG_ROW, 2)
    neighbour = finetune(
        folder,
        "neighbour",
        tiny,
        {"a": short},
        "--vram",
        "4",
        "--max-steps",
        str(steps),
        "--max-length",
        "128",
    )
    over = finetune(
        folder,
        "over",
        wide,
        {"small": short, "large": long},
        *("--vram", OVERRUN_VRAM, "--max-steps", "10", "--max-length", "16384"),
    )
    code = over.end()
    reserved = re.search(r"\(reservation ([0-9a-f]{12})\)", over.said)
    named = reserved is not None and f"reservation {reserved[1]} is 2560 MiB on" in over.said
    failure = next((line for line in over.said.splitlines() if "failed" in line), "no failure")
    check("the large one fails", code == 1 and "large" in failure, f"exit code {code}: {failure}")
    check(
        "its reservation is named", named and "--vram" in failure, f"reservation {reserved and reserved[1]}"
    )
    made = {
        job: (folder / f"out/over-{job}/adapter_model.safetensors").exists() for job in ("small", "large")
    }
    check("it fails alone", made == {"small": True, "large": False}, f"adapters written: {made}")
    check("no restart", "resuming on a new one" not in over.said, "one trainer all along")
    code = neighbour.end()
    check("the neighbour completes", code == 0, f"exit code {code}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simulate", action="store_true", help="a simulated device; the overrun is skipped")
    parser.add_argument("--steps", type=int, default=1500, help="of the jobs that share; the first must last")
    options = parser.parse_args()
    check = Checks()
    with tempfile.TemporaryDirectory(prefix="gshare-bench-") as name:
        folder = Path(name)
        for variable in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
            (folder / variable).mkdir(mode=0o700)
            os.environ[variable] = str(folder / variable)
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGES), *([inherited] if inherited else [])])
        if options.simulate:
            (folder / "devices.toml").write_text(SIMULATED.format(others=0))
            os.environ["GSHARE_DEVICES"] = str(folder / "devices.toml")
            os.environ["GSHARE_LEDGER_DIR"] = str(folder / "ledger")
        where = device(folder)
        print(f"{where['name']}, {where['total_mb']} MiB, {where['available_ledger_mb']} MiB to be reserved")
        if where["memory_type"] == "cpu":
            print("FAIL no GPU here: --simulate tries the commands without one")
            return 1
        check_wait(folder, check, options.steps)
        check_outside(folder, check, simulate=options.simulate)
        if options.simulate:
            print("SKIP overrun: a simulated device caps nothing")
        else:
            check_overrun(folder, check, options.steps)
        tell_context()
        left = device(folder)["reservations"]
        check("nothing stays reserved", not left, f"{len(left)} reservations")
    print(f"{check.failed} failed" if check.failed else "all passed")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
