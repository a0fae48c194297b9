"""Nine adapters of a real (tiny) model over three agents, one killed -9 midway: a single node's bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_cluster import LocalCluster

#: Of each adapter: long enough to be killed in the middle.
STEPS = 60


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = LocalCluster(tmp_path / "it", "a", "b", "c", straw=False, max_adapters=3)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nine_adapters_over_three_agents_one_killed_have_the_bytes_of_one_node(
    cluster: LocalCluster, tiny_checkpoint: Path
) -> None:
    cluster.model = tiny_checkpoint
    names = [f"job{number}" for number in range(9)]
    rows = {
        name: "".join(
            json.dumps({"text": f"{name} row {row} " + "word " * (row % 7)}) + "\n" for row in range(24)
        )
        for name in names
    }
    keys = f"r = 4\nmax_steps = {STEPS}\neval_steps = 10\nsave_steps = 10\nmax_length = 64"
    cluster.write_jobs(rows, extra=keys)

    done = cluster.gshare("submit", "--adapters-config", cluster.spec)
    assert done.returncode == 0, done.stderr
    cluster.until(lambda: any(job.node == "b" and job.step >= 12 for job in cluster.jobs().values()), 300)
    victim = cluster.agent_pid("b")
    assert victim
    os.kill(victim, signal.SIGKILL)
    cluster.until(
        lambda: all(job.state in ("completed", "failed") for job in cluster.jobs().values()), seconds=600
    )
    jobs = cluster.jobs()
    assert {job.state for job in jobs.values()} == {"completed"}, jobs
    assert {job.node for job in jobs.values()} == {"a", "b", "c"}

    alone = Path(cluster.spec).with_name("alone.toml")
    alone.write_text(Path(cluster.spec).read_text().replace("out/", "alone/"))
    single = subprocess.run(
        [sys.executable, "-m", "gshare.cli.main", "finetune", "--adapters-config", str(alone), "--json"],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert single.returncode == 0, single.stderr[-2000:]
    for name in names:
        for file in ("adapter_model.safetensors", "adapter_config.json", "best/adapter_model.safetensors"):
            there = (cluster.root / "out" / name / file).read_bytes()
            assert there == (cluster.root / "alone" / name / file).read_bytes(), f"{name}/{file}"
    weights = {cluster.adapter(name) for name in names}
    assert len(weights) == 9  # negative control: other data gives other bytes
