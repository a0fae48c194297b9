"""What follows from what `benchmarks/sweep.py` measures: gates and ratios, and both again from its files.

A file says how the seeds of one run went. Files of the same work on the same machine are read together, each
verdict is made again from the validation losses that they hold, and the clock is that of the first with one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweep_ranking import History, disagreements, verdict

#: Arms from the slowest to the fastest, and what is gained from one to the next.
STEPS = (
    ("peft", "alone", "gshare's step"),
    ("alone", "groups", "packing"),
    ("groups", "full", "admission"),
    ("full", "sweep", "early exit"),
)


def gates_of(seeds: Sequence[Mapping[str, Any]], split: Mapping[str, Any] | None) -> dict[str, bool]:
    """Of verified seeds, and of the clock where there is one."""
    gates = {
        "winner within 0.5 % of the full search": all(one["verdict"]["passed"] for one in seeds),
        "losses of the sweep are the full search's": not any(one["disagreements"] for one in seeds),
    }
    if split is not None:
        gates["every arm did the same work"] = not (
            split["peft_disagreements"] or split["groups_disagreements"]
        )
    return gates


def ratios_of(split: Mapping[str, Any] | None, gates: Mapping[str, bool]) -> dict[str, float] | None:
    """None where nothing was timed, or a gate has failed."""
    if split is None or not all(gates.values()):
        return None
    seconds = split["seconds"]
    found = {name: seconds[slow] / seconds[fast] for slow, fast, name in STEPS}
    return found | {"PEFT in full ÷ sweep": seconds["peft"] / seconds["sweep"]}


def read_again(paths: Sequence[Path]) -> dict[str, Any]:
    """One report of the files of `paths`, judged by what they hold. SystemExit: they are of different work,
    or of seeds that were not verified."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for path, one in zip(paths, reports, strict=True):
        for key in ("work", "machine", "versions"):
            if one[key] != reports[0][key]:
                raise SystemExit(f"{path}: its {key} is not that of {paths[0]}: report them apart")
    seeds = [_judged(path, one) for path, found in zip(paths, reports, strict=True) for one in found["seeds"]]
    split = next((one["clock"] for one in reports if one["clock"] is not None), None)
    gates = gates_of(seeds, split)
    return reports[0] | {
        "seeds": seeds,
        "clock": split,
        "ratios": ratios_of(split, gates),
        "gates": gates,
    }


def _judged(path: Path, one: Mapping[str, Any]) -> dict[str, Any]:
    if "full_val_losses" not in one:
        raise SystemExit(f"{path}: seed {one['seed']} was not verified: run it with --verify")
    full, sweep = _history(one["full_val_losses"]), _history(one["sweep_val_losses"])
    return {
        **one,
        "verdict": verdict(_best(full), {name: _best(sweep).get(name) for name in full}),
        "disagreements": [*one["disagreements"], *disagreements(full, sweep)],
    }


def _history(losses: Mapping[str, Mapping[str, float | None]]) -> History:
    """Steps are strings in JSON, and what is no number is null."""
    return {
        name: {int(step): loss for step, loss in vals.items() if loss is not None}
        for name, vals in losses.items()
    }


def _best(history: History) -> dict[str, float | None]:
    return {name: min(vals.values(), default=None) for name, vals in history.items()}
