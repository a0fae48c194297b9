"""The contracts in tests/contracts: their schema, and whether code and tests are what they say.

A contract names obligations, the tests that try to break each, and the functions that keep it. Faults are
lines of text naming the contract and the key.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

yaml = pytest.importorskip("yaml", reason="contracts are YAML; the dev extra brings PyYAML")

NAME = re.compile(r"[a-z][a-z0-9-]*\Z")
OBLIGATION = re.compile(r"C-[A-Z]+-\d{3}\Z")
GATE = re.compile(r"QA-[A-Z-]+\Z")
TEST = re.compile(r"tests/test_\w+\.py::\w+\Z")
Text = Annotated[str, msgspec.Meta(min_length=10)]


class Obligation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One property. invariant: always; bound: never more; liveness: in the end; equivalence: the same."""

    kind: Literal["invariant", "bound", "liveness", "equivalence"]
    property: Text


class Falsification(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A test that fails when the obligation `breaks` does not hold; `control`: one that shows it can."""

    breaks: str
    test: str
    tries: str
    control: str | None = None


class Gate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What continuous integration runs; `also`: what is run by hand before a release."""

    id: str
    command: str
    also: str = ""


class Contract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    contract: str
    version: Annotated[int, msgspec.Meta(ge=1)]
    summary: Text
    equations: Annotated[dict[str, str], msgspec.Meta(min_length=1)]
    proof_obligations: Annotated[dict[str, Obligation], msgspec.Meta(min_length=1)]
    falsification_tests: list[Falsification]
    affected_files: Annotated[dict[str, list[str]], msgspec.Meta(min_length=1)]
    qa_gate: Gate

    @property
    def tests(self) -> list[str]:
        """Every test that is named, controls too."""
        named = [one.test for one in self.falsification_tests]
        return named + [one.control for one in self.falsification_tests if one.control]


class Unique(yaml.SafeLoader):
    """YAML that refuses a key given twice, of which the first would silently be lost."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[object, object]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def load(path: Path) -> Contract:
    """msgspec.ValidationError or yaml.YAMLError when the file does not follow the schema."""
    # Unique derives from SafeLoader: plain values only.
    return msgspec.convert(yaml.load(path.read_text(encoding="utf-8"), Loader=Unique), Contract)


def faults(contract: Contract, file_name: str, root: Path) -> list[str]:
    """What is wrong inside the contract and with the functions it names."""
    found = []
    if file_name != f"{contract.contract}-v{contract.version}.yaml" or not NAME.match(contract.contract):
        found.append(f"{file_name}: is named {contract.contract} version {contract.version} inside")
    if not GATE.match(contract.qa_gate.id):
        found.append(f"qa_gate: id {contract.qa_gate.id}")
    tried = {one.breaks for one in contract.falsification_tests}
    for obligation in contract.proof_obligations:
        if not OBLIGATION.match(obligation):
            found.append(f"proof_obligations: id {obligation}")
        if obligation not in tried:
            found.append(f"{obligation}: no falsification test")
    for unknown in sorted(tried - set(contract.proof_obligations)):
        found.append(f"falsification_tests: {unknown} is no obligation here")
    if not any(one.control for one in contract.falsification_tests):
        found.append("falsification_tests: no negative control")
    found.extend(f"falsification_tests: {test}" for test in contract.tests if not TEST.match(test))
    for path, names in contract.affected_files.items():
        if not (root / path).is_file():
            found.append(f"affected_files: there is no {path}")
            continue
        there = functions(root / path)
        found.extend(f"affected_files: {path} has no {name}" for name in names if name not in there)
        if not names:
            found.append(f"affected_files: {path} names no function")
    return found


def functions(path: Path) -> set[str]:
    """`name` and `Class.name` of every function in a file."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        defs = (ast.FunctionDef, ast.AsyncFunctionDef)
        found.update(f"{prefix}{one.name}" for one in inside if isinstance(one, defs))
    return found


def collected(tests: Iterable[str], root: Path, *options: str) -> set[str]:
    """Which of `tests` pytest collects as `make test` does (without the slow ones), parameters taken off."""
    files = sorted({test.split("::")[0] for test in tests if (root / test.split("::")[0]).is_file()})
    # One -q lists the tests; the project's own options already have one, so they are replaced.
    ours = ["-o", "addopts=--import-mode=importlib", "--collect-only", "-q", "-m", "not slow"]
    command = [str(Path(sys.executable).with_name("pytest")), *ours]
    done = subprocess.run(
        [*command, *options, *files], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ids = [line.split("[")[0] for line in done.stdout.splitlines() if "::" in line]
    # A class stands for its methods: hypothesis' state machines have one, runTest.
    return {"::".join(one.split("::")[:2]) for one in ids}


def may_be_skipped(test: str, root: Path) -> bool:
    """Whether the test carries a mark by which it may not run: skip, skipif, xfail, slow, our `as_root`."""
    path, name = test.split("::")
    for node in ast.parse((root / path).read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            marks = " ".join(ast.unparse(mark) for mark in node.decorator_list)
            return bool(re.search(r"\b(skip|skipif|xfail|slow|as_root)\b", marks))
    return False
