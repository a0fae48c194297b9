"""agent/base/rope.py against transformers' rotary embedding: the same bits for every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gshare.agent.base.config import read_rope
from gshare.agent.base.raw_config import RawConfig
from gshare.agent.base.rope import inverse_frequencies, rope_tables
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "factor": 4.0},
    {**LLAMA3, "original_max_position_embeddings": 128},
    {**LLAMA3, "rope_theta": 500000.0, "factor": 32.0, "original_max_position_embeddings": 64},
    YARN,
    {**YARN, "rope_theta": 1000000.0, "beta_fast": 16.0, "beta_slow": 2.0},
    {**YARN, "attention_factor": 0.7},
    {**YARN, "mscale": 0.707, "mscale_all_dim": 1.2},
    {**YARN, "truncate": False},
    {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 256},
    {"rope_type": "yarn", "factor": 4.0},  # the original length is then the model's
]


@pytest.mark.parametrize("head_dim", [16, 64, 80])
@pytest.mark.parametrize("parameters", CASES)
def test_equals_transformers(parameters: dict[str, Any], head_dim: int) -> None:
    parameters = {"rope_theta": 10000.0, **parameters}
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            head_dim=head_dim,
            max_position_embeddings=1024,
            rope_parameters=dict(parameters),
        )
    )
    ours = read_rope(RawConfig({"rope_parameters": dict(parameters)}, "config.json"), head_dim, 1024)
    frequencies, scaling = inverse_frequencies(ours)
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, theirs.inv_freq)
    assert scaling == theirs.attention_scaling
    cos_theirs, sin_theirs = theirs(torch.zeros(1), torch.arange(1000).unsqueeze(0))
    cos, sin = rope_tables(ours, 1000, CPU)
    assert torch.equal(cos, cos_theirs[0])
    assert torch.equal(sin, sin_theirs[0])


def test_kinds_really_differ() -> None:
    """Negative control: a scaling that is dropped would pass no longer."""
    tables = []
    for parameters in ({"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, CASES[3], YARN):
        config = read_rope(RawConfig({"rope_parameters": parameters}, "config.json"), 64, 1024)
        tables.append(rope_tables(config, 64, CPU)[0])
    for i, one in enumerate(tables):
        for other in tables[i + 1 :]:
            assert (one - other).abs().max() > 0.01


def test_longer_tables_begin_with_the_shorter() -> None:
    config = read_rope(RawConfig({}, "config.json"), 64, 1024)
    for short, long in zip(rope_tables(config, 37, CPU), rope_tables(config, 512, CPU), strict=True):
        assert short.shape == (37, 64)
        assert torch.equal(short, long[:37])
