"""The `ungrouped` arm of `benchmarks/gpu.py`: one LoRA launch an adapter and op, the bits of one for all.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import gpu_arms
from cohort import Member, Outcome, differences, part
from gpu_arms import UngroupedBackend, UngroupedEngine
from gshare.agent.base.load import load_base
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.base.weights import Base
from gshare.agent.train.device_engine import DeviceEngine
from gshare.kernels.triton_backend import TritonBackend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS = 2
#: Of one sequence each, as the workload's, longer and shorter than a block; labels in a part of the tokens.
JOBS = {
    "all layers": [Member("a", 1, (66,), {}), Member("b", 2, (9,), {"r": 7})],
    "top layer": [
        Member(name, data, (length,), {"layers_to_transform": (LAYERS - 1,)})
        for name, data, length in (("a", 1, 20), ("b", 1, 20), ("c", 3, 9))
    ],
}


#: Of a benchmark, on a GPU alone.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    path = make_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), "llama", num_layers=LAYERS, hidden_size=64, intermediate_size=96
    )
    return load_base(path, base_dtype="fp32", device=DEVICE)


def step(engine: DeviceEngine, members: Sequence[Member]) -> Outcome:
    """Losses and gradients of one pass."""
    parts = [part(engine, member) for member in members]
    engine.begin_round([one.adapter for one in parts])
    losses = engine.queue(parts).losses()
    return {
        one.adapter.name: (its, [], engine.arena.flat("grads", one.adapter.name).clone())
        for one, its in zip(parts, losses, strict=True)
    }


@pytest.fixture(scope="module", params=JOBS)
def grouped(request: pytest.FixtureRequest, base: Base) -> tuple[list[Member], Outcome]:
    return JOBS[request.param], step(DeviceEngine(base, TritonBackend()), JOBS[request.param])


def test_one_launch_an_adapter_has_the_bits_of_one_for_all(
    base: Base, grouped: tuple[list[Member], Outcome]
) -> None:
    members, expected = grouped
    backend = UngroupedBackend()
    assert differences(step(UngroupedEngine(base, backend), members), expected) == []
    # Of each adapted layer four groups, each for every adapter.
    layers = LAYERS if "layers_to_transform" not in members[0].changes else 1
    launches = layers * 4 * len(members)
    assert [backend.calls[op] for op in ("lora_forward", "lora_dx", "lora_grads")] == [launches] * 3


def test_label_rows_of_another_adapter_are_found(
    base: Base, grouped: tuple[list[Member], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: each adapter's label rows taken from the first one's on."""
    members, expected = grouped

    def from_the_first(ranges: Sequence[tuple[int, int]]) -> Any:
        return row_blocks([(0, end - start) for start, end in ranges])

    row_blocks = gpu_arms.row_blocks
    monkeypatch.setattr(gpu_arms, "row_blocks", from_the_first)
    found = differences(step(UngroupedEngine(base, UngroupedBackend()), members), expected)
    assert found
    assert set(found) <= {one.name for one in members}
