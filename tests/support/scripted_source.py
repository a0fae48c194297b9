"""A source that says what it is told: a small cluster with everything that a screen must cope with."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable

from gshare.agent.errors import GshareError
from gshare.agent.node.protocol import GpuInfo, NodeInfo, ReservationInfo
from gshare.tui import frames as f
from gshare.tui.source import ActionName, Emit, FileRow, SourceBase

#: 2026-03-01 12:00:00 UTC.
NOW = 1772366400.0
AT = {"time": NOW, "received": NOW}
ALL = frozenset({"stop", "pause", "resume", "release", "retry", "log", "history", "files"})


class ScriptedSource(SourceBase):
    """Emits `frames`, then whatever `say` is given. Keeps what it was asked in `acted`."""

    kind = "coordinator"

    def __init__(self, frames: Iterable[f.Frame] = (), can: frozenset[str] = ALL) -> None:
        self.title = "cluster lab"
        self.can = can
        self.acted: list[tuple[str, list[str]]] = []
        self.failing: dict[str, str] = {}  # target → why an action on it fails
        self.refusing = ""  # why no action can be tried at all
        self.logs = "step 1\nWARNING: \x1b[31mslow disk\x1b[0m\nstep 2\n"
        self.asked: list[str] = []
        self.is_told = False  # the first frames
        self._first = list(frames)
        self._emit: Emit | None = None

    async def run(self, emit: Emit) -> None:
        self._emit = emit
        for frame in self._first:
            emit(frame)
        self.is_told = True
        await asyncio.Event().wait()

    def say(self, *frames: f.Frame) -> None:
        assert self._emit is not None, "run was not called"
        for frame in frames:
            self._emit(frame)

    async def act(self, action: ActionName, targets: list[str]) -> dict[str, str]:
        self.acted.append((action, targets))
        if self.refusing:
            raise GshareError(self.refusing)
        return {target: why for target, why in self.failing.items() if target in targets}

    async def read_log(self, job: str = "", node: str = "", max_bytes: int = 65536) -> str:
        self.asked.append(f"log {job or node}")
        return self.logs

    async def ask_history(self, job: str) -> None:
        self.asked.append(f"history {job}")

    async def list_files(self, job: str) -> list[FileRow]:
        return [FileRow(name="best/adapter_model.safetensors", size=9_437_184, changed=NOW - 90)]


def live(**more: object) -> f.SourceState:
    return f.SourceState(**{**AT, "state": "live", "since": NOW - 8000, **more})  # type: ignore[arg-type]


def gpu(name: str, total: int | None, **more: object) -> GpuInfo:
    return GpuInfo(uuid=f"GPU-{name}", name=name, memory_type="discrete", total_mb=total, **more)  # type: ignore[arg-type]


def node_info(name: str, gpus: list[GpuInfo], rows: list[ReservationInfo], **more: object) -> NodeInfo:
    return NodeInfo(
        reply_to=0,
        hostname=name,
        time=NOW,
        uptime_s=264_000.0,
        machine="x86_64",
        python="3.11",
        cpu_cores=16,
        cpu_percent=23.0,
        ram_mb=65_536,
        ram_free_mb=51_000,
        disk_free_mb=120_000,
        gpus=gpus,
        reservations=rows,
        **more,  # type: ignore[arg-type]
    )


def nodes() -> tuple[f.NodeView, ...]:
    desktop = gpu(
        "NVIDIA GeForce RTX 4090",
        24_576,
        used_mb=17_000,
        reserved_mb=14_336,
        peak_mb=11_000,
        outside_mb=2_048,
        free_mb=8_192,
        load_percent=97,
        temperature_c=62,
        power_w=331.0,
    )
    rows = [
        ReservationInfo(
            id="a1b2c3",
            gpu_uuid=desktop.uuid,
            budget_mb=14_336,
            peak_mb=11_000,
            task="gshare trainer",
            pid=4321,
            user="ana",
            created=NOW - 3700,
            state="held",
            clients={"support": 6_000, "legal-r64": 5_000},
            lease=False,
        ),
        ReservationInfo(
            id="d4e5f6",
            gpu_uuid=desktop.uuid,
            budget_mb=9_216,
            peak_mb=None,
            task="notebook",
            pid=4411,
            user="bo",
            created=NOW - 40,
            state="waiting",
            position=1,
            reason="needs 9.0 GiB; 8.0 GiB free by ledger, 2.0 GiB used outside it by PID 4411",
        ),
    ]
    return (
        f.NodeView(
            node="desktop",
            state="busy",
            transport="ssh",
            host="10.0.0.5",
            gshare="0.1.0",
            seen_s=1.0,
            jobs=3,
            info=node_info("desktop", [desktop], rows),
        ),
        f.NodeView(node="intel", state="ready", seen_s=2.0, jobs=0, info=node_info("intel", [], [])),
        f.NodeView(
            node="attic",
            state="lost",
            reason="SSH keepalive failed; retry in 32 s",
            seen_s=240.0,
            host="attic.lan",
        ),
    )


def jobs() -> tuple[f.JobView, ...]:
    hyper: dict[str, f.HyperValue] = {"learning_rate": 2e-4, "r": 16, "lora_alpha": 32, "optim": "adamw"}

    def job(name: str, state: str, **more: object) -> f.JobView:
        told = {"job": name, "state": state, "node": "desktop", "total_steps": 1200, "hyper": hyper, **more}
        return f.JobView(**told)  # type: ignore[arg-type]

    return (
        job("support", "running", step=612, loss=1.118, val_loss=1.204, best_val_loss=1.204, best_step=600),
        job(
            "legal-r64",
            "running",
            step=590,
            loss=1.207,
            val_loss=1.333,
            best_val_loss=1.31,
            best_step=350,
            hyper={**hyper, "r": 64},
        ),
        job("run[lr=1e-4]", "paused", step=200, loss=1.402, best_val_loss=1.377, best_step=200),
        job("[/]x\x1b[2J", "queued", node="", position=2, reason="waits for 8.0 GiB"),
        job("lr1", "diverged", step=31, loss=math.nan, val_loss=math.nan, reason="non-finite at 31"),
        job(
            "lr1e-3",
            "stopped",
            step=520,
            loss=0.9,
            best_val_loss=1.41,
            best_step=400,
            reason="overfit at 520",
        ),
        job("on-attic", "running", node="attic", step=7, loss=2.5),
        job("unknown", "running", node="intel", hyper={}, total_steps=None),
    )


def curves() -> tuple[f.Frame, ...]:
    """Of `support` and `legal-r64`."""
    found: list[f.Frame] = []
    for name, shift in (("support", 0.0), ("legal-r64", 0.15)):
        train = tuple((step, 2.0 * math.exp(-step / 150) + 1.0 + shift) for step in range(1, 600, 2))
        val = tuple((step, 2.0 * math.exp(-step / 150) + 1.1 + shift) for step in range(50, 601, 50))
        found.append(f.History(**AT, job=name, train=train, val=val))
    samples = tuple(
        f.Sample(
            job=name,
            step=step,
            total_steps=1200,
            loss=loss,
            time=NOW,
            tokens=2048.0,
            seconds=0.4,
            learning_rate=1.9e-4,
            adapters_in_pass=2,
        )
        for name, step, loss in (("support", 612, 1.118), ("legal-r64", 590, 1.207))
    )
    return (*found, f.Samples(**AT, samples=samples))


def lab() -> list[f.Frame]:
    """The whole cluster, live."""
    return [
        f.Found(**AT, kind="coordinator", title="cluster lab", can=tuple(sorted(ALL))),
        live(),
        f.Snapshot(**AT, nodes=nodes(), jobs=jobs()),
        *curves(),
        f.Message(**AT, level="warning", text="attic: SSH keepalive failed", node="attic"),
        f.JobState(**AT, job="lr1e-3", state="stopped", reason="overfit at 520 (gap 0.14 > 0.10 twice)"),
        f.Message(**AT, level="error", text="[red]not markup[/] \x1b[2J", job="support"),
    ]
