"""agent/base/gguf_convert.py on toy GGUF files: the same model comes out, or nothing does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gshare.agent.base.config import RopeConfig, read_config
from gshare.agent.base.gguf_convert import convert_gguf
from gshare.agent.base.gguf_tokenizer import set_special_tokens
from gshare.agent.base.rope import inverse_frequencies
from gshare.agent.base.tiny import CHATML, make_tiny_checkpoint, make_tiny_tokenizer
from gshare.agent.errors import UsageError
from safetensors.torch import load_file
from tiny_gguf import write_tiny_gguf
from transformers import AutoTokenizer

VOCAB = len(make_tiny_tokenizer())
TEXTS = [
    "the thing is in you",
    "  two  5 spaces",
    "a1234 5",
    "it's\n\n\tyours",
    "<|im_start|>user\nhé 漢<|im_end|>",
]


def checkpoint(directory: Path, **more: Any) -> Path:
    # Q8_0 blocks are 32 long, so K has to be a multiple.
    return make_tiny_checkpoint(directory, intermediate_size=192, vocab_size=VOCAB, **more)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("source"))


def ids_dropped(path: Path) -> Any:
    return dataclasses.replace(read_config(path), bos_token_id=None, eos_token_ids=())


@pytest.mark.parametrize("tie", [False, True])
def test_fp32_round_trip(tmp_path: Path, tie: bool) -> None:
    """Weights to the bit, config, tokenizer, chat template, special ids."""
    original = checkpoint(tmp_path / "source", tie=tie)
    said: list[str] = []
    out = tmp_path / "out"
    convert_gguf(write_tiny_gguf(original, tmp_path / "toy.gguf"), out, dtype="float32", step=said.append)
    assert len(said) == 3
    assert not list(out.glob("*.bin"))
    before, after = load_file(original / "model.safetensors"), load_file(out / "model.safetensors")
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    ours, theirs = ids_dropped(out), ids_dropped(original)
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps, rel=1e-6)  # GGUF stores it in fp32
    assert dataclasses.replace(ours, rms_norm_eps=theirs.rms_norm_eps) == theirs
    assert (read_config(out).bos_token_id, read_config(out).eos_token_ids) == (1, (2,))
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.chat_template == CHATML
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert 1 not in ids[1:]


def test_quantised_blocks_are_unpacked(tmp_path: Path, source: Path) -> None:
    file = write_tiny_gguf(source, tmp_path / "toy.gguf", quantisation="Q8_0")
    convert_gguf(file, tmp_path / "out", dtype="bfloat16")
    original, after = (
        load_file(source / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    for name, tensor in after.items():
        assert tensor.dtype == torch.bfloat16
        wanted = original[name]
        if wanted.dim() == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            stored = gguf.quants.quantize(wanted.numpy(), kind)
            wanted = torch.from_numpy(gguf.quants.dequantize(stored, kind))
            assert not torch.equal(wanted, original[name])
        assert torch.equal(tensor, wanted.bfloat16()), name


def test_pre_tokenizers_split_as_the_file_says(tmp_path: Path, source: Path) -> None:
    """SmolLM: digits one by one, so blanks before them stay together. GPT-2 lets a blank join."""
    pieces = {}
    for pre in ("smollm", "llama-bpe", "qwen2", "gpt-2"):
        out = tmp_path / pre
        convert_gguf(write_tiny_gguf(source, tmp_path / f"{pre}.gguf", pre=pre), out, dtype="float32")
        pre_tokenizer = AutoTokenizer.from_pretrained(out).backend_tokenizer.pre_tokenizer
        pieces[pre] = [piece for piece, _ in pre_tokenizer.pre_tokenize_str("a  1234 b'S")]
    assert pieces == {
        "smollm": ["a", "ĠĠ", "1", "2", "3", "4", "Ġb", "'", "S"],
        "llama-bpe": ["a", "Ġ", "Ġ", "123", "4", "Ġb", "'S"],
        "qwen2": ["a", "Ġ", "Ġ", "1", "2", "3", "4", "Ġb", "'S"],
        "gpt-2": ["a", "Ġ", "Ġ1234", "Ġb", "'", "S"],
    }


def llama3_divisors(factor: float) -> np.ndarray:
    shape: dict[str, Any] = {"theta": 10000.0, "head_dim": 16, "max_position_embeddings": 8192}
    plain, _ = inverse_frequencies(RopeConfig(kind="default", **shape))
    scaled, _ = inverse_frequencies(
        RopeConfig(kind="llama3", factor=factor, original_max_position_embeddings=8192, **shape)
    )
    return (plain / scaled).numpy()


def test_rope_scaling_is_carried_over(tmp_path: Path) -> None:
    original = checkpoint(tmp_path / "source", max_position_embeddings=8192)

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(2048)

    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    def llama3(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", llama3_divisors(8.0))

    rope = {}
    for more in (yarn, linear, llama3):
        out = tmp_path / more.__name__
        convert_gguf(write_tiny_gguf(original, tmp_path / "toy.gguf", more=more), out, dtype="float32")
        rope[more.__name__] = read_config(out).rope
        assert rope[more.__name__].kind == more.__name__
    assert (rope["yarn"].factor, rope["yarn"].original_max_position_embeddings) == (4.0, 2048)
    assert rope["linear"].factor == 2.0
    frequencies, _ = inverse_frequencies(rope["llama3"])
    plain, _ = inverse_frequencies(dataclasses.replace(rope["llama3"], kind="default"))
    assert np.allclose((plain / frequencies).numpy(), llama3_divisors(8.0), rtol=1e-6)


def converted(file: Path, out: Path) -> Any:
    convert_gguf(file, out, dtype="float32")
    return AutoTokenizer.from_pretrained(out)


def replace(writer: gguf.GGUFWriter, key: str, values: Any) -> None:
    del writer.kv_data[0][key]
    if isinstance(values, list):
        writer.add_array(key, values)
    else:
        writer.add_uint32(key, values)


def test_special_tokens_are_the_files_whatever_the_tokenizer_came_with(tmp_path: Path, source: Path) -> None:
    """transformers 5.17 gives a Llama file its bos as eos, and no pad."""
    file = write_tiny_gguf(source, tmp_path / "toy.gguf", more=lambda writer: writer.add_unk_token_id(5))
    wrong = make_tiny_tokenizer()
    tokens = [str(wrong.convert_ids_to_tokens(index)) for index in range(VOCAB)]
    wrong.eos_token, wrong.pad_token = wrong.bos_token, None
    assert (wrong.bos_token_id, wrong.eos_token_id, wrong.pad_token_id) == (1, 1, None)
    set_special_tokens(wrong, tokens, gguf.GGUFReader(file), file)
    assert (wrong.bos_token_id, wrong.eos_token_id, wrong.pad_token_id, wrong.unk_token_id) == (1, 2, 0, 5)
    assert len(wrong) == VOCAB


def test_special_tokens_the_file_has_not_got(tmp_path: Path, source: Path) -> None:
    def without(writer: gguf.GGUFWriter) -> None:
        for name in ("bos", "padding"):
            del writer.kv_data[0][f"tokenizer.ggml.{name}_token_id"]

    tokenizer = converted(write_tiny_gguf(source, tmp_path / "toy.gguf", more=without), tmp_path / "out")
    assert (tokenizer.bos_token, tokenizer.pad_token, tokenizer.eos_token_id) == (None, None, 2)
    assert len(tokenizer) == VOCAB


def test_special_ids_that_do_not_fit(tmp_path: Path, source: Path) -> None:
    file, out = tmp_path / "toy.gguf", tmp_path / "out"

    def outside(writer: gguf.GGUFWriter) -> None:
        replace(writer, "tokenizer.ggml.eos_token_id", VOCAB)

    def twice(writer: gguf.GGUFWriter) -> None:
        tokens = list(writer.kv_data[0]["tokenizer.ggml.tokens"].value)
        replace(writer, "tokenizer.ggml.tokens", [*tokens[:3], tokens[2], *tokens[4:]])

    def short(writer: gguf.GGUFWriter) -> None:
        replace(writer, "tokenizer.ggml.token_type", [1] * 7)

    def odd_merge(writer: gguf.GGUFWriter) -> None:
        replace(writer, "tokenizer.ggml.merges", ["t h", "q x"])

    said = refusal(write_tiny_gguf(source, file, more=outside), out)
    assert f"tokenizer.ggml.eos_token_id is {VOCAB} but there are {VOCAB} tokens" in said
    said = refusal(write_tiny_gguf(source, file, more=twice), out)
    assert "eos_token_id is 2 but the tokenizer came out with 3" in said
    assert "but 7 tokenizer.ggml.token_type" in refusal(write_tiny_gguf(source, file, more=short), out)
    assert "merges[1]" in refusal(write_tiny_gguf(source, file, more=odd_merge), out)


def test_user_defined_tokens_stay_whole(tmp_path: Path, source: Path) -> None:
    """Qwen's `<think>` is no control token, yet one id before any merge. Here it is "er"."""

    def er_whole(writer: gguf.GGUFWriter) -> None:
        kinds = list(writer.kv_data[0]["tokenizer.ggml.token_type"].value)
        kinds[make_tiny_tokenizer().get_vocab()["er"]] = int(gguf.TokenType.USER_DEFINED)
        replace(writer, "tokenizer.ggml.token_type", kinds)

    apart = converted(write_tiny_gguf(source, tmp_path / "a.gguf"), tmp_path / "a")
    user = write_tiny_gguf(source, tmp_path / "b.gguf", more=er_whole)
    tokenizer = converted(user, tmp_path / "b")
    assert apart.tokenize("here") == ["he", "re"]
    assert tokenizer.tokenize("here") == ["h", "er", "e"]
    assert tokenizer.decode(tokenizer("here")["input_ids"], skip_special_tokens=True) == "here"


def test_llama3_takes_a_token_whole_where_merges_would_not(tmp_path: Path, source: Path) -> None:
    def without_merges(writer: gguf.GGUFWriter) -> None:
        replace(writer, "tokenizer.ggml.merges", ["t h"])

    pieces = {}
    for pre in ("llama-bpe", "smollm"):
        file = write_tiny_gguf(source, tmp_path / f"{pre}.gguf", pre=pre, more=without_merges)
        pieces[pre] = converted(file, tmp_path / pre).tokenize("the")
    assert pieces == {"llama-bpe": ["the"], "smollm": ["th", "e"]}


def test_qwen_composes_accents_and_others_do_not(tmp_path: Path, source: Path) -> None:
    same = {}
    for pre in ("qwen2", "smollm"):
        tokenizer = converted(write_tiny_gguf(source, tmp_path / f"{pre}.gguf", pre=pre), tmp_path / pre)
        same[pre] = tokenizer("e\u0301")["input_ids"] == tokenizer("\u00e9")["input_ids"]
    assert same == {"qwen2": True, "smollm": False}


def test_bos_is_put_first_where_the_file_says_so(tmp_path: Path, source: Path) -> None:
    def always(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.ggml.add_bos_token"]
        writer.add_add_bos_token(True)

    said = write_tiny_gguf(source, tmp_path / "a.gguf", more=always)
    assert converted(said, tmp_path / "a")("a")["input_ids"][0] == 1
    assert 1 not in converted(write_tiny_gguf(source, tmp_path / "b.gguf"), tmp_path / "b")("a")["input_ids"]


def test_sentencepiece(tmp_path: Path, source: Path) -> None:
    """Blanks, bytes and special tokens as llama.cpp has them; highest score first."""
    file = write_tiny_gguf(source, tmp_path / "toy.gguf", sentencepiece=True)
    tokenizer = converted(file, tmp_path / "out")
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id)
    assert ids == (1, 2, 0, 0)
    assert len(tokenizer) == VOCAB
    assert tokenizer.tokenize("the thing") == ["▁the", "▁t", "h", "in", "<0x67>"]
    assert tokenizer.tokenize("you") == ["▁", "y", "ou"]
    assert tokenizer.tokenize("  the</s>he") == ["▁", "▁", "▁the", "</s>", "▁", "he"]
    for text in ("the thing is in you", "  two é 漢 5 ", "a\n\tb"):
        encoded = tokenizer(text)["input_ids"]
        assert encoded[0] == 1
        assert tokenizer.decode(encoded[1:]) == text

    def no_scores(writer: gguf.GGUFWriter) -> None:
        replace(writer, "tokenizer.ggml.scores", [0.0])

    def foreign(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.ggml.model"]
        writer.add_tokenizer_model("bert")

    more = {"sentencepiece": True, "more": no_scores}
    assert "but 1 tokenizer.ggml.scores" in refusal(write_tiny_gguf(source, file, **more), tmp_path / "no")
    assert "'bert'" in refusal(write_tiny_gguf(source, file, more=foreign), tmp_path / "no")


def refusal(file: Path, out: Path) -> str:
    with pytest.raises(UsageError) as caught:
        convert_gguf(file, out, dtype="float32")
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not out.exists()
    return str(caught.value)


def test_refused_before_anything_is_written(tmp_path: Path, source: Path) -> None:
    file, out = tmp_path / "toy.gguf", tmp_path / "out"

    def odd_freqs(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 3, 8, dtype=np.float32))

    def longrope(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)

    assert "rope_freqs" in refusal(write_tiny_gguf(source, file, more=odd_freqs), out)
    assert "'longrope'" in refusal(write_tiny_gguf(source, file, more=longrope), out)
    assert "'viking'" in refusal(write_tiny_gguf(source, file, pre="viking"), out)
    message = refusal(write_tiny_gguf(source, file, architecture="mamba"), out)
    assert "'mamba'" in message
    assert "llama, qwen2, qwen3" in message


def test_truncated_and_foreign_files(tmp_path: Path, source: Path) -> None:
    file = write_tiny_gguf(source, tmp_path / "toy.gguf")
    content = file.read_bytes()
    for broken in (content[: len(content) // 2], content[:300], content[:10], b"", b"not a model" * 100):
        file.write_bytes(broken)
        assert "truncated or not a GGUF file" in refusal(file, tmp_path / "out")


def test_config_json_stays_valid_json(tmp_path: Path, source: Path) -> None:
    convert_gguf(write_tiny_gguf(source, tmp_path / "toy.gguf"), tmp_path / "out", dtype="float32")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLM"]
    assert values["dtype"] == "float32"
