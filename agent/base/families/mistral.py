"""Mistral: Llama with one sliding window for all layers (null: none)."""

from __future__ import annotations

from gshare.agent.base.families.traits import Family, Traits
from gshare.agent.base.raw_config import RawConfig


def traits(raw: RawConfig) -> Traits:
    if raw.has("layer_types"):
        # transformers ignores the key here; such a file belongs to another architecture (Ministral).
        raise raw.error("layer_types", "is not part of Mistral, whose layers are all alike")
    # Absent means 4096, null means no window: transformers' MistralConfig.
    absent = "sliding_window" not in raw.values
    window = raw.integer("sliding_window", 4096) if absent or raw.has("sliding_window") else None
    return Traits(
        default_kv_heads=8 if "num_key_value_heads" not in raw.values else None,
        default_max_positions=131072,
        sliding_window=None if window is None else (window,) * raw.integer("num_hidden_layers"),
    )


FAMILY = Family("mistral", "MistralForCausalLM", traits)
