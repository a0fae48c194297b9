"""Every kernel compiles to machine code for each kind of card, in its shared memory, without spilling."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SUPPORT = Path(__file__).resolve().parent / "support"
KERNELS = SUPPORT.parent.parent / "kernels"
CASES = SUPPORT.parent / "compile_cases"


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


# The other cards find the same mistakes but for shared memory: minutes for few faults.
@pytest.mark.parametrize(
    "arch", ["90", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("80", "87", "89", "120"))]
)
def test_every_kernel_compiles(arch: str, tmp_path: Path) -> None:
    done = compiled(tmp_path, arch)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(" 0 faults")


def test_every_kernel_file_has_cases() -> None:
    """Each `kernels/<op>_triton.py` with a launcher has a `compile_cases/<op>.py`."""
    operations = {file.name.removesuffix("_triton.py") for file in KERNELS.glob("*_triton.py")}
    assert operations
    assert operations <= {file.stem for file in CASES.glob("*.py")}


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
            ("product_kernel", "registers are spilled"),
            ("fused_kernel", "its PTX has 'fma.'"),
            ("fused_kernel", "its PTX has no 'st.global.v4.b32'"),
        ]
        for kernel, reason in reasons:
            assert any(kernel in fault and reason in fault for fault in faults), (kernel, reason, faults)
        assert len(faults) == len(reasons), faults
