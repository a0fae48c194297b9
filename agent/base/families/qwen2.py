"""Qwen2 and Qwen2.5: biases on q, k and v; a sliding window for the upper layers when switched on."""

from __future__ import annotations

from gshare.agent.base.families.traits import Family, Traits, windows_of_layers
from gshare.agent.base.raw_config import RawConfig


def traits(raw: RawConfig) -> Traits:
    return Traits(
        default_kv_heads=32 if "num_key_value_heads" not in raw.values else None,
        default_max_positions=32768,
        qkv_bias=True,
        sliding_window=windows_of_layers(raw),
    )


FAMILY = Family("qwen2", "Qwen2ForCausalLM", traits)
