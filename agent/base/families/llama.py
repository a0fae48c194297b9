"""Llama 2 and 3, SmolLM2, TinyLlama, Yi, …: no biases unless the config asks for them."""

from __future__ import annotations

from gshare.agent.base.families.traits import Family, Traits
from gshare.agent.base.raw_config import RawConfig


def traits(raw: RawConfig) -> Traits:
    attention_bias = raw.flag("attention_bias", default=False)
    return Traits(
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=raw.flag("mlp_bias", default=False),
    )


FAMILY = Family("llama", "LlamaForCausalLM", traits)
