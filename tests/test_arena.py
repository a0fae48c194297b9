"""The arena grows once for many adapters; an adapter goes to the host and back in few copies."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gshare.agent.base.weights import Base
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.train.adapter import Adapter
from gshare.agent.train.arena import ALIGN, MOMENTS, MOMENTS_8BIT, Arena, adapter_shapes
from toy import make_runner, request, tiny_base

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Path) -> Base:
    return tiny_base(tiny_checkpoint)


def spec(name: str, **fields: Any) -> AdapterSpec:
    return AdapterSpec(name=name, data="d", output_dir="o", seed=1, **fields)


SPECS = [
    spec("a", r=4),
    spec("b", r=9, optim="adamw_8bit"),
    spec("c", r=2),
    spec("d", r=64, optim="adamw_8bit"),
]


def fill(arena: Arena, base: Base, specs: list[AdapterSpec]) -> dict[str, Adapter]:
    return {one.name: Adapter(one.name, one, arena, adapter_shapes(one, base.config)) for one in specs}


def pointers(arena: Arena) -> list[int]:
    return [arena.whole(purpose).data_ptr() for purpose in ("params", "grads", *MOMENTS, *MOMENTS_8BIT)]


def no_room(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("reserved", [True, False])
def test_reserving_grows_once_and_changes_no_place(base: Base, reserved: bool) -> None:
    """Without it every adapter moves all the others (the control)."""
    plain, arena = Arena(CPU, torch.float32), Arena(CPU, torch.float32)
    for one in (plain, arena):
        fill(one, base, [spec("gap", r=5), spec("before", r=3)])
        one.free("gap")
    before = arena.view("params", "before", next(arena.matrices("before"))[0]).clone()
    fill(plain, base, SPECS)
    if reserved:
        arena.reserve([(adapter_shapes(s, base.config), s.optim == "adamw_8bit") for s in SPECS])
    at = pointers(arena)
    fill(arena, base, SPECS)
    assert (pointers(arena) == at) == reserved
    assert arena.nbytes() == plain.nbytes()
    assert torch.equal(before, arena.view("params", "before", next(arena.matrices("before"))[0]))
    for one in SPECS:
        for key, _ in arena.matrices(one.name):
            assert torch.equal(arena.view("params", one.name, key), plain.view("params", one.name, key))


@pytest.mark.parametrize("seed", range(12))
def test_slots_that_come_and_go_take_what_was_resident_at_once(base: Base, seed: int) -> None:
    """And no more. Every value stays with its adapter, whatever is moved."""
    draw, arena = random.Random(seed), Arena(CPU, torch.bfloat16)
    kept: dict[str, dict[str, torch.Tensor]] = {}
    most = {"params": 0, "exp_avg": 0, "codes1": 0, "floats1": 0}
    for number in range(40):
        if kept and draw.random() < 0.45:
            name = draw.choice(list(kept))
            del kept[name]
            arena.free(name)
            continue
        one = spec(f"n{number}", r=draw.choice((1, 3, 8, 17)), optim=draw.choice(("adamw", "adamw_8bit")))
        Adapter(one.name, one, arena, adapter_shapes(one, base.config))
        purposes = ("params", "grads", "compute", *(MOMENTS if one.optim == "adamw" else MOMENTS_8BIT))
        for purpose in purposes:
            flat = arena.flat(purpose, one.name)
            flat.copy_((torch.rand(flat.shape) * 200).to(flat.dtype))
        kept[one.name] = {purpose: arena.flat(purpose, one.name).clone() for purpose in purposes}
        for purpose, before in most.items():
            used = sum(flats[purpose].numel() for flats in kept.values() if purpose in flats)
            most[purpose] = max(before, used)
        for name, flats in kept.items():
            assert all(torch.equal(flat, arena.flat(purpose, name)) for purpose, flat in flats.items())
            slot = arena.slot(name)
            assert {at % ALIGN for at in (slot.start, *slot.offsets.values())} == {0}
        assert {purpose: arena.whole(purpose).numel() for purpose in most} == most


def test_gaps_are_closed_for_one_that_fits_in_none(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of five adapters leave; one that is larger than each of them and smaller than all comes."""
    arena = Arena(CPU, torch.float32)
    fill(arena, base, [spec(f"s{i}", r=2) for i in range(5)])
    size = arena.nbytes()
    for i in (0, 1, 3, 4):
        arena.free(f"s{i}")
    fill(arena, base, [spec("large", r=7)])
    assert arena.nbytes() == size
    monkeypatch.setattr(torch.Tensor, "clone", no_room)  # a move that finds none changes nothing
    arena.free("s2")
    fill(arena, base, [spec("a", r=1)])
    arena.free("large")
    fill(arena, base, [spec("b", r=4), spec("c", r=2)])
    arena.free("b")
    before = {key: arena.view("params", "c", key).numpy().copy() for key, _ in arena.matrices("c")}
    with pytest.raises(torch.OutOfMemoryError):
        fill(arena, base, [spec("d", r=7)])
    assert sorted(arena.names()) == ["a", "c"]
    assert all((arena.view("params", "c", key).numpy() == old).all() for key, old in before.items())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("unforeseen")])
def test_jobs_that_come_together_make_the_arena_grow_once(
    tiny_checkpoint: Path, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Where that fails, for whatever reason, each is admitted as if it had come alone."""
    runner = make_runner(tiny_checkpoint, base, lambda event: None)
    jobs = [request(tmp_path, name, r=r) for name, r in (("a", 2), ("b", 7), ("c", 5))]
    beyond = request(tmp_path, "beyond", layers_to_transform=(99,))
    runner.expect([*jobs, beyond])  # who is refused is refused by `admit`
    at = pointers(runner.engine.arena)
    for job in jobs:
        runner.admit(job)
    assert pointers(runner.engine.arena) == at
    real = runner.engine.arena.nbytes()

    def broken(adapters: object) -> None:
        raise error

    monkeypatch.setattr(runner.engine.arena, "reserve", broken)
    more = [request(tmp_path, name) for name in "de"]
    runner.expect(more)
    for job in more:
        runner.admit(job)
    assert runner.engine.arena.nbytes() > real


@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("staged", [True, False])
def test_an_adapter_goes_to_the_host_and_back(base: Base, optim: str, staged: bool) -> None:
    """`staged`: as for a device, where it is put together on the host and copied at once."""
    arena = Arena(CPU, torch.bfloat16)
    adapters = fill(arena, base, [spec("a", r=3), spec("b", r=49, optim=optim), spec("c", r=3)])
    a, b, c = adapters.values()
    draw = torch.Generator().manual_seed(3)
    purposes = ("params", *(MOMENTS_8BIT if b.eight_bit else MOMENTS))
    assert b.on_host(optimizer=False).optimizer == {}
    for flat in (arena.flat(purpose, "b") for purpose in purposes):
        flat.copy_((torch.rand(flat.shape, generator=draw) * 200).to(flat.dtype))
    copy = b.on_host(optimizer=True)
    copy.wait()
    taken = {**copy.parameters, **copy.optimizer}
    kept = {name: tensor.clone() for name, tensor in taken.items()}
    for key, _ in arena.matrices("b"):
        assert torch.equal(kept[key.peft_name()], arena.view("params", "b", key))
    others = [arena.flat("params", one.name).clone() for one in (a, c)]
    for purpose in purposes:
        arena.flat(purpose, "b").zero_()
    assert all(torch.equal(kept[name], tensor) for name, tensor in taken.items())
    if staged:
        arena.device = torch.device("meta")  # anything but the CPU
    b.load(copy.parameters, copy.optimizer)
    again = {**b.parameters(), **b.optimizer_tensors()}
    assert again.keys() == kept.keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in again.items())
    assert all(torch.equal(x, arena.flat("params", one.name)) for x, one in zip(others, (a, c), strict=True))
    key = next(arena.matrices("b"))[0]
    assert torch.equal(arena.compute_view("b", key), arena.view("params", "b", key).bfloat16())
