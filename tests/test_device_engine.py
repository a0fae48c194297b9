"""The CUDA engine: against the reference engine, solo against packed, padding, graphs where there is a GPU.

Without a GPU the kernels run in Triton's interpreter, on CPU tensors, so the model is as small as they come.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
from gshare.agent.base.load import load_base
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.base.weights import Base
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.train.adapter import Adapter
from gshare.agent.train.device_engine import DeviceEngine
from gshare.agent.train.engine import Engine, Part, Row
from gshare.kernels.reference_backend import ReferenceBackend
from gshare.kernels.triton_backend import TritonBackend

DEVICE = torch.device("cuda" if CUDA else "cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    path = make_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), "qwen2", num_layers=2, hidden_size=64, intermediate_size=96
    )
    return load_base(Path(path), base_dtype="fp32", device=DEVICE)


def spec(name: str, **changes: object) -> AdapterSpec:
    values: dict[str, object] = {"name": name, "data": "d", "output_dir": name, "r": 4, "seed": len(name)}
    values |= changes
    values.setdefault("lora_alpha", 2.0 * float(str(values["r"])))
    return AdapterSpec(**values)  # type: ignore[arg-type]


def row(length: int, seed: int) -> Row:
    draw = np.random.default_rng(seed)
    trained = draw.random(length) < 0.7
    trained[-1] = True
    return Row(draw.integers(3, 200, length).astype(np.int32), trained)


# In the interpreter a dot is numpy's, whose bits depend on the tile's width: there every rank has the same cap.
WIDE, WIDER = (9, 16) if CUDA else (7, 8)
#: Name, spec and lengths of the rows of each adapter.
JOBS: dict[str, tuple[AdapterSpec, tuple[int, ...]]] = {
    "a": (spec("a"), (5, 12)),
    "bb": (spec("bb", r=WIDE, target_modules=("q_proj", "v_proj", "down_proj")), (33,)),
    "ccc": (spec("ccc", r=WIDER), (70, 3)),
}


def part(engine: Engine, name: str) -> Part:
    adapter_spec, lengths = JOBS[name]
    adapter = engine.new_adapter(name, adapter_spec)
    for key, shape in engine.arena.matrices(name):  # B too: at zero, dA would be zero
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(hash_of(key)))
        engine.arena.view("params", name, key).copy_(noise * 0.05)
    engine.arena.publish(name)
    rows = [row(length, 10 * len(name) + i) for i, length in enumerate(lengths)]
    return Part(adapter, rows, 0, sum(r.label_tokens for r in rows))


def hash_of(key: object) -> int:
    return sum(str(key).encode())


def gradients(engine: Engine, adapter: Adapter) -> torch.Tensor:
    return engine.arena.flat("grads", adapter.name).clone().cpu()


def run(base: Base, names: Sequence[str]) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    engine = DeviceEngine(base, TritonBackend())
    parts = [part(engine, name) for name in names]
    losses = engine.forward_backward(parts)
    return losses, {p.adapter.name: gradients(engine, p.adapter) for p in parts}


def test_losses_and_gradients_are_the_reference_engine_s(base: Base) -> None:
    losses, grads = run(base, list(JOBS))
    reference = Engine(base, ReferenceBackend())
    parts = [part(reference, name) for name in JOBS]
    for ours, theirs in zip(losses, reference.forward_backward(parts), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    for p in parts:
        expected = gradients(reference, p.adapter)
        assert expected.norm() > 0.01
        assert (grads[p.adapter.name] - expected).norm() <= 1e-4 * expected.norm()


def test_alone_and_packed_have_the_same_bits(base: Base) -> None:
    losses, grads = run(base, list(JOBS))
    for index, name in enumerate(JOBS):
        alone_losses, alone = run(base, [name])
        assert alone_losses[0] == losses[index]
        assert torch.equal(alone[name], grads[name])
