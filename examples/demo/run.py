"""`make demo`: three adapters on SmolLM2-135M-Instruct at the same time, then what each has learned.

    python examples/demo/run.py

Model and data come out of installed packages (`prepare.py` says which and under what licence), so nothing
is downloaded. Everything is written under `demo-run/`, which is emptied first. About three minutes on two
cores.

The run is traced, and at the end it says what sharing the GPU cost beside the training steps. Where there is
no GPU it reserves on a simulated one, so that the ledger has its work all the same; it computes on the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gshare.agent.base.resolve import find_demo_model
from gshare.agent.service.traces import find_trace
from gshare.agent.trace_file import read_trace
from gshare.cli.finetune_flags import GpuFlags
from gshare.cli.gpu_plan import plan_gpu
from gshare.cli.gpu_trace import split
from prepare import prepare

HERE = Path(__file__).resolve().parent
RUN = HERE.parent.parent / "demo-run"
NEW_TOKENS = 24
SIMULATED = '[[device]]\nuuid = "GPU-simulated"\nname = "Simulated 24 GB"\ntotal_mb = 24576\n'


def gshare(*arguments: str, capture: bool = False, environ: dict[str, str] | None = None) -> str:
    """The command that stands beside this interpreter; ends this script with its exit code on failure."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("gshare")), *arguments],
        check=False,
        text=True,
        stdout=subprocess.PIPE if capture else None,
        env={**os.environ, **(environ or {})},
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    return (done.stdout or "").strip()


def answer(model: str, prompt: str, adapter: Path | None) -> str:
    """The greedy answer of the base, or of the base with `adapter`."""
    chosen = () if adapter is None else ("--adapter", str(adapter))
    return gshare(
        "generate", "--model", model, *chosen, "--max-new-tokens", str(NEW_TOKENS), prompt, capture=True
    )


def finetune(model: str) -> None:
    """Train, with a trace; without a GPU under a ledger of its own on a simulated one."""
    arguments = ("finetune", "--adapters-config", str(HERE / "adapters.toml"), "--model", model, "--trace")
    if plan_gpu(GpuFlags(), "auto") is not None:
        gshare(*arguments)
        return
    print("No GPU is used here: memory is reserved on a simulated one, and the CPU computes.", flush=True)
    # Not under demo-run/: a clone may lie on a network filesystem, where the ledger trusts no lock.
    with tempfile.TemporaryDirectory(prefix="gshare-demo-") as folder:
        devices = Path(folder, "devices.toml")
        devices.write_text(SIMULATED, encoding="utf-8")
        ledger = str(Path(folder, "ledger"))
        gshare(*arguments, environ={"GSHARE_DEVICES": str(devices), "GSHARE_LEDGER_DIR": ledger})


def main() -> None:
    start = time.monotonic()
    shutil.rmtree(RUN, ignore_errors=True)
    prepare(RUN / "data")
    model = str(find_demo_model())
    finetune(model)

    print("\nHeld-out prompts: not in the training data.")
    for name, held_out in json.loads((RUN / "data" / "held_out.json").read_text("utf-8")).items():
        prompt = held_out["prompt"]
        print(f"\n{name}: {prompt}")
        print(f"  base     {answer(model, prompt, None)!r}")
        print(f"  adapter  {answer(model, prompt, RUN / name)!r}", flush=True)
    print("\nWhat sharing the GPU cost (`gshare gpu trace robot` shows more):")
    print("\n".join(split(read_trace(find_trace("robot")).report)))
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    print(f"\nDone in {minutes} min {seconds} s. The adapters are in {RUN}.")


if __name__ == "__main__":
    main()
