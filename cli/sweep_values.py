"""What a configuration of a sweep is, in a few words: one that was drawn is called by its number alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gshare.agent.jobs.names import plain, shorten
from gshare.agent.jobs.sweep_spec import SweepSpec

_SHORT = {
    "gradient_accumulation_steps": "accumulation",
    "learning_rate": "lr",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch",
}


def values_text(values: Mapping[str, Any]) -> str:
    """As "lr 0.000123, batch 4"; "" of none."""
    return ", ".join(f"{_SHORT.get(key, key)} {_shown(value)}" for key, value in values.items())


def is_numbered(name: str) -> bool:
    """Its name says nothing of its values: they were drawn, or are too many for a name, or make none."""
    return re.fullmatch(r"(.*-)?c\d+", name) is not None


def values_of(spec: SweepSpec) -> dict[str, dict[str, Any]]:
    """Of each configuration so far: all that was drawn for it, or that in which it differs."""
    pairs = zip(spec.run.adapters, spec.hyper_parameters, strict=True)
    if spec.sampled is None:
        return {adapter.name: values for adapter, values in pairs}
    return {adapter.name: {key: getattr(adapter, key) for key in spec.sampled.ranges} for adapter, _ in pairs}


def drawn(spec: SweepSpec, before: int = 0) -> list[str]:
    """A line for each configuration of a sampled sweep, after the first `before`; none of another sweep."""
    if spec.sampled is None:
        return []
    return [f"{name}: drawn with {values_text(values)}" for name, values in values_of(spec).items()][before:]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return plain("+".join(map(str, value)))
    return plain(shorten(value).strip("'"))
