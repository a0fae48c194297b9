"""The measured memory model: known coefficients found, never falling, never below a measurement; its file."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gshare.agent.jobs import memory_model, memory_profile
from gshare.agent.jobs.least_squares import RelativeSystem
from gshare.agent.jobs.memory import Device, ModelShape, estimate_run
from gshare.agent.jobs.memory_grid import MOST_RANKS, RANKS, grid
from gshare.agent.jobs.memory_model import FOLDS, SAFETY_MARGIN, fit_memory, fit_seconds, fit_terms
from gshare.agent.jobs.memory_profile import (
    DamagedProfile,
    MemoryProfile,
    make_profile,
    profile_key,
    read_profile,
    read_profile_file,
    write_profile,
)
from gshare.agent.jobs.pass_load import PassLoad, label_rung, pass_load, rung
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.service.environment import trainer_environment
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_points import LOADS, MIB, TRUE, load, noisy, points, value

errors = st.lists(st.floats(-0.04, 0.04), min_size=len(LOADS), max_size=len(LOADS))
coefficients = st.fixed_dictionaries(
    {
        "constant": st.floats(50 * MIB, 20_000 * MIB),
        "tokens": st.floats(20_000, 2_000_000),
        "adapter_bytes": st.floats(1, 2),
        "optimizer_bytes": st.floats(1, 2),
    }
)


def test_the_grid_is_the_papers_with_everything_varied() -> None:
    plan = grid(16384, max_length=2048)
    assert {what.batch for what in plan} == {1, 2, 4, 8, 16, 32}
    assert {what.adapters for what in plan} == {1, 2, 4, 8, 16, 32}
    assert len({(what.adapters, what.batch) for what in plan}) == len(plan) == 26
    assert {what.r for what in plan} == set(RANKS)
    assert all(what.r * what.adapters <= MOST_RANKS and what.tokens <= 16384 for what in plan)
    assert {what.optim for what in plan} == {"adamw", "adamw_8bit"}
    assert 0 < sum(what.dropout > 0 for what in plan) < len(plan) / 2
    assert max(what.tokens for what in plan) == 16384
    assert all(what.length <= 100 for what in grid(16384, max_length=100))
    assert [what.tokens for what in grid(10, max_length=100)] == [10]  # not even the shortest length fits


def test_least_squares_by_hand() -> None:
    # y = 2 + 3x at x = 0, 1, 2, exactly; the third column is twice the second.
    system = RelativeSystem([[1, 0, 0], [1, 1, 2], [1, 2, 4]], [2, 5, 8], [0, 0, 0])
    assert system.solve((0, 1)) == pytest.approx((2, 3))
    assert system.solve((0,)) == pytest.approx(((1 / 2 + 1 / 5 + 1 / 8) / (1 / 4 + 1 / 25 + 1 / 64),))
    assert system.solve((0, 1, 2)) is None, "columns that cannot be told apart"
    known = RelativeSystem([[1, 0], [1, 1], [1, 2]], [2, 5, 8], [1, 4, 7])
    assert known.solve((0, 1)) == pytest.approx((1, 0))


@settings(max_examples=15, deadline=None)
@given(coefficients)
def test_known_coefficients_are_found(true: dict[str, float]) -> None:
    targets = [value(true, one) for one in LOADS]
    fit = fit_terms(LOADS, targets, tuple(true), arena=False)
    assert fit is not None
    assert fit.coefficients == pytest.approx(tuple(true.values()), rel=1e-4)
    assert fit.r2 == pytest.approx(1.0)
    assert fit.worst_error < 1e-6


def test_only_terms_that_are_worth_it_are_taken() -> None:
    plain = fit_memory(LOADS, [value(TRUE, one) for one in LOADS])
    assert plain is not None
    assert plain.terms == ("constant", "tokens"), "what the arena holds is known"
    assert plain.coefficients == pytest.approx((TRUE["constant"], TRUE["tokens"]), rel=1e-6)
    overhead = TRUE | {"adapter_bytes": 2.0, "rank_tokens": 300.0}
    richer = fit_memory(LOADS, [value(overhead, one) for one in LOADS])
    assert richer is not None
    assert richer.worst_error < memory_model.WORTH
    assert {"constant", "tokens", "rank_tokens"} < set(richer.terms)
    few = fit_memory(LOADS[:FOLDS], [value(TRUE, one) for one in LOADS[:FOLDS]])
    assert few is not None
    assert len(few.terms) <= FOLDS // memory_model.POINTS_A_TERM
    assert fit_memory(LOADS[: FOLDS - 1], [1e9] * (FOLDS - 1)) is None


@settings(max_examples=10, deadline=None)
@given(
    coefficients,
    errors,
    st.integers(0, len(LOADS) - 1),
    st.dictionaries(st.sampled_from(PassLoad.__struct_fields__), st.integers(0, 10**9)),
)
def test_more_is_never_less_and_nothing_is_below_a_measurement(
    true: dict[str, float], errors: list[float], number: int, more: dict[str, int]
) -> None:
    peaks = noisy(true, errors)
    fit = fit_memory(LOADS, peaks)
    assert fit is not None
    assert min(fit.coefficients) >= 0
    for one, peak in zip(LOADS, peaks, strict=True):
        assert fit.bound(one) >= peak
    one = LOADS[number]
    larger = msgspec.structs.replace(one, **{name: getattr(one, name) + by for name, by in more.items()})
    assert fit.predict(larger) >= fit.predict(one)
    assert fit.bound(larger) >= peaks[number], "larger than a measured point, and foreseen below it"
    assert fit.margin >= SAFETY_MARGIN


def test_the_margin_is_what_keeps_a_measurement_from_being_missed() -> None:
    """Negative control: with the margin taken away points that were measured are foreseen too small."""
    peaks = noisy(TRUE, [0.04 if number % 2 else -0.04 for number in range(len(LOADS))])
    fit = fit_memory(LOADS, peaks)
    assert fit is not None
    assert any(fit.predict(one) < peak for one, peak in zip(LOADS, peaks, strict=True))
    assert all(fit.bound(one) >= peak for one, peak in zip(LOADS, peaks, strict=True))


def test_a_point_far_off_widens_the_margin_and_falling_memory_is_no_model() -> None:
    peaks = noisy(TRUE, [0.0] * len(LOADS))
    peaks[7] *= 1.5
    fit = fit_memory(LOADS, peaks)
    assert fit is not None
    assert fit.margin > 0.2
    assert fit.worst_error > 0.2
    assert fit.bound(LOADS[7]) >= peaks[7]
    falling = [value({"constant": 50e9}, one) - 1e5 * one.tokens for one in LOADS]
    assert fit_terms(LOADS, falling, ("constant", "tokens"), arena=False) is None
    flat = fit_memory(LOADS, falling)
    assert flat is not None
    assert "tokens" not in flat.terms


def test_r2_of_what_is_always_the_same() -> None:
    fit = fit_seconds(LOADS, [0.5] * len(LOADS))
    assert fit is not None
    assert (fit.terms, fit.r2) == (("constant",), pytest.approx(1.0))
    assert fit.predict(LOADS[0]) == pytest.approx(0.5)


def test_seconds_are_fitted_over_tokens_and_adapters() -> None:
    true = {"constant": 0.004, "tokens": 5e-5, "adapters": 0.001}
    fit = fit_seconds(LOADS, [value(true, one) for one in LOADS])
    assert fit is not None
    assert fit.predict(LOADS[3]) == pytest.approx(value(true, LOADS[3]), rel=1e-3)


def test_rungs() -> None:
    assert [rung(n) for n in (1, 64, 65, 512, 513, 8192, 8193)] == [64, 64, 128, 512, 640, 8192, 8704]
    few = [label_rung(n, coarse=True) for n in (0, 64, 65, 513, 2048, 2049, 4097)]
    assert few == [64, 64, 128, 1024, 2048, 3072, 5120]
    assert [label_rung(n) for n in (1, 513, 8193)] == [64, 640, 8704]


def test_logits_are_those_of_the_labels_or_the_most_there_may_be() -> None:
    """Of 49,152 words in bf16 4,096 rows are one chunk, 4,097 are two."""
    shape = ModelShape(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        tie_word_embeddings=True,
    )

    def rows(tokens: int, labels: int | None, device: Device = "cuda") -> float:
        spec = AdapterSpec(name="a", data="d", output_dir="o")
        options: dict[str, Any] = {"base_dtype": "bf16", "pass_tokens": tokens, "longest_row": 64}
        estimate = estimate_run(shape, [spec], device=device, **options)
        found = pass_load(shape, [spec], estimate, labels=labels, **options)
        assert device == "cuda" or found.logit_bytes == estimate["logits"]
        return found.logit_bytes / (49152 * 2)

    assert [rows(8192, n) for n in (1, 4096, 4097, 6000, 8192)] == [128, 4096, 2560, 3072, 4096]
    assert rows(1280, 1100) == 1280, "padded to 2,048, but to no more rows than the pass has"
    assert [rows(n, None) for n in (300, 1270, 4097, 8192)] == [384, 1280, 4096, 4096]
    assert rows(8192, 1, "cpu") == rows(8192, None, "cpu")


# ---------------------------------------------------------------------- the file


def profile(base: str = "b" * 64, **fields: Any) -> MemoryProfile:
    key = profile_key(base, base_dtype="bf16", card="a card", checkpointing=False)
    options = {"length": 256, "largest_batch": 64, "limit_bytes": 0} | fields
    return make_profile(key, points(), **options)


def test_a_profile_comes_back_with_the_same_models(tmp_path: Path) -> None:
    written = profile()
    path = write_profile(tmp_path / "memory", written)
    found = read_profile(tmp_path / "memory", written.key)
    assert found == written
    assert found is not None
    assert found.memory == written.memory
    assert found.tokens_per_second(LOADS[4]) == pytest.approx(1e4)
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing half-written is left"


def test_every_part_of_the_key_makes_another_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"base": "b", "base_dtype": "bf16", "card": "a", "checkpointing": False}
    key = profile_key(**same)
    if find_spec("torch") is not None:  # not imported: its version is metadata
        assert key.torch
    others = [
        profile_key(**{**same, name: other})
        for name, other in (("base", "c"), ("base_dtype", "nf4"), ("card", "b"), ("checkpointing", True))
    ]
    others += [
        msgspec.structs.replace(key, **{name: other})
        for name, other in (("torch", "0"), ("triton", "0"), ("numerics", 0), ("format", 0))
    ]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")  # not what a trainer has by itself
    others.append(profile_key(**same))
    assert len({one.file_name for one in [key, *others]}) == 10
    assert all(read_profile(tmp_path, one) is None for one in others)


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize("own", [None, *ALLOCATOR])
def test_whoever_looks_for_a_profile_has_the_key_of_the_trainer_that_measures(
    monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    """The trainer has its allocator's setting in its environment; who starts it has not."""
    same = {"base": "b", "base_dtype": "bf16", "card": "a", "checkpointing": False}
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    by_itself = profile_key(**same)
    if own is not None:
        monkeypatch.setenv(own, "backend:native")
    here = profile_key(**same)
    for name, told in trainer_environment().items():
        monkeypatch.setenv(name, told)
    assert profile_key(**same) == here
    assert (here != by_itself) == (own is not None)
    setting = "PYTORCH_ALLOC_CONF=expandable_segments:True" if own is None else f"{own}=backend:native"
    assert setting in here.allocator.split()


def broken(change: dict[str, Any]) -> bytes:
    return msgspec.json.encode(msgspec.to_builtins(profile()) | change)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "JSON is malformed|truncated"),
        (msgspec.json.encode(profile())[:-40], "truncated|malformed"),
        (b"\xff\xfe", "malformed|invalid"),
        (b"[" * 100_000, "recursion|malformed|truncated|Expected"),
        (b" " * ((1 << 20) + 1), "larger than 1 MiB"),
        (broken({"points": []}), "0 points"),
        (broken({"surprise": 1}), "surprise"),
        (broken({"memory_terms": ["constant", "phase_of_the_moon"]}), "memory_terms"),
        (broken({"memory_terms": ["tokens"]}), "memory_terms"),
        (broken({"time_terms": ["constant", "tokens", "tokens"]}), "time_terms"),
        (
            broken({"points": [msgspec.to_builtins(p) | {"peak_bytes": 0} for p in points()]}),
            r"points\[0\].peak_bytes",
        ),
        (
            broken({"points": [msgspec.to_builtins(p) | {"step_seconds": 1e300} for p in points()]}),
            r"points\[0\].step_seconds",
        ),
        (
            broken(
                {
                    "points": [
                        msgspec.to_builtins(p) | {"load": msgspec.to_builtins(load(tokens=-1))}
                        for p in points()
                    ]
                }
            ),
            r"points\[0\].tokens",
        ),
        (
            broken({"points": msgspec.to_builtins(points([90e9 - 1e5 * o.tokens for o in LOADS]))}),
            "do not fit",
        ),
        (msgspec.json.encode(profile("another base")), "another base"),
        (broken({"key": msgspec.to_builtins(profile().key) | {"format": 1}}), "of format 1, .* measure it"),
    ],
)
def test_a_damaged_profile_is_named_and_never_used(tmp_path: Path, data: bytes, says: str) -> None:
    path = write_profile(tmp_path, profile())
    path.write_bytes(data)
    with pytest.raises(DamagedProfile, match=says) as caught:
        read_profile(tmp_path, profile().key)
    assert str(path) in str(caught.value)


def test_a_file_of_an_older_format_is_refused_where_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(msgspec.json.encode(profile()))
    assert read_profile_file(path) == profile()
    path.write_bytes(broken({"key": msgspec.to_builtins(profile().key) | {"format": 1}}))
    with pytest.raises(DamagedProfile, match="of format 1, this version reads"):
        read_profile_file(path)


def test_an_unreadable_profile_is_damaged_too(tmp_path: Path) -> None:
    (tmp_path / profile().key.file_name).mkdir()
    with pytest.raises(DamagedProfile, match="cannot be read"):
        read_profile(tmp_path, profile().key)


def test_the_directory_is_bounded_and_the_oldest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_profile, "MAX_PROFILES", 3)
    left = tmp_path / ".half.json.0123"
    left.write_text("")
    os.utime(left, (1, 1))
    keys = []
    for number in range(5):
        one = profile(f"base {number}")
        path = write_profile(tmp_path, one)
        os.utime(path, (1000 + number, 1000 + number))
        keys.append(one.key)
    write_profile(tmp_path, profile("base 5"))
    assert [read_profile(tmp_path, key) is not None for key in keys] == [False] * 3 + [True] * 2
    assert not left.exists()


def test_reach() -> None:
    it = profile()
    largest = max(LOADS, key=lambda one: one.tokens)
    assert it.reaches(largest)
    assert it.reaches(msgspec.structs.replace(largest, tokens=2 * largest.tokens))
    assert not it.reaches(msgspec.structs.replace(largest, tokens=2 * largest.tokens + 1))
    with pytest.raises(ValueError, match="4 configurations were measured"):
        make_profile(it.key, it.points[:4], length=1, largest_batch=1, limit_bytes=0)
