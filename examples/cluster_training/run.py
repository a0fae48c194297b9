"""A cluster on one machine: nine adapters, three agents, one killed midway, the bytes of a single run.

    python examples/cluster_training/run.py            SmolLM2-135M-Instruct, out of `make demo`'s packages
    python examples/cluster_training/run.py --toy      a random base of two layers: one or two minutes
    python examples/cluster_training/run.py --tamper   negative control: one byte is changed, exit code 1

The three nodes are agents on this machine; on other machines cluster.toml would name hosts instead, and
nothing else would differ. When the first adapter on node b has saved a checkpoint, b's agent gets a SIGKILL.
The coordinator starts it again, its adapters go on from their checkpoints, and all nine come home. Then one
`gshare finetune` trains the same nine, and every file is compared. Exit code 1 when one differs.

Everything is written under out/, which is emptied first; the agents and the coordinator are ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gshare.agent.base.resolve import find_demo_model
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.coordinator.on_node import running

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"
CONFIG = HERE / "adapters.toml"
NODES = ("a", "b", "c")
DATA = ("robot", "trivia", "chitchat")
#: Of each data set: enough for the steps of adapters.toml.
ROWS, VAL_ROWS = 24, 2
#: A step of the toy takes milliseconds: it has to make more of them to be caught in the middle.
TOY_FLAGS = ("--max-steps", "500", "--eval-steps", "250", "--save-steps", "50")
#: Three trainers on one machine get in each other's way with more threads than cores.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
WAIT_SECONDS = 1800.0
FILES = ("adapter_model.safetensors", "adapter_config.json", "best/adapter_model.safetensors")


def say(text: str) -> None:
    print(text, flush=True)


def gshare(*arguments: str, capture: bool = False) -> str:
    """The command that stands beside this interpreter; ends this script with its exit code on failure."""
    if not capture:
        say(f"$ gshare {' '.join(arguments)}")
    done = subprocess.run(
        [str(Path(sys.executable).with_name("gshare")), *arguments],
        check=False,
        text=True,
        stdout=subprocess.PIPE if capture else None,
        env=ENVIRONMENT,
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout or ""


def write_data(toy: bool) -> str:
    """The rows under out/data, and the base to train on."""
    data = OUT / "data"
    if toy:
        data.mkdir()
        for name in DATA:
            for file, count in ((f"{name}.jsonl", ROWS), (f"{name}.val.jsonl", VAL_ROWS)):
                rows = [{"text": f"{file} row {number} " + "word " * (number % 7)} for number in range(count)]
                (data / file).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        return str(make_tiny_checkpoint(OUT / "base"))
    sys.path.insert(0, str(HERE.parent / "demo"))
    from prepare import prepare

    prepare(OUT / "all")
    data.mkdir()
    for name in DATA:
        for file, count in ((f"{name}.jsonl", ROWS), (f"{name}.val.jsonl", VAL_ROWS)):
            lines = (OUT / "all" / file).read_text("utf-8").splitlines(keepends=True)
            (data / file).write_text("".join(lines[:count]), "utf-8")
    return str(find_demo_model())


def write_cluster() -> Path:
    """Three nodes on this machine, room for three adapters on each."""
    blocks = [
        f'[[node]]\nname = "{node}"\ntransport = "local"\n'
        f"state_dir = {json.dumps(str(OUT / 'nodes' / node))}\nmax_adapters = 3\ngpus = []\n"
        for node in NODES
    ]
    path = OUT / "cluster.toml"
    path.write_text("\n".join(blocks), "utf-8")
    return path


def status(home: str) -> dict[str, dict[str, Any]]:
    """Job → its row."""
    found = json.loads(gshare("cluster", "status", "--json", "--state-dir", home, capture=True))
    return {job["job"]: job for job in found["jobs"]}


def agent_pid(node: str) -> int | None:
    found = running(OUT / "nodes" / node)
    return None if found is None else found["pid"]


def train_on_the_cluster(model: str, flags: tuple[str, ...]) -> list[str]:
    """The names of the jobs, when all of them are at home."""
    home, cluster = str(OUT / "home"), str(write_cluster())
    config = ("--adapters-config", str(CONFIG), "--model", model, *flags)
    names = None
    try:
        gshare("submit", "--cluster", cluster, "--state-dir", home, *config)
        names = list(status(home))
        kill_one_midway(home)
        deadline = time.monotonic() + WAIT_SECONDS
        while any(job["state"] not in ("completed", "failed", "stopped") for job in status(home).values()):
            if time.monotonic() > deadline:
                raise SystemExit(f"not done within {WAIT_SECONDS:.0f} s; see {home}/coordinator.log")
            time.sleep(2)
        gshare("cluster", "status", "--state-dir", home)
        failed = {name: job["reason"] for name, job in status(home).items() if job["state"] != "completed"}
        if failed:
            raise SystemExit(f"failed: {failed}; see {home}/coordinator.log")
    finally:
        if names is not None:
            gshare("coordinator", "stop", "--state-dir", home)
        for node in NODES:
            if (pid := agent_pid(node)) is not None:
                os.kill(pid, signal.SIGTERM)
    return names


def kill_one_midway(home: str) -> None:
    """SIGKILL to the agent of node b, once an adapter there has a checkpoint and steps to go."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        there = [job for job in status(home).values() if job["node"] == "b"]
        if any(job["state"] in ("completed", "publishing", "placing") for job in there):
            raise SystemExit("node b was done before it could be killed: raise max_steps in adapters.toml")
        saved = (OUT / "nodes" / "b" / "attempts").glob("*/out/checkpoint-*")
        pid = agent_pid("b")
        if pid is not None and next(saved, None) is not None:
            os.kill(pid, signal.SIGKILL)
            steps = ", ".join(f"{job['job']} at step {job['step']} of {job['total_steps']}" for job in there)
            say(f"killed the agent of node b (pid {pid}): {steps}")
            return
        time.sleep(0.2)
    raise SystemExit(f"node b saved nothing within {WAIT_SECONDS:.0f} s; see {home}/coordinator.log")


def train_alone(model: str, flags: tuple[str, ...]) -> None:
    """The same nine in one process, into out/alone."""
    config = OUT / "alone.toml"
    text = CONFIG.read_text("utf-8").replace('"out/cluster/', '"alone/').replace('"out/', '"')
    config.write_text(text, "utf-8")
    arguments = ("finetune", "--adapters-config", str(config), "--model", model, *flags)
    say(f"$ gshare {' '.join(arguments)}")
    gshare(*arguments, "--json", capture=True)


def content(path: Path) -> object:
    """The file's bytes; of adapter_config.json all but the base's name.

    A base out of a .gguf file is named as that file by the cluster, and as its converted copy by `finetune`.
    """
    if path.name != "adapter_config.json":
        return path.read_bytes()
    config = json.loads(path.read_text("utf-8"))
    del config["base_model_name_or_path"]
    return config


def different(names: list[str]) -> list[str]:
    """The files that are not the same byte for byte."""
    there, here = OUT / "cluster", OUT / "alone"
    return [
        f"{name}/{file}"
        for name in names
        for file in FILES
        if content(there / name / file) != content(here / name / file)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Nine adapters over three agents, one killed midway.")
    parser.add_argument("--toy", action="store_true", help="a random base of two layers")
    parser.add_argument("--tamper", action="store_true", help="change one byte before comparing: has to fail")
    asked = parser.parse_args()
    start = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    model = write_data(asked.toy)
    flags = TOY_FLAGS if asked.toy else ()
    names = train_on_the_cluster(model, flags)
    say(f"at home after {time.monotonic() - start:.0f} s; now the same {len(names)} in one process")
    train_alone(model, flags)
    if asked.tamper:
        path = OUT / "cluster" / names[0] / FILES[0]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    wrong = different(names)
    if wrong:
        say(f"DIFFERENT: {', '.join(wrong)}")
        return 1
    say(f"{len(names)} adapters, {len(names) * len(FILES)} files: the bytes of the single run.")
    say(f"Done in {time.monotonic() - start:.0f} s. The adapters are in {OUT / 'cluster'}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
