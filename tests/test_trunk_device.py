"""The shared trunk on the CUDA engine: jobs with different lowest layers, bits of each alone.

Without a GPU the kernels run in Triton's interpreter, so the model is as small as they come.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from cohort import Member, Outcome, cohort, differences, part, run
from gshare.agent.base.load import load_base
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.base.weights import Base
from gshare.agent.train import trunk
from gshare.agent.train.device_engine import DeviceEngine
from gshare.agent.train.engine import Engine
from gshare.kernels.reference_backend import ReferenceBackend
from gshare.kernels.triton_backend import TritonBackend

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LAYERS = 3
#: The interpreter takes a second a launch of a longer pass: there fewer jobs, from layers 0, 1 and 2 on.
COHORT = [
    one
    for one in cohort(LAYERS - 1, (5, 90) if CUDA else (5, 20))
    if CUDA or one.name in ("top", "all", "two", "partly")
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    path = make_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), "qwen3", num_layers=LAYERS, hidden_size=64, intermediate_size=96
    )
    return load_base(Path(path), base_dtype="fp32", device=DEVICE)


def new_engine(base: Base) -> DeviceEngine:
    return DeviceEngine(base, TritonBackend())


@pytest.fixture(scope="module")
def together(base: Base) -> Outcome:
    return run(new_engine(base), COHORT)


def test_a_cohort_has_the_bits_of_its_jobs_alone(base: Base, together: Outcome) -> None:
    for member in COHORT:
        assert differences(run(new_engine(base), [member]), together) == []


@pytest.mark.slow
def test_without_sharing_and_recomputing_the_bits_are_the_same(base: Base, together: Outcome) -> None:
    engine = new_engine(base)
    engine.share_trunk = False
    engine.checkpointing = True
    assert differences(run(engine, COHORT), together) == []


def test_gradients_are_the_reference_engine_s(base: Base, together: Outcome) -> None:
    expected = run(Engine(base, ReferenceBackend()), COHORT)
    for name, (losses, held_out, grads) in together.items():
        assert losses == pytest.approx(expected[name][0], rel=1e-4)
        assert held_out == pytest.approx(expected[name][1], rel=1e-4)
        assert (grads - expected[name][2]).norm() <= 1e-4 * expected[name][2].norm(), name


def test_a_wrong_notion_of_equal_rows_is_found(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows of one length taken for the same."""
    upper = {"layers_to_transform": (LAYERS - 1,)}
    members = [Member("top", 1, (9,), upper), Member("else", 2, (9,), upper)]
    alone = {name: job for one in members for name, job in run(new_engine(base), [one]).items()}
    monkeypatch.setattr(trunk, "content", lambda row: len(row.tokens))
    assert differences(run(new_engine(base), members), alone) == ["else"]


#: What waits for the device, or makes a tensor of the host's values: a CUDA graph cannot be captured over it.
HOST_OPS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "lift_fresh", "unique")


class HostOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in HOST_OPS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_a_launch_that_was_made_before_asks_the_host_for_nothing(base: Base) -> None:
    """As a capture would see it: trunk and upper part. Control: the first launch of a shape compares products
    (`separable`), which a capture would refuse."""
    engine = new_engine(base)
    seen: list[list[str]] = []
    run_entry = engine._run

    def watched(entry: Any, launch: Callable[[], torch.Tensor]) -> torch.Tensor:
        with HostOps() as ops:
            found = run_entry(entry, launch)
        seen.append(ops.seen)
        return found

    engine._run = watched  # type: ignore[method-assign]
    parts = [part(engine, Member("a", 1, (5, 9), {"layers_to_transform": (LAYERS - 1,)}))]
    for _ in range(2):
        engine.begin_round([one.adapter for one in parts])
        engine.forward_backward(parts)
    assert len(seen) == 4, "trunk and upper part, twice"
    # On a GPU `equal` reads its own result.
    assert {"equal"} <= set(seen[1]) <= {"equal", "_local_scalar_dense"}
    assert seen[2:] == [[], []]


def test_the_trunk_is_a_pass_of_its_own_that_later_passes_find_again(base: Base) -> None:
    """Its states are written again for every pass; a larger one moves them, and the first still fits."""
    engine = new_engine(base)
    upper = {"layers_to_transform": (LAYERS - 1,)}
    first, second = Member("a", 1, (5, 12), upper), Member("b", 2, (70, 90), upper)
    expected = {name: job for one in (first, second) for name, job in run(new_engine(base), [one]).items()}
    parts = {one.name: part(engine, one) for one in (first, second)}
    for name in ("a", "b", "a"):
        engine.begin_round([parts[name].adapter])
        assert engine.forward_backward([parts[name]])[0] == expected[name][0]
        grads = engine.arena.flat("grads", parts[name].adapter.name)
        assert torch.equal(grads, expected[name][2])
    kinds = [type(key).__name__ for key, _ in engine._entries]
    assert kinds.count("TrunkShape") == kinds.count("PassShape") == 2
