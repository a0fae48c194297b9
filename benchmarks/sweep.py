"""A sweep against the full search of the same configurations: is its winner as good, and what did it save?

    python benchmarks/sweep.py --verify                       SmolLM2-135M, a small grid, on two cores
    python benchmarks/sweep.py --verify --grid paper --base-dtype bf16 --device cuda --seeds 0 1 2
                                                              ALTO's grid of 60 (needs CUDA)
    python benchmarks/sweep.py --verify --model tiny          a toy base and toy data: the path, no figures
    python benchmarks/sweep.py --verify --control             negative control: keeps the worst, must fail
    python benchmarks/sweep.py                                the sweep alone: samples saved, seconds
    python benchmarks/sweep.py --report FILE [FILE...]        nothing run: what was written, judged again

For each seed the configurations are trained in full, packed (`full`), and by the sweep, with the defaults of
`gshare sweep`: warm-up 5 %, keep 25 %, each compared with those of as many steps. Gates, on every seed:

    the winner's validation loss is at most 0.5 % above the full search's best
    every training and validation loss of the sweep is that of the full search, bit for bit
    PEFT's first loss is ours (the base's own), so that it was timed on the same work

When one fails the exit code is 1 and no ratio is printed. Samples are rows trained on; those of warm-ups are
counted. How well a warm-up of 1, 2, 5, 10 or 20 % ranks comes from validation losses at exactly those steps:
of the full search where its cadence has them, else of an untimed run to them (its losses are the same bits).

The clock, on the first seed: PEFT one configuration after another (extrapolated from a sample of one
configuration of each batch size and `--peft-steps` steps) → gshare one after another (extrapolated from the
same sample, in full) → packed in fixed groups → admitted as room comes free (`full`) → early exit (`sweep`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from gshare.agent.service.environment import trainer_environment

os.environ.update(trainer_environment())

import torch
from gshare.agent.base.resolve import find_demo_model
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.jobs.early_exit import SweepExit
from gshare.agent.service.journal import strict_json
from gshare.cli.sweep_board import result_of
from gshare.kernels.numerics import NUMERICS
from sweep_arms import Arm, Grid, Search, Setting
from sweep_peft import TOLERANCE, run_peft
from sweep_ranking import History, boundaries, disagreements, ranking, verdict
from sweep_report import gates_of, ratios_of, read_again
from sweep_words import end_lines, ranking_lines, seed_lines, verdict_lines

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo"

GRIDS = {
    # ALTO's search space and its 3 epochs; alpha = 2r, constant rate and weight decay 0.01 are
    # `sweep_arms.py`'s. 300 to 2,400 steps, so warm-ups of 15 to 120, and the ends of warm-ups of 5, 10 and
    # 20 % are among the 20 evaluations.
    "paper": Grid(
        (1e-5, 5e-5, 2e-4, 3e-4, 5e-4),
        (16, 32, 64),
        (1, 2, 4, 8),
        "dialogues",
        800,
        64,
        3,
        evaluations=20,
        at_once=0,
    ),
    # Two cores have to train it in full: 8 configurations of 80 samples.
    "small": Grid((2e-5, 2e-4, 1e-3, 5e-3), (8,), (2, 4), "trivia", 40, 12, 2, evaluations=10, at_once=4),
}


def main() -> int:
    args = _arguments()
    if args.report:
        return _report_again(args)
    grid = GRIDS[args.grid]
    grid = replace(grid, **{key: given for key in ("rows", "epochs") if (given := getattr(args, key))})
    with tempfile.TemporaryDirectory(prefix="gshare-sweep-") as folder:
        setting = _setting(args, grid, Path(folder))
        report: dict[str, Any] = {}
        seeds: list[dict[str, Any]] = []
        split: dict[str, Any] | None = None
        for seed in args.seeds:
            search = Search(setting, seed)
            found, arms = one_seed(search, verify=args.verify, control=args.control)
            seeds.append({"seed": seed, **found})
            report = _write(args, grid, setting, seeds, split)  # hours may pass before the next
            if not args.verify:
                continue
            if split is None and not args.no_split:
                split = clock(search, arms, peft_steps=args.peft_steps)
                report = _write(args, grid, setting, seeds, split)
            seeds[-1] |= ranked(search, arms)
            print("\n".join(ranking_lines(seeds[-1])), flush=True)
            report = _write(args, grid, setting, seeds, split)
    print("\n".join(end_lines(report)), flush=True)
    return 0 if all(report["gates"].values()) else 1


def one_seed(search: Search, *, verify: bool, control: bool) -> tuple[dict[str, Any], dict[str, Arm]]:
    """What one seed gave, and its arms."""
    sweep = search.run_sweep(control=control)
    found: dict[str, Any] = {"saved": saved(search.directory), "sweep_s": sweep.seconds, "load": sweep.load}
    search.clear()
    print("\n".join(seed_lines({"seed": search.seed, **found})), flush=True)  # minutes before the next
    if not verify:
        return found, {"sweep": sweep}
    full = search.run_full()
    found |= {
        "full_s": full.seconds,
        "verdict": verdict(full.best(), {name: sweep.best().get(name) for name in search.totals}),
        "disagreements": _disagreements(sweep, full, full.vals),
        "at_once": {"full": full.most_at_once, "sweep": sweep.most_at_once},
        "total_steps": search.totals,
        "full_states": full.states,
        "full_val_losses": full.vals,
        "sweep_val_losses": sweep.vals,
    }
    print("\n".join(verdict_lines(found)), flush=True)
    return found, {"sweep": sweep, "full": full}


def ranked(search: Search, arms: Mapping[str, Arm]) -> dict[str, Any]:
    """How warm-ups rank, with the runs that this takes, and the disagreements with those as well."""
    full = arms["full"]
    missing = _missing(search, full.vals, full)
    again = search.run_boundaries(missing) if missing else Arm()
    history = {name: {**again.vals.get(name, {}), **full.vals.get(name, {})} for name in search.totals}
    assert not _missing(search, history, full), "a warm-up's end without a validation loss"
    return {
        "ranking": ranking(history, search.totals, full.best()),
        "disagreements": [
            *_disagreements(arms["sweep"], full, history),
            *_disagreements(again, full, history),
        ],
    }


def _disagreements(arm: Arm, full: Arm, vals: History) -> list[str]:
    return [*disagreements(full.losses, arm.losses), *disagreements(vals, arm.vals)][:8]


def _missing(search: Search, history: History, full: Arm) -> dict[str, list[int]]:
    """Of each configuration the ends of warm-ups at which `history` has no validation loss; not those that
    it did not live to."""
    found = {}
    for name, total in search.totals.items():
        lived = max(full.losses.get(name, {}), default=0)
        steps = {step for step in boundaries(total).values() if step <= lived}
        if missing := sorted(steps - history.get(name, {}).keys()):
            found[name] = missing
    return found


def saved(directory: Path) -> dict[str, Any]:
    """Samples that the sweep did not train on, of those of the full search: in all, and by what ended it."""
    result = result_of(directory)
    total = result["samples_total"]
    parts: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    for row in result["jobs"]:
        pattern = row["pattern"] or row["state"]
        parts[pattern] += row["samples_total"] - row["samples"]
        runs[pattern] += 1
    return {
        "samples": result["samples"],
        "samples_in_full": total,
        "share": 1 - result["samples"] / total,
        "by_pattern": {
            pattern: {"runs": runs[pattern], "share": parts[pattern] / total} for pattern in sorted(runs)
        },
    }


def clock(search: Search, arms: Mapping[str, Arm], *, peft_steps: int) -> dict[str, Any]:
    """Seconds of every arm; what is extrapolated says from what."""
    totals, batches, sample = search.totals, search.batches, search.sample()
    alone = search.run_alone()
    groups = search.run_full(groups=True)
    jobs = [search.made.jobs[name].request for name in sample]
    setting = search.setting
    peft = run_peft(search.made.model_dir, setting.base_dtype, setting.device, jobs, peft_steps)
    of_batch = {batches[one.name]: one for one in peft}
    start = alone.seconds - sum(alone.spans.values())
    each = {batches[name]: alone.spans[name] / totals[name] for name in sample}
    return {
        "seconds": {
            "peft": sum(of_batch[batches[n]].seconds / peft_steps * steps for n, steps in totals.items()),
            "alone": start + sum(each[batches[name]] * steps for name, steps in totals.items()),
            "groups": groups.seconds,
            "full": arms["full"].seconds,
            "sweep": arms["sweep"].seconds,
        },
        "peft_step_s": {batches[one.name]: one.seconds / one.steps for one in peft},
        "extrapolated": {
            "peft": f"{len(sample)} of {len(totals)} configurations, {peft_steps} steps each; "
            "no loading, evaluation or save",
            "alone": f"the same {len(sample)} configurations in full, evaluations and saves included",
        },
        "sample": sample,
        "load": {name: arm.load for name, arm in {**arms, "alone": alone, "groups": groups}.items()},
        "peft_disagreements": [
            f"{one.name}: first loss {one.first_loss}, ours {ours}"
            for one in peft
            if abs(one.first_loss - (ours := arms["full"].losses[one.name][1]))
            > TOLERANCE[setting.base_dtype] * abs(ours)
        ],
        "groups_disagreements": disagreements(arms["full"].losses, groups.losses)[:8],
    }


# ---------------------------------------------------------------------- the report


def _report_again(args: argparse.Namespace) -> int:
    report = read_again(args.report)
    for one in report["seeds"]:
        print("\n".join([*seed_lines(one), *verdict_lines(one), *ranking_lines(one)]))
    print("\n".join(end_lines(report)))
    _to_json(args, report)
    return 0 if all(report["gates"].values()) else 1


def _to_json(args: argparse.Namespace, report: dict[str, Any]) -> None:
    if args.json is not None:
        text = json.dumps(strict_json(report), indent=1, allow_nan=False)
        args.json.write_text(text + "\n", encoding="utf-8")


def _write(
    args: argparse.Namespace,
    grid: Grid,
    setting: Setting,
    seeds: Sequence[dict[str, Any]],
    split: dict[str, Any] | None,
) -> dict[str, Any]:
    report = _report(args, grid, setting, seeds, split)
    _to_json(args, report)
    return report


def _report(
    args: argparse.Namespace,
    grid: Grid,
    setting: Setting,
    seeds: Sequence[dict[str, Any]],
    split: dict[str, Any] | None,
) -> dict[str, Any]:
    gates = gates_of(seeds, split) if args.verify else {}
    return {
        "work": {
            "model": args.model,
            "base_dtype": args.base_dtype,
            "grid": args.grid,
            **{key: getattr(grid, key) for key in grid.__dataclass_fields__},
            "configurations": grid.configurations,
            "early_exit": {key: getattr(SweepExit(), key) for key in SweepExit.__struct_fields__},
            "cadence": f"{grid.evaluations} evaluations of each configuration, evenly over its steps",
            "control": args.control,
        },
        "machine": _machine(setting.device),
        "versions": {
            "python": platform.python_version(),
            "numerics": str(NUMERICS),
            **{package: version(package) for package in ("torch", "transformers", "peft")},
        },
        "seeds": list(seeds),
        "clock": split,
        "ratios": ratios_of(split, gates),
        "gates": gates,
    }


def _machine(device: str) -> str:
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return (
        f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    )


# ---------------------------------------------------------------------- input


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verify", action="store_true", help="train the full search too, and compare")
    parser.add_argument("--control", action="store_true", help="keep the worst of the warm-up")
    parser.add_argument("--grid", choices=GRIDS, default="small")
    parser.add_argument("--model", default="demo", help="demo, tiny, or a checkpoint directory")
    parser.add_argument("--base-dtype", choices=sorted(TOLERANCE), default="fp32")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--vram", help="GiB to reserve on the GPU; default: what the estimate says")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rows", type=int, default=0, help="training rows, instead of the grid's")
    parser.add_argument("--epochs", type=int, default=0, help="instead of the grid's")
    parser.add_argument("--peft-steps", type=int, default=4)
    parser.add_argument("--no-split", action="store_true", help="leave PEFT, alone and groups out")
    parser.add_argument("--json", type=Path, help="where the report goes, too")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="judge what was written")
    return parser.parse_args()


def _setting(args: argparse.Namespace, grid: Grid, folder: Path) -> Setting:
    if args.model == "tiny":
        model = make_tiny_checkpoint(folder / "base")
        _toy_data(folder, 48)
        data = "toy"
    else:
        model = find_demo_model() if args.model == "demo" else Path(args.model)
        sys.path.insert(0, str(DEMO))
        import prepare

        prepare.prepare(folder)
        _dialogues(folder, prepare)
        data = grid.data
    train, val = folder / "train.jsonl", folder / "val.jsonl"
    for source, target, rows in (
        (folder / f"{data}.jsonl", train, grid.rows),
        (folder / f"{data}.val.jsonl", val, grid.val_rows),
    ):
        lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
        target.write_text("".join(lines[: rows or None]), encoding="utf-8")
    return Setting(grid, Path(model), train, val, folder, args.base_dtype, args.device, args.vram)


def _dialogues(folder: Path, prepare: ModuleType) -> None:
    """`dialogues`: as the demo's `chitchat`, with turns of 4 to 200 characters: 2,400 rows instead of 400."""
    talk = list(prepare.clean(prepare.chitchat(4, 200)))
    train, val, _ = prepare.split(talk, prepare.HELD_OUT["chitchat"], 96)
    prepare.write_jsonl(folder / "dialogues.jsonl", train)
    prepare.write_jsonl(folder / "dialogues.val.jsonl", val)


def _toy_data(folder: Path, rows: int) -> None:
    """Sums of a seeded draw, as prompt and completion."""
    draw = random.Random(0)
    for name in ("toy", "toy.val"):
        pairs = [(draw.randint(0, 9), draw.randint(0, 9)) for _ in range(rows)]
        lines = [json.dumps({"prompt": f"{a} and {b}?", "completion": f"{a + b}"}) for a, b in pairs]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
