"""The contracts of tests/contracts are kept: by schema, by named functions, by tests that are collected.

Collected means: by pytest in a process of its own, with what `make test` leaves out left out. That they pass
is what `make test` itself says; `test_every_falsification_test_passes` says it of them alone.
"""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from contract_files import Contract, collected, faults, load, may_be_skipped, yaml

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "tests" / "contracts").glob("*.yaml"))
NAMES = [path.stem for path in FILES]

#: What the sharing of a device owes at least, and the obligation that says it.
OWED = {
    "no check-then-act race": "C-LEDGER-001",
    "atomic write": "C-LEDGER-002",
    "lease expiry": "C-LEDGER-003",
    "dead holders": "C-LEDGER-004",
    "no allocation over budget": "C-VRAM-001",
    "tracked against the budget": "C-GUARD-002",
    "OOM prevention": "C-GUARD-003",
    "timeout guarantee": "C-QUEUE-001",
    "bounded poll": "C-QUEUE-002",
    "first-come fairness": "C-QUEUE-003",
}


def test_there_is_a_contract_for_ledger_guard_and_queue() -> None:
    assert NAMES == ["gpu-wait-queue-v1", "vram-guard-v1", "vram-ledger-v1"]


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_the_contract_follows_the_schema_and_its_functions_exist(path: Path) -> None:
    assert faults(load(path), path.name, ROOT) == []


@pytest.mark.parametrize("words", sorted(OWED))
def test_what_is_owed_is_an_obligation(words: str) -> None:
    every = {name: one for path in FILES for name, one in load(path).proof_obligations.items()}
    assert words.lower() in every[OWED[words]].property.lower()


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="some of them train, which needs torch")
def test_every_falsification_test_is_collected_and_never_skipped() -> None:
    tests = sorted({test for path in FILES for test in load(path).tests})
    missing = set(tests) - collected(tests, ROOT)
    assert not missing
    assert [test for test in tests if may_be_skipped(test, ROOT)] == []


@pytest.mark.slow
def test_every_falsification_test_passes() -> None:
    tests = sorted({test for path in FILES for test in load(path).tests})
    command = [str(Path(sys.executable).with_name("pytest")), "-q", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


# Each of the above can fail.


def good() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "tests/contracts/vram-ledger-v1.yaml").read_text(encoding="utf-8"))


def changed(change: Callable[[dict[str, Any]], object]) -> Contract:
    table = copy.deepcopy(good())
    change(table)
    return msgspec.convert(table, Contract)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.pop("equations"),
        lambda table: table.update(equations={}),
        lambda table: table.pop("qa_gate"),
        lambda table: table.update(more=1),
        lambda table: table.update(version=0),
        lambda table: table["proof_obligations"]["C-LEDGER-001"].update(kind="hope"),
        lambda table: table["proof_obligations"]["C-LEDGER-001"].pop("property"),
        lambda table: table["falsification_tests"][0].pop("test"),
        lambda table: table["falsification_tests"][0].update(control=5),
        lambda table: table.update(affected_files=["agent/vram/ledger.py"]),
    ],
)
def test_a_contract_against_the_schema_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        changed(change)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda table: table.update(version=2), "is named vram-ledger version 2 inside"),
        (lambda table: table["qa_gate"].update(id="ledger"), "qa_gate: id ledger"),
        (
            lambda table: table["proof_obligations"].update(
                {"C-LEDGER-099": {"kind": "bound", "property": "nobody tries to break this"}}
            ),
            "C-LEDGER-099: no falsification test",
        ),
        (
            lambda table: table["falsification_tests"][0].update(breaks="C-LEDGER-100"),
            "falsification_tests: C-LEDGER-100 is no obligation here",
        ),
        (
            lambda table: [one.pop("control", None) for one in table["falsification_tests"]],
            "no negative control",
        ),
        (
            lambda table: table["falsification_tests"][0].update(test="agent/vram/ledger.py::x"),
            "falsification_tests: agent/vram/ledger.py::x",
        ),
        (
            lambda table: table["affected_files"].update({"agent/vram/gone.py": ["x"]}),
            "there is no agent/vram/gone.py",
        ),
        (
            lambda table: table["affected_files"].update({"agent/vram/ledger.py": ["Ledger.seize"]}),
            "agent/vram/ledger.py has no Ledger.seize",
        ),
        (
            lambda table: table["affected_files"].update({"agent/vram/ledger.py": []}),
            "names no function",
        ),
    ],
)
def test_a_contract_that_does_not_fit_the_code_is_found(
    change: Callable[[dict[str, Any]], object], fault: str
) -> None:
    (found,) = faults(changed(change), "vram-ledger-v1.yaml", ROOT)
    assert fault in found


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("contract: a-b\ncontract: c-d\n", encoding="utf-8")
    with pytest.raises(yaml.YAMLError, match="contract is there twice"):
        load(path)


def test_a_test_that_is_gone_slow_or_skipped_is_found(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: x\n", encoding="utf-8")
    (tmp_path / "tests" / "test_a.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('x', [1, 2])\ndef test_there(x): pass\n"
        "@pytest.mark.slow\ndef test_slow(): pass\n"
        "@pytest.mark.skip(reason='x')\ndef test_skipped(): pass\n"
        "class TestMany:\n    def test_one(self): pass\n",
        encoding="utf-8",
    )
    names = ["there", "slow", "skipped", "gone"]
    tests = [f"tests/test_a.py::test_{name}" for name in names] + ["tests/test_a.py::TestMany"]
    there = collected(tests, tmp_path, "-p", "no:cacheprovider")
    assert {test for test in tests if test not in there} == {
        "tests/test_a.py::test_slow",
        "tests/test_a.py::test_gone",
    }
    skipped = [test for test in tests if may_be_skipped(test, tmp_path)]
    assert skipped == ["tests/test_a.py::test_slow", "tests/test_a.py::test_skipped"]
