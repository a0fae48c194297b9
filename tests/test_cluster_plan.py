"""`gshare cluster plan`: durations from the data and a measured rate, one message for what is wrong."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.data.prepare import prepare_requests
from gshare.agent.errors import UsageError
from gshare.agent.jobs.memory_profile import make_profile, profile_key, write_profile
from gshare.agent.jobs.spec_file import load_run_spec
from gshare.agent.service.base_identity import base_identity
from gshare.agent.train.job_data import JobData
from gshare.cli.cluster_plan import training_tokens
from gshare.cli.main import main
from gshare.coordinator.plan import MAX_DURATION_MS
from gshare.coordinator.throughput import duration_ms, read_profile
from measured_points import points


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("base") / "tiny", max_position_embeddings=2048)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"row {i} " + "word " * (i % 7)} for i in range(23)]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


def run_file(name: str, model: Path, *, keys: str = "num_train_epochs = 2", adapters: int = 1) -> str:
    text = f'model = "{model}"\nbase_dtype = "fp32"\n[defaults]\ndata = "data.jsonl"\n{keys}\n'
    text += "".join(f'[[adapter]]\noutput_dir = "out/{name}-{i}"\n' for i in range(adapters))
    Path(f"{name}.toml").write_text(text, encoding="utf-8")
    return f"{name}.toml"


def profile(*rates: dict[str, object], **top: object) -> str:
    Path("rates.json").write_text(json.dumps({"version": 1, "rates": rates, **top}), encoding="utf-8")
    return "rates.json"


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    """One object, and on stderr one line a sweep about its one data file."""
    assert main(["cluster", "plan", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("23 rows") == sum(".toml" in argument for argument in arguments)
    return json.loads(captured.out)


@pytest.mark.parametrize(
    "keys",
    [
        "num_train_epochs = 3",
        "num_train_epochs = 2\nper_device_train_batch_size = 4",
        "max_steps = 20\nper_device_train_batch_size = 2\ngradient_accumulation_steps = 5",
        "num_train_epochs = 1\nval_fraction = 0",
        'num_train_epochs = 1\nval_data = "data.jsonl"',
    ],
)
def test_tokens_are_those_that_the_steps_take(here: Path, model: Path, keys: str) -> None:
    run = load_run_spec(here / run_file("a", model, keys=keys))
    (request,) = prepare_requests(run, model, resume=False, say=lambda line: None)
    data = JobData.open(request)
    taken = [
        sum(int(data.train.lengths[i]) for batch in data.sampler.step_rows(step) for i in batch)
        for step in range(data.sampler.total_steps)
    ]
    # The part of an epoch is a mean: its rows are within a step's of it.
    part = data.sampler.total_steps % data.sampler.steps_per_epoch
    assert abs(training_tokens(request) - sum(taken)) <= (max(taken) if part else 0)


def test_the_plan_of_two_runs(here: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide, narrow = run_file("wide", model), run_file("narrow", model, adapters=3)
    rates = profile(
        {"model": str(model), "base_dtype": "fp32", "gpus": 2, "tokens_per_second": 20.0},
        {"model": "tiny", "base_dtype": "fp32", "tokens_per_second": 10.0},
    )
    told = plan(capsys, f"{wide}:2", narrow, "--gpus", "2", "--profile", rates)
    tasks = {task["name"]: task for task in told["tasks"]}  # type: ignore[attr-defined]
    assert sorted(tasks["wide"]["gpus"]) == [0, 1]
    assert len(tasks["narrow"]["gpus"]) == 1
    assert tasks["narrow"]["tokens"] == 3 * tasks["wide"]["tokens"] > 0
    assert (tasks["narrow"]["configurations"], tasks["narrow"]["tokens_per_second"]) == (3, 10.0)
    takes = {name: task["end_s"] - task["start_s"] for name, task in tasks.items()}
    assert takes["narrow"] == pytest.approx(6 * takes["wide"], abs=0.01)
    # They share a GPU, so one is after the other, and that is proven.
    assert told["makespan_s"] == told["bound_s"] == pytest.approx(sum(takes.values()))
    assert (told["type"], told["gap"], told["gpus"]) == ("plan", 0.0, 2)


def test_sweeps_count_every_configuration(
    here: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A grid, and a sampled one, of whose trials none is drawn yet; both over keys that move no token."""
    one = run_file("one", model)
    template = Path(one).read_text(encoding="utf-8")
    Path("grid.toml").write_text(template + "[sweep.grid]\nr = [4, 8, 16]\nlora_dropout = [0.0, 0.1]\n")
    Path("drawn.toml").write_text(
        template
        + "[sweep]\nn_trials = 5\n[sweep.ranges]\nlearning_rate = { low = 1e-5, high = 1e-3 }\nr = [4, 8]\n"
    )
    for file, name in (("grid.toml", "grid"), ("drawn.toml", "drawn")):
        text = Path(file).read_text(encoding="utf-8")
        Path(file).write_text(text.replace("out/one-0", f"out/{name}"), encoding="utf-8")
    told = plan(capsys, one, "grid.toml", "drawn.toml", "--gpus", "3", "--tokens-per-second", "9")
    tokens = {task["file"]: (task["configurations"], task["tokens"]) for task in told["tasks"]}  # type: ignore[attr-defined]
    single = tokens[one][1]
    in_full = {task["file"]: task["tokens_in_full"] for task in told["tasks"]}  # type: ignore[attr-defined]
    assert in_full == {one: single, "grid.toml": 6 * single, "drawn.toml": 5 * single}
    # Two of each go on; 42 steps, of which three are the warm-up.
    assert {name: count for name, (count, _) in tokens.items()} == {one: 1, "grid.toml": 6, "drawn.toml": 5}
    for file, left in (("grid.toml", 4), ("drawn.toml", 3)):
        assert tokens[file][1] == pytest.approx(2 * single + left * single * 3 / 42, abs=1)


def test_a_sweep_counts_as_its_own_plan_says(
    here: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Configurations of unlike work, and rows of unlike lengths."""
    template = Path(run_file("one", model, keys="max_steps = 20")).read_text(encoding="utf-8")
    Path("s.toml").write_text(template + "[sweep.grid]\nper_device_train_batch_size = [1, 2, 4]\n")
    arguments = ["--tokens-per-second", "9"]
    assert main(["sweep", "plan", "s.toml", "--json", "--device", "cpu", *arguments]) == 0
    alone = json.loads(capsys.readouterr().out)
    (task,) = plan(capsys, "s.toml", "--gpus", "1", *arguments)["tasks"]  # type: ignore[misc]
    assert (task["tokens"], task["tokens_in_full"]) == (
        round(alone["tokens"]),
        round(alone["tokens_in_full"]),
    )
    assert task["tokens"] < task["tokens_in_full"]
    assert main(["cluster", "plan", "s.toml", "--gpus", "1", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["s", "3", f"{task['tokens']:,}"]
    assert lines[-2].startswith(
        f"counted: {task['tokens']:,} tokens at most, of {task['tokens_in_full']:,} in full: of a sweep, "
    )


def test_what_is_not_drawn_yet_counts_as_the_costliest(
    here: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = Path(run_file("one", model, keys="max_steps = 20")).read_text(encoding="utf-8")
    batch = "per_device_train_batch_size"
    Path("four.toml").write_text(template.replace("[defaults]", f"[defaults]\n{batch} = 4"))
    files = ["four.toml"]
    for name, values in (("choices", "[4, 1, 2]"), ("interval", "{ low = 1, high = 4 }")):
        files.append(f"{name}.toml")
        text = template.replace("out/one-0", f"out/{name}")
        Path(files[-1]).write_text(f"{text}[sweep]\nn_trials = 8\n[sweep.ranges]\n{batch} = {values}\n")
    tasks = plan(capsys, *files, "--gpus", "3", "--tokens-per-second", "9")["tasks"]
    counts = {task["file"]: task["tokens_in_full"] for task in tasks}  # type: ignore[attr-defined]
    four = counts.pop("four.toml")
    assert counts == {file: pytest.approx(8 * four, abs=8) for file in files[1:]}


def test_steps_by_epochs_are_compared_with_those_that_are_told(
    here: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`max_steps = -1` is the smaller number and the more work, with 23 rows three times over."""
    template = Path(run_file("one", model, keys="max_steps = -1")).read_text(encoding="utf-8")
    Path("drawn.toml").write_text(
        template.replace("out/one-0", "out/drawn").replace("max_steps = -1", "")
        + "[sweep]\nn_trials = 8\n[sweep.ranges]\nmax_steps = [5, -1]\n"
    )
    tasks = plan(capsys, "one.toml", "drawn.toml", "--gpus", "2", "--tokens-per-second", "9")["tasks"]
    counts = {task["file"]: task["tokens_in_full"] for task in tasks}  # type: ignore[attr-defined]
    assert counts["drawn.toml"] == pytest.approx(8 * counts["one.toml"], abs=8)


def test_the_table_names_sweeps_times_and_the_gap(
    here: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [run_file(name, model) for name in ("one", "two")]
    assert main(["cluster", "plan", *files, "--gpus", "2", "--tokens-per-second", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["sweep", "configurations", "tokens", "starts", "ends", "GPUs"]
    assert [line.split()[index] for line in lines[1:3] for index in (0, 1, 3)] == [
        *("one", "1", "0:00"),
        *("two", "1", "0:00"),
    ]
    assert {lines[1].split()[-1], lines[2].split()[-1]} == {"0", "1"}
    assert "proven best" in lines[-1]
    each = int(lines[1].split()[2].replace(",", ""))
    assert lines[-2] == f"counted: all {2 * each:,} tokens, every configuration to its last step"


def test_without_the_solver_it_says_so(
    here: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str, *rest: object) -> object:
        return None if name == "ortools" else real(name, *rest)  # type: ignore[arg-type]

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    monkeypatch.setitem(sys.modules, "ortools", None)
    # On two GPUs longest first ends after 7 parts, and 3 + 3 beside 2 + 2 + 2 after 6.
    files = [run_file(f"r{number}", model, adapters=count) for number, count in enumerate((3, 3, 2, 2, 2))]
    arguments = ["cluster", "plan", *files, "--gpus", "2", "--tokens-per-second", "1"]
    assert main(arguments) == 0
    told = capsys.readouterr()
    assert "there may be a better plan" in told.err
    assert "gshare[plan]" in told.err
    assert "longest first; no plan ends before" in told.out
    # What is proven best as it is needs no solver: the two lines would contradict each other.
    assert main([*arguments[:2], files[0], *arguments[-4:]]) == 0
    told = capsys.readouterr()
    assert "longest first; proven best" in told.out
    assert "gshare[plan]" not in told.err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    assert main(arguments) == 0
    assert "gshare[plan]" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["a.toml", "--gpus", "1"], "either --profile FILE or --tokens-per-second"),
        (
            ["a.toml", "--gpus", "1", "--tokens-per-second", "1", "--profile", "rates.json"],
            "either --profile",
        ),
        (["a.toml", "--gpus", "0", "--tokens-per-second", "1"], "--gpus: 0"),
        (["a.toml", "--gpus", "1", "--tokens-per-second", "0"], "--tokens-per-second: 0.0"),
        (["a.toml", "--gpus", "1", "--tokens-per-second", "nan"], "--tokens-per-second: nan"),
        (["a.toml", "--gpus", "1", "--tokens-per-second", "1", "--seconds", "0"], "--seconds: 0.0"),
        (["a.toml:4", "--gpus", "2", "--tokens-per-second", "1"], "task 'a': needs 4 GPUs at once"),
        (["a.toml:0", "--gpus", "2", "--tokens-per-second", "1"], "task 'a': needs 0 GPUs"),
        (["a.toml", "a.toml", "--gpus", "2", "--tokens-per-second", "1"], "another of that name"),
        (["b.toml", "--gpus", "2", "--tokens-per-second", "1"], "b.toml"),
        (["a.toml", "--gpus", "2", "--profile", "none.json"], "none.json: cannot be read"),
        (["a.toml:2", "--gpus", "2", "--profile", "rates.json"], "no rate of"),
        (["--gpus", "2", "--tokens-per-second", "1"], "SWEEPS"),
    ],
)
def test_faults(
    here: Path, model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    run_file("a", model)
    profile({"model": "tiny", "base_dtype": "fp32", "tokens_per_second": 10.0})
    assert main(["cluster", "plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert part in captured.err
    assert captured.err.count("gshare: ") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("rates", "top", "part"),
    [
        (
            [{"model": "m", "base_dtype": "fp32", "tokens_per_second": 0}],
            {},
            "rate 1 ('m'): tokens_per_second",
        ),
        ([{"model": "m", "base_dtype": "fp8", "tokens_per_second": 1}], {}, "fp8"),
        ([{"model": "m", "base_dtype": "fp32"}], {}, "tokens_per_second"),
        (
            [{"model": "m", "base_dtype": "fp32", "tokens_per_second": 1, "gpus": 0}],
            {},
            "gpus must be at least 1",
        ),
        ([{"model": "m", "base_dtype": "fp32", "tokens_per_second": 1, "cards": 1}], {}, "cards"),
        ([{"model": "m", "base_dtype": "fp32", "tokens_per_second": 1}] * 2, {}, "is there twice"),
        ([], {"version": 2}, "has version 2"),
    ],
)
def test_faults_of_a_profile(
    here: Path, rates: list[dict[str, object]], top: dict[str, object], part: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read_profile(Path(profile(*rates, **top)))
    assert part in str(caught.value)
    assert str(caught.value).startswith("rates.json: ")


def test_a_profile_of_another_kind_or_size_is_refused(here: Path) -> None:
    file = Path("other")
    for content, part in (
        (b"\xff\xfe", "is no profile"),
        (b"[]", "is no profile"),
        (b" " * (2 << 20), "1 MiB"),
    ):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=part):
            read_profile(file)


def measured(model: Path, *, base: str | None = None, base_dtype: str = "fp32") -> str:
    """A file as `gshare estimate --measure` keeps one: 0.1 ms a token."""
    key = profile_key(
        base or base_identity(model) or "", base_dtype=base_dtype, card="cpu", checkpointing=False
    )
    it = make_profile(key, points(), length=256, largest_batch=64, limit_bytes=0)
    return str(write_profile(Path("measured"), it))


def test_what_estimate_has_measured_is_a_rate(
    here: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = plan(capsys, run_file("a", model), "--gpus", "1", "--profile", measured(model))
    assert told["tasks"][0]["tokens_per_second"] == pytest.approx(10_000, rel=0.01)  # type: ignore[index]


def test_what_estimate_has_measured_is_of_one_base_dtype_and_gpu(
    here: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_file("a", model)
    damaged = Path("damaged.json")
    damaged.write_text('{"points": [], "key": 1}')
    for sweep, profile_file, part in (
        (file, measured(model, base="another"), "was measured of another base"),
        (file, measured(model, base_dtype="bf16"), "was measured in bf16, without checkpointing"),
        (f"{file}:2", measured(model), "was measured on one GPU"),
        (file, str(damaged), "`gshare estimate --measure` mends its own"),
    ):
        assert main(["cluster", "plan", sweep, "--gpus", "2", "--profile", profile_file]) == 2
        said = capsys.readouterr().err
        assert part in said
        assert profile_file in said
        assert said.count("gshare: ") == 1


def test_which_rate_is_taken(here: Path) -> None:
    rates = read_profile(
        Path(
            profile(
                {"model": "org/m", "base_dtype": "bf16", "tokens_per_second": 1.0},
                {"model": "m", "base_dtype": "bf16", "tokens_per_second": 2.0},
                {"model": "m", "base_dtype": "nf4", "tokens_per_second": 3.0},
            )
        )
    )
    assert rates.tokens_per_second("org/m", "bf16", 1) == 1.0
    assert rates.tokens_per_second("/models/m", "bf16", 1) == 2.0
    assert rates.tokens_per_second("/models/m", "nf4", 1) == 3.0
    with pytest.raises(UsageError, match=r"it has bf16 on 1 GPU, nf4 on 1 GPU"):
        rates.tokens_per_second("m", "int8", 1)
    with pytest.raises(UsageError, match=r"it has the models m, org/m"):
        rates.tokens_per_second("other", "bf16", 1)


def test_durations_are_whole_milliseconds_within_what_a_plan_takes() -> None:
    assert [duration_ms(*it) for it in ((0, 5.0), (1, 3.0), (10, 5.0), (10**18, 1e-9))] == [
        1,
        334,
        2000,
        MAX_DURATION_MS,
    ]
