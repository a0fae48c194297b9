"""Measuring memory on the real engine: what is counted, and out of memory as an answer."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.base.weights import Base
from gshare.agent.errors import GshareError
from gshare.agent.jobs import memory_grid
from gshare.agent.jobs.memory_grid import Configuration
from gshare.agent.jobs.memory_profile import MemoryProfile, profile_key
from gshare.agent.jobs.pass_load import pass_load, rung
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.train.engine import Engine
from gshare.agent.train.measure_memory import Measured, Measurer, measure_memory
from gshare.agent.train.memory_meter import CountingMeter, CudaMeter
from gshare.agent.train.part import Row
from gshare.agent.train.passes import StepWork
from gshare.agent.train.rounds import Rounds
from toy import VOCABULARY, new_backend, tiny_base

MIB = 2**20
KEY = profile_key("base", base_dtype="fp32", card="cpu", checkpointing=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return tiny_base(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny")), "fp32")


def resident(base: Base) -> int:
    return base.nbytes + base.scratch.nbytes


def measurer(base: Base, limit_bytes: int = 0) -> Measurer:
    meter = CountingMeter(resident_bytes=resident(base), limit_bytes=limit_bytes)
    return Measurer(base, new_backend(), meter)


@pytest.fixture(scope="module")
def profile(base: Base) -> MemoryProfile:
    """Of passes long enough that the pass is the peak, as it is of real models: over a few tokens the CPU's
    update is, and no line fits both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_grid, "COUNTS", (1, 2, 4, 8))
        return measure_memory(measurer(base), KEY, max_tokens=512, max_length=64)


# ---------------------------------------------------------------------- the meter


def test_tensors_are_counted_from_their_making_to_their_end() -> None:
    before = torch.zeros(MIB, dtype=torch.uint8)
    meter = CountingMeter(resident_bytes=5 * MIB)
    with meter.measuring():
        one = before.view(2, -1)[0].add_(1)  # a view of what is resident, changed in place
        assert one.numel()
        two = torch.zeros(2 * MIB, dtype=torch.uint8)
        kept = two[:10]
        three = two + 1
        assert meter_live(meter) == (5 + 2 + 2) * MIB
        del two, three
        assert meter_live(meter) == (5 + 2) * MIB, "a view keeps all of its memory"
        del kept
        assert meter_live(meter) == 5 * MIB
        small = torch.zeros(1)
        assert meter_live(meter) == 5 * MIB + 512
        with meter.elsewhere():
            other = small.clone()
        assert other is not small
        assert meter_live(meter) == 5 * MIB + 512
    assert meter.peak_bytes() == (5 + 2 + 2) * MIB
    with meter.measuring():
        pass
    assert meter.peak_bytes() == 5 * MIB, "a new block starts anew"


def meter_live(meter: CountingMeter) -> int:
    counter = meter._counter
    assert counter is not None
    return counter.live


def test_beyond_the_limit_is_out_of_memory() -> None:
    meter = CountingMeter(resident_bytes=5 * MIB, limit_bytes=6 * MIB)
    with meter.measuring():
        fits = torch.zeros(MIB, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError, match="do not fit beside"):
            torch.zeros(1)
        del fits
        assert torch.zeros(MIB, dtype=torch.uint8).numel()


def test_on_cuda_what_graphs_keep_is_beside_the_tensors_of_launched_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With torch's figures in its place: a launched pass, one that is captured, a replay, an evaluation."""
    figures = {"allocated": 0, "graphs": 0}
    resets: list[int] = []

    def snapshot() -> list[dict[str, object]]:
        pools = (((0, 0), 0, 10**9), ((0, 1), 0, figures["graphs"]), ((0, 1), 1, 10**9))
        return [{"segment_pool_id": pool, "device": at, "total_size": size} for pool, at, size in pools]

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: figures["allocated"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * figures["allocated"])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    meter = CudaMeter(torch.device("cuda", 0))
    for _ in range(2):  # a new block starts anew
        figures.update(graphs=0)
        with meter.measuring():
            for allocated, graphs in ((70, 0), (95, 40), (20, 40), (80, 40)):
                figures.update(allocated=allocated * MIB, graphs=graphs * MIB)
                meter.phase_ended()
        assert meter.peak_bytes() == (80 + 40) * MIB, "not 95: that is the capture's"
    with meter.measuring():
        figures.update(allocated=7 * MIB, graphs=0)
        meter.phase_ended()
    assert meter.peak_bytes() == 7 * MIB
    figures.update(graphs=30 * MIB)  # of another engine: what is in its tensors is in the figures of all
    with meter.measuring():
        for allocated, graphs in ((50, 30), (95, 45), (60, 45)):
            figures.update(allocated=allocated * MIB, graphs=graphs * MIB)
            meter.phase_ended()
    assert meter.peak_bytes() == (60 + 45 - 30) * MIB
    figures.update(allocated=7 * MIB)
    with meter.measuring():
        meter.phase_ended()
    assert len(resets) == 2 * 5 + 2 + 4 + 2
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    assert meter.peak_bytes() == 3 * 7 * MIB, "blocks that are never given back are a need"


def test_a_configuration_whose_graphs_have_no_memory_is_no_point_of_the_model(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, what = measurer(base), Configuration(1, 1, 16)
    assert it.point(what) is not None
    monkeypatch.setattr(Measurer, "measure", lambda self, what: Measured(MIB, 0.1, without_graph=1))
    assert it.point(what) is None


# ---------------------------------------------------------------------- one configuration


def test_adapters_rows_and_ranks_cost_what_they_do(base: Base) -> None:
    it = measurer(base)
    it.measure(Configuration(1, 1, 16))  # what is made once for all, such as rotation tables
    first = it.measure(Configuration(1, 1, 32))
    again = it.measure(Configuration(1, 1, 32))
    assert first is not None
    assert again is not None
    assert again.peak_bytes == first.peak_bytes > resident(base)
    assert first.step_seconds > 0
    peaks = [first.peak_bytes]
    for larger in (
        Configuration(1, 2, 32),
        Configuration(2, 2, 32),
        Configuration(2, 2, 32, r=32),
    ):
        measured = it.measure(larger)
        assert measured is not None
        peaks.append(measured.peak_bytes)
    assert peaks == sorted(set(peaks))


@pytest.mark.parametrize("phase", ["queue_evaluation", "update"])
def test_evaluation_and_update_are_in_the_peak(
    base: Base, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """By making each of them greedy."""
    what = Configuration(1, 1, 16)
    plain = measurer(base).measure(what)
    whose: type = Engine if phase == "queue_evaluation" else Rounds
    real = getattr(whose, phase)

    def greedy(*arguments: object, **options: object) -> object:
        assert torch.zeros(64 * MIB, dtype=torch.uint8).numel()
        return real(*arguments, **options)

    monkeypatch.setattr(whose, phase, greedy)
    measured = measurer(base).measure(what)
    assert plain is not None
    assert measured is not None
    assert measured.peak_bytes > plain.peak_bytes + 56 * MIB


def test_out_of_memory_is_an_answer_and_leaves_nothing(base: Base) -> None:
    large, small = Configuration(2, 4, 32), Configuration(1, 1, 16)
    free = measurer(base)
    peaks = [free.measure(what) for what in (small, large)]
    assert peaks[0] is not None
    assert peaks[1] is not None
    tight = measurer(base, peaks[1].peak_bytes - 1)
    first = tight.measure(small)
    assert tight.measure(large) is None
    after = tight.measure(small)
    assert after is not None
    assert first is not None
    assert after.peak_bytes <= first.peak_bytes < peaks[1].peak_bytes
    exact = measurer(base, peaks[1].peak_bytes)
    assert exact.measure(large) is not None, "the control: one byte more and it fits"
    assert tight.point(large) is None


def test_another_error_is_no_answer(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> object:
        raise RuntimeError("a kernel is broken")

    monkeypatch.setattr(Engine, "queue_evaluation", broken)
    with pytest.raises(RuntimeError, match="a kernel is broken"):
        measurer(base).measure(Configuration(1, 1, 16))


# ---------------------------------------------------------------------- the largest batch


class Scripted(Measurer):
    """Fits up to `rows` rows of one adapter."""

    def __init__(self, base: Base, rows: int) -> None:
        super().__init__(base, new_backend(), CountingMeter())
        self.rows = rows
        self.tried: list[int] = []

    def measure(self, what: Configuration) -> Measured | None:
        self.tried.append(what.batch)
        return Measured(10**9 + 1000 * what.tokens, 0.1) if what.adapters * what.batch <= self.rows else None


@pytest.mark.parametrize("most", [1, 2, 7, 64])
def test_bisection_finds_what_trying_all_would(base: Base, most: int) -> None:
    for rows in range(most + 2):
        it = Scripted(base, rows)
        assert it.largest_batch(16, most) == min(rows, most)
        assert len(it.tried) <= 1 + most.bit_length()
        assert len(set(it.tried)) == len(it.tried)


def test_what_does_not_fit_is_left_out_and_too_little_is_said(base: Base) -> None:
    found = measure_memory(Scripted(base, 8), KEY, max_tokens=1024, max_length=64)
    assert found.largest_batch == 8
    assert max(point.load.tokens for point in found.points) == 8 * 64
    with pytest.raises(GshareError, match="not even one row of 64 tokens fits; reserve more"):
        measure_memory(Scripted(base, 0), KEY, max_tokens=1024, max_length=64)
    with pytest.raises(GshareError, match="1 configurations were measured, a model needs 5"):
        measure_memory(Scripted(base, 1), KEY, max_tokens=1024, max_length=64)


# ---------------------------------------------------------------------- the model of the real engine


def test_unseen_mixed_adapters_with_ragged_rows_are_foreseen(base: Base, profile: MemoryProfile) -> None:
    assert profile.memory.worst_error < 0.05
    assert profile.memory.r2 > 0.99
    draw = np.random.default_rng(0)
    it = measurer(base)
    for _ in range(4):
        specs, rows = mixed(draw)
        lengths = [len(row.tokens) for own in rows for row in own]
        measured = it.measure_rows(specs, rows)
        assert measured is not None
        load = it.load(specs, lengths)
        assert profile.reaches(load)
        assert profile.memory.predict(load) == pytest.approx(measured.peak_bytes, rel=0.05)
        assert profile.memory.bound(load) >= measured.peak_bytes


def mixed(draw: np.random.Generator) -> tuple[list[AdapterSpec], list[list[Row]]]:
    specs, rows = [], []
    for number in range(int(draw.integers(1, 5))):
        r = int(draw.integers(4, 33))
        specs.append(
            AdapterSpec(
                name=f"unseen-{number}",
                data="d",
                output_dir="o",
                r=r,
                lora_alpha=2.0 * r,
                optim="adamw_8bit" if draw.integers(2) else "adamw",
                seed=number,
            )
        )
        rows.append(
            [
                Row(draw.integers(0, VOCABULARY, length).astype(np.int32), np.ones(length, dtype=bool), i)
                for i, length in enumerate(draw.integers(48, 65, int(draw.integers(1, 4))).tolist())
            ]
        )
    return specs, rows


def test_a_model_of_tokens_alone_would_miss_them(base: Base, profile: MemoryProfile) -> None:
    """Negative control: ALTO's two terms do not see ranks, and here that shows."""
    from gshare.agent.jobs.memory_model import fit_terms

    loads = [point.load for point in profile.points]
    peaks = [float(point.peak_bytes) for point in profile.points]
    plain = fit_terms(loads, peaks, ("constant", "tokens"), arena=False)
    assert plain is not None
    assert plain.worst_error > 0.1 > 2 * profile.memory.worst_error


# ---------------------------------------------------------------------- the benchmark


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "benchmarks" / "memory_model.py"
    spec = importlib.util.spec_from_file_location("memory_model_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("trust", "passes"), [(1.0, True), (0.6, False)])
def test_admissions_by_the_model_never_run_out_and_by_less_they_do(
    base: Base, profile: MemoryProfile, script: ModuleType, trust: float, passes: bool
) -> None:
    """The second is the negative control: a bound that promises too much is found out."""
    bench = script.Bench(base, max_tokens=512, lengths=(48, 64))
    crowd = script.Crowd(base, seed=3, max_tokens=512, lengths=(48, 64))
    result = script.admissions(bench, profile, crowd, 5, trust)
    assert result["admitted"] == 5
    assert result["gate"] is passes
    assert (result["out_of_memory"] == 0) is passes


def test_an_admission_trains_a_second_and_smaller_shape(
    base: Base, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of the first is kept meanwhile: with one shape no pass is ever launched beside a graph."""
    bench = script.Bench(base, max_tokens=512, lengths=(48, 64))
    crowd = script.Crowd(base, seed=3, max_tokens=512, lengths=(48, 64))
    members = [crowd.member() for _ in range(3)]
    bench.measure(members)  # what is found out once
    passes: list[int] = []
    start = Rounds.start

    def noted(self: Rounds, work: list[StepWork], rates: list[float]) -> object:
        passes.append(sum(len(row.tokens) for one in work for micro in one.micro_batches for row in micro))
        return start(self, work, rates)

    monkeypatch.setattr(Rounds, "start", noted)
    total = script.tokens(members)
    assert bench.measure(members) is not None
    assert passes == [total] * 4
    passes.clear()
    assert bench.measure(members, limit=1 << 40) is not None
    first, smaller = passes[:4], passes[4:]
    assert first == [total] * 4
    assert (
        len(smaller) == 2 == len([n for n in smaller if 0 < rung(n, coarse=True) < rung(total, coarse=True)])
    )
    assert rung(smaller[0] + 1, coarse=True) == rung(total, coarse=True)
    assert bench._shorter([(Row(np.arange(5), np.ones(5, dtype=bool)),)]) == []


def test_what_is_measured_has_known_labels_and_what_is_asked_has_not(
    base: Base, script: ModuleType, profile: MemoryProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[int | None] = []

    def noted(*arguments: Any, **options: Any) -> object:
        labels.append(options.get("labels"))
        return pass_load(*arguments, **options)

    monkeypatch.setattr("gshare.agent.train.measure_memory.pass_load", noted)
    bench = script.Bench(base, max_tokens=512, lengths=(48, 64))
    members = [script.Crowd(base, seed=3, max_tokens=512, lengths=(48, 64)).member()]
    bench.predict(profile, members)
    bench.bound(profile, members, 1.0)
    assert labels == [script.tokens(members) - len(members[0].rows), None]
    labels.clear()
    assert measurer(base).point(Configuration(2, 2, 16)) is not None
    assert labels == [2 * 2 * 15]


def test_the_benchmark_compares_with_what_was_measured(
    base: Base, profile: MemoryProfile, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = script.Bench(base, max_tokens=256, lengths=(48, 64))

    def crowd() -> object:
        return script.Crowd(base, seed=1, max_tokens=256, lengths=(48, 64))

    result = script.unseen(bench, profile, crowd(), 2)
    assert result["gate"]
    assert result["worst_error"] < 0.05
    monkeypatch.setattr(bench, "predict", lambda profile, members: 1e9)
    assert not script.unseen(bench, profile, crowd(), 1)["gate"]
