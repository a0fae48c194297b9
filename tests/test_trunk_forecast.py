"""What a plan says is shared below the adapters: what the trainer then tells, before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gshare.agent.base.load import load_base
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.base.weights import Base
from gshare.agent.jobs.events import Stepped
from gshare.agent.jobs.spec import JobRequest
from gshare.agent.train import trunk, trunk_forecast
from gshare.agent.train.trunk import TrunkUse
from gshare.agent.train.trunk_forecast import Forecast, Stretch, forecast, together
from gshare.cli.main import main
from toy import random_rows, request, train

LAYERS = 4
TOP = (LAYERS - 1,)
ROWS = random_rows((9, 17, 30, 5, 12, 24, 8, 40), seed=1)


def planned(jobs: list[JobRequest], *stretches: Stretch, max_tokens: int = 16384) -> Forecast:
    """Of these stretches, or of all four steps of every job."""
    every = stretches or together({job.spec.name: 4 for job in jobs})
    by_name = {job.spec.name: job for job in jobs}
    return forecast(list(every), by_name, num_layers=LAYERS, max_tokens=max_tokens)


def cohort(directory: Path, jobs: int) -> list[JobRequest]:
    return [request(directory, f"c{i}", rows=ROWS, layers_to_transform=TOP) for i in range(jobs)]


def tenants(directory: Path, jobs: int) -> list[JobRequest]:
    """Data of its own for each, rows as long as the others'."""
    return [request(directory, f"t{i}", data_seed=10 + i, layers_to_transform=TOP) for i in range(jobs)]


def test_a_cohort_runs_its_trunk_once(tmp_path: Path) -> None:
    """Of four jobs three quarters of the three lower layers: 9/16 of the forward."""
    found = planned(cohort(tmp_path, 4))
    assert (found.below, found.use.shared, found.saved) == (0.75, 0.75, 0.5625)
    assert found.told() == (
        "shared trunk: 75% of the forward's rows × layers lie below the adapters, 75% of those are computed "
        "once for several jobs: 56% of the forward saved"
    )


def test_unrelated_jobs_share_nothing(tmp_path: Path) -> None:
    found = planned(tenants(tmp_path, 3))
    assert (found.below, found.use.shared, found.saved) == (0.75, 0.0, 0.0)
    assert "nothing; 75% of the forward's rows × layers lie below" in found.told()
    assert "no two jobs have a row in common" in found.told()


def test_a_wrong_notion_of_equal_rows_would_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the figure is that of the code that lays passes out, faults included."""
    monkeypatch.setattr(trunk, "content", lambda row: len(row.tokens) > 0)
    assert planned(tenants(tmp_path, 3)).saved > 0


def test_jobs_that_adapt_every_layer_have_nothing_to_share(tmp_path: Path) -> None:
    found = planned([request(tmp_path, f"a{i}", rows=ROWS) for i in range(2)])
    assert (found.below, found.saved) == (0.0, 0.0)
    assert found.told() == "shared trunk: nothing; every job adapts the lowest layer"


def test_small_passes_share_less(tmp_path: Path) -> None:
    """A pass of one row each has nothing in common; the plan cuts passes as the trainer does."""
    assert planned(cohort(tmp_path, 4), max_tokens=1).saved == 0.0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Base]:
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), num_layers=LAYERS)
    return path, load_base(path, base_dtype="fp32", device=torch.device("cpu"))


def test_the_trainer_tells_the_same_of_every_step(tmp_path: Path, base: tuple[Path, Base]) -> None:
    """Batch sizes that differ, so that some rows of a step are another job's and some are not."""
    batches = ((1, TOP), (2, TOP), (2, (LAYERS - 2, LAYERS - 1)), (1, None))
    jobs = [
        request(tmp_path, f"j{i}", rows=ROWS, per_device_train_batch_size=batch, layers_to_transform=layers)
        for i, (batch, layers) in enumerate(batches)
    ]
    events: list[object] = []
    train(jobs, tmp_path / "out", *base, on_event=events.append)
    told = {(e.job, e.step): e.trunk_shared for e in events if isinstance(e, Stepped)}
    assert len(told) == 16
    shares = []
    for step in range(4):
        found = planned(jobs, Stretch({job.spec.name: step for job in jobs}, 1))
        shares.append(found.use.shared)
        assert {told[job.spec.name, step + 1] for job in jobs} == {found.use.shared}
    assert len(set(shares)) > 1
    assert min(shares) > 0


def test_of_a_long_run_some_rounds_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [
        request(tmp_path, f"j{i}", rows=ROWS, max_steps=40 + 20 * i, layers_to_transform=TOP)
        for i in range(2)
    ]
    stretches = together({"j0": 40, "j1": 60})
    assert stretches == [Stretch({"j0": 0, "j1": 0}, 40), Stretch({"j1": 40}, 20)]
    every = planned(jobs, *stretches)
    assert (every.looked_at, every.rounds) == (60, 60)
    monkeypatch.setattr(trunk_forecast, "MOST_ROUNDS", 12)
    some = planned(jobs, *stretches)
    assert (some.looked_at, some.rounds) == (12, 60)
    assert some.told().endswith("(12 of 60 rounds)")
    # Two thirds of the rounds have two jobs: a half of what is below is saved there, of three quarters.
    assert some.saved == pytest.approx(every.saved, rel=0.15)
    assert some.whole == pytest.approx(every.whole, rel=0.3)


def test_nothing_at_all_is_no_fault() -> None:
    assert together({}) == []
    found = forecast([], {}, num_layers=LAYERS, max_tokens=1)
    assert (found.use, found.below, found.saved) == (TrunkUse(), 0.0, 0.0)


# ------------------------------------------------------------------ commands

SWEEP = """\
model = "{model}"
base_dtype = "fp32"
[defaults]
data = "data.jsonl"
max_steps = 4
eval_steps = 2
max_length = 32
r = 2
{more}
[sweep]
output_dir = "out"
[sweep.grid]
learning_rate = [1e-4, 1e-3, 1e-2]
"""


@pytest.fixture
def here(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    for name in ("data", "other"):
        rows = [{"prompt": f"{name} {i}", "completion": "blue"} for i in range(30)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tiny_checkpoint


@pytest.mark.parametrize(("more", "shared"), [("layers_to_transform = [1]", 2 / 3), ("", 0.0)])
def test_a_sweep_s_plan_tells_it(
    here: Path, capsys: pytest.CaptureFixture[str], more: str, shared: float
) -> None:
    Path("s.toml").write_text(SWEEP.format(model=here, more=more))
    assert main(["sweep", "plan", "s.toml", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["trunk"]
    # The first of the three goes on alone when the warm-up has left it so: nothing is shared there.
    assert (found["shared"] > 0) is (shared > 0)
    assert found["shared"] <= shared + 1e-9
    assert found["rounds_looked_at"] == found["rounds"]
    assert main(["sweep", "plan", "s.toml", "--device", "cpu"]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("shared trunk: ")]
    assert (f"{found['forward_saved']:.0%} of the forward saved" in line) is (shared > 0)


def test_a_dry_run_of_several_adapters_tells_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def dry_run(*adapters: str) -> str:
        flags = ["--max-steps", "3", "--max-length", "32", "--base-dtype", "fp32", "--device", "cpu"]
        given = [f"--adapter={adapter}" for adapter in adapters]
        command = ["finetune", "--model", str(here), *given, *flags, "--layers-to-transform", "1"]
        assert main([*command, "--dry-run"]) == 0
        return capsys.readouterr().out

    assert "50% of those are computed once for several jobs: 25% of the forward saved" in dry_run(
        "a=data.jsonl:out/a", "b=data.jsonl:out/b"
    )
    assert "shared trunk: nothing; 50% of the" in dry_run("a=data.jsonl:out/a", "b=other.jsonl:out/b")
    assert "shared trunk" not in dry_run("a=data.jsonl:out/a")
