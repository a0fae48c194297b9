"""An optimizer update is all or nothing: memory may run out at any of its allocations.

The fault is injected below torch: the n-th operation that makes a new tensor fails instead, for every n.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gshare.agent.base.weights import Base
from gshare.agent.jobs.events import Event, JobChanged
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.train.adapter import Adapter
from gshare.agent.train.arena import Arena, MatrixKey
from gshare.agent.train.runner import Runner
from gshare.kernels import adamw
from gshare.kernels.adamw_8bit import MIN_8BIT_SIZE
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy import make_runner, request, tiny_base

#: One matrix of each side; A is large enough for 8-bit moments and no multiple of their blocks, B is not.
SHAPES = {MatrixKey(0, "q_proj", "A"): (4, 1100), MatrixKey(0, "q_proj", "B"): (60, 4)}
assert 4 * 1100 > MIN_8BIT_SIZE > 60 * 4


class FailingAllocations(TorchDispatchMode):
    """Lets `good` operations make new memory; the next one is out of it. `made`: how many did."""

    def __init__(self, good: int) -> None:
        super().__init__()
        self.good, self.made = good, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if _is_tensor(t)}
        out = func(*args, **(kwargs or {}))
        new = [t for t in tree_leaves(out) if _is_tensor(t) and t.untyped_storage().data_ptr() not in known]
        if new:
            if self.made == self.good:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate …")
            self.made += 1
        return out


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes() > 0


def make_adapter(optim: str, compute: torch.dtype) -> Adapter:
    """Two steps old, with gradients of norm far above 0.5 in the arena."""
    spec = AdapterSpec(
        name="a",
        data="d",
        output_dir="o",
        r=4,
        lora_alpha=8.0,
        seed=0,
        optim=optim,
        max_grad_norm=0.5,
    )
    adapter = Adapter("a", spec, Arena(torch.device("cpu"), compute), SHAPES)
    for step in (1, 2, 3):
        for key, shape in SHAPES.items():
            generator = torch.Generator().manual_seed(step)
            adapter.arena.view("grads", "a", key).copy_(torch.randn(shape, generator=generator))
        if step < 3:
            adapter.update(step=step, learning_rate=1e-2, norm=adapter.gradient_norm())
    return adapter


def everything(adapter: Adapter) -> list[bytes]:
    """Weights, their compute copy, gradients, moments: all that an update may change."""
    tensors = [adapter.arena.flat("grads", "a"), *adapter.parameters().values()]
    tensors += adapter.optimizer_tensors().values()
    tensors += [adapter.arena.compute_view("a", key) for key in SHAPES]
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]


def third_step(adapter: Adapter) -> None:
    adapter.update(step=3, learning_rate=1e-2, norm=adapter.gradient_norm())


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit"])
def test_no_memory_at_any_allocation_changes_nothing_and_the_update_made_again_has_its_bits(
    optim: str, compute: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw, "CHUNK", 1000)  # so that the fp32 update has several chunks
    undisturbed = make_adapter(optim, compute)
    before = everything(undisturbed)
    norm = undisturbed.gradient_norm()
    third_step(undisturbed)
    after = everything(undisturbed)
    assert all(a != b for a, b in zip(before[1:], after[1:], strict=True))
    assert before[0] != after[0]  # clipped: a second clipping would be seen
    adapter = make_adapter(optim, compute)
    failures = 0
    while True:
        faults = FailingAllocations(failures)
        try:
            with faults:
                adapter.update(step=3, learning_rate=1e-2, norm=norm)
        except torch.OutOfMemoryError:
            failures += 1
            assert everything(adapter) == before, f"half an update after {failures} allocations"
            continue
        break
    assert failures == faults.made
    assert failures >= (1 if optim == "adamw" else 20)
    assert everything(adapter) == after


def naive(adapter: Adapter) -> None:
    """An update as one would write it first: moments move, then the temporary for the weights is made."""
    arena = adapter.arena
    grad, first, param = (arena.flat(purpose, "a") for purpose in ("grads", "exp_avg", "params"))
    first.mul_(0.9).add_(grad * 0.1)
    param.sub_(first * 1e-2)


def test_the_injected_fault_finds_an_update_that_is_no_transaction() -> None:
    """The control: without it the test above could pass because nothing ever fails."""
    adapter = make_adapter("adamw", torch.float32)
    before = everything(adapter)
    with pytest.raises(torch.OutOfMemoryError), FailingAllocations(1):
        naive(adapter)
    assert everything(adapter) != before


# ---------------------------------------------------------------------- in the runner


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Path) -> Base:
    return tiny_base(tiny_checkpoint)


def fail_updates(
    monkeypatch: pytest.MonkeyPatch, name: str, *, step: int, times: int, error: Callable[[], Exception]
) -> list[int]:
    """The update of `name` to `step` fails `times` times, before it changes anything; counts the calls."""
    calls, real = [0], Adapter.update

    def update(adapter: Adapter, *, step: int, learning_rate: float, norm: float) -> None:
        if adapter.name.startswith(f"{name}#") and step == at:
            calls[0] += 1
            if calls[0] <= times:
                raise error()
        real(adapter, step=step, learning_rate=learning_rate, norm=norm)

    at = step
    monkeypatch.setattr(Adapter, "update", update)
    return calls


def run(runner: Runner) -> None:
    while runner.run_round():
        pass
    runner.close()


def ends(events: list[Event]) -> dict[str, JobChanged]:
    return {event.job: event for event in events if isinstance(event, JobChanged)}


def files_of(folder: Path, name: str) -> dict[str, bytes]:
    """The adapter and the last optimizer state."""
    paths = [
        folder / name / "adapter_model.safetensors",
        folder / name / "checkpoint-4/optimizer.safetensors",
    ]
    return {path.name: path.read_bytes() for path in paths}


def no_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit"])
def test_an_update_that_fits_the_second_time_leaves_no_trace(
    tmp_path: Path, tiny_checkpoint: Path, base: Base, monkeypatch: pytest.MonkeyPatch, optim: str
) -> None:
    plain = make_runner(tiny_checkpoint, base)
    for name in ("a", "bb"):
        plain.admit(request(tmp_path / "plain", name, optim=optim))
    run(plain)
    calls = fail_updates(monkeypatch, "a", step=3, times=1, error=no_memory)
    events: list[Event] = []
    runner = make_runner(tiny_checkpoint, base, events.append)
    for name in ("a", "bb"):
        runner.admit(request(tmp_path / "fault", name, optim=optim))
    run(runner)
    assert calls == [2]
    assert {name: event.state for name, event in ends(events).items()} == {
        "a": "completed",
        "bb": "completed",
    }
    for name in ("a", "bb"):
        assert files_of(tmp_path / "fault", name) == files_of(tmp_path / "plain", name)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (no_memory, "out of memory in the optimizer's update"),
        (lambda: ValueError("unforeseen"), "ValueError: unforeseen"),
    ],
)
def test_an_update_that_never_fits_ends_its_own_job_with_the_last_checkpoint_intact(
    tmp_path: Path,
    tiny_checkpoint: Path,
    base: Base,
    monkeypatch: pytest.MonkeyPatch,
    error: Callable[[], Exception],
    says: str,
) -> None:
    plain = make_runner(tiny_checkpoint, base)
    for name in ("a", "bb"):
        plain.admit(request(tmp_path / "plain", name))
    run(plain)
    events: list[Event] = []
    with monkeypatch.context() as patched:
        fail_updates(patched, "a", step=4, times=1_000_000, error=error)
        runner = make_runner(tiny_checkpoint, base, events.append)
        for name in ("a", "bb"):
            runner.admit(request(tmp_path / "fault", name))
        run(runner)
    assert (ends(events)["a"].state, ends(events)["bb"].state) == ("failed", "completed")
    assert says in ends(events)["a"].reason
    assert ends(events)["a"].step == 3
    assert not (tmp_path / "fault/a/adapter_model.safetensors").exists()
    assert files_of(tmp_path / "fault", "bb") == files_of(tmp_path / "plain", "bb")
    resumed = make_runner(tiny_checkpoint, base)
    resumed.admit(request(tmp_path / "fault", "a", resume=True))
    run(resumed)
    assert files_of(tmp_path / "fault", "a") == files_of(tmp_path / "plain", "a")


def test_more_memory_is_asked_for_after_the_cache_and_before_giving_up(
    tmp_path: Path, tiny_checkpoint: Path, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fail_updates(monkeypatch, "a", step=1, times=3, error=no_memory)
    asked: list[int] = []
    runner = make_runner(tiny_checkpoint, base)
    runner.rounds.more_memory = lambda: asked.append(calls[0]) is None
    runner.admit(request(tmp_path, "a", max_steps=1))
    run(runner)
    assert asked == [2, 3]  # not after the first failure
    assert (tmp_path / "a" / "adapter_model.safetensors").exists()
