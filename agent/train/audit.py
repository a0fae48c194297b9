"""The audit: train the same jobs packed and one by one, and compare them byte for byte.

What is compared, per job: every step's loss and gradient norm, every validation loss, the adapter and the
optimizer state after the last step. The packed run must really have been packed: an audit whose passes
never held two adapters proves nothing and fails.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from gshare.agent.base.load import load_base
from gshare.agent.base.weights import Base
from gshare.agent.errors import GshareError
from gshare.agent.jobs.events import Evaluated, Event, JobChanged, Stepped
from gshare.agent.jobs.spec import JobRequest, RunSpec
from gshare.agent.train.checkpoint import latest_checkpoint, load_checkpoint
from gshare.agent.train.gpu_guard import NoGuard
from gshare.agent.train.out_of_memory import told
from gshare.agent.train.runner import Runner
from gshare.kernels.backend import Backend


@dataclass
class Trace:
    """Everything of one job that the promise covers."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    val_losses: list[tuple[int, float]] = field(default_factory=list)
    adapters_in_pass: list[int] = field(default_factory=list)
    state: str = ""
    reason: str = ""
    adapter_sha256: str = ""
    optimizer_sha256: str = ""

    def differences(self, other: Trace) -> list[str]:
        """What differs, most telling first; floats are compared by their bits."""
        found = []
        for what, mine, theirs in (
            ("loss", self.losses, other.losses),
            ("grad norm", self.grad_norms, other.grad_norms),
        ):
            if len(mine) != len(theirs):
                found.append(f"{len(mine)} steps against {len(theirs)}")
            first = next(
                (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if _bits(a) != _bits(b)), None
            )
            if first is not None:
                found.append(f"{what} of step {first + 1}: {mine[first]!r} ≠ {theirs[first]!r}")
        if [(s, _bits(v)) for s, v in self.val_losses] != [(s, _bits(v)) for s, v in other.val_losses]:
            found.append(f"validation losses {self.val_losses} ≠ {other.val_losses}")
        if self.state != other.state:
            found.append(f"ended {self.state} against {other.state}")
        if self.adapter_sha256 != other.adapter_sha256:
            found.append("adapter bytes differ")
        if self.optimizer_sha256 != other.optimizer_sha256:
            found.append("optimizer bytes differ")
        return found


@dataclass
class AuditReport:
    """Per job: packed and solo traces, and what differs between them."""

    packed: dict[str, Trace]
    solo: dict[str, Trace]
    differences: dict[str, list[str]]
    most_adapters: int
    fingerprint: dict[str, str]
    gemm_plans: dict[str, str]

    @property
    def identical(self) -> bool:
        return not any(self.differences.values())

    @property
    def packed_for_real(self) -> bool:
        return self.most_adapters > 1

    @property
    def passed(self) -> bool:
        return self.identical and self.packed_for_real

    def to_json(self) -> dict[str, Any]:
        """Everything, with the per-step losses and hashes kept as evidence."""
        return {
            "passed": self.passed,
            "identical": self.identical,
            "adapters_per_pass": self.most_adapters,
            "differences": self.differences,
            "fingerprint": self.fingerprint,
            "gemm_plans": self.gemm_plans,
            "packed": {name: vars(trace) for name, trace in self.packed.items()},
            "solo": {name: vars(trace) for name, trace in self.solo.items()},
        }


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)


class _Recorder:
    """Collects traces from a runner's events."""

    def __init__(self) -> None:
        self.traces: dict[str, Trace] = {}

    def __call__(self, event: Event) -> None:
        if not isinstance(event, (Stepped, Evaluated, JobChanged)):
            return
        trace = self.traces.setdefault(event.job, Trace())
        if isinstance(event, Stepped):
            trace.losses.append(event.loss)
            trace.grad_norms.append(event.grad_norm)
            trace.adapters_in_pass.append(event.adapters_in_pass)
        elif isinstance(event, Evaluated):
            trace.val_losses.append((event.step, event.val_loss))
        else:
            trace.state, trace.reason = event.state, event.reason


def run_jobs(
    run: RunSpec,
    requests: Sequence[JobRequest],
    *,
    model_dir: Path,
    base: Base,
    backend: Backend,
    directory: Path,
    max_steps: int | None = None,
    joins: Mapping[str, int] | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    guard: NoGuard | None = None,
) -> tuple[dict[str, Trace], Runner]:
    """Train `requests` together in `directory`; `joins` admits a job only after so many rounds."""
    recorder = _Recorder()

    def listen(event: Event) -> None:
        recorder(event)
        on_event(event)

    runner = Runner(
        model_dir=model_dir,
        base_dtype=run.base_dtype,
        schedule=run.schedule,
        max_tokens_per_pass=run.max_tokens_per_pass,
        max_adapters_per_pass=run.max_adapters_per_pass,
        device=str(base.device),
        on_event=listen,
        on_pass=lambda in_flight: None,
        backend=backend,
        base=base,
        guard=guard,
    )
    waiting = {r.spec.name: _moved(r, directory, max_steps) for r in requests}
    joins = joins or {}
    rounds = 0
    while True:
        for name in [n for n in waiting if joins.get(n, 0) <= rounds]:
            runner.admit(waiting.pop(name))
        ran = runner.run_round()
        rounds += 1
        if not ran:
            if not waiting:
                break
            rounds = min(joins[name] for name in waiting)
    runner.close()
    for name, trace in recorder.traces.items():
        if trace.state in ("failed", ""):
            raise GshareError(f"audit: job {name} did not train: {trace.reason}")
        _hash_files(trace, directory / name)
    return recorder.traces, runner


def audit(
    run: RunSpec,
    requests: Sequence[JobRequest],
    *,
    model_dir: Path,
    device: torch.device,
    backend_factory: Callable[[], Backend],
    directory: Path,
    max_steps: int | None = None,
    joins: Mapping[str, int] | None = None,
    on_progress: Callable[[str, Event], None] = lambda arm, event: None,
    guard: NoGuard | None = None,
) -> AuditReport:
    """All jobs packed (joining as `joins` says), then each alone, over one base, loaded under `guard`."""
    guard = guard or NoGuard()
    with told("the base", guard):
        base = load_base(model_dir, base_dtype=run.base_dtype, device=device)

    def arm(
        label: str, chosen: Sequence[JobRequest], joins: Mapping[str, int]
    ) -> tuple[dict[str, Trace], Runner]:
        return run_jobs(
            run,
            chosen,
            model_dir=model_dir,
            base=base,
            backend=backend_factory(),
            directory=directory / label,
            max_steps=max_steps,
            joins=joins,
            on_event=lambda event: on_progress(label, event),
            guard=guard,
        )

    packed, runner = arm("packed", requests, joins or {})
    most_adapters, fingerprint = runner.engine.most_adapters, runner.fingerprint
    plans = getattr(getattr(runner.engine.backend, "gemm", None), "plans", dict)()
    del runner  # its arena: the solo runs must fit where the packed one did
    solo: dict[str, Trace] = {}
    for request in requests:
        solo.update(arm("solo", [request], {})[0])
    return AuditReport(
        packed=packed,
        solo=solo,
        differences={name: packed[name].differences(solo[name]) for name in solo},
        most_adapters=most_adapters,
        fingerprint=fingerprint,
        gemm_plans=plans,
    )


def _moved(request: JobRequest, directory: Path, max_steps: int | None) -> JobRequest:
    """The same job, writing below `directory` and optionally cut short."""
    spec = msgspec.structs.replace(request.spec, output_dir=str(directory / request.spec.name))
    if max_steps is not None:
        spec = msgspec.structs.replace(spec, max_steps=max_steps)
    return msgspec.structs.replace(request, spec=spec, resume=False)


def _hash_files(trace: Trace, output_dir: Path) -> None:
    """Hashes of the newest checkpoint's tensors: names and bytes, not file metadata."""
    path = latest_checkpoint(output_dir)
    if path is None:
        return
    snapshot = load_checkpoint(path)
    for attribute, tensors in (
        ("adapter_sha256", snapshot.adapter),
        ("optimizer_sha256", snapshot.optimizer),
    ):
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(name.encode())
            digest.update(tensors[name].contiguous().numpy().tobytes())
        setattr(trace, attribute, digest.hexdigest())
