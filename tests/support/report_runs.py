"""Directories of runs as a trainer and a sweep leave them, for the tests of `gshare report`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.jobs.sweep_records import Configuration, Decision, DecisionLog, SweepRecord, write_sweep
from gshare.agent.service.output_dir import RunRecord
from gshare.agent.service.registry import write_json

#: A name that is none of ours, as a foreign or damaged file may hold it, and texts that want to be markup.
HOSTILE = '"><script>window.pwned=1</script><img src=x onerror=window.pwned=1>\x1b[31m\u202eevil'
CREATED = 1_800_000_000.0


def write_run(
    directory: Path,
    *,
    losses: Sequence[float | None],
    evaluations: dict[int, float | None],
    total_steps: int = 100,
    name: str | None = None,
    done: bool = False,
    seconds: float = 0.5,
    sharing: int = 2,
    steps_per_epoch: int = 1000,
    train_hash: str = "1" * 64,
    **spec: Any,
) -> Path:
    """A run's output_dir: run.json, metrics.jsonl (a loss a step, None: no number), adapter when `done`."""
    directory.mkdir(parents=True)
    values: dict[str, Any] = {"data": "/data/a.jsonl", "output_dir": str(directory), "seed": 0, **spec}
    values.setdefault("lora_alpha", 2.0 * values.get("r", 16))
    record = RunRecord(
        model="/models/m",
        base_dtype="fp32",
        spec=AdapterSpec(name=name or directory.name, **values),
        train_hash=train_hash,
    )
    write_json(directory / "run.json", record)
    lines = []
    for step, loss in enumerate(losses, start=1):
        lines.append(
            {
                **{"type": "step", "step": step, "total_steps": total_steps, "loss": loss},
                **{"epoch": step / steps_per_epoch, "tokens": 10, "seconds": seconds},
                "adapters_in_pass": sharing,
            }
        )
        if step in evaluations:
            lines.append({"type": "eval", "step": step, "val_loss": evaluations[step], "best": True})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text)
    if done:
        (directory / "adapter_model.safetensors").write_bytes(b"")
    return directory


def falling(steps: int, rate: float, start: float = 3.0) -> list[float | None]:
    return [start / (1 + rate * step) for step in range(steps)]


def configuration(directory: Path, *, batch: int = 2, **hyper: Any) -> Configuration:
    return Configuration(
        name=directory.name,
        hyper_parameters={**hyper, "per_device_train_batch_size": batch},
        total_steps=100,
        samples_total=100 * batch,
        output_dir=str(directory),
    )


def write_a_sweep(root: Path, *, hostile: bool = False) -> Path:
    """Five configurations, 1,000 samples in full: a won; b diverged, c was overfitting, d behind at the end
    of its warm-up; e had no number from its first loss on. 592 samples were saved in all."""
    root.mkdir(parents=True)
    reason = HOSTILE if hostile else "because"
    a = write_run(
        root / "a", losses=falling(100, 0.1), evaluations={50: 1.5, 100: 1.0}, done=True, **_batch()
    )
    b = write_run(root / "b", losses=falling(40, -0.01), evaluations={20: 2.5, 40: 3.5}, **_batch(1e-2))
    c = write_run(root / "c", losses=falling(60, 0.2), evaluations={20: 1.2, 60: 1.9}, **_batch(5e-4))
    d = write_run(root / "d", losses=falling(5, 0.0), evaluations={5: 2.9}, **_batch(1e-5, batch=1))
    e = write_run(root / "e", losses=[None], evaluations={}, **_batch(1.0, batch=3))
    runs = {
        path: configuration(path, batch=batch) for path, batch in ((a, 2), (b, 2), (c, 2), (d, 1), (e, 3))
    }
    record = SweepRecord(
        name=HOSTILE if hostile else "five",
        model="/models/m",
        base_dtype="fp32",
        early_exit={},
        created=CREATED,
        configurations=list(runs.values()),
    )
    write_sweep(root, record)
    evidence = {HOSTILE if hostile else "slopes": [0.25, 1.0]}
    with DecisionLog(root) as log:
        for path in runs:
            log.append(Decision(time=CREATED, job=path.name, event="started"))
        ends: list[tuple[str, Any, int, int, Any]] = [
            ("e", "diverged", 1, 3, ""),
            ("d", "stopped", 5, 5, "underperformance"),
            ("b", "stopped", 40, 80, "divergence"),
            ("c", "stopped", 60, 120, "overfitting"),
            ("a", "completed", 100, 200, ""),
        ]
        log.append(Decision(time=CREATED + 1, job="a", event="selected"))
        for number, (job, event, step, samples, pattern) in enumerate(ends, start=2):
            log.append(
                Decision(
                    time=CREATED + 60 * number,
                    job=job,
                    event=event,
                    step=step,
                    samples=samples,
                    pattern=pattern,
                    reason=reason if event == "stopped" else "",
                    evidence=evidence if pattern else {},
                )
            )
    return root


def _batch(rate: float = 2e-4, batch: int = 2) -> dict[str, Any]:
    return {"learning_rate": rate, "per_device_train_batch_size": batch}


def rename(directory: Path, name: str) -> None:
    """Give a run's record another name, whatever it holds."""
    record = msgspec.json.decode((directory / "run.json").read_bytes(), type=RunRecord)
    spec = msgspec.structs.replace(record.spec, name=name)
    write_json(directory / "run.json", msgspec.structs.replace(record, spec=spec))
