"""What the attention kernels are compiled as, for the test that compiles them without a GPU."""

from __future__ import annotations

#: (query heads, key heads, head size, window, dtype)
SHAPES = (
    (32, 8, 128, 0, "bf16"),
    (14, 2, 64, 0, "bf16"),
    (9, 3, 64, 0, "bf16"),
    (32, 8, 64, 0, "bf16"),
    (32, 8, 128, 4096, "bf16"),
    (32, 32, 80, 0, "bf16"),
    (8, 4, 256, 0, "bf16"),
    (14, 2, 64, 100, "fp32"),
    (32, 8, 128, 0, "fp32"),
    (8, 4, 256, 0, "fp32"),
)
#: Bytes of shared memory a block may have on the smallest card (sm_89, sm_120).
SHARED = 99 * 1024


def cases() -> list[tuple]:
    """(kernel, signature, constexprs, num_warps, num_stages) of each."""
    from gshare.kernels import attention_triton as forward

    out = []
    for heads, kv_heads, dim, window, dtype in SHAPES:
        size = 4 if dtype == "fp32" else 2
        shape = dict(
            ROW_STRIDE=(heads + 2 * kv_heads) * dim, HQ=heads, HKV=kv_heads, D=dim,
            BLOCK_D=1 << (dim - 1).bit_length(), WINDOW=window, WIDEN=False,
        )  # fmt: skip
        tiles = forward.forward_tiles(dim, size, heads // kv_heads, SHARED)
        signature = dict(
            qkv=f"*{dtype}", o=f"*{dtype}", lse="*fp32", blocks="*i32", lse_stride="i32", scale_log2e="fp32"
        )
        cut = dict(BLOCK=tiles.block, SPLIT=forward.ROWS // tiles.block, HEADS=tiles.heads)
        out.append((forward.attention_forward_kernel, signature, shape | cut, tiles.warps, tiles.stages))
    return out
