"""The line at the top and the banner below it: how things are in one line, and what is wrong. Pure."""

from __future__ import annotations

from typing import cast

from gshare.tui.board import Board
from gshare.tui.frames import SourceState
from gshare.tui.model import State
from gshare.tui.show import Spans, age, clean, duration
from gshare.tui.source import Replayed, Source

#: Source state → (mark, role).
SIGNS = {
    "connecting": ("◌", "wait"),
    "live": ("●", "ok"),
    "stale": ("○", "warn"),
    "lost": ("✖", "bad"),
    "ended": ("■", "dim"),
}
_READY = ("ready", "busy", "degraded")
#: What states are counted as, in this order.
_COUNTED = {
    "running": ("running", "publishing", "placing"),
    "paused": ("paused",),
    "starting": ("starting",),
    "queued": ("queued", "waiting"),
    "done": ("completed",),
    "stopped": ("stopped",),
    "failed": ("failed", "diverged"),
}


def status(board: Board, source: Source) -> tuple[Spans, Spans]:
    """(left, right) of the top line."""
    state = board.shown
    left: list[tuple[str, str]] = [(" gshare ", "title"), (clean(_title(state, source)), "best")]
    nodes = list(state.nodes.values())
    if len(nodes) > 1:
        ready = sum(node.state in _READY for node in nodes)
        left.append((f" · {ready}/{len(nodes)} nodes ready", "" if ready == len(nodes) else "warn"))
    counts = state.counts()
    left.append((" ·" if counts else " · no adapters", "dim"))
    for word, states in _COUNTED.items():
        if number := sum(counts.get(state, 0) for state in states):
            left.append((f" {number} {word}", "bad" if word == "failed" else ""))
    return tuple(left), ((" ", ""), *_replay(source), *_sign(board))


def _title(state: State, source: Source) -> str:
    return state.found.title if state.found is not None else source.title


def _replay(source: Source) -> Spans:
    if "seek" not in source.can:
        return ()
    replay = cast(Replayed, source)
    at, whole = duration(replay.position - replay.start), duration(replay.end - replay.start)
    held = "‖ " if replay.paused else ""
    return ((f"{held}{at} / {whole} ×{replay.speed:g}  ", "mark"),)


def _sign(board: Board) -> Spans:
    source = board.state.source
    name = source.state if source is not None else "connecting"
    mark, role = SIGNS[name]
    read_only: Spans = (("read-only  ", "dim"),) if board.read_only else ()
    paused: Spans = (("‖ paused  ", "warn"),) if board.paused_at is not None else ()
    return (*read_only, *paused, (f"{mark} {name} ", role))


def banner(board: Board, source: Source, problems: list[str], size: tuple[int, int]) -> Spans:
    """What is wrong or special, empty when nothing is. `problems`: of the app, such as a full disk."""
    parts: list[tuple[str, str]] = []
    known = board.state.source
    if known is not None and known.state in ("stale", "lost", "connecting"):
        parts.append((_trouble(board, known, source), "bad" if known.state == "lost" else "warn"))
    elif known is not None and known.state == "ended" and known.text:
        parts.append((clean(known.text), "dim"))
    if board.paused_at is not None:
        since = board.clock() - board.paused_at
        parts.append(
            (f"‖ shown as it was {age(since)} ago; updates since: {board.frames_since}; p goes on", "warn")
        )
    parts.extend((clean(problem), "bad") for problem in problems)
    if size[0] < 80 or size[1] < 24:
        parts.append((f"{size[0]}×{size[1]}: 80×24 or more shows more", "dim"))
    joined: list[tuple[str, str]] = [(" ", "")]
    for i, part in enumerate(parts):
        joined += [("   ", "")] if i else []
        joined.append(part)
    return tuple(joined) if parts else ()


def _trouble(board: Board, known: SourceState, source: Source) -> str:
    now = board.clock()
    text = f"{known.state} for {age(now - known.since)}"
    if known.text:
        text += f": {clean(known.text)}"
    heard = board.state.age(now)
    if heard is not None:
        text += f"; what is shown is {age(heard)} old"
    if known.retry_in is not None:
        left = max(0.0, known.received + known.retry_in - now)
        key = " (r: now)" if "retry" in source.can else ""
        text += f"; retry in {age(left)}{key}"
    return text
