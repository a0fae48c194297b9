"""Which tile a GEMM takes on which card: a table, no tuning at run time. Pure: no torch, no GPU.

An exact GEMM may take any tile here, since each element of the result keeps one fp32 accumulator over k in
steps of BLOCK_K (NUMERICS.md, *Row invariance*). So the choice may depend on the number of rows and on the
card and changes no bits. k is never split: with few rows only smaller tiles give more programs.

    m rows and n columns of the result, k the length of the sum
    linear      y (m, n) = x (m, k) @ w (n, k)ᵀ
    linear_dx   dx (m, n) = dy (m, k) @ w (k, n)

For each class of cards and of m the tiles stand from large to small. Taken is the first that the card's
shared memory holds and that gives at least 3/4 of the card's SMs a program; if none does, the last that is
held. Only (128, 256) on Hopper was measured: 0.95–1.0 of cuBLAS from m = 2048 on, H200. The others are
reckoned from shared memory, registers and the number of programs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["linear", "linear_dx"]

#: One for all kinds, cards and m: the steps of the sum.
BLOCK_K = 64

#: Shared memory that a program may have on any CUDA card, in bytes.
LEAST_SHARED = 48 << 10

# Room for the barriers of asynchronous copies, in bytes.
_BARRIERS = 1 << 10


@dataclass(frozen=True)
class Tiles:
    """A program computes (block_m, block_n) of the result, block_k of the sum at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, element_bytes: int) -> int:
        """Bytes, at most: a pair of operand tiles a stage; later the result lies in their place."""
        operands = self.num_stages * (self.block_m + self.block_n) * self.block_k * element_bytes
        return max(operands, self.block_m * self.block_n * element_bytes) + _BARRIERS


def _tiles(*rows: tuple[int, int, int, int]) -> tuple[Tiles, ...]:
    """Rows of block_m, block_n, num_warps, num_stages."""
    return tuple(Tiles(m, n, BLOCK_K, warps, stages) for m, n, warps, stages in rows)


@dataclass(frozen=True)
class CardClass:
    """Cards with one table: {largest m: tiles}, ascending in m; None: any more."""

    name: str
    sms: int
    bf16: dict[int | None, tuple[Tiles, ...]]


# 32 rows and fewer: the time is that of reading the weight, so many stages of narrow tiles.
_FEW_ROWS: dict[int | None, tuple[Tiles, ...]] = {
    16: _tiles((16, 64, 4, 6), (16, 32, 4, 6)),
    32: _tiles((32, 64, 4, 5), (32, 32, 4, 6)),
}

# wgmma takes 64 rows for every 4 warps; 227 KiB hold two programs of 64 × 128 with 4 stages.
_WGMMA = {
    **_FEW_ROWS,
    64: _tiles((64, 128, 4, 4), (64, 64, 4, 5), (64, 32, 4, 6)),
    128: _tiles((128, 128, 8, 4), (64, 128, 4, 4), (64, 64, 4, 5)),
    256: _tiles((128, 256, 8, 3), (128, 128, 8, 4), (64, 128, 4, 4), (64, 64, 4, 5)),
    512: _tiles((128, 256, 8, 3), (128, 128, 8, 4), (64, 128, 4, 4), (64, 64, 4, 5)),
    2048: _tiles((128, 256, 8, 3), (128, 128, 8, 4), (64, 128, 4, 4)),
    None: _tiles((128, 256, 8, 3), (128, 128, 8, 3)),
}

# 163 KiB hold 128 × 256, 99 KiB (86, 89, 120) 128 × 128, both with 3 stages.
_MMA = {
    **_FEW_ROWS,
    64: _tiles((64, 128, 4, 3), (64, 64, 4, 4), (64, 32, 4, 5)),
    128: _tiles((128, 128, 8, 3), (64, 128, 4, 3), (64, 64, 4, 4)),
    256: _tiles((128, 256, 8, 3), (128, 128, 8, 3), (64, 128, 4, 3), (64, 64, 4, 4)),
    512: _tiles((128, 256, 8, 3), (128, 128, 8, 3), (64, 128, 4, 3), (64, 64, 4, 4)),
    2048: _tiles((128, 256, 8, 3), (128, 128, 8, 3), (64, 128, 4, 3)),
    None: _tiles((128, 256, 8, 3), (128, 128, 8, 3)),
}

# Each fits LEAST_SHARED.
_ANY_CARD: dict[int | None, tuple[Tiles, ...]] = {
    16: _tiles((16, 64, 4, 4)),
    32: _tiles((32, 64, 4, 3)),
    None: _tiles((64, 64, 4, 2)),
}

# fp32 multiplies in registers, without tensor cores. The last of each fits LEAST_SHARED.
_FP32: dict[int | None, tuple[Tiles, ...]] = {
    16: _tiles((16, 64, 4, 2)),
    32: _tiles((32, 64, 4, 2), (32, 32, 4, 2), (32, 64, 4, 1)),
    None: _tiles((64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 1)),
}

_AMPERE = CardClass("ampere", sms=108, bf16=_MMA)  # of an A100
_ADA = CardClass("ada", sms=128, bf16=_MMA)  # RTX 4090
_HOPPER = CardClass("hopper", sms=132, bf16=_WGMMA)  # H100, H200
_BLACKWELL = CardClass("blackwell", sms=148, bf16=_MMA)  # B200
#: Cards that have no table.
UNKNOWN = CardClass("unknown", sms=64, bf16=_ANY_CARD)

#: By compute capability, 10 × major + minor.
CLASSES = {
    **dict.fromkeys((80, 86, 87), _AMPERE),
    89: _ADA,
    90: _HOPPER,
    **dict.fromkeys((100, 103, 120, 121), _BLACKWELL),
}


def gemm_tiles(
    kind: Kind, m: int, n: int, k: int, capability: int, shared_memory: int, element_bytes: int = 2
) -> Tiles:
    """The tile for (m, n) with a sum over k on a card.

    `capability` is 10 × major + minor; `shared_memory` the bytes that a program may opt in to, at least
    LEAST_SHARED; `element_bytes` 2 for bf16, 4 for fp32. There are no more stages than steps of the sum.
    """
    assert m > 0, m
    assert n > 0, n
    assert k > 0, k
    assert shared_memory >= LEAST_SHARED, shared_memory
    assert element_bytes in (2, 4), element_bytes
    card = CLASSES.get(capability, UNKNOWN)
    held = _held(kind, _of_rows(_FP32 if element_bytes == 4 else card.bf16, m), shared_memory, element_bytes)
    if not held:
        held = _held(kind, _of_rows(_ANY_CARD, m), shared_memory, element_bytes)
    enough = (tile for tile in held if 4 * _cdiv(m, tile.block_m) * _cdiv(n, tile.block_n) >= 3 * card.sms)
    tile = next(enough, held[-1])
    return replace(tile, num_stages=min(tile.num_stages, _cdiv(k, BLOCK_K)))


def _of_rows(table: dict[int | None, tuple[Tiles, ...]], m: int) -> tuple[Tiles, ...]:
    return next(tiles for most, tiles in table.items() if most is None or m <= most)


def _held(kind: Kind, tiles: tuple[Tiles, ...], shared_memory: int, element_bytes: int) -> list[Tiles]:
    """Those that fit; for dX, where a weight's rows run along n, only those that read 64 neighbours."""
    return [
        tile
        for tile in tiles
        if tile.shared_bytes(element_bytes) <= shared_memory and (kind == "linear" or tile.block_n >= 64)
    ]


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
