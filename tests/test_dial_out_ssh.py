"""A node behind NAT: its agent calls out through a real OpenSSH server, and trains what it is given."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_runner import weights_after
from local_cluster import SUPPORT, LocalCluster
from node_agents import AgentProcess
from sshd import Sshd, free_port, start_sshd

#: Of the environment that `gshare coordinator connect` gets over there.
PASSED = ("PATH", "PYTHONPATH", "HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """Its file names one node, which nobody answers for. Its coordinator is the one that is found without
    flags."""
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "HOME"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    made = LocalCluster(tmp_path / "it")
    made.file.write_text(
        f'[[node]]\nname = "gone"\nhost = "127.0.0.1"\ntransport = "agent"\nport = {free_port()}\n'
    )
    made.home = tmp_path / "XDG_STATE_HOME" / "gshare" / "coordinator"
    made.home.parent.mkdir(mode=0o700, parents=True)
    yield made
    made.close()


@pytest.fixture
def sshd(tmp_path: Path, cluster: LocalCluster) -> Iterator[Sshd]:
    """The coordinator's machine."""
    variables = " ".join(f"{name}={os.environ[name]}" for name in PASSED if os.environ.get(name))
    with start_sshd(tmp_path / "sshd", more=(f"SetEnv {variables}",)) as server:
        folder = tmp_path / "HOME" / ".ssh"
        folder.mkdir(mode=0o700)
        (folder / "known_hosts").write_text(server.known_hosts_line)
        (folder / "id_ed25519").write_bytes(server.client_key.read_bytes())
        (folder / "id_ed25519").chmod(0o600)
        yield server


@pytest.fixture
def agent(tmp_path: Path, sshd: Sshd) -> Iterator[AgentProcess]:
    straws = {"GSHARE_TEST_RUNNER": "fake_runner:FakeRunner", "GSHARE_TEST_PREPARE": "fake_prepare"}
    environment = {**straws, "HOME": os.environ["HOME"], "PYTHONPATH": str(SUPPORT)}
    where = f"{sshd.user}@{sshd.host}:{sshd.port}"
    process = AgentProcess(tmp_path / "node", ("--coordinator", where, "--node", "nat"), environment)
    process.start()
    yield process
    process.kill()


@pytest.mark.timeout(300)
def test_an_agent_that_calls_out_trains_and_its_adapter_comes_home(
    cluster: LocalCluster, sshd: Sshd, agent: AgentProcess
) -> None:
    """Its connection is cut in the middle: it calls again, and the attempt goes on."""
    cluster.start_coordinator()
    cluster.write_jobs({"job": "steps=60,sleep=0.1,save=5,files=1"})
    assert cluster.gshare("submit", "--adapters-config", cluster.spec).returncode == 0
    cluster.until(lambda: cluster.jobs()["job"].step >= 6)
    assert cluster.jobs()["job"].node == "nat"
    sshd.signal_sessions(signal.SIGKILL)
    cluster.until_ended("job")
    job = cluster.jobs()["job"]
    assert (job.state, job.attempt, job.placed) == ("completed", 1, True), job
    assert cluster.adapter("job").decode() == weights_after("job", 60)
    assert "nat" in cluster.nodes_now()
