"""The coordinator with agents of straw: places, follows, brings home, survives, and never does it twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_of_straw import Straw, agents_of_straw
from fake_agent import weights
from gshare.agent.errors import RetryLater, UsageError


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
