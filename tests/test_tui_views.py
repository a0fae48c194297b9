"""What the screens show: unknown, stale and hostile values, sizes from too small to wide, 2,000 rows."""

from __future__ import annotations

import asyncio
import math
import os
from pathlib import Path

import pytest
from dashboard import driven
from gshare.agent.errors import GshareError, UsageError
from gshare.tui import frames as f
from gshare.tui import settings as settings_file
from gshare.tui.app import SOON_SECONDS, make_app
from gshare.tui.screens import adapter
from gshare.tui.settings import Settings
from gshare.tui.themes import MONO, NAMES, PALETTES, THEMES, palette_of
from gshare.tui.widgets.job_table import JobTable
from gshare.tui.widgets.lines import Lines
from rich.style import Style
from scripted_source import AT, NOW, ScriptedSource, lab, live
from textual.color import Color


@pytest.fixture(autouse=True)
def _colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_names_are_never_markup_and_never_obeyed() -> None:
    async def run() -> None:
        async with driven() as d:
            for _ in range(2):  # in the tables, then on its own page and in dialogs
                assert "run[lr=1e-4]" in d.text
                assert r"[/]x\x1b[2J" in d.text
                assert "\x1b" not in d.text
                await d.press("2")
            table = d.get(JobTable)
            table.select("[/]x\x1b[2J")
            await d.press("m", "up", "x")
            assert r"[/]x\x1b[2J" in d.text
            await d.press("n", "slash", *"[/]x", "enter")
            await d.until(lambda: "filter: [/]x" in d.text)
            await d.press("enter")
            assert r"leaderboard › [/]x\x1b[2J" in d.text
            await d.press("5")
            assert r"[red]not markup[/] \x1b[2J" in d.text
            assert "\x1b" not in d.text

    asyncio.run(run())


def test_unknown_is_a_dash_and_nan_is_last() -> None:
    async def run() -> None:
        async with driven() as d:
            await d.press("2")
            table = d.get(JobTable)
            assert list(table.keys)[:4] == ["support", "legal-r64", "run[lr=1e-4]", "lr1e-3"]
            unknown = next(line for line in d.text.splitlines() if " unknown " in line)
            assert " 0 " not in unknown
            assert unknown.count("—") >= 5
            assert "non-finite at 31" in d.text
            await d.say(f.Evaluation(**AT, job="support", step=650, val_loss=math.nan))
            table.sort_by("last_val")
            assert table.keys[0] == "legal-r64"
            await d.press("S")  # the other way round, what is no number stays last
            assert table.keys[0] == "legal-r64"

    asyncio.run(run())


def test_an_empty_cluster_and_a_source_that_says_nothing() -> None:
    async def run() -> None:
        found = f.Found(**AT, kind="coordinator", title="cluster lab")
        empty = [found, live(), f.Snapshot(**AT, nodes=(), jobs=())]
        for frames, told in ((empty, "no adapters yet"), ([], "nothing is known yet")):
            async with driven(ScriptedSource(frames)) as d:
                assert told in d.text
                for key in "2345":
                    await d.press(key, "enter", "y", "m", "x")
                    await d.press("escape")
                assert d.app.is_running
                assert d.source.acted == []

    asyncio.run(run())


def test_a_lost_source_greys_and_dates_what_is_shown() -> None:
    async def run() -> None:
        async with driven(clock=lambda: NOW + 42) as d:
            table = d.get(JobTable)
            row = list(table.keys).index("support") + 1
            fresh = {segment.style.color for segment in table.render_line(row) if segment.text.strip()}
            lost = live(
                state="lost", since=NOW + 2, received=NOW + 2, retry_in=60.0, text="connection refused"
            )
            await d.say(lost)
            banner = d.text.splitlines()[2]
            for part in ("lost for 40 s", "connection refused", "42 s old", "retry in 20 s (r: now)"):
                assert part in banner
            stale = {segment.style.color for segment in table.render_line(row) if segment.text.strip()}
            assert len(fresh) > 1
            assert len(stale) == 1
            await d.say(live())
            assert "lost for" not in d.text
            again = {segment.style.color for segment in table.render_line(row) if segment.text.strip()}
            assert again == fresh

    asyncio.run(run())


def test_a_node_that_is_away_greys_its_own_rows_alone() -> None:
    async def run() -> None:
        async with driven(size=(200, 40)) as d:
            table = d.get(JobTable)
            assert table._row("on-attic").old
            assert not table._row("support").old
            assert not table._row("lr1").old
            attic = next(line for line in d.text.splitlines() if "attic" in line)
            assert "lost 4 m" in attic
            assert "SSH keepalive failed" in attic

    asyncio.run(run())


def test_the_memory_bar_has_four_shapes() -> None:
    async def run() -> None:
        async with driven() as d:
            desktop = next(line for line in d.text.splitlines() if "RTX 4090" in line)
            for part in ("█", "▒", "░", "·", "16.0 / 24.0", "97 %", "62°C"):
                assert part in desktop
            intel = next(line for line in d.text.splitlines() if "intel" in line)
            assert "0 °C" not in intel
            assert "— " in intel  # no temperature is known

    asyncio.run(run())


def test_the_node_page_says_why_each_waits() -> None:
    async def run() -> None:
        async with driven(size=(160, 40)) as d:
            await d.press("3")
            for part in ("1 held, 1 waiting", "support 5.9  legal-r64 4.9", "ana PID 4321", "61 m ago"):
                assert part in d.text
            assert "needs 9.0 GiB; 8.0 GiB free by ledger, 2.0 GiB used outside it by PID 4411" in d.text
            await d.until(lambda: "WARNING: slow disk" in d.text)

    asyncio.run(run())


def test_the_adapter_page_has_everything_of_it() -> None:
    async def run() -> None:
        async with driven(size=(160, 60)) as d:
            await d.press("enter")
            await d.until(lambda: "best/adapter_model.safetensors" in d.text)
            for part in (
                "validation",
                "★ best",
                "1.204 at 600",
                "alpha      32",
                "9.0 MiB",
                "States",
                "step 2",
            ):
                assert part in d.text
            assert "history support" in d.source.asked

    asyncio.run(run())


def test_the_adapter_page_opened_before_anything_is_known_asks_for_the_curve_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter, "LOG_SECONDS", 0.05)

    async def run() -> None:
        async with driven(ScriptedSource([]), size=(160, 60)) as d:
            await d.press("4")
            await d.say(*lab())
            await d.until(lambda: "history support" in d.source.asked)
            await d.until(lambda: d.source.asked.count("log support") > 2)
            assert d.source.asked.count("history support") == 1

    asyncio.run(run())


@pytest.mark.parametrize("size", [(20, 5), (39, 30), (60, 18), (80, 24), (100, 30), (300, 90)])
def test_every_screen_at_every_size(size: tuple[int, int]) -> None:
    async def run() -> None:
        async with driven(size=size) as d:
            small = size[0] < 40 or size[1] < 10
            for key in "12345":
                await d.press(key)
                assert ("is too small" in d.text) == small
                assert ("80×24 or more" in d.text) == (not small and (size[0] < 80 or size[1] < 24))
                assert all(len(line) <= size[0] for line in d.text.splitlines())
            await d.pilot.resize_terminal(120, 40)
            await d.press("2")
            await d.until(lambda: "legal-r64" in d.text and "too small" not in d.text)
            await d.until(lambda: "80×24 or more" not in d.text)

    asyncio.run(run())


def test_wider_screens_show_more_columns() -> None:
    async def run() -> None:
        seen: list[int] = []
        for width in (60, 80, 100, 160, 220):
            async with driven(size=(width, 30)) as d:
                await d.press("2")
                seen.append(len(d.get(JobTable)._columns))
                assert "val loss" in d.text
                text = d.text
        assert seen == sorted(seen)
        assert seen[0] < seen[-1]
        assert "overfit at 520" in text  # why it ended has a column now
        assert " r " in text  # and the parameter in which they differ

    asyncio.run(run())


def test_two_thousand_rows_render_only_what_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gshare.tui.widgets.job_table.ORDER_SECONDS", 0.0)
    monkeypatch.setattr("gshare.tui.app.TICK_SECONDS", 3600.0)  # each tick would ask for the rows once more

    async def run() -> None:
        views = tuple(
            f.JobView(job=f"job{i:04}", state="running", best_val_loss=float(i)) for i in range(2000)
        )
        async with driven(ScriptedSource([live(), f.Snapshot(**AT, jobs=views)])) as d:
            await d.press("2")
            table = d.get(JobTable)
            asked: list[object] = []
            row = table._row_of
            monkeypatch.setattr(table, "_row_of", lambda key: asked.append(key) or row(key))
            samples = tuple(
                f.Sample(job=f"job{i:04}", step=5, total_steps=9, loss=1.0, time=NOW) for i in range(2000)
            )
            await d.say(f.Samples(**AT, samples=samples))
            assert 20 < len(asked) < 100
            await d.press("end")
            await d.until(lambda: "job1999" in d.text)
            await d.say(f.Evaluation(**AT, job="job1999", step=9, val_loss=0.5, best=True))
            assert table.cursor_key == "job1999"  # it went up to the second place, and the cursor with it
            assert table.keys.index("job1999") == 1

    asyncio.run(run())


def test_rows_keep_their_places_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with driven() as d:
            table = d.get(JobTable)
            best = f.Evaluation(**AT, job="legal-r64", step=650, val_loss=0.5, best=True)
            monkeypatch.setattr("gshare.tui.widgets.job_table.ORDER_SECONDS", 3600.0)
            await d.say(best)
            assert list(table.keys)[:2] == ["support", "legal-r64"]
            assert "0.500" in d.text  # the value is the present one
            await d.say(f.JobState(**AT, job="new", state="running"))
            assert list(table.keys)[:2] == ["legal-r64", "support"]

    asyncio.run(run())


def test_only_cells_that_changed_are_repainted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with driven() as d:
            await d.press("2")
            table = d.get(JobTable)
            marked: list[tuple[int, int, int]] = []
            monkeypatch.setattr(table, "_mark", lambda x, y, width: marked.append((x, y, width)))
            table.show()
            assert marked == []
            sample = f.Sample(job="support", step=613, total_steps=1200, loss=1.234, time=NOW)
            await d.say(f.Samples(**AT, samples=(sample,)))
            assert marked
            assert {y for _, y, _ in marked} == {1}
            assert sum(width for _, _, width in marked) < table.size.width / 2

    asyncio.run(run())


def test_a_changed_state_is_shown_without_waiting_for_the_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gshare.tui.app.TICK_SECONDS", 3600.0)

    async def run() -> None:
        async with driven() as d:
            assert SOON_SECONDS <= 0.1
            d.source.say(f.JobState(**AT, job="support", state="paused"))
            await d.until(lambda: "2 paused" in d.text)
            sample = f.Sample(job="legal-r64", step=600, total_steps=1200, loss=1.777, time=NOW)
            d.source.say(f.Samples(**AT, samples=(sample,)))
            await d.pilot.pause(0.3)
            assert "1.777" not in d.text  # measures wait for the tick

    asyncio.run(run())


def test_filters_say_what_is_wrong_and_keep_the_last_good_one() -> None:
    async def run() -> None:
        async with driven() as d:
            await d.press("2", "slash", *"val<1.35")
            table = d.get(JobTable)
            await d.until(lambda: list(table.keys) == ["support", "legal-r64"])
            await d.press(*" foo<3")
            await d.until(lambda: "no column 'foo'" in d.text)
            assert list(table.keys) == []  # of "val<1.35 foo", a word that occurs nowhere
            await d.press("escape")
            await d.until(lambda: len(table.keys) == 8)

    asyncio.run(run())


def test_settings_are_remembered_and_damage_is_survived(tmp_path: Path) -> None:
    path = tmp_path / "state" / "tui.json"

    async def run() -> None:
        async with driven(settings_path=path) as d:
            await d.press("2", "T", "t", "S")
            assert d.app.remember() == ""

    asyncio.run(run())
    kept, note = settings_file.load(path)
    assert (kept.view, kept.theme, kept.relative, kept.descending) == ("leaderboard", NAMES[1], False, True)
    assert note == ""
    path.write_text("{ not json")
    kept, note = settings_file.load(path)
    assert kept == Settings()
    assert str(path) in note
    path.write_text('{"a":' * 5000)
    assert "recursion" in settings_file.load(path)[1]
    (tmp_path / "file").write_text("")
    assert "file" in settings_file.save(tmp_path / "file" / "tui.json", kept)


def test_a_source_that_gives_up_ends_the_dashboard_with_its_error() -> None:
    class Hopeless(ScriptedSource):
        async def run(self, emit: object) -> None:
            raise UsageError("speaks another protocol")

    async def run() -> GshareError | None:
        app = make_app(Hopeless(), clock=lambda: NOW)
        async with app.run_test() as pilot:
            for _ in range(500):
                if app.failure is not None:
                    break
                await pilot.pause(0.02)
        assert app.return_code == 2
        return app.failure

    assert str(asyncio.run(run())) == "speaks another protocol"


# --- themes


def contrast(one: Color, other: Color) -> float:
    """WCAG's ratio."""

    def light(color: Color) -> float:
        parts = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in color.normalized]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [theme for theme in THEMES if theme.name != "gshare-mono"])
def test_every_role_is_readable_on_every_background(theme: object) -> None:
    palette = PALETTES[theme.name]  # type: ignore[attr-defined]
    grounds = [Color.parse(getattr(theme, name)) for name in ("background", "surface", "panel")]
    cursor = palette["cursor"].bgcolor
    assert cursor is not None
    grounds.append(Color.from_rich_color(cursor))
    for role, style in palette.styles.items():
        if role == "cursor":
            continue
        assert style.color is not None, role
        for ground in grounds:
            ratio = contrast(Color.from_rich_color(style.color), ground)
            assert ratio >= (3.0 if role in ("dim", "stale") or role.startswith("bar.") else 4.0), (
                role,
                ratio,
            )
    assert contrast(Color.parse("#222222"), grounds[0]) < 4.5 or theme.name == "gshare-light"  # type: ignore[attr-defined]


@pytest.mark.parametrize("theme", NAMES)
def test_without_colour_every_theme_is_readable(theme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def run() -> None:
        async with driven(settings=Settings(theme=theme)) as d:
            assert d.app.board.palette is MONO is palette_of(theme, True)
            for key in ("2", "4", "question_mark"):
                await d.press(key)
                strips = [
                    strip.apply_filter(one, Color.parse("black"))
                    for strip in d.app.screen._compositor.render_strips()
                    for one in [d.app._filters[-1]]
                ]
                styles = [segment.style or Style() for strip in strips for segment in strip]
                assert styles
                colours = [colour for style in styles for colour in (style.color, style.bgcolor)]
                assert all(colour is None or colour.is_default for colour in colours)
            await d.press("escape", "2")
            table = d.get(JobTable)
            assert any((segment.style or Style()).reverse for segment in table.render_line(1))
            assert not any((segment.style or Style()).reverse for segment in table.render_line(2))

    asyncio.run(run())
    assert os.environ["NO_COLOR"] == "1"


def test_details_fill_a_narrow_screen() -> None:
    async def run() -> None:
        async with driven(size=(80, 24)) as d:
            await d.press("enter")
            await d.until(lambda: "validation" in d.text)
            assert "val best" not in d.text
            await d.press("d")
            await d.until(lambda: "val best" in d.text)
            assert "validation" not in d.text
            assert d.get(Lines, "facts").text.startswith("● running")

    asyncio.run(run())
