"""The README's pictures of the dashboard, out of a recording of a real run.

    python examples/pictures/make.py [RECORDING] [DIRECTORY]

Without arguments: `cluster.gshare` beside this file, and the pictures are written there too. `gshare tui
--record` made it while three agents on one busy machine trained nine adapters on SmolLM2-135M-Instruct
(examples/cluster_training with 30 steps), one of them killed midway. The same recording gives the same bytes.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gshare.agent.errors import GshareError
from gshare.tui.app import Dashboard, make_app
from gshare.tui.frames import NodeState
from gshare.tui.recording import Recording
from gshare.tui.replay_source import ReplaySource
from gshare.tui.settings import Settings
from textual.pilot import Pilot

HERE = Path(__file__).resolve().parent
PATIENCE_SECONDS = 60.0
#: GitHub loads no fonts from elsewhere into a picture: the reader's own monospace is taken at once.
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


@dataclass(frozen=True)
class Picture:
    """`at`: share of the recording's length; None: when a node is away for the first time. `keys`: pressed
    before it is taken."""

    name: str
    at: float | None
    size: tuple[int, int]
    keys: tuple[str, ...] = ()


PICTURES = (
    Picture("overview", 0.944, (130, 24)),
    Picture("lost", None, (130, 24)),
    Picture("compare", 1.0, (130, 34), ("m", "m", "m", "c")),
)


async def take(recording: Path, picture: Picture) -> str:
    """The picture as SVG text. UsageError: no recording."""
    source = ReplaySource(recording)
    source.pause(True)
    if picture.at is None:
        moment = _first_away(recording)
    else:
        moment = source.start + picture.at * (source.end - source.start)
    app = make_app(source, Settings())
    async with app.run_test(size=picture.size) as pilot:
        source.seek(moment)
        await _until_there(app, pilot, source, moment)
        app.repaint()
        await pilot.pause()
        for key in picture.keys:
            await pilot.press(key)
            await pilot.pause()
        app.repaint()
        await pilot.pause()
        svg = app.export_screenshot(title="gshare tui")
    # Textual names each picture's styles by chance.
    unique = re.search(r"terminal-(\d+)-matrix", svg)
    if unique:
        svg = svg.replace(f"terminal-{unique[1]}-", "terminal-")
    return _FONT_FACE.sub("", svg)


def _first_away(recording: Path) -> float:
    """Unix s; SystemExit: no node was ever away."""
    opened = Recording(recording)
    try:
        for frame in opened.read():
            if isinstance(frame, NodeState) and frame.state in ("unreachable", "lost"):
                return frame.received + 0.5
    finally:
        opened.close()
    raise SystemExit(f"{recording}: no node is ever away in it")


async def _until_there(app: Dashboard, pilot: Pilot[int], source: ReplaySource, moment: float) -> None:
    """All frames up to that moment are taken in: it stands at the next one."""
    end = time.monotonic() + PATIENCE_SECONDS
    before, quiet = -1, 0
    while quiet < 5:
        await pilot.pause(0.05)
        seen = app.board.state.last_entry
        there = source.position >= moment and app.board.state.received is not None
        quiet = quiet + 1 if there and seen == before else 0
        before = seen
        if time.monotonic() > end:
            raise SystemExit(f"the replay did not reach its moment within {PATIENCE_SECONDS:.0f} s")


def main(arguments: list[str]) -> int:
    if len(arguments) > 2:
        raise SystemExit(__doc__)
    recording = Path(arguments[0]) if arguments else HERE / "cluster.gshare"
    directory = Path(arguments[1]) if len(arguments) > 1 else HERE
    os.environ["TZ"] = "UTC"
    os.environ.pop("NO_COLOR", None)
    time.tzset()
    for picture in PICTURES:
        path = directory / f"{picture.name}.svg"
        path.write_text(asyncio.run(take(recording, picture)), "utf-8")
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except GshareError as error:
        print(f"make.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
