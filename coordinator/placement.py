"""Which job goes to which slot: pure and incremental.

    score = (free memory / adapter's memory) × speed factor × 1 / (1 + adapters there)

The adapter's memory is what it adds where its base runs already, so an idle GPU is preferred to a shared one
of its kind; whether it fits counts the base too where it does not run yet. Jobs are taken in the order of
their submission; one that fits nowhere now waits, and later ones that fit may pass it. The same jobs, nodes
and order give the same places: ties go to the name of node and GPU.

So that a decision stays cheap with thousands of slots and jobs: slots stand in a list sorted by
`free × factor / (1 + adapters)`, the score but for a factor that is the job's own: the first that fits is the
best. Waiting jobs with the same needs form a class, looked at once. No waiting job fits on any slot as it is,
so only slots that got better are looked at again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gshare.coordinator.facts import JobFacts
from gshare.coordinator.slots import NodeView, Slot, SlotView

#: CPU-only nodes take models up to this size (architecture, *Coordinator*).
CPU_MAX_PARAMETERS = 350_000_000
#: Nodes that a message lists one by one.
_NODES_SHOWN = 8

SlotKey = tuple[str, str]  # node, GPU


class Placed(NamedTuple):
    job: str
    node: str
    gpu: str
    budget_mb: int  # what the job adds there


class Never(NamedTuple):
    """No node that is known can ever run this job."""

    job: str
    reason: str


class _Needs(NamedTuple):
    """What makes two jobs the same to placement."""

    base: str
    base_mb: int
    adapter_mb: int
    small: bool  # small enough for a CPU
    parameters: int | None
    only_model: str  # only nodes that have it; empty: any
    early_exit: bool  # only nodes whose agent knows it
    avoid: frozenset[str]


@dataclass
class _Node:
    view: NodeView
    slots: dict[str, Slot] = field(default_factory=dict)
    adapters: int = 0
    #: Classes of waiting jobs that are not hopeless because of this node alone, as far as was looked.
    hopes: set[_Needs] = field(default_factory=set)

    @property
    def full(self) -> bool:
        return self.view.max_adapters is not None and self.adapters >= self.view.max_adapters


def needs_of(facts: JobFacts, avoid: tuple[str, ...] = ()) -> _Needs:
    small = facts.parameters is not None and facts.parameters <= CPU_MAX_PARAMETERS
    only = "" if facts.sendable else facts.model
    return _Needs(
        facts.base,
        facts.base_mb,
        # A job of unknown size counts as 1 MiB: it goes where most is free, and the node judges it.
        max(1, facts.adapter_mb),
        small,
        facts.parameters,
        only,
        facts.early_exit,
        frozenset(avoid),
    )


class Placement:
    """Nodes, what is on them, and who waits. Changes are taken in; `decide` says what follows from them."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._ranked: list[tuple[float, str, str]] = []  # (-worth, node, gpu)
        self._classes: dict[_Needs, list[tuple[int, str]]] = {}  # members (order, job), sorted
        self._heads: list[tuple[int, _Needs]] = []  # the first of each class, sorted by order
        self._waiting: dict[str, tuple[int, _Needs]] = {}
        self._better: dict[SlotKey, None] = {}  # slots to look at again
        self._unseen: list[tuple[int, str]] = []  # jobs that no slot was looked at for, sorted
        self._unseen_classes: set[_Needs] = set()
        self._doubtful: dict[_Needs, None] = {}  # classes to be judged again

    # --- nodes

    def set_node(self, view: NodeView) -> None:
        """A node's newest view. Slots that it no longer has keep what is on them until that is taken off."""
        node = self._nodes.get(view.name)
        if node is None:
            if not self._nodes:  # with no node at all, nothing was judged
                self._doubtful = dict.fromkeys(self._classes)
            node = self._nodes[view.name] = _Node(view)
        hopeful = node.view.slots is None or _capacities(node.view) != _capacities(view)
        node.view = view
        if hopeful:
            self._doubt(node)
        views = {slot.gpu: slot for slot in view.slots or ()}
        for gpu, slot in list(node.slots.items()):
            if gpu not in views:
                views[gpu] = slot.view._replace(usable=False)
        for gpu, slot_view in views.items():
            slot = node.slots.get(gpu)
            if slot is None:
                slot = node.slots[gpu] = Slot(view.name, slot_view)
            before = (slot.available_mb, slot.listed)
            self._unrank(slot)
            slot.reported(slot_view)
            self._rank(node, slot)
            if slot.listed and (slot.available_mb > before[0] or not before[1]):
                self._better[view.name, gpu] = None

    def remove_node(self, name: str) -> None:
        """It and what is on it are gone."""
        node = self._nodes.pop(name, None)
        if node is not None:
            for slot in node.slots.values():
                self._unrank(slot)
            self._doubt(node)

    def occupy(self, job: str, base: str, node: str, gpu: str, budget_mb: int, *, running: bool) -> None:
        """An attempt is on that slot, whether or not it would have been placed there now."""
        owner = self._nodes[node]
        slot = owner.slots.get(gpu)
        if slot is None:
            slot = owner.slots[gpu] = Slot(node, SlotView(gpu, 0.0, None, None, None, usable=False))
        self._unrank_node(owner)
        slot.put(job, base, budget_mb, running)
        owner.adapters += 1
        self._rank_node(owner)
        if slot.bases[base] == 1:  # others of its base need less here from now on
            self._better[node, gpu] = None

    def runs(self, job: str, node: str, gpu: str) -> None:
        """Its memory is reserved: the node's next report has it."""
        slot = self._slot(node, gpu)
        if slot is not None and job in slot.held:
            slot.held[job].running = True

    def vacate(self, job: str, node: str, gpu: str) -> None:
        owner, slot = self._nodes.get(node), self._slot(node, gpu)
        if owner is None or slot is None or job not in slot.held:
            return
        was_full = owner.full
        self._unrank_node(owner)
        slot.take(job)
        owner.adapters -= 1
        self._rank_node(owner)
        for other in owner.slots if was_full else (gpu,):
            self._better[node, other] = None

    # --- jobs

    def add(self, facts: JobFacts, order: int, avoid: tuple[str, ...] = ()) -> None:
        """The job waits from now on."""
        if facts.name in self._waiting:
            return
        needs = needs_of(facts, avoid)
        self._waiting[facts.name] = (order, needs)
        members = self._classes.setdefault(needs, [])
        # Where others of its class wait, no slot is good enough for this one either.
        if not members or needs in self._unseen_classes:
            insort(self._unseen, (order, facts.name))
            self._unseen_classes.add(needs)
        self._change_members(needs, members, lambda: insort(members, (order, facts.name)))

    def drop(self, job: str) -> None:
        """The job waits no longer."""
        found = self._waiting.pop(job, None)
        if found is None:
            return
        order, needs = found
        members = self._classes[needs]
        self._change_members(needs, members, lambda: members.remove((order, job)))
        if not members:
            del self._classes[needs]
            self._doubtful.pop(needs, None)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def look_again(self) -> None:
        """All waiting jobs as if they were new: after a time in which nothing was decided."""
        self._unseen = sorted((order, job) for job, (order, _) in self._waiting.items())
        self._unseen_classes = set(self._classes)
        self._better.clear()

    def can_ever(self, facts: JobFacts, avoid: tuple[str, ...] = ()) -> bool:
        """Whether a node outside `avoid` could run the job, empty and well."""
        needs = needs_of(facts, avoid)
        return any(_why_never(needs, node) is None for node in self._nodes.values())

    # --- decisions

    def decide(self) -> Iterator[Placed | Never]:
        """What follows from the changes since the last call; each `Placed` is occupied when it is yielded."""
        while self._unseen or self._better or self._doubtful:
            while self._unseen:
                order, job = self._unseen.pop(0)
                if self._waiting.get(job, (None,))[0] == order:
                    yield from self._find_place(job)
            self._unseen_classes.clear()
            better, self._better = self._better, {}
            yield from self._fill(list(better))
            doubtful, self._doubtful = self._doubtful, {}
            for needs in doubtful:
                yield from self._judge(needs)

    def _find_place(self, job: str) -> Iterator[Placed | Never]:
        """The best slot of all for one job."""
        needs = self._waiting[job][1]
        for _, node, gpu in self._ranked:
            owner = self._nodes[node]
            mb = _fits(needs, owner, owner.slots[gpu])
            if mb is not None:
                yield self._place(job, needs, node, gpu, mb)
                return
        if self._classes[needs][0][1] == job:  # one judgement holds for the whole class
            yield from self._judge(needs)

    def _fill(self, keys: list[SlotKey]) -> Iterator[Placed | Never]:
        """Jobs that wait, in their order, for slots that got better."""
        slots = []
        for node, gpu in keys:
            slot = self._slot(node, gpu)
            if slot is not None and slot.listed:
                slots.append((self._nodes[node], slot))
        if not slots:
            return
        at = 0
        while at < len(self._heads):
            order, needs = self._heads[at]
            fits = [
                (-slot.worth, slot.node, slot.view.gpu, mb)
                for owner, slot in slots
                if slot.listed and (mb := _fits(needs, owner, slot)) is not None
            ]
            if not fits:
                at += 1
                continue
            _, node, gpu, mb = min(fits)
            yield self._place(self._classes[needs][0][1], needs, node, gpu, mb)
            if not any(slot.listed for _, slot in slots):
                return
            # The class's next member may stand later; those before it did not fit, and fit no better now,
            # but for the base that has just come: `occupy` has noted the slot for another look.
            at = bisect_left(self._heads, (order,))

    def _place(self, job: str, needs: _Needs, node: str, gpu: str, mb: int) -> Placed:
        self.drop(job)
        self.occupy(job, needs.base, node, gpu, mb, running=False)
        return Placed(job, node, gpu, mb)

    def _judge(self, needs: _Needs) -> Iterator[Never]:
        """Whether a class that fits nowhere now may ever; its jobs leave the queue when not."""
        if needs not in self._classes or not self._nodes:
            return
        reasons = []
        for name, node in self._nodes.items():
            why = _why_never(needs, node)
            if why is None:
                node.hopes.add(needs)
                return
            reasons.append(f"{name}: {why}")
        shown = "; ".join(sorted(reasons)[:_NODES_SHOWN])
        more = f"; and {len(reasons) - _NODES_SHOWN} more" if len(reasons) > _NODES_SHOWN else ""
        for _, job in list(self._classes[needs]):
            self.drop(job)
            yield Never(job, f"fits on no node: {shown}{more}")

    # --- the lists

    def _slot(self, node: str, gpu: str) -> Slot | None:
        owner = self._nodes.get(node)
        return owner.slots.get(gpu) if owner else None

    def _rank(self, node: _Node, slot: Slot) -> None:
        slot.measure()
        slot.listed = node.view.placeable and slot.view.usable and not slot.full and not node.full
        if slot.listed:
            entry = (-slot.worth, slot.node, slot.view.gpu)
            insort(self._ranked, entry)

    def _unrank(self, slot: Slot) -> None:
        if slot.listed:
            entry = (-slot.worth, slot.node, slot.view.gpu)
            del self._ranked[bisect_left(self._ranked, entry)]
            slot.listed = False

    def _rank_node(self, node: _Node) -> None:
        for slot in node.slots.values():
            self._rank(node, slot)

    def _unrank_node(self, node: _Node) -> None:
        for slot in node.slots.values():
            self._unrank(slot)

    def _change_members(
        self, needs: _Needs, members: list[tuple[int, str]], change: Callable[[], None]
    ) -> None:
        """Keeps `_heads` right while a class gets or loses a member."""
        if members:
            del self._heads[bisect_left(self._heads, (members[0][0],))]
        change()
        if members:
            at = bisect_left(self._heads, (members[0][0],))
            self._heads.insert(at, (members[0][0], needs))

    def _doubt(self, node: _Node) -> None:
        for needs in node.hopes:
            self._doubtful[needs] = None
        node.hopes.clear()


def _fits(needs: _Needs, node: _Node, slot: Slot) -> int | None:
    """MiB that a job would add on a listed slot, None when it does not fit there now."""
    mb = needs.adapter_mb if needs.base in slot.bases else needs.base_mb + needs.adapter_mb
    if mb > slot.available_mb or (not slot.view.gpu and not needs.small) or slot.node in needs.avoid:
        return None
    if needs.early_exit and not node.view.early_exit:
        return None
    return None if needs.only_model and needs.only_model not in node.view.models else mb


def _capacities(view: NodeView) -> object:
    """What `_why_never` looks at."""
    slots = None if view.slots is None else [(s.gpu, s.capacity_mb, s.max_adapters) for s in view.slots]
    return view.max_adapters, view.models, slots, view.early_exit


def _why_never(needs: _Needs, node: _Node) -> str | None:
    """Why no slot of the node could run the job even when empty and well; None when one could, or when the
    node was not heard of yet."""
    view = node.view
    if view.name in needs.avoid:
        return "an attempt failed there"
    if view.max_adapters == 0:
        return "max_adapters = 0"
    if needs.only_model and needs.only_model not in view.models:
        return f"its `models` in cluster.toml does not name {needs.only_model}, which cannot be sent"
    if view.slots is None:
        return None
    if needs.early_exit and not view.early_exit:
        return (
            "its agent is of an older gshare that knows no early exit; end it there with `gshare agent stop`"
        )
    reasons = []
    mb = needs.base_mb + needs.adapter_mb
    for slot in view.slots:
        what = f"GPU {slot.gpu}" if slot.gpu else "CPU"
        if slot.max_adapters == 0:
            reasons.append(f"{what} has max_adapters = 0")
        elif not slot.gpu and not needs.small:
            size = "is unknown" if needs.parameters is None else f"is {needs.parameters / 1e6:.0f} M"
            limit = CPU_MAX_PARAMETERS // 1_000_000
            why = f"no GPU, and its model's size {size}: CPU-only nodes take {limit} M parameters"
            if needs.parameters is None:
                why += (
                    " (submit with the path of its directory, or have it in the hub cache where you submit)"
                )
            reasons.append(why)
        elif slot.capacity_mb is not None and slot.capacity_mb < mb:
            reasons.append(f"{what} has {slot.capacity_mb} MiB to give, {mb} are needed")
        else:
            return None
    return ", ".join(reasons) or "none of the GPUs listed in cluster.toml is there"
