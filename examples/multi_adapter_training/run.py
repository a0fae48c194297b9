"""Train three different adapters on one base at the same time, then prove that none noticed the others.

    python examples/multi_adapter_training/run.py

Takes half a minute on two cores: the base is a toy that this script makes. With a real one the two commands
are the same; name it with `--model`:

    gshare finetune --adapters-config adapters.toml --model HuggingFaceTB/SmolLM2-135M-Instruct
    gshare audit    --adapters-config adapters.toml --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from gshare.agent.base.tiny import make_tiny_checkpoint

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"
CONFIG = HERE / "adapters.toml"


def gshare(*arguments: str) -> None:
    """The command that stands beside this interpreter; its output goes where ours goes."""
    print("$ gshare", *arguments, file=sys.stderr)
    done = subprocess.run([str(Path(sys.executable).with_name("gshare")), *arguments], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    make_tiny_checkpoint(OUT / "base")
    gshare("finetune", "--adapters-config", str(CONFIG))
    gshare("audit", "--adapters-config", str(CONFIG))


if __name__ == "__main__":
    main()
