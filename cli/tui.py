"""`gshare tui`: the dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from gshare.agent.errors import UsageError

if TYPE_CHECKING:
    from gshare.tui.source import Source

NOT_A_TERMINAL = (
    "gshare tui needs a terminal as stdin, stdout and stderr; "
    "`gshare cluster status --json` and `gshare jobs` print instead"
)


def tui(
    *,
    cluster: Path | None = None,
    agent: str | None = None,
    run: Path | None = None,
    replay: Path | None = None,
    record: Path | None = None,
    speed: float = 1.0,
    read_only: Annotated[bool, Parameter(negative=())] = False,
    theme: str | None = None,
    state_dir: Path | None = None,
) -> int:
    """Show nodes, reservations, adapters and their losses as they change.

    Without a flag: the coordinator that runs here, else the agent, else this machine's GPUs and trainers.

    Parameters
    ----------
    cluster
        The coordinator of this cluster file.
    agent
        One node's agent: USER@HOST[:PORT] through SSH, HOST:PORT of `gshare agent --bind`, or the path of its
        socket or state directory.
    run
        A directory that a run writes, or one that holds several.
    replay
        Play a recording.
    record
        Write what is shown into a new file.
    speed
        Of a replay: recorded seconds a second. [ and ] seek, { and } change it.
    read_only
        Stop, pause, resume and release nothing.
    theme
        gshare-dark, gshare-light, gshare-safe (for any colour vision) or gshare-mono.
    state_dir
        The coordinator's; by default $XDG_STATE_HOME/gshare/coordinator.
    """
    from gshare.tui.finding import find_source
    from gshare.tui.settings import default_path, load
    from gshare.tui.themes import NAMES

    if theme is not None and theme not in NAMES:
        raise UsageError(f"--theme {theme}: the themes are {', '.join(NAMES)}")
    if speed != 1.0 and replay is None:
        raise UsageError("--speed is for --replay alone")
    if record is not None and replay is not None:
        raise UsageError("--record and --replay: name one of them")
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):  # stderr is drawn on
        raise UsageError(NOT_A_TERMINAL)
    with contextlib.ExitStack() as stack:
        gc.disable()  # until the first picture: collections were 70 of 450 ms of processor time up to it
        stack.callback(gc.enable)
        source = find_source(
            cluster=cluster, coordinator_state=state_dir, agent=agent, run=run, replay=replay, speed=speed
        )
        if agent is not None:
            _meet(source)
        path = default_path()
        settings, note = load(path)
        if theme is not None:
            settings.theme = theme
        from gshare.tui import lost_terminal
        from gshare.tui.app import make_app
        from gshare.tui.recording import Recorder

        recorder = None
        if record is not None:
            recorder = stack.enter_context(Recorder(record, time.time(), source.title))
        notes = [one for one in (note, getattr(source, "note", "")) if one]
        app = make_app(
            source,
            settings,
            recorder=recorder,
            read_only=read_only,
            settings_path=path,
            notes=notes,
            on_painted=_collect_again,
        )

        def last() -> None:
            if recorder is not None:
                recorder.close()
            app.remember()

        lost_terminal.end_with_it(last)
        code = app.run()
        note = app.remember()
    if app.failure is not None:
        raise app.failure
    if note:
        print(f"gshare: the settings were not kept: {note}", file=sys.stderr)
    if recorder is not None and recorder.problem:
        print(f"gshare: {recorder.problem}", file=sys.stderr)
    return code if code is not None else app.return_code or 0


def _collect_again() -> None:
    """What was imported stays: no collection looks at it again, which would hold up the screen."""
    gc.freeze()
    gc.enable()


def _meet(source: Source) -> None:
    """Of an agent behind SSH: a new host key is asked about before the screen is taken."""
    from gshare.tui.agent_source import AgentSource

    if isinstance(source, AgentSource) and source.is_remote:
        from gshare.coordinator.host_keys import HostKeys
        from gshare.coordinator.main import ask_on_terminal

        print(f"gshare: connecting to {source.detail}", file=sys.stderr)
        asyncio.run(source.meet(HostKeys(ask=ask_on_terminal)))
