"""The one place that decides which estimate of a run's memory is used: the measured model, else by part.

    estimate = choose_estimate(shape, adapters, …, base=lambda: base_identity(directory), cards=plan.cards)
    estimate.source     # which one it is, and why it is not the other one

Measured by `gshare estimate --measure`; what it measures is what the trainer does. The allocator's mapped
pages leave little between tensors (`agent/train/memory_meter.py`): the safety margin of the model, a part of
its own, is for that too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gshare.agent.jobs.memory import Device, MemoryEstimate, MemoryPart, ModelShape, estimate_run
from gshare.agent.jobs.memory_model import MOST_ERROR
from gshare.agent.jobs.memory_profile import DamagedProfile, MemoryProfile, profile_key, read_profile
from gshare.agent.jobs.pass_load import PassLoad, pass_load
from gshare.agent.jobs.spec import AdapterSpec, BaseDtype
from gshare.agent.xdg import cache_dir

#: The card of a run without a GPU.
CPU_CARD = "cpu"
#: What is in a measured peak and known without measuring.
_KNOWN = ("base", "unpacking", "adapters", "optimizer")
#: Held beside what a measured peak has.
_APART = ("trunk cache", "trunk states")


def profile_dir() -> Path:
    """Where profiles are kept. Not made here."""
    return cache_dir() / "memory"


def is_checkpointing(adapters: Sequence[AdapterSpec]) -> bool:
    """Whether every pass of these adapters recomputes: one that does not may be alone in a pass."""
    return bool(adapters) and all(spec.gradient_checkpointing for spec in adapters)


def find_profile(base: str, *, base_dtype: BaseDtype, card: str, checkpointing: bool) -> MemoryProfile | None:
    """What was measured of this base (its `base_identity`); None: nothing yet. DamagedProfile is raised."""
    key = profile_key(base, base_dtype=base_dtype, card=card, checkpointing=checkpointing)
    return read_profile(profile_dir(), key)


def choose_estimate(
    shape: ModelShape,
    adapters: Sequence[AdapterSpec],
    *,
    base_dtype: BaseDtype,
    device: Device,
    pass_tokens: int,
    longest_row: int,
    base: Callable[[], str | None],
    cards: Sequence[str] = (),
    trunk_cache: int = 0,
    trunk_cache_host: int = 0,
) -> MemoryEstimate:
    """The peak memory of a run; the largest over `cards`, on any of which it may be (names of GPUs).

    Args:
        base: the base's content (`base_identity`), asked only where something was measured at all.
        others: as for `estimate_run`.
    """
    by_part = estimate_run(
        shape,
        adapters,
        base_dtype=base_dtype,
        device=device,
        pass_tokens=pass_tokens,
        longest_row=longest_row,
        trunk_cache=trunk_cache,
        trunk_cache_host=trunk_cache_host,
    )
    asked = tuple(dict.fromkeys(cards)) if device == "cuda" else (CPU_CARD,)
    if not adapters or not asked or not profile_dir().is_dir() or (identity := base()) is None:
        return by_part
    load = pass_load(
        shape,
        adapters,
        by_part,
        base_dtype=base_dtype,
        pass_tokens=pass_tokens,
        longest_row=longest_row,
    )
    found = [
        _on_card(by_part, load, identity, base_dtype, card, checkpointing=is_checkpointing(adapters))
        for card in asked
    ]
    return max(found, key=lambda estimate: estimate.total * (1 + estimate.fragmentation))


def _on_card(
    by_part: MemoryEstimate,
    load: PassLoad,
    base: str,
    base_dtype: BaseDtype,
    card: str,
    *,
    checkpointing: bool,
) -> MemoryEstimate:
    try:
        profile = find_profile(base, base_dtype=base_dtype, card=card, checkpointing=checkpointing)
    except DamagedProfile as error:
        return _because(by_part, f"not as measured: {error}; `gshare estimate --measure` mends it")
    if profile is None:
        return by_part
    if not profile.reaches(load):
        return _because(by_part, "it is far larger than anything measured")
    if profile.memory.worst_error > MOST_ERROR:
        return _because(by_part, f"the measured model is off by up to {profile.memory.worst_error:.0%}")
    return measured_estimate(by_part, load, profile)


def predicted_speed(
    shape: ModelShape,
    adapters: Sequence[AdapterSpec],
    profile: MemoryProfile,
    *,
    base_dtype: BaseDtype,
    device: Device,
    pass_tokens: int,
    longest_row: int,
) -> float | None:
    """Tokens a second of such passes, from the steps that were timed when memory was measured; None when
    they are far larger than those."""
    by_part = estimate_run(
        shape,
        adapters,
        base_dtype=base_dtype,
        device=device,
        pass_tokens=pass_tokens,
        longest_row=longest_row,
    )
    load = pass_load(
        shape, adapters, by_part, base_dtype=base_dtype, pass_tokens=pass_tokens, longest_row=longest_row
    )
    return profile.tokens_per_second(load) if profile.reaches(load) else None


def measured_estimate(by_part: MemoryEstimate, load: PassLoad, profile: MemoryProfile) -> MemoryEstimate:
    """The estimate that a profile gives: M̂, less what is known, is one part; the safety margin another."""
    model = profile.memory
    predicted, bound = int(model.predict(load)), model.bound(load)
    known = sum(by_part[name] for name in _KNOWN)
    parts = [part for part in by_part.parts if part.name in _KNOWN]
    parts.append(
        MemoryPart(
            "passes",
            max(0, predicted - known),
            f"measured: {load.tokens:,} tokens, evaluation, updates and what CUDA graphs keep",
        )
    )
    parts.append(
        MemoryPart(
            "margin",
            max(0, bound - max(predicted, known)),
            f"{model.margin:.1%}; worst error on unseen configurations {model.worst_error:.1%}",
        )
    )
    parts += [part for part in by_part.parts if part.host or part.name in _APART]
    source = f"model of {len(profile.points)} measured configurations"
    return MemoryEstimate(tuple(parts), by_part.device, fragmentation=0.0, source=source)


def _because(estimate: MemoryEstimate, reason: str) -> MemoryEstimate:
    source = f"{estimate.source} ({reason})"
    return MemoryEstimate(estimate.parts, estimate.device, estimate.fragmentation, source)
