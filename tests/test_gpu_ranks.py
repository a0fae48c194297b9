"""A rank that no GPU trains is refused before anything is tokenised, reserved or loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gshare.cli.main import main
from gshare.kernels.limits import MAX_RANK

sys.path.insert(0, str(Path(__file__).parent / "support"))
from straw_runs import own_ledger

BEYOND = MAX_RANK + 1
SWEEP = """\
model = "{model}"
[defaults]
data = "data.jsonl"
max_steps = 40
max_length = 32
[sweep]
output_dir = "out"
[sweep.grid]
r = [4, {rank}]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A simulated GPU, and some data."""
    own_ledger(tmp_path, monkeypatch)
    row = '{"prompt": "red green", "completion": "blue"}\n'
    (tmp_path / "data.jsonl").write_text(row * 30)
    return tmp_path


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Exit code, and what is said of what is wrong."""

    def call(*arguments: str) -> tuple[int, str]:
        code = main(list(arguments))
        return code, capsys.readouterr().err.partition("gshare: ")[2]

    return call


@pytest.mark.parametrize("command", ["finetune", "estimate", "sweep", "sweep plan"])
def test_a_rank_beyond_the_kernels_is_refused_at_once(
    here: Path, tiny_checkpoint: Path, told: Callable[..., tuple[int, str]], command: str
) -> None:
    (here / "s.toml").write_text(SWEEP.format(model=tiny_checkpoint, rank=BEYOND))
    model = ("--model", str(tiny_checkpoint), "--r", str(BEYOND), "--max-length", "32")
    arguments = {
        "finetune": (*model, "--adapter", "data.jsonl:out/a", "--vram", "2"),
        "estimate": (*model, "--count", "8"),
    }.get(command, ("s.toml", "--vram", "2"))
    code, err = told(*command.split(), *arguments)
    assert code == 2
    assert f"r {BEYOND}: is beyond {MAX_RANK}, the most that the CUDA kernels take" in err
    assert err.count("\n") == 1, err
    assert not (here / "out").exists()
    assert not list((here / "ledger").glob("*.json"))


def test_on_the_cpu_it_is_estimated(
    here: Path, tiny_checkpoint: Path, told: Callable[..., tuple[int, str]]
) -> None:
    """The control: the limit is the kernels' own."""
    model = ("--model", str(tiny_checkpoint), "--r", str(BEYOND), "--max-length", "32")
    del here
    pytest.MonkeyPatch().delenv("GSHARE_DEVICES")
    assert told("estimate", *model, "--device", "cpu") == (0, "")


@pytest.mark.parametrize("ranks", ["{low = 4, high = 257}", "[4, 257]"])
@pytest.mark.parametrize("command", ["sweep", "sweep plan"])
def test_what_a_sampler_may_draw_is_looked_at_before_it_draws(
    here: Path, tiny_checkpoint: Path, told: Callable[..., tuple[int, str]], command: str, ranks: str
) -> None:
    text = SWEEP.format(model=tiny_checkpoint, rank=8).partition("[sweep.grid]")[0]
    (here / "s.toml").write_text(f"{text}n_trials = 4\n[sweep.ranges]\nr = {ranks}\n")
    code, err = told(*command.split(), "s.toml", "--vram", "2")
    assert (code, err.count("\n")) == (2, 1)
    assert f"s.toml: [sweep.ranges], r: up to {BEYOND}, and {MAX_RANK} is the most" in err
