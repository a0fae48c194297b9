"""What tells one family from another. A family file turns a `config.json` into these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gshare.agent.base.raw_config import RawConfig


@dataclass(frozen=True)
class Traits:
    """The part of a model that depends on its family; defaults are those of Llama."""

    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    default_kv_heads: int | None = None  # where config.json leaves it out; None: as many as query heads
    default_max_positions: int = 2048
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    #: Of each layer: a query sees itself and the `window - 1` positions before it. None: all layers full.
    sliding_window: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class Family:
    name: str  # `model_type` of config.json
    architecture: str  # its entry in `architectures`
    traits: Callable[[RawConfig], Traits]


def windows_of_layers(raw: RawConfig) -> tuple[int | None, ...] | None:
    """Qwen's rule: `use_sliding_window`, then `layer_types`, else the layers from `max_window_layers` on."""
    layers = raw.integer("num_hidden_layers")
    if not raw.flag("use_sliding_window", default=False):
        types = raw.values.get("layer_types") or []
        if "sliding_attention" in types:
            raise raw.error("layer_types", "has sliding_attention but use_sliding_window is not true")
        return None
    window = raw.integer("sliding_window", 4096)
    types = raw.values.get("layer_types")
    if types is None:
        first = raw.values.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise raw.error("max_window_layers", f"must be an integer of at least 0, not {first!r}")
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise raw.error("layer_types", f"must list one type for each of the {layers} layers")
    for kind in types:
        if kind not in {"sliding_attention", "full_attention"}:
            raise raw.error("layer_types", f"has {kind!r}; known: full_attention, sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
