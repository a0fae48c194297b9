"""The coordinator with agents of straw: places, follows, brings home, survives, and never does it twice."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster_of_straw import Straw, agents_of_straw
from fake_agent import weights
from gshare.coordinator.store import Store


def straw(tmp_path: Path, *names: str, **fields: Any) -> Callable[[Callable[[Straw], Awaitable[None]]], None]:
    def run(test: Callable[[Straw], Awaitable[None]]) -> None:
        async def main() -> None:
            async with agents_of_straw(tmp_path, *names, **fields) as it:
                await asyncio.wait_for(test(it), 60)

        asyncio.run(main())

    return run


def ended(it: Straw, *names: str) -> bool:
    return all(it.job(name).state in ("completed", "stopped", "failed", "diverged") for name in names)


def adapter(tmp_path: Path, name: str, inside: str = "") -> bytes:
    return (tmp_path / "out" / name / inside / "adapter_model.safetensors").read_bytes()


def test_nine_jobs_on_three_nodes_end_at_home(tmp_path: Path) -> None:
    names = [f"job{number}" for number in range(9)]

    async def test(it: Straw) -> None:
        async with it.running():
            await it.submit(*names)
            await it.until(lambda: ended(it, *names))
            for name in names:
                assert it.job(name).state == "completed", it.job(name).reason
                assert adapter(tmp_path, name) == adapter(tmp_path, name, "best") == weights(name, 6)
            started = {agent: len(a.attempts) for agent, a in it.agents.items()}
            await it.until(lambda: sum(len(a.forgotten) for a in it.agents.values()) == 9)
            assert all(a.forgotten for a in it.agents.values()), started
            assert it.coordinator.store.pending() == []

    straw(tmp_path, "a", "b", "c", auto=True)(test)


class Killed(Exception):
    """In the place of kill -9."""


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_commit_nothing_is_lost_and_nothing_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """Killed before (after) every third commit or so, more than fifty times, while job follows on job."""
    placed: list[str] = []
    real_rename, real_commit, chance = os.rename, Store.commit, random.Random(5)

    def rename(source: Any, target: Any) -> None:
        real_rename(source, target)
        if Path(source).name.startswith(".gshare-tmp-"):
            placed.append(Path(target).name)

    def commit(store: Store, **fields: Any) -> None:
        matters = any(fields.get(key) for key in ("jobs", "actions", "done", "evaluation"))
        lethal = matters and chance.random() < 0.3
        if lethal and not after:
            raise Killed
        real_commit(store, **fields)
        if lethal:
            raise Killed

    async def test(it: Straw) -> None:
        kills, names = 0, []
        while kills <= 50:
            batch = [f"job{len(names) + number}" for number in range(3)]
            names += batch
            async with it.running():
                await it.submit(*batch, identity=batch[0])
            monkeypatch.setattr(Store, "commit", commit)
            while True:
                assert kills < 500
                try:
                    async with it.running():
                        await it.until(partial(ended, it, *names))
                        break
                except (Killed, AssertionError):
                    kills += 1
            monkeypatch.setattr(Store, "commit", real_commit)
        async with it.running():
            await it.until(lambda: not it.coordinator.store.pending())
        for name in names:
            assert it.job(name).state == "completed"
            assert adapter(tmp_path, name) == weights(name, 6)
        assert sorted(placed) == sorted(names)  # each once
        assert not any(agent.attempts for agent in it.agents.values())

    monkeypatch.setattr("gshare.coordinator.results.os.rename", rename)
    straw(tmp_path, "a", "b", auto=True)(test)
