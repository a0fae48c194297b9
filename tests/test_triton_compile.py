"""Every kernel compiles to machine code for each kind of card, in its shared memory, without spilling."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SUPPORT = Path(__file__).resolve().parent / "support"
KERNELS = SUPPORT.parent.parent / "kernels"


def compiled(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(SUPPORT / "compile_kernels.py"), *arguments],
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def entry_points(*sources: str) -> set[str]:
    """Names of the `triton.jit` functions that nothing in these modules calls: kernels are launched."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    compiled_ones = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    called = {
        node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return compiled_ones - called


# The other cards find the same mistakes but for shared memory: minutes for few faults.
@pytest.mark.parametrize(
    "arch", ["90", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("80", "87", "89", "120"))]
)
def test_every_kernel_compiles(arch: str, tmp_path: Path) -> None:
    done = compiled(tmp_path, arch)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = {line.split()[0] for line in done.stdout.splitlines()[1:-1]}
    missing = entry_points(*(file.read_text(encoding="utf-8") for file in KERNELS.glob("*.py"))) - seen
    assert not missing, f"no case in tests/compile_cases for {sorted(missing)}"


def test_a_kernel_without_a_case_would_be_found() -> None:
    """Negative control: kernels are read from the source, however they are launched, and helpers are not."""
    source = """
@triton.jit
def _a(x): helper(x)
@triton.jit(debug=True)
def b(x): helper(x)
@triton.jit
def helper(x): pass
def run(x):
    _a[(1,)](x)
    launch(b, x)
"""
    assert entry_points(source) == {"_a", "b"}


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    """Negative control: each broken case is named with kernel, arch and reason, and the right one is not."""
    done = compiled(tmp_path, "90", "89", "--cases", str(SUPPORT / "broken_kernels.py"))
    assert done.returncode == 1, done.stdout + done.stderr
    for arch, kib in (("90", 227), ("89", 99)):
        faults = [
            line for line in done.stdout.splitlines() if line.startswith("FAULT") and f"sm_{arch}" in line
        ]
        reasons = [
            ("mistyped_kernel", "does not compile"),
            ("fused_kernel", "does not compile: AssertionError: in the case or in the kernel's arguments"),
            ("product_kernel", f"bytes of shared memory, more than {kib} KiB"),
            ("product_kernel", "bytes of stack a thread, more than 64: registers are spilled"),
            ("product_kernel", "bytes of stack a thread, more than 80: registers are spilled"),
            ("fused_kernel", "its PTX has 'fma.'"),
            ("fused_kernel", "its PTX has no 'st.global.v4.b32'"),
        ]
        for kernel, reason in reasons:
            assert any(kernel in fault and reason in fault for fault in faults), (kernel, reason, faults)
        assert len(faults) == len(reasons), faults
