"""Early exit of one job: which losses show that training on is of no use (ALTO, algorithm 1).

    ℓ̂_t = α·ℓ_t + (1 − α)·ℓ̂_{t−1}     training loss of step t, smoothed; raw at the first step
    divergence    slopes of the last w values of ℓ̂ (as of each evaluation) and of the last w validation
                  losses, by least squares, both above τ_slope, p_div evaluations in a row
    overfitting   g = (ℓ_val − ℓ̂) / ℓ̂ above τ_gap and ℓ_val above that of the evaluation before,
                  p_ovf evaluations in a row

A counter returns to 0 at the first evaluation at which its condition fails. Slopes are a loss an evaluation,
so both series have the same axis; the training loss is the smoothed one, as single steps go up and down
by more than any trend of two of them.

The third pattern, underperformance, compares jobs: it is the sweep's (`sweep.py`). This one sees nothing but
its own job's losses, so the step at which a job stops is a function of that job alone. A loss that is not
a number is passed over: the trainer ends such a job by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from gshare.agent.jobs.events import Evaluated, Exit, Stepped

JobPattern = Literal["divergence", "overfitting"]
#: Those that have made as many steps by then, as those of its batch size have, or everybody (`selection.py`).
Rank = Literal["same_steps", "all"]


class EarlyExit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a job of a sweep is told; `underperformance`, `warmup` and `keep` are the sweep's."""

    divergence: bool = True
    overfitting: bool = True
    underperformance: bool = True
    window: int = 2  # w: evaluations that a slope is fitted to, 2 at least
    divergence_patience: int = 2  # p_div
    overfitting_patience: int = 2  # p_ovf
    slope_threshold: float = 0.001  # τ_slope: loss an evaluation
    gap_threshold: float = 0.1  # τ_gap: a share of the training loss
    ema_alpha: float = 0.1  # α
    warmup: float = 0.05  # share of a job's steps before it is ranked
    keep: float = 0.25  # share of the configurations that go on, rounded up


class SweepExit(EarlyExit, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table [early_exit]. What a job does not need is here: an agent of an older version refuses a job
    with a key that it does not know."""

    rank: Rank = "same_steps"  # whom each configuration is compared with

    def of_job(self) -> EarlyExit:
        return EarlyExit(**{name: getattr(self, name) for name in EarlyExit.__struct_fields__})


#: Far more evaluations than a job has; 64-bit counters and the agents' messages hold it.
_MOST = 2**31 - 1


def setting_faults(settings: EarlyExit) -> list[tuple[str, str]]:
    """(key, what it must be) of every value that is of its type and still none."""
    checks = (
        ("window", settings.window >= 2, "be at least 2: a slope needs two values"),
        ("divergence_patience", settings.divergence_patience >= 1, "be at least 1"),
        ("overfitting_patience", settings.overfitting_patience >= 1, "be at least 1"),
        ("slope_threshold", 0 <= settings.slope_threshold < math.inf, "be a finite number, 0 or more"),
        ("gap_threshold", 0 <= settings.gap_threshold < math.inf, "be a finite number, 0 or more"),
        ("ema_alpha", 0 < settings.ema_alpha <= 1, "be above 0 and at most 1"),
        ("warmup", 0 < settings.warmup < 1, "be above 0 and below 1: a share of a job's steps"),
        ("keep", 0 < settings.keep <= 1, "be above 0 and at most 1: a share of the configurations"),
    )
    faults = [(key, must) for key, fine, must in checks if not fine]
    return faults + [
        (key, f"be at most {_MOST}")
        for key in ("window", "divergence_patience", "overfitting_patience")
        if getattr(settings, key) > _MOST
    ]


class _State(msgspec.Struct, kw_only=True):
    """What a resumed job goes on with."""

    train: float | None = None  # ℓ̂
    trains: list[float] = []  # ℓ̂ at the last w evaluations, oldest first
    vals: list[float] = []  # validation losses at the same ones
    rising: int = 0  # evaluations in a row at which both slopes were too steep
    apart: int = 0  # evaluations in a row at which the gap was too wide


class Patterns:
    """One job's losses in, at most one exit out."""

    def __init__(self, settings: EarlyExit) -> None:
        self._settings = settings
        self._state = _State()

    def handle(self, event: Stepped | Evaluated) -> Exit | None:
        """Take the next event of the job in; the exit when it completes a pattern, divergence first."""
        if isinstance(event, Stepped):
            self._stepped(event.loss)
            return None
        return self._evaluated(event)

    def state(self) -> dict[str, Any]:
        """As JSON: numbers come back exactly."""
        return msgspec.to_builtins(self._state)

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`. msgspec.ValidationError for what it did not make."""
        self._state = msgspec.convert(state, _State)

    def _stepped(self, loss: float) -> None:
        if not math.isfinite(loss):
            return
        before, alpha = self._state.train, self._settings.ema_alpha
        self._state.train = loss if before is None else alpha * loss + (1 - alpha) * before

    def _evaluated(self, event: Evaluated) -> Exit | None:
        state, val, train = self._state, event.val_loss, self._state.train
        if train is None or not math.isfinite(val):
            return None
        previous = state.vals[-1] if state.vals else None
        state.trains = [*state.trains, train][-self._settings.window :]
        state.vals = [*state.vals, val][-self._settings.window :]
        # Both, whatever the first gives: a counter that is not brought up to date would not return to 0.
        found = (self._divergence(event.step), self._overfitting(event.step, val, train, previous))
        return found[0] or found[1]

    def _divergence(self, step: int) -> Exit | None:
        settings, state = self._settings, self._state
        if not settings.divergence or len(state.vals) < settings.window:
            return None
        slopes = slope(state.trains), slope(state.vals)
        state.rising = state.rising + 1 if min(slopes) > settings.slope_threshold else 0
        if state.rising < settings.divergence_patience:
            return None
        return Exit(
            pattern="divergence",
            step=step,
            evidence={
                "train_slope": slopes[0],
                "val_slope": slopes[1],
                "slope_threshold": settings.slope_threshold,
                "train_losses": list(state.trains),
                "val_losses": list(state.vals),
                "evaluations": state.rising,
            },
        )

    def _overfitting(self, step: int, val: float, train: float, previous: float | None) -> Exit | None:
        settings, state = self._settings, self._state
        # A training loss of 0 is the widest gap there is.
        gap = (val - train) / train if train > 0 else math.inf
        wide = (
            settings.overfitting and previous is not None and val > previous and gap > settings.gap_threshold
        )
        state.apart = state.apart + 1 if wide else 0
        if state.apart < settings.overfitting_patience or not wide:
            return None
        return Exit(
            pattern="overfitting",
            step=step,
            evidence={
                "gap": gap,
                "gap_threshold": settings.gap_threshold,
                "val_loss": val,
                "previous_val_loss": previous,
                "train_loss": train,
                "evaluations": state.apart,
            },
        )


def slope(values: Sequence[float]) -> float:
    """Of the least-squares line through (0, values[0]), (1, values[1]), …: at least two values."""
    n = len(values)
    middle = (n - 1) / 2
    # Σ (i − ī)² = n·(n² − 1) / 12
    return sum((i - middle) * value for i, value in enumerate(values)) / (n * (n * n - 1) / 12)


def describe_exit(cause: Exit) -> str:
    """The pattern and its evidence in one line for people."""
    found = cause.evidence
    if cause.pattern == "divergence":
        what = (
            f"training and validation loss rose by {found['train_slope']:.4g} and {found['val_slope']:.4g} "
            f"an evaluation, above {found['slope_threshold']:g}"
        )
    else:
        what = (
            f"validation loss {found['val_loss']:.4g} is {found['gap']:.1%} above the training loss "
            f"{found['train_loss']:.4g} (limit {found['gap_threshold']:.1%}) and rising"
        )
    times = found["evaluations"]
    return f"{cause.pattern} at step {cause.step}: {what}, {times} evaluations in a row"
