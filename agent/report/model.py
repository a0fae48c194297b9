"""What a report knows of a run. None is "not known", NaN is "not a number": neither is ever a zero."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gshare.agent.jobs.spec import AdapterSpec, WarmStart

#: (optimizer steps done, loss); NaN where the loss was no number.
Point = tuple[int, float]

#: Why a run was ended before its last step, as the report sums it up. The first three are early exit's.
PATTERNS = ("divergence", "overfitting", "underperformance", "non-finite", "user")
PATTERN_LINES = {
    "divergence": "training and validation loss were rising",
    "overfitting": "validation loss left training loss behind",
    "underperformance": "others were better at the end of the warm-up",
    "non-finite": "loss, gradient or weights were not finite",
    "user": "stopped by a person",
}


@dataclass
class Samples:
    """Rows trained on. `exact` is False where an epoch's last step may have held fewer than counted."""

    count: int
    exact: bool = True


@dataclass
class Run:
    """One run: its files, and what the sweep that it belongs to has written of it."""

    name: str
    directory: str
    spec: AdapterSpec | None = None  # None: no run.json
    model: str = ""
    base_dtype: str = ""
    data_key: str = ""  # equal: validated on the same rows; empty: not known
    hyper: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    total_steps: int | None = None
    samples: Samples | None = None
    samples_total: Samples | None = None
    tokens: int | None = None
    seconds: float | None = None  # of the device: of each round its share, by the adapters in it
    loss: float | None = None
    val_loss: float | None = None  # the last one
    best_val_loss: float | None = None
    best_step: int | None = None
    state: str = "unknown"
    pattern: str = ""  # one of PATTERNS
    reason: str = ""
    ended: float | None = None  # seconds since the epoch
    evidence: dict[str, Any] = field(default_factory=dict)
    selected: bool = False  # went on after the warm-up of a sweep
    start: WarmStart | None = None
    train: list[Point] = field(default_factory=list)
    val: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def saved(self) -> Samples | None:
        """Samples of its full length that were not trained, of a run that ended early. None: not known."""
        if not self.pattern or self.samples is None or self.samples_total is None:
            return None
        exact = self.samples.exact and self.samples_total.exact
        return Samples(max(0, self.samples_total.count - self.samples.count), exact)


@dataclass
class Report:
    """Runs in the order in which they were found; `name` and `created` of a sweep."""

    directory: str
    kind: str  # run, runs or sweep
    runs: list[Run]
    name: str = ""
    created: float | None = None
    notes: list[str] = field(default_factory=list)
