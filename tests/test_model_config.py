"""agent/base/config.py and the families, against transformers' own config objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gshare.agent.base.config import ModelConfig, read_config
from gshare.agent.errors import UsageError
from transformers import AutoConfig, AutoModelForCausalLM

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def write(directory: Path, values: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def raw(family: str, **more: Any) -> dict[str, Any]:
    return {"architectures": [ARCHITECTURES[family]], "model_type": family, **SMALL, **more}


def config_of(directory: Path, family: str, **more: Any) -> ModelConfig:
    return read_config(write(directory, raw(family, **more)))


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"head_dim": 32, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}),
    ("mistral", {}),
    ("mistral", {"sliding_window": None, "head_dim": 32}),
    ("mistral", {"sliding_window": 7}),
    ("qwen2", {"tie_word_embeddings": True, "rope_theta": 1000000.0}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 1}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "head_dim": 16}),
    (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
]


@pytest.mark.parametrize(("family", "more"), CASES)
def test_equals_transformers(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    """Shapes, biases, norms from the meta-device model; the rest from the config object."""
    ours = config_of(tmp_path, family, **more)
    theirs = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert ours.tensor_shapes() == shapes
    assert ours.parameter_count() == sum(parameter.numel() for parameter in model.parameters())
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    if family == "mistral":
        windows = [theirs.sliding_window] * 3
    elif family == "llama":
        windows = [None] * 3
    else:
        windows = [layer.self_attn.sliding_window for layer in model.model.layers]
    assert list(ours.sliding_window) == windows


def test_defaults_of_absent_keys_are_transformers(tmp_path: Path) -> None:
    for family in ARCHITECTURES:
        values = raw(family, hidden_size=128, num_attention_heads=32)
        del values["num_key_value_heads"]
        ours = read_config(write(tmp_path, values))
        theirs = AutoConfig.from_pretrained(tmp_path)
        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.max_position_embeddings == theirs.max_position_embeddings
        assert ours.head_dim == getattr(theirs, "head_dim", 4)


def test_saved_by_transformers_reads_the_same(tmp_path: Path) -> None:
    """`rope_parameters` of transformers 5 and `rope_scaling` + `rope_theta` of before mean the same."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    values = raw("llama", bos_token_id=1, eos_token_id=2, max_position_embeddings=1024)
    old = read_config(write(tmp_path, {**values, "rope_theta": 50000.0, "rope_scaling": scaling}))
    saved = tmp_path / "saved"
    AutoConfig.from_pretrained(tmp_path).save_pretrained(saved)
    assert "rope_parameters" in json.loads((saved / "config.json").read_text())
    assert read_config(saved) == old
    assert old.rope.kind == "llama3"


def test_token_ids(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama", bos_token_id=1, eos_token_id=[2, 7])
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 7))
    config = config_of(tmp_path, "llama", eos_token_id=None)
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, ["architectures", "GPT2LMHeadModel", *ARCHITECTURES.values()]),
    ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification"]),
    ({"architectures": None, "model_type": "bloom"}, ["bloom", "LlamaForCausalLM"]),
    ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
    ({"attention_dropout": 0.1}, ["attention_dropout"]),
    ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "base_dtype"]),
    ({"num_attention_heads": 3}, ["num_key_value_heads", "3"]),
    ({"hidden_size": 66, "num_key_value_heads": 4}, ["hidden_size", "66"]),
    ({"head_dim": 15}, ["head_dim", "15"]),
    ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers"]),
    ({"num_hidden_layers": 10**12}, ["num_hidden_layers", "at most 10000"]),
    ({"max_position_embeddings": -1}, ["max_position_embeddings", "positive integer, not -1"]),
    ({"hidden_size": 2**40}, ["hidden_size", "at most"]),
    ({"rope_theta": 10**400}, ["rope_theta", "finite"]),
    ({"rms_norm_eps": float("inf")}, ["rms_norm_eps", "finite"]),
    ({"vocab_size": None}, ["vocab_size", "missing"]),
    ({"attention_bias": "yes"}, ["attention_bias", "'yes'"]),
    ({"eos_token_id": "x"}, ["eos_token_id"]),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic", "neighbours"]),
    ({"rope_scaling": {"rope_type": "longrope"}}, ["longrope", "neighbours"]),
    ({"rope_scaling": {"rope_type": "magic"}}, ["magic", "yarn"]),
    ({"rope_scaling": {"rope_type": "linear"}}, ["factor", "missing"]),
    ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, ["factor", "-1"]),
    ({"rope_scaling": "linear"}, ["rope_scaling"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["layer types"]),
]


@pytest.mark.parametrize(("more", "words"), REFUSED)
def test_refused_in_one_line_that_names_file_and_key(
    tmp_path: Path, more: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        config_of(tmp_path, "llama", **more)
    message = str(caught.value)
    assert str(tmp_path / "config.json") in message
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("family", "more", "word"),
    [
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["chunked"] * 3}, "chunked"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
    ],
)
def test_wrong_windows(tmp_path: Path, family: str, more: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        config_of(tmp_path, family, **more)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"a": ')
    with pytest.raises(UsageError, match=r"config\.json cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UsageError, match="JSON object"):
        read_config(tmp_path)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_layers_without_end_are_refused_before_they_are_listed(tmp_path: Path, family: str) -> None:
    with pytest.raises(UsageError, match="num_hidden_layers must be at most"):
        config_of(tmp_path, family, num_hidden_layers=10**12)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_absurd_json_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match="cannot be read"):
        read_config(tmp_path)
