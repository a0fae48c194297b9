"""Which device a base goes to."""

from __future__ import annotations

import re

import torch
from gshare.agent.errors import UsageError
from gshare.agent.jobs.names import shorten


def pick_device(name: str = "auto") -> torch.device:
    """`auto` is the first CUDA device when there is one, else the CPU; or `cpu`, `cuda`, `cuda:N`.

    UsageError for any other name, and when torch does not see that CUDA device.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"cuda(?::([0-9]{1,3}))?", name)
    if match is None:
        raise UsageError(f"device {shorten(name)}: is none; known: auto, cpu, cuda, cuda:N")
    index, seen = int(match[1] or 0), torch.cuda.device_count()
    if index >= seen:
        raise UsageError(f"device {name}: torch sees {seen} CUDA devices; `gshare doctor` says why")
    return torch.device("cuda", index)
