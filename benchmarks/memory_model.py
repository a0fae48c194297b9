"""The measured memory model against what it has not seen, and as the judge of 200 random admissions.

    python benchmarks/memory_model.py                              a tiny base, counted on the CPU
    python benchmarks/memory_model.py --base llama-3.1-8b --base-dtype nf4 --device cuda     (needs CUDA)
    python benchmarks/memory_model.py --base DIR --device cuda     a checkpoint with its own weights
    python benchmarks/memory_model.py --trust 0.7                  negative control: must fail

Unseen: random sets of adapters (number, ranks, optimizers, dropout, rows of ragged lengths) are trained as
the trainer does it, and the predicted peak is compared with the measured one. Limit: 5 %.

Admissions: under a reservation drawn at random, adapters come one after another. One is admitted when the
model's bound of all that are in, with it, fits; then everybody trains under that limit: one pass until it has
its CUDA graph, then one of the next smaller shape, launched beside it, as a trainer's passes are. One that
does not fit is turned away, and one that is in leaves. Running out of memory once is a failure, and so is a
CUDA graph that had no memory or was given up. `--trust` multiplies the bound: below 1 it is a model that
promises too much.

On CUDA memory is what must be reserved (`agent/train/memory_meter.py` says what of), limited by torch's own
cap. On the CPU tensors are counted by a stand-in for it, so that every path runs; its figures are of no GPU.

Exit code 0 when both gates hold, 1 when one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gshare.agent.service.environment import trainer_environment

os.environ.update(trainer_environment())

import msgspec
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gshare.agent.base.load import load_base
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.base.weights import Base
from gshare.agent.jobs.memory import is_launch_bound
from gshare.agent.jobs.memory_profile import MemoryProfile, profile_key
from gshare.agent.jobs.pass_load import PassLoad, rung
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.train.checkpointing import card_name
from gshare.agent.train.measure_memory import Measured, Measurer, measure_memory
from gshare.agent.train.memory_meter import CountingMeter, CudaMeter, Meter
from gshare.agent.train.part import Row
from gshare.kernels.backend import pick_backend
from gshare.kernels.numerics import NUMERICS

ROOT = Path(__file__).resolve().parent.parent
#: Of the predicted peak, on configurations that the model has not seen.
WORST_ERROR = 0.05
MOST_ADAPTERS = 32
RANKS = (4, 8, 12, 16, 24, 32, 48, 64)
#: Reservations are drawn between the smallest adapter's bound and this share of the largest measured peak.
LARGEST_SHARE = 1.1
#: Admissions under one reservation, and how many are turned away before one that is in leaves.
EPISODE = 8
PATIENCE = 4


@dataclass(frozen=True)
class Member:
    """One adapter and the rows of its micro-batch."""

    spec: AdapterSpec
    rows: tuple[Row, ...]

    @property
    def lengths(self) -> list[int]:
        return [len(row.tokens) for row in self.rows]


class Crowd:
    """Draws adapters; seeded, so that a run can be repeated."""

    def __init__(self, base: Base, *, seed: int, max_tokens: int, lengths: tuple[int, int]) -> None:
        self._draw = np.random.default_rng(seed)
        self._vocabulary = base.config.vocab_size
        self._max_tokens = max_tokens
        self._lengths = lengths
        self._made = 0

    def member(self) -> Member:
        draw, (shortest, longest) = self._draw, self._lengths
        rank = int(draw.choice(RANKS))
        most = max(1, min(32, self._max_tokens // longest))
        lengths = draw.integers(shortest, longest + 1, int(draw.integers(1, most + 1))).tolist()
        self._made += 1
        spec = AdapterSpec(
            name=f"unseen-{self._made}",
            data="unseen",
            output_dir="unseen",
            r=rank,
            lora_alpha=2.0 * rank,
            lora_dropout=0.1 if draw.random() < 0.25 else 0.0,
            optim="adamw_8bit" if draw.random() < 0.5 else "adamw",
            seed=self._made,
        )
        rows = tuple(
            Row(draw.integers(0, self._vocabulary, length).astype(np.int32), np.ones(length, dtype=bool), i)
            for i, length in enumerate(lengths)
        )
        return Member(spec, rows)

    def set(self) -> list[Member]:
        """Some adapters whose rows are one pass."""
        found: list[Member] = []
        for _ in range(int(self._draw.integers(1, MOST_ADAPTERS + 1))):
            one = self.member()
            if found and tokens(found) + sum(one.lengths) > self._max_tokens:
                break
            found.append(one)
        return found

    def limit(self, least: int, most: int) -> int:
        return int(self._draw.integers(least, max(least + 1, most)))

    def index(self, count: int) -> int:
        return int(self._draw.integers(count))


def tokens(members: list[Member]) -> int:
    return sum(sum(member.lengths) for member in members)


class Bench:
    """One base on one device, and the model that was measured of it."""

    def __init__(self, base: Base, *, max_tokens: int, lengths: tuple[int, int]) -> None:
        self.base, self.max_tokens, self.lengths = base, max_tokens, lengths
        self._backend = pick_backend(base.device)
        self._free = Measurer(base, self._backend, self._meter(0))

    def profile(self) -> MemoryProfile:
        def progress(what: str, done: int, total: int) -> None:
            print(f"  measuring {done + 1}/{total or '?'}: {what}", file=sys.stderr, flush=True)

        key = profile_key(
            self.base.fingerprint,
            base_dtype=self.base.base_dtype,
            card=card_name(self.base.device),
            checkpointing=False,
        )
        return measure_memory(
            self._free, key, max_tokens=self.max_tokens, max_length=self.lengths[1], on_progress=progress
        )

    def bound(self, profile: MemoryProfile, members: list[Member], trust: float) -> int:
        return round(profile.memory.bound(self._load(members)) * trust)

    def predict(self, profile: MemoryProfile, members: list[Member]) -> float:
        return profile.memory.predict(self._load(members, all_labelled=True))

    def measure(self, members: list[Member], *, limit: int = 0) -> Measured | None:
        """None when it ran out of memory. `limit` 0: none but the device's."""
        measurer = self._free if not limit else Measurer(self.base, self._backend, self._meter(limit))
        if limit and self.base.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.base.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), self.base.device)
        try:
            rows = [m.rows for m in members]
            return measurer.measure_rows(
                [m.spec for m in members], rows, self._shorter(rows) if limit else ()
            )
        finally:
            if limit and self.base.device.type == "cuda":
                torch.cuda.set_per_process_memory_fraction(1.0, self.base.device)

    def _shorter(self, rows: list[tuple[Row, ...]]) -> list[tuple[Row, ...]]:
        """The rows without so many tokens at their ends that their pass is of the next smaller shape; none
        where there is no smaller one."""
        total = sum(len(row.tokens) for own in rows for row in own)
        coarse = is_launch_bound(self.base.config.parameter_count())
        shape = rung(total, coarse=coarse)
        surplus = next((n for n in range(total) if rung(total - n, coarse=coarse) < shape), 0)
        if not surplus:
            return []
        found = []
        for own in rows:
            cut = []
            for row in own:
                less = min(surplus, len(row.tokens) - 2)
                surplus -= less
                keep = len(row.tokens) - less
                cut.append(Row(row.tokens[:keep], row.trained[:keep], row.sample))
            found.append(tuple(cut))
        return found

    def _load(self, members: list[Member], *, all_labelled: bool = False) -> PassLoad:
        return self._free.load(
            [member.spec for member in members],
            [length for member in members for length in member.lengths],
            all_labelled=all_labelled,
        )

    def _meter(self, limit: int) -> Meter:
        if self.base.device.type == "cuda":
            return CudaMeter(self.base.device)
        resident = self.base.nbytes + self.base.scratch.nbytes
        return CountingMeter(resident_bytes=resident, limit_bytes=limit)


def unseen(bench: Bench, profile: MemoryProfile, crowd: Crowd, count: int) -> dict[str, Any]:
    """Predicted and measured peaks of `count` random sets."""
    rows = []
    while len(rows) < count:
        members = crowd.set()
        measured = bench.measure(members)
        if measured is None:  # beyond the device: nothing to compare with
            continue
        predicted = bench.predict(profile, members)
        rows.append(
            {
                "adapters": len(members),
                "tokens": tokens(members),
                "predicted": round(predicted),
                "measured": measured.peak_bytes,
                "error": predicted / measured.peak_bytes - 1,
            }
        )
    worst = max(abs(row["error"]) for row in rows)
    return {"configurations": rows, "worst_error": worst, "gate": worst <= WORST_ERROR}


def admissions(
    bench: Bench, profile: MemoryProfile, crowd: Crowd, count: int, trust: float
) -> dict[str, Any]:
    """`count` admissions by the model's bound, each trained under its limit. Passes for whose CUDA graph
    there was no memory are failures too: a model that promises too little room costs these first."""
    largest = max(point.peak_bytes for point in profile.points)
    admitted = refused = failed = launched = 0
    used: list[float] = []
    while admitted < count:
        first = crowd.member()
        least = bench.bound(profile, [first], trust)
        limit = crowd.limit(least, round(LARGEST_SHARE * largest))
        inside: list[Member] = []
        one, turned_away, until = first, 0, min(count, admitted + EPISODE)
        while admitted < until:
            fits = tokens(inside) + sum(one.lengths) <= bench.max_tokens
            if not fits or bench.bound(profile, [*inside, one], trust) > limit:
                refused, turned_away = refused + 1, turned_away + 1
                if inside and turned_away % PATIENCE == 0:
                    inside.pop(crowd.index(len(inside)))
                if turned_away > PATIENCE * MOST_ADAPTERS:
                    break
                one = crowd.member()
                continue
            inside.append(one)
            one = crowd.member()
            admitted += 1
            measured = bench.measure(inside, limit=limit)
            if measured is None:
                failed += 1
                inside.pop()
            else:
                launched += measured.without_graph > 0
                used.append(measured.peak_bytes / limit)
    return {
        "admitted": admitted,
        "refused": refused,
        "out_of_memory": failed,
        "without_graph": launched,
        "mean_use": sum(used) / len(used) if used else 0.0,
        "trust": trust,
        "gate": failed == launched == 0,
    }


def make_base(name: str, base_dtype: str, device: torch.device) -> Base:
    """A tiny checkpoint, a shape of `gpu_workload.SHAPES`, or a checkpoint directory."""
    if name == "tiny":
        with tempfile.TemporaryDirectory() as directory:
            return load_base(make_tiny_checkpoint(Path(directory)), base_dtype=base_dtype, device=device)
    if Path(name).is_dir():
        return load_base(Path(name), base_dtype=base_dtype, device=device)
    from gpu_workload import make_base as make

    return make(name, base_dtype, device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--base", default="tiny", help="tiny, a shape of gpu_workload.py, or a directory")
    parser.add_argument("--base-dtype", default="", help="fp32 on the CPU, bf16 on CUDA")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--max-tokens", type=int, default=0, help="of a pass: 512 on the CPU, 16384 on CUDA")
    parser.add_argument("--unseen", type=int, default=40)
    parser.add_argument("--admissions", type=int, default=200)
    parser.add_argument("--trust", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=None, help="the JSON result; by default it is printed only"
    )
    given = parser.parse_args()
    on_cuda = given.device == "cuda"
    if on_cuda and not torch.cuda.is_available():
        parser.error("--device cuda: needs CUDA")
    device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")  # a cap asks for the index
    base = make_base(given.base, given.base_dtype or ("bf16" if on_cuda else "fp32"), device)
    longest = min(1024 if on_cuda else 64, base.config.max_position_embeddings)
    bench = Bench(
        base,
        max_tokens=given.max_tokens or (16384 if on_cuda else 512),
        # Of the tiny base short passes are not the peak (updates are), as they are of real ones.
        lengths=(64 if on_cuda else 48, longest),
    )
    profile = bench.profile()
    crowd = Crowd(base, seed=given.seed, max_tokens=bench.max_tokens, lengths=bench.lengths)
    missed = unseen(bench, profile, crowd, given.unseen)
    print(f"  unseen: worst error {missed['worst_error']:.2%}", file=sys.stderr, flush=True)
    result: dict[str, Any] = {
        "base": given.base,
        "base_dtype": base.base_dtype,
        "card": card_name(base.device) if on_cuda else "counted tensors, no GPU",
        "versions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "numerics": NUMERICS,
        },
        "seed": given.seed,
        "model": {
            "points": len(profile.points),
            "terms": dict(zip(profile.memory.terms, profile.memory.coefficients, strict=True)),
            "r2": profile.memory.r2,
            "worst_error_left_out": profile.memory.worst_error,
            "margin": profile.memory.margin,
            "measured": [
                {**msgspec.structs.asdict(one.load), "batch": one.batch, "peak": one.peak_bytes}
                for one in profile.points
            ],
        },
        "unseen": missed,
        "admissions": admissions(bench, profile, crowd, given.admissions, given.trust),
    }
    text = json.dumps(result, indent=1)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text + "\n")
    print(text)
    print(summary(result), file=sys.stderr)
    return 0 if result["unseen"]["gate"] and result["admissions"]["gate"] else 1


def summary(result: dict[str, Any]) -> str:
    missed, judged = result["unseen"], result["admissions"]
    return (
        f"{result['base']} {result['base_dtype']} on {result['card']}: worst error "
        f"{missed['worst_error']:.2%} on {len(missed['configurations'])} unseen configurations "
        f"(limit {WORST_ERROR:.0%}); {judged['out_of_memory']} of {judged['admitted']} admissions ran out of "
        f"memory, {judged['without_graph']} had none for a graph, {judged['mean_use']:.0%} of the "
        "reservation used"
    )


if __name__ == "__main__":
    sys.exit(main())
