"""`gshare generate`, `export` and `audit` on the toy checkpoint, against transformers and PEFT."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gshare.agent.base.decoder import Decoder
from gshare.agent.base.generate import generate_tokens
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.base.weights import Base
from gshare.agent.errors import UsageError
from gshare.agent.train.peft_files import load_lora, merge, read_adapter
from gshare.cli.main import main
from gshare.kernels.reference_backend import ReferenceBackend
from peft import PeftModel
from safetensors.torch import load_file, save_file
from toy import make_runner, request, tiny_base
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Path) -> Base:
    return tiny_base(tiny_checkpoint)


@pytest.fixture(scope="module")
def adapter(tiny_checkpoint: Path, base: Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained adapter whose effect is large enough to change the answer."""
    folder = tmp_path_factory.mktemp("adapter")
    runner = make_runner(tiny_checkpoint, base)
    runner.admit(request(folder, "a", r=8, learning_rate=2e-2, max_steps=8))
    while runner.run_round():
        pass
    runner.close()
    (folder / "a" / "run.json").write_text(json.dumps({"model": str(tiny_checkpoint), "base_dtype": "nf4"}))
    return folder / "a"


def greedy(model, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_cached_generation_equals_transformers(tmp_path: Path, family: str) -> None:
    """Longer than the sliding window, so that the cache's mask matters."""
    options = {"sliding_window": 6} if family == "mistral" else {}
    checkpoint = make_tiny_checkpoint(tmp_path / "m", family, **options)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    decoder = Decoder(tiny_base(checkpoint), ReferenceBackend())
    prompt = [5, 17, 200, 31, 8]
    assert list(generate_tokens(decoder, prompt, max_new_tokens=20)) == greedy(model, prompt, 20)


def test_generation_with_an_adapter_equals_peft(tiny_checkpoint: Path, base: Base, adapter: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    decoder = Decoder(base, ReferenceBackend())
    prompt = [5, 17, 200, 31, 8]
    bare = list(generate_tokens(decoder, prompt, max_new_tokens=12))
    lora = load_lora(adapter, torch.device("cpu"), torch.float32)
    adapted = list(generate_tokens(decoder, prompt, lora=lora, max_new_tokens=12))
    assert adapted != bare
    assert adapted == greedy(PeftModel.from_pretrained(model, adapter), prompt, 12)


def test_sampling_repeats_with_its_seed_and_stops(base: Base) -> None:
    decoder = Decoder(base, ReferenceBackend())

    def sample(seed: int) -> list[int]:
        return list(generate_tokens(decoder, [5, 6], max_new_tokens=30, temperature=5.0, seed=seed))

    first = sample(1)
    assert first == sample(1)
    assert first != sample(2)
    stopped = list(
        generate_tokens(
            decoder, [5, 6], max_new_tokens=30, temperature=5.0, seed=1, stop=frozenset({first[3]})
        )
    )
    assert stopped == first[: first.index(first[3]) + 1]


@pytest.mark.parametrize("tie", [False, True])
def test_merged_checkpoint_gives_the_adapter_s_logits(tmp_path: Path, tie: bool) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path / "base", tie=tie, max_shard_size="200KB")
    runner = make_runner(checkpoint, tiny_base(checkpoint))
    runner.admit(request(tmp_path, "a", r=8, learning_rate=2e-2))
    while runner.run_round():
        pass
    runner.close()
    changed = merge(tmp_path / "a", checkpoint, tmp_path / "merged")
    assert changed == 14
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokens = torch.tensor([[5, 17, 200, 31, 8]])
    with torch.no_grad():
        bare = plain(tokens).logits
        adapted = PeftModel.from_pretrained(plain, tmp_path / "a")(tokens).logits
        found = merged(tokens).logits
    assert (found - adapted).abs().max() < 1e-4
    assert (bare - adapted).abs().max() > 1e-2
    if tie:
        head, embed = merged.get_output_embeddings().weight, merged.get_input_embeddings().weight
        assert head.data_ptr() == embed.data_ptr()
        assert torch.equal(embed, plain.get_input_embeddings().weight)
    assert (tmp_path / "merged" / "tokenizer.json").exists()


def test_dequantised_merge_uses_what_the_adapter_saw(
    tiny_checkpoint: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, nf4 = tmp_path / "own", tmp_path / "nf4"
    assert main(["export", str(adapter), "--merge", str(own), "--model", str(tiny_checkpoint)]) == 0
    said = capsys.readouterr()
    assert "checkpoint's own weights" in said.err
    assert "trained against nf4" in said.err
    assert said.out.strip() == str(own)
    arguments = ["export", str(adapter), "--merge", str(nf4), "--model", str(tiny_checkpoint)]
    assert main([*arguments, "--base", "dequantised"]) == 0
    assert "nf4 weights, dequantised" in capsys.readouterr().err
    base = tiny_base(tiny_checkpoint, "nf4")
    config, matrices = read_adapter(adapter)
    a, b = matrices[0, "q_proj"]
    model = AutoModelForCausalLM.from_pretrained(nf4, dtype=torch.float32)
    expected = base.layers[0].linears["q_proj"].weight.dense() + config["lora_alpha"] / config["r"] * (b @ a)
    assert (model.model.layers[0].self_attn.q_proj.weight - expected).abs().max() < 1e-6
    other = AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32)
    assert (other.model.layers[0].self_attn.q_proj.weight - expected).abs().max() > 1e-3


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_merged_files_are_as_readable_as_the_umask_allows(
    tiny_checkpoint: Path, adapter: Path, tmp_path: Path, umask: int, mode: int
) -> None:
    """The weights too: safetensors writes 0600 whatever the umask, and a server of another user fails."""
    before = os.umask(umask)
    try:
        merge(adapter, tiny_checkpoint, tmp_path / "out")
        save_file({"x": torch.ones(1)}, tmp_path / "control.safetensors")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {mode}, modes
    assert "model.safetensors" in modes
    assert (tmp_path / "control.safetensors").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "{adapter}"], "say either --to DIR"),
        (["export", "{adapter}", "--merge", "{here}"], "exists already"),
        (["export", "{here}", "--merge", "x"], "adapter_config.json is missing"),
        (["export", "{adapter}", "--merge", "x", "--model", "{small}"], "does not fit"),
        (["generate", "hi", "--model", "{small}", "--adapter", "{adapter}"], "is for another model"),
        (["generate", "", "--model", "{small}"], "the prompt is empty"),
        (["generate", "hi", "--model", "{here}/none"], "no such directory"),
        (["generate", "hi", "--model", "{small}", "--max-new-tokens", "0"], "must be at least 1"),
        (["generate", "hi", "--model", "{small}", "--seed", "9" * 30], "must be from 0 to"),
        (["generate", "hi", "--model", "{small}", "--seed", "-1"], "must be from 0 to"),
        (["generate", "hi", "--model", "{small}", "--temperature", "1e-320"], "from 1e-6 to 1e6"),
        (["generate", "hi", "--model", "{small}", "--temperature", "nan"], "from 1e-6 to 1e6"),
        (["generate", "hi", "--model", "{small}", "--temperature", "-1"], "from 1e-6 to 1e6"),
        (["generate", "a\udcff", "--model", "{small}"], "the prompt is not UTF-8"),
        (["generate", "hi", "--system", "a\udcff", "--model", "{small}"], "--system is not UTF-8"),
        (["generate", "x " * 600, "--model", "{small}"], "positions"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(
    arguments: list[str],
    message: str,
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    small = make_tiny_checkpoint(tmp_path / "small", hidden_size=32, num_heads=2, num_kv_heads=1)
    places = {"adapter": adapter, "here": tmp_path, "small": small}
    assert main([text.format(**places) for text in arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern is"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"r": 4}, "with r 4 in adapter_config.json it must be"),
        *(({"r": r}, "r must be a whole number") for r in (0, None, "x", True, 10**400)),
        *(({"lora_alpha": alpha}, "lora_alpha must be") for alpha in (None, "x", float("nan"), 10**400)),
        ([1], "must hold a JSON object"),
        ("[" * 100_000, "cannot be read as an adapter's"),
    ],
)
def test_an_adapter_that_computes_something_else_is_refused(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: object, message: str
) -> None:
    """Merging without DoRA's magnitudes, or with another rank's scaling, would silently be another model."""
    copy = tmp_path / "copy"
    shutil.copytree(adapter, copy)
    config = json.loads((copy / "adapter_config.json").read_text())
    value = {**config, **change} if isinstance(change, dict) else change
    (copy / "adapter_config.json").write_text(value if isinstance(value, str) else json.dumps(value))
    for arguments in (["--to", str(tmp_path / "x")], ["--merge", str(tmp_path / "x"), "--model", "none"]):
        assert main(["export", str(copy), *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: a.to(torch.int8), "is torch.int8"),
        (lambda a: a[0], "has shape"),
        (lambda a: a[:4], "has shape"),
        (lambda a: a[None], "has shape"),
    ],
)
def test_matrices_that_are_none_are_refused(
    adapter: Path, tmp_path: Path, damage: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(adapter, copy)
    tensors = load_file(copy / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_A" in name)
    save_file({**tensors, name: damage(tensors[name]).contiguous()}, copy / "adapter_model.safetensors")
    with pytest.raises(UsageError, match=message):
        read_adapter(copy)


@pytest.mark.parametrize("how", ["--to", "--merge"])
def test_a_full_disk_leaves_no_wreckage(
    tiny_checkpoint: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """A limit on file size fails the writes as a full disk does, in Rust too."""
    arguments = ["export", str(adapter), how, str(tmp_path / "out"), "--model", str(tiny_checkpoint)]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limit[1]))
    try:
        code = main(arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    said = capsys.readouterr().err
    assert code == 1
    assert f"{tmp_path / 'out'}: cannot be written" in said
    assert "unexpected" not in said
    assert list(tmp_path.iterdir()) == []
    assert main(arguments) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_merge_that_fails_half_way_leaves_nothing(
    tiny_checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    def interrupt(file: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(adapter, tiny_checkpoint, tmp_path / "out", progress=interrupt)
    small = make_tiny_checkpoint(tmp_path / "small", hidden_size=32, num_heads=2, num_kv_heads=1)
    with pytest.raises(UsageError, match="does not fit"):
        merge(adapter, small, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_prompt_on_stdin_that_is_no_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abc\xff")))
    assert main(["generate", "-", "--model", "none"]) == 2
    assert "the prompt on stdin is not UTF-8 text (byte 3)" in capsys.readouterr().err


def test_generate_prints_the_answer_only(
    tiny_checkpoint: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    arguments = ["generate", "hello", "--model", str(tiny_checkpoint), "--max-new-tokens", "8"]
    assert main([*arguments, "--json"]) == 0
    bare = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert bare["prompt"] == "hello"
    assert bare["tokens"] <= 8
    assert main([*arguments, "--json", "--adapter", str(adapter), "--base-dtype", "fp32"]) == 0
    adapted = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert adapted["answer"] != bare["answer"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == bare["answer"] + "\n"


def test_audit_passes_and_its_control_fails(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        rows = [{"prompt": f"{name} {i}", "completion": f" answer {i * 7} and more words"} for i in range(20)]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = [
        *("audit", "--model", str(tiny_checkpoint), "--base-dtype", "fp32", "--device", "cpu", "--r", "4"),
        *("--max-steps", "3", "--max-length", "64", "--per-device-train-batch-size", "2"),
        *("--adapter", "a.jsonl:out/a", "--adapter", "b.jsonl:out/b"),
    ]
    assert main([*arguments, "--json", "--join", "b@1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"]
    assert report["adapters_per_pass"] == 2
    assert len(report["packed"]["b"]["losses"]) == 3
    assert not Path("out").exists()
    monkeypatch.setenv("GSHARE_TEST_INEXACT", "1")
    assert main(arguments) == 1
    assert "packed and alone differ" in capsys.readouterr().err
    monkeypatch.delenv("GSHARE_TEST_INEXACT")
    assert main([*arguments, "--max-adapters-per-pass", "1", "--schedule", "round_robin"]) == 1
    assert "no pass ever held two adapters" in capsys.readouterr().err
