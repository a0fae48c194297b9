"""agent/base/load.py: what is stored for each dtype, the fingerprint, and every way a directory is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gshare.agent.base.config import linear_prefix
from gshare.agent.base.device import pick_device
from gshare.agent.base.load import load_base
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.base.weights import Base
from gshare.agent.errors import UsageError
from gshare.agent.jobs.spec import LINEARS
from gshare.kernels import int8, nf4
from gshare.kernels.layout import GROUPS
from safetensors.torch import load_file, save_file

CPU = torch.device("cpu")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
DTYPES = ("fp32", "bf16", "int8", "nf4")


def load(path: Path, base_dtype: str = "fp32") -> Base:
    return load_base(path, base_dtype=base_dtype, device=CPU)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def edit(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of a single-file checkpoint with tensors replaced, or removed where the value is None."""
    target.mkdir(exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_holds_the_checkpoint_exactly(tmp_path: Path, family: str, tie: bool) -> None:
    path = make_tiny_checkpoint(tmp_path, family, tie=tie)
    file = load_file(path / "model.safetensors")
    base = load(path)
    assert base.compute_dtype == torch.float32
    assert torch.equal(base.embed, file["model.embed_tokens.weight"])
    assert torch.equal(base.final_norm, file["model.norm.weight"])
    head = base.lm_head.dense()
    assert torch.equal(head, base.embed if tie else file["lm_head.weight"])
    assert (head.data_ptr() == base.embed.data_ptr()) == tie
    for index, layer in enumerate(base.layers):
        prefix = f"model.layers.{index}"
        assert torch.equal(layer.input_norm, file[f"{prefix}.input_layernorm.weight"])
        assert torch.equal(layer.post_attention_norm, file[f"{prefix}.post_attention_layernorm.weight"])
        assert (layer.q_norm is not None) == (family == "qwen3")
        if layer.q_norm is not None and layer.k_norm is not None:
            assert torch.equal(layer.q_norm, file[f"{prefix}.self_attn.q_norm.weight"])
            assert torch.equal(layer.k_norm, file[f"{prefix}.self_attn.k_norm.weight"])
        assert tuple(layer.linears) == LINEARS
        for name, linear in layer.linears.items():
            module = linear_prefix(index, name)
            assert torch.equal(linear.weight.dense(), file[f"{module}.weight"])
            assert linear.weight.shape == base.config.linear_shape(name)
            if linear.bias is None:
                assert f"{module}.bias" not in file
            else:
                assert torch.equal(linear.bias, file[f"{module}.bias"])
    assert base.nbytes == 4 * base.config.parameter_count()


def test_lower_dtypes_store_what_they_say(llama: Path) -> None:
    file = load_file(llama / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    w = file[name]
    expected = {
        "bf16": w.bfloat16().float(),
        "int8": int8.dequantise(int8.quantise(w)),
        "nf4": nf4.dequantise(nf4.quantise(w)),
    }
    for base_dtype, dense in expected.items():
        base = load(llama, base_dtype)
        assert torch.equal(base.layers[1].linears["down_proj"].weight.dense(), dense)
        assert torch.equal(base.embed, file["model.embed_tokens.weight"].bfloat16())
        assert torch.equal(base.lm_head.dense(), file["lm_head.weight"].bfloat16().float())
        assert torch.equal(base.final_norm, file["model.norm.weight"].bfloat16().float())
        assert not torch.equal(dense, w)


def test_bytes_a_weight(llama: Path) -> None:
    config = load(llama).config
    elements = sum(n * k for n, k in map(config.linear_shape, LINEARS)) * config.num_layers
    held = {}
    for base_dtype in DTYPES:
        layers = load(llama, base_dtype).layers
        held[base_dtype] = sum(linear.weight.nbytes for layer in layers for linear in layer.linears.values())
    assert held["fp32"] == 4 * elements
    assert held["bf16"] == 2 * elements
    assert elements < held["int8"] < 1.1 * elements
    # 4.127 bits, and on weights this small a few bytes of block scales more
    assert 0.51 * elements < held["nf4"] < 0.53 * elements


def test_one_buffer_for_all_weights(llama: Path) -> None:
    base = load(llama, "nf4")
    size = base.scratch.nbytes
    pointers = {
        linear.weight.dense().data_ptr() for layer in base.layers for linear in layer.linears.values()
    }
    pointers |= {group.weight.dense().data_ptr() for layer in base.layers for group in layer.groups.values()}
    pointers.add(base.lm_head.dense().data_ptr())
    assert len(pointers) == 1
    rows, columns = base.layers[0].groups["gate_up"].weight.shape
    # The largest, reserved while loading.
    assert base.scratch.nbytes == size == 4 * max(base.embed.numel(), rows * columns)
    assert load(llama, "fp32").scratch.nbytes == 0


@pytest.mark.parametrize("base_dtype", DTYPES)
def test_groups_are_the_linears_concatenated_and_held_once(tmp_path: Path, base_dtype: str) -> None:
    base = load(make_tiny_checkpoint(tmp_path, "qwen2"), base_dtype)
    for layer in base.layers:
        for name, members in GROUPS.items():
            parts = [layer.linears[member] for member in members]
            whole = torch.cat([part.weight.dense().clone() for part in parts])
            assert torch.equal(layer.groups[name].weight.dense(), whole)
        biases = [layer.linears[member].bias for member in GROUPS["qkv"]]
        assert torch.equal(layer.groups["qkv"].bias, torch.cat(biases))
        assert layer.groups["o"].bias is None
        if base_dtype == "fp32":
            q, whole = layer.linears["q_proj"].weight.dense(), layer.groups["qkv"].weight.dense()
            assert q.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("base_dtype", DTYPES)
def test_shards_do_not_show(tmp_path: Path, base_dtype: str) -> None:
    single = load(make_tiny_checkpoint(tmp_path / "one", "qwen3"), base_dtype)
    path = make_tiny_checkpoint(tmp_path / "many", "qwen3", max_shard_size="60KB")
    assert len(list(path.glob("model-*.safetensors"))) > 3
    assert load(path, base_dtype).fingerprint == single.fingerprint


def test_fingerprint_moves_with_what_matters(tmp_path: Path, llama: Path) -> None:
    prints = {load(llama, base_dtype).fingerprint for base_dtype in DTYPES}
    assert len(prints) == len(DTYPES)
    assert load(llama).fingerprint in prints  # and is the same again
    file = load_file(llama / "model.safetensors")
    one_bit = file["model.norm.weight"].clone()
    one_bit.view(torch.int32)[3] ^= 1
    prints.add(load(edit(llama, tmp_path / "bit", model__norm__weight=one_bit)).fingerprint)
    values = json.loads((llama / "config.json").read_text())
    for number, change in enumerate(({"rms_norm_eps": 1e-5}, {"rope_parameters": {"rope_theta": 20000.0}})):
        path = edit(llama, tmp_path / f"config{number}")
        (path / "config.json").write_text(json.dumps({**values, **change}))
        prints.add(load(path).fingerprint)
    assert len(prints) == len(DTYPES) + 3
    path = edit(llama, tmp_path / "ids")
    (path / "config.json").write_text(json.dumps({**values, "eos_token_id": 5}))
    assert load(path).fingerprint in prints


def test_the_base_does_not_follow_the_file(tmp_path: Path, llama: Path) -> None:
    """What safetensors returns may be a view of the mapped file: overwriting it must not move the weights."""
    path = edit(llama, tmp_path / "copy")
    base = load(path)
    before = base.layers[0].linears["q_proj"].weight.dense().clone()
    file = path / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.seek(size // 4)
        handle.write(b"\xff" * (size // 2))
    assert torch.equal(base.layers[0].linears["q_proj"].weight.dense(), before)


def test_progress_ends_at_the_total(llama: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    base = load_base(llama, base_dtype="fp32", device=CPU, progress=lambda *step: seen.append(step))
    counts = [done for _, done, _ in seen]
    assert counts == sorted(counts)
    assert seen[-1][1:] == (base.config.parameter_count(), base.config.parameter_count())


def test_wrong_tensors_are_named(tmp_path: Path, llama: Path) -> None:
    norm = "model.norm.weight"
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"model__norm__weight": None}, [norm, "none of its safetensors"]),
        ({"model__extra__weight": torch.ones(3)}, ["model.extra.weight", "not part", "model.safetensors"]),
        ({"model__norm__weight": torch.ones(63)}, [norm, "[63]", "[64]", "model.safetensors"]),
        ({"model__norm__weight": torch.full((64,), torch.nan)}, [norm, "NaN", "model.safetensors"]),
        ({"model__norm__weight": torch.ones(64, dtype=torch.int32)}, [norm, "int32", "model.safetensors"]),
    ]
    for number, (changes, words) in enumerate(cases):
        path = edit(llama, tmp_path / str(number), **changes)
        with pytest.raises(UsageError) as caught:
            load(path)
        for word in (*words, str(path)):
            assert word in str(caught.value)


def test_stored_inv_freq_is_passed_over(tmp_path: Path, llama: Path) -> None:
    path = edit(llama, tmp_path / "x", **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert load(path).fingerprint == load(llama).fingerprint


def test_stored_head_of_a_tied_model(tmp_path: Path) -> None:
    tied = make_tiny_checkpoint(tmp_path / "tied", "llama", tie=True)
    embed = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    assert load(edit(tied, tmp_path / "same", lm_head__weight=embed.clone())).config.tie_word_embeddings
    with pytest.raises(UsageError, match=r"lm_head\.weight differs from the embeddings"):
        load(edit(tied, tmp_path / "other", lm_head__weight=embed + 1))


def test_truncated_and_foreign_files(tmp_path: Path, llama: Path) -> None:
    path = edit(llama, tmp_path / "x")
    file = path / "model.safetensors"
    content = file.read_bytes()
    for broken in (content[: len(content) // 2], content[:5], b"", b"not safetensors at all"):
        file.write_bytes(broken)
        with pytest.raises(UsageError, match=r"model\.safetensors is truncated or not a safetensors file"):
            load(path)


def test_pickle_is_refused(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises(UsageError, match=r"neither model\.safetensors nor"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"pickle files \(pytorch_model\.bin\).*refused"):
        load(tmp_path)


def test_wrong_index(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "llama", max_shard_size="200KB")
    index = path / "model.safetensors.index.json"
    good = index.read_text()
    weight_map = json.loads(good)["weight_map"]
    for text in ("{", "[]", "{}", '{"weight_map": []}'):
        index.write_text(text)
        with pytest.raises(UsageError, match=r"index\.json cannot be read"):
            load(path)
    name = next(iter(weight_map))
    index.write_text(json.dumps({"weight_map": {**weight_map, name: "../elsewhere.safetensors"}}))
    with pytest.raises(UsageError, match="not a file name"):
        load(path)
    index.write_text(good)
    next(path.glob("model-00002*")).unlink()
    with pytest.raises(UsageError, match=r"model-00002.* missing"):
        load(path)


def test_unknown_dtype(llama: Path) -> None:
    with pytest.raises(UsageError, match=r"'fp16' is unknown; known: nf4, int8, bf16, fp32"):
        load(llama, "fp16")


def test_checkpoint_dtype_is_read_as_it_is(tmp_path: Path) -> None:
    """A bf16 checkpoint in base_dtype fp32 holds the bf16 values."""
    base = load(make_tiny_checkpoint(tmp_path, "llama", dtype="bfloat16"))
    w = base.layers[0].linears["q_proj"].weight.dense()
    assert w.dtype == torch.float32
    assert torch.equal(w, w.bfloat16().float())


@pytest.mark.parametrize(
    "name", ["tpu", "cuda:-1", "cuda:x", "cuda:999", "cpu:7", "meta", "mps", "", "cuda:" + "9" * 9]
)
def test_devices_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="device "):
        pick_device(name)
