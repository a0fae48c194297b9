"""What the compile test builds of the grouped LoRA kernels: the launches of real models, without a GPU."""

from __future__ import annotations

from typing import Any

#: (kernel, signature, constexprs, num_warps, num_stages)
Case = tuple[Any, dict[str, str], dict[str, Any], int, int]

_DTYPES = {"bf16": ("*bf16", 2), "fp32": ("*fp32", 4)}


def _case(kernel: Any, types: dict[str, str], constexprs: dict[str, Any], warps: int, stages: int) -> Case:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    assert all(name in constexprs for name, kind in signature.items() if kind == "constexpr")
    return kernel, signature, constexprs, warps, stages


def cases() -> list[Case]:
    """Every kernel in bf16 and fp32: an 8B's qkv at ranks up to 16 and up to 256, with and without masks,
    split over programs or not, and a group of one linear whose width no tile divides."""
    from gshare.kernels import grouped_lora_backward_triton as backward
    from gshare.kernels import grouped_lora_grads_triton as gradients
    from gshare.kernels import grouped_lora_triton as forward
    from gshare.kernels.lora_tables import BLOCK_T, column_width

    found: list[Case] = []
    for dtype, size in _DTYPES.values():
        for k, outs, max_rank, masked, split in (
            (4096, (4096, 1024, 1024), 16, False, True),
            (4096, (4096, 1024, 1024), 256, True, False),
            (14336, (4096,), 64, False, True),
            (1100, (600,), 8, True, True),
        ):
            linears = len(outs)
            columns = -(-linears * column_width(max_rank) // 16) * 16
            block_c, block_k = forward.column_block(columns, size, masked), forward.BLOCK_K[size]
            rank_c = forward.column_block(column_width(max_rank), size)
            sizes = dict(zip(("N0", "N1", "N2"), (*outs, 0, 0), strict=False))
            i64, i32, fp32 = "*i64", "*i32", "*fp32"
            tables = {"blocks": i32, "table": i64, "scales": fp32, "adapters": "i32", "tokens": "i32"}
            tables |= {
                "partials": fp32,
                "counters": i32,
                "granules": i32,
                "spans": i32,
                "fresh": i32,
                "rows": i32,
            }
            tables["grads"] = fp32
            tensors = dict.fromkeys(("x", "y", "s", "flat", "dy", "ds", "dx"), dtype)
            strides = dict.fromkeys(("x_stride", "y_stride", "s_stride"), "i32")
            strides |= dict.fromkeys(("dy_stride", "ds_stride", "dx_stride"), "i32")
            types = {**tables, **tensors, **strides, "mask": "*u8" if masked else dtype}
            common = {"J": linears, "BLOCK_T": BLOCK_T, "WIDEN": False}
            chunked = {**common, "CHUNK": forward.CHUNK, "SPLIT": split}
            shrink = {"K": k, "TILES": -(-columns // block_c), "BLOCK_C": block_c, "BLOCK_K": block_k}
            loads = forward.stages((BLOCK_T + block_c) * block_k * size, 3 if masked else 4)
            kernel = forward._shrink_kernel
            found.append(
                _case(kernel, types, {**chunked, **shrink, "HAS_MASK": masked}, forward.WARPS, loads)
            )
            wide = {"BLOCK_R": forward.BLOCK_R[size]}
            expand = {**common, **sizes, **wide, "BLOCK_N": forward.BLOCK_OUT}
            found.append(_case(forward._expand_kernel, types, expand, forward.WARPS, 1))
            ds = {"TILES": -(-max_rank // rank_c), "BLOCK_C": rank_c, "BLOCK_N": block_k}
            loads = forward.stages((BLOCK_T + rank_c) * block_k * size, 4)
            found.append(_case(backward._ds_kernel, types, {**chunked, **sizes, **ds}, forward.WARPS, loads))
            dx = {**common, **wide, "K": k, "BLOCK_K": forward.BLOCK_OUT, "HAS_MASK": masked}
            found.append(_case(backward._dx_kernel, types, dx, forward.WARPS, 1))
            grads = {"A_TILES": -(-columns // block_c), "B_TILES": -(-max_rank // rank_c), "K": k}
            grads |= {"A_COLUMNS": block_c, "B_COLUMNS": rank_c, "HAS_MASK": masked}
            for adapters in (1, 16):
                a = gradients.feature_block(k, block_c, adapters, size, masked)
                b = gradients.feature_block(sum(outs), rank_c, adapters, size, masked)
                features = {"A_FEATURES": a, "B_FEATURES": b}
                loads = gradients.grad_stages(a, b, max(block_c, rank_c), size, masked)
                for rows in (False, True):
                    constexprs = {**common, **sizes, **grads, **features, "HAS_ROWS": rows}
                    found.append(_case(gradients._grads_kernel, types, constexprs, forward.WARPS, loads))
    return found
