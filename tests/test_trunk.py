"""The shared trunk: rows of the same content run once below the adapters, and no job's bits tell.

On the references; `test_trunk_device.py` has the CUDA engine.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cohort import Member, cohort, differences, part, row, run
from gshare.agent.base.decoder import Decoder, LayerActivations, Stage
from gshare.agent.base.load import load_base
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.base.weights import Base
from gshare.agent.jobs.events import Stepped
from gshare.agent.train import trunk
from gshare.agent.train.engine import Engine, PassLora
from gshare.agent.train.part import Part, Row
from gshare.agent.train.passes import StepWork, evaluation_passes
from gshare.agent.train.rounds import Rounds
from gshare.agent.train.trunk import PassPlan, TrunkUse
from gshare.kernels import grouped_lora
from gshare.kernels.layout import Layout
from gshare.kernels.reference_backend import ReferenceBackend
from toy import DEVICE, random_rows, request, train

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the references; test_trunk_device.py has CUDA")
CPU = torch.device("cpu")
LAYERS, LENGTHS = 4, (9, 64, 33)
COHORT = cohort(LAYERS - 1, LENGTHS)
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {"tie": True},
    "qwen3": {},
}


def tiny(directory: Path, family: str = "llama", base_dtype: str = "fp32") -> Base:
    path = make_tiny_checkpoint(directory, family, num_layers=LAYERS, **FAMILIES[family])
    return load_base(path, base_dtype=base_dtype, device=CPU)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return tiny(tmp_path_factory.mktemp("tiny"))


def new_engine(base: Base) -> Engine:
    return Engine(base, ReferenceBackend())


# ------------------------------------------------------------------ bits


@pytest.mark.parametrize(
    ("family", "base_dtype"),
    [("llama", "fp32"), ("mistral", "bf16"), ("qwen2", "nf4"), ("qwen3", "bf16"), ("mistral", "fp32")],
)
def test_a_cohort_has_the_bits_of_its_jobs_alone(tmp_path: Path, family: str, base_dtype: str) -> None:
    base = tiny(tmp_path, family, base_dtype)
    alone = {name: job for one in COHORT for name, job in run(new_engine(base), [one]).items()}
    assert differences(run(new_engine(base), COHORT), alone) == []
    assert differences(run(new_engine(base), COHORT[::-1]), alone) == []
    without = new_engine(base)
    without.share_trunk = False
    assert differences(run(without, COHORT), alone) == []
    recomputing = new_engine(base)
    recomputing.checkpointing = True
    assert differences(run(recomputing, COHORT), alone) == []


def test_a_wrong_notion_of_equal_rows_is_found(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows of one length taken for the same."""
    alone = {name: job for one in COHORT for name, job in run(new_engine(base), [one]).items()}
    monkeypatch.setattr(trunk, "content", lambda row: len(row.tokens))
    assert "else" in differences(run(new_engine(base), COHORT), alone)


def test_one_other_token_makes_another_row() -> None:
    tokens, trained = np.arange(3, 20, dtype=np.int32), np.ones(17, dtype=bool)
    last = np.array([*tokens[:-1], 99], dtype=np.int32)
    assert Row(tokens, trained).content == Row(tokens.copy(), ~trained, sample=4).content
    assert len({Row(t, trained).content for t in (tokens, last, tokens[:-1], tokens[1:])}) == 4


def test_gradients_are_those_of_a_pass_that_computes_everything(base: Base) -> None:
    """Each job against a decoder that runs every row through every layer: what is left out was never read,
    and what is multiplied by zero keeps its place in the sums over tokens."""
    long = Member("long", 5, (700, 400), {"layers_to_transform": (1, LAYERS - 1), "lora_dropout": 0.1})
    for member in (*COHORT, long):
        engine = new_engine(base)
        losses, _, grads = run(engine, [member])[member.name]
        expected, everything = _whole_pass(base, member)
        assert losses == expected
        assert torch.equal(grads.view(torch.int32), everything.view(torch.int32)), member.name


def test_a_sum_that_skips_tokens_is_found(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows that are left out are left out of the granules too."""
    member = Member("long", 5, (700, 401), {})
    expected = _whole_pass(base, member)[1]
    assert torch.equal(run(new_engine(base), [member])["long"][2], expected)
    monkeypatch.setattr(grouped_lora, "_in_place", lambda rows, slot, index: rows.float())
    assert not torch.equal(run(new_engine(base), [member])["long"][2], expected)


def _whole_pass(base: Base, member: Member) -> tuple[list[float], torch.Tensor]:
    engine = new_engine(base)
    one = part(engine, member)
    decoder, backend = Decoder(base, ReferenceBackend()), ReferenceBackend()
    starts = trunk.starts_of(one.rows)
    layout = Layout(tuple(starts))
    lora = PassLora([one], layout.sequences, training=True)
    tokens = torch.from_numpy(np.concatenate([r.tokens for r in one.rows])).long()
    stages = [Stage.whole(layout, lora)]
    x, kept = decoder.forward(decoder.embed(tokens), stages, keep=True)
    where = np.concatenate(
        [at + np.flatnonzero(r.trained[1:]) for at, r in zip(starts, one.rows, strict=False)]
    )
    rows = torch.from_numpy(where)
    h, rstd = decoder.final_norm(x[rows])
    scale = torch.full((len(where),), np.float32(1.0 / one.label_tokens).item())
    nll, dh = backend.cross_entropy(h, base.lm_head.dense(), tokens[rows + 1], scale)
    assert dh is not None
    dx = torch.zeros_like(x)
    dx[rows] = backend.rms_norm_backward(dh, x[rows], base.final_norm, rstd)
    decoder.backward(dx, kept, stages)
    return nll.tolist(), engine.arena.flat("grads", member.name)


# ------------------------------------------------------------------ what runs


class Counting(ReferenceBackend):
    """Remembers the number of rows of every base product, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[int] = []
        self.backward: list[int] = []

    def linear(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.forward.append(len(x))
        return super().linear(x, w, bias)

    def linear_dx(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        self.backward.append(len(dy))
        return super().linear_dx(dy, w)


def test_a_cohort_of_the_top_layer_runs_its_trunk_once(base: Base) -> None:
    sweep = [Member(f"lr{i}", 1, LENGTHS, {"layers_to_transform": (LAYERS - 1,)}) for i in range(5)]
    backend = Counting()
    engine = Engine(base, backend)
    parts = [part(engine, one) for one in sweep]
    once, labels = sum(LENGTHS), 5 * sum(r.label_tokens for r in parts[0].rows)
    done = engine.queue(parts)
    assert backend.forward == [once] * 4 * (LAYERS - 1) + [labels, 5 * once] + [labels] * 3
    assert backend.backward == [labels] * 3  # down, gate and up, o; nothing is asked of q, k and v
    assert done.trunk == TrunkUse(asked=5 * once * (LAYERS - 1), computed=once * (LAYERS - 1))
    assert done.trunk.shared == pytest.approx(0.8)
    engine.share_trunk = False
    backend.forward.clear()
    assert engine.queue(parts).trunk.shared == 0.0
    assert backend.forward[0] == 5 * once


def test_a_trunk_lets_a_layer_s_activations_go_before_the_next(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No backward reads them: the trunk of a large pass would hold two layers' for nothing. Control: in the
    layers that train they live on."""
    made: list[weakref.ref[LayerActivations]] = []
    alive: list[int] = []
    real = Decoder.layer_forward

    def watched(*args: Any, **given: Any) -> tuple[torch.Tensor, torch.Tensor, LayerActivations]:
        alive.append(sum(one() is not None for one in made))
        found = real(*args, **given)
        made.append(weakref.ref(found[2]))
        return found

    monkeypatch.setattr(Decoder, "layer_forward", watched)
    run(new_engine(base), [Member("upper", 1, LENGTHS, {"layers_to_transform": (LAYERS - 2, LAYERS - 1)})])
    trained, evaluated = alive[:LAYERS], alive[LAYERS:]
    assert trained == [*(0,) * (LAYERS - 1), 1]
    assert evaluated == [0] * LAYERS


def test_each_job_is_shared_up_to_its_own_lowest_layer(base: Base) -> None:
    """Jobs from layers 3, 3, 2 and 0 over the same rows: rows of each base product, layer by layer, and the
    backward of a job ends where its adapter does."""
    members = [one for one in COHORT if one.name in ("top", "wider", "below", "all")]
    backend = Counting()
    engine = Engine(base, backend)
    done = engine.queue([part(engine, one) for one in members])
    n = sum(LENGTHS)
    labels = 4 * sum(row(length, 1).label_tokens for length in LENGTHS)
    assert backend.forward == [2 * n] * 8 + [3 * n] * 4 + [labels, 4 * n] + [labels] * 3
    assert backend.backward == [labels] * 3 + [4 * n] + [2 * n] * 4 + [n] * 7
    assert done.trunk == TrunkUse(asked=n * (3 + 3 + 2), computed=n * (0 + 2 + 1))


def test_every_row_of_a_stage_comes_from_its_own_content(base: Base) -> None:
    """Following `source` down to the trunk gives each row's own tokens; own rows come first everywhere."""
    engine = new_engine(base)
    for members in (COHORT, COHORT[::-1], COHORT[3:5], COHORT[:1], COHORT[1:2]):
        parts = [part(engine, one) for one in members]
        for share in (True, False):
            plan = PassPlan.of(parts, share=share)
            before, owned = plan.trunk, 0
            for stage in plan.stages:
                assert len(stage.source) == (len(stage.rows) if before else 0)
                for row_, s in zip(stage.rows, stage.source, strict=False):
                    assert row_.tokens.tolist() == before[s].tokens.tolist()
                assert stage.source[:owned] == tuple(range(owned))
                before, owned = stage.rows, stage.own
            assert [r for p in plan.parts for r in p.rows] == list(plan.stages[-1].rows)
            assert plan.in_order([[i] for i in range(len(parts))]) == [
                [plan.order.index(i)] for i in range(len(parts))
            ]
            shared = plan.stages[0].rows[plan.stages[0].own :] or plan.trunk
            contents = [one.content for one in shared]
            assert (len(set(contents)) == len(contents)) or not share
        for one in parts:
            engine.arena.free(one.adapter.name)


def test_an_evaluation_puts_equal_rows_into_one_pass(base: Base) -> None:
    engine = new_engine(base)
    adapters = [part(engine, one).adapter for one in COHORT[:3]]
    rows = [row(length, 1) for length in (5, 9, 30, 7, 12)]
    work = [StepWork(adapter, 0, [rows[: 5 - i]]) for i, adapter in enumerate(adapters)]
    passes = evaluation_passes(work, 60)
    assert [[len(p.rows) for p in one] for one in passes] == [[2, 2, 2], [1, 1], [1, 2, 1]]
    for one in passes:
        assert sum(p.tokens for p in one) <= 60 or len(one) == 1
    for w in work:
        given = [r for one in passes for p in one if p.adapter is w.adapter for r in p.rows]
        assert given == list(w.micro_batches[0])
    long = StepWork(adapters[0], 0, [[row(70, 1), row(5, 1)]])
    assert [[p.tokens for p in one] for one in evaluation_passes([long], 60)] == [[70], [5]]
    assert evaluation_passes([], 60) == []


def test_held_out_losses_are_those_of_each_job_alone(base: Base) -> None:
    engine = new_engine(base)
    rows = [row(length, 1) for length in (5, 9, 30, 7, 12)]
    work = [(part(engine, one).adapter, rows[: 5 - i % 2]) for i, one in enumerate(COHORT)]
    alone = [loss for one in work for loss in Rounds(engine, 16384).evaluate([one])]
    assert Rounds(engine, 16384).evaluate(work) == alone
    assert Rounds(engine, 40).evaluate(work) == alone


def test_a_pass_without_a_label(base: Base) -> None:
    """Rows that nothing predicts in: no loss, no gradient, no fault."""
    engine = new_engine(base)
    one = part(engine, COHORT[2])
    silent = Row(np.arange(3, 12, dtype=np.int32), np.zeros(9, dtype=bool))
    assert engine.forward_backward([Part(one.adapter, [silent], 0, 0)]) == [[]]
    assert engine.arena.flat("grads", one.adapter.name).abs().max() == 0
    mixed = [Part(one.adapter, [silent, *one.rows], 2, one.label_tokens)]
    assert engine.evaluate(mixed) == engine.evaluate([one])


# ------------------------------------------------------------------ whole jobs


def test_a_sweep_over_the_top_layer_is_shared_and_has_its_jobs_bits(tmp_path: Path, base: Base) -> None:
    """Losses, norms, validation losses, adapter and optimizer bytes; equal data and seed by default."""
    checkpoint = make_tiny_checkpoint(tmp_path / "model", num_layers=LAYERS)
    rows = random_rows((9, 17, 30, 5, 12, 24, 8, 40), seed=1)
    jobs = [
        request(tmp_path, f"lr{i}", rows=rows, learning_rate=rate, layers_to_transform=layers)
        for i, (rate, layers) in enumerate(((1e-3, (3,)), (5e-3, (3,)), (2e-2, (2, 3)), (1e-2, None)))
    ]
    events: list[object] = []
    together = train(jobs, tmp_path / "together", checkpoint, base, on_event=events.append)
    for job in jobs:
        alone: list[object] = []
        found = train([job], tmp_path / job.spec.name / "alone", checkpoint, base, on_event=alone.append)
        assert together[job.spec.name].differences(found[job.spec.name]) == []
        assert {e.trunk_shared for e in alone if isinstance(e, Stepped)} == {0.0}
    shared = defaultdict(set)
    for event in events:
        if isinstance(event, Stepped):
            shared[event.step].add(event.trunk_shared)
    # 3 + 3 + 2 layers asked for, those of one run.
    assert shared == {step: {1.0 - 3 / 8} for step in range(1, 5)}
