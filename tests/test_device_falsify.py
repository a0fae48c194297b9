"""Falsification tests that need a GPU: captured graphs, dirty memory, contention, and which kernels ran.

13–15 and 17 of the exactness list; the rest runs on whatever device test_exactness.py is given.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from gshare.agent.base.weights import Base
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.train.part import Part, Row
from toy import BASE_DTYPE, random_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Path) -> Base:
    from gshare.agent.base.load import load_base

    return load_base(tiny_checkpoint, base_dtype=BASE_DTYPE, device=CUDA)


def new_engine(base: Base):
    from gshare.agent.train.engines import make_engine
    from gshare.kernels.backend import pick_backend

    return make_engine(base, pick_backend(CUDA))


def part(engine, name: str, lengths: tuple[int, ...], rank: int) -> Part:
    """The same adapter and rows for the same name, with a B that is not zero."""
    spec = AdapterSpec(name=name, data="d", output_dir="o", r=rank, lora_alpha=2.0 * rank, seed=len(name))
    adapter = engine.new_adapter(name, spec)
    for key, shape in list(engine.arena.matrices(name)):
        if key.side == "B":
            draw = np.random.default_rng(key.layer + 7 * rank).standard_normal(shape).astype(np.float32)
            engine.arena.view("params", name, key).copy_(torch.from_numpy(draw * 0.1))
    engine.arena.publish(name)
    rows = [
        Row(np.asarray(tokens, dtype=np.int32), np.asarray(trained), sample)
        for sample, (tokens, trained) in enumerate(random_rows(lengths, seed=len(name)))
    ]
    return Part(adapter, rows, 0, sum(row.label_tokens for row in rows))


def result(engine, parts: list[Part], index: int = 0) -> tuple[list[float], torch.Tensor]:
    engine.optimizer.begin([p.adapter for p in parts])
    losses = engine.forward_backward(parts)
    return losses[index], engine.arena.flat("grads", parts[index].adapter.name).clone()


def assert_same(found: tuple[list[float], torch.Tensor], expected: tuple[list[float], torch.Tensor]) -> None:
    assert found[0] == expected[0]
    assert torch.equal(found[1].view(torch.int32), expected[1].view(torch.int32))


def test_13_a_graph_captured_with_one_adapter_serves_four(base: Base, monkeypatch) -> None:
    from gshare.agent.train import device_pass

    for rungs in ("rung", "label_rung"):
        monkeypatch.setattr(device_pass, rungs, lambda rows, coarse=False: 512)
    monkeypatch.setattr(device_pass, "_power", lambda count: 8)
    engine = new_engine(base)
    names = {"a": (9, 30), "bb": (70,), "ccc": (17, 5), "dddd": (64,)}
    parts = [part(engine, name, lengths, 8) for name, lengths in names.items()]
    alone = result(engine, parts[:1])
    assert engine.replays == 0
    assert_same(result(engine, parts[:1]), alone)
    assert engine.replays == 1
    assert_same(result(engine, parts), alone)
    assert_same(result(engine, parts[::-1], index=3), alone)
    assert engine.replays == 3
    fresh = new_engine(base)
    fresh.graphs = False
    again = [part(fresh, name, lengths, 8) for name, lengths in names.items()]
    assert_same(result(fresh, again), alone)
    assert fresh.replays == 0


@pytest.mark.parametrize("graphs", [True, False])
def test_14_fresh_memory_full_of_nan(base: Base, graphs: bool) -> None:
    engine = new_engine(base)
    engine.graphs = graphs
    parts = [part(engine, "a", (40, 3), 8), part(engine, "bb", (100,), 16)]
    expected = result(engine, parts)
    for _ in range(3):
        torch.cuda.empty_cache()
        dirt = [torch.full((1 << 22,), float("nan"), device=CUDA) for _ in range(32)]
        dirt += [torch.full((size,), float("nan"), device=CUDA) for size in range(64, 4096, 64)]
        del dirt
        assert_same(result(engine, parts), expected)


def test_15_a_thousand_reruns_beside_other_work(base: Base) -> None:
    engine = new_engine(base)
    parts = [part(engine, "a", (40, 3), 8), part(engine, "bb", (100,), 16)]
    expected = result(engine, parts)
    stream, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device=CUDA)
    for rerun in range(1000):
        with torch.cuda.stream(stream):
            for _ in range(rerun % 4):
                noise = torch.nn.functional.normalize(noise @ noise)
        assert_same(result(engine, parts), expected)
    torch.cuda.synchronize()


def test_17_the_kernels_that_ran(base: Base) -> None:
    """As many launches for four adapters as for one, and no product that splits its sum."""
    from torch.profiler import ProfilerActivity, profile

    def kernels(names: dict[str, tuple[int, ...]]) -> Counter[str]:
        engine = new_engine(base)
        engine.graphs = False
        parts = [part(engine, name, lengths, 8) for name, lengths in names.items()]
        result(engine, parts)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            engine.forward_backward(parts)
            torch.cuda.synchronize()
        return Counter(
            event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA
        )

    one, four = kernels({"a": (90, 30)}), kernels({"a": (30,), "bb": (40,), "ccc": (17, 5), "dddd": (20,)})
    ours = {name for name in four if name.endswith("_kernel") or name.startswith("_")}
    assert any("shrink" in name for name in ours)
    assert any("grads" in name for name in ours)
    assert any("attention_dkv" in name for name in ours)
    for name in ours:
        assert four[name] == one[name], name
    assert not [name for name in four if "splitk" in name.lower().replace("_", "")]
