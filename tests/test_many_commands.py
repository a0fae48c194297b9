"""`jobs stop`, `pause` and `resume` of many jobs at once: one transaction, all of them or none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_of_straw import Straw, agents_of_straw
from gshare.coordinator.api_protocol import (
    JobsDone,
    PauseClusterJobs,
    ResumeClusterJobs,
    StopClusterJobs,
)
from gshare.coordinator.store import Store

NAMES = [f"job{number}" for number in range(20)]


def run(tmp_path: Path, test: Callable[[Straw], Awaitable[None]]) -> None:
    async def main() -> None:
        async with agents_of_straw(tmp_path, "a") as it:
            await asyncio.wait_for(test(it), 60)

    asyncio.run(main())


def states(tmp_path: Path) -> set[str]:
    with Store.open(tmp_path / "home") as store:
        return {job.wish if job.state not in ("stopped", "paused") else job.state for job in store.jobs()}


def test_killed_in_the_middle_of_a_stop_none_of_them_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = Store._write_job, []

    def write_job(store: Store, job: Any) -> dict[str, str]:
        if len(written) == 7:
            raise KeyboardInterrupt  # in the place of kill -9: no handler of ours looks at it
        written.append(job.facts.name)
        return real(store, job)

    async def killed(it: Straw) -> None:
        it.unreachable.add("a")
        async with it.running() as coordinator:
            await it.submit(*NAMES)
            monkeypatch.setattr(Store, "_write_job", write_job)
            with pytest.raises(KeyboardInterrupt):
                coordinator._requests._command(StopClusterJobs(id=1, jobs=NAMES))

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, killed)
    monkeypatch.setattr(Store, "_write_job", real)
    assert (len(written), states(tmp_path)) == (7, {"run"})

    async def again(it: Straw) -> None:
        it.unreachable.add("a")
        async with it.running():
            assert (await it.ask(JobsDone, StopClusterJobs, jobs=NAMES)).failed == {}

    run(tmp_path, again)
    assert states(tmp_path) == {"stopped"}


def test_each_command_is_one_commit_and_a_name_twice_is_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(it: Straw) -> None:
        it.unreachable.add("a")
        async with it.running() as coordinator:
            await it.submit(*NAMES)
            commits: list[int] = []
            real = Store.commit

            def commit(store: Store, **fields: Any) -> None:
                jobs = list(fields.get("jobs", ()))
                if jobs:
                    commits.append(len(jobs))
                real(store, **{**fields, "jobs": jobs})

            monkeypatch.setattr(Store, "commit", commit)
            answer = coordinator._requests._command
            for make in (PauseClusterJobs, ResumeClusterJobs, StopClusterJobs):
                assert answer(make(id=1, jobs=[*NAMES, NAMES[0]])).failed == {}
            assert commits == [len(NAMES)] * 3
            assert answer(StopClusterJobs(id=1, jobs=NAMES)).failed.keys() == set(NAMES)
            assert commits == [len(NAMES)] * 3  # nothing is left to do

    run(tmp_path, test)
