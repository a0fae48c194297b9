"""Every key does what the help says of it. A key or an action that no case here tries fails the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from dashboard import Driven, FakeReplay, driven, own_bindings, own_classes
from gshare.tui import frames as f
from gshare.tui.screens.confirm import Confirm
from gshare.tui.screens.help import Help
from gshare.tui.screens.pick import Pick
from gshare.tui.source import SourceBase
from gshare.tui.widgets.chart import Chart
from gshare.tui.widgets.entry_table import EntryTable
from gshare.tui.widgets.find_bar import FindBar
from gshare.tui.widgets.grid import Grid
from gshare.tui.widgets.job_table import JobTable
from gshare.tui.widgets.lines import Lines
from gshare.tui.widgets.node_table import NodeTable
from gshare.tui.widgets.reservation_table import ReservationTable
from msgspec.structs import replace
from scripted_source import AT, NOW, ScriptedSource, lab, live, nodes
from textual.widgets import Input

Case = Callable[[Driven, str], Awaitable[None]]
CASES: dict[tuple[str, str], Case] = {}
#: Another source than the lab.
SOURCES: dict[str, Callable[[], ScriptedSource]] = {}


def case(kind: str, *actions: str) -> Callable[[Case], Case]:
    def keep(function: Case) -> Case:
        for action in actions:
            assert (kind, action) not in CASES
            CASES[kind, action] = function
        return function

    return keep


@pytest.mark.parametrize(("kind", "action", "key"), own_bindings())
def test_key(kind: str, action: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = CASES.get((kind, action))
    assert one is not None, f"{kind}: key {key} ({action}) is not tried; add a case"

    async def run() -> None:
        source = FakeReplay(lab()) if action.startswith(("seek", "speed")) else ScriptedSource(lab())
        async with driven(source) as d:
            await one(d, key)

    asyncio.run(run())


def test_every_action_has_a_key() -> None:
    bound = {(kind, action.partition("(")[0]) for kind, action, _ in own_bindings()}
    inherited = {
        (kind.__name__, action)
        for kind in own_classes()
        for parent in kind.__mro__[1:]
        for name, action in bound
        if name == parent.__name__
    }
    actions = {
        (kind.__name__, name.removeprefix("action_"))
        for kind in own_classes()
        for name in vars(kind)
        if name.startswith("action_")
    }
    assert not actions - bound - inherited
    assert len(actions) > 40


def test_no_case_is_left_over() -> None:
    assert not CASES.keys() - {(kind, action) for kind, action, _ in own_bindings()}


# --- tables


async def many(d: Driven) -> JobTable:
    views = tuple(f.JobView(job=f"job{i:03}", state="running") for i in range(200))
    await d.say(f.Snapshot(**AT, jobs=views))
    await d.press("2")
    return d.get(JobTable)


@case("Grid", "move(1)")
async def _(d: Driven, key: str) -> None:
    table = await many(d)
    await d.press(key, key)
    assert table.cursor_key == "job002"


@case("Grid", "move(-1)")
async def _(d: Driven, key: str) -> None:
    table = await many(d)
    await d.press("down", "down", key)
    assert table.cursor_key == "job001"


@case("Grid", "page(1)")
async def _(d: Driven, key: str) -> None:
    table = await many(d)
    await d.press(key)
    assert 20 < table.keys.index(table.cursor_key) < 40
    await d.press(key)
    assert str(table.cursor_key) in d.text
    assert "job000" not in d.text


@case("Grid", "page(-1)")
async def _(d: Driven, key: str) -> None:
    table = await many(d)
    await d.press("end", key)
    assert 150 < table.keys.index(table.cursor_key) < 180


@case("Grid", "edge(1)")
async def _(d: Driven, key: str) -> None:
    table = await many(d)
    await d.press(key)
    assert table.cursor_key == "job199"
    assert "job199" in d.text


@case("Grid", "edge(-1)")
async def _(d: Driven, key: str) -> None:
    table = await many(d)
    await d.press("end", key)
    assert table.cursor_key == "job000"
    assert "job000" in d.text


@case("Grid", "choose")
async def _(d: Driven, key: str) -> None:
    await d.press(key)
    await d.until(lambda: d.app.view.view == "adapter")
    assert d.app.view.about == "support"
    await d.press("escape", "shift+tab")
    assert isinstance(d.app.focused, NodeTable)
    await d.press("down", key)
    await d.until(lambda: d.app.view.view == "node")
    assert d.app.view.about == "intel"
    await d.press("5")
    table = d.get(EntryTable)
    await d.until(lambda: table.keys)
    await d.press(key)  # the newest is about a job
    await d.until(lambda: d.app.view.view == "adapter")
    assert d.app.view.about == "support"


@case("JobTable", "find")
async def _(d: Driven, key: str) -> None:
    await d.press(key, *"legal", "enter")
    table = d.get(JobTable)
    await d.until(lambda: list(table.keys) == ["legal-r64"])
    assert "filter: legal" in d.text
    assert d.app.focused is table
    await d.press("escape")
    assert len(table.keys) == 8


@case("FindBar", "clear")
async def _(d: Driven, key: str) -> None:
    await d.press("slash", *"legal")
    table = d.get(JobTable)
    await d.until(lambda: len(table.keys) == 1)
    await d.press(key)
    await d.until(lambda: len(table.keys) == 8)
    assert not d.get(FindBar).is_open
    assert d.app.focused is table


@case("JobTable", "pick_sort")
async def _(d: Driven, key: str) -> None:
    await d.press(key)
    await d.until(lambda: isinstance(d.app.screen, Pick))
    assert "learning_rate" in d.text or "lr" in d.text
    await d.press("home", "enter")
    await d.until(lambda: not isinstance(d.app.screen, Pick))
    table = d.get(JobTable)
    assert d.app.board.settings.sort == "adapter"
    assert list(table.keys) == sorted(table.keys, key=lambda one: str(one).casefold())


@case("Pick", "leave")
async def _(d: Driven, key: str) -> None:
    await d.press("s")
    await d.until(lambda: isinstance(d.app.screen, Pick))
    await d.press(key)
    await d.until(lambda: not isinstance(d.app.screen, Pick))
    assert d.app.board.settings.sort == "val"


@case("JobTable", "turn")
async def _(d: Driven, key: str) -> None:
    table = d.get(JobTable)
    first = [one for one in table.keys if d.app.board.state.jobs[one].best_val_loss is not None]
    await d.press(key)
    assert [one for one in table.keys][: len(first)] == first[::-1]
    assert "val loss▼" in d.text


@case("JobTable", "mark")
async def _(d: Driven, key: str) -> None:
    await d.press(key, key)
    assert d.app.board.marked == ["support", "legal-r64"]
    assert "2 marked" in d.text
    assert "●  1  support" in d.text
    assert "▲  2  legal-r64" in d.text
    await d.press("up", key)
    assert d.app.board.marked == ["support"]


@case("JobTable", "unmark")
async def _(d: Driven, key: str) -> None:
    await d.press("m", "m", key)
    assert d.app.board.marked == []
    assert "marked" not in d.text


@case("JobTable", "compare")
async def _(d: Driven, key: str) -> None:
    await d.press(key)
    assert "mark two" in d.notes
    assert d.app.view.view == "overview"
    await d.press("m", "m", key)
    await d.until(lambda: d.app.view.view == "adapter")
    assert "● support" in d.get(Chart).text
    assert "▲ legal-r64" in d.get(Chart).text
    facts = d.get(Lines, "facts").text
    assert "≠ r" in facts
    assert "≠ lr" not in facts


async def confirmed(d: Driven, key: str, action: str) -> None:
    """On the one under the cursor; the other answer does nothing; a failure is told."""
    await d.press(key)
    await d.until(lambda: isinstance(d.app.screen, Confirm))
    assert "support" in d.text
    await d.press("enter")  # the button that has the focus is No
    await d.until(lambda: not isinstance(d.app.screen, Confirm))
    assert d.source.acted == []
    d.source.failing = {"support": "the trainer is gone"}
    await d.press(key)
    await d.until(lambda: isinstance(d.app.screen, Confirm))
    await d.press("y")
    await d.until(lambda: "the trainer is gone" in d.notes)
    assert d.source.acted == [(action, ["support"])]
    assert f"could not {action} support" in d.notes


@case("JobTable", "act('stop')")
async def _(d: Driven, key: str) -> None:
    await confirmed(d, key, "stop")


@case("JobTable", "act('pause')")
async def _(d: Driven, key: str) -> None:
    await confirmed(d, key, "pause")


@case("JobTable", "act('resume')")
async def _(d: Driven, key: str) -> None:
    await paused_too(d)
    await d.press("m", "m", key)  # both marked, one of them runs
    await d.until(lambda: isinstance(d.app.screen, Confirm))
    assert "Resume 1 adapter?" in d.text
    await d.press("y")
    await d.until(lambda: d.source.acted == [("resume", ["support"])])


async def paused_too(d: Driven) -> None:
    await d.say(f.JobState(**AT, job="support", state="paused"))


@case("AdapterView", "act('stop')", "act('pause')")
async def _(d: Driven, key: str) -> None:
    await d.press("enter")
    await d.until(lambda: d.app.view.view == "adapter")
    await confirmed(d, key, {"x": "stop", "z": "pause"}[key])


@case("AdapterView", "act('resume')")
async def _(d: Driven, key: str) -> None:
    await d.press("enter")
    await d.until(lambda: d.app.view.view == "adapter")
    await d.press(key)
    await d.until(lambda: "nothing here can be resumed" in d.notes)
    await paused_too(d)
    await confirmed(d, key, "resume")


@case("AdapterView", "unmark")
async def _(d: Driven, key: str) -> None:
    await d.press("m", "m", "c")
    await d.until(lambda: "2 compared" in d.text)
    await d.press(key)
    await d.until(lambda: "support" in d.app.crumbs()[-1])
    assert d.app.board.marked == []
    assert "hyper-parameters" in d.text.lower()


@case("Confirm", "answer(True)")
async def _(d: Driven, key: str) -> None:
    await d.press("m", "m", "x")
    await d.until(lambda: isinstance(d.app.screen, Confirm))
    await d.press(key)
    await d.until(lambda: "stopped support, legal-r64" in d.notes)
    assert d.source.acted == [("stop", ["support", "legal-r64"])]


@case("Confirm", "answer(False)")
async def _(d: Driven, key: str) -> None:
    await d.press("x")
    await d.until(lambda: isinstance(d.app.screen, Confirm))
    await d.press(key)
    await d.until(lambda: not isinstance(d.app.screen, Confirm))
    assert d.source.acted == []


@case("JobTable", "copy")
async def _(d: Driven, key: str) -> None:
    await d.press("down", "down", key)
    await d.until(lambda: d.app.clipboard == "run[lr=1e-4]")
    assert "copied: run[lr=1e-4]" in d.notes


@case("NodeTable", "copy")
async def _(d: Driven, key: str) -> None:
    await d.press("shift+tab", "down", key)
    await d.until(lambda: d.app.clipboard == "intel")


@case("ReservationTable", "copy")
async def _(d: Driven, key: str) -> None:
    await d.press("3", key)
    await d.until(lambda: d.app.clipboard == "a1b2c3")


@case("ReservationTable", "release")
async def _(d: Driven, key: str) -> None:
    await d.press("3", key)
    await d.until(lambda: "PID 4321 of ana holds it" in d.notes)
    assert not isinstance(d.app.screen, Confirm)
    desktop = nodes()[0]
    assert desktop.info is not None
    held = [replace(row, lease=True) for row in desktop.info.reservations]
    view = replace(desktop, info=replace(desktop.info, reservations=held))
    await d.say(f.Snapshot(**AT, nodes=(view,)))
    await d.press(key)
    await d.until(lambda: isinstance(d.app.screen, Confirm))
    assert "gshare trainer of ana" in d.text
    assert "run others out of memory" in d.text
    d.source.failing = {"a1b2c3": "its process lives"}
    await d.press("y")
    await d.until(lambda: "its process lives" in d.notes)
    assert d.source.acted == [("release", ["a1b2c3"])]
    await d.press("down", key)  # what waits holds nothing
    await d.until(lambda: "holds nothing" in d.notes)
    assert d.get(ReservationTable).cursor_key == "d4e5f6"


@case("EntryTable", "find")
async def _(d: Driven, key: str) -> None:
    await d.press("5", key, *"kind:job overfit", "enter")
    table = d.get(EntryTable)
    await d.until(lambda: len(table.keys) == 1)
    assert "overfit at 520" in d.text


@case("EntryTable", "problems")
async def _(d: Driven, key: str) -> None:
    await d.press("5")
    table = d.get(EntryTable)
    before = len(table.keys)
    await d.press(key)
    assert 0 < len(table.keys) < before
    assert "overfit" not in d.text
    assert "SSH keepalive" in d.text
    await d.press(key)
    assert len(table.keys) == before


@case("EntryTable", "copy")
async def _(d: Driven, key: str) -> None:
    await d.press("5", "down", "down", key)
    await d.until(lambda: d.app.clipboard == "attic attic: SSH keepalive failed")


# --- texts


async def long_log(d: Driven) -> Lines:
    d.source.logs = "\n".join(f"line {i}" for i in range(300))
    await d.press("3")
    log = d.get(Lines, "log")
    await d.until(lambda: "line 299" in log.text)
    log.focus()
    await d.pilot.pause()
    return log


@case("Lines", "scroll_home")
async def _(d: Driven, key: str) -> None:
    log = await long_log(d)
    await d.press(key)
    await d.until(lambda: log.scroll_y == 0)
    assert "line 0" in d.text


@case("Lines", "scroll_end")
async def _(d: Driven, key: str) -> None:
    log = await long_log(d)
    await d.press("home")
    await d.until(lambda: log.scroll_y == 0)
    await d.press(key)
    await d.until(lambda: log.scroll_y == log.max_scroll_y)
    assert "line 299" in d.text


@case("Lines", "scroll_down")
async def _(d: Driven, key: str) -> None:
    log = await long_log(d)
    await d.press("home")
    await d.until(lambda: log.scroll_y == 0)
    await d.press(key)
    await d.until(lambda: log.scroll_y == 1)


@case("Lines", "scroll_up")
async def _(d: Driven, key: str) -> None:
    log = await long_log(d)
    await d.press("end")
    await d.until(lambda: log.scroll_y == log.max_scroll_y)
    await d.press(key)
    await d.until(lambda: log.scroll_y == log.max_scroll_y - 1)


@case("NodeView", "find")
async def _(d: Driven, key: str) -> None:
    await d.press("3")
    log = d.get(Lines, "log")
    await d.until(lambda: "step 2" in log.text)
    await d.press(key, *"slow", "enter")
    await d.until(lambda: log.text == "WARNING: slow disk")


@case("AdapterView", "find")
async def _(d: Driven, key: str) -> None:
    await d.press("enter")
    await d.until(lambda: d.app.view.view == "adapter")
    log = d.get(Lines, "log")
    await d.until(lambda: "step 2" in log.text)
    await d.press(key, *"slow", "enter")
    await d.until(lambda: log.text == "WARNING: slow disk")
    assert "find: slow" in d.text


# --- screens


@case("NodeView", "next(1)", "next(-1)")
async def _(d: Driven, key: str) -> None:
    await d.press("3", key)
    await d.until(lambda: d.app.view.about == ("intel" if key == "n" else "attic"))
    await d.until(lambda: f"log {d.app.view.about}" in d.source.asked)
    assert "nothing is reserved" in d.text or "nothing is known of them" in d.text


@case("AdapterView", "next(1)", "next(-1)")
async def _(d: Driven, key: str) -> None:
    await d.press("down", "enter")
    await d.until(lambda: d.app.view.about == "legal-r64")
    await d.press(key)
    wanted = "run[lr=1e-4]" if key == "n" else "support"
    await d.until(lambda: d.app.view.about == wanted)
    assert wanted in d.text


@case("AdapterView", "log_scale")
async def _(d: Driven, key: str) -> None:
    await d.press("enter")
    await d.until(lambda: d.app.view.view == "adapter")
    linear = d.get(Chart).text
    await d.press(key)
    assert "log scale" in d.get(Chart).text
    assert d.get(Chart).text != linear
    await d.press(key)
    assert d.get(Chart).text == linear


@case("AdapterView", "details")
async def _(d: Driven, key: str) -> None:
    await d.press("enter")
    await d.until(lambda: "Hyper-parameters" in d.text)
    await d.press(key)
    await d.until(lambda: "Hyper-parameters" not in d.text)
    await d.press(key)
    await d.until(lambda: "Hyper-parameters" in d.text)


@case("AdapterView", "mark")
async def _(d: Driven, key: str) -> None:
    await d.press("enter")
    await d.until(lambda: d.app.view.view == "adapter")
    await d.press(key)
    assert d.app.board.marked == ["support"]


@case("AdapterView", "copy")
async def _(d: Driven, key: str) -> None:
    await d.press("enter")
    await d.until(lambda: d.app.view.view == "adapter")
    await d.press(key)
    await d.until(lambda: d.app.clipboard == "support")


@case("Help", "leave")
async def _(d: Driven, key: str) -> None:
    await d.press("question_mark")
    await d.until(lambda: isinstance(d.app.screen, Help))
    await d.press(key)
    await d.until(lambda: not isinstance(d.app.screen, Help))
    assert d.app.is_running


# --- the app


@case("Dashboard", *(f"go('{view}')" for view in ("overview", "leaderboard", "node", "adapter", "events")))
async def _(d: Driven, key: str) -> None:
    views = ("overview", "leaderboard", "node", "adapter", "events")
    await d.press("5" if key != "5" else "2", key)
    assert d.app.view.view == views[int(key) - 1]
    assert d.app.focused is not None


@case("Dashboard", "back")
async def _(d: Driven, key: str) -> None:
    await d.press("enter")
    await d.until(lambda: d.app.view.view == "adapter")
    await d.press("3")
    assert "overview › support › desktop" in d.text
    await d.press(key)
    assert d.app.view.view == "adapter"
    await d.press(key, key)
    assert d.app.view.view == "overview"
    assert d.app.is_running


@case("Dashboard", "pause")
async def _(d: Driven, key: str) -> None:
    await d.press(key)
    assert "‖ paused" in d.text.splitlines()[0]
    change = f.Evaluation(**AT, job="legal-r64", step=650, val_loss=0.5, best=True)
    await d.say(change)
    assert "1.310" in d.text
    assert "0.500" not in d.text
    assert "updates since: 1" in d.text
    await d.press("2")  # other screens stand still too
    assert "1.310" in d.text
    assert "0.500" not in d.text
    assert d.app.board.state.jobs["legal-r64"].best_val_loss == 0.5  # it was taken in
    await d.press(key)
    await d.until(lambda: "0.500" in d.text)
    assert "‖ paused" not in d.text.splitlines()[0]


@case("Dashboard", "times")
async def _(d: Driven, key: str) -> None:
    await d.press("5")
    assert "5 s ago" in d.text
    await d.press(key)
    assert "5 s ago" not in d.text
    assert ":00:00" in d.text


@case("Dashboard", "next_theme")
async def _(d: Driven, key: str) -> None:
    seen = [d.app.theme]
    for _ in range(4):
        await d.press(key)
        seen.append(d.app.theme)
    assert len(set(seen)) == 4
    assert seen[0] == seen[-1]


@case("Dashboard", "picture")
async def _(d: Driven, key: str) -> None:
    await d.press(key)
    await d.until(lambda: "written" in d.notes)
    (picture,) = Path.cwd().glob("gshare-overview-*.svg")
    assert "legal-r64" in picture.read_text()


@case("Dashboard", "retry")
async def _(d: Driven, key: str) -> None:
    await d.press(key)
    assert d.source.acted == []  # it is live
    await d.say(live(state="lost", since=NOW, retry_in=60.0, text="connection refused"))
    await d.press(key)
    await d.until(lambda: d.source.acted == [("retry", [])])


@case("Dashboard", "seek(-1)", "seek(1)")
async def _(d: Driven, key: str) -> None:
    assert isinstance(d.source, FakeReplay)
    await d.press(key)
    assert d.source.position == NOW + (30 if key == "left_square_bracket" else 90)


@case("Dashboard", "speed(-1)", "speed(1)")
async def _(d: Driven, key: str) -> None:
    assert isinstance(d.source, FakeReplay)
    await d.press(key)
    assert d.source.speed == (0.5 if key == "left_curly_bracket" else 2.0)
    assert f"×{d.source.speed:g}" in d.text


@case("Dashboard", "help")
async def _(d: Driven, key: str) -> None:
    await d.press(key)
    await d.until(lambda: isinstance(d.app.screen, Help))
    told = d.get(Lines, "help").text
    here = [one for one in own_bindings() if one[0] in ("Dashboard", "JobTable", "Grid")]
    assert len(here) > 25
    for word in ("Filter", "Mark", "Stop", "Quit", "Twice", "lr>=1e-4"):
        assert (word in told) == (word != "Twice"), word  # this is no replay


@case("Dashboard", "leave")
async def _(d: Driven, key: str) -> None:
    await d.press(key)
    await d.until(lambda: d.app._exit)
    assert d.app.return_code == 0


def test_what_a_replay_answers_besides_pause() -> None:
    async def run() -> None:
        source = FakeReplay(lab())
        async with driven(source) as d:
            await d.press("p")
            assert source.paused
            assert d.app.board.paused_at is None
            assert "‖ 1:00 / 10:00" in d.text
            await d.press("p")
            assert not source.paused

    asyncio.run(run())


def test_the_palette_does_what_the_keys_do() -> None:
    async def run() -> None:
        async with driven() as d:
            names = [one.title for one in d.app.get_system_commands(d.app.screen)]
            assert {"Events", "Sort", "Mark", "Freeze", "Choose a theme", "Quit"} <= set(names)
            assert not {"Screenshot"} - set(names)
            await d.press("ctrl+p")
            await d.until(lambda: d.app.screen.query(Input))
            told = [(one.title, one.help) for one in d.app.get_system_commands(d.app.screen)]
            assert ("Stop job", "Overview: jobs, key x") in told  # of what lies below the palette too
            assert ("Help", "Everywhere, key ?") in told
            await d.press(*"leaderboard", "enter")
            await d.until(lambda: d.app.view.view == "leaderboard")

    asyncio.run(run())


def test_read_only_and_sources_that_cannot() -> None:
    async def run() -> None:
        async with driven(read_only=True) as d:
            await d.press("x")
            await d.until(lambda: "--read-only" in d.notes)
            assert "read-only" in d.text.splitlines()[0]
            assert not isinstance(d.app.screen, Confirm)
        async with driven(ScriptedSource(lab(), can=frozenset())) as d:
            await d.press("x")
            await d.until(lambda: "cannot stop" in d.notes)
            assert not isinstance(d.app.screen, Confirm)

    asyncio.run(run())


def test_an_action_that_cannot_be_tried_says_why() -> None:
    async def run() -> None:
        async with driven() as d:
            d.source.refusing = "the coordinator does not answer"
            await d.press("x")
            await d.until(lambda: isinstance(d.app.screen, Confirm))
            await d.press("y")
            await d.until(lambda: "could not stop support: the coordinator does not answer" in d.notes)

    asyncio.run(run())


def test_the_base_of_sources_refuses_politely() -> None:
    with pytest.raises(Exception, match="cannot stop"):
        asyncio.run(SourceBase().act("stop", ["a"]))


def test_a_click_sorts_selects_and_opens() -> None:
    async def run() -> None:
        async with driven() as d:
            await d.press("2")
            table = d.get(JobTable)
            line = next(text for text in d.text.splitlines() if "val loss" in text and "train" in text)
            await d.pilot.click(Grid, offset=(line.index("train") + 1, 1))
            await d.until(lambda: d.app.board.settings.sort == "train")
            first = table.keys[0]
            assert first == "lr1e-3"  # 0.9
            row = next(i for i, text in enumerate(d.text.splitlines()) if "legal-r64" in text)
            top = table.region.y
            await d.pilot.click(Grid, offset=(10, row - top))
            assert table.cursor_key == "legal-r64"
            await d.pilot.click(Grid, offset=(10, row - top), times=2)
            await d.until(lambda: d.app.view.view == "adapter")
            assert d.app.view.about == "legal-r64"
            tabs = d.text.splitlines()[1]
            await d.pilot.click("Tabs", offset=(tabs.index("5 events"), 0))
            await d.until(lambda: d.app.view.view == "events")

    asyncio.run(run())
