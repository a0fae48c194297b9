"""A cluster of agents of their own processes on this machine, driven by the command line, engines of straw.

cluster = LocalCluster(tmp_path, "a", "b")
cluster.write_jobs({"job0": "steps=20,sleep=0.05,files=1"})
code = cluster.gshare("submit", "--adapters-config", cluster.spec, "--watch").returncode
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from fake_runner import weights_after
from gshare.agent.errors import GshareError
from gshare.agent.node.protocol import ListAttempts
from gshare.coordinator.api_client import CoordinatorClient
from node_agents import NodeClient
from quick_coordinator import HOLDING

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
    def __init__(
        self,
        root: Path,
        *nodes: str,
        straw: bool = True,
        max_adapters: int = 100,
        more_environment: dict[str, dict[str, str]] | None = None,
    ) -> None:
        """`more_environment`: node → variables of its agent."""
        self.root = root
        self.nodes = nodes
        self.home = root / "home"
        self.file = root / "cluster.toml"
        self.spec = str(root / "adapters.toml")
        self.model = root / "model"
        self.holding = self.home / HOLDING  # while it is there, a coordinator of `start_coordinator` holds
        self.started: list[subprocess.Popen[str]] = []
        straws = {"GSHARE_TEST_RUNNER": "fake_runner:FakeRunner", "GSHARE_TEST_PREPARE": "fake_prepare"}
        blocks = []
        for name in nodes:
            environment = {**(straws if straw else {}), **(more_environment or {}).get(name, {})}
            lines = [
                "[[node]]",
                f'name = "{name}"',
                'transport = "local"',
                f'state_dir = "{root / "nodes" / name}"',
                f"max_adapters = {max_adapters}",
                "gpus = []",
                "[node.environment]",
                *(f'{key} = "{value}"' for key, value in environment.items()),
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

    def start_coordinator(self, *flags: str, lost_after: float = SECONDS) -> subprocess.Popen[str]:
        """One with little patience (`quick_coordinator.py`); what it says is in `log`. It answers already.

        `lost_after`: s, of a node; the default is longer than any test waits.
        """
        self.home.mkdir(mode=0o700, exist_ok=True)
        command = [sys.executable, str(SUPPORT / "quick_coordinator.py"), str(lost_after), *flags]
        with open(self.home / "coordinator.log", "ab") as log:
            process = subprocess.Popen(
                [*command, "--cluster", str(self.file), "--state-dir", str(self.home)],
                cwd="/",
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
            )
        self.started.append(process)
        self.until(lambda: self.coordinator_pid() == process.pid)
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
            assert time.monotonic() < deadline, f"{self.jobs()}\n{self.log()[-4000:]}"
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

    def state_dir(self, node: str) -> Path:
        return self.root / "nodes" / node

    def agent_pid(self, node: str) -> int | None:
        try:
            client = NodeClient(self.state_dir(node) / "socket", role="observer", owner="")
        except (GshareError, OSError):
            return None
        client.close()
        return client.hello.pid

    def attempts(self, node: str) -> dict[tuple[str, int], str]:
        """(job, attempt) → state, as the agent itself says it."""
        client = NodeClient(self.state_dir(node) / "socket", role="observer", owner="")
        try:
            listed = client.ask(ListAttempts).attempts
        finally:
            client.close()
        return {(status.job, status.attempt): status.state for status in listed}

    def nodes_now(self) -> dict[str, Any]:
        """Node → its row, over the socket."""
        from gshare.coordinator.api_protocol import ListNodes, NodeRows

        try:
            with CoordinatorClient(self.home, "test") as client:
                return {row.node: row for row in client.ask(NodeRows, ListNodes).nodes}
        except GshareError:
            return {}

    def submit(self, jobs: dict[str, str], *words: str) -> None:
        """Jobs of these scripts, taken by the coordinator that runs."""
        self.write_jobs(jobs)
        done = self.gshare("submit", "--adapters-config", self.spec, *words)
        assert done.returncode == 0, done.stderr

    def assert_home(self, scripts: dict[str, int]) -> None:
        """Job → its steps: each has ended well, its adapter is that of an undisturbed run, placed once."""
        jobs = self.jobs()
        for name, steps in scripts.items():
            assert (jobs[name].state, jobs[name].placed) == ("completed", True), jobs[name]
            assert self.adapter(name).decode() == weights_after(name, steps), name
            lines = [line for line in self.log().splitlines() if f" {name}: completed" in line]
            assert len(lines) == 1, lines

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
        # By their command lines: an agent that is still on its way up answers nobody.
        for one in psutil.process_iter(["cmdline"]):
            if any(word.startswith(f"{self.root}/") for word in one.info["cmdline"] or ()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
