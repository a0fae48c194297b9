"""Compile Triton kernels for GPUs that are not there, down to machine code, and say what each one takes.

    compile_kernels.py ARCH… [--cases FILE…]      ARCH: 80 87 89 90 120; FILE: default all of compile_cases/

Started as a program of its own, without TRITON_INTERPRET: where that is set, as in the tests' own process,
`triton.jit` makes interpreted kernels. A file of cases has a function `cases()`, or `cases(arch)` where tiles
depend on the card, that imports what it needs and gives a list of

    (kernel, signature, constexprs, num_warps, num_stages)   or the same with a dict more

    signature    {argument: "*bf16", "i32", …} of every argument that is not constexpr
    constexprs   {argument: value}; an argument that is None at the launch goes here, as None
    the dict     "options": further launch options; "require", "forbid": texts that the PTX must or must not
                 have; "stack": bytes of stack a thread that this case may have, with the reason beside it

Pointers and integers are taken as multiples of 16, which they are for torch's allocations and usual widths,
unless the kernel says do_not_specialize or do_not_specialize_on_alignment. One that is not: "*bf16:1".

stdout: one line a compilation, then the faults, each with kernel and arch. Exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

#: KiB of shared memory that one program may have (CUDA C++ Programming Guide, table of compute capabilities).
SHARED_KIB = {80: 163, 87: 163, 89: 99, 90: 227, 120: 99}

#: Bytes of stack a thread, where spilled registers go: 16 registers. Each costs a trip to L1.
MAX_STACK = 64

CASES = Path(__file__).resolve().parent.parent / "compile_cases"
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("arch", type=int, nargs="+", choices=SHARED_KIB)
    parser.add_argument("--cases", type=Path, nargs="+", default=sorted(CASES.glob("*.py")))
    options = parser.parse_args()
    done, faults = 0, []
    print(f"{'kernel':<40} {'arch':>5} {'warps':>5} {'stages':>6} {'shared':>7} {'regs':>4} {'stack':>5}")
    for file in options.cases:
        for arch in options.arch:
            cases = cases_of(file, arch)
            if not cases:
                faults.append(f"{file.name}: no cases for sm_{arch}")
            for case in cases:
                done += 1
                faults += [f"{file.name}: {fault}" for fault in check(case, arch)]
    for fault in faults:
        print(f"FAULT {fault}")
    print(f"{done} compilations, {len(faults)} faults")
    return 1 if faults else 0


def cases_of(file: Path, arch: int) -> list[tuple[Any, ...]]:
    spec = importlib.util.spec_from_file_location(f"compile_cases_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cases = module.cases(arch) if inspect.signature(module.cases).parameters else module.cases()
    return list(cases)


def check(case: tuple[Any, ...], arch: int) -> Iterator[str]:
    """Compile one case, print its line, and give what is wrong with it."""
    kernel, signature, constexprs, num_warps, num_stages, *rest = case
    more = rest[0] if rest else {}
    name = f"{kernel.__name__} ({signature_text(signature)}) sm_{arch}"
    try:
        source = ast_source(kernel, signature, constexprs)
        options = {"num_warps": num_warps, "num_stages": num_stages, **more.get("options", {})}
        # Triton prints the whole PTX where ptxas refuses it.
        with contextlib.redirect_stdout(io.StringIO()):
            compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        registers, stack = resources(compiled.asm["cubin"])
    except Exception as error:  # whatever the compiler raises is the finding
        # What is wrong in a function that the kernel calls is wrapped once a caller.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        yield f"{name}: does not compile: {type(cause).__name__}: {str(cause)[-600:]}"
        return
    shared = compiled.metadata.shared
    print(
        f"{kernel.__name__:<40} {arch:>5} {num_warps:>5} {num_stages:>6}"
        f" {shared:>7} {registers:>4} {stack:>5}"
    )
    if shared > SHARED_KIB[arch] * 1024:
        yield f"{name}: {shared} bytes of shared memory, more than {SHARED_KIB[arch]} KiB"
    most = more.get("stack", MAX_STACK)
    if stack > most:
        yield f"{name}: {stack} bytes of stack a thread, more than {most}: registers are spilled"
    for text in more.get("require", ()):
        if text not in compiled.asm["ptx"]:
            yield f"{name}: its PTX has no {text!r}"
    for text in more.get("forbid", ()):
        if text in compiled.asm["ptx"]:
            yield f"{name}: its PTX has {text!r}"


def ast_source(kernel: Any, signature: dict[str, str], constexprs: dict[str, Any]) -> ASTSource:
    """What the launcher would compile for these arguments."""
    types: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    odd = (signature.keys() | constexprs.keys()) ^ set(kernel.arg_names)
    assert not odd, f"in the case or in the kernel's arguments, but not in both: {sorted(odd)}"
    for i, parameter in enumerate(kernel.params):
        if parameter.name in constexprs:
            types[parameter.name] = "constexpr"
            continue
        types[parameter.name], _, multiple = signature[parameter.name].partition(":")
        is_float = types[parameter.name].startswith("fp")
        fixed = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        if not (fixed or is_float or multiple == "1"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, types, constexprs, attributes)


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout + done.stderr)
    assert found is not None, done.stdout + done.stderr
    return int(found[1]), int(found[2])


def signature_text(signature: dict[str, str]) -> str:
    """The pointer types without repetition: what tells a kernel's cases apart."""
    return " ".join(dict.fromkeys(kind for kind in signature.values() if kind.startswith("*")))


if __name__ == "__main__":
    sys.exit(main())
