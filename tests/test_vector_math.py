"""The first call of MKL's vector functions in a process is one that threads do not share."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Prints the elements of each call of a vector function, from the import on.
CALLS = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Calls(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("cos", "sin", "exp"):
            print(name, args[0].numel())
        return function(*args, **(kwargs or {}))

with Calls():"""
ROPE = """
    from gshare.agent.base.rope import rope_tables
    from gshare.agent.base.config import RopeConfig
    rope_tables(RopeConfig("default", 10000.0, 16, 512), 256, torch.device("cpu"))
"""
SWIGLU = """
    from gshare.kernels.swiglu import swiglu_reference
    swiglu_reference(torch.ones(64, 64), torch.ones(64, 64))
"""


@pytest.mark.parametrize(("program", "last"), [(ROPE, ["cos 4096", "sin 4096"]), (SWIGLU, ["exp 4096"])])
def test_one_element_comes_before_what_threads_share(program: str, last: list[str]) -> None:
    """Two threads in the first call gave cosines that were wrong by 1.5e-4, in one process of hundreds."""
    command = [sys.executable, "-c", CALLS + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["cos 1", "sin 1", "exp 1", *last]
