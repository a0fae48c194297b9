"""The model's shape, read from a Hugging Face `config.json`. No torch.

Only what the decoder implements is accepted; anything else in the file that would change the numbers is
refused with the reason, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from gshare.agent.base.families import family_of
from gshare.agent.base.raw_config import RawConfig
from gshare.agent.jobs.spec import LINEARS

RopeKind = Literal["default", "linear", "llama3", "yarn"]

_REFUSED_ROPE = {
    "dynamic": "frequencies follow the longest row of a batch, so a loss would depend on neighbours",
    "longrope": "frequencies follow the longest row of a batch, so a loss would depend on neighbours",
}


#: The deepest models have some hundreds; tensors are listed by name for every layer.
_MOST_LAYERS = 10_000


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding over all `head_dim` features; fields beyond `factor` serve llama3 or yarn."""

    kind: RopeKind
    theta: float
    head_dim: int
    max_position_embeddings: int
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn; None: from factor, mscale, mscale_all_dim
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model with RMS norms, grouped-query attention with RoPE, and a SwiGLU MLP."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    sliding_window: tuple[int | None, ...]  # of each layer; a query sees itself and window - 1 before it
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def linear_shape(self, name: str) -> tuple[int, int]:
        """(out_features, in_features) of one of `LINEARS`."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (heads, self.hidden_size),
            "k_proj": (kv_heads, self.hidden_size),
            "v_proj": (kv_heads, self.hidden_size),
            "o_proj": (self.hidden_size, heads),
            "gate_proj": (self.intermediate_size, self.hidden_size),
            "up_proj": (self.intermediate_size, self.hidden_size),
            "down_proj": (self.hidden_size, self.intermediate_size),
        }[name]

    def has_bias(self, name: str) -> bool:
        """Whether the linear of `LINEARS` has a bias."""
        if name in {"q_proj", "k_proj", "v_proj"}:
            return self.qkv_bias
        return self.o_bias if name == "o_proj" else self.mlp_bias

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that a checkpoint must hold, by its Hugging Face name, in the order of the model."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size)
        }
        for layer in range(self.num_layers):
            shapes[f"model.layers.{layer}.input_layernorm.weight"] = (self.hidden_size,)
            for name in LINEARS:
                shapes[f"{linear_prefix(layer, name)}.weight"] = self.linear_shape(name)
                if self.has_bias(name):
                    shapes[f"{linear_prefix(layer, name)}.bias"] = (self.linear_shape(name)[0],)
            if self.qk_norm:
                shapes[f"model.layers.{layer}.self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"model.layers.{layer}.self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[f"model.layers.{layer}.post_attention_layernorm.weight"] = (self.hidden_size,)
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def parameter_count(self) -> int:
        """All parameters; a tied head counts once."""
        total = 0
        for shape in self.tensor_shapes().values():
            total += shape[0] * (shape[1] if len(shape) == 2 else 1)
        return total


def linear_prefix(layer: int, name: str) -> str:
    """Module name of a linear in Hugging Face checkpoints, and in PEFT adapters below `base_model.model.`."""
    block = "mlp" if name in {"gate_proj", "up_proj", "down_proj"} else "self_attn"
    return f"model.layers.{layer}.{block}.{name}"


def read_config(model_dir: Path) -> ModelConfig:
    """Read `model_dir/config.json`.

    Raises UsageError, naming file and key, for an architecture, activation, RoPE kind or other setting that
    the decoder does not implement, and for missing or contradictory values.
    """
    raw = RawConfig.read(model_dir)
    family = family_of(raw)
    _refuse_unsupported(raw)
    # Before the family, which may list something for each layer.
    layers = raw.integer("num_hidden_layers", most=_MOST_LAYERS)
    traits = family.traits(raw)
    hidden, heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    kv_heads = raw.integer("num_key_value_heads", traits.default_kv_heads or heads)
    if heads % kv_heads:
        raise raw.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    if not raw.has("head_dim") and traits.head_dim is None and hidden % heads:
        raise raw.error("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = raw.integer("head_dim", traits.head_dim or hidden // heads)
    if head_dim % 2:
        raise raw.error("head_dim", f"must be even for RoPE, not {head_dim}")
    max_positions = raw.integer("max_position_embeddings", traits.default_max_positions)
    return ModelConfig(
        family=family.name,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=raw.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
        rope=read_rope(raw, head_dim, max_positions),
        sliding_window=traits.sliding_window or (None,) * layers,
        qkv_bias=traits.qkv_bias,
        o_bias=traits.o_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        tie_word_embeddings=raw.flag("tie_word_embeddings", default=False),
        max_position_embeddings=max_positions,
        bos_token_id=_token_ids(raw, "bos_token_id")[0] if raw.has("bos_token_id") else None,
        eos_token_ids=_token_ids(raw, "eos_token_id"),
    )


def _refuse_unsupported(raw: RawConfig) -> None:
    activation = raw.values.get("hidden_act", "silu")
    if activation not in {"silu", "swish"}:
        raise raw.error("hidden_act", f"is {activation!r}; only silu is supported")
    if raw.values.get("attention_dropout"):
        raise raw.error("attention_dropout", "must be 0: only the adapters have dropout")
    if raw.has("quantization_config"):
        raise raw.error(
            "quantization_config",
            "is set: the checkpoint is already quantised; use the original one and choose base_dtype",
        )


def read_rope(raw: RawConfig, head_dim: int, max_positions: int) -> RopeConfig:
    """`rope_parameters` (transformers 5), else `rope_theta` with `rope_scaling` (before)."""
    rope = raw.table("rope_scaling") or raw.table("rope_parameters") or RawConfig({}, raw.source)
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise raw.error("rope_parameters", "differs between layer types, which is not supported")
    for table in (raw, rope):
        if table.values.get("partial_rotary_factor") not in {None, 1}:
            raise table.error(
                "partial_rotary_factor", "must be 1: rotating a part of a head is not supported"
            )
    theta = rope.number("rope_theta", raw.number("rope_theta", 10000.0))
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind in _REFUSED_ROPE:
        raise rope.error("rope_type", f"{kind} is refused: {_REFUSED_ROPE[kind]}")
    if kind not in get_args(RopeKind):
        raise rope.error("rope_type", f"is {kind!r}; known: {', '.join(get_args(RopeKind))}")
    if kind == "default":
        return RopeConfig("default", theta, head_dim, max_positions)
    if kind == "linear":
        return RopeConfig("linear", theta, head_dim, max_positions, factor=rope.number("factor"))
    # A value beside the table wins over the one inside, as in transformers.
    original = raw.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_positions)
    )
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.error("low_freq_factor", f"{low} must be below high_freq_factor {high}")
        return RopeConfig(
            kind="llama3",
            theta=theta,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            factor=rope.number("factor"),
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return RopeConfig(
        kind="yarn",
        theta=theta,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        factor=rope.number("factor", max_positions / original),
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor") if rope.has("attention_factor") else None,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.number("mscale") if rope.values.get("mscale") else None,
        mscale_all_dim=rope.number("mscale_all_dim") if rope.values.get("mscale_all_dim") else None,
        truncate=rope.flag("truncate", default=True),
    )


def _token_ids(raw: RawConfig, key: str) -> tuple[int, ...]:
    """One id, a list of ids, or nothing."""
    value = raw.values.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise raw.error(key, f"must be a token id or a list of them, not {value!r}")
    return tuple(ids)
