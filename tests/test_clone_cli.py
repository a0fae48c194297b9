"""`gshare jobs clone` as a user meets it, over an engine of straw: who joins what, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import msgspec
import pytest
from gshare.agent.jobs.early_exit import EarlyExit
from gshare.agent.jobs.sweep_records import (
    SWEEP_LOCK,
    Configuration,
    DecisionLog,
    SweepRecord,
    read_decisions,
    write_sweep,
)
from gshare.agent.service import registry
from gshare.agent.service.output_dir import read_record
from gshare.agent.service.registry import take_lock
from gshare.cli import clone as clone_command
from gshare.cli.sweep_board import result_of

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from fake_runner import weights_after  # noqa: E402
from joining_clients import make_base, wait_for  # noqa: E402
from straw_runs import LONG, flags, gshare, own_ledger, read_until, start  # noqa: E402

#: More flags of the parent's run, for the tests that need them.
SHORT = "steps=9,sleep=0.01"


@pytest.fixture(autouse=True)
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_ledger(tmp_path, monkeypatch)
    monkeypatch.delenv("GSHARE_DEVICES")
    monkeypatch.setenv("STRAW_BASE", str(make_base(tmp_path / "base", b"weights")))


@pytest.fixture
def parent() -> Iterator[Popen[str]]:
    """Job a, of a client of its own, that runs until the test ends."""
    process = start(*flags("a", LONG))
    read_until(process, "step 1 of")
    yield process
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130, "the parent did not go on until it was stopped"


def script(name: str, text: str = SHORT) -> str:
    Path(f"{name}.jsonl").write_text(text)
    return f"data={name}.jsonl"


def weights(name: str) -> str:
    return Path("out", name, "adapter_model.safetensors").read_text()


def files(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


def test_a_cold_clone_joins_the_trainer_of_another_client(parent: Popen[str]) -> None:
    (trainer,) = registry.live_trainers()
    code, out, err = gshare("jobs", "clone", "a", "--set", "lr=1e-3", "--set", script("b"))
    assert code == 0, err
    assert f"joins trainer {trainer.name} of job a" in err
    assert "a-clone" in out
    assert registry.live_trainers() == [trainer]
    assert weights("a-clone") == weights_after("a-clone", 9)
    record, of_parent = read_record(Path("out/a-clone")), read_record(Path("out/a"))
    assert record is not None
    assert of_parent is not None
    assert record.start is None
    changes = {"name": "a-clone", "learning_rate": 1e-3, "data": str(Path("b.jsonl").absolute())}
    changes["output_dir"] = str(Path("out/a-clone").absolute())
    assert record.spec == msgspec.structs.replace(of_parent.spec, **changes)


def test_a_warm_clone_starts_from_the_weights_of_that_moment_and_says_so(parent: Popen[str]) -> None:
    code, _, err = gshare("jobs", "clone", "a", "--set", script("b"), "--name", "b", "--warm", "--json")
    assert code == 0, err
    record = read_record(Path("out/b"))
    assert record is not None
    assert record.start is not None
    assert (record.start.parent, record.start.directory) == ("a", str(Path("out/b/start").absolute()))
    at = record.start.step
    assert at >= 1
    assert Path("out/b/start/adapter_model.safetensors").read_text() == weights_after("a", at)
    assert weights("b") == weights_after("b", 9, weights_after("a", at))
    assert weights("b") != weights_after("b", 9)


def test_ctrl_c_stops_the_clone_alone_and_its_file_goes_on_with_it(parent: Popen[str]) -> None:
    clone = start("jobs", "clone", "a", "--set", script("b", LONG), "--name", "b", "--warm")
    read_until(clone, "b: step 1 of")
    clone.send_signal(signal.SIGINT)
    clone.communicate(timeout=60)
    assert clone.returncode == 130
    script("b")  # nine steps now
    done = json.loads(Path("out/b/checkpoint.json").read_text())["step"]
    script("b", f"steps={done + 5}")
    record = read_record(Path("out/b"))
    assert record is not None
    assert record.start is not None
    code, _, err = gshare("finetune", "--resume", "--adapters-config", "out/b/clone.toml")
    assert code == 0, err
    assert weights("b") == weights_after("b", done + 5, weights_after("a", record.start.step))
    after = read_record(Path("out/b"))
    assert after is not None
    assert after.start == record.start
    code, _, err = gshare("finetune", "--adapters-config", "out/b/clone.toml")
    assert code == 2
    assert "holds another run (start: a at step" in err


def test_a_detached_clone_is_listed_and_lives_on(parent: Popen[str]) -> None:
    code, out, err = gshare("jobs", "clone", "a", "--set", script("b", LONG), "--name", "b", "--detach")
    assert (code, out) == (0, "b\n"), err
    code, out, _ = gshare("jobs", "list", "--json")
    assert {job["job"] for job in map(json.loads, out.splitlines())} == {"a", "b"}
    assert gshare("jobs", "stop", "b")[0] == 0
    assert gshare("jobs", "attach", "b")[0] == 130


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["aa", "--warm"], "no job named aa; did you mean a?"),
        (["a"], "nothing of a is changed"),
        (["a", "--set", "learning_rte=1"], "did you mean 'learning_rate'?"),
        (["a", "--warm", "--set", "r=8"], "a warm clone has the shapes of its parent's weights"),
        (["a", "--warm", "--name", "a"], "--name a: a job of this name is running"),
        (["a", "--warm", "--set", "output_dir=taken"], "start: is there already"),
        (["a", "--warm", "--set", "output_dir=out/a"], "lie one inside the other"),
        (["a", "--warm", "--set", "output_dir=out/a/b"], "lie one inside the other"),
        (["a", "--warm", "--cluster", "cluster.toml"], "a clone on a cluster is cold"),
        (["a", "--vram", "8", "--cluster", "cluster.toml"], "a flag of the GPU is for jobs of this machine"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_and_nothing_is_written(
    parent: Popen[str], arguments: list[str], message: str
) -> None:
    Path("taken/start").mkdir(parents=True)
    code, out, err = gshare("jobs", "clone", *arguments)
    said = [line for line in err.splitlines() if line.startswith("gshare: ")]
    assert (code, out, len(said)) == (2, "", 1), err
    assert message in said[0]
    assert files(Path("out")) == {"a"}
    assert files(Path("taken")) == {"start"}


def test_a_clone_that_is_refused_leaves_nothing(parent: Popen[str]) -> None:
    code, _, err = gshare("jobs", "clone", "a", "--set", script("b", "refuse=1"), "--name", "b", "--warm")
    assert code == 1
    assert "refused by its script" in err
    assert files(Path("out")) == {"a"}


def test_a_trainer_that_nobody_joins_has_no_clones(tmp_path: Path) -> None:
    own = start(*flags("a", LONG, "--no-join"))
    read_until(own, "step 1 of")
    code, _, err = gshare("jobs", "clone", "a", "--warm")
    assert code == 2
    assert "cannot be joined from here: it was started with --no-join" in err
    assert files(Path("out")) == {"a"}
    own.send_signal(signal.SIGINT)
    own.communicate(timeout=60)


def test_a_job_that_has_ended_is_cloned_in_the_trainer_that_it_had(parent: Popen[str]) -> None:
    done = start(*flags("d", SHORT))
    done.communicate(timeout=60)
    (trainer,) = registry.live_trainers()
    code, _, err = gshare("jobs", "clone", "d", "--set", "lr=1e-3", "--name", "e")
    assert code == 0, err
    assert f"joins trainer {trainer.name}" in err
    assert weights("e") == weights_after("e", 9)
    code, _, err = gshare("jobs", "clone", "d", "--warm", "--name", "f")  # straw saves no real checkpoint
    assert code == 2
    assert "no whole checkpoint of d is there; leave --warm out" in err
    assert not Path("out/f").exists()


def test_with_its_trainer_gone_too_a_clone_is_a_run_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = start(*flags("d", SHORT))
    done.communicate(timeout=60)
    wait_for(lambda: not list(registry.trainer_dirs()))
    code, out, err = gshare("jobs", "clone", "d", "--set", "lr=1e-3")
    assert code == 0, err
    assert "the trainer of d has ended: its clone is a run of its own" in err
    assert "d-clone" in out
    assert weights("d-clone") == weights_after("d-clone", 9)
    record = read_record(Path("out/d-clone"))
    assert record is not None
    assert record.spec.learning_rate == 1e-3
    code, _, err = gshare("finetune", "--resume", "--adapters-config", "out/d-clone/clone.toml")
    assert code == 0, err

    monkeypatch.setenv("STRAW_BASE", str(make_base(Path("other"), b"other weights")))
    code, _, err = gshare("jobs", "clone", "d", "--set", "lr=1e-3", "--name", "e")
    assert code == 2
    assert "is not the model any more that d was trained on" in err
    assert not Path("out/e").exists()
    monkeypatch.setenv("STRAW_BASE", "base")
    Path("out/d/run.json").unlink()
    code, _, err = gshare("jobs", "clone", "d", "--set", "lr=1e-3", "--name", "e")
    assert code == 1
    assert "run.json: not the record of job d" in err


def _sweep_record(settings: EarlyExit = EarlyExit(), **directories: Path) -> SweepRecord:  # noqa: B008
    return SweepRecord(
        name="s",
        model="fake",
        base_dtype="bf16",
        early_exit=msgspec.to_builtins(settings),
        created=1.0,
        configurations=[
            Configuration(
                name=name,
                hyper_parameters={},
                total_steps=40000,
                samples_total=40000,
                output_dir=str(directory),
            )
            for name, directory in directories.items()
        ],
    )


@pytest.mark.parametrize("name", ["s-late", "late"])
def test_a_clone_takes_no_name_or_folder_of_a_configuration_that_waits(parent: Popen[str], name: str) -> None:
    """The control: beside a sweep without it the same clone is made."""
    out = Path("out").absolute()
    write_sweep(out, _sweep_record(a=out / "a", **{"s-late": out / "late"}))
    clone = ("jobs", "clone", "a", "--set", "lr=1e-3", "--set", script("b"), "--name", name)
    code, _, err = gshare(*clone)
    assert code == 2
    assert f"--name {name}: is of a configuration of the sweep in {out}; choose another" in err
    assert not (out / name).exists()
    write_sweep(out, _sweep_record(a=out / "a"))
    assert gshare(*clone)[0] == 0


@pytest.mark.parametrize("runs", [True, False])
def test_a_clone_of_a_sweep_s_configuration_is_among_its_decisions(parent: Popen[str], runs: bool) -> None:
    """As long as the sweep runs. It is stopped by its own losses, as its parent would be."""
    out = Path("out").absolute()
    settings = EarlyExit(overfitting_patience=1)
    write_sweep(out, _sweep_record(settings, a=out / "a"))
    DecisionLog(out).close()
    lock = take_lock(out / SWEEP_LOCK)
    assert lock is not None
    if not runs:
        os.close(lock)
    code, _, err = gshare("jobs", "clone", "a", "--set", "lr=1e-3", "--set", script("b"), "--name", "b")
    assert code == 0, err
    decisions = [
        (one.job, one.event, one.reason, one.evidence.get("set", {}).get("learning_rate"))
        for one in read_decisions(out)
    ]
    assert decisions == ([("a", "cloned", "as b, cold", "1e-3")] if runs else [])
    (row,) = result_of(out)["jobs"]
    assert row["state"] == "queued"  # the configuration itself is as it was
    parent_record = read_record(out / "a")
    assert parent_record is not None
    sweep = clone_command._sweep_of(parent_record)
    assert sweep is not None
    assert sweep.early_exit == settings
    other = read_record(out / "b")  # the clone is no configuration
    assert other is not None
    assert clone_command._sweep_of(other) is None
    if runs:
        os.close(lock)
