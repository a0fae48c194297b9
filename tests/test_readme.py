"""What the README says is so: its job spec loads and shows the defaults, its commands and paths exist."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import msgspec
import pytest
from gshare.agent.errors import UsageError
from gshare.agent.jobs.early_exit import SweepExit
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.jobs.spec_file import load_run_spec
from gshare.cli.main import COMMANDS
from gshare.coordinator.throughput import read_profile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str, containing: str) -> str:
    """The one fenced block of `language` that contains `containing`."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (found,) = [text for kind, text in fences if kind == language and containing in text]
    return found


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """The README's job spec as a file, with the data files that it names."""
    text = block("toml", "[[adapter]]")
    (tmp_path / "data").mkdir()
    for name in re.findall(r'"(data/[^"]+)"', text):
        (tmp_path / name).write_text('{"text": "x"}\n', encoding="utf-8")
    file = tmp_path / "adapters.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_the_job_spec_loads(spec: Path) -> None:
    run = load_run_spec(spec)
    assert [adapter.name for adapter in run.adapters] == ["support", "sales"]
    assert [adapter.r for adapter in run.adapters] == [16, 64]


def test_a_wrong_key_in_it_would_be_seen(spec: Path) -> None:
    """Negative control: the loader refuses what the README must not say."""
    spec.write_text(spec.read_text(encoding="utf-8").replace("lora_dropout", "dropout"), encoding="utf-8")
    with pytest.raises(UsageError, match="dropout"):
        load_run_spec(spec)


def test_the_shown_defaults_are_the_defaults() -> None:
    shown = tomllib.loads(block("toml", "[[adapter]]"))["defaults"]
    real = {field.name: field.default for field in msgspec.structs.fields(AdapterSpec)}
    assert {key: real[key] for key in shown} == shown
    unshown = set(real) - set(shown) - {"name", "data", "output_dir", "val_data", "lora_alpha", "seed"}
    layers = {"layers_to_transform", "layers_pattern"}
    assert unshown == {"data_format", *layers, "adam_beta1", "adam_beta2", "adam_epsilon"}


def test_the_keys_of_early_exit_are_all_there_with_their_defaults() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| `([\w.\"]+)` \|", README.split("| key of `[early_exit]`")[1], re.MULTILINE
    )
    real = {field.name: field.default for field in msgspec.structs.fields(SweepExit)}
    assert {key: json.loads(value) for key, value in rows[: len(real)]} == real


def test_its_profile_of_rates_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    file.write_text(block("json", '"rates"'), encoding="utf-8")
    assert read_profile(file).tokens_per_second("meta-llama/Llama-3.1-8B", "nf4", 1) == 15244


def test_its_commands_exist() -> None:
    named = set(re.findall(r"^gshare ([a-z]+)", block("", "gshare finetune"), re.MULTILINE))
    assert named == set(COMMANDS)


def test_its_tree_exists() -> None:
    """Each line starts with a path; two more spaces are one folder deeper."""
    folders: list[str] = []
    for line in block("", "kernels/        ").splitlines():
        indent, path = len(line) - len(line.lstrip()), line.split()[0]
        folders = [*folders[: indent // 2], path]
        assert (ROOT / "".join(folders)).exists(), line


def test_every_room_is_in_the_tree() -> None:
    tree = block("", "kernels/        ")
    for room in ("kernels", "agent", "coordinator", "tui", "cli"):
        assert re.search(rf"^{room}/", tree, re.MULTILINE), room
    for folder in (ROOT / "agent").iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert f"  {folder.name}/" in tree, folder.name
