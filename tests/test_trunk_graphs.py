"""Trunk and upper part as graphs that are replayed: the engine's own capturing, with a graph for CPUs.

Kernels run in Triton's interpreter. What a real capture refuses is refused (`recorded_graph.py`); streams and
the memory that graphs share are a GPU's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from cohort import Member, part, row
from gshare.agent.base.load import load_base
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.base.weights import Base
from gshare.agent.jobs.memory import ModelShape, estimate_run
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.train.device_engine import DeviceEngine, _Entry
from gshare.agent.train.part import Part
from gshare.agent.train.trunk_cache import TrunkCache
from gshare.kernels.triton_backend import TritonBackend
from recorded_graph import RecordedGraph

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU captures graphs of its own")
CPU = torch.device("cpu")
LAYERS = 2
TOP = {"layers_to_transform": (LAYERS - 1,), "target_modules": ("q_proj", "down_proj")}
#: Data of each pass, by seed, and its rows' lengths. Equal lengths share memory and graphs; the row of 20
#: tokens moves the trunk's states, after which nothing that was captured before may be replayed.
PASSES = ((1, (9, 5)), (2, (9, 5)), (3, (9, 5)), (4, (20,)), (1, (9, 5)), (2, (9, 5)), (5, (9, 5)))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    # One head of 16: in the interpreter attention takes most of a pass.
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 1, "num_kv_heads": 1, "head_dim": 16}
    directory = tmp_path_factory.mktemp("tiny")
    path = make_tiny_checkpoint(directory, num_layers=LAYERS, **shape)  # type: ignore[arg-type]
    return load_base(path, base_dtype="fp32", device=CPU)


def trained(base: Base, *, graphs: bool) -> tuple[list[object], DeviceEngine]:
    """Losses and gradients of two jobs in every pass; the second sees the first one's first row. With graphs
    the states of passes that come again are kept."""
    engine = DeviceEngine(base, TritonBackend())
    engine.graphs = graphs
    if graphs:
        engine.cache = TrunkCache(CPU, identity="base", device_bytes=1 << 20)
    adapters = [part(engine, Member(name, 1, (5,), TOP)).adapter for name in ("a", "b")]
    found: list[object] = []
    for seed, lengths in PASSES:
        rows = [row(length, seed) for length in lengths]
        parts = [Part(adapters[0], rows, 2, 9), Part(adapters[1], rows[:1], 2, 9)]
        engine.begin_round(adapters)
        losses = engine.forward_backward(parts)
        found.append((losses, [engine.arena.flat("grads", one.name).tolist() for one in adapters]))
    return found, engine


@pytest.fixture(scope="module")
def eager(base: Base) -> list[object]:
    found, engine = trained(base, graphs=False)
    assert engine.replays == 0
    return found


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(engine: DeviceEngine, entry: _Entry, launch: Callable[[], torch.Tensor]) -> bool:
        graph = RecordedGraph()
        with graph.recording():
            entry.output = launch()
        entry.graph = graph  # type: ignore[assignment]
        graph.replay()
        engine.replays += 1
        return True

    monkeypatch.setattr(DeviceEngine, "_capture", capture)


def test_replayed_passes_have_the_bits_of_launched_ones(
    base: Base, eager: list[object], recorded: None
) -> None:
    """Upper part: launched, captured, replayed, before the states moved and after. Trunk: the same before;
    then two are known by the cache, and the last is the first that is launched again."""
    found, engine = trained(base, graphs=True)
    assert found == eager
    assert engine.replays == 4 + 2
    # The estimate knows the states: the longest trunk is that of the row of 20 tokens.
    shape, top = ModelShape.of(base.config), AdapterSpec(name="a", data="d", output_dir="o", **TOP)  # type: ignore[arg-type]
    options: Any = {"base_dtype": "fp32", "device": "cuda", "longest_row": 20}
    assert engine._states.nbytes == estimate_run(shape, [top], pass_tokens=20, **options)["trunk states"]


def test_a_graph_that_outlives_the_states_it_writes_is_found(
    base: Base, recorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: pointers that are never told to have changed. The places are of the larger memory."""
    monkeypatch.setattr(DeviceEngine, "_pointers", lambda engine: (0,))
    with pytest.raises(IndexError, match="out of bounds"):
        trained(base, graphs=True)


def test_a_comparison_inside_of_a_graph_is_refused(base: Base) -> None:
    """Negative control: what a first launch does, which is why it is never captured."""
    with pytest.raises(AssertionError, match="equal cannot be captured"), RecordedGraph().recording():
        torch.equal(torch.zeros(1), torch.zeros(1))
