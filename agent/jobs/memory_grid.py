"""Which configurations are measured of a base: (N adapters, b rows) with b from 1 to 32, pure.

ALTO's grid (*Memory profiling*), with ranks, optimizers, lengths and dropout changed on the way, so that the
model can tell what each of them costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gshare.agent.jobs.memory import Device, MemoryEstimate, ModelShape, estimate_run
from gshare.agent.jobs.spec import AdapterSpec, BaseDtype, OptimName

#: Rows of a micro-batch, and adapters, that are tried.
COUNTS = (1, 2, 4, 8, 16, 32)
#: Tokens of a row, as far as the model and the pass hold them.
LENGTHS = (256, 512, 1024)
#: Ranks in turn, and what an adapter's rank times their number stays within: 32 of rank 8, 4 of rank 64.
RANKS = (16, 64, 8, 32)
MOST_RANKS = 256
OPTIMS: tuple[OptimName, ...] = ("adamw", "adamw_8bit")
DROPOUT = 0.1


@dataclass(frozen=True)
class Configuration:
    """N equal adapters, each with `batch` rows of `length` tokens in one pass."""

    adapters: int
    batch: int
    length: int
    r: int = 16
    optim: OptimName = "adamw"
    dropout: float = 0.0

    @property
    def tokens(self) -> int:
        return self.adapters * self.batch * self.length

    def specs(self, *, checkpointing: bool) -> list[AdapterSpec]:
        return [
            AdapterSpec(
                name=f"measured-{number}",
                data="measured",
                output_dir="measured",
                r=self.r,
                lora_alpha=2.0 * self.r,
                lora_dropout=self.dropout,
                per_device_train_batch_size=self.batch,
                max_length=self.length,
                optim=self.optim,
                gradient_checkpointing=checkpointing,
                seed=number,
            )
            for number in range(self.adapters)
        ]

    def __str__(self) -> str:
        return f"{self.adapters} × {self.batch} rows of {self.length} tokens, rank {self.r}, {self.optim}"


def grid(max_tokens: int, *, max_length: int) -> list[Configuration]:
    """Every (N, b) of `COUNTS` whose pass holds at least a row of the shortest length each.

    Lengths, ranks, optimizers and dropout change from one to the next with periods that share no divisor
    with each other's folds (`memory_model.FOLDS`), so that what each of them costs can be told apart.
    """
    lengths = [length for length in LENGTHS if length <= min(max_length, max_tokens)]
    lengths = lengths or [min(max_length, max_tokens)]
    found: list[Configuration] = []
    for batch in COUNTS:
        for adapters in COUNTS:
            number = len(found)
            fitting = [length for length in lengths if adapters * batch * length <= max_tokens]
            if not fitting:
                break
            ranks = [r for r in RANKS if r * adapters <= MOST_RANKS]
            found.append(
                Configuration(
                    adapters,
                    batch,
                    fitting[number % len(fitting)],
                    r=ranks[number % len(ranks)],
                    optim=OPTIMS[number // 4 % 2],
                    dropout=DROPOUT if number % 7 in (3, 6) else 0.0,
                )
            )
    return found


def grid_estimate(
    shape: ModelShape,
    plan: Sequence[Configuration],
    *,
    base_dtype: BaseDtype,
    device: Device,
    checkpointing: bool,
) -> MemoryEstimate:
    """What the largest of `plan` takes: to be reserved before anything was measured."""
    return max(
        (
            estimate_run(
                shape,
                what.specs(checkpointing=checkpointing),
                base_dtype=base_dtype,
                device=device,
                pass_tokens=what.tokens,
                longest_row=what.length,
                attention_matrix=device == "cpu",
            )
            for what in plan
        ),
        key=lambda estimate: estimate.total,
    )
