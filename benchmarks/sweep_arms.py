"""The arms of `benchmarks/sweep.py`: the same configurations through a trainer, each arm by another machine.

    sweep        `Sweep` as `gshare sweep` runs it: early exit, warm-up, the best quarter to the end
    full         every configuration to its end, admitted as room comes free
    groups       the same in groups that fit, each after the one before has ended
    alone        one configuration of each batch size, one after another
    boundaries   the first steps again, evaluated at those ends of warm-ups where `full` is not; not timed

An arm's seconds are those of a user: from the start of its trainer to the end of the last job, with loading,
evaluations and saves. Data is tokenised before.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.jobs.early_exit import SweepExit
from gshare.agent.jobs.events import ENDED, Evaluated, Event, JobChanged, Stepped
from gshare.agent.jobs.packing import Candidate, Packing
from gshare.agent.jobs.sweep import Action, Paused, Sweep, Trial
from gshare.agent.jobs.sweep import Event as SweepEvent
from gshare.agent.jobs.sweep_records import DecisionLog, write_sweep
from gshare.agent.jobs.sweep_spec import SweepFile
from gshare.agent.service.deciding import Job
from gshare.agent.service.stopping import StopRequest
from gshare.agent.service.sweeping import SweepRun
from gshare.cli.finetune import trainer_config
from gshare.cli.finetune_flags import GpuFlags
from gshare.cli.gpu_plan import plan_gpu, request_gpu
from gshare.cli.streams import stderr_console
from gshare.cli.sweep_memory import memory_of
from gshare.cli.sweep_prepared import Prepared


@dataclass(frozen=True)
class Grid:
    """What is tried, and on how much data. `rows` 0: all; `at_once` 0: as many as memory holds."""

    learning_rates: tuple[float, ...]
    ranks: tuple[int, ...]
    batches: tuple[int, ...]
    data: str
    rows: int
    val_rows: int
    epochs: int
    evaluations: int  # of each configuration, evenly over its steps
    at_once: int

    @property
    def configurations(self) -> int:
        return len(self.learning_rates) * len(self.ranks) * len(self.batches)


@dataclass(frozen=True)
class Setting:
    """A grid, its model and its files: `train` and `val`, JSONL."""

    grid: Grid
    model: Path
    train: Path
    val: Path
    folder: Path
    base_dtype: str
    device: str
    vram: str | None


@dataclass
class Arm:
    """What one arm did."""

    seconds: float = 0.0
    load: float = 0.0  # of the machine when it began, a minute's average
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    vals: dict[str, dict[int, float]] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    spans: dict[str, float] = field(default_factory=dict)  # seconds from a job's start to its end
    most_at_once: int = 0

    def best(self) -> dict[str, float | None]:
        """The lowest validation loss of each configuration; None where none was a number."""
        return {
            name: min(filter(math.isfinite, vals.values()), default=None) for name, vals in self.vals.items()
        }


# ---------------------------------------------------------------------- machines


class WorstFirst(Sweep):
    """The negative control: goes on with those that the warm-up ranks last."""

    def handle(self, event: SweepEvent) -> list[Action]:
        if isinstance(event, Paused):
            event = replace(event, val_loss=-event.val_loss)
        return super().handle(event)


class Groups(Packing):
    """As many as fit, and the next ones when all of them have ended."""

    def admit(self, waiting: Sequence[Candidate], running: Sequence[Candidate]) -> list[str]:
        return [] if running else super().admit(waiting, running)


# ---------------------------------------------------------------------- running


class Search:
    """The grid under one seed, tokenised: `run_…` are the arms."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting = setting
        self._folder = setting.folder / f"seed-{seed}"
        self.seed = seed
        self.made = self._prepare("sweep", SweepExit())
        #: {configuration: steps in full}
        self.totals = {name: job.work.total_steps for name, job in self.made.jobs.items()}
        self.batches = {
            name: job.request.spec.per_device_train_batch_size for name, job in self.made.jobs.items()
        }

    @property
    def directory(self) -> Path:
        """Of the arm `sweep`."""
        return self.made.source.directory

    def clear(self) -> None:
        """Remove the adapters and checkpoints of the arm `sweep`, as those of the others are when they have
        ended: of the paper's grid they are 14 GB an arm."""
        shutil.rmtree(self.directory)

    def run_sweep(self, *, control: bool = False) -> Arm:
        made, machine = self.made, WorstFirst if control else Sweep
        return self._run(made, lambda packing: machine(made.trials(), made.spec.early_exit, packing))

    def run_full(self, *, groups: bool = False) -> Arm:
        made = self._prepare("groups" if groups else "full", NO_EXITS)
        return self._run(
            made,
            lambda packing: Sweep(
                _whole(made), NO_EXITS, Groups(packing.fits, most=packing.most) if groups else packing
            ),
        )

    def run_alone(self) -> Arm:
        """The middle one of each batch size, in full."""
        made = self._prepare("alone", NO_EXITS)
        names = self.sample()
        trials = [trial for trial in _whole(made) if trial.name in names]
        return self._run(made, lambda packing: Sweep(trials, NO_EXITS, replace(packing, most=1)), names)

    def run_boundaries(self, steps: Mapping[str, Sequence[int]]) -> Arm:
        """Those of `steps` to the last of theirs, evaluated at all of them. The rate is constant, so a run
        that ends there has the bits of one that goes on."""
        made = self._prepare("boundaries", NO_EXITS)
        for name, some in steps.items():
            spec = msgspec.structs.replace(
                made.jobs[name].request.spec, max_steps=max(some), eval_steps=math.gcd(*some)
            )
            request = msgspec.structs.replace(made.jobs[name].request, spec=spec)
            made.jobs[name] = replace(made.jobs[name], request=request)
        trials = [trial for trial in _whole(made) if trial.name in steps]
        return self._run(made, lambda packing: Sweep(trials, NO_EXITS, packing), list(steps))

    def sample(self) -> list[str]:
        """The middle configuration of each batch size, in the grid's order."""
        of_size = {size: [n for n, b in self.batches.items() if b == size] for size in self.batches.values()}
        return [names[len(names) // 2] for names in of_size.values()]

    def _prepare(self, arm: str, exits: SweepExit) -> Prepared:
        directory = self._folder / arm
        directory.mkdir(parents=True)
        grid, setting = self.setting.grid, self.setting
        tables: dict[str, dict[str, Any]] = {
            "": {"model": str(setting.model), "base_dtype": setting.base_dtype, "seed": self.seed},
            "defaults": {
                "data": str(setting.train),
                "val_data": str(setting.val),
                "lr_scheduler_type": "constant",
                "weight_decay": 0.01,
                "num_train_epochs": grid.epochs,
                "max_length": 256,
                "save_steps": 0,
            },
            "sweep": {"name": "s", "output_dir": "out", "max_concurrent": grid.at_once},
            "sweep.grid": {
                "learning_rate": list(grid.learning_rates),
                "r": list(grid.ranks),
                "per_device_train_batch_size": list(grid.batches),
            },
            "early_exit": {
                key: value
                for key, value in msgspec.to_builtins(exits).items()
                if value != getattr(SweepExit(), key)
            },
        }
        path = directory / "sweep.toml"
        path.write_text("".join(map(_toml, tables, tables.values())), encoding="utf-8")
        made = Prepared(SweepFile(path, {}), [], stderr_console(), resume=False)
        for name, job in made.jobs.items():
            every = max(1, round(job.work.total_steps / grid.evaluations))
            spec = msgspec.structs.replace(job.request.spec, eval_steps=every)
            made.jobs[name] = Job(msgspec.structs.replace(job.request, spec=spec), job.work)
        return made

    def _run(self, made: Prepared, machine: Callable[[Packing], Sweep], names: Sequence[str] = ()) -> Arm:
        """SystemExit when it is interrupted, or a configuration fails."""
        setting = self.setting
        reserved = plan_gpu(GpuFlags(vram=setting.vram), setting.device)
        memory = memory_of(made.spec.run, made.model_dir, made.specs(), reserved, setting.vram)
        gpu = request_gpu(reserved, memory.estimate, "benchmark sweep") if reserved is not None else None
        made.source.directory.mkdir(exist_ok=True)
        write_sweep(made.source.directory, made.record())
        arm = Arm(load=os.getloadavg()[0])
        reasons: dict[str, str] = {}
        started: dict[str, float] = {}
        running: set[str] = set()

        def listen(event: Event) -> None:
            if isinstance(event, Stepped):
                arm.losses.setdefault(event.job, {})[event.step] = event.loss
            elif isinstance(event, Evaluated):
                arm.vals.setdefault(event.job, {})[event.step] = event.val_loss
            elif isinstance(event, JobChanged):
                arm.states[event.job] = event.state
                reasons[event.job] = event.reason
                (running.add if event.state == "running" else running.discard)(event.job)
                arm.most_at_once = max(arm.most_at_once, len(running))
                if event.state == "running":
                    started.setdefault(event.job, time.perf_counter())
                elif event.state in ENDED and event.job in started:
                    arm.spans[event.job] = time.perf_counter() - started[event.job]

        begun = time.perf_counter()
        with StopRequest().listening() as stop, DecisionLog(made.source.directory) as log:
            sweep = machine(Packing(memory.fits, most=made.spec.max_concurrent))
            requests = [one for one in made.all_requests() if not names or one.spec.name in names]
            code = SweepRun(
                sweep=sweep,
                jobs=made.jobs,
                names=requests,
                config=trainer_config(
                    made.spec.run, made.model_dir, base=made.base, device=setting.device, gpu=gpu
                ),
                log=log,
                on_event=listen,
                stop=stop,
                join=False,
            ).run()
        arm.seconds = time.perf_counter() - begun
        where = made.source.directory.parent
        print(f"  {where.parent.name} {where.name}: {arm.seconds:.1f} s", file=sys.stderr, flush=True)
        failed = [name for name, state in arm.states.items() if state == "failed"]
        if failed or not sweep.done:
            why = "\n".join(f"  {name}: {reasons[name]}" for name in failed[:4])
            raise SystemExit(f"{where}: {len(failed)} failed, exit code {code}\n{why}")
        if made is not self.made:
            shutil.rmtree(made.source.directory)
        return arm


NO_EXITS = SweepExit(divergence=False, overfitting=False, underperformance=False)


def _whole(made: Prepared) -> list[Trial]:
    """Without a warm-up."""
    return [replace(trial, boundary=0) for trial in made.trials()]


def _toml(header: str, table: Mapping[str, Any]) -> str:
    """A table of strings, numbers, booleans and lists of numbers: all are written as in JSON."""
    lines = [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in table.items()]
    return "\n".join([f"[{header}]" if header else "", *lines, ""])
