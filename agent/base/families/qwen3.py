"""Qwen3 (dense): RMS norms on each head's q and k before RoPE, no biases unless the config asks for them."""

from __future__ import annotations

from gshare.agent.base.families.traits import Family, Traits, windows_of_layers
from gshare.agent.base.raw_config import RawConfig


def traits(raw: RawConfig) -> Traits:
    attention_bias = raw.flag("attention_bias", default=False)
    return Traits(
        head_dim=128,
        default_kv_heads=32 if "num_key_value_heads" not in raw.values else None,
        default_max_positions=32768,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        sliding_window=windows_of_layers(raw),
    )


FAMILY = Family("qwen3", "Qwen3ForCausalLM", traits)
