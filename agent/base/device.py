"""Which device a base goes to."""

from __future__ import annotations

import torch
from gshare.agent.errors import UsageError


def pick_device(name: str = "auto") -> torch.device:
    """`auto` is the first CUDA device when there is one, else the CPU; or `cpu`, `cuda`, `cuda:N`.

    UsageError when a CUDA device is asked for and torch sees none.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        seen = torch.cuda.device_count()
        if (device.index or 0) >= seen:
            raise UsageError(f"device {name}: torch sees {seen} CUDA devices; `gshare doctor` says why")
        return torch.device("cuda", device.index or 0)
    return device
