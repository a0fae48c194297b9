"""`gshare sweep` with real processes and the real engine: killed in the warm-up and resumed, the same bytes.

A sweep that nobody disturbs is the reference. Its survivors have the bytes of a plain `finetune`; one whose
client is killed, one whose trainer is killed and one that is interrupted have its winner and its bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from gshare.agent.jobs.sweep_records import read_decisions, read_sweep
from gshare.agent.service import registry
from gshare.agent.service.client import TrainerClient
from gshare.cli.sweep_board import result_of

WAIT_SECONDS = 300.0
SWEEP = """\
model = "{model}"
base_dtype = "fp32"
[defaults]
data = "data.jsonl"
max_steps = 40
eval_steps = 4
save_steps = 5
max_length = 32
lora_dropout = 0.1
optim = "adamw_8bit"
[sweep]
output_dir = "out"
max_concurrent = {at_once}
[sweep.grid]
learning_rate = [1e-4, 5e-3]
r = [2, 4]
[early_exit]
warmup = 0.25
keep = 0.5
gap_threshold = 10.0
"""
#: `gshare` that dies when so many jobs have paused and the next one is at its third step. It is not killed
#: from here: until a busy machine came to that, the sweep had ranked all and the first had completed.
DYING = """
import os, signal, sys
from gshare.agent.jobs.events import Stepped
from gshare.agent.jobs.sweep_records import DecisionLog
from gshare.agent.service.client import TrainerClient
from gshare.agent.service.protocol import EventFrame
from gshare.cli.main import main

left = int(sys.argv[1])
append, take = DecisionLog.append, TrainerClient._take

def counted(self, decision):
    global left
    append(self, decision)
    left -= decision.event == "paused"

def taken(self, message):
    take(self, message)
    event = message.event if isinstance(message, EventFrame) else None
    if left <= 0 and isinstance(event, Stepped) and event.step >= 3:
        os.kill(os.getpid(), signal.SIGKILL)

DecisionLog.append, TrainerClient._take = counted, taken
sys.exit(main(sys.argv[2:]))
"""
WORDS = ("red", "green", "blue", "one", "two", "three", "cat", "dog", "sun", "moon", "tree", "fish")


def _write(directory: Path, model: Path, at_once: int) -> Path:
    directory.mkdir()
    rows = [
        {"prompt": " ".join(WORDS[(i * k) % 12] for k in (1, 3, 5)), "completion": WORDS[(i * 7) % 12]}
        for i in range(30)
    ]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = directory / "s.toml"
    path.write_text(SWEEP.format(model=model, at_once=at_once))
    return path


def _start(*arguments: str, program: Sequence[str] = ("-m", "gshare.cli.main")) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == code, err[-2000:]
    return out, err


def _run(*arguments: str, code: int = 0) -> tuple[str, str]:
    return _finish(_start(*arguments), code)


def _wait(until: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not until():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def _paused(out: Path) -> int:
    return sum(one.event == "paused" for one in read_decisions(out)) if out.exists() else 0


def _trainers() -> Iterator[int]:
    for directory in registry.live_trainers():
        with contextlib.suppress(Exception):  # on its way up or down
            client = TrainerClient(directory, "test", timeout=2.0)
            client.close()
            yield client.hello.pid


def _gone() -> None:
    """Until every trainer has noticed that its client is dead."""
    deadline = time.monotonic() + WAIT_SECONDS
    while registry.live_trainers():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _files(out: Path) -> dict[str, bytes]:
    """Bytes of every file that a job leaves, but those that tell the time, paths or who was beside it.

    Of its checkpoints the newest: a job whose client dies saves one where it is, and which older one that
    pushes out hangs on the moment.
    """
    names = ("adapter_model.safetensors", "optimizer.safetensors", "adapter_config.json")
    older = {path for job in out.iterdir() if job.is_dir() for path in _checkpoints(job)[:-1]}
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.name in names and path.is_file() and path.parent not in older
    }


def _checkpoints(job: Path) -> list[Path]:
    return sorted(job.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an undisturbed sweep, two at once."""
    directory = tmp_path_factory.mktemp("sweep") / "whole"
    _, err = _run("sweep", str(_write(directory, tiny_checkpoint, at_once=2)))
    assert "goes on after its warm-up" in err
    return directory


def _check_same(directory: Path, reference: Path) -> None:
    assert result_of(directory / "out")["winner"] == result_of(reference / "out")["winner"]
    ours, theirs = _files(directory / "out"), _files(reference / "out")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_half_of_four_go_on_and_the_rest_keep_their_boundary(reference: Path) -> None:
    result = result_of(reference / "out")
    states = [(row["state"], row["pattern"], row["step"]) for row in result["jobs"]]
    assert states == [("completed", "", 40)] * 2 + [("stopped", "underperformance", 10)] * 2
    assert result["samples"] == 100
    assert result["samples_total"] == 160
    assert Path(result["best"], "adapter_model.safetensors").is_file()
    decisions = read_decisions(reference / "out")
    losses = {one.job: one.evidence["val_loss"] for one in decisions if one.event == "paused"}
    best = sorted(losses, key=lambda job: losses[job])[:2]
    assert {row["adapter"] for row in result["jobs"][:2]} == set(best)


def test_survivors_have_the_bytes_of_a_plain_run(
    tiny_checkpoint: Path, reference: Path, tmp_path: Path
) -> None:
    winner, second = result_of(reference / "out")["jobs"][:2]
    path = _write(tmp_path / "plain", tiny_checkpoint, at_once=0)
    text = path.read_text().split("[sweep]")[0]
    for row in (winner, second):
        values = "".join(f"{key} = {value}\n" for key, value in row["hyper_parameters"].items())
        text += f'[[adapter]]\noutput_dir = "out/{Path(row["output_dir"]).name}"\n{values}'
    path.write_text(text)
    _run("finetune", "--adapters-config", str(path), "--no-join")
    plain, ours = _files(tmp_path / "plain" / "out"), _files(reference / "out")
    compared = [name for name in plain if "/best/" not in name]  # a sweep evaluates at the boundary too
    assert len(compared) >= 2 * 4
    assert [name for name in compared if plain[name] != ours[name]] == []
    # The control: the two differ from each other.
    one, other = (Path(row["output_dir"]).name for row in (winner, second))
    assert ours[f"{one}/adapter_model.safetensors"] != ours[f"{other}/adapter_model.safetensors"]


@pytest.mark.slow
def test_one_at_a_time_gives_the_same_winner_and_the_same_bytes(
    tiny_checkpoint: Path, reference: Path, tmp_path: Path
) -> None:
    _run("sweep", str(_write(tmp_path / "one", tiny_checkpoint, at_once=1)))
    _check_same(tmp_path / "one", reference)


def test_the_client_killed_in_the_warm_up_and_resumed(
    tiny_checkpoint: Path, reference: Path, tmp_path: Path
) -> None:
    path = _write(tmp_path / "killed", tiny_checkpoint, at_once=1)
    for paused in (1, 3):
        more = paused - _paused(path.parent / "out")
        resume = ["--resume"] if paused > 1 else []
        process = _start("sweep", str(path), *resume, program=("-c", DYING, str(more)))
        _finish(process, -signal.SIGKILL)
        _gone()
        assert _paused(path.parent / "out") == paused
    assert not any(one.event == "completed" for one in read_decisions(path.parent / "out"))
    _, err = _run("sweep", str(path), code=2)
    assert "already holds a sweep (s); go on with --resume" in err
    _run("sweep", str(path), "--resume")
    _check_same(path.parent, reference)
    # A finished one says its result again and does nothing.
    before = read_decisions(path.parent / "out")
    out, _ = _run("sweep", str(path), "--resume")
    assert "winner: " in out
    assert read_decisions(path.parent / "out") == before


def test_the_trainer_killed_in_the_warm_up(tiny_checkpoint: Path, reference: Path, tmp_path: Path) -> None:
    path = _write(tmp_path / "killed", tiny_checkpoint, at_once=1)
    process = _start("sweep", str(path), "--no-join")
    for paused in (1, 2):
        _wait(lambda: _paused(path.parent / "out") >= paused, process)  # noqa: B023
        _wait(lambda: any(True for _ in _trainers()), process)
        for pid in _trainers():
            os.kill(pid, signal.SIGKILL)
    _, err = _finish(process)
    assert "the trainer died" in err
    _check_same(path.parent, reference)


@pytest.mark.slow
def test_interrupted_it_checkpoints_and_goes_on(
    tiny_checkpoint: Path, reference: Path, tmp_path: Path
) -> None:
    path = _write(tmp_path / "stopped", tiny_checkpoint, at_once=2)
    process = _start("sweep", str(path))
    _wait(lambda: _paused(path.parent / "out") >= 1, process)
    process.send_signal(signal.SIGINT)
    out, err = _finish(process, 130)
    assert "--resume goes on with it" in err
    assert out.splitlines()[-1].endswith(" samples so far")  # nothing is saved, and nobody has won or lost
    assert not out.splitlines()[-1].startswith("trained on 0 of")
    assert not any(one.pattern == "user" for one in read_decisions(path.parent / "out"))
    _run("sweep", str(path), "--resume")
    _check_same(path.parent, reference)


@pytest.fixture
def finished(reference: Path, tmp_path: Path) -> Path:
    """The file of a finished sweep of its own."""
    directory = tmp_path / "finished"
    shutil.copytree(reference, directory)
    record = directory / "out" / "sweep.json"
    record.write_text(record.read_text().replace(str(reference), str(directory)))
    return directory / "s.toml"


@pytest.mark.parametrize("how", ["gone", "emptied", "cut short"])
def test_without_its_decisions_a_finished_sweep_is_refused_and_nothing_is_overwritten(
    finished: Path, how: str
) -> None:
    out = finished.parent / "out"
    log = out / "decisions.jsonl"
    if how == "gone":
        log.unlink()
    else:
        log.write_bytes(b"" if how == "emptied" else log.read_bytes().partition(b"\n")[0] + b"\n")
    before, files = _files(out), sorted(out.rglob("*"))
    _, err = _run("sweep", str(finished), "--resume", code=2)
    what = "says nothing of s-" if how == "cut short" else "is gone or empty, and s-"
    assert f"{log} {what}" in err
    assert "put the file back as it was, or choose another output_dir" in err
    assert (_files(out), sorted(out.rglob("*"))) == (before, files)


def test_a_winner_whose_adapter_was_deleted_is_told(finished: Path) -> None:
    out = finished.parent / "out"
    best = Path(result_of(out)["best"])
    assert best.is_relative_to(out)
    shutil.rmtree(best)
    said, err = _run("sweep", str(finished), "--resume", code=1)
    assert said.splitlines()[-1].endswith(", its adapter is gone")
    winner = result_of(out)["winner"]
    assert f"the adapter of the winner, {winner}, is not in {best}, and" in err
    said, err = _run("sweep", str(finished), "--resume", "--json", code=1)
    assert json.loads(said.splitlines()[-1])["winner"] == winner
    assert "run the sweep again with another output_dir" in err


def test_a_finished_sweep_that_was_moved_says_where_its_adapter_is_now(finished: Path) -> None:
    moved = finished.parent.rename(finished.parent.with_name("moved"))
    said, _ = _run("sweep", str(moved / "s.toml"), "--resume")
    best = Path(said.splitlines()[-1].partition("its adapter in ")[2])
    assert best.is_relative_to(moved)
    assert (best / "adapter_model.safetensors").is_file()


def test_another_sweep_in_its_directory_is_refused(reference: Path) -> None:
    before = _files(reference / "out")
    path = reference / "other.toml"
    text = (reference / "s.toml").read_text().replace("[sweep]", '[sweep]\nname = "s"')
    path.write_text(text.replace("5e-3", "1e-2").replace("warmup = 0.25", "warmup = 0.5"))
    _, err = _run("sweep", str(path), "--resume", code=2)
    assert "this is not the sweep that was begun: " in err
    assert "configuration s-lr0.005-r2 is gone" in err
    assert _files(reference / "out") == before


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ("val_fraction = 0.0", [], "no validation data, and a sweep ranks by validation loss"),
        ("", ["--vram", "1MiB"], "needs "),
        ("max_length = 4096", [], "max_length: 4096 is beyond the model's"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_written(
    tiny_checkpoint: Path, tmp_path: Path, change: str, flags: list[str], message: str
) -> None:
    path = _write(tmp_path / "s", tiny_checkpoint, at_once=2)
    text = path.read_text()
    key = change.split(" ", 1)[0]
    lines = [line for line in text.splitlines() if not key or not line.startswith(key)]
    lines.insert(lines.index("[defaults]") + 1, change)
    path.write_text("\n".join(lines))
    _, err = _run("sweep", str(path), *flags, code=2)
    assert message in err
    # What was read of the data may be said before.
    assert len(err.partition("gshare: ")[2].splitlines()) == 1, err
    assert not (path.parent / "out").exists()


def test_all_diverged_from_the_start_has_no_winner(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = _write(tmp_path / "s", tiny_checkpoint, at_once=2)
    # Each step multiplies the weights by -1e9.
    text = path.read_text().replace("[1e-4, 5e-3]", "[9e5, 1e6]").replace('"adamw_8bit"', '"adamw"')
    path.write_text(text.replace("[defaults]", "[defaults]\nweight_decay = 1000"))
    out, _ = _run("sweep", str(path), code=1)
    assert "no winner: no configuration had a validation loss that is a number" in out
    assert {one.event for one in read_decisions(path.parent / "out")} == {"started", "diverged"}


def test_what_was_drawn_is_told(tiny_checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra is not installed")
    path = _write(tmp_path / "s", tiny_checkpoint, at_once=3)
    text = path.read_text().replace("[sweep.grid]", "n_trials = 3\nbatch = 2\n[sweep.ranges]")
    text = text.replace("[1e-4, 5e-3]", "{ low = 1e-4, high = 5e-3 }").replace("= 40", "= 8")
    path.write_text(text)
    out, err = _run("sweep", str(path))
    assert re.search(r"^winner: s-c\d \(lr 0\.00\d+, r \d\), its adapter in ", out, re.M), out
    drawn = [line for line in err.splitlines() if ": drawn with lr 0.00" in line]
    assert [line.partition(":")[0] for line in drawn] == ["s-c1", "s-c2", "s-c3"]
    record = read_sweep(path.parent / "out")
    assert record is not None
    assert [line.rpartition("r ")[2] for line in drawn] == [str(one["r"]) for one in record.sampled]


def test_a_plan_trains_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = _write(tmp_path / "s", tiny_checkpoint, at_once=3)
    out, _ = _run("sweep", "plan", str(path), "--json", "--tokens-per-second", "100")
    plan = json.loads(out)
    assert [one["boundary"] for one in plan["configurations"]] == [10] * 4
    assert [len(stage["names"]) for stage in plan["stages"]] == [3, 1, 2]
    # Four warm-ups of ten steps, and two jobs' other thirty, of four times forty.
    assert plan["tokens"] / plan["tokens_in_full"] == pytest.approx(100 / 160, rel=0.02)
    assert plan["seconds"] == pytest.approx(plan["tokens"] / 100)
    assert not (path.parent / "out").exists()
    out, _ = _run("sweep", "plan", str(path))
    rows = [line.split("  ")[-1].strip() for line in out.partition("train together\n")[2].splitlines()[:3]]
    assert rows == [", ".join(stage["names"]) for stage in plan["stages"]]
    out, _ = _run("sweep", "plan", str(path), "--vram", "2GiB")
    assert "time: not known; --tokens-per-second says how fast it trains" in out
    assert "a short warm-up" not in out
    path.write_text(path.read_text().replace("warmup = 0.25", "warmup = 0.05"))
    out, _ = _run("sweep", "plan", str(path))
    assert "a short warm-up: s-lr0.0001-r2 is ranked after 2 steps of 40; warmup = 0.13 gives it 6\n" in out
    _, err = _run("sweep", "plan", str(path), "--tokens-per-second", "0", code=2)
    assert "--tokens-per-second: must be a finite number above 0" in err
