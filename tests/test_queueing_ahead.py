"""The CUDA engine with the next round queued before the last is read: same bits; who failed is left alone.

Without a GPU the kernels run in Triton's interpreter, where a launch is done when it returns; the order of
launches and reads is that of the GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from gshare.agent.base.load import load_base
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.base.weights import Base
from gshare.agent.jobs.events import Event, JobChanged, Stepped
from gshare.agent.train import device_optimizer
from gshare.agent.train.device_engine import DeviceEngine
from gshare.agent.train.device_pass import PassBuffers
from gshare.agent.train.part import Part
from gshare.agent.train.runner import Runner
from gshare.kernels.staging import Fetched
from gshare.kernels.triton_backend import TritonBackend
from run_files import run_files
from toy import make_runner, request

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: One rank for all, as in the interpreter a dot's bits depend on the widest of a pass; large enough for 8-bit
#: moments (4,096 elements a matrix).
SPEC: dict[str, Any] = {
    "r": 64,
    "lengths": (9, 7, 5, 6, 8, 4),
    "target_modules": ("q_proj",),
    "max_steps": 4,
    "eval_steps": 0,
    "save_steps": 0,
    "val_fraction": 0.0,
}
OPTIMS = {"a": "adamw_8bit", "bb": "adamw"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return Path(make_tiny_checkpoint(folder, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64))


@pytest.fixture(scope="module")
def base(checkpoint: Path) -> Base:
    return load_base(checkpoint, base_dtype="fp32", device=DEVICE)


class Run:
    """Two jobs in one runner; `launches` training passes so far; the arena as it is in the end."""

    def __init__(self, checkpoint: Path, base: Base, folder: Path, *, ahead: bool, **spec: Any) -> None:
        self.events: list[Event] = []
        self.folder = folder
        self.runner: Runner = make_runner(checkpoint, base, self.events.append, backend=TritonBackend())
        engine = self.runner.engine
        assert isinstance(engine, DeviceEngine)
        engine.queues_ahead, engine.graphs = ahead, False
        self.engine = engine
        for name, optim in OPTIMS.items():
            self.runner.admit(request(folder, name, optim=optim, **{**SPEC, **spec}))
        self.slots = {job.name: engine.arena.slot(job.adapter.name) for job in self.runner.jobs()}

    def go(self, rounds: int = 1000) -> Run:
        for _ in range(rounds):
            if not self.runner.run_round():
                self.runner.close()
                break
        return self

    def told(self) -> list[tuple[object, ...]]:
        """Steps and states of each job in order, as a client sees them: an end is said once its files stand,
        so between two jobs the disk has its say."""
        told: list[tuple[object, ...]] = [
            (event.job, event.step, event.loss, event.grad_norm, event.learning_rate)
            if isinstance(event, Stepped)
            else (event.job, event.step, event.state, event.reason)
            for event in self.events
            if isinstance(event, (Stepped, JobChanged))
        ]
        return sorted(told, key=lambda one: str(one[0]))

    def memory(self, name: str) -> list[torch.Tensor]:
        """The job's weights and moments, or what is there since it ended: nobody has taken the place."""
        slot, arena = self.slots[name], self.engine.arena
        own = slice(slot.start, slot.start + slot.length)
        eight_bit = OPTIMS[name] == "adamw_8bit"
        moments = ("codes1", "codes2", "floats1", "floats2") if eight_bit else ("exp_avg", "exp_avg_sq")
        return [arena.whole("params")[own].clone(), *(arena.whole(purpose).clone() for purpose in moments)]


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> list[bool]:
    return [torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True)]


@pytest.fixture(scope="module")
def waiting(checkpoint: Path, base: Base, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Undisturbed, every round read before the next is queued."""
    return Run(checkpoint, base, tmp_path_factory.mktemp("waiting"), ahead=False).go()


def test_the_bits_are_those_of_a_run_that_waits(
    checkpoint: Path, base: Base, tmp_path: Path, waiting: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the results of a round are read after the next one was launched, not before."""
    order: list[str] = []
    queued = Run(checkpoint, base, tmp_path, ahead=True)
    launch, step, read = queued.engine._launch, queued.engine.optimizer.step, Fetched.read

    def told_launch(buffers: PassBuffers, training: bool) -> torch.Tensor:
        order.append("pass")
        return launch(buffers, training)

    def told_step(*arguments: Any) -> Any:
        order.append("update")
        return step(*arguments)

    def told_read(fetched: Fetched) -> list[torch.Tensor]:
        order.append("read")
        return read(fetched)

    monkeypatch.setattr(queued.engine, "_launch", told_launch)
    monkeypatch.setattr(queued.engine.optimizer, "step", told_step)
    monkeypatch.setattr(Fetched, "read", told_read)
    queued.go()
    assert queued.told() == waiting.told()
    assert run_files(tmp_path) == run_files(waiting.folder)
    assert len(run_files(tmp_path)) >= 2 * 5
    begun = ["pass", "update"]
    reads = ["read"] * 3  # losses; norms and overflow of one buffer
    assert order == [*begun, *reads, *begun, *begun, *reads, *begun, *reads, *reads]


def spoil(run: Run, name: str, at: int, how: str) -> None:
    """In the `at`-th pass the job's loss or gradients are not finite; in those behind it they are again."""
    launch, passes = run.engine._launch, [0]

    def spoilt(buffers: PassBuffers, training: bool) -> torch.Tensor:
        nll = launch(buffers, training)
        passes[0] += 1
        if passes[0] == at:
            adapter = f"{name}#{list(OPTIMS).index(name) + 1}"
            if how == "gradient":
                run.engine.arena.flat("grads", adapter)[5] = torch.inf
            else:
                seat = run.engine.optimizer.seat(adapter)
                nll[buffers.device["owner"] == seat] = torch.nan
                run.engine.optimizer.flags[seat] = 0
        return nll

    run.engine._launch = spoilt


@pytest.mark.parametrize(("name", "how"), [("a", "loss"), ("bb", "gradient")], ids=["8-bit", "fp32 moments"])
def test_a_step_queued_behind_a_divergence_leaves_the_adapter_as_it_was(
    checkpoint: Path,
    base: Base,
    tmp_path: Path,
    waiting: Run,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    how: str,
) -> None:
    runs = []
    for ahead in (False, True):
        runs.append(Run(checkpoint, base, tmp_path / str(ahead), ahead=ahead, max_steps=3))
        spoil(runs[-1], name, 2, how)
        runs[-1].go()
    told = [run.told() for run in runs]
    assert str(told[0]) == str(told[1])  # a loss that is NaN is not equal to itself
    (end,) = [
        event for event in runs[1].events if isinstance(event, JobChanged) and event.state == "diverged"
    ]
    assert (end.job, end.step) == (name, 2)
    assert f"{how}{' norm' if how == 'gradient' else ''} is not finite at step 2" in end.reason
    assert all(same(runs[0].memory(name), runs[1].memory(name)))
    other = "bb" if name == "a" else "a"
    final = f"{other}/adapter_model.safetensors"
    assert run_files(tmp_path / "True")[final] == run_files(tmp_path / "False")[final]
    undisturbed = [step for step in waiting.told() if step[0] == other and len(step) == 5][:3]
    assert [step for step in told[1] if step[0] == other and len(step) == 5] == undisturbed
    # Negative control: without the flag the step behind it is made.
    monkeypatch.setattr(device_optimizer, "note_health_", lambda *tables: None)
    control = Run(checkpoint, base, tmp_path / "control", ahead=True, max_steps=3)
    spoil(control, name, 2, how)
    control.go()
    assert not any(same(runs[0].memory(name), control.memory(name)))


def test_out_of_memory_while_queueing(checkpoint: Path, base: Base, tmp_path: Path, waiting: Run) -> None:
    """In the third round, passes of two adapters: the second is told, the third is made with one each."""
    run = Run(checkpoint, base, tmp_path, ahead=True)
    passes: list[int] = []
    told: list[int] = []

    def before_pass(parts: Sequence[Part]) -> None:
        passes.append(len(parts))
        told.append(sum(isinstance(event, Stepped) for event in run.events))
        if len(passes) >= 3 and len(parts) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    run.engine.before_pass = before_pass
    run.go()
    assert passes == [2, 2, 2, 2, 1, 1, 1, 1]
    assert told[:5] == [0, 2, 2, 4, 4]  # the third pass fails before the second round is told
    assert run.engine.checkpointing
    states = {job.name: (job.state, job.step) for job in run.runner.jobs()}
    assert states == {"a": ("completed", 4), "bb": ("completed", 4)}
    found, expected = run_files(tmp_path), run_files(waiting.folder)
    for name in OPTIMS:
        for path in ("adapter_model.safetensors", "checkpoint-4/optimizer.safetensors"):
            assert found[f"{name}/{path}"] == expected[f"{name}/{path}"]


def test_a_stop_saves_the_step_in_flight_and_a_resume_goes_on(
    checkpoint: Path, base: Base, tmp_path: Path, waiting: Run
) -> None:
    run = Run(checkpoint, base, tmp_path, ahead=True).go(2)
    a = run.runner.jobs()[0]
    assert (a.step, a.begun) == (2, 3)
    run.runner.stop("a", "test")
    assert (a.state, a.step) == ("stopped", 3)
    assert (tmp_path / "a/checkpoint-3").is_dir()
    run.runner.admit(request(tmp_path, "a", resume=True, optim=OPTIMS["a"], **SPEC))
    run.go()
    steps = [event.step for event in run.events if isinstance(event, Stepped) and event.job == "a"]
    assert steps == [1, 2, 3, 4]
    found, expected = run_files(tmp_path), run_files(waiting.folder)
    for name in OPTIMS:
        for path in ("adapter_model.safetensors", "checkpoint-4/optimizer.safetensors"):
            assert found[f"{name}/{path}"] == expected[f"{name}/{path}"]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA GPU: here every launch is waited for")
@pytest.mark.parametrize("graphs", [False, True])
def test_queueing_waits_for_nothing(
    checkpoint: Path, base: Base, tmp_path: Path, waiting: Run, graphs: bool
) -> None:
    """torch raises where the host waits for the device; the first two passes of a shape build things."""
    run = Run(checkpoint, base, tmp_path, ahead=True)
    run.engine.graphs = graphs
    start: Callable[..., Any] = run.runner.rounds.start
    begun = [0]

    def strict(*arguments: Any) -> Any:
        begun[0] += 1
        torch.cuda.set_sync_debug_mode("error" if begun[0] > 2 else "default")
        try:
            started = start(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert started.error is None, started.error
        return started

    run.runner.rounds.start = strict
    run.go()
    assert begun == [4]
    assert run_files(tmp_path) == run_files(waiting.folder)
