"""What following a real cluster from submission to leaderboard showed to be wrong, each mended."""

from __future__ import annotations

import asyncio

import pytest
from dashboard import Driven, driven
from gshare.tui import frames as f
from gshare.tui.actions import can_be
from gshare.tui.app import Dashboard
from gshare.tui.model import State
from gshare.tui.screens.help import help_lines
from gshare.tui.screens.pick import Pick
from gshare.tui.widgets.tabs import VIEWS, Tabs
from scripted_source import AT, NOW, ScriptedSource, lab, live


def test_jobs_that_start_are_not_counted_as_queued() -> None:
    async def run() -> None:
        async with driven(ScriptedSource([live()])) as d:
            await d.say(
                f.JobState(**AT, job="a", state="starting"), f.JobState(**AT, job="b", state="queued")
            )
            assert "1 starting 1 queued" in d.text.splitlines()[0]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("action", "states"),
    [
        ("stop", {"waiting", "queued", "starting", "running", "paused"}),
        ("pause", {"waiting", "queued", "starting", "running"}),
        ("resume", {"paused", "stopped", "failed"}),
    ],
)
def test_what_an_action_means_something_to(action: str, states: set[str]) -> None:
    every = {*f.ENDED, "waiting", "queued", "starting", "running", "paused", "publishing", "placing"}
    assert {state for state in every if can_be(action, state)} == states  # type: ignore[arg-type]


def test_esc_leads_back_to_the_events_from_where_a_line_was_opened() -> None:
    async def run() -> None:
        async with driven() as d:
            await d.press("enter", "5", "/", *"overfit", "enter", "enter")
            await d.until(lambda: d.app.view.view == "adapter")
            assert [view for view, _ in d.app.crumbs()] == ["overview", "events", "adapter"]
            await d.press("escape")
            assert d.app.view.view == "events"
            await d.press("1")  # home is home
            assert [view for view, _ in d.app.crumbs()] == ["overview"]

    asyncio.run(run())


def test_tabs_without_room_keep_their_numbers_and_are_clicked() -> None:
    async def run() -> None:
        async with driven(size=(50, 20)) as d:
            line = d.text.splitlines()[1]
            assert line.rstrip() == " 1 overview  2  3  4  5"
            await d.pilot.click(Tabs, offset=(line.index("5"), 0))
            await d.until(lambda: d.app.view.view == "events")
            assert " 5 events " in d.text.splitlines()[1]

    asyncio.run(run())


def widest(d: Driven, app: Dashboard) -> int:
    return max(sum(len(text) for text, _ in line) for line in help_lines(app._bindings_here()))


@pytest.mark.parametrize("view", VIEWS)
def test_the_help_fits_its_box(view: str) -> None:
    async def run() -> None:
        async with driven() as d:
            await d.press(str(VIEWS.index(view) + 1))
            assert 40 < widest(d, d.app) <= 72  # of a box of 78 with border, padding and scrollbar

    asyncio.run(run())


def test_names_of_parameters_are_whole_where_two_begin_alike() -> None:
    async def run() -> None:
        async with driven(size=(160, 50)) as d:
            hyper: dict[str, f.HyperValue] = {
                "adam_beta1": 0.9,
                "adam_beta2": 0.999,
                "layers_to_transform": None,
            }
            jobs = [f.JobView(job=name, state="running", step=3, hyper=hyper) for name in ("x", "y")]
            await d.say(f.Snapshot(**AT, jobs=tuple(jobs)))
            await d.press("m", "m", "c")
            await d.until(lambda: "2 compared" in d.text)
            for name in hyper:
                assert f" {name} " in d.text
            await d.press("M")
            values = [
                line for line in d.text.splitlines() if "layers_to_transform" in line or "adam_beta" in line
            ]
            ends = {line.rindex(value) for line in values for value in ("0.9", "0.999", "—") if value in line}
            assert len(values) == 3
            assert len(ends) == 1  # one below the other

    asyncio.run(run())


def test_the_list_to_sort_by_has_one_border_and_what_differs_first() -> None:
    async def run() -> None:
        async with driven() as d:
            await d.press("s")
            await d.until(lambda: isinstance(d.app.screen, Pick))
            assert "▔" not in d.text
            names = [name for name, _ in d.app.screen._choices]  # type: ignore[attr-defined]
            assert names.index("r") < names.index("learning_rate")  # in the lab only r differs

    asyncio.run(run())


def test_a_state_that_two_say_is_told_once() -> None:
    state = State()
    for _ in range(2):
        state.apply(f.JobState(**AT, job="a", state="running"))
    state.apply(f.JobState(**AT, job="a", state="paused"))
    state.apply(f.JobState(**AT, job="a", state="running"))
    assert [entry.text for entry in state.entries] == ["running", "paused", "running"]


def test_a_loss_is_told_once_and_another_reason_again() -> None:
    state = State()
    state.apply(live())
    for text in ("gone", "gone", "refused"):
        for name in ("lost", "connecting"):
            state.apply(live(state=name, text=text))
    state.apply(live())
    told = [entry.text for entry in state.entries]
    assert told == ["live", "lost: gone", "lost: refused", "live"]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/out/a/checkpoint-7", "saved a checkpoint of step 7"),
        ("/out/a/best", "saved its best adapter, of step 7"),
        ("/out/a", "saved its adapter, of step 7"),
        ("", "saved a checkpoint of step 7"),
    ],
)
def test_what_was_saved_is_named(path: str, told: str) -> None:
    state = State()
    state.apply(f.Checkpoint(**AT, job="a", step=7, path=path))
    assert state.entries[-1].text == told


def test_a_long_state_of_a_node_has_room_on_a_wide_screen() -> None:
    async def run() -> None:
        async with driven(ScriptedSource([live()]), size=(150, 30)) as d:
            node = f.NodeView(node="b", state="unreachable", reason="the agent hung up", seen_s=0.0)
            await d.say(f.Snapshot(**AT, nodes=(node,)))
            assert "○ unreachable 5 s" in d.text

    asyncio.run(run())


def test_the_wait_for_the_next_try_counts_from_that_try() -> None:
    async def run() -> None:
        source = ScriptedSource([*lab(), live(state="lost", since=NOW - 60, retry_in=9.0, text="refused")])
        async with driven(source) as d:
            assert "lost for 65 s: refused" in d.text
            assert "retry in 4 s" in d.text

    asyncio.run(run())
