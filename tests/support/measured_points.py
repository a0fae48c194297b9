"""Made-up measurements over the real grid: the loads, what a known model makes of them, and points of it."""

from __future__ import annotations

from gshare.agent.jobs.memory_grid import grid
from gshare.agent.jobs.memory_model import Fit
from gshare.agent.jobs.memory_profile import Point
from gshare.agent.jobs.pass_load import PassLoad

MIB = 2**20


def load(**fields: int) -> PassLoad:
    names = [name for name in PassLoad.__struct_fields__ if name not in fields]
    return PassLoad(**{**dict.fromkeys(names, 0), **fields})


def measured_loads() -> list[PassLoad]:
    """The loads of the real grid, with a made-up model of it."""
    found = []
    for what in grid(16384, max_length=2048):
        own = what.r * 3_052_800  # SmolLM2 in bf16: 305,280 elements a rank, 10 bytes each
        found.append(
            load(
                adapters=what.adapters,
                tokens=what.tokens,
                longest_row=what.length,
                adapter_bytes=what.adapters * own,
                optimizer_bytes=what.adapters * (own * 4 // 5 if what.optim == "adamw" else own // 5),
                largest_adapter=own,
                ranks=7 * what.r,
                logit_bytes=min(what.tokens, 4096) * 64_000,
                mask_bytes=what.tokens * 4608 if what.dropout else 0,
            )
        )
    return found


LOADS = measured_loads()
#: A base of 270 MiB, 180 KB of activations a token, and the adapters: as SmolLM2 in bf16.
TRUE = {"constant": 270.0 * MIB, "tokens": 180_000.0, "adapter_bytes": 1.0, "optimizer_bytes": 1.0}


def value(coefficients: dict[str, float], one: PassLoad) -> float:
    fit = Fit(tuple(coefficients), tuple(coefficients.values()), 1.0, 0.0, 1.0)
    return fit.predict(one)


def noisy(coefficients: dict[str, float], errors: list[float]) -> list[float]:
    return [round(value(coefficients, one) * (1 + e)) for one, e in zip(LOADS, errors, strict=True)]


def points(peaks: list[float] | None = None) -> list[Point]:
    peaks = peaks or noisy(TRUE, [0.0] * len(LOADS))
    return [
        Point(load=one, batch=1, length=one.longest_row, peak_bytes=int(peak), step_seconds=1e-4 * one.tokens)
        for one, peak in zip(LOADS, peaks, strict=True)
    ]
