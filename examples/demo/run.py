"""`make demo`: three adapters on SmolLM2-135M-Instruct at the same time, then what each has learned.

    python examples/demo/run.py

Model and data come out of installed packages (`prepare.py` says which and under what licence), so nothing
is downloaded. Everything is written under `demo-run/`, which is emptied first. About three minutes on two
cores.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from gshare.agent.base.resolve import find_demo_model
from prepare import prepare

HERE = Path(__file__).resolve().parent
RUN = HERE.parent.parent / "demo-run"
NEW_TOKENS = 24


def gshare(*arguments: str, capture: bool = False) -> str:
    """The command that stands beside this interpreter; ends this script with its exit code on failure."""
    command = [str(Path(sys.executable).with_name("gshare")), *arguments]
    done = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE if capture else None)
    if done.returncode:
        raise SystemExit(done.returncode)
    return (done.stdout or "").strip()


def answer(model: str, prompt: str, adapter: Path | None) -> str:
    """The greedy answer of the base, or of the base with `adapter`."""
    chosen = () if adapter is None else ("--adapter", str(adapter))
    return gshare(
        "generate", "--model", model, *chosen, "--max-new-tokens", str(NEW_TOKENS), prompt, capture=True
    )


def main() -> None:
    start = time.monotonic()
    shutil.rmtree(RUN, ignore_errors=True)
    prepare(RUN / "data")
    model = str(find_demo_model())
    gshare("finetune", "--adapters-config", str(HERE / "adapters.toml"), "--model", model)

    print("\nHeld-out prompts: not in the training data.")
    for name, held_out in json.loads((RUN / "data" / "held_out.json").read_text("utf-8")).items():
        prompt = held_out["prompt"]
        print(f"\n{name}: {prompt}")
        print(f"  base     {answer(model, prompt, None)!r}")
        print(f"  adapter  {answer(model, prompt, RUN / name)!r}", flush=True)
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    print(f"\nDone in {minutes} min {seconds} s. The adapters are in {RUN}.")


if __name__ == "__main__":
    main()
