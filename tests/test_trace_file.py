"""The trace that a run leaves: bounded, whole sums, readable after a kill; and `gshare gpu trace`."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gshare.agent.errors import UsageError
from gshare.agent.service import registry, traces
from gshare.agent.service.protocol import JobStatus
from gshare.agent.trace import FALSIFIED, STEP_SPAN, Event, Tracer, sharing_report
from gshare.agent.trace_file import OLDER, TRACE_NAME, TraceFile, read_trace
from gshare.cli.main import main

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import Say, WaitFor, child, make_ledger, take

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def gpu_trace(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """`gshare gpu trace …` in this process, with a state directory of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["gpu", "trace", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def span(name: str, ms: float, number: int = 0, **detail: object) -> Event:
    return Event("span", name, number * 1_000_000_000, int(ms * 1e6), 7, True, detail)


def write(path: Path, *events: Event, max_bytes: int = 1 << 20) -> TraceFile:
    """A finished trace file of these events."""
    tracer = Tracer()
    with TraceFile(path, tracer, max_bytes=max_bytes) as file:
        for event in events:
            tracer.add(event)
    return file


def test_what_was_traced_comes_back(tmp_path: Path) -> None:
    ledger = make_ledger(tmp_path)
    ledger.tracer = Tracer()
    path = tmp_path / TRACE_NAME
    with TraceFile(path, ledger.tracer) as file:
        with ledger.tracer.span(STEP_SPAN, jobs=2):
            take(ledger, 100).release()
        expected = ledger.tracer.events
        file.flush()
        assert read_trace(path).events == expected  # before the end too
    trace = read_trace(path)
    assert trace.events == expected
    assert (trace.torn, trace.forgotten.events) == (0, 0)
    assert trace.parts[0].head.pid == os.getpid()
    assert trace.report == sharing_report(expected)


def test_a_detail_that_json_does_not_know_is_text(tmp_path: Path) -> None:
    write(tmp_path / "t", span("Load", 1, file=Path("/a")))
    assert read_trace(tmp_path / "t").events[0].detail == {"file": "/a"}


def test_the_file_is_bounded_and_the_sums_are_whole(tmp_path: Path) -> None:
    path = tmp_path / TRACE_NAME
    many = [span(STEP_SPAN if number % 2 else "LedgerReserve", number, number) for number in range(400)]
    write(path, *many, max_bytes=4096)
    sizes = [path.stat().st_size, path.with_name(TRACE_NAME + OLDER).stat().st_size]
    assert max(sizes) <= 4096
    trace = read_trace(path)
    assert 50 < len(trace.events) < 150
    assert trace.events == many[-len(trace.events) :]
    assert trace.forgotten.events == 400 - len(trace.events)
    assert trace.report.step_ms == pytest.approx(sum(range(1, 400, 2)))
    assert trace.report.sharing_ms == pytest.approx(sum(range(0, 400, 2)))
    # The control: the kept events alone say something else.
    assert sharing_report(trace.events).step_ms < trace.report.step_ms


def test_events_that_the_tracer_had_to_drop_are_counted(tmp_path: Path) -> None:
    tracer = Tracer(max_events=5)
    with TraceFile(tmp_path / "t", tracer, max_bytes=400) as file:
        for number in range(8):
            tracer.add(span(STEP_SPAN, 1, number))
        file.flush()
        for number in range(20):
            tracer.add(span(STEP_SPAN, 1, number))
            file.flush()
    trace = read_trace(tmp_path / "t")
    assert trace.forgotten.events + len(trace.events) == 28


def test_a_resumed_runs_trace_keeps_the_part_before(tmp_path: Path) -> None:
    path = tmp_path / TRACE_NAME

    def first(say: Say, wait: WaitFor) -> None:
        write(path, span(STEP_SPAN, 10))
        say("done")

    with child(first) as before:
        assert before.line() == "done"
        write(path, span(STEP_SPAN, 20))
        trace = read_trace(path)
        assert [part.head.pid for part in trace.parts] == [before.pid, os.getpid()]
    assert trace.report.step_ms == 30.0


def test_after_a_kill_everything_flushed_is_there_and_a_torn_line_is_counted(tmp_path: Path) -> None:
    path = tmp_path / TRACE_NAME

    def work(say: Say, wait: WaitFor) -> None:
        tracer = Tracer()
        file = TraceFile(path, tracer)
        tracer.add(span(STEP_SPAN, 10))
        file.flush()
        tracer.add(span(STEP_SPAN, 20))
        say("flushed once")
        wait()

    with child(work) as run:
        assert run.line() == "flushed once"
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    with path.open("ab") as end:
        end.write(b'["span","Tr')
    trace = read_trace(path)
    assert ([event.duration_ns for event in trace.events], trace.torn) == ([10_000_000], 1)


def test_a_trace_that_cannot_be_written_fails_no_run(tmp_path: Path) -> None:
    missing = write(tmp_path / "none" / "t", span(STEP_SPAN, 1))
    assert missing.problem == f"{tmp_path}/none/t: No such file or directory; no more is traced"
    os.mkfifo(tmp_path / "pipe")
    assert write(tmp_path / "pipe", span(STEP_SPAN, 1)).problem.endswith(
        "pipe: is no regular file; no more is traced"
    )
    assert (tmp_path / "pipe").is_fifo()
    tracer = Tracer()
    with TraceFile(tmp_path / "t", tracer) as file:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))  # as a full disk; Python ignores SIGXFSZ
        try:
            for number in range(20):
                tracer.add(span(STEP_SPAN, 1, number))
            file.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert file.problem.endswith("; no more is traced")
        tracer.add(span(STEP_SPAN, 1))
    assert tracer.events == []  # memory is given back all the same


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no such trace"),
        ("", "row 1: not the head of a trace"),
        ("{}\n", "row 1: not the head of a trace"),
        ('{"kind":"trace","pid":1,"epoch_ns":0,"schema":9}\n', "row 1: schema 9 is not 1"),
    ],
)
def test_what_is_no_trace_is_one_line_naming_it(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "t"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message) as error:
        read_trace(path)
    assert str(error.value).startswith(str(path))


# The command


def test_the_report_has_phases_spans_the_split_and_the_verdict(tmp_path: Path, gpu_trace: Command) -> None:
    phases = [Event("phase", "lock_acq", 0, ms * 1_000_000, 7, False, {}) for ms in (1, 2, 300)]
    events = [*phases, span("LedgerReserve", 30), span(STEP_SPAN, 1000), span("WaitPoll", 61_000)]
    write(tmp_path / TRACE_NAME, *events)
    code, out, err = gpu_trace(str(tmp_path))
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert rows["lock_acq"] == ["3", "2.000", "300.000", "303.0"]
    assert rows["LedgerReserve"] == ["1", "30.000", "30.000", "30.0"]
    assert rows["TrainStep"] == ["1", "1000.000", "1000.000", "1000.0"]
    assert "sharing overhead                    30.0 ms  3.00% of the steps\n" in out
    assert "waiting for memory               61000.0 ms  1m 1s in the queue, no overhead\n" in out
    assert out.splitlines()[-1].startswith("GPU sharing overhead is within budget")
    assert FALSIFIED not in out


def test_above_5_percent_of_step_time_it_says_falsified(tmp_path: Path, gpu_trace: Command) -> None:
    write(tmp_path / TRACE_NAME, span("LedgerReserve", 51), span(STEP_SPAN, 1000))
    code, out, _ = gpu_trace(str(tmp_path / TRACE_NAME))
    assert code == 0
    assert out.splitlines()[-1].startswith("falsified: GPU sharing overhead exceeds budget")
    found = json.loads(gpu_trace(str(tmp_path), "--json")[1])
    assert (found["overhead"], found["events"]) == (0.051, 2)
    assert found["verdict"].startswith(FALSIFIED)


def test_a_span_cannot_drive_the_terminal(tmp_path: Path, gpu_trace: Command) -> None:
    write(tmp_path / TRACE_NAME, span("\x1b[2Jgone\r", 5)).close()
    code, out, _ = gpu_trace(str(tmp_path))
    assert code == 0
    assert "?[2Jgone?" in out
    assert out.replace("\n", "").isprintable()


def test_the_export_has_both_processes_on_one_clock(tmp_path: Path, gpu_trace: Command) -> None:
    path = tmp_path / TRACE_NAME
    write(path, span(STEP_SPAN, 10, 1, jobs=2))
    write(path, Event("phase", "lock_acq", 5, 2_000, 8, False, {}))
    target = tmp_path / "trace.json"
    assert gpu_trace(str(tmp_path), "--export", str(target))[0] == 0
    step, phase = json.loads(target.read_text(encoding="utf-8"))["traceEvents"]
    heads = [part.head for part in read_trace(path).parts]
    assert step == {
        **{"ph": "X", "cat": "span", "name": STEP_SPAN, "pid": os.getpid(), "tid": 7, "args": {"jobs": 2}},
        **{"ts": (heads[0].epoch_ns + 1_000_000_000) / 1e3, "dur": 10_000.0},
    }
    assert (phase["cat"], phase["dur"], phase["ts"]) == ("phase", 2.0, (heads[1].epoch_ns + 5) / 1e3)
    code, out, err = gpu_trace(str(tmp_path), "--export", str(tmp_path / "none" / "x"))
    assert (code, out) == (1, "")
    assert err == f"gshare: --export: {tmp_path}/none/x: No such file or directory\n"


@pytest.mark.parametrize("name", [TRACE_NAME, f"{TRACE_NAME}.1", "link", "sub/../trace.jsonl"])
def test_an_export_over_the_trace_itself_is_refused(tmp_path: Path, gpu_trace: Command, name: str) -> None:
    path = tmp_path / TRACE_NAME
    write(path, span(STEP_SPAN, 10, 1))
    (tmp_path / f"{TRACE_NAME}.1").write_bytes(path.read_bytes())
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "sub").mkdir()
    before = path.read_bytes()
    code, out, err = gpu_trace(str(path), "--export", str(tmp_path / name))
    assert (code, out) == (2, "")
    assert err == f"gshare: --export: {tmp_path / name} is the trace itself; name another file\n"
    assert path.read_bytes() == (tmp_path / f"{TRACE_NAME}.1").read_bytes() == before


def finished(job: str, trainer_id: str) -> registry.FinishedJob:
    return registry.FinishedJob(
        status=JobStatus(job=job, state="completed"), ended=1.0, trainer_id=trainer_id
    )


def test_a_run_is_found_by_trainer_and_by_job(gpu_trace: Command) -> None:
    write(traces.trace_path("abcd"), span(STEP_SPAN, 1))
    registry.record_finished(finished("support", "abcd"))
    assert gpu_trace("abcd")[0] == gpu_trace("support")[0] == 0
    assert "abcd.jsonl: 1 events of one process" in gpu_trace("support")[1]
    code, out, err = gpu_trace("sales")
    assert (code, out) == (2, "")
    assert "'sales': no file or directory with a trace.jsonl" in err
    assert err.endswith("trainers with one: abcd\n")
    assert gpu_trace("../traces/abcd")[0] == 2


def test_without_a_run_the_known_traces_are_named(gpu_trace: Command) -> None:
    assert gpu_trace()[::2] == (
        2,
        "gshare: gpu trace: no run; name a job or a trace. Trainers with one: none\n",
    )
    for name in ("late", "early"):
        write(traces.trace_path(name), span(STEP_SPAN, 1))
    os.utime(traces.state_dir() / "traces" / "early.jsonl", (1, 1))
    code, out, err = gpu_trace()
    assert (code, out) == (2, "")
    assert err.endswith("Trainers with one: early, late\n")


def test_only_the_newest_traces_are_kept(gpu_trace: Command) -> None:
    for number in range(traces.TRACES_KEPT + 3):
        path = traces.trace_path(f"t{number:02}")
        write(path)
        write(path)
        os.utime(path, (number, number))
    kept = sorted(file.name for file in path.parent.iterdir())
    names = [f"t{number:02}.jsonl" for number in range(3, traces.TRACES_KEPT + 3)]
    assert kept == sorted([*names, *(name + OLDER for name in names)])


def test_the_command_loads_no_torch(tmp_path: Path) -> None:
    write(tmp_path / TRACE_NAME, span(STEP_SPAN, 1))
    script = (
        "import sys; from gshare.cli.main import main; code = main(['gpu', 'trace', sys.argv[1]]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
