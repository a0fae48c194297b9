"""The optimizer step of a round on the device: the bits of `Adapter.update`, and who is left as it was.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
from ieee_sqrt import ieee_sqrt

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.train import device_optimizer
from gshare.agent.train.adapter import Adapter
from gshare.agent.train.arena import Arena, MatrixKey
from gshare.agent.train.device_optimizer import DeviceOptimizer
from gshare.kernels.adamw_8bit import MIN_8BIT_SIZE

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = {
    MatrixKey(0, "q_proj", "A"): (3, 100),
    MatrixKey(0, "q_proj", "B"): (1500, 3),
    MatrixKey(1, "o_proj", "A"): (4, 7),
}
#: What the 8-bit optimizer keeps in 8 bits and what not, no multiple of a block or of the alignment.
assert 1500 * 3 > MIN_8BIT_SIZE > 100 * 3
#: Three of a round, in the order of their seats.
SPECS = {
    "a": {"max_grad_norm": 0.5},
    "b": {"weight_decay": 0.2, "adam_beta2": 0.95, "max_grad_norm": 0.0},
    "c": {"adam_epsilon": 1e-6},
}
RATES = (1e-3, 2e-4, 5e-2)


@pytest.fixture(autouse=True)
def _reference_rounds_square_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch, "sqrt", ieee_sqrt)


def new_round(
    dtype: torch.dtype = torch.float32, optims: Sequence[str] = ("adamw",) * 3
) -> tuple[DeviceOptimizer, list[Adapter]]:
    arena = Arena(DEVICE, dtype)
    arena.allocate("before", {MatrixKey(0, "q_proj", "A"): (1, 16)})
    arena.allocate("before8", {MatrixKey(0, "q_proj", "A"): (1, 5000)}, eight_bit=True)
    adapters = []
    for seed, (name, values) in enumerate(SPECS.items()):
        given: dict[str, object] = {"name": name, "data": "d", "output_dir": "o", "seed": seed}
        spec = AdapterSpec(**given, **values, optim=optims[seed])  # type: ignore[arg-type]
        adapters.append(Adapter(name, spec, arena, SHAPES))
    return DeviceOptimizer(arena), adapters


def give_gradients(optimizer: DeviceOptimizer, adapters: Sequence[Adapter], step: int) -> None:
    """As passes would leave them."""
    for seed, adapter in enumerate(adapters):
        generator = torch.Generator().manual_seed(100 * step + seed)
        for key, shape in SHAPES.items():
            drawn = torch.randn(shape, generator=generator) * 0.1
            adapter.arena.view("grads", adapter.name, key).copy_(drawn)
    optimizer.passed([adapter.name for adapter in adapters])


def state(adapter: Adapter) -> dict[str, torch.Tensor]:
    compute = {
        f"compute {key}": adapter.arena.compute_view(adapter.name, key).cpu().clone() for key in SHAPES
    }
    return {**adapter.parameters(), **adapter.optimizer_tensors(), **compute}


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "optims",
    [("adamw",) * 3, ("adamw_8bit",) * 3, ("adamw_8bit", "adamw", "paged_adamw_8bit")],
    ids=["fp32 moments", "8-bit", "mixed"],
)
def test_three_steps_have_the_bits_of_the_reference(optims: tuple[str, ...], dtype: torch.dtype) -> None:
    """Given the norm: the two backends fold it in different orders (`grad_norm_triton.py`)."""
    optimizer, ours = new_round(dtype, optims)
    _, theirs = new_round(dtype, optims)
    for step in (1, 2, 3):
        optimizer.begin(ours)
        give_gradients(optimizer, ours, step)
        verdicts = optimizer.step(ours, [step] * 3, RATES)
        give_gradients(DeviceOptimizer(theirs[0].arena), theirs, step)
        for adapter, rate, norm in zip(theirs, RATES, verdicts.norms.tolist(), strict=True):
            assert norm == pytest.approx(adapter.gradient_norm(), rel=1e-14)
            adapter.update(step=step, learning_rate=rate, norm=norm)
        assert verdicts.overflow.tolist() == [0, 0, 0]
        assert verdicts.finite.tolist() == [1, 1, 1]
    for mine, other in zip(ours, theirs, strict=True):
        assert not differing(state(mine), state(other))
    optimizer.begin(ours)
    give_gradients(optimizer, ours, 4)
    optimizer.step(ours, [4] * 3, RATES).wait()
    assert len(differing(state(ours[1]), state(theirs[1]))) >= len(SHAPES)  # negative control: a step more


def test_an_adapter_that_is_not_finite_is_left_as_it_was() -> None:
    """By its loss or by its gradients; the others step as if it were not there."""
    optimizer, adapters = new_round()
    optimizer.begin(adapters)
    give_gradients(optimizer, adapters, 1)
    expected, others = new_round()
    expected.begin(others)
    give_gradients(expected, others, 1)
    expected.step(others, [1] * 3, RATES).wait()
    before = [state(adapter) for adapter in adapters]
    optimizer.flags[0] = 0
    adapters[2].arena.view("grads", "c", MatrixKey(1, "o_proj", "A"))[0, 0] = torch.inf
    verdicts = optimizer.step(adapters, [1] * 3, RATES)
    assert verdicts.finite.tolist() == [0, 1, 1]
    assert verdicts.norms.isfinite().tolist() == [True, True, False]
    for index in (0, 2):
        assert not differing(state(adapters[index]), before[index])
    assert not differing(state(adapters[1]), state(others[1]))
    assert differing(state(adapters[1]), before[1])


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_a_weight_that_overflows_is_said_in_its_own_round() -> None:
    optimizer, adapters = new_round()
    optimizer.begin(adapters)
    give_gradients(optimizer, adapters, 1)
    overflown = optimizer.step(adapters, [1] * 3, (1e-3, 1e38, 1e-3))
    optimizer.begin(adapters[::2])
    give_gradients(optimizer, adapters[::2], 2)
    later = optimizer.step(adapters[::2], [2] * 2, (1e-3, 1e-3))
    assert later.overflow.tolist() == [0, 0]
    assert overflown.overflow.tolist() == [0, 1, 0]
    assert overflown.norms.isfinite().all(), "nothing but the weights says it"


def fail(optimizer: DeviceOptimizer, adapters: Sequence[Adapter], how: str) -> None:
    """A step that the first of `adapters` does not survive; the others step."""
    optimizer.begin(adapters)
    give_gradients(optimizer, adapters, 1)
    rate = 1e-3
    if how == "loss":
        optimizer.flags[0] = 0
    elif how == "gradient":
        arena = adapters[0].arena
        arena.view("grads", adapters[0].name, MatrixKey(1, "o_proj", "A"))[0, 0] = torch.nan
    else:
        rate = 1e38
    optimizer.step(adapters, [1] * len(adapters), [rate, *[1e-3] * (len(adapters) - 1)])


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("how", ["loss", "gradient", "weights"])
def test_who_failed_is_left_alone_in_every_later_round(
    how: str, optim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has read anything meanwhile; in another seat too. The others go on."""

    def later_rounds() -> tuple[bool, bool]:
        """Whether the first and the second adapter are, after two more rounds, what they were."""
        optimizer, (a, b, c) = new_round(optims=(optim, "adamw", optim))
        fail(optimizer, [a, b, c], how)
        before = [state(adapter) for adapter in (a, b)]
        for step, members in ((2, [b, a]), (3, [c, a, b])):
            optimizer.begin(members)
            give_gradients(optimizer, members, step)
            optimizer.step(members, [step] * len(members), [1e-3] * len(members))
        return not differing(state(a), before[0]), not differing(state(b), before[1])

    assert later_rounds() == (True, False)
    monkeypatch.setattr(device_optimizer, "note_health_", lambda *tables: None)
    assert later_rounds() == (False, False)  # negative control


def test_a_newcomer_does_not_inherit_a_failure() -> None:
    """In the slot and under the name of one that failed."""
    optimizer, adapters = new_round()
    fail(optimizer, adapters, "loss")
    place = optimizer.arena.slot("a").start
    adapters[0].close()
    again = Adapter("a", adapters[0].spec, optimizer.arena, SHAPES)
    assert optimizer.arena.slot("a").start == place
    before = state(again)
    optimizer.begin([again, *adapters[1:]])
    give_gradients(optimizer, [again, *adapters[1:]], 1)
    verdicts = optimizer.step([again, *adapters[1:]], [1] * 3, RATES)
    assert verdicts.finite.tolist() == [1, 1, 1]
    assert differing(state(again), before)


def test_more_adapters_than_there_were_cells_keep_their_own() -> None:
    arena = Arena(DEVICE, torch.float32)
    small = {MatrixKey(0, "q_proj", "A"): (1, 16)}
    adapters = []
    for seed in range(150):
        spec = AdapterSpec(name=f"s{seed}", data="d", output_dir="o", seed=seed)
        adapters.append(Adapter(spec.name, spec, arena, small))
    health = device_optimizer._Health(DEVICE)
    first = health.cells(arena, adapters[:40])
    health.flags[first[7]] = 0
    cells = health.cells(arena, adapters)
    assert cells[:40] == first
    assert len(set(cells)) == 150
    assert health.flags[cells].tolist() == [int(index != 7) for index in range(150)]
    adapters[7].close()
    other = AdapterSpec(name="other", data="d", output_dir="o", seed=0)
    (cell,) = health.cells(arena, [Adapter("other", other, arena, small)])
    assert cell == first[7]
    assert health.flags[cell] == 1


def test_tables_of_sets_that_take_turns_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = [], device_optimizer.slot_tables
    monkeypatch.setattr(device_optimizer, "slot_tables", lambda places: made.append(places) or real(places))
    optimizer, adapters = new_round()
    for _ in range(3):
        for members in (adapters[:2], adapters[2:], adapters):
            optimizer.begin(members)
            optimizer.step(members, [1] * len(members), RATES[: len(members)]).wait()
    assert len(made) == 3


def test_an_adapter_without_a_pass_has_no_gradients() -> None:
    """A round writes no zeros beforehand: what an earlier round left must not be stepped by."""
    optimizer, adapters = new_round()
    optimizer.begin(adapters)
    give_gradients(optimizer, adapters, 1)
    optimizer.begin(adapters)
    optimizer.passed(["a", "c"])
    norms = optimizer.step(adapters, [1] * 3, RATES).norms
    assert norms[1] == 0
    assert norms[0] > 0


def test_tables_follow_the_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaver's slot is taken by another: the same names in other places."""
    made, real = [], device_optimizer.slot_tables
    monkeypatch.setattr(device_optimizer, "slot_tables", lambda places: made.append(places) or real(places))
    optimizer, adapters = new_round()
    for _ in range(3):
        optimizer.begin(adapters)
        optimizer.step(adapters, [1] * 3, RATES).wait()
    assert len(made) == 1
    adapters[0].close()
    optimizer.begin(adapters[1:])
    optimizer.step(adapters[1:], [1] * 2, RATES[1:]).wait()
    assert len(made) == 2
    assert made[1] == made[0][1:]


def test_8_bit_state_goes_out_and_in_and_survives_growth() -> None:
    optimizer, (a, *_) = new_round(optims=("adamw_8bit", "adamw", "adamw"))
    optimizer.begin([a])
    give_gradients(optimizer, [a], 1)
    optimizer.step([a], [1], RATES[:1]).wait()
    kept, moments = state(a), a.optimizer_tensors()
    assert {t.dtype for t in moments.values()} == {torch.uint8, torch.float32}
    assert all(t.any() for t in moments.values())
    a.arena.allocate("large", {MatrixKey(0, "q_proj", "A"): (3, 9000)}, eight_bit=True)
    assert not differing(state(a), kept)
    other_optimizer, (b, *_) = new_round(optims=("adamw_8bit", "adamw", "adamw"))
    b.load(a.parameters(), moments)
    assert not differing(state(b), kept)
    for which, adapter in ((optimizer, a), (other_optimizer, b)):
        which.begin([adapter])
        give_gradients(which, [adapter], 2)
        which.step([adapter], [2], RATES[:1]).wait()
    assert not differing(state(a), state(b))
    name = next(name for name, codes in moments.items() if codes.dtype == torch.uint8)
    for wrong in (moments[name].float(), moments[name][:1]):
        with pytest.raises(RuntimeError, match=r"state1 is torch\..*, not torch\."):
            b.load(a.parameters(), {**moments, name: wrong})
    with pytest.raises(KeyError, match="state1"):
        b.load(a.parameters(), {key: value for key, value in moments.items() if key != name})
