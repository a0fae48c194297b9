"""Base GEMMs on CUDA: cuBLAS where its bits are those of our own GEMM, our own where not or where it is slow.

cuBLASLt with split-K forbidden gave the bits of `gemm_triton` for every shape and row count tried on an H200
(Llama-8B, Qwen2.5-0.5B and SmolLM2 shapes, 16–3,200 rows, forward and dX), at the speed of the default for
most. Neither is promised anywhere, so each (product, weight shape, rows) is compared bit for bit on random
rows the first time it is met, and the outcome kept for this card and these versions (`gemm_plans.py`).

float32 stays with `RowInvariantGemm`: its products are checked in another way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from gshare.kernels.gemm import RowInvariantGemm, linear_dx_reference, linear_reference
from gshare.kernels.gemm_plans import Plan, PlanCache, card_key
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

    `exact=False` is the negative control. `plans`: the file that keeps the comparisons' outcomes between
    processes; None: they are made anew.
    """

    def __init__(self, *, exact: bool = True, plans: Path | None = None) -> None:
        self.exact = exact
        self._blas_is_whole = forbid_split_k()
        # Passes are padded to 64 rows and more, so the control splits from more rows on.
        self._other = RowInvariantGemm(exact=exact, splits_above=128)
        self._plans: dict[tuple[str, int, int, int], Plan] = {}
        self._plans_file = plans
        self._cache: PlanCache | None = None

    def plans(self) -> dict[str, str]:
        """What was chosen: "product outputs←reduced at rows" → cublas or triton; for audits and profiles."""
        own = {_product(key): plan for key, plan in self._plans.items()}
        return own | {name: str(plan) for name, plan in self._other.plans().items()}

    def linear(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x (M, K) @ w (N, K)ᵀ → (M, N)."""
        if x.dtype != torch.bfloat16 or not self.exact:
            return self._other.linear(x, w)
        return x @ w.t() if self._plan_linear(x.shape[0], w) == "cublas" else linear_triton(x, w)

    def separable(self, w: torch.Tensor, at: int) -> bool:
        """As `RowInvariantGemm.separable`; true of bf16, where every product has the own GEMM's bits."""
        return (self.exact and w.dtype == torch.bfloat16) or self._other.separable(w, at)

    def linear_dx(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """dy (M, N) @ w (N, K) → (M, K)."""
        if dy.dtype != torch.bfloat16 or not self.exact:
            return self._other.linear_dx(dy, w)
        return dy @ w if self._plan_linear_dx(dy.shape[0], w) == "cublas" else linear_dx_triton(dy, w)

    def plan(self, rows: int, w: torch.Tensor, *, dx: bool) -> None:
        """Compare now what `linear`, and with `dx` `linear_dx`, of `rows` rows would compare the first time.
        Of the head's that takes two and a half times the logits."""
        if w.dtype != torch.bfloat16 or not self.exact:
            self._other.plan(w, dx=dx)  # checked once, for all numbers of rows
            return
        self._plan_linear(rows, w)
        if dx:
            self._plan_linear_dx(rows, w)

    def _plan_linear(self, rows: int, w: torch.Tensor) -> Plan:
        key = ("linear", w.shape[0], w.shape[1], rows)
        return self._plans.get(key) or self._choose(key, linear_reference, linear_triton, w)

    def _plan_linear_dx(self, rows: int, w: torch.Tensor) -> Plan:
        key = ("linear_dx", w.shape[1], w.shape[0], rows)
        return self._plans.get(key) or self._choose(key, linear_dx_reference, linear_dx_triton, w)

    def _choose(self, key: tuple[str, int, int, int], blas: Product, own: Product, w: torch.Tensor) -> Plan:
        _, outputs, reduced, rows = key
        if not self._blas_is_whole or slow_without_split_k(rows, outputs, reduced):
            self._plans[key] = "triton"
            return "triton"
        if self._cache is None:
            card = card_key(w.device) if self._plans_file is not None else None
            self._cache = PlanCache(self._plans_file if card is not None else None, card or "")
        plan = self._cache.get(_product(key))
        if plan is None:
            plan = compare(blas, own, rows, reduced, w)
            self._cache.put(_product(key), plan)
            if plan == "triton":
                log.info("cuBLAS differs from the contract for %s: own GEMM there", _product(key))
        self._plans[key] = plan
        return plan


def compare(blas: Product, own: Product, rows: int, reduced: int, w: torch.Tensor) -> Plan:
    """`cublas` where it has the own GEMM's bits for `rows` random rows (rows, reduced), else `triton`."""
    generator = torch.Generator(device=w.device).manual_seed(0)
    probe = torch.randn(rows, reduced, generator=generator, device=w.device, dtype=w.dtype)
    return "cublas" if torch.equal(blas(probe, w), own(probe, w)) else "triton"


def _product(key: tuple[str, int, int, int]) -> str:
    kind, outputs, reduced, rows = key
    return f"{kind} {outputs}←{reduced} at {rows} rows"
