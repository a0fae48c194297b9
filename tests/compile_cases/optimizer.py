"""What the gradient norm's and the optimizers' kernels are compiled for."""

from __future__ import annotations

from typing import Any

#: What `launch` compiles with, and that it does what it is for.
EXACT = {"options": {"enable_fp_fusion": False}, "forbid": ["fma.rn.f32"]}


def cases() -> list[tuple[Any, ...]]:
    """(kernel, signature, constexprs, num_warps, num_stages, more) for `compile_kernels.py`."""
    from gshare.kernels.adamw_8bit_layout import GROUP
    from gshare.kernels.adamw_8bit_triton import adamw_8bit_kernel
    from gshare.kernels.adamw_triton import PART, adamw_kernel
    from gshare.kernels.grad_norm_triton import LANES, norms_kernel, square_sums_kernel
    from gshare.kernels.health_triton import health_kernel
    from gshare.kernels.slot_table import BLOCK

    tables = {"slots_ptr": "*i64", "blocks_ptr": "*i32"}
    sums = {"grads_ptr": "*fp32", **tables, "sums_ptr": "*fp64"}
    norms = {"slots_ptr": "*i64", "sums_ptr": "*fp64", "norms_ptr": "*fp64"}
    found: list[tuple[Any, ...]] = [
        (square_sums_kernel, sums, {"BLOCK": BLOCK, "LOG2": 12}, 2, 3, EXACT),
        (norms_kernel, norms, {"BLOCK": BLOCK, "LANES": LANES, "LOG2": 10}, 4, 3, EXACT),
    ]
    flats = dict.fromkeys(("params_ptr", "grads_ptr", "exp_avg_ptr", "exp_avg_sq_ptr"), "*fp32")
    of_adapter = {
        "hyper_ptr": "*fp64",
        "norms_ptr": "*fp64",
        "finite_ptr": "*i32",
        "overflow_ptr": "*i32",
    }
    for compute in ("*bf16", "*fp32"):
        signature = {**flats, "compute_ptr": compute, **tables, **of_adapter}
        constexprs = {"HAS_COMPUTE": compute == "*bf16", "HAS_OVERFLOW": True, "ZERO": True}
        found.append((adamw_kernel, signature, {"BLOCK": BLOCK, "PART": PART, **constexprs}, 4, 3, EXACT))
    judged = {name: kind for name, kind in of_adapter.items() if name != "hyper_ptr"}
    found.append((health_kernel, {"health_ptr": "*i32", "cells_ptr": "*i64", **judged}, {}, 1, 3, EXACT))
    flats = dict.fromkeys(("params_ptr", "grads_ptr"), "*fp32")
    state = {"codes1_ptr": "*u8", "codes2_ptr": "*u8", "floats1_ptr": "*fp32", "floats2_ptr": "*fp32"}
    tables = {"lookup_ptr": "*fp32", "matrices_ptr": "*i64", "groups_ptr": "*i32"}
    for compute in ("*bf16", "*fp32"):
        signature = {**flats, **state, "compute_ptr": compute, **tables, **of_adapter}
        constexprs = {"HAS_COMPUTE": compute == "*bf16", "HAS_OVERFLOW": True, "ZERO": True}
        found.append(
            (adamw_8bit_kernel, signature, {"GROUP": GROUP, "BLOCK": 256, **constexprs}, 8, 3, EXACT)
        )
    return found
