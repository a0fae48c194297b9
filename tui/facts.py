"""What is written about one adapter, or several side by side. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gshare.tui.bars import MARKERS
from gshare.tui.board import Board
from gshare.tui.columns import SHORT, state_spans
from gshare.tui.rows import Job, Node
from gshare.tui.show import UNKNOWN, Span, age, clean, count, duration, gib, hyper, loss, number, size
from gshare.tui.source import FileRow

Lines = list[list[Span]]
LABEL = 10  # columns of a label at least
MOST_LABEL = 24
CELL = 12  # of a value beside others


def job_facts(job: Job, board: Board, files: Sequence[FileRow] | None, files_problem: str) -> Lines:
    """`files` None: not known (yet)."""
    rows: list[tuple[str, str]] = [
        ("node", clean(job.node) or UNKNOWN),
        ("base", " ".join(clean(part) for part in (job.model, job.base_dtype) if part) or UNKNOWN),
        ("step", f"{count(job.step)} of {count(job.total_steps)}"),
        ("val best", f"{loss(job.best_val_loss)} at {count(job.best_step)}"),
        ("val last", loss(job.val_loss)),
        ("train", loss(job.loss)),
        ("gap", loss(job.gap)),
        ("tokens/s", count(job.tokens_per_s)),
        ("ETA", duration(job.eta_s)),
        ("grad norm", loss(job.grad_norm)),
        ("lr now", UNKNOWN if job.learning_rate is None else f"{job.learning_rate:.3g}"),
        ("in a pass", f"{number(job.adapters_in_pass)} adapters"),
        ("saved at", count(job.checkpoint_step)),
        ("directory", clean(job.output_dir) or UNKNOWN),
    ]
    old = f"  as of {age(board.now() - job.received)} ago" if board.is_old(job) and job.received else ""
    lines: Lines = [[*state_spans(job.state), (old, "stale")]]
    if job.reason:
        lines.append([(clean(job.reason), "bad" if job.state in ("failed", "diverged") else "dim")])
    lines += [[(f"{label:<{LABEL}}", "dim"), (value, "")] for label, value in rows]
    if job.hyper:
        labels = [SHORT.get(name, name) for name in job.hyper]
        wide = _width(labels)
        lines += [[], [("Hyper-parameters", "head")]]
        lines += [
            [(f"{label:<{wide}} ", "dim"), (hyper(value), "")]
            for label, value in zip(labels, job.hyper.values(), strict=True)
        ]
    if job.states:
        lines += [[], [("States", "head")]]
        for when, state, reason in reversed(job.states):
            text = f" {clean(reason)}" if reason else ""
            lines.append([(f"{board.moment(when):<{LABEL}} ", "dim"), *state_spans(state), (text, "dim")])
    return lines + _files(files, files_problem, board)


def _files(files: Sequence[FileRow] | None, problem: str, board: Board) -> Lines:
    lines: Lines = [[], [("Files", "head")]]
    if problem:
        lines.append([(clean(problem), "dim")])
    elif files is None:
        lines.append([(UNKNOWN, "dim")])
    elif not files:
        lines.append([("none yet", "dim")])
    for row in files or ():
        lines.append(
            [
                (f"{size(row.size):>9}  ", "dim"),
                (clean(row.name), ""),
                (f"  {board.moment(row.changed)}", "dim"),
            ]
        )
    return lines


def compared_facts(jobs: Sequence[Job], board: Board) -> Lines:
    """Side by side; what differs is marked."""
    lines: Lines = []
    for i, job in enumerate(jobs):
        lines.append(
            [(f"{MARKERS[i]} ", f"s{i}"), (clean(job.name), f"s{i}"), ("  ", ""), *state_spans(job.state)]
        )
    names = dict.fromkeys(name for job in jobs for name in job.hyper)
    rows = [(SHORT.get(name, name), [hyper(job.hyper.get(name)) for job in jobs]) for name in names]
    rows.sort(key=lambda row: len(set(row[1])) == 1)  # those that differ first
    wide = _width([f"  {label}" for label, _ in rows])
    lines += [[], [(" " * wide, ""), *((f"{MARKERS[i]:>{CELL}}", f"s{i}") for i in range(len(jobs)))]]
    measured: list[tuple[str, list[str]]] = [
        ("val best", [loss(job.best_val_loss) for job in jobs]),
        ("at step", [count(job.best_step) for job in jobs]),
        ("train", [loss(job.loss) for job in jobs]),
        ("step", [count(job.step) for job in jobs]),
        ("tokens/s", [count(job.tokens_per_s) for job in jobs]),
        ("ETA", [duration(job.eta_s) for job in jobs]),
    ]
    lines += [_compared(label, values, "", wide) for label, values in measured]
    if rows:
        lines += [[], [("Hyper-parameters", "head"), ("  ≠ differs", "dim")]]
    for label, values in rows:
        differs = len(set(values)) > 1
        role = "mark" if differs else "dim"
        lines.append(_compared(f"{'≠ ' if differs else '  '}{label}", values, role, wide))
    return lines


def _width(labels: Sequence[str]) -> int:
    return min(MOST_LABEL, max([LABEL, *map(len, labels)]))


def _compared(label: str, values: Sequence[str], role: str, wide: int) -> list[Span]:
    cells = [
        (f"{value if len(value) <= CELL - 1 else value[: CELL - 2] + '…':>{CELL}}", role) for value in values
    ]
    return [(f"{label[:wide]:<{wide}}", "dim"), *cells]


def node_facts(node: Node, board: Board) -> list[Span]:
    """One line: where it is, what it has, what is wrong."""
    info = node.info
    parts = [clean(part) for part in (node.host, node.transport) if part]
    parts += [f"gshare {clean(node.gshare)}"] if node.gshare else []
    if info is None:
        parts.append("nothing is known of it yet")
        return [(" " + " · ".join(parts), "dim")]
    parts.append(f"up {duration(info.uptime_s)}")
    parts.append(f"CPU {number(info.cpu_percent, ' %')} of {info.cpu_cores or UNKNOWN} cores")
    parts.append(f"RAM {gib(info.ram_free_mb)} of {gib(info.ram_mb or None)} GiB free")
    parts.append(f"disk {gib(info.disk_free_mb, 0)} GiB free")
    parts += [f"driver {clean(info.driver)}"] if info.driver else []
    old = f"  as of {age(board.now() - node.received)} ago" if board.is_away(node) else ""
    problems = "; ".join(clean(problem) for problem in info.problems)
    return [
        (f" {problems}" if problems else "", "warn"),
        (" " + " · ".join(parts), "stale" if old else "dim"),
        (old, "stale"),
    ]
