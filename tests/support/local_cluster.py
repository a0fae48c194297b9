"""A cluster of agents of their own processes on this machine, driven by the command line, engines of straw.

cluster = LocalCluster(tmp_path, "a", "b")
cluster.write_jobs({"job0": "steps=20,sleep=0.05,files=1"})
code = cluster.gshare("submit", "--adapters-config", cluster.spec, "--watch").returncode
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gshare.agent.errors import GshareError
from gshare.coordinator.api_client import CoordinatorClient
from node_agents import NodeClient

SUPPORT = Path(__file__).parent
SECONDS = 90.0
#: What the coordinator has to know of a model: its shape. 1 M parameters, so that a CPU may have it.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


class LocalCluster:
    def __init__(self, root: Path, *nodes: str, straw: bool = True, max_adapters: int = 100) -> None:
        self.root = root
        self.nodes = nodes
        self.home = root / "home"
        self.file = root / "cluster.toml"
        self.spec = str(root / "adapters.toml")
        self.model = root / "model"
        self.started: list[subprocess.Popen[str]] = []
        environment = {"GSHARE_TEST_RUNNER": "fake_runner:FakeRunner", "GSHARE_TEST_PREPARE": "fake_prepare"}
        blocks = []
        for name in nodes:
            lines = [
                "[[node]]",
                f'name = "{name}"',
                'transport = "local"',
                f'state_dir = "{root / "nodes" / name}"',
                f"max_adapters = {max_adapters}",
                "gpus = []",
                "[node.environment]",
                *(f'{key} = "{value}"' for key, value in (environment.items() if straw else ())),
            ]
            blocks.append("\n".join(lines) + "\n")
        root.mkdir(parents=True, exist_ok=True)
        self.file.write_text("\n".join(blocks))
        if straw:
            self.model.mkdir(exist_ok=True)
            (self.model / "config.json").write_text(json.dumps(CONFIG))

    def write_jobs(self, jobs: dict[str, str], extra: str = "") -> None:
        """A job spec: name → the content of its data file (for straw its script)."""
        data = self.root / "data"
        data.mkdir(exist_ok=True)
        blocks = [f'model = "{self.model}"\nbase_dtype = "fp32"\n[defaults]\n{extra}\n']
        for name, text in jobs.items():
            (data / f"{name}.jsonl").write_text(text)
            blocks.append(
                f'[[adapter]]\nname = "{name}"\ndata = "data/{name}.jsonl"\noutput_dir = "out/{name}"\n'
            )
        Path(self.spec).write_text("".join(blocks))

    def adapter(self, name: str, inside: str = "") -> bytes:
        return (self.root / "out" / name / inside / "adapter_model.safetensors").read_bytes()

    # --- commands

    def command(self, *words: str) -> list[str]:
        where = ["--state-dir", str(self.home)]
        if words[:2] not in (("coordinator", "stop"), ("coordinator", "connect")):
            where += ["--cluster", str(self.file)]
        if words[:2] == ("cluster", "check"):
            where = where[2:]
        return [sys.executable, "-m", "gshare.cli.main", *words, *where]

    def gshare(self, *words: str, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            cwd="/",
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        """In the background; ended by `close` at the latest."""
        process = subprocess.Popen(
            self.command(*words),
            cwd="/",
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def _environment(self) -> dict[str, str]:
        paths = [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    # --- what is

    def status(self) -> dict[str, Any]:
        done = self.gshare("cluster", "status", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def jobs(self) -> dict[str, Any]:
        """Over the socket: quicker than a command."""
        from gshare.coordinator.api_protocol import JobRows, ListClusterJobs

        try:
            with CoordinatorClient(self.home, "test") as client:
                return {row.job: row for row in client.ask(JobRows, ListClusterJobs).jobs}
        except GshareError:
            return {}

    def until(self, condition: Callable[[], bool], seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{self.jobs()}\n{self.log()}"
            time.sleep(0.05)

    def until_ended(self, *names: str) -> None:
        def ended() -> bool:
            jobs = self.jobs()
            return all(
                name in jobs and jobs[name].state in ("completed", "stopped", "failed", "diverged")
                for name in names
            )

        self.until(ended)

    def log(self) -> str:
        path = self.home / "coordinator.log"
        return path.read_text() if path.exists() else ""

    def agent_pid(self, node: str) -> int | None:
        try:
            client = NodeClient(self.root / "nodes" / node / "socket", role="observer", owner="")
        except (GshareError, OSError):
            return None
        client.close()
        return client.hello.pid

    def coordinator_pid(self) -> int | None:
        try:
            with CoordinatorClient(self.home, "test") as client:
                return client.welcome.pid
        except GshareError:
            return None

    def close(self) -> None:
        """Ends every process that this cluster started, the hard way."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        pids = [self.coordinator_pid(), *(self.agent_pid(node) for node in self.nodes)]
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
