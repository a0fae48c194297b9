"""`gshare finetune` and `gshare jobs` as a user meets them: exit codes, signals, streams, detached."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gshare.agent.errors import RetryLater, UsageError
from gshare.agent.jobs.spec import JobRequest, RunSpec
from gshare.agent.jobs.spec_rules import ADAPTER_TYPES, RUN_TYPES
from gshare.agent.service import registry
from gshare.agent.service.client import TrainerClient
from gshare.cli import finetune as command
from gshare.cli import jobs
from gshare.cli.finetune_flags import AdapterFlags, RunFlags
from gshare.cli.main import main

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from fake_runner import let_go_to, weights_after  # noqa: E402

#: `gshare` with an engine of straw and without tokenising: a job's data file holds its script.
GSHARE = """
import sys
from pathlib import Path
from gshare.agent.jobs.spec import JobRequest
from gshare.cli import finetune, main

def prepare(run, console, *, resume):
    return Path("/nonexistent"), [
        JobRequest(spec=spec, train_store="/nonexistent", train_hash="0" * 64, resume=resume)
        for spec in run.adapters
    ]

finetune.prepare = prepare
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    monkeypatch.setenv(command.RUNNER_VARIABLE, "fake_runner:FakeRunner")
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", GSHARE, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def gshare(*arguments: str, timeout: float = 60) -> tuple[int, str, str]:
    process = start(*arguments)
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def flags(**scripts: str) -> list[str]:
    """Flags for jobs by name; each gets a data file with its script."""
    arguments = ["finetune", "--model", "fake"]
    for name, script in scripts.items():
        Path(f"{name}.jsonl").write_text(script)
        arguments += ["--adapter", f"{name}.jsonl:out/{name}"]
    return arguments


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def saved_step(name: str) -> int:
    path = Path(f"out/{name}/checkpoint.json")
    return json.loads(path.read_text())["step"] if path.exists() else 0


def no_trainer_is_left() -> bool:
    return not registry.live_trainers()


#: Minutes: a test of eight commands takes one or two where a process takes ten seconds to start.
LONG = "steps=100000,sleep=0.005,save=5"
#: The file that holds jobs back (`let_go_to`).
UPTO = Path("upto")


def test_every_key_of_the_spec_has_a_flag() -> None:
    assert set(RunFlags.__dataclass_fields__) - {"method", "task"} == set(RUN_TYPES) - {"model"}
    per_adapter = set(ADAPTER_TYPES) - {"name", "data", "output_dir", "seed"}  # seed: of the run
    assert set(AdapterFlags.__dataclass_fields__) == per_adapter


def test_a_run_ends_with_a_leaderboard_on_stdout_and_talk_on_stderr() -> None:
    code, out, err = gshare(*flags(a="steps=9", b="steps=30"))
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].split() == ["adapter", "val", "loss", "best", "loss", "steps", "state", "output"]
    assert [line.split()[1] for line in lines[1:]] == ["b", "a"]  # 2/30 < 2/9
    assert "a: completed at step 9 of 9" in err
    assert no_trainer_is_left()
    assert not list(registry.trainer_dirs())


def test_json_lines_are_strict_and_end_with_the_leaderboard() -> None:
    code, out, _ = gshare(*flags(a="steps=9,nan_at=6"), "--json")
    assert code == 0
    assert "NaN" not in out
    events = [json.loads(line) for line in out.splitlines()]
    assert [e["step"] for e in events if e["type"] == "step"] == list(range(1, 10))
    assert [e["val_loss"] for e in events if e["type"] == "eval"] == [2.0 / 3, None, None]
    assert events[-1]["type"] == "leaderboard"
    assert events[-1]["jobs"][0]["state"] == "completed"


def test_one_failed_adapter_gives_exit_1_and_its_reason() -> None:
    code, out, err = gshare(*flags(a="steps=9", bad="fail_at=2"))
    assert code == 1
    assert "completed" in out
    assert "bad: failed at step 2 of 10: its script says so" in err
    assert "log of the trainer: " in err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 130)]
)
def test_a_signal_checkpoints_and_stops_and_resume_gives_the_same_bits(
    number: signal.Signals, code: int
) -> None:
    arguments = flags(a=f"steps=150,sleep=0.005,save=1000,{let_go_to(UPTO.absolute(), 100)}")
    process = start(*arguments)
    assert process.stderr is not None
    for line in process.stderr:
        if "step 1 of" in line:
            break
    else:
        pytest.fail(f"no first step; exit code {process.wait()}")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "stopping" in err
    assert "stopped" in out
    assert 0 < saved_step("a") < 150
    assert no_trainer_is_left()
    UPTO.unlink()
    assert gshare(*arguments, "--resume")[0] == 0
    assert Path("out/a/adapter_model.safetensors").read_text() == weights_after("a", 150)


def test_a_second_ctrl_c_leaves_at_once_and_the_trainer_stops_by_itself() -> None:
    process = start(*flags(a=LONG))
    assert process.stderr is not None
    wait_for(lambda: saved_step("a") > 0)
    (trainer,) = registry.live_trainers()
    client = TrainerClient(trainer, "test")
    client.close()
    os.kill(client.hello.pid, signal.SIGSTOP)  # as a round that takes long
    try:
        process.send_signal(signal.SIGINT)
        while "stopping" not in (line := process.stderr.readline()):
            assert line
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        os.kill(client.hello.pid, signal.SIGCONT)
    assert process.returncode == 130
    assert "left at once" in err
    wait_for(no_trainer_is_left)
    assert saved_step("a") > 0
    assert registry.finished_jobs()[0].status.reason in ("its client left", "stopped by the user")


def test_a_killed_client_leaves_a_checkpoint_and_no_process() -> None:
    process = start(*flags(a=LONG))
    wait_for(lambda: saved_step("a") >= 5)
    process.kill()
    process.communicate()
    wait_for(no_trainer_is_left)
    (job,) = registry.finished_jobs()
    assert (job.status.state, job.status.reason) == ("stopped", "its client left")
    wait_for(lambda: not list(registry.trainer_dirs()))  # it took its directory along: nobody else would
    assert saved_step("a") == job.status.step


def test_detached_jobs_go_on_and_are_followed_and_stopped_by_name() -> None:
    code, out, err = gshare(*flags(a=LONG, b=LONG), "--detach")
    assert code == 0, err
    assert out.split() == ["a", "b"]
    wait_for(lambda: saved_step("b") >= 5)
    code, out, _ = gshare("jobs", "list", "--json")
    assert {(row["job"], row["state"]) for row in map(json.loads, out.splitlines())} == {
        ("a", "running"),
        ("b", "running"),
    }
    following = start("jobs", "attach", "b")
    assert following.stderr is not None
    while "b: step" not in (line := following.stderr.readline()):
        assert line
    assert gshare("jobs", "pause", "a")[::2] == (0, "a: paused\n")
    assert gshare("jobs", "pause", "a")[::2] == (0, "a: paused already\n")
    assert gshare("jobs", "resume", "a")[::2] == (0, "a: resumed\n")
    assert gshare("jobs", "resume", "a")[::2] == (0, "a: running already\n")
    assert gshare("jobs", "stop", "a", "b")[0] == 0
    out, err = following.communicate(timeout=60)
    assert following.returncode == 130
    assert "stopped" in out
    wait_for(no_trainer_is_left)
    code, out, _ = gshare("jobs")
    assert sorted(line.split()[0:2] for line in out.splitlines()[1:]) == [["a", "stopped"], ["b", "stopped"]]
    code, _, err = gshare("jobs", "stop", "a")
    how = "it goes on with the command that it was started by, and --resume"
    assert (code, f"a has ended: stopped; {how}" in err) == (2, True)
    Path("out/a/clone.toml").write_text("")
    _, _, err = gshare("jobs", "resume", "a")
    assert "goes on with `gshare finetune --adapters-config" in err
    code, _, err = gshare("jobs", "stop", "aa")
    assert (code, "no job named aa; did you mean a?" in err) == (2, True)


def test_detached_jobs_are_found_at_once_not_those_that_ended_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gshare(*flags(a="steps=5"))[0] == 0
    loading = Path("loading").absolute()
    loading.touch()
    monkeypatch.setenv("GSHARE_FAKE_LOAD", f"while={loading}")  # admitted no sooner than that
    Path("again.jsonl").write_text(LONG)
    assert gshare("finetune", "--model", "fake", "--adapter", "a=again.jsonl:out/again", "--detach")[0] == 0
    code, out, _ = gshare("jobs", "list", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["job"], row["state"], Path(row["output_dir"]).name) for row in rows] == [
        ("a", "queued", "again")
    ]
    loading.unlink()
    code, _, err = gshare("jobs", "stop", "a")
    assert (code, err) == (0, "a: stopped\n")
    wait_for(no_trainer_is_left)
    assert registry.finished_jobs()[0].status.state == "stopped"


def test_attach_survives_the_death_of_the_trainer() -> None:
    assert gshare(*flags(a=LONG), "--detach")[0] == 0
    following = start("jobs", "attach", "a")
    assert following.stderr is not None
    while "a: step" not in (line := following.stderr.readline()):
        assert line
    (trainer,) = registry.live_trainers()
    client = TrainerClient(trainer, "test")
    os.kill(client.hello.pid, signal.SIGSTOP)
    steps = saved_step("a") + 100
    Path("a.jsonl").write_text(f"steps={steps},sleep=0.005,save=5")  # the next trainer reads it
    os.kill(client.hello.pid, signal.SIGKILL)
    out, err = following.communicate(timeout=120)
    assert following.returncode == 0, err
    assert "its trainer is gone" in err
    assert "completed" in out
    assert Path("out/a/adapter_model.safetensors").read_text() == weights_after("a", steps)


def test_a_detached_client_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSHARE_FAKE_LOAD", "error")
    code, _, err = gshare(*flags(a="steps=5"), "--detach")
    # It may have reached its trainer before the base failed to load: then `jobs` says why.
    if code == 0:
        wait_for(lambda: bool(registry.finished_jobs()))
        assert "no such model" in registry.finished_jobs()[0].status.reason
    else:
        assert "its log says why" in err


def test_a_directory_with_another_run_is_refused_and_nothing_is_written(
    capsys: pytest.CaptureFixture,
) -> None:
    arguments = flags(a="steps=5", b="steps=5")
    assert gshare(*arguments)[0] == 0
    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")}
    for more, says in (([], "already holds this run"), (["--r", "8"], r"another run (r: 16 → 8")):
        assert main([*arguments, "--adapter", "a.jsonl:out/new", *more]) == 2
        assert says in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")} == before


def test_changed_data_or_another_base_is_refused_before_a_trainer_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    arguments = flags(a="steps=5")
    assert gshare(*arguments)[0] == 0

    def prepare(run: RunSpec, console: object, *, resume: bool) -> tuple[Path, list[JobRequest]]:
        (spec,) = run.adapters
        return Path("/nonexistent"), [
            JobRequest(spec=spec, train_store="/nonexistent", train_hash="1" * 64, resume=resume)
        ]

    monkeypatch.setattr(command, "prepare", prepare)
    monkeypatch.setattr(command, "supervise_run", lambda *_, **__: pytest.fail("a trainer was started"))
    assert main([*arguments, "--resume"]) == 2
    assert "training data: tokens 0000" in capsys.readouterr().err


def test_a_directory_in_use_means_try_again_later() -> None:
    process = start(*flags(a=LONG))
    wait_for(lambda: Path("out/a/.lock").exists())
    for results in (False, True):  # without --resume too, whatever the other run has left there
        for resume in (False, True):
            with pytest.raises(RetryLater, match="gshare jobs stop"):
                command.finetune(model="fake", adapter=["a.jsonl:out/a"], resume=resume)
        if not results:
            wait_for(lambda: saved_step("a") >= 5)
    process.kill()
    process.communicate()
    wait_for(no_trainer_is_left)


def test_of_two_that_start_at_once_the_loser_is_told_to_try_again() -> None:
    arguments = flags(a=f"steps=300,sleep=0.01,save=1,{let_go_to(UPTO.absolute(), 100)}")
    both = [start(*arguments) for _ in range(2)]
    # The loser: the winner is held back.
    wait_for(lambda: any(process.poll() is not None for process in both))
    UPTO.unlink()
    ended = [(process.communicate(timeout=60)[1], process.returncode) for process in both]
    assert sorted(code for _, code in ended) == [0, 75], ended
    wait_for(no_trainer_is_left)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["finetune"], "--model is missing"),
        (["finetune", "--model", "fake"], "--adapter"),
        (["finetune", "--model", "fake", "--adapter", "a.jsonl:out/a", "--r", "0"], "--r"),
        (["finetune", "--model", "fake", "--adapter", "a.jsonl:out/a", "--rank", "x"], "--rank"),
        (["finetune", "--adapters-config", "none.toml"], "none.toml"),
        (["finetune", "--adapters-config", "x.toml", "--adapter", "a:b"], "give one of them"),
        (["finetune", "--model", "fake", "--adapter", "a.jsonl:out/a", "--report-to", "wand"], "wandb"),
        (["jobs", "stop"], "name at least one job"),
        (["jobs", "attach", "nobody"], "no job named nobody"),
    ],
)
def test_bad_usage_is_one_message_exit_2_and_nothing_written(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture
) -> None:
    Path("a.jsonl").write_text("steps=1")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""
    assert not Path("out").exists()


def test_aliases_reach_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.jsonl").write_text("")
    seen: list[RunSpec] = []

    def stop_here(run: RunSpec, *, resume: bool) -> None:
        seen.append(run)
        raise UsageError("far enough")

    monkeypatch.setattr(command, "_check_output_dirs", stop_here)
    given = "--rank 4 --epochs 2 --max-seq-len 99 --lr 0.5 --method qlora --task instruct --use-rslora"
    assert main(["finetune", "--model", "m/x", "--adapter", "a.jsonl:out/a", *given.split()]) == 2
    (adapter,) = seen[0].adapters
    assert (adapter.r, adapter.num_train_epochs, adapter.max_length, adapter.learning_rate) == (4, 2, 99, 0.5)
    assert adapter.use_rslora
    assert seen[0].base_dtype == "nf4"


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("detach", ["", "--detach"])
def test_a_run_without_standard_streams_trains_all_the_same(closed: str, detach: str) -> None:
    arguments = [sys.executable, "-c", GSHARE, *flags(a="steps=3"), *([detach] if detach else [])]
    subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *arguments], check=False, timeout=60)
    wait_for(lambda: Path("out/a/adapter_model.safetensors").exists())
    wait_for(no_trainer_is_left)
    assert registry.finished_jobs()[0].status.state == "completed"


def test_a_trainer_that_hangs_is_named_and_the_others_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name in ("a", "b"):
        assert gshare(*flags(**{name: LONG}), "--detach")[0] == 0
    trainers = {}
    for directory in registry.live_trainers():
        client = TrainerClient(directory, "test")
        wait_for(lambda client=client: bool(client.jobs()))
        trainers[client.jobs()[0].job] = (client.hello.pid, directory.name)
        client.close()
    pid, name = trainers["a"]
    os.kill(pid, signal.SIGSTOP)
    try:
        monkeypatch.setattr(jobs, "ANSWER_SECONDS", 1.0)
        started = time.monotonic()
        assert main(["jobs"]) == 0
        assert time.monotonic() - started < 20  # the hello's own limit is 30 s
        captured = capsys.readouterr()
        assert f"trainer {name} does not answer" in captured.err
        assert [line.split()[0] for line in captured.out.splitlines()[1:]] == ["b"]
        assert main(["jobs", "stop", "b"]) == 0
    finally:
        os.kill(pid, signal.SIGCONT)
    assert main(["jobs", "stop", "a"]) == 0
    wait_for(no_trainer_is_left)
