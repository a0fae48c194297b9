"""The dashboard: takes frames from a source, keeps the state, and shows it on five screens.

    Source.run ──frame──► take ──► Board.state       at most every 0.06 s after a change of a state,
                           └─────► Recorder          every second for measures and ages ──► View.show_all

`make_app` is what the command line and the tests call.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, cast

from gshare.agent.errors import EXIT_OK, GshareError
from gshare.tui import lost_terminal
from gshare.tui import settings as settings_file
from gshare.tui.actions import carry_out, question, refusal
from gshare.tui.board import Board
from gshare.tui.frames import Frame
from gshare.tui.key_list import bindings_of
from gshare.tui.messages import Act, Copy, OpenJob, OpenNode
from gshare.tui.recording import Recorder
from gshare.tui.screens.adapter import AdapterView
from gshare.tui.screens.confirm import Confirm
from gshare.tui.screens.events import EventsView
from gshare.tui.screens.help import Help, keys_of
from gshare.tui.screens.leaderboard import LeaderboardView
from gshare.tui.screens.node import NodeView
from gshare.tui.screens.overview import Overview
from gshare.tui.screens.view import View
from gshare.tui.settings import Settings
from gshare.tui.show import clean
from gshare.tui.source import Replayed, Source
from gshare.tui.themes import DEFAULT, MONO, NAMES, THEMES, palette_of
from gshare.tui.tight import TightUpdate
from gshare.tui.widgets.tabs import VIEWS, Tabs
from rich.console import RenderableType
from textual._compositor import ChopsUpdate
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.filter import NoColor
from textual.screen import Screen

#: Between a change of a state and the screen: several of them are shown at once.
SOON_SECONDS = 0.06
#: Measures and ages.
TICK_SECONDS = 1.0
SEEK_SECONDS = 30.0
#: A failed action stays to be read.
ERROR_SECONDS = 20.0
SCREENS: tuple[type[View], ...] = (Overview, LeaderboardView, NodeView, AdapterView, EventsView)


class Dashboard(App[int]):
    TITLE = "gshare"
    CSS = """
    Toast { max-width: 90%; }
    Dashboard.-mono .panel:focus { border: double $accent; }
    Dashboard.-mono OptionList > .option-list--option-highlighted { text-style: reverse bold; }
    Dashboard.-mono Button:focus { text-style: reverse bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(i), f"go('{view}')", view.capitalize(), show=False) for i, view in enumerate(VIEWS, 1)),
        Binding("escape", "back", "Back", show=False),
        Binding("p", "pause", "Freeze"),
        Binding("t", "times", "Ages or times of day", show=False),
        Binding("T", "next_theme", "Next theme", show=False),
        Binding("w", "picture", "Screenshot", show=False),
        Binding("r", "retry", "Retry now", show=False),
        Binding("left_square_bracket", "seek(-1)", "30 s back", show=False),
        Binding("right_square_bracket", "seek(1)", "30 s on", show=False),
        Binding("left_curly_bracket", "speed(-1)", "Half the speed", show=False),
        Binding("right_curly_bracket", "speed(1)", "Twice the speed", show=False),
        Binding("question_mark", "help", "Help"),
        Binding("q", "leave", "Quit"),
    ]

    def __init__(
        self,
        source: Source,
        settings: Settings,
        *,
        clock: Callable[[], float],
        recorder: Recorder | None,
        read_only: bool,
        settings_path: Path | None,
        notes: list[str],
        on_painted: Callable[[], object] | None,
    ) -> None:
        self.board = Board(settings, clock)
        super().__init__()
        self.source = source
        self.board.read_only = read_only
        self.failure: GshareError | None = None  # why the source gave up
        self._recorder = recorder
        self._settings_path = settings_path
        self._notes = notes
        self._on_painted = on_painted
        self._trail: list[str] = []
        self._views: dict[str, View] = {}
        self._due = False  # a repaint is on its way
        self._leaving = False
        if self.no_color:
            # Textual's own filter leaves greys; whoever sets NO_COLOR wants none.
            self._filters.append(NoColor())
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = settings.theme if settings.theme in NAMES else DEFAULT
        for name in self.available_themes.keys() - set(NAMES):
            self.unregister_theme(name)  # whether states can be read on others nobody has looked

    def _watch_theme(self, theme_name: str) -> None:
        super()._watch_theme(theme_name)
        self.board.settings.theme = theme_name
        self.board.palette = palette_of(theme_name, self.no_color)
        self.set_class(self.board.palette is MONO, "-mono")
        self._soon()

    # --- life

    def on_mount(self) -> None:
        for screen in SCREENS:
            view = self._views[screen.view] = screen(self.board)
            self.install_screen(view, screen.view)
        self.go(self.board.settings.view if self.board.settings.view in VIEWS else VIEWS[0])
        for note in self._notes:
            self.notify(note, severity="warning", timeout=ERROR_SECONDS, markup=False)
        self.set_interval(TICK_SECONDS, self.repaint)
        if self._on_painted is not None:
            self.call_after_refresh(self._on_painted)
        self.run_worker(self._follow(), exit_on_error=True, group="source")
        if not self.is_headless:
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                for number in (signal.SIGTERM, signal.SIGHUP):
                    asyncio.get_running_loop().add_signal_handler(number, self.exit, 128 + number)
            self.set_interval(TICK_SECONDS, self._leave_lost_terminal)

    def _leave_lost_terminal(self) -> None:
        """Ends where the terminal is gone and no SIGHUP said so (it was not the controlling one): textual's
        reader would take up a whole core on its end of file."""
        if lost_terminal.is_gone():
            self.exit(return_code=lost_terminal.CODE)

    async def _follow(self) -> None:
        try:
            await self.source.run(self.take)
        except GshareError as error:
            self.failure = error
            self.exit(error.exit_code, return_code=error.exit_code)

    def take(self, frame: Frame) -> None:
        """One frame of the source."""
        if self._recorder is not None:
            self._recorder.write(frame)
        changes = self.board.state.apply(frame)
        if self.board.paused_at is not None:
            self.board.frames_since += 1
            if not changes.source:
                return
        if changes.urgent or changes.reset:
            self._soon()

    def _soon(self) -> None:
        if not self._due and self.is_running:
            self._due = True
            self.set_timer(SOON_SECONDS, self.repaint)

    def repaint(self) -> None:
        """What has changed of the screen, or of the one below a dialog."""
        self._due = False
        for screen in reversed(self.screen_stack):
            if isinstance(screen, View):
                screen.show_all()
                return

    def _display(self, screen: Screen[Any], renderable: RenderableType | None) -> None:
        if isinstance(renderable, ChopsUpdate):
            renderable = TightUpdate.of(renderable)
        super()._display(screen, renderable)

    def exit(self, *arguments: Any, **options: Any) -> None:
        self._leaving = True
        super().exit(*arguments, **options)

    @property
    def is_leaving(self) -> bool:
        return self._leaving or not self.is_running

    def problems(self) -> list[str]:
        """What else is wrong, for the banner."""
        return [self._recorder.problem] if self._recorder is not None and self._recorder.problem else []

    # --- where one is

    @property
    def view(self) -> View:
        """The screen that is shown, or lies below the dialogs."""
        return self._views[self._trail[-1]]

    def crumbs(self) -> list[tuple[str, str]]:
        """(view, what of it), the present one last."""
        return [(view, self._views[view].crumb()) for view in self._trail]

    def go(self, view: str, about: str = "") -> None:
        """Shows that screen; one comes back from it to where one was."""
        if about or view == "adapter":
            self._views[view].about = about
        before = self._trail[-1] if self._trail else ""
        if view == VIEWS[0]:
            self._trail = [view]
        else:
            # Once each: what is opened from a line of the events leads back to the events.
            self._trail = [*(one for one in self._trail if one != view), view]
        self.board.settings.view = view
        if not before:
            self.push_screen(view)
        elif before != view:
            self.switch_screen(view)
        else:
            self._views[view].on_screen_resume()

    def on_tabs_picked(self, event: Tabs.Picked) -> None:
        self.action_go(event.view)

    def on_open_job(self, event: OpenJob) -> None:
        self.go("adapter", event.job)

    def on_open_node(self, event: OpenNode) -> None:
        self.go("node", event.node)

    def on_copy(self, event: Copy) -> None:
        self.copy_to_clipboard(event.text)
        self.notify(f"copied: {clean(event.text)}", markup=False)

    # --- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in ("seek", "speed"):
            return "seek" in self.source.can
        return True

    def action_go(self, view: str) -> None:
        """A view of its own: about the adapter or node at hand, where there is one."""
        job = self._present_job()
        if view == "adapter" and len(self.board.marked_jobs()) < 2:
            self.go(view, job or self._views[view].about)
        elif view == "node" and job in self.board.shown.jobs:
            self.go(view, self.board.shown.jobs[job].node)
        else:
            self.go(view)

    def _present_job(self) -> str:
        from gshare.tui.widgets.job_table import JobTable

        if isinstance(self.view, AdapterView):
            return self.view.about
        table = self.view.query(JobTable).first(JobTable) if self.view.query(JobTable) else None
        job = table.present() if table is not None else None
        return job.job if job is not None else ""

    async def action_back(self) -> None:
        """The filter first, then the screen."""
        if self.view.filter_text():
            self.view.set_filter("")
            self.view.show_all()
        elif len(self._trail) > 1:
            self._trail.pop()
            self.board.settings.view = self._trail[-1]
            self.switch_screen(self._trail[-1])

    def action_pause(self) -> None:
        """The picture stands still; what comes is taken in and shown afterwards. A replay stands itself."""
        if "seek" in self.source.can:
            replay = cast(Replayed, self.source)
            replay.pause(not replay.paused)
        else:
            self.board.pause(self.board.paused_at is None)
        self.repaint()

    def action_times(self) -> None:
        self.board.settings.relative = not self.board.settings.relative
        self.repaint()

    def action_next_theme(self) -> None:
        self.theme = NAMES[(NAMES.index(self.theme) + 1) % len(NAMES)]
        self.notify(f"theme {self.theme}", timeout=2, markup=False)

    def action_picture(self) -> None:
        name = time.strftime(f"gshare-{self.view.view}-%Y%m%d-%H%M%S.svg")
        try:
            self.notify(f"written: {self.save_screenshot(name)}", markup=False)
        except OSError as error:
            self.notify(f"{name}: {error.strerror}", severity="error", timeout=ERROR_SECONDS, markup=False)

    def action_retry(self) -> None:
        if "retry" in self.source.can and not self.board.state.is_live:
            self.run_worker(self._act("retry", [], []), group="act")

    def action_seek(self, way: int) -> None:
        replay = cast(Replayed, self.source)
        replay.seek(replay.position + way * SEEK_SECONDS)

    def action_speed(self, way: int) -> None:
        replay = cast(Replayed, self.source)
        replay.speed = min(1000.0, max(0.125, replay.speed * 2.0**way))
        self.repaint()

    def action_help(self) -> None:
        self.push_screen(Help(self._bindings_here(), self.board.palette))

    def action_leave(self) -> None:
        self.exit(EXIT_OK)

    def _bindings_here(self) -> list[tuple[str, list[Binding]]]:
        """Of what has the focus, of the screen, of the app: what works now."""
        focused = self.view.focused  # a dialog or the palette may lie above it
        chain: list[tuple[str, object]] = (
            [(f"{self.view.view.capitalize()}: {focused.id}", focused)] if focused else []
        )
        chain += [(self.view.view.capitalize(), self.view), ("Everywhere", self)]
        return bindings_of(chain, lambda action: bool(self.check_action(action, ())))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The command palette: every binding that works now."""
        for title, bindings in self._bindings_here():
            for one in bindings:
                if one.action not in ("command_palette", "focus_next"):
                    yield SystemCommand(
                        one.description, f"{title}, key {keys_of(one)}", self._runner(one.action)
                    )
        yield SystemCommand("Choose a theme", "Everywhere", self.action_change_theme)

    def _runner(self, action: str) -> Callable[[], None]:
        def run() -> None:
            namespace = next(
                (
                    owner
                    for owner in (self.view.focused, self.view, self)
                    if owner is not None and hasattr(owner, f"action_{action.partition('(')[0]}")
                ),
                self,
            )
            self.run_worker(self.run_action(action, namespace), group="palette")

        return run

    # --- what is done to others

    def on_act(self, event: Act) -> None:
        event.stop()
        if why := refusal(self.source, event.action, self.board.read_only):
            self.notify(why, severity="warning", timeout=ERROR_SECONDS, markup=False)
            return
        title, warning = question(event.action, len(event.targets))

        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(self._act(event.action, event.targets, event.names), group="act")

        self.push_screen(Confirm(title, event.names, warning), answered)

    async def _act(self, action: Any, targets: list[str], names: list[str]) -> None:
        done, problems = await carry_out(self.source, action, targets, names)
        if done:
            self.notify(clean(done), markup=False)
        for problem in problems:
            self.notify(clean(problem), severity="error", timeout=ERROR_SECONDS, markup=False)

    def remember(self) -> str:
        """Writes the settings; returns why it could not be done."""
        if self._settings_path is None:
            return ""
        return settings_file.save(self._settings_path, self.board.settings)


def make_app(
    source: Source,
    settings: Settings | None = None,
    *,
    clock: Callable[[], float] = time.time,
    recorder: Recorder | None = None,
    read_only: bool = False,
    settings_path: Path | None = None,
    notes: Iterable[str] = (),
    on_painted: Callable[[], object] | None = None,
) -> Dashboard:
    """`clock`: Unix s; a replay's own time takes its place. `settings_path` None: nothing is remembered.
    `notes`: told at the start. `on_painted` is called when the first picture stands."""
    if "seek" in source.can:
        replay = cast(Replayed, source)
        clock = lambda: replay.position  # noqa: E731
    return Dashboard(
        source,
        settings if settings is not None else Settings(),
        clock=clock,
        recorder=recorder,
        read_only=read_only,
        settings_path=settings_path,
        notes=list(notes),
        on_painted=on_painted,
    )
