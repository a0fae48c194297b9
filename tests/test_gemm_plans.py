"""GEMM plans: kept between processes for exactly one card and its versions, not believed when damaged."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where the kernels are decorated

from gshare.kernels import gemm_cuda, gemm_plans, logit_chunks
from gshare.kernels.gemm import linear_reference
from gshare.kernels.gemm_cuda import CudaGemm, compare
from gshare.kernels.gemm_plans import PlanCache
from gshare.kernels.triton_backend import TritonBackend

KEY = "a card, torch 2"
#: Too many output tiles for `slow_without_split_k`, so that the two are compared.
SHAPE = (4096, 16)


def halved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A library that splits the sum: other bits."""
    half = x.shape[1] // 2
    return x[:, :half] @ w[:, :half].t() + x[:, half:] @ w[:, half:].t()


def test_equal_bits_choose_cublas_and_others_do_not() -> None:
    w = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert compare(linear_reference, linear_reference, 33, 96, w) == "cublas"
    assert compare(halved, linear_reference, 33, 96, w) == "triton"


def test_a_plan_outlives_its_process_and_belongs_to_its_card(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "plans.json"
    PlanCache(path, KEY).put("linear 1←2 at 3 rows", "triton")
    PlanCache(path, "another card").put("linear 1←2 at 3 rows", "cublas")
    assert PlanCache(path, KEY).get("linear 1←2 at 3 rows") == "triton"
    assert PlanCache(path, "another card").get("linear 1←2 at 3 rows") == "cublas"
    assert PlanCache(path, KEY).get("linear 1←2 at 4 rows") is None
    assert PlanCache(path, KEY + "1").get("linear 1←2 at 3 rows") is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["plans.json"]


def test_two_processes_add_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    first, second = PlanCache(path, KEY), PlanCache(path, KEY)
    first.put("a", "cublas")
    second.put("b", "triton")
    again = PlanCache(path, KEY)
    assert (again.get("a"), again.get("b")) == ("cublas", "triton")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"format": 1}',
        '{"format": 2, "cards": {"a card, torch 2": {"a": "cublas"}}}',
        '{"format": 1, "cards": {"a card, torch 2": {"a": "cublas", "b": "anything"}}}',
        '{"format": 1, "cards": {"a card, torch 2": {"a": ["cublas"]}}}',
        '{"format": 1, "cards": {"a card, torch 2": ["a"]}}',
    ],
)
def test_a_damaged_file_is_ignored_and_rewritten(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    path.write_text(text)
    cache = PlanCache(path, KEY)
    assert cache.get("a") is None
    cache.put("c", "triton")
    assert json.loads(path.read_text()) == {"format": 1, "cards": {KEY: {"c": "triton"}}}


def test_bytes_that_are_no_text_and_a_huge_file_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plans.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert PlanCache(path, KEY).get("a") is None
    PlanCache(path, KEY).put("a", "cublas")
    assert PlanCache(path, KEY).get("a") == "cublas"
    monkeypatch.setattr(gemm_plans, "MAX_BYTES", 10)
    assert PlanCache(path, KEY).get("a") is None


def test_the_oldest_plans_and_cards_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_plans, "MAX_PLANS", 2)
    monkeypatch.setattr(gemm_plans, "MAX_CARDS", 2)
    path = tmp_path / "plans.json"
    for card in ("one", "two", "one", "three"):
        cache = PlanCache(path, card)
        for product in "abc":
            cache.put(product, "cublas")
    kept = json.loads(path.read_text())["cards"]
    assert {card: list(plans) for card, plans in kept.items()} == {"one": ["b", "c"], "three": ["b", "c"]}


def test_where_nothing_can_be_written_plans_live_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = PlanCache(tmp_path / "file" / "plans.json", KEY)
    cache.put("a", "triton")
    assert cache.get("a") == "triton"


def test_the_key_follows_the_own_gemm_s_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = gemm_plans.own_gemm_hash()
    for name in gemm_plans._SOURCES:
        (tmp_path / name).write_bytes(Path(gemm_plans.__file__).with_name(name).read_bytes())
    monkeypatch.setattr(gemm_plans, "__file__", str(tmp_path / "gemm_plans.py"))
    assert gemm_plans.own_gemm_hash() == before
    with open(tmp_path / "tile_tables.py", "a") as file:
        file.write("# another tile\n")
    assert gemm_plans.own_gemm_hash() != before


def test_a_second_process_compares_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def counted(*arguments: object) -> str:
        compared.append(1)
        return "cublas"

    keys = [KEY]
    monkeypatch.setattr(gemm_cuda, "forbid_split_k", lambda: True)
    monkeypatch.setattr(gemm_cuda, "compare", counted)
    monkeypatch.setattr(gemm_cuda, "card_key", lambda device: keys[0])
    x, w = torch.randn(130, SHAPE[1]).bfloat16(), torch.randn(*SHAPE).bfloat16()
    path = tmp_path / "plans.json"

    def new_process(plans: Path | None) -> int:
        before, gemm = len(compared), CudaGemm(plans=plans)
        for _ in range(2):
            assert torch.equal(gemm.linear(x, w), x @ w.t())
        assert gemm.plans() == {"linear 4096←16 at 130 rows": "cublas"}
        return len(compared) - before

    assert new_process(path) == 1
    assert new_process(path) == 0
    assert new_process(None) == 1
    keys[0] = "the same card after an update"
    assert new_process(path) == 1
    monkeypatch.setattr(gemm_cuda, "card_key", lambda device: None)
    assert new_process(path) == 1, "a version that nobody knows must not match"


def test_what_the_head_compares_can_be_compared_before_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk's products, the last and shorter one's too; an evaluation has no gradient."""
    compared: list[tuple[int, int]] = []

    def counted(blas: object, own: object, rows: int, reduced: int, w: object) -> str:
        compared.append((rows, reduced))
        return "cublas"

    monkeypatch.setattr(gemm_cuda, "forbid_split_k", lambda: True)
    monkeypatch.setattr(gemm_cuda, "slow_without_split_k", lambda rows, outputs, reduced: False)
    monkeypatch.setattr(gemm_cuda, "compare", counted)
    monkeypatch.setattr(logit_chunks, "LOGITS_BYTES", 128 * SHAPE[0] * 2)  # 128 rows at a time
    backend, head = TritonBackend(), torch.randn(*SHAPE).bfloat16()
    backend.plan_cross_entropy(192, head, training=False)
    assert sorted(compared) == [(64, SHAPE[1]), (128, SHAPE[1])]
    backend.plan_cross_entropy(192, head, training=True)
    assert sorted(compared[2:]) == [(64, SHAPE[0]), (128, SHAPE[0])]
    known, targets = len(compared), torch.zeros(192, dtype=torch.int64)
    backend.cross_entropy(torch.randn(192, SHAPE[1]).bfloat16(), head, targets, torch.ones(192))
    assert len(compared) == known
    backend.cross_entropy(torch.randn(64 + 256, SHAPE[1]).bfloat16(), head, targets.new_zeros(320), None)
    assert len(compared) == known, "two chunks of 128 and one of 64"
    backend.cross_entropy(torch.randn(32, SHAPE[1]).bfloat16(), head, targets[:32], None)
    assert len(compared) == known + 1, "the control: rows that nobody asked about"
