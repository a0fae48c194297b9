"""Pictures of the dashboard (SVG), compared byte for byte; `pytest --snapshot-update` makes them anew.

Time stands still; what moves by itself does not move here.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from gshare.tui.app import Dashboard, make_app
from gshare.tui.settings import Settings
from scripted_source import NOW, ScriptedSource, lab, live
from textual.pilot import Pilot

pytest.importorskip("pytest_textual_snapshot", reason="pytest-textual-snapshot is in the dev extra")

Press = Callable[[Pilot[int]], Awaitable[None]]


@pytest.fixture(autouse=True)
def _same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def app(**options: Any) -> Dashboard:
    return make_app(ScriptedSource(lab()), clock=lambda: NOW + 5, **options)


async def ready(pilot: Pilot[int]) -> None:
    """The first frames are on the screen."""
    assert isinstance(pilot.app, Dashboard)
    for _ in range(500):
        if "legal-r64" in pilot.app.board.state.jobs:
            break
        await pilot.pause(0.02)
    pilot.app.repaint()
    await pilot.pause()


def test_wide(snap_compare: Any) -> None:
    assert snap_compare(app(), terminal_size=(180, 44), run_before=ready)


def test_80_by_24(snap_compare: Any) -> None:
    assert snap_compare(app(), terminal_size=(80, 24), run_before=ready)


def test_adapters_compared(snap_compare: Any) -> None:
    async def compare(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press("m", "m", "m", "c")
        await pilot.pause()

    assert snap_compare(app(), terminal_size=(120, 36), run_before=compare)


def test_paused(snap_compare: Any) -> None:
    async def pause(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press("p")
        await pilot.pause()

    assert snap_compare(app(), terminal_size=(100, 30), run_before=pause)


def test_disconnected(snap_compare: Any) -> None:
    async def lose(pilot: Pilot[int]) -> None:
        await ready(pilot)
        assert isinstance(pilot.app, Dashboard)
        pilot.app.take(live(state="lost", since=NOW, retry_in=30.0, text="connection refused"))
        pilot.app.repaint()
        await pilot.pause()

    assert snap_compare(app(), terminal_size=(100, 30), run_before=lose)


def test_without_colour(snap_compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(app(settings=Settings(view="leaderboard")), terminal_size=(100, 30), run_before=ready)
