"""Commands that follow jobs of a cluster say why these wait: nothing listens where their node is."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_cluster import LocalCluster

REASON = "node far is new: the node (127.0.0.1:1): nothing listens there"
SWEEP = """\
model = "{model}"
base_dtype = "fp32"
[defaults]
data = "data.jsonl"
max_steps = 4
max_length = 32
[sweep]
output_dir = "swept"
[sweep.grid]
r = [2, 4]
"""


@pytest.fixture
def cluster(tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    made = LocalCluster(tmp_path / "it")
    made.file.write_text('[[node]]\nname = "far"\nhost = "127.0.0.1"\nport = 1\n')
    made.write_jobs({"job0": "steps=2"})
    (made.root / "data.jsonl").write_text('{"text": "red green blue"}\n{"text": "one two three"}\n' * 9)
    (made.root / "s.toml").write_text(SWEEP.format(model=tiny_checkpoint))
    yield made
    made.close()


def lines_until(process: subprocess.Popen[str], part: str) -> list[str]:
    assert process.stderr is not None
    patience = threading.Timer(120, process.kill)
    patience.start()
    lines = []
    for line in process.stderr:
        lines.append(line)
        if part in line:
            break
    patience.cancel()
    return lines


@pytest.mark.parametrize("command", ["sweep", "submit"])
def test_it_says_why_nothing_begins(cluster: LocalCluster, command: str) -> None:
    words = {
        "sweep": ("sweep", str(cluster.root / "s.toml")),
        "submit": ("submit", "--adapters-config", cluster.spec, "--watch"),
    }
    process = cluster.start(*words[command])
    lines = lines_until(process, REASON)
    assert REASON in lines[-1], lines
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert REASON not in err
    assert "left" in err
