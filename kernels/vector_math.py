"""MKL's vector functions (cos, sin, exp, sqrt of many elements) on a CPU: ready before threads share a call.

Their first call in a process sets them up, and is not safe from two threads at once: torch shares a call of
more than 2048 elements among its threads, and a part was then computed by less exact functions (cosines wrong
by 1.5e-4; 2 of 4,672 processes with two threads, 8 of 5,836 with sixteen, none of 6,490 with `set_up`). RoPE
tables live as long as their process, so the whole run had other bits than the next one. `set_up`, at the
import of every module that calls such a function, makes the first call with one element, which no two
threads can share.
"""

from __future__ import annotations

import torch


def set_up() -> None:
    one = torch.ones(1)
    for function in (torch.cos, torch.sin, torch.exp, torch.sqrt):
        function(one)
