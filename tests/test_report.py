"""`gshare report`: what it reads out of directories, what it makes of them, and what it says of gaps.

What is not known, or not a number, is said as such; that nothing becomes a zero is the point of most.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.early_exit import describe_exit
from gshare.agent.jobs.events import Exit
from gshare.agent.jobs.sweep_records import Decision, DecisionLog, SweepRecord, write_sweep
from gshare.agent.report import charts, summary
from gshare.agent.report.page import render_page
from gshare.agent.report.read import read_report
from gshare.agent.report.text import loss_text, seconds_text, time_text
from gshare.agent.service.protocol import JobStatus
from gshare.agent.service.registry import FinishedJob, record_finished, take_lock
from gshare.cli.main import main
from gshare.cli.report import fitting_table
from gshare.cli.sweep_board import result_of
from report_runs import HOSTILE, configuration, falling, rename, write_a_sweep, write_run
from rich.console import Console


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def report_json(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["report", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {run["name"]: run for run in report["runs"]}


def finished(directory: Path, state: Any, step: int, reason: str = "") -> None:
    status = JobStatus(
        job=directory.name, state=state, step=step, total_steps=100, output_dir=str(directory), reason=reason
    )
    ended = (directory / "metrics.jsonl").stat().st_mtime + 1
    record_finished(FinishedJob(status=status, ended=ended, trainer_id="t"))


# ---------------------------------------------------------------------- a sweep


def test_of_equal_losses_the_sweep_s_winner_is_first_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, names = tmp_path / "s", ("paged", "exact", "other")
    paths = [
        write_run(root / name, losses=falling(100, 0.1), evaluations={100: 1.5}, done=True) for name in names
    ]
    never = write_run(root / "never", losses=[2.0], evaluations={})
    early = write_run(root / "early", losses=[2.0], evaluations={})
    record = SweepRecord(
        name="tie",
        model="/models/m",
        base_dtype="fp32",
        early_exit={},
        created=1.0,
        configurations=[configuration(path) for path in (*paths, never, early)],
    )
    write_sweep(root, record)
    with DecisionLog(root) as log:
        for name in reversed(names):
            evidence = {"val_loss": 1.5, "best_val_loss": 1.5}
            log.append(Decision(time=1.0, job=name, event="completed", step=100, evidence=evidence))
    order = [row["adapter"] for row in result_of(root)["jobs"]]
    assert order == [*names, "never", "early"]
    found = report_json(root, capsys)
    assert [run["name"] for run in found["runs"]] == order
    assert found["pareto"] == {"samples": ["paged"], "seconds": ["paged"]}
    assert main(["report", str(root), "--html", str(tmp_path / "x.html")]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[1] for line in lines[: len(order)]] == order
    page = (tmp_path / "x.html").read_text().partition('id="runs"')[2]
    assert sorted(order, key=page.index) == order


def test_a_sweep_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report_json(write_a_sweep(tmp_path / "s"), capsys)
    runs = by_name(found)
    assert list(runs) == ["a", "c", "b", "d", "e"]
    assert {name: (run["state"], run["pattern"]) for name, run in runs.items()} == {
        "a": ("completed", ""),
        "b": ("stopped", "divergence"),
        "c": ("stopped", "overfitting"),
        "d": ("stopped", "underperformance"),
        "e": ("diverged", "non-finite"),
    }
    assert {name: run["samples"]["count"] for name, run in runs.items()} == dict(a=200, b=80, c=120, d=5, e=3)
    assert {one["pattern"]: (one["runs"], one["saved"]) for one in found["savings"]} == {
        "divergence": (1, 120),
        "overfitting": (1, 80),
        "underperformance": (1, 95),
        "non-finite": (1, 297),
    }
    assert found["full_length"] == 1000
    assert runs["a"]["hyper_parameters"] == {"learning_rate": 2e-4, "per_device_train_batch_size": 2}
    assert runs["b"]["evidence"] == {"slopes": [0.25, 1.0]}
    assert runs["c"]["best_step"] == 20
    assert runs["a"]["device_seconds"] == pytest.approx(25.0)  # 100 rounds of 0.5 s, shared by two
    assert found["pareto"]["samples"] == ["d", "b", "c", "a"]
    assert runs["e"]["not_a_number"] == ["loss"]
    assert (runs["e"]["loss"], runs["e"]["best_val_loss"]) == (None, None)


def test_a_moved_sweep_is_found_beside_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_a_sweep(tmp_path / "s").rename(tmp_path / "moved")
    assert by_name(report_json(tmp_path / "moved", capsys))["a"]["best_val_loss"] == 1.0


def test_a_sweep_without_its_file_has_what_its_decisions_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_a_sweep(tmp_path / "s")
    (root / "sweep.json").unlink()
    found = report_json(root, capsys)
    assert by_name(found)["b"]["pattern"] == "divergence"
    assert any("no sweep.json" in note for note in found["notes"])


def test_a_configuration_that_has_not_begun_waits_with_no_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_a_sweep(tmp_path / "s")
    for file in (root / "d").iterdir():
        file.unlink()
    (root / "d").rmdir()
    lines = (root / "decisions.jsonl").read_text().splitlines(keepends=True)
    (root / "decisions.jsonl").write_text("".join(line for line in lines if '"job":"d"' not in line))
    run = by_name(report_json(root, capsys))["d"]
    assert (run["state"], run["steps"], run["samples"]["count"]) == ("waiting", 0, 0)
    assert run["best_val_loss"] is None
    assert run["samples_saved"] is None


def test_a_resumed_run_is_no_longer_stopped_and_one_that_lost_its_trainer_is_not_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_a_sweep(tmp_path / "s")
    with DecisionLog(root) as log:
        for job in ("b", "c"):
            log.append(Decision(time=1.9e9, job=job, event="resumed"))
    lock = take_lock(root / "b" / ".lock")
    assert lock is not None
    runs = by_name(report_json(root, capsys))
    os.close(lock)
    assert (runs["b"]["state"], runs["b"]["pattern"], runs["b"]["ended"]) == ("running", "", None)
    assert runs["c"]["state"] == "unknown"
    assert "its trainer is gone" in runs["c"]["reason"]
    assert runs["b"]["samples_saved"] is runs["c"]["samples_saved"] is None


def test_a_configuration_that_ended_with_its_sweep_s_ctrl_c_is_stopped_as_the_list_of_jobs_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_a_sweep(tmp_path / "s")
    with DecisionLog(root) as log:
        for job in ("b", "c"):
            log.append(Decision(time=1.9e9, job=job, event="resumed"))
    finished(root / "b", "stopped", 41, "client left")
    runs = by_name(report_json(root, capsys))
    assert (runs["b"]["state"], runs["b"]["pattern"]) == ("stopped", "")
    assert runs["b"]["ended"] is not None
    assert runs["b"]["reason"] == "client left; gshare sweep --resume goes on"
    assert runs["b"]["samples_saved"] is None, "nothing was saved: it goes on"
    assert runs["c"]["state"] == "unknown"  # the control: nothing says how it ended


def test_damaged_decisions_and_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    root = write_a_sweep(tmp_path / "s")
    with open(root / "decisions.jsonl", "a") as file:
        file.write('{"time": 1, "job": "a", "event": "st')  # cut off: dropped
    assert len(read_report(root).runs) == 5
    (root / "sweep.json").unlink()
    with open(root / "decisions.jsonl", "w") as file:
        file.write('{"time": 1, "job": "../b", "event": "started"}\n')
    with pytest.raises(GshareError, match="which is no name"):
        read_report(root)
    (root / "decisions.jsonl").write_text("nonsense\n")
    with pytest.raises(GshareError, match=r"decisions.jsonl:1: not a decision"):
        read_report(root)


# ---------------------------------------------------------------------- runs without a sweep


def test_one_run_and_a_folder_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "r/a", losses=falling(100, 0.1), evaluations={100: 1.0}, done=True)
    write_run(tmp_path / "r/group/b", losses=falling(9, 0.1), evaluations={9: 0.5}, r=64)
    write_run(tmp_path / "r/group/.hidden", losses=[1.0], evaluations={})
    one = report_json(tmp_path / "r/a", capsys)
    assert (one["kind"], [run["state"] for run in one["runs"]]) == ("run", ["completed"])
    several = report_json(tmp_path / "r", capsys)
    runs = by_name(several)
    assert (several["kind"], list(runs)) == ("runs", ["b", "a"])
    assert runs["b"]["hyper_parameters"] == {"r": 64}  # lora_alpha is 2 × r in both
    assert (runs["b"]["state"], runs["b"]["reason"]) == ("unknown", "nothing says how it ended")


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        write_run(tmp_path / "r" / folder / "a", losses=[1.0], evaluations={})
    assert [run.name for run in read_report(tmp_path / "r").runs] == ["x/a", "y/a"]


def test_how_a_run_ended_is_in_the_list_of_ended_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c, d, e = (
        write_run(tmp_path / "r" / name, losses=falling(9, 0.1), evaluations={}) for name in "abcde"
    )
    finished(a, "stopped", 9, "stopped by gshare jobs")
    finished(b, "diverged", 9, "loss is not finite at step 9")
    finished(c, "failed", 9, "disk full")
    finished(d, "stopped", 5)  # and went on since
    numbers = {"val_loss": 2.0, "train_loss": 1.0, "gap": 1.0, "gap_threshold": 0.1, "evaluations": 2}
    finished(e, "stopped", 9, describe_exit(Exit(pattern="overfitting", step=9, evidence=numbers)))
    gone = write_run(tmp_path / "r" / "f", losses=falling(9, 0.1), evaluations={})
    finished(gone, "stopped", 9, "its client left")
    found = report_json(tmp_path / "r", capsys)
    runs = by_name(found)
    assert (runs["a"]["state"], runs["a"]["pattern"]) == ("stopped", "user")
    assert (runs["f"]["state"], runs["f"]["pattern"]) == ("stopped", "")  # it may go on: nothing is saved
    assert (runs["b"]["state"], runs["b"]["pattern"]) == ("diverged", "non-finite")
    assert (runs["c"]["state"], runs["c"]["pattern"], runs["c"]["reason"]) == ("failed", "", "disk full")
    assert runs["d"]["state"] == "unknown"
    assert (runs["e"]["state"], runs["e"]["pattern"]) == ("stopped", "overfitting")
    assert {one["pattern"]: one["saved"] for one in found["savings"]} == {
        "user": 91,
        "non-finite": 91,
        "overfitting": 91,
    }


def test_an_adapter_of_a_run_that_left_early_does_not_make_it_complete(tmp_path: Path) -> None:
    """Early exit writes the adapter too."""
    write_run(tmp_path / "r/a", losses=falling(9, 0.1), evaluations={}, done=True)
    assert read_report(tmp_path / "r").runs[0].state == "unknown"


def test_samples_say_when_they_may_be_fewer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An epoch of 4 steps: its last may hold fewer than 2 × 3 rows."""
    rows = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "steps_per_epoch": 4}
    write_run(tmp_path / "r/a", losses=falling(3, 0.1), evaluations={}, **rows)
    write_run(tmp_path / "r/b", losses=falling(5, 0.1), evaluations={}, **rows)
    found = report_json(tmp_path / "r", capsys)
    runs = by_name(found)
    assert runs["a"]["samples"] == {"count": 18, "exact": True}
    assert runs["b"]["samples"] == {"count": 30, "exact": False}
    assert any(note.startswith("≤") for note in found["notes"])


def test_what_is_missing_or_damaged_is_said_and_never_a_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "r/no-record", losses=[2.0], evaluations={1: 1.5})
    (tmp_path / "r/no-record/run.json").unlink()
    write_run(tmp_path / "r/no-metrics", losses=[], evaluations={})
    (tmp_path / "r/no-metrics/metrics.jsonl").unlink()
    write_run(tmp_path / "r/nan", losses=[2.0, None], evaluations={1: None})
    broken = write_run(tmp_path / "r/broken", losses=[2.0, 1.9], evaluations={}) / "metrics.jsonl"
    broken.write_text(broken.read_text() + 'junk\n{"type":"step","step":"x"}\n{"type":"step","st')
    found = report_json(tmp_path / "r", capsys)
    runs = by_name(found)
    assert list(runs)[:2] == ["no-record", "nan"]  # then those that were never evaluated
    assert (runs["no-record"]["samples"], runs["no-record"]["best_val_loss"]) == (None, 1.5)
    assert (runs["no-metrics"]["steps"], runs["no-metrics"]["loss"]) == (None, None)
    assert runs["no-metrics"]["not_a_number"] == []
    assert runs["nan"]["not_a_number"] == ["loss", "val_loss", "best_val_loss"]
    assert runs["broken"]["loss"] == 1.9
    assert "broken: 2 lines of metrics.jsonl cannot be read and are left out" in found["notes"]
    assert any(note.startswith("no-record: no run.json") for note in found["notes"])

    assert main(["report", str(tmp_path / "r")]) == 0
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()}
    assert lines["nan"].split()[2:6] == ["nan", "-", "nan", "nan"]
    assert lines["no-metrics"].split()[2:8] == ["-", "-", "-", "-", "-/?", "-"]
    page = render_page(read_report(tmp_path / "r"), now=0)
    assert page.count("not a number</span>") == 3
    assert "never evaluated</span>" in page


def test_losses_that_do_not_compare_are_pointed_out(tmp_path: Path) -> None:
    write_run(tmp_path / "r/a", losses=[1.0], evaluations={1: 1.0})
    write_run(tmp_path / "r/b", losses=[1.0], evaluations={1: 1.0})
    assert summary.notes(read_report(tmp_path / "r")) == []
    write_run(tmp_path / "r/c", losses=[1.0], evaluations={1: 1.0}, train_hash="2" * 64)
    (note,) = summary.notes(read_report(tmp_path / "r"))
    assert "do not compare" in note


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r/a", losses=[1.0], evaluations={})
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    assert read_report(tmp_path / "r").runs[0].steps is None


def _break_epoch(root: Path) -> None:
    path = root / "b/metrics.jsonl"
    path.write_text(path.read_text().replace('"epoch": 0.001', '"epoch": 1e-320'))


def _break_counts(root: Path) -> None:
    line = {"type": "step", "step": 1, "seconds": 1.0}
    with open(root / "b/metrics.jsonl", "a") as file:
        for key in ("step", "tokens", "adapters_in_pass", "total_steps"):
            file.write(json.dumps({**line, key: 10**400}) + "\n")
        file.write('{"a":' * 5000 + "\n")


def _break_record(root: Path) -> None:
    (root / "b/run.json").write_text('{"a":' * 5000)


def _pipe_record(root: Path) -> None:
    (root / "b/run.json").unlink()
    os.mkfifo(root / "b/run.json")


def _place(text: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        record = json.loads((root / "sweep.json").read_text())
        record["configurations"][1]["output_dir"] = text
        (root / "sweep.json").write_text(json.dumps(record))

    return change


def _name(root: Path, text: str) -> None:
    (root / "sweep.json").unlink()
    path = root / "decisions.jsonl"
    path.write_text(path.read_text().replace('"job":"b"', json.dumps({"job": text})[1:-1]))


@pytest.mark.parametrize(
    ("damage", "note"),
    [
        (_break_epoch, None),
        (_break_counts, "5 lines of metrics.jsonl cannot be read"),
        (_break_record, "run.json cannot be read"),
        (_pipe_record, "no run.json"),
        (_place("/x\0y"), "cannot be read: there is a NUL in its name"),
        (_place("/" + "x" * 5000), "cannot be read: File name too long"),
        (lambda root: _name(root, "b\0"), "cannot be read: there is a NUL in its name"),
        (lambda root: _name(root, "b" * 5000), "cannot be read: File name too long"),
    ],
    ids=["epoch", "counts", "record", "pipe", "NUL place", "long place", "NUL name", "long name"],
)
@pytest.mark.parametrize("output", [[], ["--json"], ["--html"]], ids=["table", "json", "html"])
def test_one_damaged_run_does_not_hide_the_rest(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    note: str | None,
    output: list[str],
) -> None:
    root = write_a_sweep(tmp_path / "s")
    before = {run.name: run.best_val_loss for run in read_report(root).runs}
    damage(root)
    found = read_report(root)
    assert len(found.runs) == 5
    after = {run.name: run.best_val_loss for run in found.runs}
    assert [after[name] for name in "acd"] == [before[name] for name in "acd"]
    notes = [line for line in summary.notes(found) if note is not None and note in line]
    assert len(notes) == (note is not None)
    assert all(len(line.removeprefix("b" * 5000)) < 300 for line in notes)
    arguments = [*output, str(tmp_path / "x.html")] if output == ["--html"] else output
    assert main(["report", str(root), *arguments]) == 0
    assert "unexpected" not in capsys.readouterr().err


def test_metrics_that_may_not_be_read_are_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise GshareError(f"{path}: Permission denied")

    write_run(tmp_path / "r/a", losses=[1.0], evaluations={})
    monkeypatch.setattr("gshare.agent.report.read.read_metrics", refuse)
    (run,) = read_report(tmp_path / "r").runs
    assert "Permission denied" in run.notes[0]


def test_a_sweep_s_own_file_that_is_damaged_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_a_sweep(tmp_path / "s")
    record = json.loads((root / "sweep.json").read_text())
    for text, message in (
        (json.dumps({**record, "configurations": []}), "sweep.json: names no configuration"),
        ('{"a":' * 5000, "sweep.json: cannot be read"),
    ):
        (root / "sweep.json").write_text(text)
        assert main(["report", str(root)]) == 1
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such directory"),
        (["file"], "file: is a file"),
        (["empty"], "empty: no run here"),
        (["r", "--html", "empty"], "--html empty: is a directory"),
        (["r", "--html", "nowhere/x.html"], "--html nowhere/x.html: there is no directory"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("empty").mkdir()
    write_run(tmp_path / "r/a", losses=[1.0], evaluations={})
    assert main(["report", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    with pytest.raises(UsageError, match="no run here"):
        read_report(Path("empty"))


# ---------------------------------------------------------------------- the page


class Checked(HTMLParser):
    """Elements that are open at the end, and what a page may not have."""

    VOID = frozenset(("meta", "br", "img", "link", "input"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "style", "srcset", "xlink:href") or name.startswith("on"):
                self.faults.append(f"{tag} {name}={value}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing")


def check(page: str) -> Checked:
    parser = Checked()
    parser.feed(page)
    parser.close()
    return parser


@pytest.mark.parametrize("hostile", [False, True])
def test_the_page_is_whole_and_holds_no_markup_of_others(tmp_path: Path, hostile: bool) -> None:
    root = write_a_sweep(tmp_path / "s", hostile=hostile)
    found = check(render_page(read_report(root), now=0))
    assert (found.open, found.faults) == ([], [])
    assert (found.tags.count("script"), found.tags.count("img")) == (1, 0)


def test_the_control_unescaped_markup_is_found(tmp_path: Path) -> None:
    page = render_page(read_report(write_a_sweep(tmp_path / "s")), now=0)
    found = check(page.replace("<h1>", f"<h1>{HOSTILE}"))
    assert found.faults == ["img src=x", "img onerror=window.pwned=1"]
    assert found.tags.count("script") == 2


def test_a_page_of_strange_numbers_and_of_nothing_is_drawn(tmp_path: Path) -> None:
    write_run(tmp_path / "r/huge", losses=[1e308, 1e-308], evaluations={1: 1e305, 2: 3.0})
    write_run(tmp_path / "r/same", losses=[1.0, 1.0], evaluations={1: 2.0, 2: 2.0})
    write_run(tmp_path / "r/zero", losses=[0.0, -1.0], evaluations={1: 0.0})
    rename(tmp_path / "r/zero", "z\x1b[2J")
    for path in (tmp_path / "r", tmp_path / "r/same"):
        found = check(render_page(read_report(path), now=0))
        assert (found.open, found.faults) == ([], [])
    write_run(tmp_path / "n/a", losses=[], evaluations={})
    assert "No run has recorded a loss." in render_page(read_report(tmp_path / "n"), now=0)


def test_html_is_written_whole_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_a_sweep(tmp_path / "s")
    assert main(["report", str(root), "--html", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").read_text(encoding="utf-8").endswith("</html>\n")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".x")]
    out, err = capsys.readouterr()
    assert "underperformance" in out
    assert err == f"written: {tmp_path / 'x.html'}\n"


def test_on_a_narrow_terminal_columns_go_and_numbers_stay_whole(tmp_path: Path) -> None:
    ranked = summary.leaderboard(read_report(write_a_sweep(tmp_path / "s")).runs)
    wide, left_out = fitting_table(ranked, Console(width=200))
    assert left_out == ()
    assert [column.header for column in wide.columns][-1] == "ended"
    console = Console(width=100, file=io.StringIO())
    table, left_out = fitting_table(ranked, console)
    assert "device time" in left_out
    assert "best val" not in left_out
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert any("1.0000" in line and "100/100" in line and "completed" in line for line in lines)


@pytest.mark.parametrize("width", [80, 60, 40])
def test_where_there_is_no_room_the_reasons_stand_below_and_no_number_or_title_is_cut(
    tmp_path: Path, width: int
) -> None:
    ranked = summary.leaderboard(read_report(write_a_sweep(tmp_path / "s")).runs)
    for run in ranked:
        run.name = f"lr{run.name}-r16-b4"
    console = Console(width=width, file=io.StringIO())
    table, left_out = fitting_table(ranked, console)
    assert "why" in left_out
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 1 + len(ranked), "a row is a line"
    assert "…" not in console.file.getvalue()
    assert "1.0000" in lines[1]
    assert "best val" in lines[0]


# ---------------------------------------------------------------------- parts


def test_axes_have_round_ticks_and_hold_their_values() -> None:
    linear = charts.Axis.over([0.0, 47.0, math.nan, math.inf], 0, 100, zero=True)
    assert linear.ticks == [0, 10, 20, 30, 40]
    assert linear.place(23.5) == pytest.approx(50)
    log = charts.Axis.over([0.1, 1000.0], 0, 400)
    assert log.log
    assert log.ticks == pytest.approx([0.1, 1, 10, 100, 1000])
    assert log.place(1.0) == pytest.approx(100)
    assert not log.holds(0.0)
    flat = charts.Axis.over([2.0, 2.0], 0, 100)
    assert flat.place(2.0) == pytest.approx(50)
    assert charts.Axis.over([], 0, 100).ticks


def test_a_long_curve_is_thinned_and_keeps_its_ends_and_its_mean() -> None:
    points = [(float(x), float(x % 7)) for x in range(10_001)]
    thin = charts.thin(points)
    assert len(thin) == charts.MAX_POINTS
    assert (thin[0], thin[-1]) == (points[0], points[-1])
    assert sum(y for _, y in thin) / len(thin) == pytest.approx(3.0, abs=0.05)
    assert charts.thin(points[:5]) == points[:5]


def test_texts_of_numbers() -> None:
    assert [loss_text(value) for value in (None, math.nan, math.inf, 0.0, 12345.6)] == [
        *("-", "nan", "inf", "0.0000", "1.235e+04")
    ]
    assert [seconds_text(value) for value in (None, math.nan, 0.04, 61, 3700)] == [
        *("-", "-", "0.0 s", "1:01", "1:01:40")
    ]
    assert time_text(None) == time_text(1e300) == "-"


def test_the_front_is_what_nothing_beats(tmp_path: Path) -> None:
    runs = read_report(write_a_sweep(tmp_path / "s")).runs
    front = summary.pareto(runs, summary.samples_cost)
    for run in front:
        cost, loss = summary.samples_cost(run), run.best_val_loss
        assert cost is not None
        assert loss is not None
        assert not any(
            (other_cost := summary.samples_cost(other)) is not None
            and other.best_val_loss is not None
            and (other_cost, other.best_val_loss) != (cost, loss)
            and other_cost <= cost
            and other.best_val_loss <= loss
            for other in runs
        )
    worse = next(run for run in runs if run.name == "c")
    worse.best_val_loss = 2.6  # above b, and dearer
    assert "c" not in [run.name for run in summary.pareto(runs, summary.samples_cost)]
