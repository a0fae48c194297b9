"""Values, bars, plots, filters and logs of the dashboard, without a screen."""

from __future__ import annotations

import contextlib
import doctest
import math

import pytest
from gshare.agent.node.protocol import GpuInfo
from gshare.tui import bars, curve, show
from gshare.tui.columns import FIELDS, differing, find_field, ordered
from gshare.tui.filters import BadFilter, entry_filter, job_filter
from gshare.tui.frames import Entry
from gshare.tui.freeze import frozen
from gshare.tui.logs import log_lines
from gshare.tui.model import State
from gshare.tui.plot import Series, plot
from gshare.tui.rows import Job
from hypothesis import given
from hypothesis import strategies as st
from scripted_source import lab
from watching import apply_all


@pytest.mark.parametrize("module", [show, bars, curve])
def test_examples_in_docstrings(module: object) -> None:
    found = doctest.testmod(module)  # type: ignore[arg-type]
    assert found.attempted
    assert not found.failed


@given(st.text())
def test_cleaned_text_is_printable_and_one_line(text: str) -> None:
    assert show.clean(text).isprintable()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "—"),
        (math.nan, "NaN"),
        (math.inf, "inf"),
        (0.0, "0.000"),
        (1.23456, "1.235"),
        (1e-5, "1.00e-05"),
    ],
)
def test_a_loss(value: float | None, told: str) -> None:
    assert show.loss(value) == told


def test_times() -> None:
    assert show.duration(None) == show.age(math.nan) == show.UNKNOWN
    assert [show.duration(s) for s in (7, 750, 3723, 48360, 273600)] == [
        "0:07",
        "12:30",
        "1:02:03",
        "13h26",
        "3d 4h",
    ]
    assert [show.age(s) for s in (4, 99.9, 100, 7200, 2e5)] == ["4 s", "99 s", "1 m", "2 h", "2 d"]
    assert show.moment(90.0, 100.0, relative=True) == "10 s ago"


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("when", [None, math.nan, math.inf, -math.inf, 1e300, -1e300])
def test_what_is_no_time_is_unknown(when: float | None, relative: bool) -> None:
    assert show.moment(when, 100.0, relative=relative) == show.UNKNOWN
    if when is not None:  # a replay's clock is what its frames say
        assert show.moment(100.0, when, relative=relative) == show.UNKNOWN
    assert show.moment(90.0, 100.0, relative=relative) != show.UNKNOWN


# --- bars


def gpu(**parts: int | None) -> GpuInfo:
    return GpuInfo(uuid="", name="", memory_type="discrete", **parts)  # type: ignore[arg-type]


@given(
    total=st.integers(1, 10**6),
    parts=st.tuples(*(st.one_of(st.none(), st.integers(0, 2 * 10**6)) for _ in range(5))),
    width=st.integers(1, 60),
)
def test_a_bar_is_as_wide_as_asked(total: int, parts: tuple[int | None, ...], width: int) -> None:
    names = ("used_mb", "reserved_mb", "peak_mb", "outside_mb", "free_mb")
    bar = show.joined(bars.vram_bar(gpu(total_mb=total, **dict(zip(names, parts, strict=True))), width))
    assert len(bar) == width


def test_unknown_memory_is_not_free() -> None:
    assert show.joined(bars.vram_bar(gpu(total_mb=None), 4)) == "????"
    assert show.joined(bars.vram_bar(gpu(total_mb=100, reserved_mb=50, peak_mb=None), 4)) == "▒▒??"
    assert show.joined(bars.vram_bar(gpu(total_mb=100, reserved_mb=0, outside_mb=0), 4)) == "····"
    assert show.joined(bars.vram_bar(gpu(total_mb=100, reserved_mb=1, peak_mb=1, outside_mb=0), 4)) == "█···"


def test_a_sparkline() -> None:
    assert bars.sparkline([3.0, 2.0, math.nan, 1.0], 4) == "█▅×▁"
    assert bars.sparkline([], 4) == ""
    assert len(bars.sparkline([1.0] * 9, 4)) == 4


# --- plots

POINTS = st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e6, 1e6) | st.just(math.nan)), max_size=20)


@given(points=POINTS, width=st.integers(1, 90), height=st.integers(1, 30), log=st.booleans())
def test_a_plot_fits_and_never_fails(
    points: list[tuple[int, float]], width: int, height: int, log: bool
) -> None:
    lines = plot([Series(sorted(points, key=lambda p: p[0]), "s0", "●")], width, height, log=log)
    assert len(lines) in (0, height)
    assert all(len(show.joined(line)) == width for line in lines)


ANY = st.floats() | st.sampled_from(
    [1.7e308, -1.7e308, 5e-324, 1e-323, 1.0, math.nextafter(1.0, 2.0), 1e-300]
)
STEP = st.integers(0, 2**32 - 1)


@given(
    points=st.lists(st.tuples(STEP, ANY), min_size=1, max_size=4),
    best=st.tuples(STEP | st.just(10**400), ANY),
    log=st.booleans(),
)
def test_no_loss_is_too_far_out_for_a_plot(
    points: list[tuple[int, float]], best: tuple[int, float], log: bool
) -> None:
    lines = plot([Series(sorted(points, key=lambda p: p[0]), "s0", "●", best)], 60, 14, log=log)
    assert len(lines) in (0, 14)
    assert all(len(show.joined(line)) == 60 for line in lines)


@pytest.mark.parametrize("log", [True, False])
def test_the_star_of_a_best_far_outside_is_left_out(log: bool) -> None:
    def text(best: tuple[int, float]) -> str:
        points = [(0, 1e-30), (100, 2e-30)]
        return "".join(show.joined(line) for line in plot([Series(points, "s0", "", best)], 60, 14, log=log))

    assert "★" in text((50, 1.5e-30))
    for best in [(50, 1.7e308), (50, 1e99), (50, -1.7e308), (10**400, 1.5e-30), (-1, 1.5e-30)]:
        assert "★" not in text(best)


def test_a_plot_has_axes_and_marks_its_points() -> None:
    points = [(step, 4.0 - step / 100) for step in range(0, 301, 50)]
    lines = [show.joined(line) for line in plot([Series(points, "s0", "●", (300, 1.0))], 60, 14)]
    assert sum(line.count("●") for line in lines) == len(points) - 1
    assert lines[0].lstrip().startswith(("4 ┤", "│"))
    assert lines.index(next(line for line in lines if "★" in line)) > len(lines) / 2  # lower is lower
    for label in (" 1 ┤", " 2 ┤", " 3 ┤"):
        assert any(label in line for line in lines)
    assert "100" in lines[-1]
    assert lines[-1].rstrip().endswith("step")


def test_a_log_scale_leaves_out_what_is_not_above_zero() -> None:
    points = [(1, 100.0), (2, 0.0), (3, -1.0), (4, 0.01)]
    text = "\n".join(show.joined(line) for line in plot([Series(points, "s0", "●")], 40, 12, log=True))
    assert text.count("●") == 2
    linear = "\n".join(show.joined(line) for line in plot([Series(points, "s0", "●")], 40, 12))
    assert linear.count("●") == 4
    assert plot([Series([(1, -1.0)], "s0")], 40, 12, log=True) == []


# --- order and filters


@pytest.fixture
def jobs() -> list[Job]:
    state = State()
    apply_all(state, lab())
    return state.ranked()


def names(jobs: list[Job], text: str) -> set[str]:
    test = job_filter(text, jobs)
    return {job.name for job in jobs if test(job)}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("LEGAL", {"legal-r64"}),
        ("val<1.35", {"support", "legal-r64"}),
        ("val<1.35 -r:64", {"support"}),
        ("r=64", {"legal-r64"}),
        ("r!=16", {"legal-r64"}),
        ("state:running node:desktop", {"support", "legal-r64"}),
        ("-state:running -lr", {"[/]x\x1b[2J"}),
        ("overfit", {"lr1e-3"}),
        ("train>=2", {"on-attic"}),
        ("lr<1e-3 best_step>=400", {"support", "lr1e-3"}),
        ("run[lr=1e-4]", {"run[lr=1e-4]"}),
        ("[/]x", {"[/]x\x1b[2J"}),
    ],
)
def test_filters_of_jobs(jobs: list[Job], text: str, found: set[str]) -> None:
    assert names(jobs, text) == found


@pytest.mark.parametrize(("text", "why"), [("foo<1", "no column 'foo'"), ("val<x", "'x' is no number")])
def test_bad_filters(jobs: list[Job], text: str, why: str) -> None:
    with pytest.raises(BadFilter, match=why):
        job_filter(text, jobs)


@given(st.text(max_size=30))
def test_any_filter_works_or_says_why(text: str) -> None:
    job = Job(job="a", name="a")
    with contextlib.suppress(BadFilter):
        assert job_filter(text, [job])(job) in (True, False)


def test_filters_of_the_journal() -> None:
    entry = Entry(number=1, time=0.0, level="error", kind="job", text="failed: out of memory", job="legal")
    for text, fits in (
        ("MEMORY", True),
        ("level:error kind:job", True),
        ("-legal", False),
        ("job:sales", False),
    ):
        assert entry_filter(text)(entry) == fits


def is_known(value: str | float | None) -> bool:
    return bool(value) if isinstance(value, str) else value is not None and math.isfinite(value)


def test_every_field_sorts_with_unknown_last(jobs: list[Job]) -> None:
    for field in FIELDS:
        for descending in (False, True):
            values = [field.value(job) for job in ordered(jobs, field, descending)]
            known = [value for value in values if is_known(value)]
            assert values[: len(known)] == known
            keys = [value.casefold() if isinstance(value, str) else value for value in known]
            assert keys == sorted(keys, reverse=descending)  # type: ignore[type-var]


def test_hyper_parameters_are_columns(jobs: list[Job]) -> None:
    assert differing(jobs) == ["r"]
    field = find_field("lr", jobs)
    assert field is not None
    assert field.name == "learning_rate"
    assert find_field("no_such", jobs) is None


# --- logs and pause


def test_a_log_shows_no_control_characters_and_the_end_of_progress_bars() -> None:
    text = "a\r\n 10 %\r 90 %\r\x1b[32mdone\x1b[0m\nx\x07y\tz\nTraceback: bad\n\n\n"
    lines = log_lines(text)
    assert [show.joined(line) for line in lines] == ["a", "done", r"x\x07y z", "Traceback: bad"]
    assert [line[0][1] for line in lines] == ["", "", "", "bad"]
    assert [show.joined(line) for line in log_lines(text, "BAD trace")] == ["Traceback: bad"]


def test_a_frozen_state_does_not_change() -> None:
    state = State()
    frames = lab()
    apply_all(state, frames)
    held = frozen(state)
    before = held.dump(0.0, 0.0)
    for frame in frames:
        state.apply(frame)
    for job in state.jobs.values():
        job.train.add(5000, 9.0)
        job.val.add(5000, 9.0)
        job.states.append((0.0, "failed", ""))
    state.jobs.clear()
    assert held.dump(0.0, 0.0) == before
    assert held.jobs.keys() == {"support", "legal-r64", *list(held.jobs)[2:]}
    assert all(len(job.states) < 5 for job in held.jobs.values())
