"""What `gshare sweep` makes sure of before its first job: the same sweep as before, and nobody beside it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.jobs.sweep_records import (
    Configuration,
    Decision,
    DecisionLog,
    SamplerRecord,
    SweepRecord,
    read_sweep,
    write_sweep,
)
from gshare.agent.jobs.sweep_spec import SweepFile
from gshare.cli import sweep as sweep_command
from gshare.cli import sweep_cluster, sweep_prepared
from gshare.cli.main import main
from gshare.cli.sweep_decided import decided_before
from gshare.cli.sweep_prepared import Prepared
from gshare.coordinator import submission
from gshare.coordinator.api_protocol import ApiWelcome, JobRow
from rich.console import Console

SWEEP = """\
model = "{model}"
base_dtype = "fp32"
[defaults]
data = "data.jsonl"
max_steps = 4
eval_steps = 2
max_length = 32
[sweep]
output_dir = "out"
[sweep.grid]
r = [2, 4]
"""


def _record(*values: dict[str, Any]) -> SweepRecord:
    return SweepRecord(
        name="s",
        model="m",
        base_dtype="fp32",
        early_exit={},
        created=1.0,
        configurations=[
            Configuration(
                name=f"s-c{number}",
                hyper_parameters=hyper,
                total_steps=10,
                samples_total=40,
                output_dir=f"/o/c{number}",
            )
            for number, hyper in enumerate(values, start=1)
        ],
    )


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, "all", None),  # as sweeps ranked before it was a key
        ({}, "same_steps", "[early_exit] rank = 'all', now 'same_steps'"),
        ({"rank": "same_steps"}, "same_steps", None),
        ({"rank": "same_steps"}, "all", "[early_exit] rank = 'same_steps', now 'all'"),
    ],
)
def test_whom_a_resumed_sweep_compares_with_has_to_be_what_it_was(
    before: dict[str, Any], now: str, said: str | None
) -> None:
    began, goes_on = (msgspec.structs.replace(_record({}), early_exit=e) for e in (before, {"rank": now}))
    if said is None:
        sweep_prepared.check_same(began, goes_on)
    else:
        with pytest.raises(UsageError) as refused:
            sweep_prepared.check_same(began, goes_on)
        assert said in str(refused.value)


def test_a_value_that_was_changed_under_a_numbered_name_is_not_the_same_sweep() -> None:
    q, qv = ["q_proj"], ["q_proj", "v_proj"]
    before = _record({"target_modules": q}, {"target_modules": qv})
    # As it comes back from the file.
    before = msgspec.json.decode(msgspec.json.encode(before), type=SweepRecord)
    sweep_prepared.check_same(before, _record({"target_modules": q}, {"target_modules": qv}))
    with pytest.raises(UsageError, match=r"configuration s-c2: target_modules: .* → \['k_proj'\]; restore"):
        sweep_prepared.check_same(before, _record({"target_modules": q}, {"target_modules": ["k_proj"]}))
    sweep_prepared.check_same(_record({"data": "/a"}), _record({"data": "/moved/a"}))


@pytest.fixture
def file(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    rows = [{"prompt": f"red {i}", "completion": "blue"} for i in range(30)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "s.toml"
    path.write_text(SWEEP.format(model=tiny_checkpoint))
    return path


def test_what_has_made_steps_must_be_in_the_decisions(tmp_path: Path) -> None:
    specs = [AdapterSpec(name=name, data="d", output_dir=str(tmp_path / name)) for name in "ab"]
    assert decided_before(tmp_path, specs) == []  # killed before anything was decided
    for spec in specs:
        Path(spec.output_dir).mkdir()
        (Path(spec.output_dir) / "run.json").write_text("{}")
    (tmp_path / "b" / "metrics.jsonl").touch()
    assert decided_before(tmp_path, specs) == []  # or before anybody had trained
    (tmp_path / "b" / "checkpoint-5").mkdir()
    with pytest.raises(UsageError, match=r"decisions.jsonl is gone or empty, and b has made steps already"):
        decided_before(tmp_path, specs)
    with DecisionLog(tmp_path) as log:
        log.append(Decision(time=0.0, job="a", event="started"))
        log.append(Decision(time=0.0, job="b", event="cloned"))
        with pytest.raises(UsageError, match=r"says nothing of b, which has made .* \(checkpoint-5 in "):
            decided_before(tmp_path, specs)
        log.append(Decision(time=0.0, job="b", event="started"))
    assert len(decided_before(tmp_path, specs)) == 3


DRAWN: list[dict[str, Any]] = [{"r": 2, "learning_rate": 1e-4}, {"r": 4, "learning_rate": 2e-4}]
RANGES = """\
n_trials = 9
batch = 2
seed = 3
[sweep.ranges]
r = [2, 4]
learning_rate = { low = 1e-5, high = 1e-3, log = true }
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seed = 3", "seed = 4", "[sweep] seed: 3 → 4"),
        ("batch = 2", "batch = 4", "[sweep] batch: 2 → 4"),
        ("n_trials = 9", "n_trials = 8", "[sweep] n_trials: 9 → 8"),
        ("n_trials = 9", "n_trials = 10", "[sweep] n_trials: 9 → 10"),
        ("high = 1e-3", "high = 1e-2", "[sweep.ranges] learning_rate: {'low': 1e-05, 'high': 0.001"),
        ("1e-3, log = true", "1e-3, log = false", "[sweep.ranges] learning_rate: "),
        ("1e-3, log = true", "1.01e-3, step = 1e-5", "[sweep.ranges] learning_rate: "),
        ("r = [2, 4]", "r = [2, 4, 8]", "[sweep.ranges] r: [2, 4] → [2, 4, 8]"),
        ("r = [2, 4]", "r = [4, 2]", "[sweep.ranges] r: [2, 4] → [4, 2]"),
        (RANGES, "[sweep.grid]\nr = [2, 4]\n", "[sweep.ranges] is gone"),
        ("eval_steps = 2", "eval_steps = 1", "eval_steps: 2 → 1"),
        ("[defaults]", "[defaults]\nweight_decay = 0.5", "weight_decay: 0.01 → 0.5"),
        ("[defaults]", "[defaults]\nlora_alpha = 8", "lora_alpha: not the same in all → 8.0"),
        ("[defaults]", "[defaults]\nseed = 1", "seed: 0 → 1"),
        ("data.jsonl", "other.jsonl", "training data: '"),
        ("data.jsonl", "moved.jsonl", None),  # the same tokens
        ("[defaults]", "[defaults]\nsave_steps = 1", None),
        ("[defaults]", "[defaults]\nlora_alpha = 4", "lora_alpha: "),
        ('output_dir = "out"', 'output_dir = "out"\nmax_concurrent = 1', None),
    ],
)
def test_what_decides_about_draws_losses_and_exits_has_to_be_what_it_was(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    said: str | None,
) -> None:
    """Those that were trained already would be ranked among others that were not trained like them."""
    rows = (file.parent / "data.jsonl").read_text()
    (file.parent / "moved.jsonl").write_text(rows)
    (file.parent / "other.jsonl").write_text(rows.replace("blue", "green"))
    monkeypatch.setattr(sweep_prepared, "draw", lambda space, told: DRAWN[len(told) :])
    monkeypatch.setattr(sweep_command, "_run", lambda *_, **__: 0)
    text = file.read_text().replace("[sweep.grid]\nr = [2, 4]\n", RANGES)
    text = text.replace("[sweep]", 'target_modules = ["q_proj", "v_proj"]\n[sweep]')  # JSON has no tuples
    file.write_text(text)
    assert main(["sweep", str(file), "--device", "cpu"]) == 0
    written = (file.parent / "out" / "sweep.json").read_bytes()
    assert old in text
    file.write_text(text.replace(old, new))
    code = main(["sweep", str(file), "--device", "cpu", "--resume"])
    err = capsys.readouterr().err
    assert code == (0 if said is None else 2), err
    if said is not None:
        assert "this is not the sweep that was begun: " in err
        assert said in err
    assert (file.parent / "out" / "sweep.json").read_bytes() == written


def test_a_sweep_of_an_older_version_is_compared_in_what_it_recorded(file: Path) -> None:
    made = Prepared(SweepFile(file), [], Console(quiet=True), resume=False)
    now = made.record()
    before = msgspec.to_builtins(now)
    del before["sampler"], before["fixed"]
    old = msgspec.convert(before, SweepRecord)
    assert now.fixed is not None
    fewer = {key: value for key, value in now.fixed.items() if key != "optim"}  # an adapter had no such key
    sweep_prepared.check_same(msgspec.structs.replace(now, fixed=fewer), now)
    drawn = SamplerRecord(seed=0, n_trials=2, batch=8, ranges={})
    sweep_prepared.check_same(old, msgspec.structs.replace(now, sampler=drawn))
    with pytest.raises(UsageError, match=r"\[sweep\.ranges\] is new"):
        sweep_prepared.check_same(now, msgspec.structs.replace(now, sampler=drawn))


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_sweep_that_began_while_this_one_was_prepared_is_not_overwritten(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    resume: bool,
    meanwhile: bool,
) -> None:
    out = file.parent / "out"
    other = _record({"r": 8})
    take = sweep_prepared.take_lock

    def take_later(path: Path) -> int | None:
        if meanwhile:
            write_sweep(out, other)
        return take(path)

    monkeypatch.setattr(sweep_prepared, "take_lock", take_later)
    monkeypatch.setattr(sweep_command, "_run", lambda *_, **__: 0)
    code = main(["sweep", str(file), "--device", "cpu", *(["--resume"] if resume else [])])
    err = capsys.readouterr().err
    if not meanwhile:
        assert code == 0, err
        found = read_sweep(out)
        assert found is not None
        assert [one.name for one in found.configurations] == ["s-r2", "s-r4"]
        return
    assert code == (75 if resume else 2), err
    assert ("has gone on there meanwhile" if resume else "already holds a sweep") in err
    assert read_sweep(out) == other


@pytest.mark.parametrize(
    ("sampled", "said"),
    [
        ({"nope": 1}, "sampled, number 2, 'nope': no adapter has such a key"),
        ({"r": "many"}, "sampled, number 2, 'r': must be a whole number, not 'many'"),
        ({"r": 0}, "sampled, number 2, 'r': must be at least 1, not 0"),
    ],
)
def test_what_cannot_have_been_drawn_is_damage_of_the_sweeps_file(
    file: Path, capsys: pytest.CaptureFixture[str], sampled: dict[str, Any], said: str
) -> None:
    file.write_text(file.read_text().replace("[sweep.grid]\nr = [2, 4]\n", RANGES))
    out = file.parent / "out"
    out.mkdir()
    write_sweep(out, msgspec.structs.replace(_record({}), sampled=[DRAWN[0], sampled]))
    assert main(["sweep", str(file), "--device", "cpu", "--resume"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{out / 'sweep.json'}: {said}; put it back as it was" in line


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_cannot_be_split_need_others_and_not_none_to_validate_on(
    file: Path, capsys: pytest.CaptureFixture[str], rows: int
) -> None:
    data = file.parent / "data.jsonl"
    data.write_text(data.read_text().splitlines(keepends=True)[0] * rows)
    assert main(["sweep", str(file), "--device", "cpu"]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("gshare: "))
    assert f"adapter s-r2: {data}: {'one row' if rows == 1 else '3 equal rows'} cannot be split" in line
    assert line.endswith("a sweep ranks by validation loss; add rows, or set val_data")
    assert line.count("data.jsonl") == 1
    # The control: an ordinary run may do without.
    words = ["--model", str(SweepFile(file).spec().run.model), "--adapter", f"{data}:{file.parent / 'a'}"]
    assert main(["finetune", *words, "--max-length", "32", "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert f"adapter a: {data}: " in err
    assert "training and validation; add rows, name val_data, or set val_fraction = 0" in err


def test_a_directory_that_cannot_be_made_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mode tells it beforehand of most; of /proc even root learns it by trying."""
    monkeypatch.setattr(sweep_command, "_run", lambda *_, **__: 0)
    link = file.parent / "link"
    link.symlink_to("/proc/nope/y")
    text = file.read_text()
    for place in ("/proc/nope/x", str(link)):
        file.write_text(text.replace('"out"', f'"{place}"'))
        assert main(["sweep", str(file), "--device", "cpu"]) == 2
        err = capsys.readouterr().err
        assert "output_dir" in err
        assert place in err
        assert err.count("gshare: ") == 1
    # The control: where a link leads is made, as `gshare finetune` makes it.
    link.unlink()
    link.symlink_to("later")
    assert main(["sweep", str(file), "--device", "cpu"]) == 0
    assert (file.parent / "later" / "sweep.json").exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--vram", "8"], "--vram is of this machine, and with --cluster the nodes train: leave it out"),
        (["--no-wait-gpu"], "--no-wait-gpu is of this machine"),
        (["--device", "cpu"], "--device is of this machine"),
        (["--no-join"], "--no-join is of this machine"),
    ],
)
def test_flags_of_this_machine_are_refused_with_a_cluster(
    file: Path, capsys: pytest.CaptureFixture[str], flags: list[str], told: str
) -> None:
    assert main(["sweep", str(file), "--cluster", "cluster.toml", *flags]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1
    assert not (file.parent / "out").exists()


def test_flags_of_a_coordinator_need_a_cluster(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(file), "--state-dir", "x"]) == 2
    assert "--state-dir: only with --cluster FILE" in capsys.readouterr().err


@pytest.mark.parametrize("on_cluster", [False, True])
def test_a_sweep_goes_on_where_its_jobs_are(
    file: Path, capsys: pytest.CaptureFixture[str], on_cluster: bool
) -> None:
    """Elsewhere every configuration would be trained a second time."""
    out = file.parent / "out"
    out.mkdir()
    write_sweep(out, msgspec.structs.replace(_record({"r": 8}), cluster="" if on_cluster else "store"))
    cluster = file.parent / "cluster.toml"
    cluster.write_text('[[node]]\nname = "a"\ntransport = "local"\n')
    words = ["--cluster", str(cluster), "--state-dir", str(file.parent / "home")] if on_cluster else []
    assert main(["sweep", str(file), "--resume", *words]) == 2
    err = capsys.readouterr().err
    where = "on this machine: leave out" if on_cluster else "on a cluster: add"
    assert f"runs {where} --cluster FILE" in err
    assert not (file.parent / "home").exists()  # no coordinator was started


def _client(**welcome: object) -> Any:
    values = {"protocol": 1, "gshare": "0.1", "owner": "store", "pid": 7, "cluster": "c", "journal_id": "j"}
    return SimpleNamespace(welcome=ApiWelcome(**{**values, **welcome}))  # type: ignore[arg-type]


def test_a_coordinator_that_knows_no_early_exit_gets_no_sweep() -> None:
    """It would take the jobs and train each to its end."""
    with pytest.raises(GshareError, match=r"\(pid 7\) is gshare 0.1, which knows no early exit: end it with"):
        sweep_cluster._check_knows(_client())
    sweep_cluster._check_knows(_client(knows=["early_exit"]))


def test_names_that_the_cluster_has_are_told_before_anything_is_written(file: Path) -> None:
    made = Prepared(SweepFile(file), [], Console(quiet=True), resume=False)
    ended = JobRow(job="s-r2", state="completed")
    sweep_cluster._check_free(made, [ended])
    with pytest.raises(UsageError, match="configuration s-r2: job s-r2 of the cluster has its name"):
        sweep_cluster._check_free(made, [msgspec.structs.replace(ended, state="running")])
    there = JobRow(job="other", state="waiting", output_dir=str(file.parent / "out" / "r4"))
    with pytest.raises(UsageError, match="configuration s-r4: job other of the cluster has its name"):
        sweep_cluster._check_free(made, [there])


def test_a_submission_says_where_each_pauses_and_hashes_a_file_once(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    hash_file = submission.hash_file
    monkeypatch.setattr(submission, "hash_file", lambda path: hashed.append(path) or hash_file(path))
    file.write_text(file.read_text() + "[early_exit]\nwarmup = 0.5\n")
    made = Prepared(SweepFile(file), [], Console(quiet=True), resume=False)
    fields = sweep_cluster._Submissions(made)
    jobs = [*fields(["s-r2"])["jobs"], *fields(["s-r4"])["jobs"]]
    assert [(job.spec.name, job.pause_at) for job in jobs] == [("s-r2", 2), ("s-r4", 2)]
    assert {job.early_exit for job in jobs} == {made.spec.early_exit.of_job()}
    assert b"rank" not in msgspec.json.encode(jobs[0].early_exit)  # agents of an older version refuse it
    assert len(hashed) == len(set(hashed)) > 1
