"""Counter-based dropout masks: which features of which positions a LoRA input keeps.

A mask bit is a function of (seed, step, sample, layer, module, position, feature) and nothing else: not of
the sequence's length, its place in the batch, the micro-batch it fell in, or who shares the pass. The
generator is Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11), here
through numpy; a kernel that computes the block it needs gives the same bits:

    B      = ceil(features / 16)                       blocks of a position (a block has 256 bits)
    block  = position * B + feature // 16
    key    = (seed, step)                              two 64-bit words
    ctr    = (block + 1, sample, layer << 32 | module, 0)    four 64-bit words, lowest first
    w0..w3 = philox4x64_10(ctr, key)
    field  = (w[feature % 16 // 4] >> 16 * (feature % 4)) & 0xFFFF
    keep   = field >= round(p * 65536)

It is `block + 1` because numpy increments the counter before its first output. The last word of the
counter is 0 for dropout; other uses of Philox with the same key take another value.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: 16-bit fields of one Philox4x64 block.
FIELDS = 16
#: Last counter word of this use.
_DOMAIN = 0


def threshold(p: float) -> int:
    """Fields below this are dropped: `p` in 1/65536ths, rounded half to even."""
    assert 0.0 <= p < 1.0, f"dropout must be in [0, 1), got {p}"
    return min(round(p * 65536), 65535)


def keep_scale(p: float) -> float:
    """What a kept value is multiplied with: 1 / the exact probability to be kept (PEFT: 1 / (1 - p);
    they differ by less than 1e-5 relative for p <= 0.2, as `p` is rounded to 1/65536)."""
    return 65536.0 / (65536 - threshold(p))


def keep_mask(
    seed: int, step: int, sample: int, layer: int, module: int, length: int, features: int, p: float
) -> Tensor:
    """The keep mask of one sequence at one LoRA input: (length, features), bool, on the CPU.

    `step` and `sample` count from 0; `sample` is the row's index among all rows of its optimizer step,
    whatever the micro-batches; `module` is the index in `LINEARS`. Modules that read the same input have
    masks of their own, as in PEFT.
    """
    assert all(0 <= word < 2**64 for word in (seed, step, sample)), (seed, step, sample)
    assert all(0 <= half < 2**32 for half in (layer, module)), (layer, module)
    cut = threshold(p)
    blocks = -(-features // FIELDS)
    generator = np.random.Philox(
        counter=np.array([0, sample, layer << 32 | module, _DOMAIN], dtype=np.uint64),
        key=np.array([seed, step], dtype=np.uint64),
    )
    words = generator.random_raw(length * blocks * 4).astype("<u8", copy=False)
    fields_LF = words.view("<u2").reshape(length, blocks * FIELDS)[:, :features]
    return torch.from_numpy(fields_LF >= np.uint16(cut))
