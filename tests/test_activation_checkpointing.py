"""When activations are recomputed: asked for, estimated not to fit, after running out; never other bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from gshare.agent.base.weights import Base
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.train.checkpointing import does_not_fit
from gshare.agent.train.engines import make_engine
from gshare.agent.train.part import Part, Row
from gshare.agent.train.passes import StepWork
from gshare.agent.train.rounds import Rounds
from toy import new_backend, random_rows, tiny_base


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Path) -> Base:
    return tiny_base(tiny_checkpoint)


def spec(**changes: object) -> AdapterSpec:
    values: dict[str, object] = {"name": "a", "data": "d", "output_dir": "o", "r": 4, "lora_alpha": 8.0}
    return AdapterSpec(**(values | {"seed": 0} | changes))  # type: ignore[arg-type]


def row(length: int) -> Row:
    tokens, trained = random_rows([length], seed=length)[0]
    return Row(np.asarray(tokens, dtype=np.int32), np.asarray(trained))


def test_running_out_with_one_row_recomputes_and_gives_the_same_bits(base: Base) -> None:
    """Activations of a plain pass do not fit here; with recomputation they do."""
    found = []
    for fits in (True, False):
        engine = make_engine(base, new_backend())
        adapter = engine.new_adapter("a", spec())

        def before_pass(parts: Sequence[Part], engine=engine, fits=fits) -> None:
            if not (fits or engine.checkpointing):
                raise torch.OutOfMemoryError("simulated")

        engine.before_pass = before_pass
        outcome = Rounds(engine, 16384).run([StepWork(adapter, 0, [[row(60)]])])[0]
        assert outcome.error is None
        assert engine.checkpointing == (not fits)
        found.append((outcome.losses, outcome.grad_norm, engine.arena.flat("grads", "a").clone()))
    assert found[0][:2] == found[1][:2]
    assert torch.equal(found[0][2], found[1][2])
    assert found[0][2].abs().max() > 0


def test_a_large_pass_is_cut_before_anything_is_recomputed(base: Base) -> None:
    engine = make_engine(base, new_backend())
    adapter = engine.new_adapter("a", spec())
    sizes: list[int] = []

    def before_pass(parts: Sequence[Part]) -> None:
        sizes.append(sum(part.tokens for part in parts))
        if sizes[-1] > 1500:
            raise torch.OutOfMemoryError("simulated")

    engine.before_pass = before_pass
    rounds = Rounds(engine, 16384)
    outcome = rounds.run([StepWork(adapter, 0, [[row(500) for _ in range(6)]])])[0]
    assert outcome.error is None
    assert sizes == [3000, 1500, 1500]
    assert not engine.checkpointing


def test_the_estimate_decides_under_a_reservation(base: Base) -> None:
    few = [spec(max_length=64)]
    assert not does_not_fit(base, few, max_tokens=16384, max_adapters=0, budget_mb=None)
    assert not does_not_fit(base, few, max_tokens=16384, max_adapters=0, budget_mb=8192)
    assert does_not_fit(base, few, max_tokens=16384, max_adapters=0, budget_mb=1)
    assert not does_not_fit(base, [], max_tokens=16384, max_adapters=0, budget_mb=1)
