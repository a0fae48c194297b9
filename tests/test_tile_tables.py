"""kernels/tile_tables.py: there is a tile for every product on every card, and the card holds it."""

from __future__ import annotations

import pytest
from gshare.kernels import tile_tables
from gshare.kernels.tile_tables import BLOCK_K, CLASSES, LEAST_SHARED, UNKNOWN, Tiles, gemm_tiles
from hypothesis import given
from hypothesis import strategies as st

KIB = 1 << 10
#: KiB of shared memory that a program may have (CUDA C++ Programming Guide, table of compute capabilities).
CARDS = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
KINDS = ("linear", "linear_dx")
ELEMENTS = (2, 4)

sizes = st.integers(1, 200_000)


TABLES = {
    "wgmma": tile_tables._WGMMA,
    "mma": tile_tables._MMA,
    "any card": tile_tables._ANY_CARD,
    "fp32": tile_tables._FP32,
}


def listed() -> list[tuple[str, Tiles]]:
    """(table, tile) of every line."""
    return [(name, tile) for name, table in TABLES.items() for tiles in table.values() for tile in tiles]


def test_every_card_with_a_table_is_checked_here() -> None:
    assert CLASSES.keys() == CARDS.keys()
    bf16 = [id(card.bf16) for card in (*CLASSES.values(), UNKNOWN)]
    assert set(bf16) == {id(table) for name, table in TABLES.items() if name != "fp32"}


@pytest.mark.parametrize(("table", "tile"), listed())
def test_a_line_is_a_tile_that_triton_can_make(table: str, tile: Tiles) -> None:
    assert tile.block_k == BLOCK_K
    assert tile.num_warps in (4, 8)
    assert tile.num_stages >= 1
    for size in (tile.block_m, tile.block_n):
        assert size >= 16
        assert size & (size - 1) == 0
    # 128 accumulators a thread leave 127 of 255 registers for the rest.
    assert tile.block_m * tile.block_n <= 128 * 32 * tile.num_warps


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capability", CARDS)
@given(m=sizes, n=sizes, k=sizes)
def test_a_tile_for_every_product_that_the_card_holds(
    capability: int, kind: tile_tables.Kind, element: int, m: int, n: int, k: int
) -> None:
    shared = CARDS[capability] * KIB
    tile = gemm_tiles(kind, m, n, k, capability, shared, element)
    assert tile.shared_bytes(element) <= shared
    assert tile.block_k == BLOCK_K
    assert 1 <= tile.num_stages <= -(-k // BLOCK_K)
    assert tile.block_m <= max(16, 2 * m) or m > 32


@given(
    kind=st.sampled_from(KINDS),
    m=sizes,
    n=sizes,
    k=sizes,
    capability=st.integers(0, 400),
    shared=st.integers(LEAST_SHARED, 256 * KIB),
    element=st.sampled_from(ELEMENTS),
)
def test_a_tile_for_any_card(
    kind: tile_tables.Kind, m: int, n: int, k: int, capability: int, shared: int, element: int
) -> None:
    tile = gemm_tiles(kind, m, n, k, capability, shared, element)
    assert tile.shared_bytes(element) <= shared
    assert kind == "linear" or tile.block_n >= 64
    if capability not in CLASSES:
        assert tile.shared_bytes(element) <= 99 * KIB


def test_a_tile_too_large_would_be_seen() -> None:
    """Negative control: Hopper's largest takes more than an RTX 4090 has; less memory changes the choice."""
    tile = gemm_tiles("linear", 8192, 8192, 8192, 90, 227 * KIB)
    assert tile.shared_bytes(2) > 99 * KIB
    assert gemm_tiles("linear", 8192, 8192, 8192, 89, 99 * KIB).shared_bytes(2) <= 99 * KIB
    assert gemm_tiles("linear", 8192, 8192, 8192, 90, 99 * KIB) != tile


def test_no_line_is_dead() -> None:
    """Each line is chosen for some product on some card."""
    names = {id(table): name for name, table in TABLES.items()}
    chosen = {
        (names[id(card.bf16)] if element == 2 else "fp32", tile)
        for capability, card in [*CLASSES.items(), (75, UNKNOWN)]
        for shared in (LEAST_SHARED, 64 * KIB, CARDS.get(capability, 64) * KIB)
        for kind in KINDS
        for element in ELEMENTS
        for m in (8, 16, 32, 64, 128, 192, 256, 512, 1600, 3200, 16384)
        for n in (64, 576, 1024, 1536, 4096, 6144, 14336, 49152)
        for tile in [gemm_tiles(kind, m, n, 4096, capability, shared, element)]
    }
    for line in listed():
        assert line in chosen


@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_spread_over_the_card(kind: tile_tables.Kind) -> None:
    """A solo pass of Llama-8B (m = 192, n = 4096): large tiles would leave most of an H200's SMs idle."""
    tile = gemm_tiles(kind, 192, 4096, 14336, 90, 227 * KIB)
    assert (192 // tile.block_m) * (4096 // tile.block_n) >= 0.75 * 132
    assert gemm_tiles(kind, 4096, 14336, 4096, 90, 227 * KIB) == Tiles(128, 256, 64, 8, 3)


def test_a_card_out_of_the_table_has_the_fallback() -> None:
    assert gemm_tiles("linear", 4096, 4096, 4096, 75, 64 * KIB) == Tiles(64, 64, 64, 4, 2)
