"""Which waiting configurations are admitted now beside those that run: a sweep's intra-task scheduler.

ALTO's policy (its appendix A.3): decreasing batch size while the predicted memory fits; what is freed is
filled with the same batch size first, as equal shapes make the better passes, and with others when no such
one is left. Where a throughput profile is known, one that would make the whole slower waits.

Pure. The order decides on time alone: a job's bits do not depend on who is beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    name: str
    batch: int  # rows of a pass


@dataclass(frozen=True)
class Packing:
    """`fits`: whether these may train at once, by predicted memory. `rate`: their predicted tokens a second
    together, where it is known. `most`: of them at once, 0 for no limit."""

    fits: Callable[[Sequence[str]], bool]
    rate: Callable[[Sequence[str]], float] | None = None
    most: int = 0

    def admit(self, waiting: Sequence[Candidate], running: Sequence[Candidate]) -> list[str]:
        """Those of `waiting` to start now, in the order in which to start them.

        With nobody running the first is admitted whatever the prediction says: a sweep goes on, and a
        configuration that cannot be trained at all fails by itself.
        """
        together = [one.name for one in running]
        admitted: list[str] = []
        for one in _by_preference(waiting, running):
            if self.most and len(together) >= self.most:
                break
            wider = [*together, one.name]
            if together and not (self.fits(wider) and self._pays(together, wider)):
                continue
            together = wider
            admitted.append(one.name)
        return admitted

    def _pays(self, together: Sequence[str], wider: Sequence[str]) -> bool:
        return self.rate is None or self.rate(wider) > self.rate(together)


def _by_preference(waiting: Sequence[Candidate], running: Sequence[Candidate]) -> list[Candidate]:
    """The batch size that most of those running have first (the larger of two), then decreasing; in the
    order given among equals."""
    sizes = Counter(one.batch for one in running)
    common = max(sizes, key=lambda batch: (sizes[batch], batch), default=None)
    return sorted(waiting, key=lambda one: (one.batch != common, -one.batch))
