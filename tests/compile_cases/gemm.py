"""What the base GEMM is compiled for: every tile that the tables give a card, in both directions."""

from __future__ import annotations

from typing import Any

#: KiB of shared memory that one program may have (CUDA C++ Programming Guide, table of compute capabilities).
SHARED_KIB = {80: 163, 87: 163, 89: 99, 90: 227, 120: 99}
#: Copies into shared memory: the widths' divisibility reached the loads.
SIXTEEN_BYTES, FEWER = "cp.async.cg.", "cp.async.ca."
#: One product of a solo pass, of a packed one, and of few rows.
ROWS = (16, 32, 64, 128, 256, 2048, 4096)


def cases(arch: int) -> list[tuple[Any, ...]]:
    """(kernel, signature, constexprs, num_warps, num_stages, more) for the compile test."""
    from gshare.kernels.gemm_triton import gemm_kernel
    from gshare.kernels.tile_tables import BLOCK_K, gemm_tiles

    found: dict[Any, tuple[Any, ...]] = {}
    for dtype, size in (("*bf16", 2), ("*fp32", 4)):
        signature = {"x_ptr": dtype, "w_ptr": dtype, "y_ptr": dtype, "rows": "i32", "outputs": "i32"}
        signature |= {"reduced": "i32", "x_stride": "i32", "w_stride": "i32"}
        more: dict[str, Any] = {"options": {"enable_fp_fusion": False}}
        if size == 2:
            more |= {"require": [SIXTEEN_BYTES], "forbid": [FEWER]}
        for rows in ROWS:
            for outputs in (576, 4096, 28672):
                for trans in (True, False):
                    kind = "linear" if trans else "linear_dx"
                    tiles = gemm_tiles(kind, rows, outputs, 4096, arch, SHARED_KIB[arch] << 10, size)
                    constexprs = {
                        "TRANS": trans,
                        "WHOLE_K": True,
                        "BLOCK_M": tiles.block_m,
                        "BLOCK_N": tiles.block_n,
                        "BLOCK_K": BLOCK_K,
                        "INTERPRETED": False,
                    }
                    warps, stages = tiles.num_warps, tiles.num_stages
                    found[dtype, trans, tiles] = (gemm_kernel, signature, constexprs, warps, stages, more)
        # A width that no tile divides, as few models have: one tile says that it compiles.
        tiles = gemm_tiles("linear", 256, 576, 4096, arch, SHARED_KIB[arch] << 10, size)
        constexprs = {"TRANS": True, "WHOLE_K": False, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
        constexprs |= {"BLOCK_K": BLOCK_K, "INTERPRETED": False}
        found[dtype] = (gemm_kernel, signature, constexprs, tiles.num_warps, tiles.num_stages, more)
    return list(found.values())
