"""Measured rates of training, and what they make of an amount of work: the durations that plans need.

A profile is a JSON file, made by whoever measured:

    {"version": 1, "rates": [
      {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "base_dtype": "bf16", "gpus": 1,
       "tokens_per_second": 280738.2}]}

`model` is the name or path that a run's file has, or the last part of it; `gpus` how many train at once.
"""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath

import msgspec
from gshare.agent.errors import UsageError
from gshare.agent.jobs.names import shorten
from gshare.agent.jobs.spec import BaseDtype
from gshare.coordinator.plan import MAX_DURATION_MS

#: A profile has some lines a model; what is larger is another file.
MAX_PROFILE_BYTES = 1 << 20


class Rate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens trained a second, over all adapters that are packed together."""

    model: str
    base_dtype: BaseDtype
    tokens_per_second: float
    gpus: int = 1


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rates: tuple[Rate, ...]
    version: int = 1
    source: str = ""  # the file it came from, for messages

    def tokens_per_second(self, model: str, base_dtype: BaseDtype, gpus: int) -> float:
        """Of a base on that many GPUs. UsageError: it was not measured."""
        same = [rate for rate in self.rates if _is_model(model, rate.model)]
        for rate in same:
            if (rate.base_dtype, rate.gpus) == (base_dtype, gpus):
                return rate.tokens_per_second
        measured = ", ".join(f"{rate.base_dtype} on {_gpus(rate.gpus)}" for rate in same)
        names = ", ".join(sorted({rate.model for rate in self.rates})[:8])
        known = f"it has {measured}" if measured else f"it has the models {names}" if names else "it is empty"
        raise UsageError(
            f"{self.source}: no rate of {shorten(Path(model).name)} in {base_dtype} on {_gpus(gpus)}; "
            f"{known}. Add it, or give --tokens-per-second"
        )


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"


def read_profile(path: Path) -> Profile:
    """UsageError, naming file and key: it cannot be read, or is no profile."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_PROFILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > MAX_PROFILE_BYTES:
        raise UsageError(
            f"{path}: is larger than {MAX_PROFILE_BYTES >> 20} MiB, which no profile of rates is"
        )
    try:
        profile = msgspec.json.decode(content, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: is no profile of rates: {error}") from None
    if profile.version != 1:
        raise UsageError(f"{path}: has version {profile.version}; this gshare knows 1")
    seen: set[tuple[str, str, int]] = set()
    for number, rate in enumerate(profile.rates, start=1):
        where = f"{path}: rate {number} ({shorten(rate.model)})"
        if not (math.isfinite(rate.tokens_per_second) and rate.tokens_per_second > 0):
            raise UsageError(f"{where}: tokens_per_second must be above 0, not {rate.tokens_per_second}")
        if rate.gpus < 1:
            raise UsageError(f"{where}: gpus must be at least 1, not {rate.gpus}")
        key = (rate.model, rate.base_dtype, rate.gpus)
        if key in seen:
            raise UsageError(f"{where}: {rate.base_dtype} on {rate.gpus} GPUs is there twice; keep one")
        seen.add(key)
    return msgspec.structs.replace(profile, source=str(path))


def duration_ms(tokens: int, tokens_per_second: float) -> int:
    """At least 1, at most the planner's longest."""
    return max(1, min(MAX_DURATION_MS, math.ceil(1000 * tokens / tokens_per_second)))


def _is_model(asked: str, measured: str) -> bool:
    return measured in (asked, PurePosixPath(asked).name)
