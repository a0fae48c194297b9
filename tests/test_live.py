"""What a run looks like: table, plain lines, leaderboard."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path

import msgspec
import pytest
from gshare.agent.jobs.events import Evaluated, JobChanged, Stepped, TrainerMessage
from gshare.cli.board import Board, duration
from gshare.cli.live import LiveView, PlainView, live_table, make_view, print_leaderboard
from gshare.cli.streams import stderr_console
from rich.console import Console
from rich.text import Text


def step(job: str, number: int, total: int = 100, tokens: int = 100) -> Stepped:
    return Stepped(
        job=job,
        step=number,
        total_steps=total,
        epoch=0.0,
        loss=1.5,
        grad_norm=1.0,
        learning_rate=1e-4,
        tokens=tokens,
        label_tokens=10,
        seconds=0.1,
        adapters_in_pass=1,
    )


def evaluated(job: str, loss: float) -> Evaluated:
    return Evaluated(job=job, step=1, val_loss=loss, label_tokens=1, best=math.isfinite(loss))


def ended(job: str, state: str) -> JobChanged:
    return JobChanged(job=job, state=state, step=1, total_steps=100, reason="[red]why[/red]")  # type: ignore[arg-type]


def drawn(board: Board, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(live_table(board))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_reason_does_not_say_the_step_again(capsys: pytest.CaptureFixture[str]) -> None:
    view = make_view([("a", "/a")], json_lines=False)
    reason = "underperformance at step 5: validation loss 6.8 is number 3 of 4"
    stopped = JobChanged(job="a", state="stopped", step=5, total_steps=20, reason=reason)
    view.take(stopped)
    view.take(msgspec.structs.replace(stopped, step=6))  # of another step it says which
    view.take(msgspec.structs.replace(stopped, total_steps=0))  # the line has none
    assert capsys.readouterr().err.splitlines() == [
        "a: stopped at step 5 of 20: underperformance: validation loss 6.8 is number 3 of 4",
        f"a: stopped at step 6 of 20: {reason}",
        f"a: stopped: {reason}",
    ]


def test_pace_is_by_the_clock_and_starts_anew_after_a_resumption() -> None:
    board = Board([("a", "")])
    row = board.rows["a"]
    board.take(step("a", 1), 10.0)
    assert (row.tokens_per_second, row.eta_seconds) == (None, None)
    board.take(step("a", 2), 12.0)
    board.take(step("a", 3), 14.0)
    assert row.tokens_per_second == 50.0  # 200 tokens in 4 s, other jobs' rounds between included
    assert row.eta_seconds == 97 * 2.0
    board.take(step("a", 2), 100.0)
    assert row.tokens_per_second is None
    board.take(ended("a", "stopped"), 101.0)
    assert row.eta_seconds is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (math.inf, "-"), (0, "0:00"), (61, "1:01"), (3661, "1:01:01")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_leaderboard_puts_nan_and_never_evaluated_last(capsys: pytest.CaptureFixture) -> None:
    board = Board([(name, "") for name in ("never", "nan", "worse", "best")])
    for name, loss in (("nan", math.nan), ("worse", 2.0), ("best", 1.0)):
        board.take(evaluated(name, loss), 0.0)
    assert [row.name for row in board.leaderboard()] == ["best", "worse", "nan", "never"]
    print_leaderboard(board)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "best",
        "worse",
        "nan",
        "never",
    ]


def test_names_and_reasons_are_text_and_never_markup() -> None:
    board = Board([("[bold]a[/bold]", "")])
    assert "[bold]a[/bold]" in drawn(board, 100)
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    view = LiveView(board, console)
    with view:
        view.take(ended("[bold]a[/bold]", "failed"))
        view.take(TrainerMessage(level="warning", text="[/nothing] opened"))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "[red]why[/red]" in text
    assert "warning: [/nothing] opened" in text


def test_the_table_fits_a_narrow_terminal() -> None:
    board = Board([("a-name-that-is-rather-long-for-a-narrow-terminal", "")])
    board.take(step("a-name-that-is-rather-long-for-a-narrow-terminal", 3), 0.0)
    for width in (60, 80, 200):
        lines = drawn(board, width).splitlines()
        assert max(map(len, lines)) <= width
        assert all(cell in lines[1] for cell in ("a-name", "queued", "3/100", "1.5000"))


def test_what_is_shared_below_the_adapters_is_told_while_it_runs() -> None:
    """Under the table, by those that run; nothing where nothing is shared, or when it is over."""
    board = Board([("a", "out/a"), ("b", "out/b")])
    assert live_table(board).caption is None
    for job, shared in (("a", 0.9375), ("b", 0.5)):
        board.take(msgspec.structs.replace(step(job, 1), trunk_shared=shared), 1.0)
    assert live_table(board).caption == "94% of the work below the adapters is shared"
    board.take(ended("a", "completed"), 2.0)
    assert live_table(board).caption == "50% of the work below the adapters is shared"
    board.take(step("b", 2), 3.0)
    assert live_table(board).caption is None


def test_without_a_terminal_lines_are_plain_and_steps_few(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("gshare.cli.live.time.monotonic", lambda: now)
    view = make_view([("a", "out")], json_lines=False)
    assert isinstance(view, PlainView)
    with view:
        for number in range(1, 101):
            view.take(step("a", number))
            now += 0.3
    lines = capsys.readouterr().err.splitlines()
    # At the first step, then every 10 s (34 rounds of 0.3 s), and the last step in any case.
    assert [line.split()[2] for line in lines] == ["1", "35", "69", "100"]
    assert "333 tok/s" in lines[-1]
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize("terminal", [False, True])
def test_stderr_is_wrapped_for_a_terminal_alone(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "40")
    stderr_console().print(Text("word " * 60 + "end"))
    assert (len(capsys.readouterr().err.splitlines()) > 1) is terminal


def test_both_commands_that_show_progress_use_it() -> None:
    """One of their own would wrap at 80 columns in a file; the live table is for terminals alone."""
    cli = Path(__file__).resolve().parent.parent / "cli"
    makers = {path.name for path in cli.glob("*.py") if "Console(stderr=True" in path.read_text("utf-8")}
    assert makers == {"live.py", "streams.py"}
