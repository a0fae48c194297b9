"""What every screen reads: the state that is shown, the time, marks, settings. The app alone changes it."""

from __future__ import annotations

from collections.abc import Callable

from gshare.tui.freeze import frozen
from gshare.tui.model import State
from gshare.tui.rows import Job, Node
from gshare.tui.settings import Settings
from gshare.tui.show import moment
from gshare.tui.themes import MONO, Palette

#: Compared in one plot; there are so many markers and colours.
MAX_MARKED = 6
#: States of nodes whose numbers are old.
AWAY = frozenset({"new", "deploying", "unreachable", "lost"})


class Board:
    """`shown` is the live state, or while paused a frozen copy of it; `now` stands still then."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self.state = State()
        self.shown = self.state
        self.settings = settings
        self.palette: Palette = MONO
        self.filter = ""  # of the leaderboard; not remembered: on other adapters it may hide them all
        self.marked: list[str] = []  # keys of jobs, in the order in which they were marked
        self.read_only = False
        self.paused_at: float | None = None
        self.frames_since = 0  # applied since the pause
        self._clock = clock

    def now(self) -> float:
        """Unix s by our clock, of what is shown."""
        return self._clock() if self.paused_at is None else self.paused_at

    def clock(self) -> float:
        """Unix s, paused or not."""
        return self._clock()

    def pause(self, on: bool) -> None:
        self.paused_at = self._clock() if on else None
        self.frames_since = 0
        self.shown = frozen(self.state) if on else self.state

    def moment(self, when: float | None) -> str:
        return moment(when, self.now(), relative=self.settings.relative)

    # --- what is old

    @property
    def is_stale(self) -> bool:
        """Whether all that is shown may be old: the source is not live."""
        return not self.state.is_live

    def is_old(self, job: Job) -> bool:
        if self.is_stale:
            return True
        node = self.shown.nodes.get(job.node)
        return node is not None and node.state in AWAY and not job.ended

    def is_away(self, node: Node) -> bool:
        return self.is_stale or node.state in AWAY

    # --- marks

    def toggle_mark(self, job: str) -> bool:
        """False: there are `MAX_MARKED` already."""
        if job in self.marked:
            self.marked.remove(job)
        elif len(self.marked) >= MAX_MARKED:
            return False
        else:
            self.marked.append(job)
        return True

    def marked_jobs(self) -> list[Job]:
        """Those that still are."""
        return [self.shown.jobs[key] for key in self.marked if key in self.shown.jobs]
