"""First weights drawn once for jobs of one seed are those that each job would draw by itself."""

from __future__ import annotations

import pytest
import torch
from gshare.agent.train import adapter
from gshare.agent.train.adapter import InitialWeights, initial_a
from gshare.agent.train.arena import MatrixKey

Q, DOWN = MatrixKey(0, "q_proj", "A"), MatrixKey(1, "down_proj", "A")
WISHES = [
    (7, Q, (4, 48)),
    (7, DOWN, (4, 96)),
    (7, Q, (16, 48)),  # a higher rank than before
    (7, Q, (8, 48)),
    (7, Q, (4, 48)),
    (7, DOWN, (1, 96)),
    (8, Q, (4, 48)),  # another seed
    (7, Q, (4, 48)),
    (7, Q, (4, 32)),  # another model's
]
DRAWS_OF_EACH = [1, 1, 1, 0, 0, 0, 1, 1, 1]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Every real draw."""
    calls: list[tuple[object, ...]] = []

    def draw(*wish: object) -> torch.Tensor:
        calls.append(wish)
        return initial_a(*wish)  # type: ignore[arg-type]

    monkeypatch.setattr(adapter, "initial_a", draw)
    return calls


@pytest.mark.parametrize("most", [InitialWeights.MOST_BYTES, 2_000, 0])
def test_kept_draws_have_the_bits_of_new_ones(
    most: int, drawn: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InitialWeights, "MOST_BYTES", most)
    weights = InitialWeights()
    counts = []
    for wish in WISHES:
        before = len(drawn)
        assert torch.equal(weights(*wish), initial_a(*wish)), wish
        counts.append(len(drawn) - before)
    if most > 2_000:
        assert counts == DRAWS_OF_EACH
    elif most == 0:  # the control: nothing kept
        assert counts == [1] * len(WISHES)
    else:  # the second linear finds no room beside the first of 768 bytes and more
        assert sum(DRAWS_OF_EACH) < sum(counts) < len(WISHES)
