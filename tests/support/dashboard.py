"""The dashboard without a terminal: started on a scripted source, at a time that stands still."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import pkgutil
from collections.abc import AsyncIterator, Callable
from importlib import import_module
from typing import Any

import gshare.tui
from gshare.tui.app import Dashboard, make_app
from gshare.tui.frames import Frame
from scripted_source import NOW, ScriptedSource, lab
from textual.binding import Binding
from textual.pilot import Pilot
from textual.widget import Widget

#: For what should take milliseconds, on a machine that does something else as well.
PATIENCE_S = 20.0


class FakeReplay(ScriptedSource):
    """What a replay answers besides frames."""

    def __init__(self, frames: list[Frame]) -> None:
        super().__init__(frames, can=frozenset({"seek"}))
        self.title = "replay of night.gshare"
        self.start, self.end = NOW, NOW + 600
        self.position = NOW + 60.0
        self.paused = False
        self.speed = 1.0

    def pause(self, on: bool) -> None:
        self.paused = on

    def seek(self, to: float) -> None:
        self.position = min(max(to, self.start), self.end)


class Driven:
    """A running dashboard and what a test does with it."""

    def __init__(self, app: Dashboard, pilot: Pilot[int], source: ScriptedSource) -> None:
        self.app, self.pilot, self.source = app, pilot, source

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.pilot.press(key)
            await self.pilot.pause()

    async def say(self, *frames: Frame) -> None:
        """Frames, and the repaint that follows them."""
        self.source.say(*frames)
        self.app.repaint()
        await self.pilot.pause()

    async def until(self, fits: Callable[[], object], what: str = "") -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE_S
        while not fits():
            assert loop.time() < end, f"waited in vain for {what or 'it'}\n{self.text}"
            await self.pilot.pause(0.02)

    @property
    def text(self) -> str:
        """What is on the screen, a line each."""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip) for strip in strips)

    @property
    def notes(self) -> str:
        """What was told in notifications, still there."""
        return "\n".join(note.message for note in self.app._notifications)

    def get(self, kind: type[Any], id: str = "") -> Any:
        return self.app.screen.query_one(f"#{id}" if id else kind.__name__, kind)


@contextlib.asynccontextmanager
async def driven(
    source: ScriptedSource | None = None, size: tuple[int, int] = (120, 40), **options: Any
) -> AsyncIterator[Driven]:
    """On the whole lab when no source is given."""
    source = source if source is not None else ScriptedSource(lab())
    options.setdefault("clock", lambda: NOW + 5)
    app = make_app(source, **options)
    # Else what was told is gone after 5 s, and a busy machine has not looked at it.
    app.NOTIFICATION_TIMEOUT = 3600  # pyright: ignore[reportAttributeAccessIssue]
    async with app.run_test(size=size) as pilot:
        one = Driven(app, pilot, source)
        await one.until(lambda: source.is_told and app.is_running, "the source's first frames")
        app.repaint()
        await pilot.pause()
        yield one


def own_classes() -> list[type[Any]]:
    """Every app, screen and widget of `gshare.tui`."""
    found: dict[str, type[Any]] = {}
    for module in pkgutil.walk_packages(gshare.tui.__path__, "gshare.tui."):
        for _, kind in inspect.getmembers(import_module(module.name), inspect.isclass):
            if kind.__module__.startswith("gshare.tui.") and issubclass(kind, Widget | Dashboard):
                found[f"{kind.__module__}.{kind.__name__}"] = kind
    return list(found.values())


def own_bindings() -> list[tuple[str, str, str]]:
    """(class, action, key) of every key that our classes bind themselves."""
    return [
        (kind.__name__, one.action, key)
        for kind in own_classes()
        for one in kind.__dict__.get("BINDINGS", ())
        if isinstance(one, Binding)
        for key in one.key.split(",")
    ]
