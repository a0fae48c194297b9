"""The result of a sweep, by its directory and the command that ran it: for people, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gshare.agent.errors import GshareError
from gshare.agent.jobs.sweep_records import (
    Decision,
    SweepRecord,
    directory_of,
    read_decisions,
    read_sweep,
)
from gshare.agent.report.read import FINAL
from gshare.agent.service.journal import strict_json
from gshare.cli.board import columns, number
from gshare.cli.sweep_values import is_numbered, values_text


class Progress(NamedTuple):
    """How far a configuration came beyond its last decision, in a sweep that was left before its end."""

    step: int
    samples: int
    best_val_loss: float | None
    state: str


def result_of(directory: Path, left: Mapping[str, Progress] | None = None) -> dict[str, Any]:
    """`winner` (None: no validation loss was a number) and `jobs`, best first; `samples` done and planned.

    `left`: the sweep is not done, so nobody has won; what its decisions do not tell yet.
    """
    record = read_sweep(directory)
    assert record is not None, directory
    rows = _rows(directory, record, read_decisions(directory), left or {})
    best = [row for row in rows if row["best_val_loss"] is not None and left is None]
    return {
        "type": "sweep",
        "name": record.name,
        "done": left is None,
        "winner": best[0]["adapter"] if best else None,
        "best": str(Path(best[0]["output_dir"]) / "best") if best else None,
        "samples": sum(row["samples"] for row in rows),
        "samples_total": sum(row["samples_total"] for row in rows),
        "jobs": rows,
    }


def _rows(
    directory: Path, record: SweepRecord, decisions: list[Decision], left: Mapping[str, Progress]
) -> list[dict[str, Any]]:
    last: dict[str, Decision] = {}
    best: dict[str, float] = {}
    for decision in decisions:
        if decision.event == "cloned":
            continue  # nothing of the configuration itself
        last[decision.job] = decision
        loss = decision.evidence.get("best_val_loss")
        if loss is not None:
            best[decision.job] = loss
    rows = []
    for one in record.configurations:
        decision = last.get(one.name)
        row: dict[str, Any] = {
            "adapter": one.name,
            "hyper_parameters": one.hyper_parameters,
            "best_val_loss": best.get(one.name),
            "state": decision.event if decision is not None else "queued",
            "pattern": decision.pattern if decision is not None else "",
            "step": decision.step if decision is not None else 0,
            "total_steps": one.total_steps,
            "samples": decision.samples if decision is not None else 0,
            "samples_total": one.samples_total,
            "output_dir": str(directory_of(directory, one)),
            "reason": decision.reason if decision is not None else "",
        }
        ahead = left.get(one.name)
        if ahead is not None and ahead.step > row["step"]:
            row |= {"step": ahead.step, "samples": ahead.samples, "state": ahead.state}
            if ahead.best_val_loss is not None:
                row["best_val_loss"] = ahead.best_val_loss
        rows.append(row)
    # Equal losses keep the file's order, as the sweep's own choice of the winner does.
    return sorted(rows, key=lambda row: (row["best_val_loss"] is None, row["best_val_loss"] or 0.0))


def print_result(directory: Path, *, json_lines: bool, left: Mapping[str, Progress] | None = None) -> None:
    """On stdout: it is what the command gives back. `left` as for `result_of`. GshareError, when all is said:
    the winner's adapter is not there, as in a finished sweep somebody has deleted it from."""
    result = result_of(directory, left)
    lost = result["best"] is not None and not (Path(result["best"]) / FINAL).is_file()
    if json_lines:
        print(json.dumps(strict_json(result), allow_nan=False), flush=True)
    else:
        _print_for_people(result, lost=lost)
    if lost:
        raise GshareError(
            f"the adapter of the winner, {result['winner']}, is not in {result['best']}, and a sweep "
            "that is done trains nothing: put it back if it was moved, or run the sweep again with another "
            "output_dir"
        )


def _print_for_people(result: dict[str, Any], *, lost: bool) -> None:
    lines = [("", "configuration", "best val loss", "steps", "samples", "state")]
    for place, row in enumerate(result["jobs"], start=1):
        state = f"{row['state']}: {row['pattern']}" if row["pattern"] else row["state"]
        samples = f"{row['samples']}/{row['samples_total']}"
        steps = f"{row['step']}/{row['total_steps']}"
        lines.append((str(place), row["adapter"], number(row["best_val_loss"]), steps, samples, state))
    print("\n".join(columns(lines)))
    done, planned = result["samples"], result["samples_total"]
    if not result["done"]:
        print(f"trained on {done:,} of {planned:,} samples so far", flush=True)
        return
    if planned:
        print(f"trained on {done:,} of {planned:,} samples: {1 - done / planned:.1%} saved")
    if result["winner"] is None:
        print("no winner: no configuration had a validation loss that is a number", flush=True)
    else:
        where = "its adapter is gone" if lost else f"its adapter in {result['best']}"
        name = result["winner"]
        (values,) = (row["hyper_parameters"] for row in result["jobs"] if row["adapter"] == name)
        which = f" ({values_text(values)})" if values and is_numbered(name) else ""
        print(f"winner: {name}{which}, {where}", flush=True)
