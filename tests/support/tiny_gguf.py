"""Writes a toy checkpoint as a GGUF file, the way llama.cpp's converter lays it out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gshare.agent.base.config import read_config
from gshare.agent.base.tiny import CHATML, make_tiny_tokenizer
from safetensors.numpy import load_file

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` → `blk.0.ffn_up.weight`."""
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return whole.get(name, "output.weight")
    layer, module = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{_NAMES[module]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF's Llama rotates neighbouring rows of q and k, Hugging Face's the two halves of a head."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weight.shape))


def add_byte_level(writer: gguf.GGUFWriter, pre: str) -> None:
    """The toy tokenizer: its vocabulary, merges and types."""
    tokenizer = make_tiny_tokenizer()
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_token_list(tokens)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    special = set(tokenizer.all_special_tokens)
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if token in special else kinds.NORMAL for token in tokens])


def add_sentencepiece(writer: gguf.GGUFWriter) -> None:
    """A Llama 2 vocabulary as long as the toy tokenizer's: specials, bytes, and pieces with scores."""
    pieces = [*"▁theinasyouwrdlk", "he", "▁t", "▁the", "in", "▁in", "▁i", "yo", "ou"]
    ranks = [*range(len(pieces) - 2), len(pieces) - 1, len(pieces) - 2]  # "ou" before "yo"
    kinds = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])
    writer.add_token_scores([0.0] * 259 + [float(-rank) for rank in ranks])
    writer.add_token_types(
        [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL] + [kinds.BYTE] * 256 + [kinds.NORMAL] * len(pieces)
    )
    writer.add_unk_token_id(0)


def write_tiny_gguf(
    checkpoint: Path,
    path: Path,
    *,
    quantisation: str = "F32",
    architecture: str = "llama",
    pre: str = "smollm",
    sentencepiece: bool = False,
    more: Callable[[gguf.GGUFWriter], Any] = lambda writer: None,
) -> Path:
    """`checkpoint` is a Llama with the toy tokenizer. Matrices get `quantisation`; `more` may add keys."""
    config = read_config(checkpoint)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("toy")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if sentencepiece:
        add_sentencepiece(writer)
    else:
        add_byte_level(writer, pre)
        writer.add_add_bos_token(False)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHATML)
    more(writer)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        heads = {"q_proj.weight": config.num_heads, "k_proj.weight": config.num_kv_heads}.get(name[-13:])
        weight = interleaved(tensor, heads) if heads else tensor
        kind = gguf.GGMLQuantizationType[quantisation if weight.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
