"""Base linear, forward and dX: one GEMM per linear and pass for all adapters together.

    forward   y (T, N)  = x (T, K) @ w (N, K)ᵀ
    dX        dx (T, K) = dy (T, N) @ w (N, K)

The contract (NUMERICS.md, *Row invariance*): a row of the result depends on that row of the input and
on the weight alone, never on T or on the row's place. Libraries keep that for some shapes only, so it is
checked on the real weights the first time a shape is seen; where the check fails, the product runs in
tiles of one fixed row count, which has the property by construction and is checked as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from gshare.kernels.errors import NotRowInvariant

Plan = Literal["whole", "tiled"]

# Rows per tile where the whole product is not row-invariant. cuBLAS was bit-equal from 512 rows on
# (H200, Llama-8B and Qwen-7B shapes); MKL without strict mode differs up to about 210 rows.
TILE_ROWS = {"cpu": 64, "cuda": 512}

# Plain MKL fails at 1–16 rows (edge kernels) and at 57–207 (blocking). cuBLAS fails at 64–256 (split-K),
# and in fp32 some thin shapes only from about 1,000 rows on.
CHECK_ROWS = {"cpu": (1, 2, 7, 17, 64, 100, 192, 257), "cuda": (1, 2, 7, 64, 192, 257, 700, 1100, 2100)}


def linear_reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x (T, K) @ w (N, K)ᵀ → (T, N)."""
    return x @ w.t()


def linear_dx_reference(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """dy (T, N) @ w (N, K) → (T, K)."""
    return dy @ w


class RowInvariantGemm:
    """The two products, each with a plan per weight shape; `exact=False` is the negative control."""

    def __init__(self, *, exact: bool = True, checked: bool = True, splits_above: int = 48) -> None:
        """`splits_above`: from how many rows on the control splits its sums."""
        self.exact = exact
        self._splits_above = splits_above
        self._checked = checked
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._separable: dict[tuple[torch.Size, torch.dtype, int], bool] = {}

    def linear(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self._run("linear", linear_reference, x, w)

    def linear_dx(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self._run("linear_dx", linear_dx_reference, dy, w)

    def plan(self, w: torch.Tensor, *, dx: bool) -> None:
        """Compare now what `linear`, and with `dx` `linear_dx`, would compare the first time."""
        if not self.exact:
            return
        if ("linear", w.shape, w.dtype) not in self._plans:
            self.linear(w.new_zeros(1, w.shape[1]), w)
        if dx and ("linear_dx", w.shape, w.dtype) not in self._plans:
            self.linear_dx(w.new_zeros(1, w.shape[0]), w)

    def thin(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x (T, K) @ w (K, N), one of them a rank: an adapter's products. `w` may be a transposed view.

        Checked on a random matrix laid out as `w`: an adapter's B is zero at first, and nothing differs then.
        """
        if not self.exact:
            return x @ w
        transposed = w.stride(0) == 1

        def probe() -> torch.Tensor:
            return random_rows(w.shape[1], w.t()).t() if transposed else random_rows(w.shape[0], w)

        return self._product(("thin", w.shape, w.dtype, transposed), linear_dx_reference, x, w, probe)

    def separable(self, w: torch.Tensor, at: int) -> bool:
        """Whether x @ wᵀ has the bits of the products with w[:at] and w[at:], side by side; checked on random
        rows the first time, as the plans are."""
        key = (w.shape, w.dtype, at)
        if key not in self._separable:
            probe = random_rows(max(CHECK_ROWS[w.device.type]), w)
            whole = self.linear(probe, w)
            parts = torch.cat([self.linear(probe, w[:at]), self.linear(probe, w[at:])], dim=1)
            self._separable[key] = torch.equal(whole, parts)
        return self._separable[key]

    def plans(self) -> dict[str, Plan]:
        """What was chosen per product and shape, for `gshare doctor`, audits and the fingerprint."""
        return {f"{kind} {tuple(shape)}": plan for (kind, shape, *_), plan in self._plans.items()}

    def _run(
        self,
        kind: str,
        product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        w: torch.Tensor,
    ) -> torch.Tensor:
        if not self.exact:
            return _batch_dependent(product, kind, x, w, self._splits_above)
        return self._product((kind, w.shape, w.dtype), product, x, w, lambda: w)

    def _product(
        self,
        key: tuple[Any, ...],
        product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        w: torch.Tensor,
        checked_on: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        plan = self._plans.get(key)
        if plan is None:
            plan = choose_plan(key[0], product, x, checked_on()) if self._checked else "whole"
            self._plans[key] = plan
        return product(x, w) if plan == "whole" else in_tiles(product, x, w)


def in_tiles(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    """The product in tiles of TILE_ROWS rows, the last one filled up with zero rows. One tile at a time
    exists beside the result: of a head's product that is what counts."""
    rows, total = TILE_ROWS[x.device.type], x.shape[0]
    if not total:
        return product(x, w)
    out: torch.Tensor | None = None
    for start in range(0, total, rows):
        tile = x[start : start + rows]
        if (short := rows - tile.shape[0]) > 0:
            tile = torch.cat([tile, tile.new_zeros(short, tile.shape[1])])
        part = product(tile, w)
        if out is None:
            out = part.new_empty(total, part.shape[1])
        out[start : start + rows] = part[: total - start]
        del part
    assert out is not None
    return out


def choose_plan(
    kind: str,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    w: torch.Tensor,
) -> Plan:
    """Check bit for bit that rows do not depend on their company; raises NotRowInvariant if nothing does.

    The probe is made of random rows with the width of `x`; it never looks at the job's own data, so the
    choice is the same in every process. Two results exist at once, no more: an estimate counts the logits
    of as many rows twice.
    """
    check = CHECK_ROWS[x.device.type]
    probe = random_rows(max(check), x)

    def same(run: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        whole = run(probe)
        ends = [(slice(0, rows), slice(len(probe) - rows, None)) for rows in check if rows < len(probe)]
        return torch.equal(run(probe), whole) and all(
            torch.equal(run(probe[part].clone()), whole[part]) for both in ends for part in both
        )

    if same(lambda rows: product(rows, w)):
        return "whole"
    if same(lambda rows: in_tiles(product, rows, w)):
        low, high = torch.aminmax(in_tiles(product, probe, w))
        if bool(low.isfinite() & high.isfinite()):
            return "tiled"
    raise NotRowInvariant(
        f"{kind} with a weight of {tuple(w.shape)} ({w.dtype}) on {x.device} gives rows that depend on their "
        "neighbours even in fixed tiles; exact training is not possible with this BLAS. On x86 start Python "
        "with MKL_CBWR=AVX2,STRICT (gshare's own trainer does)."
    )


def random_rows(rows: int, like: torch.Tensor) -> torch.Tensor:
    """(rows, columns of `like`) in its dtype and on its device: the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, like.shape[1], generator=generator).to(like.device, like.dtype)


def _batch_dependent(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    kind: str,
    x: torch.Tensor,
    w: torch.Tensor,
    above: int,
) -> torch.Tensor:
    """Negative control: what split-K does. The reduction is cut in two when the batch is large."""
    if x.shape[0] <= above:
        return product(x, w)
    half = x.shape[1] // 2
    if kind == "linear":
        return product(x[:, :half], w[:, :half]) + product(x[:, half:], w[:, half:])
    return product(x[:, :half], w[:half]) + product(x[:, half:], w[half:])
