"""A trainer's reservation kept in torch: the allocator capped under it, memory claimed, use written down.

    guard = make_guard(reservation, asked="auto", where=device, may_grow=False, say=…)  # before any tensor
    guard.record("load"); …; guard.record("save")

On a discrete GPU everything under the cap is allocated and given back to torch's own cache at once: the
pages stay this process's, so no program outside the ledger can take what is reserved. Where torch maps pages
(`trainer_environment`) it gives free ones back to the device before an allocation fails at the cap; they
are claimed again at the next look. Otherwise what is reserved is a sum of bytes and no promise: a tensor
needs its bytes in one piece, so long-lived ones in between can make an allocation fail below the cap. torch
keeps tensors of up to 1 MiB in pages of their own, for which `SMALL_MB` is left unclaimed. So does it with
what a CUDA graph takes: with everything claimed no graph could be captured under the cap (on an H200 a sweep
of a small model went through passes of 251 tokens with the GPU idle).

On the CPU (a simulated device) there is nothing to cap or to claim: the growth of the process is recorded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal, Protocol

import psutil
import torch
from gshare.agent.errors import GshareError
from gshare.agent.vram.budget import CONTEXT_MB
from gshare.agent.vram.guard import Cap, Reservation

#: Left unclaimed for torch's pool of small tensors: norms and indices of a model are a few MiB.
SMALL_MB = 128
#: No context is so large: a neighbour that started at the same time is in the difference.
MOST_CONTEXT_MB = 2 * CONTEXT_MB
#: What an estimate that was too low grows by at a time: a quarter, at least so many MiB.
GROW_MB = 256
#: A look after the row costs three stats, and a round of a small model takes 2 ms.
KEEP_SECONDS = 0.5
#: The driver is asked for every process of a device, which takes milliseconds, and a sweep of a small model
#: saves and evaluates many times a second: while torch holds as much as before, it is asked no oftener.
RECORD_SECONDS = 1.0

Say = Callable[[Literal["info", "warning"], str], None]


class Memory(Protocol):
    """The device as the guard sees it; MiB, rounded up."""

    is_gpu: bool

    def start(self) -> None:
        """Make the context, with what the first product loads into it."""
        ...

    def held_mb(self) -> int:
        """What torch's allocator has taken from the device, free blocks of its cache included."""
        ...

    def peak_mb(self) -> int:
        """The most that tensors have taken at once."""
        ...

    def total_mb(self) -> int: ...

    def set_fraction(self, fraction: float) -> None: ...

    def claim(self, mb: int) -> bool:
        """Allocate so much in one piece and give it back to the cache; False when it cannot be had."""
        ...

    def give_back(self) -> None:
        """Give free blocks of the cache back to the device."""
        ...


class CudaMemory:
    """One CUDA device through torch."""

    is_gpu = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak = 0  # before the last claim

    def start(self) -> None:
        square = torch.ones(64, 64, device=self._device)
        (square @ square).sum().item()  # cuBLAS, its handle and workspace

    def held_mb(self) -> int:
        return _mb(torch.cuda.memory_reserved(self._device))

    def peak_mb(self) -> int:
        return max(self._peak, _mb(torch.cuda.max_memory_allocated(self._device)))

    def total_mb(self) -> int:
        return _mb(torch.cuda.get_device_properties(self._device).total_memory)

    def set_fraction(self, fraction: float) -> None:
        torch.cuda.set_per_process_memory_fraction(fraction, self._device)

    def claim(self, mb: int) -> bool:
        self._peak = self.peak_mb()
        try:
            torch.empty(mb << 20, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            return False
        torch.cuda.reset_peak_memory_stats(self._device)  # the claim is no use of ours
        return True

    def give_back(self) -> None:
        torch.cuda.empty_cache()


class HostMemory:
    """Main memory in a GPU's place: what the process has grown by since the guard began."""

    is_gpu = False

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before = self._process.memory_info().rss
        self._peak = 0

    def start(self) -> None:
        pass

    def held_mb(self) -> int:
        held = _mb(max(0, self._process.memory_info().rss - self._before))
        self._peak = max(self._peak, held)
        return held

    def peak_mb(self) -> int:
        return self._peak

    def total_mb(self) -> int:
        return _mb(psutil.virtual_memory().total)

    def set_fraction(self, fraction: float) -> None:
        pass

    def claim(self, mb: int) -> bool:
        return True

    def give_back(self) -> None:
        pass


class NoGuard:
    """What a runner without a reservation has: nothing is capped, nothing written down."""

    def record(self, phase: str) -> None:
        """Write down what is in use after `phase`: load, first_step, eval, save."""

    def keep(self) -> None:
        """After every round: see that the reservation still stands in the ledger, every `KEEP_SECONDS`."""

    def more_memory(self) -> bool:
        """After an out-of-memory error that smaller passes cannot mend: reserve more, where that is allowed.

        False: nothing changed. What the user has set is never exceeded.
        """
        return False

    def explain(self) -> str:
        """Whose limit an out-of-memory error is, and what to do; empty when it is nobody's."""
        return ""

    def budget_mb(self) -> int | None:
        """What is reserved, context included; None without a reservation."""
        return None

    def summary(self) -> str:
        """What the run took, to choose the next one's `--vram` by."""
        return ""


class GpuGuard(NoGuard):
    """One reservation and the allocator under it. `may_grow`: the budget is an estimate, not the user's."""

    def __init__(
        self,
        reservation: Reservation,
        memory: Memory,
        *,
        may_grow: bool,
        say: Say,
        graphs_mb: Callable[[], int] = lambda: 0,
    ) -> None:
        """Makes the context, measures it, caps, claims. `graphs_mb`: what is left unclaimed for captured
        passes, at most a third. GshareError when the context takes the budget."""
        self._graphs_mb = graphs_mb
        self._reservation, self._memory = reservation, memory
        self._may_grow, self._say = may_grow, say
        self._problem = ""
        self._kept = -KEEP_SECONDS
        self._recorded: dict[str, tuple[int, float]] = {}  # phase: MiB that torch held, time.monotonic()
        self._measured = False
        self._claimed = 0  # what torch held when all was claimed, MiB; 0: nothing was
        self._context_mb = self._start() if memory.is_gpu else 0
        self._cap_and_claim()
        reservation.on_budget = self._budget_changed

    def record(self, phase: str) -> None:
        held, now = self._memory.held_mb(), time.monotonic()
        held_then, then = self._recorded.get(phase, (-1, -math.inf))
        if held == held_then and now - then < RECORD_SECONDS:
            return
        self._claim_again(held)
        held = self._memory.held_mb()
        self._recorded[phase] = (held, now)
        try:
            listed = self._listed_mb()
            if listed - held > self._context_mb:
                # Kernels are loaded when they are first used: the context has grown since it was measured.
                self._context_mb, self._measured = listed - held, True
                self._set_cap()
            self._reservation.record_use(phase, listed or held + self._context_mb)
        except GshareError as error:  # a ledger that cannot be written ends no training; said once
            if str(error) != self._problem:
                self._problem = str(error)
                self._say("warning", f"reservation {self._reservation.id}: use is not recorded: {error}")

    def keep(self) -> None:
        now = time.monotonic()
        if now - self._kept < KEEP_SECONDS:
            return
        self._kept = now
        try:
            self._reservation.keep()
        except GshareError as error:  # as above
            if str(error) != self._problem:
                self._problem = str(error)
                text = f"reservation {self._reservation.id}: its row cannot be put back: {error}"
                self._say("warning", text)

    def more_memory(self) -> bool:
        if not self._may_grow:
            return False
        more = max(GROW_MB, self._reservation.budget_mb // 4)
        try:
            self._reservation.grow(more)
        except GshareError as error:
            self._say("warning", str(error))
            return False
        self._set_cap()
        self._say(
            "info",
            f"the estimate was too low: reservation {self._reservation.id} grew by {more} to "
            f"{self._reservation.budget_mb} MiB",
        )
        return True

    def explain(self) -> str:
        row = self._reservation
        return (
            f"reservation {row.id} is {row.budget_mb} MiB on {row.device.uuid}: raise it with {row.raised_by}"
        )

    def budget_mb(self) -> int | None:
        return self._reservation.budget_mb

    def summary(self) -> str:
        row, peak = self._reservation, self._memory.peak_mb()
        assumed = "" if self._measured else " (assumed)"
        context = f" and {self._context_mb} for the context{assumed}" if self._memory.is_gpu else ""
        return f"reservation {row.id}: at most {peak} MiB of tensors{context}, {row.budget_mb} MiB reserved"

    def _start(self) -> int:
        """Make the context; MiB that it takes: by the driver's list of processes, else by what the device
        lost meanwhile, unless that is a neighbour's too, else the usual amount."""
        before = self._reservation.read_device()
        self._memory.start()
        after = self._reservation.read_device()
        mine = self._reservation.listed_mb(after)
        if not mine and self._reservation.device.memory_type == "discrete":
            mine = (after.used_mb or 0) - (before.used_mb or 0)
            mine = mine if mine - self._memory.held_mb() <= MOST_CONTEXT_MB else 0
        context = mine - self._memory.held_mb()
        self._measured = context > 0
        return context if self._measured else CONTEXT_MB

    def _budget_changed(self) -> None:
        """A client has come or gone. What was claimed for one that is gone goes back to the device first: the
        cap would not take it out of torch's cache."""
        self._memory.give_back()
        self._cap_and_claim()
        self.record("clients")

    def _cap_and_claim(self) -> None:
        cap = self._set_cap()
        free = cap.mb - SMALL_MB - self._memory.held_mb()
        if self._memory.is_gpu:
            free -= min(self._graphs_mb(), free // 3)
        if self._memory.is_gpu and self._reservation.device.memory_type == "discrete" and free > 0:
            self._claim(free)

    def _claim_again(self, held: int) -> None:
        """What torch has given back meanwhile. Not for less than `GROW_MB`, and without a word: whoever took
        it stays within the reservation of nobody, and the next look tries again."""
        missing = min(self._claimed, self._cap_mb - SMALL_MB) - held
        if missing >= GROW_MB:
            self._memory.claim(missing)

    def _set_cap(self) -> Cap:
        total = self._memory.total_mb()
        cap = self._reservation.cap(self._context_mb, total)
        self._memory.set_fraction(cap.fraction)
        self._cap_mb = cap.mb
        return cap

    def _claim(self, mb: int) -> None:
        self._claimed = self._memory.held_mb() + mb
        if not self._memory.claim(mb):
            self._claimed = 0
            self._say(
                "warning",
                f"reservation {self._reservation.id}: {mb} MiB cannot be had in one piece, programs outside "
                "the ledger may have taken some; going on without claiming it",
            )

    def _listed_mb(self) -> int:
        """What the driver says that this process takes; 0 when it does not say, or there is no driver."""
        row = self._reservation
        return row.listed_mb(row.read_device()) if self._memory.is_gpu else 0


def make_guard(
    reservation: Reservation | None,
    *,
    asked: str,
    where: torch.device,
    may_grow: bool,
    say: Say,
    graphs_mb: Callable[[], int] = lambda: 0,
) -> NoGuard:
    """The guard of a base that goes to `where`, `asked` for by that name; `graphs_mb` as for `GpuGuard`.

    A GPU that was reserved and cannot be used is given back.
    """
    if reservation is not None and asked == "auto" and where.type == "cpu":
        say("warning", "torch cannot use the GPU, `gshare doctor` says why; going on with the CPU")
        reservation.release()
        reservation = None
    if reservation is None:
        return NoGuard()
    memory = CudaMemory(where) if where.type == "cuda" else HostMemory()
    return GpuGuard(reservation, memory, may_grow=may_grow, say=say, graphs_mb=graphs_mb)


def _mb(nbytes: int) -> int:
    return -(-nbytes >> 20)
