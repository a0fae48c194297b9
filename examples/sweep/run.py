"""`make sweep-demo`: four configurations of an adapter on SmolLM2-135M-Instruct, the best to the end.

    python examples/sweep/run.py
    python examples/sweep/run.py --toy       a random base of two layers: seconds

`gshare sweep` on `sweep.toml`, then `gshare report --html`. Model and data come out of installed packages
(`../demo/prepare.py` says which and under what licence), so nothing is downloaded. Everything is written
under out/, which is emptied first. Two to four minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from gshare.agent.base.resolve import find_demo_model
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.cli.sweep_board import result_of

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"


def gshare(*arguments: str) -> None:
    """The command that stands beside this interpreter; ends this script with its exit code on failure."""
    print("$ gshare", *arguments, file=sys.stderr, flush=True)
    done = subprocess.run([str(Path(sys.executable).with_name("gshare")), *arguments], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()

    sys.path.insert(0, str(HERE.parent / "demo"))
    from prepare import prepare

    shutil.rmtree(OUT, ignore_errors=True)
    prepare(OUT / "data")
    model = make_tiny_checkpoint(OUT / "base") if options.toy else find_demo_model()
    # The same quoting in JSON and TOML; the rest of the file has only keys of tables after this one.
    text = f"model = {json.dumps(str(model))}\n" + (HERE / "sweep.toml").read_text(encoding="utf-8")
    (OUT / "sweep.toml").write_text(text, encoding="utf-8")

    gshare("sweep", str(OUT / "sweep.toml"))
    gshare("report", str(OUT / "sweep"), "--html", str(OUT / "report.html"))

    result = result_of(OUT / "sweep")
    saved = 1 - result["samples"] / result["samples_total"]
    print(f"\nWinner: {result['winner']}, its adapter in {result['best']}.")
    print(f"Samples saved: {saved:.1%} of a full search of {result['samples_total']}, warm-ups counted.")
    print(f"Curves: {OUT / 'report.html'}")


if __name__ == "__main__":
    main()
