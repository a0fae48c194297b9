"""The page of `gshare report --html` in a real browser: it sorts, switches, marks, asks for nothing else, and
runs nothing that a name or a reason holds. Skipped where no Chromium is found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from browser import Page, browser_page, find_browser
from gshare.cli.main import main
from report_runs import HOSTILE, rename, write_a_sweep, write_run

BROWSER = find_browser()
pytestmark = [
    pytest.mark.slow,  # a browser's first start takes minutes where others use the cores
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH, and GSHARE_TEST_BROWSER names none"),
    pytest.mark.timeout(300),
]

COLUMN = "[...document.querySelectorAll('#runs tbody tr')].map(row => row.cells[{}].textContent)"
RAN = "window.pwned === undefined ? 'nothing' : 'a script'"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert BROWSER is not None
    with browser_page(BROWSER, tmp_path_factory.mktemp("browser")) as page:
        yield page


def show(page: Page, runs: Path) -> Path:
    html = runs.parent / "report.html"
    assert main(["report", str(runs), "--html", str(html)]) == 0
    page.open(html)
    assert page.value("document.documentElement.dataset.ready") == "yes"
    return html


def heading(page: Page, name: str) -> str:
    """A selector of the button of that column."""
    place = page.value(
        "[...document.querySelectorAll('#runs th')].findIndex(one => one.textContent === " + repr(name) + ")"
    )
    assert place >= 0
    return f"#runs th:nth-child({place + 1}) button"


def visible(page: Page, selector: str) -> bool:
    return page.value(f"document.querySelector({selector!r}).getBoundingClientRect().height > 100")


def test_it_asks_for_nothing_and_complains_of_nothing(page: Page, tmp_path: Path) -> None:
    html = show(page, write_a_sweep(tmp_path / "s"))
    assert page.requests == [html.as_uri()]
    assert page.complaints == []
    assert page.value("document.querySelector('#saved').textContent").startswith("592 of 1,000 samples")


def test_a_click_on_a_heading_sorts_and_what_is_missing_stays_last(page: Page, tmp_path: Path) -> None:
    show(page, write_a_sweep(tmp_path / "s"))
    names = COLUMN.format(1)
    assert page.value(names) == ["a", "c", "b", "d", "e"]
    best = heading(page, "best val loss")
    page.point(best, click=True)
    assert page.value(names) == ["a", "c", "b", "d", "e"]
    page.point(best, click=True)
    assert page.value(names) == ["d", "b", "c", "a", "e"]
    page.point(heading(page, "run"), click=True)
    assert page.value(names) == ["a", "b", "c", "d", "e"]
    page.point(heading(page, "learning_rate"), click=True)
    assert page.value(names) == ["d", "a", "c", "b", "e"]  # by value: as texts, 1e-05 would come last but one
    page.point(heading(page, "saved"), click=True)
    page.point(heading(page, "saved"), click=True)
    assert page.value(names) == ["e", "b", "d", "c", "a"]
    assert page.value("document.querySelectorAll('#runs th[aria-sort]').length") == 1


def test_charts_are_drawn_and_switched(page: Page, tmp_path: Path) -> None:
    show(page, write_a_sweep(tmp_path / "s"))
    for group, first, second in (("curves", "val", "train"), ("pareto", "samples", "seconds")):
        assert visible(page, f"#{group}-{first} svg")
        assert not visible(page, f"#{group}-{second}")
        page.point(f"button[data-shows={group}-{second}]", click=True)
        assert not visible(page, f"#{group}-{first}")
        assert visible(page, f"#{group}-{second} svg")
    # Every mark lies inside its chart: a wrong scale would put it elsewhere.
    outside = page.value(
        "[...document.querySelectorAll('.chart')].filter(one => one.getBoundingClientRect().height).flatMap("
        "chart => { const box = chart.getBoundingClientRect(); return [...chart.querySelectorAll('.mark')]"
        ".map(mark => mark.getBoundingClientRect()).filter(m => m.left < box.left || m.right > box.right"
        " || m.top < box.top || m.bottom > box.bottom); }).length"
    )
    assert outside == 0
    assert page.value("document.querySelectorAll('#pareto-seconds .dot').length") == 4


def test_a_run_that_is_pointed_at_is_marked_everywhere(page: Page, tmp_path: Path) -> None:
    show(page, write_a_sweep(tmp_path / "s"))
    on = "[...document.querySelectorAll('.on')].map(one => one.dataset.run + one.tagName.toLowerCase())"
    page.point("#runs tbody tr:nth-child(2) td:nth-child(2)")
    assert sorted(page.value(on)) == ["1g", "1g", "1g", "1g", "1tr"]  # two curves, two dots, the row
    page.point("h1")
    assert page.value(on) == []


def test_hostile_names_and_reasons_are_text(page: Page, tmp_path: Path) -> None:
    runs = write_a_sweep(tmp_path / "h", hostile=True)
    show(page, runs)
    assert page.value(RAN) == "nothing"
    assert page.value("document.scripts.length") == 1
    assert page.value("document.images.length") == 0
    assert page.complaints == []
    assert "<script>window.pwned=1</script>" in page.value("document.querySelector('h1').textContent")
    assert "\u202e" not in page.value("document.documentElement.textContent")

    one = write_run(tmp_path / "n" / "a", losses=[1.0, 0.9], evaluations={2: 0.5}, data=f"/x/{HOSTILE[:60]}")
    rename(one, HOSTILE)
    write_run(tmp_path / "n" / "b", losses=[1.0], evaluations={})
    show(page, tmp_path / "n")
    assert page.value(RAN) == "nothing"
    assert page.value("document.scripts.length + document.images.length") == 1
    assert HOSTILE[:30] in page.value(COLUMN.format(1))[0]


@pytest.mark.parametrize("policy", [True, False])
def test_the_control_markup_that_slips_through_is_seen_and_the_policy_stops_it(
    page: Page, tmp_path: Path, policy: bool
) -> None:
    html = show(page, write_a_sweep(tmp_path / "s"))
    text = html.read_text(encoding="utf-8").replace("<h1>", f"<h1>{HOSTILE}", 1)
    if not policy:
        text = text.replace("Content-Security-Policy", "X-Nothing")
    html.write_text(text, encoding="utf-8")
    page.open(html)
    assert page.value("document.images.length") == 1
    assert page.value(RAN) == ("nothing" if policy else "a script")
    assert bool(page.complaints) == policy or not policy
