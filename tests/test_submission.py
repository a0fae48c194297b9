"""A submission: files by content, the model's size without torch, faults named before anything is sent."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_agent import sha
from gshare.agent.base.resolve import converted_dir
from gshare.agent.errors import UsageError
from gshare.agent.jobs.spec import AdapterSpec, RunSpec
from gshare.agent.node.protocol import BlobRef
from gshare.agent.service.output_dir import RunRecord
from gshare.agent.xdg import cache_dir
from gshare.coordinator.api_protocol import JobSubmission, LocalFile, ModelSource, SubmitToCluster
from gshare.coordinator.blobs import BlobStore
from gshare.coordinator.config import ClusterConfig, NodeConfig
from gshare.coordinator.gguf_header import gguf_shape
from gshare.coordinator.homecoming import come_home, home_config, home_record
from gshare.coordinator.orders import facts_of, model_for, orders_of, read_order
from gshare.coordinator.submission import build_submission, check_model
from local_cluster import CONFIG


def model_dir(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "README.md").write_text("not needed")
    (model / "pytorch_model.bin").write_bytes(b"never sent")
    return model


def spec_of(tmp_path: Path, model: str, data: str = "a.jsonl") -> RunSpec:
    path = tmp_path / data
    path.write_text("{}")
    adapter = AdapterSpec(
        name="a", data=str(path), output_dir=str(tmp_path / "out"), lora_alpha=8.0, seed=0, r=4
    )
    return RunSpec(model=model, base_dtype="fp32", adapters=(adapter,))


def orders(fields: dict[str, Any]) -> Any:
    return orders_of(SubmitToCluster(id=1, **fields))


def test_every_file_goes_by_its_content(tmp_path: Path) -> None:
    fields = build_submission(spec_of(tmp_path, str(model_dir(tmp_path))))
    job: JobSubmission = fields["jobs"][0]
    assert (job.data.name, job.data.sha256, job.data.size) == ("a.jsonl", sha(b"{}"), 2)
    assert [file.name for file in fields["model"].files] == ["config.json", "model.safetensors"]
    assert fields["model"].parameters == 90_432
    assert job.base_mb > job.adapter_mb > 0


def test_facts_and_order_survive_the_store(tmp_path: Path) -> None:
    (order,) = orders(build_submission(spec_of(tmp_path, str(model_dir(tmp_path)))))
    facts = facts_of(order, "s1")
    assert read_order(facts) == order
    assert (facts.name, facts.sendable, facts.parameters) == ("a", True, 90_432)


def test_the_base_is_the_same_for_the_same_content_and_type(tmp_path: Path) -> None:
    model = model_dir(tmp_path)
    (one,) = orders(build_submission(spec_of(tmp_path, str(model))))
    moved = model.rename(tmp_path / "moved")
    (two,) = orders(build_submission(spec_of(tmp_path, str(moved))))
    (moved / "model.safetensors").write_bytes(b"others")
    (three,) = orders(build_submission(spec_of(tmp_path, str(moved))))
    keys = [facts_of(order, "s").base for order in (one, two, three)]
    assert keys[0] == keys[1] != keys[2]


def test_a_node_takes_its_own_path_then_the_hub_then_what_is_sent(tmp_path: Path) -> None:
    model = str(model_dir(tmp_path))
    (local,) = orders(build_submission(spec_of(tmp_path, model)))
    own = NodeConfig(name="n", models={model: "/data/m"})
    assert model_for(local, own).path == "/data/m"
    assert model_for(local, NodeConfig(name="n")).files[0].name == "config.json"
    (hub,) = orders(build_submission(spec_of(tmp_path, "owner/name")))
    assert (model_for(hub, NodeConfig(name="n")).path, facts_of(hub, "s").sendable) == ("owner/name", True)
    (there,) = orders(build_submission(spec_of(tmp_path, "/only/there")))
    assert not facts_of(there, "s").sendable


def test_a_hub_model_that_is_cached_here_tells_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert build_submission(spec_of(tmp_path, "owner/name"))["model"].parameters == 0
    snapshot = tmp_path / "hf" / "hub" / "models--owner--name" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    assert build_submission(spec_of(tmp_path, "owner/name"))["model"].parameters == 90_432


def test_a_record_that_came_home_is_that_of_the_run_here(tmp_path: Path) -> None:
    (order,) = orders(build_submission(spec_of(tmp_path, str(model_dir(tmp_path)))))
    there = AdapterSpec(
        name="1234-a", data="/node/a.jsonl", output_dir="/node/out", lora_alpha=8.0, seed=0, r=4
    )
    record = RunRecord(model="/node/model", base_dtype="fp32", spec=there, base="b", train_hash="t")
    own = msgspec.json.decode(home_record(msgspec.json.encode(record), order), type=RunRecord)
    assert (own.spec, own.model) == (order.job.spec, order.model.name)
    assert (own.base, own.train_hash, own.base_dtype) == ("b", "t", "fp32")
    assert home_record(b"no record", order) == b"no record"


def test_an_adapter_that_came_home_names_the_base_as_here_and_its_manifest_says_so(tmp_path: Path) -> None:
    (order,) = orders(build_submission(spec_of(tmp_path, str(model_dir(tmp_path)))))
    store = BlobStore(tmp_path / "blobs")
    store.make_room(1)

    def keep(name: str, data: bytes) -> BlobRef:
        ref = BlobRef(name=name, sha256=sha(data), size=len(data))
        store.append(ref, 0, data)
        store.finish(ref)
        return ref

    config = keep(
        "best/adapter_config.json", json.dumps({"r": 4, "base_model_name_or_path": "/node/m"}).encode()
    )
    weights = keep("best/adapter_model.safetensors", b"weights")
    listed = {
        "adapter_config.json": {"sha256": config.sha256, "size": config.size},
        "adapter_model.safetensors": {"sha256": weights.sha256, "size": weights.size},
    }
    manifest = keep("best/manifest.json", json.dumps({"files": listed, "format": 1}).encode())
    odd = keep("checkpoint-1/adapter_config.json", b"no JSON")
    own = {ref.name: ref for ref in come_home([config, weights, manifest, odd], order, store)}
    assert (own[weights.name], own[odd.name]) == (weights, odd)
    new = store.path(own[config.name].sha256).read_bytes()
    assert json.loads(new) == {"r": 4, "base_model_name_or_path": order.model.name}
    told = json.loads(store.path(own[manifest.name].sha256).read_bytes())["files"]
    assert told["adapter_config.json"] == {"sha256": sha(new), "size": len(new)}
    assert told["adapter_model.safetensors"] == listed["adapter_model.safetensors"]


def test_an_adapter_of_a_gguf_file_names_its_conversion_once_there_is_one_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `finetune` on this machine would have: PEFT loads a directory, and no .gguf file."""
    (order,) = orders(build_submission(spec_of(tmp_path, str(model_dir(tmp_path)))))
    file = LocalFile(name="m.gguf", path="/m.gguf", sha256=sha(b"gguf"), size=4)
    order = msgspec.structs.replace(order, model=ModelSource(name="/m.gguf", files=(file,)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def base() -> str:
        return json.loads(home_config(b'{"base_model_name_or_path": "/node/m"}', order))[
            "base_model_name_or_path"
        ]

    assert base() == "/m.gguf"
    converted_dir(cache_dir(), sha(b"gguf"), "nf4").mkdir(parents=True)  # in bf16: not what this run used
    assert base() == "/m.gguf"
    own = converted_dir(cache_dir(), sha(b"gguf"), "fp32")
    own.mkdir()
    assert base() == str(own)


@pytest.mark.parametrize("name", ["$(touch pwned).jsonl", "a b.jsonl", "[x].jsonl", "é.jsonl"])
def test_a_data_file_with_an_odd_name_keeps_its_suffix(tmp_path: Path, name: str) -> None:
    fields = build_submission(spec_of(tmp_path, "owner/name", name))
    assert fields["jobs"][0].data.name == "file.jsonl"
    assert fields["jobs"][0].data.path == str(tmp_path / name)


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no config"):
        build_submission(spec_of(tmp_path, str(tmp_path)))


def gguf(tmp_path: Path, **changes: Any) -> Path:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    values = {"embedding_length": 64, "block_count": 2, "feed_forward_length": 128, "attention.head_count": 4}
    values |= {"attention.head_count_kv": 2} | changes
    pairs = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    pairs += [text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")]
    pairs += [text("scores") + struct.pack("<IIQ", 9, 6, 3) + struct.pack("<3f", 1, 2, 3)]
    pairs += [text(f"llama.{key}") + struct.pack("<II", 4, value) for key, value in values.items()]
    tensor = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 64, 256, 0, 0)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + b"".join(pairs) + tensor)
    return path


def test_a_gguf_header_tells_the_same_shape_as_the_config(tmp_path: Path) -> None:
    shape = gguf_shape(gguf(tmp_path))
    assert (shape.vocab_size, shape.head_dim, shape.num_kv_heads) == (256, 16, 2)
    assert shape.tie_word_embeddings
    assert shape.parameters == 90_432
    fields = build_submission(spec_of(tmp_path, str(tmp_path / "model.gguf")))
    assert [file.name for file in fields["model"].files] == ["model.gguf"]


def test_a_damaged_gguf_is_named(tmp_path: Path) -> None:
    path = gguf(tmp_path)
    whole = path.read_bytes()
    for length in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(UsageError, match=r"not a GGUF file|does not describe"):
            gguf_shape(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1))
    with pytest.raises(UsageError, match="entries"):
        gguf_shape(path)
    path.write_bytes(whole)
    gguf_shape(path)


@pytest.mark.parametrize("name", ["nosuch", "/no/such/directory", "a/b/c"])
def test_a_model_that_is_nowhere_is_refused_unless_a_node_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    without = ClusterConfig(nodes=(NodeConfig(name="n"),), source="cluster.toml")
    with pytest.raises(UsageError, match=f"model '{name}': no such directory .* `models`"):
        check_model(name, without)
    check_model("owner/name", without)
    check_model(str(model_dir(tmp_path)), without)
    check_model(name, ClusterConfig(nodes=(NodeConfig(name="n", models={name: "/m"}),), source="c"))


def test_an_adapter_beyond_the_model_is_refused_before_anything_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = spec_of(tmp_path, str(model_dir(tmp_path)))

    def with_spec(model: str, **fields: Any) -> RunSpec:
        adapter = msgspec.structs.replace(run.adapters[0], **fields)
        return msgspec.structs.replace(run, model=model, adapters=(adapter,))

    said: list[str] = []
    with pytest.raises(UsageError) as caught:
        build_submission(with_spec(run.model, max_length=2049, layers_to_transform=(1, 2)), said.append)
    assert str(caught.value).splitlines() == [
        "adapter a: layers_to_transform: 2 is no layer of this model, which has 2 (0 to 1)",
        "adapter a: max_length: 2049 is beyond the model's max_position_embeddings, 2048; set it to that or "
        "less",
    ]
    assert said == []
    build_submission(with_spec(run.model, max_length=2048, layers_to_transform=(1,)))
    # Of a model that is not here nothing can be told.
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    build_submission(with_spec("owner/name", max_length=2049, layers_to_transform=(2,)))
