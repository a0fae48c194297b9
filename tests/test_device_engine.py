"""The CUDA engine: against the reference engine, solo against packed, padding, graphs where there is a GPU.

Without a GPU the kernels run in Triton's interpreter, on CPU tensors, so the model is as small as they come.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
from gshare.agent.base.config import ModelConfig
from gshare.agent.base.decoder import Decoder
from gshare.agent.base.load import load_base
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.base.weights import Base
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.train.adapter import Adapter
from gshare.agent.train.device_engine import DeviceEngine
from gshare.agent.train.device_pass import NOBODY, PassBuffers
from gshare.agent.train.engine import Engine
from gshare.agent.train.part import Part, Row
from gshare.agent.train.rounds import Rounds
from gshare.kernels import gemm
from gshare.kernels.reference_backend import ReferenceBackend
from gshare.kernels.triton_backend import TritonBackend

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    path = make_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), "qwen2", num_layers=2, hidden_size=64, intermediate_size=96
    )
    return load_base(Path(path), base_dtype="fp32", device=DEVICE)


def spec(name: str, **changes: object) -> AdapterSpec:
    values: dict[str, object] = {"name": name, "data": "d", "output_dir": name, "r": 4, "seed": len(name)}
    values |= changes
    values.setdefault("lora_alpha", 2.0 * float(str(values["r"])))
    return AdapterSpec(**values)  # type: ignore[arg-type]


def row(length: int, seed: int) -> Row:
    draw = np.random.default_rng(seed)
    trained = draw.random(length) < 0.7
    trained[-1] = True
    return Row(draw.integers(3, 200, length).astype(np.int32), trained)


# In the interpreter a dot is numpy's, whose bits depend on the tile's width: there all ranks have one cap.
WIDE, WIDER = (9, 16) if CUDA else (7, 8)
#: Name, spec and lengths of the rows of each adapter.
JOBS: dict[str, tuple[AdapterSpec, tuple[int, ...]]] = {
    "a": (spec("a"), (5, 12)),
    "bb": (spec("bb", r=WIDE, target_modules=("q_proj", "v_proj", "down_proj")), (33,)),
    "ccc": (spec("ccc", r=WIDER), (70, 3)),
}


def new_adapter(engine: Engine, its_spec: AdapterSpec) -> Adapter:
    name = its_spec.name
    adapter = engine.new_adapter(name, its_spec)
    for key, shape in engine.arena.matrices(name):  # B too: at zero, dA would be zero
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(hash_of(key)))
        engine.arena.view("params", name, key).copy_(noise * 0.05)
    engine.arena.publish(name)
    return adapter


def part(engine: Engine, name: str) -> Part:
    adapter_spec, lengths = JOBS[name]
    adapter = new_adapter(engine, adapter_spec)
    rows = [row(length, 10 * len(name) + i) for i, length in enumerate(lengths)]
    return Part(adapter, rows, 0, sum(r.label_tokens for r in rows))


def hash_of(key: object) -> int:
    return sum(str(key).encode())


def gradients(engine: Engine, adapter: Adapter) -> torch.Tensor:
    return engine.arena.flat("grads", adapter.name).clone().cpu()


#: Losses of each part, gradients of each adapter.
Outcome = tuple[list[list[float]], dict[str, torch.Tensor]]


def run(base: Base, names: Sequence[str]) -> Outcome:
    engine = DeviceEngine(base, TritonBackend())
    parts = [part(engine, name) for name in names]
    losses = engine.forward_backward(parts)
    return losses, {p.adapter.name: gradients(engine, p.adapter) for p in parts}


@pytest.fixture(scope="module")
def packed(base: Base) -> Outcome:
    return run(base, list(JOBS))


def test_losses_and_gradients_are_the_reference_engine_s(base: Base, packed: Outcome) -> None:
    losses, grads = packed
    reference = Engine(base, ReferenceBackend())
    parts = [part(reference, name) for name in JOBS]
    for ours, theirs in zip(losses, reference.forward_backward(parts), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    for p in parts:
        expected = gradients(reference, p.adapter)
        assert expected.norm() > 0.01
        assert (grads[p.adapter.name] - expected).norm() <= 1e-4 * expected.norm()


def test_the_head_s_products_are_checked_before_a_pass_takes_memory(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what the check takes, up to twice the logits, is on top of everything that the pass keeps."""
    order: list[str] = []

    def noted(owner: object, name: str, what: Callable[..., str]) -> None:
        real = getattr(owner, name)

        def note(*arguments: object, **options: object) -> object:
            order.append(what(*arguments))
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, note)

    head = base.lm_head.dense().shape
    noted(gemm, "choose_plan", lambda kind, product, x, w: f"check {kind}" * (w.shape == head))
    noted(Decoder, "forward", lambda *arguments: "forward")
    run(base, ["a"])
    checked = [what for what in order if what]
    assert checked == ["check linear", "check linear_dx", "forward"]


def test_the_head_s_products_are_checked_for_the_rows_that_it_will_have(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels are few where a prompt is long: 64 rows of 128."""

    class Enough(Exception):
        pass

    asked: list[tuple[int, bool]] = []

    def note(self: TritonBackend, rows: int, head: torch.Tensor, *, training: bool) -> None:
        asked.append((rows, training))
        raise Enough

    monkeypatch.setattr(TritonBackend, "plan_cross_entropy", note)
    engine = DeviceEngine(base, TritonBackend())
    tokens = np.full(100, 5, dtype=np.int32)
    few = Part(new_adapter(engine, JOBS["a"][0]), [Row(tokens, np.arange(100) >= 90)], 0, 10)
    for queue in (engine.queue, engine.queue_evaluation):
        with pytest.raises(Enough):
            queue([few])
    assert asked == [(64, True), (64, False)]


def test_alone_and_packed_have_the_same_bits(base: Base, packed: Outcome) -> None:
    losses, grads = packed
    for index, name in enumerate(JOBS):
        alone_losses, alone = run(base, [name])
        assert alone_losses[0] == losses[index]
        assert torch.equal(alone[name], grads[name])


def test_dropout_has_the_reference_engine_s_masks(base: Base) -> None:
    """Beside an adapter that drops nothing; keyed by step and sample, not by the place in the pass."""

    def run_on(engine: Engine, step: int, samples: tuple[int, int]) -> tuple[list[list[float]], torch.Tensor]:
        dropping = new_adapter(engine, spec("d", lora_dropout=0.4, layers_to_transform=(1,)))
        plain = new_adapter(engine, spec("p", target_modules=("q_proj",), layers_to_transform=(1,)))
        rows = [replace(row(length, length), sample=s) for length, s in zip((9, 7), samples, strict=True)]
        parts = [Part(plain, [row(5, 1)], step, 3), Part(dropping, rows, step, 11)]
        return engine.forward_backward(parts), gradients(engine, dropping)

    losses, grads = run_on(DeviceEngine(base, TritonBackend()), 3, (2, 5))
    expected_losses, expected = run_on(Engine(base, ReferenceBackend()), 3, (2, 5))
    for ours, theirs in zip(losses, expected_losses, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert (grads - expected).norm() <= 1e-4 * expected.norm()
    for step, samples in ((4, (2, 5)), (3, (5, 2))):  # negative controls: other masks
        other = run_on(Engine(base, ReferenceBackend()), step, samples)[1]
        assert (grads - other).norm() > 0.1 * expected.norm()


def test_micro_batches_start_fresh_and_add_up(base: Base) -> None:
    """4 = 2 + 2 with no gradient zeroed between rounds: what an earlier round left (here NaN) is not read."""
    engine = DeviceEngine(base, TritonBackend())
    few = spec("a", target_modules=("v_proj", "up_proj"), layers_to_transform=(1,))
    adapter = new_adapter(engine, few)
    rows = [row(length, length) for length in (5, 12, 3, 9)]
    whole = Part(adapter, rows, 0, sum(r.label_tokens for r in rows))

    def in_passes(*cuts: Sequence[Row]) -> torch.Tensor:
        for key, _ in engine.arena.matrices("a"):
            engine.arena.view("grads", "a", key).fill_(torch.nan)
        engine.optimizer.begin([adapter])
        for cut in cuts:
            engine.queue([Part(adapter, cut, 0, whole.label_tokens)]).losses()
        return gradients(engine, adapter)

    expected = in_passes(rows)
    assert expected.isfinite().all()
    assert expected.norm() > 0
    assert torch.equal(in_passes(rows[:2], rows[2:]), expected)
    with pytest.MonkeyPatch.context() as patch:  # negative control: added to what is there
        patch.setattr(engine.optimizer, "fresh", lambda name: False)
        assert in_passes(rows).isnan().any()


# ------------------------------------------------------------------ what the host lays out, without a launch

Uploads = list[dict[str, torch.Tensor]]


def host_engine(base: Base, monkeypatch: pytest.MonkeyPatch) -> tuple[DeviceEngine, Uploads]:
    """An engine that launches nothing (its n-th pass has n as every loss), and what was uploaded to each."""
    engine, uploads = DeviceEngine(base, TritonBackend()), []

    def launch(buffers: PassBuffers, training: bool) -> torch.Tensor:
        uploads.append({name: table.clone() for name, table in buffers.device.items()})
        return torch.full((buffers.shape.labels,), float(len(uploads)), device=DEVICE)

    engine.graphs = False
    monkeypatch.setattr(engine, "_launch", launch)
    return engine, uploads


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_tables_say_what_the_rows_are(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, uploads = host_engine(base, monkeypatch)
    parts = [part(engine, name) for name in JOBS]
    silent = Row(np.arange(3, 9, dtype=np.int32), np.zeros(6, dtype=bool))
    parts[0] = replace(parts[0], rows=[silent, *parts[0].rows])
    engine.optimizer.begin([p.adapter for p in parts[::-1]])
    losses = engine.queue(parts).losses()
    found = {name: table.tolist() for name, table in uploads[0].items()}
    at, label = 0, 0
    for i, p in enumerate(parts):
        assert len(losses[i]) == sum(r.label_tokens for r in p.rows)
        for r in p.rows:
            length = len(r.tokens)
            assert found["tokens"][at : at + length] == r.tokens.tolist()
            assert found["position"][at : at + length] == list(range(length))
            for t in range(1, length):
                if r.trained[t]:
                    assert found["read"][label] == found["write"][label] == at + t - 1
                    assert found["targets"][label] == r.tokens[t]
                    assert found["scale"][label] == float(np.float32(1 / p.label_tokens))
                    assert found["owner"][label] == 2 - i
                    label += 1
            at += length
    for name, filler in {"read": 0, "write": len(found["tokens"]), "targets": -1, "scale": 0.0}.items():
        assert set(found[name][label:]) == {filler}, name
    assert set(found["owner"][label:]) == {NOBODY}
    assert found["fresh"] == [1, 1, 1, 0]


def test_a_prepared_pass_uploads_what_a_direct_one_does(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, uploads = host_engine(base, monkeypatch)
    parts = [part(engine, name) for name in JOBS]
    engine.queue(parts)
    prepared = engine.prepare(parts)
    engine.prepare(parts, training=False)  # another shape's room
    monkeypatch.setattr(engine, "prepare", None)  # it is not laid out again
    engine.queue(prepared)
    assert same(uploads[0], uploads[1])


def test_a_prepared_pass_that_is_no_longer_right_is_laid_out_again(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, uploads = host_engine(base, monkeypatch)
    first = replace(part(engine, "a"), rows=[row(9, 1)])
    second = replace(first, rows=[row(9, 2)])
    engine.queue([first])
    expected = uploads[-1]

    def after(what: Callable[[], object]) -> dict[str, torch.Tensor]:
        prepared = engine.prepare([first])
        what()
        engine.queue(prepared)
        return uploads[-1]

    assert same(after(lambda: engine.prepare([second])), expected)
    assert same(after(lambda: engine.queue([second])), expected)
    assert same(after(lambda: engine.evaluate([first])), expected)
    engine.queue(used := engine.prepare([first]))
    engine.queue([second])
    engine.queue(used)
    assert same(uploads[-1], expected)
    engine.new_adapter("other", spec("other"))
    assert engine._is_stale(engine.prepare([first])) is False
    prepared = engine.prepare([first])
    engine.arena.free("other")
    assert engine._is_stale(prepared), "slots may have moved"
    prepared = engine.prepare([first])
    monkeypatch.setattr(engine, "checkpointing", True)
    assert engine._is_stale(prepared), "it would be another shape"
    monkeypatch.setattr(engine, "checkpointing", False)
    monkeypatch.setattr(first.adapter, "spec", spec("a", lora_alpha=99.0))
    prepared, first.adapter.spec = engine.prepare([first]), spec("a")
    engine.queue(prepared)
    assert same(uploads[-1], expected)
    monkeypatch.setattr(engine, "_is_stale", lambda prepared: False)  # negative control
    assert not same(after(lambda: engine.prepare([second])), expected)


def test_a_pass_is_fresh_once_a_round(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, uploads = host_engine(base, monkeypatch)
    a, b, c = (part(engine, name) for name in JOBS)
    engine.optimizer.begin([a.adapter, b.adapter])
    early = engine.prepare([a, b])
    for parts, expected in (([a], [1]), ([a, b], [0, 1]), ([a, b], [0, 0]), ([c], [0])):
        engine.evaluate(parts)
        engine.queue(parts)
        assert uploads[-1]["fresh"].tolist() == expected
    engine.optimizer.begin([b.adapter, a.adapter])
    engine.queue(early)  # prepared in the round before: flags and seats are this one's
    assert uploads[-1]["fresh"].tolist() == [1, 1]
    assert uploads[-1]["owner"].tolist()[0] == 1


def test_losses_may_be_asked_for_late_and_in_any_order(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = host_engine(base, monkeypatch)
    a = part(engine, "a")
    pending = [engine.queue([a]) for _ in range(4)]
    dropped = engine.queue([a])
    del dropped
    for index in (2, 0, 3):
        assert set(pending[index].losses()[0]) == {index + 1.0}
    assert set(engine.queue([a]).losses()[0]) == {6.0}
    assert set(pending[1].losses()[0]) == {2.0}
    assert set(pending[0].losses()[0]) == {1.0}


class StrawGraph:
    """In a CUDA graph's place: what is captured is run at once, and a replay runs nothing."""

    fails = 0  # so many captures from here on
    captures = 0
    mode = ""

    pools: ClassVar[dict[str, weakref.WeakSet[StrawGraph]]] = {}

    def capture_begin(self, *pool: str, capture_error_mode: str) -> None:
        if pool:  # torch asserts so: a pool of which no graph is left is gone
            assert len(StrawGraph.pools[pool[0]]) > 0
        self._pool = pool[0] if pool else f"pool {len(StrawGraph.pools)}"
        StrawGraph.pools.setdefault(self._pool, weakref.WeakSet()).add(self)
        StrawGraph.captures += 1
        StrawGraph.mode = capture_error_mode

    def capture_end(self) -> None:
        if StrawGraph.fails:
            StrawGraph.fails -= 1
            raise torch.OutOfMemoryError("no room for a graph")

    def pool(self) -> str:
        return self._pool

    def replay(self) -> None:
        pass


@pytest.fixture
def straw(monkeypatch: pytest.MonkeyPatch) -> type[StrawGraph]:
    if CUDA:
        pytest.skip("stands for CUDA's graphs where there are none; test_graph_capture.py has real ones")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StrawGraph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(StrawGraph, "fails", 0)
    monkeypatch.setattr(StrawGraph, "captures", 0)
    monkeypatch.setattr(StrawGraph, "pools", {})
    return StrawGraph


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_pass_that_has_no_memory_for_its_graph_is_launched(
    base: Base, straw: type[StrawGraph], fails: int
) -> None:
    """Tried twice for a shape, the second time with torch's cache empty; the bits are those without graphs.
    Otherwise it is captured: the control. Other threads may use the device meanwhile."""
    straw.fails = fails
    engine = DeviceEngine(base, TritonBackend())
    engine.graphs = True
    parts = [part(engine, "a")]
    alone = [engine.forward_backward(parts) for _ in range(3)]
    assert straw.captures == (1 if fails == 0 else 2)
    assert straw.mode == "thread_local"
    assert engine.replays == (0 if fails == 2 else 2)
    if fails == 2:
        assert alone[0] == alone[1] == alone[2] == run(base, ["a"])[0]


def test_graphs_are_captured_again_after_all_of_them_went(base: Base, straw: type[StrawGraph]) -> None:
    """An arena that grows moves what every graph has baked in. All share one pool, before and after."""
    engine = DeviceEngine(base, TritonBackend())
    engine.graphs = True
    parts = [part(engine, "a")]
    before, *_ = (engine.forward_backward(parts) for _ in range(3))
    assert (straw.captures, engine.replays) == (1, 2)
    engine.new_adapter("other", spec("other", r=64))
    gc.collect()
    assert [engine.forward_backward(parts) for _ in range(3)] == [before] * 3
    assert (straw.captures, engine.replays) == (2, 4)
    assert len(straw.pools) == 1


def test_graphs_are_given_up_for_memory(base: Base, straw: type[StrawGraph]) -> None:
    """Those of half as many tokens come back, larger ones do not; a second time there is nothing to give
    up."""
    engine = DeviceEngine(base, TritonBackend())
    engine.graphs = True
    long = [row(100, 1)]
    large = [Part(new_adapter(engine, spec("long")), long, 0, long[0].label_tokens)]
    small = [part(engine, "a")]
    tokens = [engine.prepare(parts).key[0].tokens for parts in (small, large)]
    assert 2 * tokens[0] <= tokens[1]
    rounds = Rounds(engine, 1000)
    assert not engine.give_up_graphs()
    assert engine.without_graph == 0
    before = [engine.forward_backward(parts) for parts in (large, small) for _ in range(2)]
    assert straw.captures == 2
    assert rounds._freed_spare()
    assert not rounds._freed_spare()
    after = [engine.forward_backward(parts) for parts in (large, small) for _ in range(3)]
    assert straw.captures == 3
    assert engine.without_graph == 2
    assert after[:3] == [before[0]] * 3
    assert after[3:] == [before[2]] * 3


@pytest.mark.parametrize(("parameters", "tokens"), [(0, 128), (10**10, 64)])
def test_small_models_have_fewer_shapes(
    base: Base, monkeypatch: pytest.MonkeyPatch, parameters: int, tokens: int
) -> None:
    """Of rows of 290 tokens: a multiple of 128 there, of 64 for a large one; the rows are the same."""
    monkeypatch.setattr(ModelConfig, "parameter_count", lambda config: parameters)
    engine = DeviceEngine(base, TritonBackend())
    rows = [row(290, 1)]
    prepared = engine.prepare([Part(new_adapter(engine, spec("a")), rows, 0, rows[0].label_tokens)])
    shape = prepared.key[0]
    assert shape.tokens == -(-290 // tokens) * tokens
    assert sum(prepared.counts) <= shape.labels <= shape.tokens
