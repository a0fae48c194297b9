"""Jobs that share sequences and begin at different layers: for the tests of the shared trunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.train.engine import Engine
from gshare.agent.train.part import Part, Row


@dataclass(frozen=True)
class Member:
    """One job: its rows' seed and lengths, and what its spec says beyond the defaults."""

    name: str
    data: int
    lengths: tuple[int, ...]
    changes: Mapping[str, object]


def cohort(top: int, lengths: tuple[int, ...]) -> list[Member]:
    """Three jobs of the top layer over the same rows, two that begin lower, one over all layers, one whose
    first row alone is the others' and one whose rows are nobody's; `top` is the model's last layer."""
    two, upper = {"layers_to_transform": (top - 1, top)}, {"layers_to_transform": (top,)}
    return [
        Member("top", 1, lengths, upper),
        Member("all", 1, lengths, {"target_modules": ("q_proj", "v_proj", "down_proj")}),
        Member("two", 1, lengths, {**two, "lora_dropout": 0.3}),
        Member("wider", 1, lengths, {**upper, "r": 7}),
        Member("below", 1, lengths, {"layers_to_transform": (top - 1,)}),
        Member("partly", 1, (lengths[0], 11), {**upper, "target_modules": ("o_proj", "gate_proj")}),
        Member("else", 70, lengths[::-1], upper),
        Member("top again", 1, lengths, {**upper, "lora_dropout": 0.2}),
    ]


def row(length: int, seed: int, first_label: int | None = None) -> Row:
    """Labels in about half of the tokens from `first_label` on (default: the last 60 %)."""
    draw = np.random.default_rng(1000 * seed + length)
    trained = draw.random(length) < 0.6
    trained[: length * 2 // 5 if first_label is None else first_label] = False
    trained[-1] = True
    return Row(draw.integers(3, 200, length).astype(np.int32), trained)


def part(engine: Engine, member: Member) -> Part:
    """Its adapter, with a B that is not zero, and its rows."""
    values: dict[str, object] = {"data": "d", "output_dir": "o", "r": 4, "lora_alpha": 8.0, "seed": 3}
    spec = AdapterSpec(name=member.name, **{**values, **member.changes})  # type: ignore[arg-type]
    adapter = engine.new_adapter(member.name, spec)
    for key, shape in engine.arena.matrices(member.name):
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(sum(str(key).encode())))
        engine.arena.view("params", member.name, key).copy_(noise * 0.05)
    engine.arena.publish(member.name)
    rows = [row(length, member.data) for length in member.lengths]
    return Part(adapter, rows, 2, sum(one.label_tokens for one in rows))


#: Per job: token losses in training and in evaluation, and all gradients.
Outcome = dict[str, tuple[list[float], list[float], torch.Tensor]]


def run(engine: Engine, members: Sequence[Member]) -> Outcome:
    """One pass that trains and one that evaluates."""
    parts = [part(engine, member) for member in members]
    engine.begin_round([one.adapter for one in parts])
    trained = engine.forward_backward(parts)
    evaluated = engine.evaluate(parts)
    return {
        one.adapter.name: (losses, held_out, engine.arena.flat("grads", one.adapter.name).clone())
        for one, losses, held_out in zip(parts, trained, evaluated, strict=True)
    }


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """The jobs of `found` whose losses or gradients have other bits."""
    wrong = []
    for name, (losses, held_out, grads) in found.items():
        their_losses, their_held_out, theirs = expected[name]
        assert theirs.isfinite().all()
        assert theirs.abs().max() > 0
        same = torch.equal(grads.view(torch.int32), theirs.view(torch.int32))
        if not (same and losses == their_losses and held_out == their_held_out):
            wrong.append(name)
    return wrong
