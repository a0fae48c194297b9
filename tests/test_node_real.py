"""The real engine under an agent: killed and resumed, its bytes are those of a solo `gshare finetune`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.node import protocol
from gshare.agent.node.protocol import ModelRef
from gshare.agent.service import registry
from gshare.agent.service.client import TrainerClient

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from node_agents import NodeClient, running_agent  # noqa: E402

STEPS = 60
FLAGS: dict[str, Any] = {
    "r": 4,
    "max_steps": STEPS,
    "save_steps": 4,
    "eval_steps": 10,
    "max_length": 32,
    "optim": "adamw_8bit",
    "lora_dropout": 0.1,
}
#: What the bits of a run end up in; metrics.jsonl holds times, run.json and adapter_config.json paths.
BITS = (
    "adapter_model.safetensors",
    f"checkpoint-{STEPS}/adapter_model.safetensors",
    f"checkpoint-{STEPS}/optimizer.safetensors",
    "best/adapter_model.safetensors",
    "best/metadata.json",
)


def rows(name: str) -> bytes:
    return "\n".join(
        json.dumps({"prompt": f"{name} {i}", "completion": f" answer {i * 7}"}) for i in range(30)
    ).encode()


def losses(metrics: bytes) -> list[tuple[str, int, float]]:
    records = [json.loads(line) for line in metrics.splitlines()]
    return [
        (r["type"], r["step"], r.get("loss", r.get("val_loss")))
        for r in records
        if r["type"] != "fingerprint"
    ]


def start(client: NodeClient, name: str, model: ModelRef) -> None:
    reply = client.start(
        name,
        "",
        data=client.push(rows(name), f"{name}.jsonl"),
        spec=AdapterSpec(name=name, data="elsewhere", output_dir="elsewhere", **FLAGS),
        model=model,
    )
    assert isinstance(reply, protocol.AttemptAccepted), reply


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_agent_killed_twice_and_its_trainer_once_give_the_bytes_of_a_solo_run(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two attempts on a base that was pushed, on one trainer; a kill of the agent, then of everything."""
    for variable in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        (tmp_path / variable).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    flags = [text for key, value in FLAGS.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    (tmp_path / "a.jsonl").write_bytes(rows("a"))
    command = [sys.executable, "-m", "gshare.cli.main", "finetune", "--model", str(tiny_checkpoint)]
    command += [*flags, "--base-dtype", "fp32", "--device", "cpu", "--adapter", "a.jsonl:solo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr

    with running_agent(tmp_path / "node") as agent:
        client = agent.connect()
        files = [
            client.push(path.read_bytes(), path.name)
            for path in sorted(tiny_checkpoint.iterdir())
            if path.is_file()
        ]
        start(client, "a", ModelRef(name="tiny", files=files))
        start(client, "b", ModelRef(name="tiny", files=files))
        for beyond in (6, 24):
            for name in "ab":
                client.wait(name, lambda status, beyond=beyond: status.step > beyond)
            pids = trainers()
            assert len(pids) == 1, "attempts on one base share a trainer"
            if beyond == 24:
                os.kill(pids[0], 9)
            agent.kill()
            agent.start()
            client = agent.connect()
        for name in "ab":
            ended = client.wait_end(name)
            assert (ended.state, ended.step, ended.reason) == ("completed", STEPS, "")
        pulled = {
            **client.pull("a", "checkpoint"),
            **client.pull("a", "best"),
            **client.pull("a", "final"),
        }
        for file in BITS:
            assert pulled[file] == (tmp_path / "solo" / file).read_bytes(), file
        assert losses(pulled["metrics.jsonl"]) == losses((tmp_path / "solo" / "metrics.jsonl").read_bytes())
        # Negative control: other data, other bytes.
        assert client.pull("b", "final")[BITS[0]] != pulled[BITS[0]]
    deadline = time.monotonic() + 30
    while registry.live_trainers():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def trainers() -> list[int]:
    pids = []
    for directory in registry.live_trainers():
        trainer = TrainerClient(directory, "test", timeout=5.0)
        pids.append(trainer.hello.pid)
        trainer.close()
    return pids
