"""Base GEMMs on CUDA: cuBLAS where its bits are those of our own GEMM, our own where not or where it is slow.

cuBLASLt with split-K forbidden gave the bits of `gemm_triton` for every shape and row count tried on an H200
(Llama-8B, Qwen2.5-0.5B and SmolLM2 shapes, 16–3,200 rows, forward and dX), at the speed of the default for
most. Neither is promised anywhere, so each (product, weight shape, rows) is compared bit for bit on random
rows the first time it is met.

float32 stays with `RowInvariantGemm`: its products are checked in another way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from gshare.kernels.gemm import RowInvariantGemm, linear_dx_reference, linear_reference
from gshare.kernels.gemm_triton import linear_dx_triton, linear_triton

log = logging.getLogger(__name__)

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def forbid_split_k() -> bool:
    """Tell torch to use cuBLASLt without split-K; False where this torch cannot (older than 2.10)."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        matmul.allow_bf16_reduced_precision_reduction = (False, False)  # pyright: ignore[reportAttributeAccessIssue]
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def slow_without_split_k(rows: int, outputs: int, reduced: int) -> bool:
    """Few output tiles and a long sum: cuBLASLt then picks kernels that leave the card idle.

    H200, 128 rows: 9,728 → 896 228 µs against our 19; 49,152 → 576 1,035 against 114; 192 rows of
    3,072 → 576 76 against 8. From 16 tiles of 128 × 128 on it is never far behind.
    """
    return -(-rows // 128) * -(-outputs // 128) < 16 and reduced >= 2048


class CudaGemm:
    """`linear` and `linear_dx` with bits that depend on the row and the weight alone.

    `exact=False` is the negative control.
    """

    def __init__(self, *, exact: bool = True) -> None:
        self.exact = exact
        self._blas_is_whole = forbid_split_k()
        self._other = RowInvariantGemm(exact=exact)
        self._plans: dict[tuple[str, int, int, int], str] = {}

    def plans(self) -> dict[str, str]:
        """What was chosen: "product outputs←reduced at rows" → cublas or triton; for audits and profiles."""
        own = {f"{kind} {n}←{k} at {m} rows": plan for (kind, n, k, m), plan in self._plans.items()}
        return own | {name: str(plan) for name, plan in self._other.plans().items()}

    def linear(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x (M, K) @ w (N, K)ᵀ → (M, N)."""
        if x.dtype != torch.bfloat16 or not self.exact:
            return self._other.linear(x, w)
        key = ("linear", w.shape[0], w.shape[1], x.shape[0])
        plan = self._plans.get(key) or self._choose(key, linear_reference, linear_triton, w)
        return x @ w.t() if plan == "cublas" else linear_triton(x, w)

    def linear_dx(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """dy (M, N) @ w (N, K) → (M, K)."""
        if dy.dtype != torch.bfloat16 or not self.exact:
            return self._other.linear_dx(dy, w)
        key = ("linear_dx", w.shape[1], w.shape[0], dy.shape[0])
        plan = self._plans.get(key) or self._choose(key, linear_dx_reference, linear_dx_triton, w)
        return dy @ w if plan == "cublas" else linear_dx_triton(dy, w)

    def _choose(self, key: tuple[str, int, int, int], blas: Product, own: Product, w: torch.Tensor) -> str:
        _, outputs, reduced, rows = key
        plan = "triton"
        if self._blas_is_whole and not slow_without_split_k(rows, outputs, reduced):
            generator = torch.Generator(device=w.device).manual_seed(0)
            probe = torch.randn(rows, reduced, generator=generator, device=w.device, dtype=w.dtype)
            if torch.equal(blas(probe, w), own(probe, w)):
                plan = "cublas"
            else:
                log.info("cuBLAS differs from the contract for %s: own GEMM there", key)
        self._plans[key] = plan
        return plan
