"""Views of a run: a live rich table on a terminal, plain lines without one, one JSON line an event.

The table and all talk go to stderr; the leaderboard and `--json` are data and go to stdout. Names and
reasons come from users and trainers: they are shown as `Text`, never read as rich markup.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol

import msgspec
from gshare.agent.jobs.events import (
    ENDED,
    Event,
    JobChanged,
    Stepped,
    TrainerMessage,
)
from gshare.agent.service.describe import describe
from gshare.agent.service.journal import strict_json
from gshare.cli.board import Board, Row, columns, duration, number
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

STYLES = {"running": "cyan", "completed": "green", "diverged": "red", "failed": "red", "stopped": "yellow"}
#: Plain lines: at most one "step" line an adapter in so many seconds.
STEP_LINE_SECONDS = 10.0
_REFRESH_SECONDS = 0.25


class View(Protocol):
    """Shows a run. A context manager: on leaving, the terminal is as it was."""

    board: Board

    def __enter__(self) -> View: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def take(self, event: Event) -> None: ...
    def tick(self) -> None: ...
    def say(self, text: str) -> None: ...
    def finish(self) -> None: ...


def make_view(jobs: Iterable[tuple[str, str]], *, json_lines: bool) -> View:
    """The view that fits: `jobs` are (name, output_dir) in the order in which they are shown."""
    board = Board(jobs)
    if json_lines:
        return JsonView(board)
    console = Console(stderr=True)
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveView(board, console) if live else PlainView(board)


class PlainView:
    """Lines on stderr."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._last_line: dict[str, float] = {}

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def take(self, event: Event) -> None:
        now = time.monotonic()
        self.board.take(event, now)
        if isinstance(event, Stepped):
            last = self._last_line.get(event.job)
            if last is not None and now - last < STEP_LINE_SECONDS and event.step < event.total_steps:
                return
            self._last_line[event.job] = now
            self.say(_step_line(event, self.board))
        else:
            self.say(_line(event))

    def tick(self) -> None:
        return None

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def finish(self) -> None:
        print_leaderboard(self.board)


class LiveView:
    """One table, redrawn in place; messages scroll by above it."""

    def __init__(self, board: Board, console: Console) -> None:
        self.board = board
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn = 0.0

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draw()
        self._live.stop()

    def take(self, event: Event) -> None:
        self.board.take(event, time.monotonic())
        if isinstance(event, TrainerMessage) or (isinstance(event, JobChanged) and event.reason):
            self.say(_line(event))
        self.tick()

    def tick(self) -> None:
        if time.monotonic() - self._drawn >= _REFRESH_SECONDS:
            self._draw()

    def say(self, text: str) -> None:
        self._console.print(Text(text))

    def finish(self) -> None:
        print_leaderboard(self.board)

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._live.update(live_table(self.board), refresh=True)


class JsonView(PlainView):
    """One JSON line an event on stdout, strict: what is not a number is null. Talk stays on stderr."""

    def take(self, event: Event) -> None:
        self.board.take(event, time.monotonic())
        print(json.dumps(strict_json(msgspec.to_builtins(event)), allow_nan=False), flush=True)

    def finish(self) -> None:
        rows = [
            {
                "adapter": row.name,
                "state": row.state,
                "step": row.step,
                "total_steps": row.total_steps,
                "loss": row.loss,
                "val_loss": row.val_loss,
                "best_val_loss": row.best_val_loss,
                "output_dir": row.output_dir,
                "reason": row.reason,
            }
            for row in self.board.leaderboard()
        ]
        print(json.dumps(strict_json({"type": "leaderboard", "jobs": rows}), allow_nan=False), flush=True)


def _line(event: Event) -> str:
    """As `describe`, the step once: a reason that stands by itself in records names it too."""
    if isinstance(event, JobChanged) and event.total_steps:
        reason = event.reason.replace(f" at step {event.step}:", ":", 1)
        event = msgspec.structs.replace(event, reason=reason)
    return describe(event)


def _step_line(event: Stepped, board: Board) -> str:
    row = board.rows.get(event.job)
    if row is None or row.tokens_per_second is None:
        return describe(event)
    return f"{describe(event)}  {row.tokens_per_second:.0f} tok/s  ETA {duration(row.eta_seconds)}"


def live_table(board: Board) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("adapter", overflow="fold", min_width=8)  # gives way before the numbers do
    table.add_column("state", no_wrap=True)
    for title in ("step", "loss", "val loss", "tok/s", "ETA"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in board.rows.values():
        table.add_row(
            Text(row.name),
            Text(row.state, style=STYLES.get(row.state, "")),
            f"{row.step}/{row.total_steps or '?'}",
            number(row.loss),
            number(row.val_loss),
            number(row.tokens_per_second, 0),
            duration(row.eta_seconds) if row.state not in ENDED else "-",
        )
    shared = max((row.trunk_shared for row in board.rows.values() if row.state not in ENDED), default=0.0)
    if shared >= 0.005:
        table.caption = f"{shared:.0%} of the work below the adapters is shared"
    return table


def print_leaderboard(board: Board) -> None:
    """On stdout, plain: it is what the command gives back."""
    title = ("", "adapter", "val loss", "best", "loss", "steps", "state", "output")
    lines = [title]
    lines += [_leaderboard_line(place, row) for place, row in enumerate(board.leaderboard(), start=1)]
    print("\n".join(columns(lines)), flush=True)


def _leaderboard_line(place: int, row: Row) -> tuple[str, ...]:
    return (
        str(place),
        row.name,
        number(row.val_loss),
        number(row.best_val_loss),
        number(row.loss),
        f"{row.step}/{row.total_steps}",
        row.state,
        row.output_dir,
    )
