"""What `benchmarks/gpu.py` trains: model shapes with random weights, and workload W16."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gshare.agent.base.config import ModelConfig, RopeConfig
from gshare.agent.base.load import load_base
from gshare.agent.base.weights import (
    Base,
    BaseLayer,
    BaseLinear,
    DenseWeight,
    Nf4Weight,
    Scratch,
    Weight,
    grouped,
)
from gshare.agent.jobs.spec import LINEARS, AdapterSpec
from gshare.agent.train.part import Row
from gshare.kernels import nf4

#: Hugging Face config values; the PEFT arms build the same model from them.
SHAPES: dict[str, dict[str, object]] = {
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
    },
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    "qwen2.5-0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    # For tests on the CPU.
    "tiny": {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1024,
    },
}


def shape_config(name: str) -> ModelConfig:
    """The decoder's configuration of a shape of `SHAPES`."""
    s = SHAPES[name]
    qwen = name.startswith("qwen2")
    head_dim, longest = int(str(s["head_dim"])), int(str(s["max_position_embeddings"]))
    return ModelConfig(
        family="qwen2" if qwen else "llama",
        vocab_size=int(str(s["vocab_size"])),
        hidden_size=int(str(s["hidden_size"])),
        intermediate_size=int(str(s["intermediate_size"])),
        num_layers=int(str(s["num_hidden_layers"])),
        num_heads=int(str(s["num_attention_heads"])),
        num_kv_heads=int(str(s["num_key_value_heads"])),
        head_dim=head_dim,
        rms_norm_eps=float(str(s["rms_norm_eps"])),
        rope=RopeConfig(
            kind="default",
            theta=float(str(s["rope_theta"])),
            head_dim=head_dim,
            max_position_embeddings=longest,
        ),
        sliding_window=(None,) * int(str(s["num_hidden_layers"])),
        qkv_bias=qwen,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=bool(s["tie_word_embeddings"]),
        max_position_embeddings=longest,
        bos_token_id=None,
        eos_token_ids=(),
    )


def random_base(config: ModelConfig, base_dtype: str, device: torch.device, *, seed: int = 0) -> Base:
    """A base of this shape with weights ~ N(0, 0.02), norms 1, in fp32, bf16 or NF4."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = torch.float32 if base_dtype == "fp32" else torch.bfloat16
    scratch = Scratch(device, dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)

    def weight(shape: tuple[int, int]) -> Weight:
        dense = normal(*shape)
        return Nf4Weight(nf4.quantise(dense), scratch) if base_dtype == "nf4" else DenseWeight(dense, scratch)

    def ones() -> torch.Tensor:
        return torch.ones(config.hidden_size, dtype=dtype, device=device)

    layers = []
    for _ in range(config.num_layers):
        linears = {}
        for name in LINEARS:
            shape = config.linear_shape(name)
            linears[name] = BaseLinear(weight(shape), normal(shape[0]) if config.has_bias(name) else None)
        layers.append(BaseLayer(ones(), ones(), None, None, linears, grouped(linears, scratch)))
    embed = normal(config.vocab_size, config.hidden_size)
    head = embed if config.tie_word_embeddings else normal(config.vocab_size, config.hidden_size)
    return Base(
        config=config,
        embed=embed,
        layers=layers,
        final_norm=ones(),
        lm_head=DenseWeight(head, scratch),
        compute_dtype=dtype,
        base_dtype=base_dtype,
        device=device,
        fingerprint=f"random-{seed}",
        scratch=scratch,
    )


def make_base(model: str, base_dtype: str, device: torch.device) -> Base:
    """A shape of `SHAPES`, or a checkpoint directory with real weights."""
    if model in SHAPES:
        return random_base(shape_config(model), base_dtype, device)
    return load_base(Path(model), base_dtype=base_dtype, device=device)


#: Tokens of the longest sequence.
LONGEST = 512


def _draw() -> np.ndarray:
    values = np.exp(np.random.default_rng(0).normal(np.log(170.0), 0.55, size=(64, 64)))
    return np.clip(np.rint(values), 64, LONGEST).astype(int)


_LENGTHS = _draw()


@dataclass(frozen=True)
class Workload:
    """W16 and its smaller and larger kin: N adapters, batch 1, loss on all tokens."""

    adapters: int
    steps: int
    vocabulary: int
    rank: int = 16

    def lengths(self) -> np.ndarray:
        """(steps, adapters): lognormal, median 170, σ 0.55, clipped to 64–512, as GSM8K's rows; seed 0.

        Drawn for 64 adapters, so that every N trains the same jobs.
        """
        return _LENGTHS[: self.steps, : self.adapters]

    def rows(self, step: int, adapter: int) -> list[Row]:
        length = int(self.lengths()[step, adapter])
        draw = np.random.default_rng((step, adapter))
        tokens = draw.integers(3, self.vocabulary, length).astype(np.int32)
        return [Row(tokens, np.ones(length, dtype=bool))]

    def specs(self) -> list[AdapterSpec]:
        return [
            AdapterSpec(
                name=f"w{number:02d}",
                data="w.jsonl",
                output_dir=f"w{number:02d}",
                r=self.rank,
                lora_alpha=2.0 * self.rank,
                learning_rate=1e-4,
                seed=number,
            )
            for number in range(self.adapters)
        ]

    def mean_tokens(self, first_step: int) -> int:
        """Tokens of an average step from `first_step` on."""
        return round(float(self.lengths()[first_step:].sum(axis=1).mean()))
