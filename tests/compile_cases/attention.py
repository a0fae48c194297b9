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
    from gshare.kernels import attention_backward_triton as backward
    from gshare.kernels import attention_triton as forward

    out = []
    for heads, kv_heads, dim, window, dtype in SHAPES:
        size = 4 if dtype == "fp32" else 2
        stride = (heads + 2 * kv_heads) * dim
        shape = dict(
            STRIDE=stride, HQ=heads, HKV=kv_heads, D=dim, WIDTH=forward.padded(dim), WINDOW=window,
            WIDEN=False,
        )  # fmt: skip
        x, scalars = f"*{dtype}", dict(lse_stride="i32", scale_log2e="fp32")

        tiles = forward.forward_tiles(dim, size, heads // kv_heads, SHARED)
        cut = dict(BLOCK=tiles.block, SPLIT=forward.ROWS // tiles.block, HEADS=tiles.heads)
        signature = dict(qkv=x, o=x, lse="*fp32", blocks="*i32") | scalars
        out.append((forward.attention_forward_kernel, signature, shape | cut, tiles.warps, tiles.stages))

        tiles = backward.backward_tiles(dim, size, SHARED)
        cut = dict(BLOCK=tiles.block, SPLIT=forward.ROWS // tiles.block, DO_STRIDE=heads * dim)
        signature = dict(qkv=x, do=x, lse="*fp32", delta="*fp32", dqkv=x, blocks="*i32", scale="fp32")
        signature = signature | scalars
        out.append((backward.attention_dkv_kernel, signature, shape | cut, tiles.warps, tiles.stages))
        signature = signature | dict(o=x)
        out.append((backward.attention_dq_kernel, signature, shape | cut, tiles.warps, tiles.stages))
    return out
