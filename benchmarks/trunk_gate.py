"""Whether the arms of a cell of `benchmarks/trunk.py` did the same work, and the ratios if they did."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trunk_arms import ARMS
from trunk_workload import Cohort

#: PEFT's losses of the first epoch against dedicated gshare's, relative. It has other products and another
#: order of summation; from the second epoch on a job with a high rate knows its rows by heart, and what is
#: left of its loss (0.001 of 12.5) says nothing in per cent.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
#: A dedicated run below this part of its own GEMM floor is a slow baseline. Held against 8B on a GPU: smaller
#: models are at the mercy of launches, and a CPU's floor of others on it.
LEAST_OF_FLOOR = 0.45
FLOOR_HOLDS = "llama-3.1-8b"

#: Numerator, denominator.
PAIRS = (
    *(("packed", "dedicated"), ("shared", "dedicated"), ("cached", "dedicated"), ("shared", "packed")),
    *(("packed", "peft"), ("shared", "peft"), ("packed", "mps"), ("shared", "mps"), ("mps", "peft")),
)
#: To reach on an H200 at 8B.
TARGETS: dict[tuple[str, str, str], dict[str, float]] = {
    ("n16-top1", "shared", "dedicated"): {"steady": 4.8},
    ("n32-top1", "shared", "dedicated"): {"steady": 5.6},
    ("n16-top2", "shared", "dedicated"): {"steady": 3.9},
    ("n8-top1", "shared", "dedicated"): {"steady": 3.8},
    ("n16-top1", "shared", "mps"): {"steady": 5.0},
    ("n32-top1", "shared", "packed"): {"steady": 4.7},
    ("n16-top1", "cached", "dedicated"): {"steady": 7.0},
    ("n16-all-own", "packed", "peft"): {"steady": 15.0, "cold": 8.0},
}

Records = dict[str, dict[str, Any]]


def faults(cohort: Cohort, records: Records) -> list[str]:
    """Why there are no ratios of these arms; empty when the gate passes."""
    found = [f"{arm}: {record['error']}" for arm, record in records.items() if "error" in record]
    if found:
        return found
    if "dedicated" not in records or len(records) < 2:
        return ["nothing to compare: arm dedicated and another are needed"]
    names = sorted(spec.name for spec in cohort.specs())
    dedicated = records["dedicated"]["jobs"]
    for arm, record in records.items():
        jobs = record["jobs"]
        expected = record.get("sampled", [len(names)])[0]
        if len(jobs) != expected or not set(jobs) <= set(names):
            found.append(f"{arm}: trained {len(jobs)} jobs, not the {expected} that it was given")
            continue
        for name in sorted(jobs):
            if len(jobs[name]["losses"]) != cohort.steps * cohort.epochs:
                found.append(f"{arm}: {name} has {len(jobs[name]['losses'])} losses")
            elif not all(math.isfinite(loss) for loss in jobs[name]["losses"]):
                found.append(f"{arm}: {name} has a loss that is no number")
            elif arm in ARMS:
                what = [key for key, value in dedicated[name].items() if jobs[name].get(key) != value]
                found += [f"{arm}: {name} differs from dedicated in {', '.join(what)}"] if what else []
            else:
                first = slice(cohort.steps)
                apart, step = _apart(jobs[name]["losses"][first], dedicated[name]["losses"][first])
                if apart > TOLERANCE[cohort.base_dtype]:
                    found.append(
                        f"{arm}: losses of {name} are not gshare's: {apart:.1e} of it apart at step {step}, "
                        f"{TOLERANCE[cohort.base_dtype]:.0e} is allowed"
                    )
    share = records["dedicated"]["of_floor"]
    on_gpu = "peak_mb" in records["dedicated"]
    if on_gpu and cohort.model == FLOOR_HOLDS and share < LEAST_OF_FLOOR:
        found.append(f"dedicated: {share:.2f} of its GEMM floor, below {LEAST_OF_FLOOR}: a slow baseline")
    return found


def _apart(losses: list[float], others: list[float]) -> tuple[float, int]:
    """The largest relative difference, and its step (from 1)."""
    pairs = enumerate(zip(losses, others, strict=True), start=1)
    return max((abs(a - b) / abs(b), step) for step, (a, b) in pairs)


def ratios(records: Records, operations: dict[str, int]) -> dict[str, dict[str, float]]:
    """`numerator ÷ denominator`: measured, steady and cold, and by operation count."""
    found = {}
    for arm, over in PAIRS:
        if arm in records and over in records:
            found[f"{arm} ÷ {over}"] = {
                kind: records[arm][f"{kind}_tokens_per_s"] / records[over][f"{kind}_tokens_per_s"]
                for kind in ("steady", "cold")
            } | {"operations": operations[over] / operations[arm]}
    return found


def report(cell: str, cohort: Cohort, records: Records, operations: dict[str, int]) -> str:
    """A cell as text; no ratio when the gate fails."""
    layers = f"the top {cohort.top} of {cohort.config.num_layers} layers" if cohort.top else "all layers"
    data = {"one": "same-data cohort", "two": "two data sets", "own": "unrelated tenants"}[cohort.data]
    lines = [f"{cell}: {cohort.model} {cohort.base_dtype}, {cohort.jobs} jobs, {layers}, {data}"]
    lines += [_arm(arm, record) for arm, record in records.items() if "error" not in record]
    wrong = faults(cohort, records)
    if wrong:
        return "\n".join([*lines, "  GATE FAILED, no ratios:", *(f"    {line}" for line in wrong)])
    lines.append("  gate passed: every loss, adapter and moment byte and held-out loss is dedicated's")
    for name, ratio in ratios(records, operations).items():
        arm, over = name.split(" ÷ ")
        wanted = TARGETS.get((cell, arm, over), {}) if cohort.model == FLOOR_HOLDS else {}
        told = [
            f"{kind} {ratio[kind]:.2f}×{_against(ratio[kind], wanted.get(kind))}"
            for kind in ("steady", "cold")
        ]
        lines.append(f"  {name:20} {', '.join(told)}; by operation count {ratio['operations']:.2f}×")
    return "\n".join(lines)


def targets(results: Mapping[str, Any]) -> str:
    """What is to be reached, a line each: measured or why not. `results`: by cell, as they are written."""
    lines = [("cell", "arm", "", "rate", "measured", "to reach", "")]
    for (cell, arm, over), wanted in TARGETS.items():
        result = results.get(cell, {})
        ratio = result.get("ratios", {}).get(f"{arm} ÷ {over}")
        for kind, least in wanted.items():
            if ratio is None:
                measured = {arm, over} <= set(result.get("arms", ()))
                failed = measured and result["gate"] != "passed"
                told = ("-", f"{least}×", "gate failed" if failed else "not measured")
            else:
                reached = "reached" if ratio[kind] >= least else "NOT reached"
                told = (f"{ratio[kind]:.2f}×", f"{least}×", reached)
            lines.append((cell, arm, f"÷ {over}", kind, *told))
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _arm(arm: str, record: dict[str, Any]) -> str:
    told = [f"{record['steady_tokens_per_s']:,.1f} tokens/s, cold {record['cold_tokens_per_s']:,.1f}"]
    for key, form in (
        ("of_floor", "{:.2f} of its GEMM floor"),
        ("trunk_shared", "{:.0%} of the trunk not run"),
        ("together", "{} at once"),
        ("sm_active", "SMs active {:.2f}"),
    ):
        if key in record:
            told.append(form.format(record[key]))
    sampled, jobs = record.get("sampled", (0, 0))
    if sampled < jobs:
        told.append(f"{sampled} of the {jobs} jobs")
    return f"  {arm:20} {', '.join(told)}"


def _against(ratio: float, wanted: float | None) -> str:
    if wanted is None:
        return ""
    return f" (to reach: {wanted}×, {'reached' if ratio >= wanted else 'NOT reached'})"
