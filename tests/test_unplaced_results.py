"""Jobs that are done and whose results cannot come home: a stop ends them, the results stay on the node."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_of_straw import LIMITS, Straw, adapter, is_ended, run, started
from fake_agent import FakeAgent, FakeAttempt, weights
from gshare.cli import cluster_jobs
from gshare.coordinator import blobs as blobs_module
from gshare.coordinator.api_client import CoordinatorClient
from gshare.coordinator.api_protocol import (
    Fetched,
    FetchJob,
    JobsDone,
    ResumeClusterJobs,
    StopClusterJobs,
)
from gshare.coordinator.home import Home

#: No second try by itself, which would be under way by chance when the stop comes.
ONE_TRY = replace(LIMITS, publish_delay_s=3600)
STAY = "its results stay on node a, `gshare jobs fetch job0 DIR` brings them from there"
ONCE_MORE = "job job0 is done, its results are being brought home; stop it once more to end it without them"


async def done_on(it: Straw) -> tuple[FakeAgent, FakeAttempt]:
    """`job0`, trained to its end."""
    await it.submit("job0")
    agent, attempt = await started(it, "job0")
    for _ in range(6):
        agent.advance(attempt)
    return agent, attempt


async def stop(it: Straw) -> JobsDone:
    return await it.ask(JobsDone, StopClusterJobs, jobs=["job0"])


async def fetched(it: Straw, to: Path) -> bytes:
    await it.ask(Fetched, FetchJob, job="job0", kind="final", directory=str(to))
    return (to / "adapter_model.safetensors").read_bytes()


def disk_is_gone(tmp_path: Path) -> Path:
    """A file where the output directory's parent should be."""
    (tmp_path / "out").write_text("")
    return tmp_path / "out"


def test_a_job_that_cannot_be_placed_is_ended_by_a_stop_and_its_results_are_fetched(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        disk_is_gone(tmp_path)
        async with it.running(limits=ONE_TRY):
            agent, _ = await done_on(it)
            await it.until(lambda: it.job("job0").publish_again)
            reply = await stop(it)
            assert (reply.failed, reply.told) == ({}, {"job0": f"ended; {STAY}"})
            job = it.job("job0")
            assert (job.state, job.published) == ("stopped", 0)
            assert job.reason.startswith(f"stopped by its user; {STAY} ({tmp_path / 'out' / 'job0'}: ")
            # The node, asked again what it has, is not told to forget it.
            before = agent.connections
            agent.hang_up()
            await it.until(
                lambda: agent.connections > before and it.coordinator.sessions["a"].link is not None
            )
            await asyncio.sleep(0.3)
            assert agent.forgotten == []
            assert await fetched(it, tmp_path / "fetched") == weights("job0", 6)
            assert (await stop(it)).failed == {"job0": "job job0 has ended: stopped"}
        async with it.running():  # the next coordinator knows it too
            assert it.job("job0").state == "stopped"
            await it.until(lambda: it.coordinator.sessions["a"].link is not None)
            assert await fetched(it, tmp_path / "again") == weights("job0", 6)
            assert agent.forgotten == []

    run(tmp_path, test, "a")


def test_resumed_its_results_are_placed_and_nothing_is_trained_again(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        gone = disk_is_gone(tmp_path)
        async with it.running(limits=ONE_TRY):
            agent, _ = await done_on(it)
            await it.until(lambda: it.job("job0").publish_again)
            await stop(it)
            gone.unlink()
            await it.ask(JobsDone, ResumeClusterJobs, jobs=["job0"])
            await it.until(lambda: is_ended(it, "job0"))
            assert (it.job("job0").state, it.job("job0").attempt) == ("completed", 1)
            assert adapter(tmp_path, "job0") == weights("job0", 6)
            await it.until(lambda: agent.forgotten == [("job0", 1)])

    run(tmp_path, test, "a")


def test_resumed_while_its_node_is_away_it_is_trained_from_its_checkpoint(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        gone = disk_is_gone(tmp_path)
        async with it.running(limits=ONE_TRY):
            agent, _ = await done_on(it)
            await it.until(lambda: it.job("job0").publish_again)
            await stop(it)
            gone.unlink()
            it.unreachable.add(it.job("job0").last_node)
            agent.hang_up()
            await it.until(lambda: not it.coordinator.cluster.nodes[it.job("job0").last_node].up)
            await it.ask(JobsDone, ResumeClusterJobs, jobs=["job0"])
            await it.until(lambda: it.job("job0").attempt == 2)
            other, second = await started(it, "job0")
            assert other is not agent
            while second.step < 6:
                other.advance(second)
            await it.until(lambda: is_ended(it, "job0"))
            assert adapter(tmp_path, "job0") == weights("job0", 6)

    run(tmp_path, test, "a", "b")


def test_a_full_disk_at_home_holds_nobody_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the command says what it did."""

    async def test(it: Straw) -> None:
        monkeypatch.setattr(
            cluster_jobs,
            "running_coordinator",
            lambda file, home, name: CoordinatorClient(it.state_dir, name),
        )
        async with it.running(limits=ONE_TRY):
            monkeypatch.setattr(blobs_module, "DISK_RESERVE", 1 << 62)
            agent, _ = await done_on(it)
            await it.until(lambda: it.job("job0").publish_again)
            assert it.job("job0").state == "publishing"
            words = (tmp_path / "cluster.toml", it.state_dir, ("job0",), StopClusterJobs, "told to stop")
            assert await asyncio.to_thread(cluster_jobs.command_cluster_jobs, *words) == 0
            assert capsys.readouterr().err == f"job0: ended; {STAY}\n"
            monkeypatch.undo()
            assert (it.job("job0").state, it.job("job0").node) == ("stopped", "")
            assert await fetched(it, tmp_path / "fetched") == weights("job0", 6)
            assert agent.forgotten == []

    run(tmp_path, test, "a")


def test_where_nothing_has_failed_the_first_stop_waits_for_what_comes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most often the results are there in a moment; and what fails after a stop is not tried again."""
    place, go_on = Home.place, threading.Event()

    def slow(self: Home, job: str, attempt: int, output_dir: Path, mark: str) -> None:
        go_on.wait(60)
        place(self, job, attempt, output_dir, mark)

    monkeypatch.setattr(Home, "place", slow)

    async def test(it: Straw, works: bool) -> None:
        async with it.running():
            await done_on(it)
            await it.until(lambda: it.job("job0").state == "placing")
            assert (await stop(it)).failed == {"job0": ONCE_MORE}
            assert it.job("job0").state == "placing"
            go_on.set()
            await it.until(lambda: is_ended(it, "job0"))
            assert it.job("job0").state == ("completed" if works else "stopped")
            if works:
                assert adapter(tmp_path / "works", "job0") == weights("job0", 6)
            else:
                assert STAY in it.job("job0").reason

    for name, works in (("works", True), ("fails", False)):
        go_on.clear()
        (tmp_path / name).mkdir()
        if not works:
            disk_is_gone(tmp_path / name)
        run(tmp_path / name, lambda it, works=works: test(it, works), "a")


def test_a_disk_that_never_answers_holds_its_job_no_longer_than_two_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that hangs is left alone, and no second one is sent after it."""
    place, answers, inside = Home.place, threading.Event(), []

    def hang(self: Home, job: str, attempt: int, output_dir: Path, mark: str) -> None:
        inside.append(attempt)
        answers.wait(60)
        place(self, job, attempt, output_dir, mark)

    monkeypatch.setattr(Home, "place", hang)

    async def test(it: Straw) -> None:
        async with it.running():
            agent, _ = await done_on(it)
            await it.until(lambda: inside == [1])
            assert (await stop(it)).failed == {"job0": ONCE_MORE}
            assert list((await stop(it)).told) == ["job0"]
            assert it.job("job0").state == "stopped"
            it.unreachable.add(it.job("job0").last_node)
            agent.hang_up()
            await it.until(lambda: not it.coordinator.cluster.nodes[it.job("job0").last_node].up)
            await it.ask(JobsDone, ResumeClusterJobs, jobs=["job0"])
            await it.until(lambda: it.job("job0").attempt == 2)
            other, second = await started(it, "job0")
            while second.step < 6:
                other.advance(second)
            await it.until(lambda: "an earlier try has not ended there" in it.job("job0").reason)
            assert inside == [1]
            answers.set()
            await it.until(lambda: is_ended(it, "job0"))
            assert it.job("job0").state == "completed"
            assert inside == [1, 2]
            assert adapter(tmp_path, "job0") == weights("job0", 6)

    run(tmp_path, test, "a", "b")
