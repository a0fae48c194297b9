"""Placement: score, limits, what fits nowhere; and that its lists choose as a plain search does."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import msgspec
import pytest
from gshare.agent.node.protocol import GpuInfo
from gshare.coordinator.config import GpuConfig, NodeConfig
from gshare.coordinator.facts import JobFacts
from gshare.coordinator.placement import Never, Placed, Placement
from gshare.coordinator.slots import NodeView, SlotView, view_of
from gshare.coordinator.speeds import speed_factor

sys.path.insert(0, str(Path(__file__).parent / "support"))
from cluster_model import facts, node_info


def node(name: str, *slots: SlotView, most: int | None = None, models: tuple[str, ...] = ()) -> NodeView:
    return NodeView(name, True, most, frozenset(models), slots)


def gpu(uuid: str, free: int, factor: float = 1.0, most: int | None = None) -> SlotView:
    return SlotView(uuid, factor, free, free, most)


def places(placement: Placement) -> list[tuple[str, str, str]]:
    return [(p.job, p.node, p.gpu) for p in placement.decide() if isinstance(p, Placed)]


def submit(placement: Placement, *jobs: JobFacts) -> None:
    for order, job in enumerate(jobs, start=1):
        placement.add(job, order)


def test_the_score_is_free_memory_speed_and_company() -> None:
    placement = Placement()
    placement.set_node(node("slow", gpu("s", 24_000, 0.06)))
    placement.set_node(node("fast", gpu("f", 20_000, 1.0)))
    submit(placement, *(facts(f"j{i}", base=f"base{i}") for i in range(3)))
    # 20,000 × 1.0, then 17,000 / 2 and 14,000 / 3, all above 24,000 × 0.06.
    assert places(placement) == [("j0", "fast", "f"), ("j1", "fast", "f"), ("j2", "fast", "f")]


def test_a_base_counts_once_on_a_gpu() -> None:
    placement = Placement()
    placement.set_node(node("a", gpu("g", 5000)))
    submit(placement, facts("j1"), facts("j2"), facts("other", base="other"), facts("j3"), facts("j4"))
    found = list(placement.decide())
    # 2,000 + 1,000, then 1,000 each; the other base's 3,000 do not fit, later jobs pass it.
    assert found == [
        Placed("j1", "a", "g", 3000),
        Placed("j2", "a", "g", 1000),
        Placed("j3", "a", "g", 1000),
    ]
    assert placement.waiting == 2


def test_ties_go_to_the_name_and_adapters_spread() -> None:
    placement = Placement()
    for name in ("c", "a", "b"):
        placement.set_node(node(name, gpu("g", 10_000)))
    submit(placement, *(facts(f"j{i}", base=f"base{i}") for i in range(3)))
    assert [n for _, n, _ in places(placement)] == ["a", "b", "c"]


def test_an_idle_gpu_is_preferred_to_one_that_has_the_base() -> None:
    placement = Placement()
    for name in ("a", "b", "c"):
        placement.set_node(node(name, gpu("g", 10_000)))
    submit(placement, *(facts(f"j{i}") for i in range(6)))
    assert [n for _, n, _ in places(placement)] == ["a", "b", "c", "a", "b", "c"]


def test_limits_of_gpu_and_node() -> None:
    placement = Placement()
    placement.set_node(node("a", gpu("g0", 90_000, most=1), gpu("g1", 90_000, most=5), most=3))
    submit(placement, *(facts(f"j{i}") for i in range(5)))
    where = [g for _, _, g in places(placement)]
    assert (where.count("g0"), where.count("g1"), placement.waiting) == (1, 2, 2)
    placement.vacate("j0", "a", "g0")
    assert len(places(placement)) == 1


def test_one_that_waits_is_placed_when_memory_comes_free() -> None:
    placement = Placement()
    placement.set_node(node("a", gpu("g", 20_000)._replace(free_mb=2000)))
    submit(placement, facts("j"))
    assert places(placement) == []
    placement.set_node(node("a", gpu("g", 20_000)._replace(free_mb=3000)))
    assert places(placement) == [("j", "a", "g")]


def test_memory_of_an_attempt_is_counted_until_the_node_reports_it() -> None:
    placement = Placement()
    placement.set_node(node("a", gpu("g", 90_000)._replace(free_mb=5000)))
    submit(placement, facts("j1"), facts("j2", base="other"))
    assert places(placement) == [("j1", "a", "g")]
    # Still loading: the report does not show it yet.
    placement.set_node(node("a", gpu("g", 90_000)._replace(free_mb=5000)))
    assert places(placement) == []
    placement.runs("j1", "a", "g")
    placement.set_node(node("a", gpu("g", 90_000)._replace(free_mb=3000)))
    assert places(placement) == [("j2", "a", "g")]


def test_cpu_only_nodes_take_small_models() -> None:
    placement = Placement()
    placement.set_node(node("cpu", SlotView("", 0.01, 60_000, 60_000)))
    submit(
        placement,
        facts("small", parameters=350_000_000),
        facts("large", parameters=350_000_001),
        facts("unknown", parameters=None),
    )
    decisions = list(placement.decide())
    assert decisions[0] == Placed("small", "cpu", "", 3000)
    assert {d.job: d.reason for d in decisions[1:] if isinstance(d, Never)} == {
        "large": "fits on no node: cpu: no GPU, and its model's size is 350 M: CPU-only nodes take 350 M "
        "parameters",
        "unknown": "fits on no node: cpu: no GPU, and its model's size is unknown: CPU-only nodes take 350 M "
        "parameters (submit with the path of its directory, or have it in the hub cache where you submit)",
    }


def test_a_job_that_fits_nowhere_ever_says_why_for_each_node() -> None:
    placement = Placement()
    placement.set_node(node("a", gpu("g", 2000)))
    placement.set_node(node("b", gpu("g", 90_000), most=0))
    placement.set_node(NodeView("c", False, None, frozenset(), None))  # not heard of yet
    submit(placement, facts("j"))
    assert list(placement.decide()) == []
    placement.set_node(node("c", gpu("g0", 90_000, most=0), gpu("g1", 10)))
    (never,) = placement.decide()
    assert never == Never(
        "j",
        "fits on no node: a: GPU g has 2000 MiB to give, 3000 are needed; b: max_adapters = 0; "
        "c: GPU g0 has max_adapters = 0, GPU g1 has 10 MiB to give, 3000 are needed",
    )
    assert placement.waiting == 0


def test_without_a_node_jobs_wait_until_one_is_known() -> None:
    placement = Placement()
    submit(placement, facts("j"))
    assert list(placement.decide()) == []
    placement.set_node(node("a", gpu("g", 10)))
    assert [type(d) for d in placement.decide()] == [Never]


def test_a_job_waits_while_a_node_that_could_take_it_is_away() -> None:
    placement = Placement()
    placement.set_node(node("a", gpu("g", 90_000))._replace(placeable=False))
    submit(placement, facts("j"))
    assert list(placement.decide()) == []
    placement.remove_node("a")
    placement.set_node(node("b", gpu("g", 10)))
    assert [type(d) for d in placement.decide()] == [Never]


def test_a_model_that_cannot_be_sent_goes_where_it_is() -> None:
    placement = Placement()
    placement.set_node(node("a", gpu("g", 90_000)))
    placement.set_node(node("b", gpu("g", 10_000), models=("m",)))
    submit(placement, facts("j", model="m", sendable=False), facts("k", model="n", sendable=False))
    placed, never = placement.decide()
    assert placed == Placed("j", "b", "g", 3000)
    assert "does not name n" in never.reason  # type: ignore[union-attr]


def test_an_avoided_node_is_avoided() -> None:
    placement = Placement()
    placement.set_node(node("a", gpu("g", 90_000)))
    placement.set_node(node("b", gpu("g", 10_000)))
    placement.add(facts("j"), 1, avoid=("a",))
    assert places(placement) == [("j", "b", "g")]
    assert placement.can_ever(facts("k"), ("a",))
    assert not placement.can_ever(facts("k"), ("a", "b"))


def test_what_a_node_says_and_its_configuration() -> None:
    info = node_info(gpus=("x", "y"))
    (x,) = (
        view_of(
            NodeConfig(name="n", gpus=(GpuConfig(uuid="x", vram_mb=10_000, max_adapters=3),)),
            info,
            placeable=True,
        ).slots
        or ()
    )
    assert x == SlotView("x", 1.0, 8500, 20_400, 3)
    assert [slot.gpu for slot in view_of(NodeConfig(name="n"), info, placeable=True).slots or ()] == [
        "x",
        "y",
    ]
    (cpu,) = view_of(NodeConfig(name="n", gpus=()), info, placeable=True).slots or ()
    assert cpu == SlotView("", 0.01, 38_400, 60_000)
    unified = GpuInfo(uuid="o", name="Orin (nvgpu)", memory_type="unified", total_mb=30_000, problem="hot")
    (orin,) = (
        view_of(NodeConfig(name="n"), msgspec.structs.replace(info, gpus=[unified]), placeable=True).slots
        or ()
    )
    assert orin == SlotView("o", 0.06, 18_000, None, None, usable=False)
    assert view_of(NodeConfig(name="n"), None, placeable=False).slots is None


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("NVIDIA GeForce RTX 4090", 1.0),
        ("Orin (nvgpu)", 0.06),
        ("NVIDIA H100 PCIe", 4.576),
        ("NVIDIA H100 80GB HBM3", 5.989),
        ("NVIDIA A100-SXM4-80GB", 1.889),
        ("NVIDIA A10", 0.757),
        ("a GPU of next year", 0.5),
    ],
)
def test_speeds(name: str, factor: float) -> None:
    assert speed_factor(name) == factor


class Plain:
    """The same by a search over everything, for one job at a time."""

    def __init__(self, nodes: list[NodeView]) -> None:
        self.nodes = nodes
        self.held: dict[tuple[str, str], list[JobFacts]] = {}

    def place(self, job: JobFacts) -> tuple[str, str, str] | None:
        best = None
        for view in self.nodes:
            on_node = sum(len(jobs) for (name, _), jobs in self.held.items() if name == view.name)
            for slot in view.slots or ():
                here = self.held.get((view.name, slot.gpu), [])
                used = 0
                for base in {other.base for other in here}:
                    same = [other for other in here if other.base == base]
                    used += same[0].base_mb + sum(other.adapter_mb for other in same)
                free = (slot.capacity_mb or 0) - used
                joins = any(other.base == job.base for other in here)
                need = job.adapter_mb + (0 if joins else job.base_mb)
                full = slot.max_adapters is not None and len(here) >= slot.max_adapters
                if full or (view.max_adapters is not None and on_node >= view.max_adapters) or need > free:
                    continue
                score = free / job.adapter_mb * slot.factor / (1 + len(here))
                rank = (-score, view.name, slot.gpu)
                best = min(best, rank) if best else rank
        if best is None:
            return None
        self.held.setdefault(best[1:], []).append(job)
        return job.name, best[1], best[2]


def test_the_lists_choose_as_a_plain_search() -> None:
    placed = 0
    for seed in range(60):
        dice = random.Random(seed)
        views = [
            node(
                f"n{i}",
                *(
                    gpu(
                        f"g{k}",
                        dice.randrange(4, 40) * 997,
                        dice.choice((0.06, 0.4, 1.0, 6.0)),
                        dice.choice((None, 3)),
                    )
                    for k in range(dice.choice((1, 1, 2)))
                ),
                most=dice.choice((None, None, 4)),
            )
            for i in range(6)
        ]
        placement, plain = Placement(), Plain(views)
        for view in views:
            placement.set_node(view)
        for number in range(40):
            base, base_mb = dice.choice((("x", 2003), ("y", 5009), ("z", 9001)))
            # A size of its own each, so that no class answers for another.
            job = facts(
                f"j{number}", base=base, base_mb=base_mb, adapter_mb=dice.randrange(300, 3000) * 7 + number
            )
            placement.add(job, number + 1)
            found = places(placement)
            assert found == [expected for expected in [plain.place(job)] if expected], (seed, number)
            placed += len(found)
    assert placed > 500
