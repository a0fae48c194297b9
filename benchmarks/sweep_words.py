"""What `benchmarks/sweep.py` prints of its report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def seed_lines(one: dict[str, Any]) -> list[str]:
    parts = one["saved"]
    by = ", ".join(
        f"{name} {part['share']:.1%} ({part['runs']} runs)" for name, part in parts["by_pattern"].items()
    )
    return [
        f"seed {one['seed']}: trained on {parts['samples']:,} of {parts['samples_in_full']:,} samples, "
        f"{parts['share']:.1%} saved: {by}",
        f"  sweep {one['sweep_s']:.1f} s",
    ]


def verdict_lines(one: Mapping[str, Any]) -> list[str]:
    """Of a seed whose full search has ended."""
    found = one["verdict"]
    return [
        f"  full search {one['full_s']:.1f} s",
        f"  winner {found['winner']} {found['winner_val_loss']}, full search {found['best_of_full']} "
        f"{found['best_val_loss']}: {found['excess']:+.2%}, {'passed' if found['passed'] else 'FAILED'}",
        *(f"  DIFFERENT: {fault}" for fault in one["disagreements"]),
    ]


def ranking_lines(one: Mapping[str, Any]) -> list[str]:
    lines = [f"seed {one['seed']}, how its warm-ups rank:"]
    for row in one["ranking"]:
        rho = "not defined" if row["spearman"] is None else f"{row['spearman']:.2f}"
        like = "not defined" if row["spearman_alike"] is None else f"{row['spearman_alike']:.2f}"
        lines += [
            f"  warm-up {row['warmup']:.0%}, like with like: rho {like}, {_kept(row, '_alike')}",
            f"    all ranked together: rho {rho}, {_kept(row, '')}",
        ]
    return lines


def _kept(row: Mapping[str, Any], which: str) -> str:
    where = "inside" if row["best_inside" + which] else f"OUTSIDE ({row['excess' + which]:+.2%})"
    return f"{row['coverage' + which]:.0%} of the true top 25 %, best {where}"


def end_lines(report: dict[str, Any]) -> list[str]:
    lines = [f"{name}: {'ok' if fine else 'FAILED'}" for name, fine in report["gates"].items()]
    split, ratios = report["clock"], report["ratios"]
    if split is not None:
        lines += [f"{arm:8} {seconds:10.1f} s" for arm, seconds in split["seconds"].items()]
        lines += [f"{arm} is extrapolated: {what}" for arm, what in split["extrapolated"].items()]
        lines += [
            f"DIFFERENT: {fault}" for fault in split["peft_disagreements"] + split["groups_disagreements"]
        ]
    if ratios is not None:
        lines += [f"{name}: {ratio:.2f} times" for name, ratio in ratios.items()]
    elif split is not None:
        lines.append("no ratio: a gate failed")
    return lines
