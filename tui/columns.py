"""The leaderboard's columns: what each shows, sorts by and is filtered by. Pure.

Hyper-parameters are columns too: those in which the jobs shown differ, by their names in the job spec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gshare.tui.bars import MARKERS, sparkline
from gshare.tui.board import Board
from gshare.tui.ranking import number_key, rank_key
from gshare.tui.rows import Job
from gshare.tui.show import UNKNOWN, Spans, cell, clean, count, duration, hyper, loss
from gshare.tui.widgets.grid import Column

SPARK = 10
Value = str | float | None

#: State → (mark, role). The mark tells it without colour.
STATES: dict[str, tuple[str, str]] = {
    "waiting": ("◌", "wait"),
    "queued": ("◌", "wait"),
    "starting": ("◔", "wait"),
    "running": ("●", "run"),
    "paused": ("‖", "wait"),
    "publishing": ("◕", "run"),
    "placing": ("◕", "run"),
    "completed": ("✔", "ok"),
    "stopped": ("■", "dim"),
    "diverged": ("✖", "bad"),
    "failed": ("✖", "bad"),
}

#: Short names of hyper-parameters, for titles and filters.
SHORT = {
    "learning_rate": "lr",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "per_device_train_batch_size": "batch",
    "gradient_accumulation_steps": "accum",
    "num_train_epochs": "epochs",
    "lr_scheduler_type": "schedule",
    "max_length": "length",
    "weight_decay": "decay",
    "target_modules": "modules",
}
_LONG = {short: name for name, short in SHORT.items()}
#: At most so many hyper-parameters get a column; the picker and filters know all.
HYPER_COLUMNS = 4


@dataclass(frozen=True)
class Field:
    """One thing about a job: `value` to sort and filter by, `spans` to show."""

    name: str
    title: str
    value: Callable[[Job], Value]
    column: Column | None = None  # None: not shown in the table, only sorted and filtered by
    aliases: tuple[str, ...] = ()


def state_spans(state: str, extra: str = "") -> Spans:
    mark, role = STATES.get(state, ("·", ""))
    return ((f"{mark} {clean(state) or UNKNOWN}{extra}", role),)


def _field(
    name: str, title: str, value: Callable[[Job], Value], width: int, *aliases: str, **options: object
) -> Field:
    return Field(name, title, value, Column(name, title, width, **options), aliases)  # type: ignore[arg-type]


FIELDS: tuple[Field, ...] = (
    _field("adapter", "adapter", lambda job: job.name, 11, "name", "job", flex=3, most=36),
    _field("node", "node", lambda job: job.node, 8, flex=1, most=16, rank=4),
    _field("state", "state", lambda job: job.state, 11, flex=1, most=16),
    _field("val", "val loss", lambda job: job.best_val_loss, 9, "best", "val_loss", right=True),
    _field("best_step", "best@", lambda job: job.best_step, 6, "at", right=True, rank=3),
    Field("last_val", "last val", lambda job: job.val_loss),
    _field("train", "train", lambda job: job.loss, 7, "loss", right=True, rank=1),
    Field("gap", "gap", lambda job: job.gap),
    _field("step", "step", lambda job: job.step, 11, right=True, rank=6),
    _field("tok", "tok/s", lambda job: job.tokens_per_s, 6, "speed", "tok/s", right=True, rank=2),
    _field("eta", "ETA", lambda job: job.eta_s, 7, right=True, rank=1),
    Field("client", "client", lambda job: job.client),
    Field("gpu", "gpu", lambda job: job.gpu),
    Field("attempt", "attempt", lambda job: float(job.attempt)),
    Field("grad_norm", "grad norm", lambda job: job.grad_norm),
    Field("dir", "directory", lambda job: job.output_dir),
    Field("model", "base", lambda job: job.model),
)
_CURVE = Column("curve", "curve", SPARK, rank=5)
_WHY = Column("why", "why", 12, flex=8, most=120, rank=7)
_MARK = Column("mark", " #", 4, right=True)
_BY_NAME = {name: field for field in FIELDS for name in (field.name, *field.aliases)}


def hyper_field(name: str) -> Field:
    """Of a hyper-parameter by its long or short name."""
    long = _LONG.get(name, name)
    title = SHORT.get(long, long)

    def value(job: Job) -> Value:
        found = job.hyper.get(long)
        return float(found) if isinstance(found, int | float) else found

    column = Column(f"hyper.{long}", title, max(7, min(12, len(title))), right=True, rank=8)
    return Field(long, title, value, column, (title,))


def find_field(name: str, jobs: Iterable[Job]) -> Field | None:
    """By name, alias or hyper-parameter; None: there is none such."""
    name = name.lower()
    if name in _BY_NAME:
        return _BY_NAME[name]
    long = _LONG.get(name, name)
    return hyper_field(long) if any(long in job.hyper for job in jobs) else None


def differing(jobs: Iterable[Job]) -> list[str]:
    """Hyper-parameters in which the jobs differ, the learning rate and the rank first."""
    first: dict[str, object] = {}
    found: dict[str, None] = {}
    for job in jobs:
        for name, value in job.hyper.items():
            if first.setdefault(name, value) != value:
                found[name] = None
    order = ["learning_rate", "r", *found]
    return sorted(found, key=order.index)


def fields_of(jobs: Iterable[Job]) -> list[Field]:
    """Everything that can be sorted by; parameters in which no two differ come last."""
    jobs = list(jobs)
    names = dict.fromkeys([*differing(jobs), *(name for job in jobs for name in job.hyper)])
    return [*FIELDS, *(hyper_field(name) for name in names)]


def table_columns(hypers: list[str]) -> list[Column]:
    """The table's, `hypers` those parameters that differ."""
    shown = [field.column for field in FIELDS if field.column is not None]
    more = [column for name in hypers[:HYPER_COLUMNS] if (column := hyper_field(name).column) is not None]
    return [_MARK, *shown, *more, _CURVE, _WHY]


def ordered(jobs: Iterable[Job], field: Field, descending: bool) -> list[Job]:
    """Missing values and NaN last, whichever way; ties as the leaderboard ranks."""
    ranked = sorted(jobs, key=rank_key)
    if field.name == "val" and not descending:
        return ranked
    known = [job for job in ranked if _known(field.value(job))]
    rest = [job for job in ranked if not _known(field.value(job))]
    known.sort(key=lambda job: _key(field.value(job)), reverse=descending)
    return known + rest


def _known(value: Value) -> bool:
    return bool(value) if isinstance(value, str) else not number_key(value)[0]


def _key(value: Value) -> tuple[int, float, str]:
    """Numbers before texts, should a parameter have both."""
    if isinstance(value, str):
        return 1, 0.0, value.casefold()
    return 0, float(value or 0.0), ""


def job_cells(job: Job, board: Board, rank: int | None) -> dict[str, Spans]:
    """All cells of a row. `rank`: its place by validation loss; None: it has none."""
    mark = board.marked.index(job.job) if job.job in board.marked else None
    place = str(rank) if rank is not None else "–"
    marked: Spans = (
        ((MARKERS[mark], f"s{mark}"), (f"{place:>3}", "")) if mark is not None else cell(place, "dim")
    )
    position = f" {job.position}" if job.position else ""
    steps = UNKNOWN if job.step is None else count(job.step)
    total = f"/{count(job.total_steps)}" if job.total_steps else ""
    bad = job.state in ("diverged", "failed")
    found: dict[str, Spans] = {
        "mark": marked,
        "adapter": cell(clean(job.name), "best" if mark is not None else ""),
        "node": cell(clean(job.node) or UNKNOWN, "dim"),
        "state": state_spans(job.state, position),
        "val": cell(loss(job.best_val_loss), _loss_role(job.best_val_loss, "best" if rank == 1 else "")),
        "best_step": cell(count(job.best_step), "dim"),
        "train": cell(loss(job.loss), _loss_role(job.loss, "")),
        "step": cell(steps + total, "dim"),
        "tok": cell(count(job.tokens_per_s)),
        "eta": cell(duration(job.eta_s)),
        "curve": cell(spark_of(job), "bar.reserved"),
        "why": cell(clean(job.reason), "bad" if bad else "dim"),
    }
    for name, value in job.hyper.items():
        found[f"hyper.{name}"] = cell(hyper(value), "dim")
    return found


def _loss_role(value: float | None, role: str) -> str:
    if value is None:
        return "dim"
    return role if math.isfinite(value) else "bad"


def spark_of(job: Job) -> str:
    """The validation curve, with fewer than three points of it the training curve."""
    values = job.val.tail(SPARK)
    return sparkline(values if len(values) >= 3 else job.train.tail(SPARK), SPARK)
