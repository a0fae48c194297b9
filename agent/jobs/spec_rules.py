"""What each key of the job spec may hold: one rule a key, from its typed value to a fault or None.

The types themselves come from the annotations in `spec.py`; rules that involve several keys or
several adapters are in `spec_file.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from gshare.agent.jobs.faults import Faults, convert
from gshare.agent.jobs.names import name_fault, nearest, shorten
from gshare.agent.jobs.spec import LINEARS, AdapterSpec, RunSpec
from gshare.kernels import limits

Rule = Callable[[Any], str | None]

#: Above this nothing sensible is meant, and 32-bit token and row counters stay far from overflow.
_LARGEST_INT = 2**31 - 1
#: Seeds are mixed into 64-bit Philox keys; signed, so that every file format holds them.
_LARGEST_SEED = 2**63 - 1
MAX_RANK = 1024
#: Far beyond any use, and epochs × steps of an epoch (below 2^31 rows) stays within 64 bits.
MAX_EPOCHS = 1e6
#: Rows of one optimizer step, over all of its micro-batches.
MAX_ROWS_OF_STEP = 2**20
#: A sweep beyond this is a slip: the report alone would have thousands of curves.
MAX_CONFIGURATIONS = 4096

ADAPTER_TYPES: dict[str, Any] = {f.name: f.type for f in msgspec.structs.fields(AdapterSpec)}
#: `adapters` and `source` are not keys of the file.
RUN_TYPES: dict[str, Any] = {
    f.name: f.type for f in msgspec.structs.fields(RunSpec) if f.name not in ("adapters", "source")
}


def _whole(least: int, most: int = _LARGEST_INT) -> Rule:
    def rule(value: int) -> str | None:
        if value < least:
            return f"must be at least {least}, not {shorten(value)}"
        return f"must be at most {most}, not {shorten(value)}" if value > most else None

    return rule


def _positive(most: float, least: float = 0.0) -> Rule:
    """Above 0 (from `least`, where given) and at most `most`; NaN is neither."""

    def rule(value: float) -> str | None:
        if not (math.isfinite(value) and value > 0):
            return f"must be a finite number above 0, not {value}"
        if value < least:
            return f"must be at least {least:g}, not {value}"
        return f"must be at most {most:g}, not {value}" if value > most else None

    return rule


def _not_negative(most: float) -> Rule:
    def rule(value: float) -> str | None:
        if not (math.isfinite(value) and value >= 0):
            return f"must be a finite number, 0 or more, not {value}"
        return f"must be at most {most:g}, not {value}" if value > most else None

    return rule


def _fraction(value: float) -> str | None:
    return None if 0 <= value < 1 else f"must be at least 0 and below 1, not {value}"


def _ratio(value: float) -> str | None:
    return None if 0 <= value <= 1 else f"must be between 0 and 1, not {value}"


def _max_steps(value: int) -> str | None:
    if value == -1:
        return None
    if value < 1:
        return f"must be -1 (no limit) or at least 1, not {shorten(value)}"
    return _whole(1)(value)


def _text(value: str | None) -> str | None:
    if value is None:
        return None
    if not value.strip():
        return "may not be empty"
    return f"{shorten(value)} holds control characters" if not value.isprintable() else None


_NOT_TARGETS = {
    "lm_head": "the output head may share its weights with the embedding (tied), where an adapter on it "
    "could not be exported so that it reloads identically",
    "embed_tokens": "the embedding may share its weights with the output head (tied), where an adapter on it "
    "could not be exported so that it reloads identically",
}


def _target_modules(value: str | tuple[str, ...]) -> str | None:
    known = f'known: {", ".join(LINEARS)}, or "all-linear" for all of them'
    if isinstance(value, str):
        if value == "all-linear":
            return None
        if value in LINEARS:
            return f'write ["{value}"]: a text may only be "all-linear"'
        value = (value,)
    if not value:
        return f"names no module; {known}"
    for name in value:
        if name in _NOT_TARGETS:
            return f"{name} is not supported as a target: {_NOT_TARGETS[name]}; {known}"
        if name not in LINEARS:
            hint = nearest(name, LINEARS)
            return f"unknown module {shorten(name)}; {known}" + (f". Did you mean {hint!r}?" if hint else "")
    if len(set(value)) < len(value):
        return "names a module twice"
    return None


def _layers(value: tuple[int, ...] | None) -> str | None:
    if value is None:
        return None
    if not value:
        return "names no layer; leave it out for all layers"
    if min(value) < 0 or max(value) > _LARGEST_INT:
        return f"layers count from 0; {shorten(min(value) if min(value) < 0 else max(value))} is none"
    return "names a layer twice" if len(set(value)) < len(value) else None


def _layers_pattern(value: str | None) -> str | None:
    if value in (None, "layers"):
        return None
    return f'no layer would match {shorten(value)}: the list of layers is called "layers" in every model here'


def _trunk_cache(value: float | str) -> str | None:
    if value in ("auto", "off"):
        return None
    try:
        fault = _not_negative(1e6)(float(value))
    except ValueError:
        return f'must be "auto", "off" or a number of GiB, not {shorten(value)}'
    return None if fault is None else f'{fault}; or "auto" or "off"'


def _optional(rule: Rule) -> Rule:
    return lambda value: None if value is None else rule(value)


_SEED = _whole(0, _LARGEST_SEED)

#: Whole numbers of the table [sweep].
SWEEP_RULES: dict[str, Rule] = {
    "max_concurrent": _whole(0),
    "n_trials": _whole(0, MAX_CONFIGURATIONS),
    "batch": _whole(1),
    "seed": _SEED,
}

ADAPTER_RULES: dict[str, Rule] = {
    "name": name_fault,
    "data": _text,
    "output_dir": _text,
    "val_data": _text,
    "r": _whole(1, MAX_RANK),
    "lora_alpha": _optional(_positive(1e6, 1e-6)),
    "lora_dropout": _fraction,
    "target_modules": _target_modules,
    "layers_to_transform": _layers,
    "layers_pattern": _layers_pattern,
    "learning_rate": _positive(1e6, 1e-30),
    "warmup_ratio": _ratio,
    "per_device_train_batch_size": _whole(1, MAX_ROWS_OF_STEP),
    "gradient_accumulation_steps": _whole(1, MAX_ROWS_OF_STEP),
    "num_train_epochs": _positive(MAX_EPOCHS, 1e-9),
    "max_steps": _max_steps,
    "max_length": _whole(2),
    "adam_beta1": _fraction,
    "adam_beta2": _fraction,
    "adam_epsilon": _positive(1.0, 1e-30),  # 1e-46 is 0 in fp32, and 0 / 0 is NaN
    "weight_decay": _not_negative(1e3),
    "max_grad_norm": _not_negative(1e30),
    "eval_steps": _whole(0),
    "save_steps": _whole(0),
    "save_total_limit": _whole(1),
    "val_fraction": _fraction,
    "weight": _positive(1e9, 1e-9),
    "seed": _optional(_SEED),
}

RUN_RULES: dict[str, Rule] = {
    "model": _text,
    "seed": _SEED,
    "max_tokens_per_pass": _whole(1),
    "max_adapters_per_pass": _whole(0),
    "trunk_cache": _trunk_cache,
    "trunk_cache_host": _not_negative(1e6),
}


def adapter_value(key: str, raw: object, *, lax: bool = False) -> tuple[Any, str | None]:
    """(typed value, None) of an adapter's key, or (None, fault). `lax`: from the command line."""
    return _value(raw, ADAPTER_TYPES[key], ADAPTER_RULES.get(key), lax=lax)


def run_value(key: str, raw: object, *, lax: bool = False) -> tuple[Any, str | None]:
    """The same for a key of the whole run."""
    return _value(raw, RUN_TYPES[key], RUN_RULES.get(key), lax=lax)


def check_ranks(specs: Iterable[AdapterSpec], most: int = limits.MAX_RANK) -> None:
    """UsageError naming each adapter whose rank is beyond what an engine takes, by default one on a GPU."""
    faults = Faults()
    for spec in specs:
        if spec.r > most:
            faults.add(
                f"adapter {spec.name}: r {spec.r}",
                f"is beyond {most}, the most that the CUDA kernels take; lower it, or train on the CPU",
            )
    faults.raise_if_any()


def _value(raw: object, annotation: Any, rule: Rule | None, *, lax: bool) -> tuple[Any, str | None]:
    # "all-linear" is the one text that is not a list of modules with a single entry.
    if lax and raw == "all-linear":
        lax = False
    value, fault = convert(raw, annotation, lax=lax)
    if fault is None and rule is not None:
        fault = rule(value)
    return (value, None) if fault is None else (None, fault)
