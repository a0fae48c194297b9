"""The guard between a reservation and torch's allocator, on a GPU of straw; and the real runner under it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from gshare.agent.base.weights import Base
from gshare.agent.errors import GshareError
from gshare.agent.jobs.events import Event, JobChanged, TrainerMessage
from gshare.agent.trace import Tracer
from gshare.agent.train.gpu_guard import SMALL_MB, GpuGuard, HostMemory, NoGuard, make_guard
from gshare.agent.train.part import Part
from gshare.agent.train.runner import Runner
from gshare.agent.vram.budget import CONTEXT_MB
from gshare.agent.vram.guard import Reservation
from gshare.agent.vram.ledger import Ledger

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import TOTAL_MB, device, make_ledger, rows, take, write_devices
from toy import DEVICE, make_runner, request, tiny_base

WORKSPACE = 10


class StrawGpu:
    """A GPU whose driver is the file of simulated devices: what this process takes shows there.

    `context_mb` is what the driver counts beside torch's memory; `listed`: it says who takes what.
    """

    is_gpu = True

    def __init__(
        self, folder: Path, *, context_mb: int = 500, listed: bool = True, others_mb: int = 0, **keys: object
    ) -> None:
        self._path, self._listed, self._others_mb, self._keys = (
            folder / "devices.toml",
            listed,
            others_mb,
            keys,
        )
        self._context_mb = context_mb
        self.reserved = self.outside_torch = self.peak = 0
        self.fractions: list[float] = []
        self.claims: list[int] = []
        self._show()

    def start(self) -> None:
        self.outside_torch = self._context_mb
        self.take(WORKSPACE)

    def take(self, mb: int) -> None:
        self.reserved += mb
        self.peak = max(self.peak, mb)
        self._show()

    def held_mb(self) -> int:
        return self.reserved

    def peak_mb(self) -> int:
        return self.peak

    def total_mb(self) -> int:
        return TOTAL_MB

    def set_fraction(self, fraction: float) -> None:
        self.fractions.append(fraction)

    def claim(self, mb: int) -> bool:
        self.claims.append(mb)
        if self.reserved + mb > TOTAL_MB - self._others_mb:
            return False
        self.reserved += mb
        self._show()
        return True

    def _show(self) -> None:
        mine = self.reserved + self.outside_torch
        keys = dict(self._keys)
        if self._listed and mine:
            keys["processes"] = f"[{{ pid = {os.getpid()}, used_mb = {mine} }}]"
            others = self._others_mb
        else:
            others = self._others_mb + mine
        write_devices(self._path, device(used_by_others_mb=others, **keys))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return make_ledger(tmp_path)


def guarded(
    reservation: Reservation, gpu: StrawGpu, *, may_grow: bool = False
) -> tuple[GpuGuard, list[tuple[str, str]]]:
    said: list[tuple[str, str]] = []
    guard = GpuGuard(reservation, gpu, may_grow=may_grow, say=lambda level, text: said.append((level, text)))
    return guard, said


def test_the_context_is_measured_and_the_allocator_capped_under_the_budget(
    ledger: Ledger, tmp_path: Path
) -> None:
    gpu = StrawGpu(tmp_path)
    with take(ledger, 4000) as reservation:
        guard, said = guarded(reservation, gpu)
        assert gpu.fractions == [3500 / TOTAL_MB]
        assert gpu.fractions[0] * TOTAL_MB + 500 <= 4000  # C-VRAM-001: cap and context within the budget
        assert said == []
        guard.record("load")
        assert rows(ledger) == {reservation.id: 4000}


ALL = 3500 - SMALL_MB - WORKSPACE


@pytest.mark.parametrize(("graphs_mb", "claimed"), [(0, ALL), (600, ALL - 600), (9000, ALL - ALL // 3)])
def test_what_captured_passes_may_take_is_left_unclaimed(
    ledger: Ledger, tmp_path: Path, graphs_mb: int, claimed: int
) -> None:
    """At most a third: torch gives a graph nothing of what its cache holds."""
    gpu = StrawGpu(tmp_path)
    with take(ledger, 4000) as reservation:
        GpuGuard(reservation, gpu, may_grow=False, say=lambda level, text: None, graphs_mb=lambda: graphs_mb)
        assert gpu.claims == [claimed]


def test_without_a_list_of_processes_the_context_is_what_the_device_lost(
    ledger: Ledger, tmp_path: Path
) -> None:
    gpu = StrawGpu(tmp_path, listed=False, others_mb=700)
    with take(ledger, 4000) as reservation:
        guarded(reservation, gpu)
    assert gpu.fractions == [3500 / TOTAL_MB]


def test_a_neighbour_that_starts_meanwhile_is_not_taken_for_the_context(
    ledger: Ledger, tmp_path: Path
) -> None:
    gpu = StrawGpu(tmp_path, context_mb=3000, listed=False)  # 500 of ours and a neighbour's 2500
    with take(ledger, 4000) as reservation:
        guarded(reservation, gpu)
    assert gpu.fractions == [(4000 - CONTEXT_MB) / TOTAL_MB]


def test_where_nothing_can_be_measured_the_usual_context_is_taken(ledger: Ledger, tmp_path: Path) -> None:
    gpu = StrawGpu(tmp_path, context_mb=0, listed=False)
    with take(ledger, 4000) as reservation:
        guarded(reservation, gpu)
    assert gpu.fractions == [(4000 - CONTEXT_MB) / TOTAL_MB]


def test_a_context_that_grows_takes_from_the_cap(ledger: Ledger, tmp_path: Path) -> None:
    """Kernels are loaded at their first use: what was measured at the start is not the last word."""
    gpu = StrawGpu(tmp_path)
    with take(ledger, 4000) as reservation:
        guard, said = guarded(reservation, gpu)
        guard.record("load")
        assert gpu.fractions == [3500 / TOTAL_MB]  # the control: what has not grown changes nothing
        gpu.outside_torch = 560
        gpu.take(0)
        guard.record("first_step")
        assert gpu.fractions == [3500 / TOTAL_MB, 3440 / TOTAL_MB]
        assert "and 560 for the context," in guard.summary()
        assert said == []


def test_the_driver_is_not_asked_anew_for_each_of_many_saves(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, asked = StrawGpu(tmp_path), []
    monkeypatch.setattr("gshare.agent.train.gpu_guard.RECORD_SECONDS", 3600.0)  # longer than fifty saves take
    with take(ledger, 4000) as reservation:
        guard, _ = guarded(reservation, gpu)
        real = reservation.read_device
        monkeypatch.setattr(reservation, "read_device", lambda: asked.append(1) or real())
        for _ in range(50):
            guard.record("save")
        guard.record("eval")
        assert len(asked) == 2  # once a phase
        gpu.take(64)
        guard.record("save")
        assert len(asked) == 3  # what grows is seen at once
        assert reservation.row.uses["save"] == gpu.reserved + 500
        monkeypatch.setattr("gshare.agent.train.gpu_guard.RECORD_SECONDS", 0.0)
        for _ in range(5):  # the control
            guard.record("save")
        assert len(asked) == 8


def test_an_assumed_context_is_called_so(ledger: Ledger, tmp_path: Path) -> None:
    with take(ledger, 4000) as reservation:
        measured, _ = guarded(reservation, StrawGpu(tmp_path))
        assert "and 500 for the context," in measured.summary()
    with take(ledger, 4000) as reservation:
        assumed, _ = guarded(reservation, StrawGpu(tmp_path, context_mb=0, listed=False))
        assert f"and {CONTEXT_MB} for the context (assumed)," in assumed.summary()


def test_a_context_as_large_as_the_budget_is_an_error_and_nothing_is_claimed(
    ledger: Ledger, tmp_path: Path
) -> None:
    gpu = StrawGpu(tmp_path, context_mb=600)
    with take(ledger, 600) as reservation, pytest.raises(GshareError, match="the CUDA context takes 600 MiB"):
        guarded(reservation, gpu)
    assert gpu.claims == []


def test_on_a_discrete_gpu_what_is_reserved_is_claimed_and_outsiders_cannot_take_it(
    ledger: Ledger, tmp_path: Path
) -> None:
    gpu = StrawGpu(tmp_path)
    with take(ledger, 4000) as reservation:
        guard, _ = guarded(reservation, gpu)
        assert gpu.claims == [3500 - SMALL_MB - WORKSPACE]
        assert gpu.reserved + 500 == 4000 - SMALL_MB
        guard.record("load")
        assert reservation.row.uses == {"load": 4000 - SMALL_MB}
        (state,) = ledger.look()[1].values()
        assert state.used_mb == 4000 - SMALL_MB


def test_what_torch_has_given_back_is_claimed_again_at_the_next_look(ledger: Ledger, tmp_path: Path) -> None:
    """Under the cap as it is then, and not for a little. Control: where nothing was claimed nothing is."""
    gpu = StrawGpu(tmp_path)
    whole = 3500 - SMALL_MB
    with take(ledger, 4000) as reservation:
        guard, _ = guarded(reservation, gpu)
        gpu.reserved -= 1000
        gpu._show()
        guard.record("eval")
        assert gpu.claims == [whole - WORKSPACE, 1000]
        assert gpu.reserved == whole
        assert reservation.row.uses == {"eval": 4000 - SMALL_MB}
        gpu.reserved -= 200
        guard.record("save")
        assert len(gpu.claims) == 2
        gpu.outside_torch += 300  # kernels were loaded: the cap is lower
        gpu._show()
        guard.record("first_step")
        gpu.reserved -= 1000
        guard.record("eval")
        assert gpu.reserved == whole - 300
    with take(ledger, 4000) as reservation:
        gpu = StrawGpu(tmp_path, others_mb=9000)
        guard, _ = guarded(reservation, gpu)
        guard.record("load")
        assert len(gpu.claims) == 1


def test_on_unified_memory_nothing_is_claimed(tmp_path: Path) -> None:
    """The control of the claim: the pages are the CPU's too."""
    ledger = make_ledger(tmp_path, device(memory_type='"unified"'))
    gpu = StrawGpu(tmp_path, memory_type='"unified"')
    with take(ledger, 4000) as reservation:
        guarded(reservation, gpu)
    assert gpu.claims == []
    assert len(gpu.fractions) == 1


def test_memory_that_outsiders_have_taken_is_said_and_the_run_goes_on(ledger: Ledger, tmp_path: Path) -> None:
    with take(ledger, 4000) as reservation:
        gpu = StrawGpu(tmp_path, others_mb=9000)
        guard, said = guarded(reservation, gpu)
        assert said[0][0] == "warning"
        assert f"reservation {reservation.id}: 3362 MiB cannot be had in one piece" in said[0][1]
        guard.record("load")
        assert reservation.row.uses == {"load": 500 + WORKSPACE}


def test_what_the_user_has_set_does_not_grow_and_an_estimate_does_through_the_ledger(
    ledger: Ledger, tmp_path: Path
) -> None:
    gpu = StrawGpu(tmp_path)
    with take(ledger, 4000) as reservation:
        guard, _ = guarded(reservation, gpu)
        assert not guard.more_memory()
        assert reservation.budget_mb == 4000
        guard, said = guarded(reservation, gpu, may_grow=True)
        assert guard.more_memory()
        assert reservation.budget_mb == 5000
        assert gpu.fractions[-1] == (5000 - 500) / TOTAL_MB
        assert "grew by 1000 to 5000 MiB" in said[-1][1]
        with take(ledger, 3000) as other:
            assert not guard.more_memory()
            assert rows(ledger) == {reservation.id: 5000, other.id: 3000}
            assert f"reservation {reservation.id} cannot grow" in said[-1][1]


def test_a_ledger_that_cannot_be_written_ends_no_training_and_is_said_once(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with take(ledger, 4000) as reservation:
        guard, said = guarded(reservation, StrawGpu(tmp_path))

        def full(*arguments: object, **keys: object) -> None:
            raise GshareError("the ledger is full")

        monkeypatch.setattr(reservation, "record_use", full)
        guard.record("load")
        guard.record("save")
        assert said == [("warning", f"reservation {reservation.id}: use is not recorded: the ledger is full")]
        said.clear()
        monkeypatch.setattr("gshare.agent.train.gpu_guard.KEEP_SECONDS", 0.0)
        monkeypatch.setattr(reservation, "keep", full)
        guard.keep()
        assert said == []  # the same trouble
        guard._problem = ""
        guard.keep()
        guard.keep()
        text = f"reservation {reservation.id}: its row cannot be put back: the ledger is full"
        assert said == [("warning", text)]


def test_the_row_is_looked_after_twice_a_second_however_short_the_rounds(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looks = [100.0], []
    with take(ledger, 4000) as reservation:
        guard, _ = guarded(reservation, StrawGpu(tmp_path))
        monkeypatch.setattr("gshare.agent.train.gpu_guard.time.monotonic", lambda: now[0])
        monkeypatch.setattr(reservation, "keep", lambda: looks.append(now[0]))
        for _ in range(512):  # a second of rounds of 2 ms
            guard.keep()
            now[0] += 1 / 512
    assert looks == [100.0, 100.5]


def test_a_gpu_that_torch_cannot_use_is_given_back(ledger: Ledger) -> None:
    said: list[str] = []
    cpu = torch.device("cpu")
    with take(ledger, 4000) as reservation:
        guard = make_guard(
            reservation, asked="auto", where=cpu, may_grow=False, say=lambda _, text: said.append(text)
        )
        assert type(guard) is NoGuard
        assert rows(ledger) == {}
        assert "torch cannot use the GPU" in said[0]
    with take(ledger, 4000) as reservation:  # a simulated one: the CPU is what was asked for
        guard = make_guard(reservation, asked="cpu", where=cpu, may_grow=False, say=lambda _, text: None)
        assert isinstance(guard, GpuGuard)
        assert rows(ledger) == {reservation.id: 4000}


def test_main_memory_in_a_gpus_place_is_the_growth_of_the_process() -> None:
    memory = HostMemory()
    before = memory.held_mb()
    block = bytearray(64 << 20)
    assert 60 <= memory.held_mb() - before <= 80
    assert memory.peak_mb() >= before + 60
    del block


# ---------------------------------------------------------------------- the real runner


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Path) -> Base:
    return tiny_base(tiny_checkpoint)


def runner_under(
    reservation: Reservation, checkpoint: Path, base: Base, events: list[Event], **keys: object
) -> Runner:
    return Runner(
        model_dir=checkpoint,
        base_dtype=base.base_dtype,
        schedule="synchronized",
        max_tokens_per_pass=16384,
        max_adapters_per_pass=0,
        device=DEVICE,
        on_event=events.append,
        on_pass=lambda in_flight: None,
        base=base,
        reservation=reservation,
        **keys,  # type: ignore[arg-type]
    )


def run(runner: Runner) -> None:
    while runner.run_round():
        pass
    runner.close()


def out_of_memory_with(runner: Runner, name: str, *, times: int = 1_000_000) -> None:
    """Every pass with a part of `name` runs out of memory, `times` times."""
    left = [times]

    def look(parts: object) -> None:
        assert isinstance(parts, list)
        if left[0] and any(isinstance(p, Part) and p.adapter.name.startswith(f"{name}#") for p in parts):
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate …")

    runner.engine.before_pass = look


def reasons(events: list[Event], state: str) -> dict[str, str]:
    return {e.job: e.reason for e in events if isinstance(e, JobChanged) and e.state == state}


def test_use_is_recorded_after_load_first_step_evaluation_and_save(
    ledger: Ledger, tmp_path: Path, tiny_checkpoint: Path, base: Base
) -> None:
    events: list[Event] = []
    with take(ledger, 6000) as reservation:
        runner = runner_under(reservation, tiny_checkpoint, base, events)
        assert set(reservation.row.uses) == {"load"}
        runner.admit(request(tmp_path, "a"))
        assert runner.run_round()
        assert set(reservation.row.uses) == {"load", "first_step"}
        run(runner)
        assert set(reservation.row.uses) == {"load", "first_step", "eval", "save"}
    last = events[-1]
    assert isinstance(last, TrainerMessage)
    assert f"reservation {reservation.id}: at most " in last.text


def test_a_reservation_whose_files_vanish_is_back_after_the_round(
    ledger: Ledger, tmp_path: Path, tiny_checkpoint: Path, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gshare.agent.train.gpu_guard.KEEP_SECONDS", 0.0)
    with take(ledger, 6000) as reservation:
        runner = runner_under(reservation, tiny_checkpoint, base, [])
        runner.admit(request(tmp_path, "a", eval_steps=0, save_steps=0))
        runner.run_round()
        for _ in range(2):  # rounds after which no use is written down
            shutil.rmtree(ledger.directory)
            assert rows(ledger) == {}
            assert runner.run_round()
            assert rows(ledger) == {reservation.id: 6000}
        run(runner)


def test_a_job_over_the_reservation_fails_alone_and_is_told_whose_limit_it_was(
    ledger: Ledger, tmp_path: Path, tiny_checkpoint: Path, base: Base
) -> None:
    events: list[Event] = []
    with take(ledger, 6000) as reservation:
        runner = runner_under(reservation, tiny_checkpoint, base, events)
        runner.admit(request(tmp_path, "good"))
        runner.admit(request(tmp_path, "large"))
        out_of_memory_with(runner, "large")
        run(runner)
        whose = f"reservation {reservation.id} is 6000 MiB on GPU-aaaa-1: raise it with --vram"
    assert whose in reasons(events, "failed")["large"]
    assert set(reasons(events, "completed")) == {"good"}
    alone = make_runner(tiny_checkpoint, base)
    alone.admit(request(tmp_path / "alone", "good"))
    run(alone)
    name = "good/adapter_model.safetensors"
    assert (tmp_path / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_without_a_reservation_no_reservation_is_named(
    tmp_path: Path, tiny_checkpoint: Path, base: Base
) -> None:
    events: list[Event] = []
    runner = make_runner(tiny_checkpoint, base, events.append)
    runner.admit(request(tmp_path, "large"))
    out_of_memory_with(runner, "large")
    run(runner)
    assert "out of memory with one row" in reasons(events, "failed")["large"]
    assert "reservation" not in reasons(events, "failed")["large"]


def test_an_estimate_that_was_too_low_grows_and_the_job_keeps_its_bits(
    ledger: Ledger, tmp_path: Path, tiny_checkpoint: Path, base: Base
) -> None:
    events: list[Event] = []
    job = request(tmp_path, "a", lengths=(9, 12, 10, 11))
    with take(ledger, 4000) as reservation:
        runner = runner_under(reservation, tiny_checkpoint, base, events, may_grow=True)
        runner.admit(job)
        out_of_memory_with(runner, "a", times=3)
        run(runner)
        assert runner.engine.checkpointing  # the first time
        assert reservation.budget_mb == 6250  # then twice a quarter more
    assert "completed" in {e.state for e in events if isinstance(e, JobChanged)}
    alone = make_runner(tiny_checkpoint, base)
    alone.admit(request(tmp_path / "alone", "a", lengths=(9, 12, 10, 11)))
    run(alone)
    name = "a/adapter_model.safetensors"
    assert (tmp_path / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_a_job_whose_adapter_does_not_fit_is_refused_and_the_others_go_on(
    ledger: Ledger, tmp_path: Path, tiny_checkpoint: Path, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    with take(ledger, 6000) as reservation:
        runner = runner_under(reservation, tiny_checkpoint, base, events)
        runner.admit(request(tmp_path, "good"))

        def no_room(*arguments: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(runner.engine, "new_adapter", no_room)
            with pytest.raises(
                GshareError,
                match=f"large: cannot be admitted: out of memory; reservation {reservation.id} is",
            ):
                runner.admit(request(tmp_path, "large"))
        run(runner)
    assert set(reasons(events, "completed")) == {"good"}


def test_a_base_that_does_not_fit_ends_the_trainer_with_the_reservations_name(
    ledger: Ledger, tiny_checkpoint: Path, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*arguments: object, **keys: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("gshare.agent.train.runner.load_base", no_room)
    with take(ledger, 6000) as reservation, pytest.raises(GshareError) as caught:
        Runner(
            model_dir=tiny_checkpoint,
            base_dtype="fp32",
            schedule="synchronized",
            max_tokens_per_pass=16384,
            max_adapters_per_pass=0,
            device="cpu",
            on_event=lambda event: None,
            on_pass=lambda in_flight: None,
            reservation=reservation,
        )
    assert f"the base: out of memory; reservation {reservation.id} is 6000 MiB" in str(caught.value)


def test_the_trainers_phases_are_traced_when_asked_and_no_clock_is_read_when_not(
    tmp_path: Path, tiny_checkpoint: Path, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = [0]

    def clock() -> int:
        ticks[0] += 1
        return ticks[0]

    tracer = Tracer(clock=clock)
    traced = Runner(
        model_dir=tiny_checkpoint,
        base_dtype=base.base_dtype,
        schedule="synchronized",
        max_tokens_per_pass=16384,
        max_adapters_per_pass=0,
        device=DEVICE,
        on_event=lambda event: None,
        on_pass=lambda in_flight: None,
        base=base,
        tracer=tracer,
    )
    traced.admit(request(tmp_path, "a"))
    run(traced)
    names = [event.name for event in tracer.events if event.kind == "span"]
    assert names.count("TrainStep") == 4
    assert names.count("Evaluate") == 2
    assert "Save" in names
    assert ticks[0] == 2 * len(tracer.events)

    # The default tracer's clock raises when it is read.
    monkeypatch.setattr("gshare.agent.trace.time.perf_counter_ns", clock)
    before = ticks[0]
    untraced = make_runner(tiny_checkpoint, base)
    untraced.admit(request(tmp_path / "untraced", "a"))
    run(untraced)
    assert ticks[0] == before
