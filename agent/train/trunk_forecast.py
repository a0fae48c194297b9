"""How much of a run is shared below its adapters, told before anything is trained. No torch.

Rows are read, cut into passes and laid out by layers with the code that trains (`JobData`, `split_passes`,
`PassPlan`); only nothing is run. Jobs that train at once are taken to step together, as the default schedule
has it. Of a long run some rounds are looked at, spread evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import msgspec
from gshare.agent.jobs.spec import JobRequest
from gshare.agent.train.job_data import JobData
from gshare.agent.train.passes import StepWork, split_passes
from gshare.agent.train.trunk import PassPlan, TrunkUse

if TYPE_CHECKING:
    from gshare.agent.train.adapter import Adapter

#: Rounds that are looked at: of 32 jobs with 8 rows a step 16,000 rows, about half a second.
MOST_ROUNDS = 64


@dataclass(frozen=True)
class Stretch:
    """Jobs that train at once: the 0-based step that each begins with, and how many steps they make."""

    first: Mapping[str, int]
    steps: int


@dataclass(frozen=True)
class Forecast:
    """Tokens times layers of all forward passes (`whole`), and of those below the adapters (`use`).

    `looked_at` of `rounds` rounds were laid out; the sums are scaled to all of them.
    """

    use: TrunkUse
    whole: int
    looked_at: int
    rounds: int

    @property
    def below(self) -> float:
        """The part that lies below the adapters, 0 … 1."""
        return self.use.asked / self.whole if self.whole else 0.0

    @property
    def saved(self) -> float:
        """The part of the forward that is not run, since it is run for another row, 0 … 1."""
        return (self.use.asked - self.use.computed) / self.whole if self.whole else 0.0

    def told(self) -> str:
        """One line."""
        if self.use.computed < self.use.asked:
            line = (
                f"shared trunk: {self.below:.0%} of the forward's rows × layers lie below the adapters, "
                f"{self.use.shared:.0%} of those are computed once for several jobs: {self.saved:.0%} of the "
                "forward saved"
            )
        elif self.use.asked:
            line = (
                f"shared trunk: nothing; {self.below:.0%} of the forward's rows × layers lie below the "
                "adapters, and no two jobs have a row in common in a pass"
            )
        else:
            line = "shared trunk: nothing; every job adapts the lowest layer"
        return line if self.looked_at == self.rounds else f"{line} ({self.looked_at} of {self.rounds} rounds)"

    def as_json(self) -> dict[str, float | int]:
        return {
            "below_adapters": self.below,
            "shared": self.use.shared,
            "forward_saved": self.saved,
            "rounds_looked_at": self.looked_at,
            "rounds": self.rounds,
        }


@dataclass(frozen=True)
class _Planned:
    """What passes ask of an adapter before they run."""

    name: str
    lowest_layer: int


def together(steps: Mapping[str, int]) -> list[Stretch]:
    """Of jobs that all begin at once and make so many steps each: a stretch from one's end to the next."""
    ends = sorted({0, *steps.values()})
    return [
        Stretch({name: begun for name, total in steps.items() if total > begun}, end - begun)
        for begun, end in pairwise(ends)
    ]


def forecast(
    stretches: Sequence[Stretch], requests: Mapping[str, JobRequest], *, num_layers: int, max_tokens: int
) -> Forecast:
    """`max_tokens`: of a pass. GshareError for a token file that is damaged or gone."""
    opened: dict[bytes, JobData] = {}
    rows = {name: _Rows(request, opened) for name, request in requests.items()}
    rounds = sum(stretch.steps for stretch in stretches)
    asked = computed = whole = 0.0
    looked_at = 0
    for stretch in stretches:
        count = min(stretch.steps, max(1, round(MOST_ROUNDS * stretch.steps / rounds)))
        looked_at += count
        for index in range(count):
            step = index * stretch.steps // count
            work = [rows[name].work(first + step) for name, first in stretch.first.items()]
            for parts in split_passes(work, max_tokens):
                use, scale = PassPlan.of(parts).use(), stretch.steps / count
                asked += use.asked * scale
                computed += use.computed * scale
                whole += sum(part.tokens for part in parts) * num_layers * scale
    return Forecast(TrunkUse(round(asked), round(computed)), round(whole), looked_at, rounds)


class _Rows:
    """A job's steps. `opened`: data that configurations have in common, opened and split once."""

    def __init__(self, request: JobRequest, opened: dict[bytes, JobData]) -> None:
        self._adapter = _Planned(request.spec.name, request.spec.lowest_layer)
        key = _data_key(request)
        if key not in opened:
            opened[key] = JobData.open(request)
        self._data = opened[key]

    def work(self, step: int) -> StepWork:
        return StepWork(cast("Adapter", self._adapter), step, self._data.micro_batches(step))


#: What of a spec says which rows a step has.
_DATA_KEYS = (
    "val_fraction",
    "seed",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
)


def _data_key(request: JobRequest) -> bytes:
    files = (request.train_store, request.train_hash, request.val_store, request.val_hash)
    return msgspec.json.encode((*files, *(getattr(request.spec, key) for key in _DATA_KEYS)))
