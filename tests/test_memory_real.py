"""N adapters cost the base once: peak memory of one process with 1 and 3 adapters on SmolLM2-135M."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gshare.agent.base.config import read_config
from gshare.agent.base.resolve import find_demo_model, resolve_model
from gshare.agent.jobs.memory import ModelShape, estimate_run
from gshare.agent.jobs.spec import AdapterSpec

# The kernel's own mark of the most that was resident, set anew once the base is there, less the files mapped
# by then (the checkpoint's pages, libraries). A thread that samples misses peaks where it gets no turn.
CHILD = """
import json, sys
from pathlib import Path
import torch
from toy import make_runner, request
from gshare.agent.base.load import load_base

def status(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024

torch.ones(512, 512) @ torch.ones(512, 512)
before = status("RssAnon")
model, folder, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
base = load_base(model, base_dtype="fp32", device=torch.device("cpu"))
runner = make_runner(model, base)
for i in range(count):
    options = {"r": 8, "max_steps": 2, "eval_steps": 0, "save_steps": 0}
    runner.admit(request(folder, f"job{i}", lengths=(40, 40, 40, 40), **options))
Path("/proc/self/clear_refs").write_text("5")
files = status("RssFile") + status("RssShmem")
while runner.run_round():
    pass
runner.close()
print(json.dumps(status("VmHWM") - files - before))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    return resolve_model(str(find_demo_model()), cache_dir=cache, base_dtype="fp32").path


def peak_bytes(model: Path, folder: Path, count: int) -> int:
    folder.mkdir()
    environment_path = str(Path(__file__).parent / "support")
    code = f"import sys; sys.path.insert(0, {environment_path!r})\n{CHILD}"
    done = subprocess.run(
        [sys.executable, "-c", code, str(model), str(folder), str(count)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return int(json.loads(done.stdout.splitlines()[-1]))


def test_three_adapters_cost_the_base_once(model: Path, tmp_path: Path) -> None:
    one, three = (peak_bytes(model, tmp_path / str(count), count) for count in (1, 3))
    base = 4 * read_config(model).parameter_count()
    assert one > base, "the base was not there: nothing was measured"
    assert three < one + 0.75 * base
    assert three < 0.6 * 3 * one, "three single runs would have cost three bases"
    estimate = {count: _estimated(model, count) for count in (1, 3)}
    # What two more adapters add is foreseen within a factor of two, the whole within a third.
    assert 0.5 < (three - one) / (estimate[3] - estimate[1]) < 2.0
    assert 0.67 < three / estimate[3] < 1.5


def _estimated(model: Path, count: int) -> int:
    spec = AdapterSpec(name="x", data="x", output_dir="x", r=8, lora_alpha=16.0, max_length=40)
    return estimate_run(
        ModelShape.of(read_config(model)),
        [spec] * count,
        base_dtype="fp32",
        device="cpu",
        pass_tokens=40 * count,
        longest_row=40,
    ).total
