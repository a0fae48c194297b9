"""How fast a GPU is compared with an RTX 4090, for the placement score only.

Factors of the architecture page: RTX 4090 1.0, Jetson Orin 0.06, CPU 0.01. The others are the dense bf16
tensor TFLOPS with fp32 accumulation of NVIDIA's data sheets and architecture white papers, over the 4090's
165.2 (Ada white paper, appendix A). They order machines; they do not predict times.
"""

from __future__ import annotations

import re
from functools import lru_cache

CPU_FACTOR = 0.01
#: A GPU that is not in the table: between a 3090 and a 4090, so it is used, but not before what is known.
UNKNOWN_FACTOR = 0.5
_RTX_4090_TFLOPS = 165.2

#: Words of the name → TFLOPS. The first entry whose words all occur counts, so the narrower stand first.
_TFLOPS: tuple[tuple[str, float], ...] = (
    ("orin", 0.06 * _RTX_4090_TFLOPS),
    ("b200", 2250.0),  # HGX B200
    ("h200", 989.4),
    ("gh200", 989.4),
    ("h100 pcie", 756.0),
    ("h100", 989.4),  # SXM
    ("a100", 312.0),
    ("a40", 149.7),
    ("a30", 165.0),
    ("a10", 125.0),
    ("l40s", 362.0),
    ("l40", 181.0),
    ("l4", 121.0),
    ("rtx 6000 ada", 364.2),
    ("rtx a6000", 154.8),
    ("rtx 5090", 209.5),
    ("rtx 4090", _RTX_4090_TFLOPS),
    ("rtx 4080", 97.5),
    ("rtx 3090", 71.0),
    ("rtx 3080", 59.5),
)


@lru_cache(maxsize=256)  # asked at each heartbeat; the names are few
def speed_factor(name: str) -> float:
    """Of a GPU by the name that the driver or cluster.toml gives it.

    >>> speed_factor("NVIDIA GeForce RTX 4090"), speed_factor("something new")
    (1.0, 0.5)
    """
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    for known, tflops in _TFLOPS:
        if words.issuperset(known.split()):
            return round(tflops / _RTX_4090_TFLOPS, 3)
    return UNKNOWN_FACTOR
