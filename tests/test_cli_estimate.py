"""`gshare estimate`, and the one place that chooses an estimate: measured where known, by part otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.data.prepare import run_estimate
from gshare.agent.jobs import memory_grid
from gshare.agent.jobs.memory import MemoryEstimate, ModelShape
from gshare.agent.jobs.memory_choice import choose_estimate, find_profile, predicted_speed, profile_dir
from gshare.agent.jobs.memory_profile import make_profile, profile_key, write_profile
from gshare.agent.jobs.spec import AdapterSpec, JobRequest, RunSpec
from gshare.agent.vram.budget import CONTEXT_MB, WORKSPACE_MB, with_allowance
from gshare.cli.main import main
from measured_points import points

SMOL = ModelShape(49152, 576, 1536, 30, 9, 3, 64, True)
CARD = "a card"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GSHARE_DEVICES", raising=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def choose(cards: tuple[str, ...] = (CARD,), *, base: str | None = "base", **fields: Any) -> MemoryEstimate:
    spec = AdapterSpec(name="a", data="d", output_dir="o", lora_alpha=32.0, seed=0)
    options = {"base_dtype": "bf16", "device": "cuda", "pass_tokens": 1000, "longest_row": 1000} | fields
    checkpointing = options.pop("gradient_checkpointing", False)
    spec = msgspec.structs.replace(spec, gradient_checkpointing=checkpointing)
    return choose_estimate(SMOL, [spec], base=lambda: base, cards=cards, **options)


def keep_profile(card: str = CARD, *, worse: float = 1.0, wild: bool = False) -> Path:
    key = profile_key("base", base_dtype="bf16", card=card, checkpointing=False)
    found = points()
    if wild:
        found = [
            msgspec.structs.replace(p, peak_bytes=p.peak_bytes * (1 + 2 * (i % 2)))
            for i, p in enumerate(found)
        ]
    found = [msgspec.structs.replace(p, peak_bytes=int(p.peak_bytes * worse)) for p in found]
    return write_profile(profile_dir(), make_profile(key, found, length=256, largest_batch=64, limit_bytes=0))


# ---------------------------------------------------------------------- the choice


def test_what_was_measured_is_used_and_says_so() -> None:
    by_part = choose()
    assert by_part.source == "estimate"
    keep_profile()
    it = choose()
    assert it.source == "model of 26 measured configurations"
    assert it.fragmentation == 0.0
    for name in ("base", "unpacking", "adapters", "optimizer", "snapshots"):
        assert it[name] == by_part[name]
    # 270 MiB, 180 KB a token of the 1,024 that the pass is padded to, one byte a byte of the adapter: TRUE.
    predicted = 270 * 2**20 + 1024 * 180_000 + it["adapters"] + it["optimizer"]
    assert it.total - it["margin"] == pytest.approx(predicted, rel=0.002)
    assert it["margin"] == pytest.approx(0.05 * (it.total - it["margin"]), rel=0.01)
    assert it.added == it.total - it["base"] - it["unpacking"]
    # The margin is in it: what is reserved has the context and nothing for fragmentation on top.
    assert with_allowance(it.total, it.fragmentation) - it.total / 2**20 <= CONTEXT_MB + WORKSPACE_MB + 1
    assert "model of 26" in it.table()


def test_of_several_cards_the_one_that_takes_the_most_decides() -> None:
    keep_profile()
    keep_profile(card="another", worse=1.5)
    one, other = choose((CARD,)), choose(("another",))
    assert other.total > one.total
    assert choose((CARD, "another")) == choose(("another", CARD)) == other
    assert choose((CARD, "never measured")).total >= one.total


@pytest.mark.parametrize(
    "change",
    [
        {"base": "another base"},
        {"base": None},
        {"cards": ("never measured",)},
        {"cards": ()},
        {"base_dtype": "nf4"},
        {"device": "cpu"},
        {"gradient_checkpointing": True},
    ],
)
def test_another_base_card_or_setting_was_not_measured(change: dict[str, Any]) -> None:
    keep_profile()
    assert choose(**change).source == "estimate"


def test_beyond_what_was_measured_it_is_by_part_again() -> None:
    keep_profile()
    assert choose(pass_tokens=32_768).fragmentation == 0.0
    assert "(it is far larger than anything measured)" in choose(pass_tokens=33_000).source


def test_speed_is_known_as_far_as_the_measurements_reach() -> None:
    keep_profile()
    profile = find_profile("base", base_dtype="bf16", card=CARD, checkpointing=False)
    assert profile is not None
    spec = AdapterSpec(name="a", data="d", output_dir="o", lora_alpha=32.0, seed=0)

    def speed(tokens: int) -> float | None:
        return predicted_speed(
            SMOL,
            [spec],
            profile,
            base_dtype="bf16",
            device="cuda",
            pass_tokens=tokens,
            longest_row=tokens,
        )

    assert speed(2048) == pytest.approx(10_000, rel=1e-3)  # 0.1 ms a token
    assert speed(33_000) is None


def test_a_model_that_misses_its_own_points_is_not_used() -> None:
    keep_profile(wild=True)
    assert "(the measured model is off by up to" in choose().source


def test_a_damaged_profile_is_told_of_and_not_used() -> None:
    path = keep_profile()
    path.write_text("{")
    it = choose()
    assert it.fragmentation > 0
    assert str(path) in it.source
    assert "`gshare estimate --measure` mends it" in it.source


def test_the_base_is_looked_at_only_where_something_was_measured() -> None:
    def never() -> str:
        raise AssertionError("asked for nothing")

    spec = AdapterSpec(name="a", data="d", output_dir="o", lora_alpha=32.0, seed=0)
    options = {"base_dtype": "bf16", "device": "cuda", "pass_tokens": 10, "longest_row": 10}
    assert choose_estimate(SMOL, [spec], base=never, cards=(CARD,), **options).total > 0
    keep_profile()
    with pytest.raises(AssertionError, match="asked for nothing"):
        choose_estimate(SMOL, [spec], base=never, cards=(CARD,), **options)


def test_the_trainer_decides_by_the_same_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    """Else a run would reserve what was measured, and then recompute because an estimate says it must."""
    from gshare.agent.train import checkpointing
    from toy import tiny_base

    asked: list[dict[str, Any]] = []
    real = checkpointing.choose_estimate

    def heard(*arguments: Any, **options: Any) -> MemoryEstimate:
        asked.append(options)
        return real(*arguments, **options)

    monkeypatch.setattr(checkpointing, "choose_estimate", heard)
    spec = AdapterSpec(name="a", data="d", output_dir="o", lora_alpha=32.0, seed=0, max_length=64)
    assert checkpointing.does_not_fit(
        tiny_base(model), [spec], max_tokens=64, max_adapters=0, budget_mb=1, identity=lambda: "base"
    )
    assert asked[0]["base"]() == "base"
    assert asked[0]["cards"] == ("cpu",)


# ---------------------------------------------------------------------- the command


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["estimate", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_without_a_measurement_it_is_by_part(model: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("--model", str(model), "--count", "3", "--max-length", "32", "--device", "cpu")
    assert code == 0
    assert "peak on the CPU: estimate" in out
    code, out, _ = run("--model", str(model), "--max-length", "32", "--device", "cpu", "--json")
    found = json.loads(out)
    assert (code, found["type"], found["measured"], found["tokens_per_s"]) == (0, "estimate", None, None)
    assert found["budget_mb"] is None
    assert found["memory"]["total_bytes"] == sum(part["bytes"] for part in found["memory"]["parts"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--count", "0"], "--count 0: must be from 1 to 4096"),
        (["--again"], "--again is for --measure"),
        (["--max-length", "100000", "--count", "8"], "max_length"),
        (["--r", "0"], "r"),
    ],
)
def test_bad_input_is_one_message(
    model: Path, run: Callable[..., tuple[int, str, str]], arguments: list[str], says: str
) -> None:
    code, out, err = run("--model", str(model), *arguments, "--device", "cpu")
    assert code == 2
    assert says in err
    assert err.count("\n") == 1, "once, however many adapters are alike"
    assert not out
    assert "Traceback" not in err


def test_measured_once_kept_used_and_measured_again_when_damaged(
    model: Path, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_grid, "COUNTS", (1, 2, 4))
    flags = ["--model", str(model), "--base-dtype", "fp32", "--max-length", "32", "--device", "cpu"]
    flags += ["--max-tokens-per-pass", "128", "--r", "8"]
    monkeypatch.setattr(memory_grid, "LENGTHS", (32,))
    code, out, err = run(*flags, "--measure")
    assert code == 0, err
    assert "measured: 6 configurations on cpu, 0 did not fit" in out
    assert "model of 6 measured configurations" in out
    assert "tokens/s" in out
    for said in ("measuring whether 4 rows of 32 tokens fit", "measuring 1 of 6: ", "measuring 6 of 6: "):
        assert said in err
    (path,) = profile_dir().iterdir()
    assert str(path) in err

    spec = AdapterSpec(name="a", data="d", output_dir="o", r=8, lora_alpha=16.0, max_length=32, seed=0)
    whole = RunSpec(model=str(model), base_dtype="fp32", max_tokens_per_pass=128, adapters=(spec,))
    requests = [JobRequest(spec=spec, train_store="", train_hash="")]
    assert run_estimate(whole, model, requests, on_gpu=False).source == "model of 6 measured configurations"

    before = path.read_bytes()
    code, out, err = run(*flags, "--measure")
    assert (code, path.read_bytes()) == (0, before), "measured once"
    path.write_bytes(before[:100])
    code, out, err = run(*flags)
    assert (code, path.read_bytes()) == (0, before[:100])
    assert "not as measured" in out
    code, out, err = run(*flags, "--measure", "--again", "--json")
    assert (code, "of 6: " in err) == (0, False), "who reads JSON reads no progress"
    path.write_bytes(before[:100])
    code, out, err = run(*flags, "--measure")
    assert code == 0
    assert f"{path}: " in err
    assert "measuring again" in err
    assert "model of 6 measured configurations" in out
    assert len(path.read_bytes()) > 1000
