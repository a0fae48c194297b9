"""A node behind a real OpenSSH server: its key confirmed first, its connection cut in the middle of a run."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_runner import weights_after
from local_cluster import SUPPORT, LocalCluster
from sshd import Sshd, start_sshd


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    with start_sshd(tmp_path / "sshd") as server:
        yield server


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sshd: Sshd) -> Iterator[LocalCluster]:
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "HOME"):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(folder))
    made = LocalCluster(tmp_path / "it", "far")
    text = made.file.read_text().replace(
        'transport = "local"',
        f'host = "{sshd.host}"\nport = {sshd.port}\nuser = "{sshd.user}"\nidentity = "{sshd.client_key}"\n'
        f'python = "{sys.executable}"',
    )
    made.file.write_text(
        f'{text}PYTHONPATH = "{SUPPORT}"\nXDG_RUNTIME_DIR = "{tmp_path / "XDG_RUNTIME_DIR"}"\n'
    )
    yield made
    made.close()


@pytest.mark.timeout(300)
def test_a_node_behind_ssh_from_its_unknown_key_to_its_adapter_at_home(
    cluster: LocalCluster, sshd: Sshd, tmp_path: Path
) -> None:
    refused = cluster.gshare("cluster", "check", "--json")
    assert refused.returncode == 1
    (node,) = (json.loads(line) for line in refused.stdout.splitlines())
    assert (node["ok"], node["kind"]) == (False, "host_key_unknown")
    assert sshd.fingerprint in node["faults"][0]
    checked = cluster.gshare("cluster", "check", "--json", "--accept-new", seconds=200)
    assert checked.returncode == 0, checked.stdout + checked.stderr

    cluster.write_jobs({"job": "steps=60,sleep=0.1,save=5,files=1"})
    assert cluster.gshare("submit", "--adapters-config", cluster.spec).returncode == 0
    cluster.until(lambda: cluster.jobs()["job"].step >= 6)
    before = cluster.agent_pid("far")
    sshd.signal_sessions(signal.SIGKILL)
    cluster.until_ended("job")
    job = cluster.jobs()["job"]
    assert (job.state, job.attempt, job.placed) == ("completed", 1, True), job
    assert cluster.adapter("job").decode() == weights_after("job", 60)
    assert cluster.agent_pid("far") == before  # it outlived the connection that started it
