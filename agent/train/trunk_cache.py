"""Trunk states kept for later epochs: below its adapters a sequence's are the same every time.

    L tokens of a sequence, H hidden; an entry is (L, H) in the compute dtype: the first adapted layer's input

Keys say all that the states are a function of: numerics and base (`identity`), content and layer. So whether
they were kept, dropped or made anew shows in no bit. Device memory is filled first, then pinned host memory,
each up to its budget. What is full takes nothing new: data seen once an epoch that is larger than the budget
would push out everything before it is seen again. What was last used before the newest job came makes room.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from gshare.agent.train.trunk import PassPlan, content, starts_of

if TYPE_CHECKING:
    from gshare.agent.train.part import Row

log = logging.getLogger(__name__)
#: (rows, layers, states, places): runs rows through the trunk; its states go to `states`, from its place on.
RunRows = Callable[[Sequence["Row"], int, torch.Tensor, Sequence[int]], None]

#: Passes that are not timed (kernels are built, products checked, graphs captured), and those that are.
WARM_UP, TIMED = 2, 3
#: How much dearer a trunk must be than storing and loading its states: a cache takes memory from others.
MARGIN = 2.0


@dataclass
class _Entry:
    states: torch.Tensor
    used: int  # the cache's generation


@dataclass
class _Tier:
    """Entries in one kind of memory, the longest unused first."""

    budget: int  # bytes
    store: Callable[[torch.Tensor], torch.Tensor]
    taken: Callable[[torch.Tensor], int] = lambda states: states.nbytes  # bytes of this memory
    entries: OrderedDict[Hashable, _Entry] = field(default_factory=OrderedDict)
    nbytes: int = 0
    closed: bool = False  # its budget is 0 for good

    def close(self) -> int:
        """Drop everything and keep nothing any more; bytes freed."""
        freed = self.nbytes
        self.set_budget(0)
        self.closed = True
        return freed

    def set_budget(self, nbytes: int) -> None:
        self.budget = 0 if self.closed else nbytes
        while self.nbytes > self.budget:
            self.nbytes -= self.taken(self.entries.popitem(last=False)[1].states)

    def make_room(self, states: torch.Tensor, generation: int) -> bool:
        """Whether they fit, after removing what no job of this generation used."""
        nbytes = self.taken(states)
        if nbytes > self.budget:
            return False
        while self.nbytes + nbytes > self.budget:
            key, oldest = next(iter(self.entries.items()))
            if oldest.used >= generation:
                return False
            self.nbytes -= self.taken(oldest.states)
            del self.entries[key]
        return True


class TrunkCache:
    """States by (layer, content). `auto`: kept only if the first passes show that it pays."""

    def __init__(
        self,
        device: torch.device,
        *,
        identity: Hashable,
        device_bytes: int,
        host_bytes: int = 0,
        auto: bool = False,
    ) -> None:
        """`identity`: the base and the numerics that the states are made with. On the CPU both memories are
        one."""
        self._identity = identity
        self._device = device
        if device.type == "cuda":
            self._tiers = [_Tier(device_bytes, torch.clone), _Tier(host_bytes, _pinned_copy, pinned_bytes)]
        else:
            self._tiers = [_Tier(device_bytes + host_bytes, torch.clone)]
        self._generation = 0
        self.trial = Trial() if auto else None

    @property
    def nbytes(self) -> int:
        return sum(tier.nbytes for tier in self._tiers)

    @property
    def active(self) -> bool:
        """Whether it may hold anything."""
        return any(tier.budget > 0 for tier in self._tiers)

    def get(self, layer: int, content: Hashable) -> torch.Tensor | None:
        """(L, H), on the device or in pinned memory; the cache's own, never changed."""
        key = (self._identity, layer, content)
        for tier in self._tiers:
            entry = tier.entries.get(key)
            if entry is not None:
                tier.entries.move_to_end(key)
                entry.used = self._generation
                return entry.states
        return None

    def put(self, layer: int, content: Hashable, states: torch.Tensor) -> None:
        """Keeps a copy where there is room."""
        key = (self._identity, layer, content)
        if any(key in tier.entries for tier in self._tiers):
            return
        for tier in self._tiers:
            if tier.make_room(states, self._generation):
                tier.entries[key] = _Entry(tier.store(states), self._generation)
                tier.nbytes += tier.taken(states)
                return

    def age(self) -> None:
        """A job came: what none uses from now on may make room."""
        self._generation += 1

    def set_device_budget(self, nbytes: int) -> None:
        """What is over it is dropped, the longest unused first. Nothing, once the device was given up."""
        self._tiers[0].set_budget(nbytes)

    def give_up_device(self) -> int:
        """Drops what lies on the device and keeps nothing there any more; bytes freed."""
        return self._tiers[0].close()

    def judge(self, ran: int, run_seconds: float, copied: int, copy_seconds: float) -> None:
        """The trial's next pass: tokens and seconds. Everything is dropped once it is known not to pay, or
        when there is no room left before anything is known."""
        assert self.trial is not None
        if copied:
            self.trial.note(run_seconds / ran, copy_seconds / copied)
        pays = self.trial.pays if copied else False
        if pays is None:
            return
        self.trial = None
        if not pays:
            log.info("trunk states are not kept: it does not pay, or there is too little room for them")
            self.close()

    def close(self) -> None:
        """Drops everything and keeps nothing any more."""
        for tier in self._tiers:
            tier.close()


class Trial:
    """Times of the first passes, per token: of running the trunk, and of storing and loading its states."""

    def __init__(self) -> None:
        self._passes = 0
        self._run: list[float] = []
        self._copy: list[float] = []

    def note(self, run: float, copy: float) -> None:
        """One pass: seconds per token."""
        self._passes += 1
        if self._passes > WARM_UP:
            self._run.append(run)
            self._copy.append(copy)

    @property
    def pays(self) -> bool | None:
        """None: not known yet."""
        if len(self._run) < TIMED:
            return None
        return min(self._run) > MARGIN * min(self._copy)


def pinned_bytes(states: torch.Tensor) -> int:
    """What a pinned copy takes: torch's allocator rounds each block up to a power of two."""
    return 1 << max(states.nbytes - 1, 0).bit_length()


def _pinned_copy(states: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
    return copy.copy_(states, non_blocking=True)


def fill_states(cache: TrunkCache | None, plan: PassPlan, states: torch.Tensor, run: RunRows) -> int:
    """The states of the plan's trunk, row after row, into `states` (at least its tokens, H): those that are
    kept, the others by `run`. Returns how many tokens were kept."""
    layer, places = plan.stages[0].first, starts_of(plan.trunk)[:-1]
    if cache is None or not cache.active:
        run(plan.trunk, layer, states, places)
        return 0
    missing: list[Row] = []
    missing_at: list[int] = []
    for row, place in zip(plan.trunk, places, strict=True):
        known = cache.get(layer, content(row))
        if known is None:
            missing.append(row)
            missing_at.append(place)
        else:
            states[place : place + len(row.tokens)].copy_(known, non_blocking=True)
    if missing:
        clock = _clock(states.device) if cache.trial is not None else _no_clock
        begun = clock()
        run(missing, layer, states, missing_at)
        ran = clock()
        for row, place in zip(missing, missing_at, strict=True):
            cache.put(layer, content(row), states[place : place + len(row.tokens)])
        if cache.trial is not None:
            loaded = _load(cache, layer, missing, missing_at, states)
            cache.judge(sum(len(row.tokens) for row in missing), ran - begun, loaded, clock() - ran)
    return sum(len(row.tokens) for row in plan.trunk) - sum(len(row.tokens) for row in missing)


def _load(
    cache: TrunkCache, layer: int, rows: Sequence[Row], places: Sequence[int], states: torch.Tensor
) -> int:
    """What was just stored, back to where it came from: tokens."""
    loaded = 0
    for row, place in zip(rows, places, strict=True):
        known = cache.get(layer, content(row))
        if known is not None:
            states[place : place + len(row.tokens)].copy_(known, non_blocking=True)
            loaded += len(row.tokens)
    return loaded


def _clock(device: torch.device) -> Callable[[], float]:
    def seconds() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return seconds


def _no_clock() -> float:
    return 0.0
