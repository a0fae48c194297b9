"""What can go wrong around the coordinator, with agents of straw: nothing is lost, and somebody is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_of_straw import LIMITS, Straw, adapter, is_ended, run, started, submission
from fake_agent import weights
from gshare.agent.errors import EXIT_RETRY, GshareError, RetryLater, UsageError
from gshare.agent.node import protocol as p
from gshare.agent.node.dial_out import DialIn as AgentsDialIn
from gshare.agent.service.wire import encode
from gshare.cli import submit as submit_command
from gshare.cli.cluster_jobs import show_log
from gshare.coordinator import blobs as blobs_module
from gshare.coordinator import main as main_module
from gshare.coordinator import service as service_module
from gshare.coordinator.api_client import CoordinatorClient, CoordinatorGone
from gshare.coordinator.api_protocol import (
    DialIn,
    Fetched,
    FetchJob,
    JobLog,
    JobRows,
    JobsDone,
    Leaderboard,
    ListClusterJobs,
    ListNodes,
    NodeRows,
    PauseClusterJobs,
    ReadJobLog,
    ReadLeaderboard,
    ResumeClusterJobs,
    StopClusterJobs,
    Submitted,
    SubmitToCluster,
)
from gshare.coordinator.config import ClusterConfig, NodeConfig
from gshare.coordinator.link import StreamPair
from gshare.coordinator.service import TooFewWorkers
from gshare.coordinator.store import Store

Test = Callable[[Straw], Awaitable[None]]


# --- nodes that go away


def test_a_job_of_a_lost_node_goes_on_elsewhere_and_the_node_that_returns_is_fenced(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running():
            await it.submit("job0")
            agent, attempt = await started(it, "job0", steps=4)
            lost = it.job("job0").node
            await it.until(lambda: (c := it.job("job0").checkpoint) is not None and c.step == 4)
            it.unreachable.add(lost)
            agent.hang_up()
            await it.until(lambda: it.job("job0").node not in ("", lost))
            other, second = await started(it, "job0")
            assert other is not agent
            assert (second.request.attempt, second.step) == (2, 4)  # from the checkpoint, not from the start
            for _ in range(2):
                other.advance(second)
            await it.until(lambda: is_ended(it, "job0"))
            assert adapter(tmp_path, "job0") == weights("job0", 6)
            before = adapter(tmp_path, "job0")
            for _ in range(2):  # the other half of the partition has trained on
                agent.advance(attempt)
            assert attempt.state == "completed"
            it.unreachable.clear()
            await it.until(lambda: ("job0", 1) in agent.forgotten)
            assert adapter(tmp_path, "job0") == before
            assert any("lost" in text for text in it.said)

    run(tmp_path, test, "a", "b")


def test_a_stale_attempt_that_still_runs_is_stopped(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running():
            await it.submit("job0")
            agent, attempt = await started(it, "job0", steps=2)
            lost = it.job("job0").node
            it.unreachable.add(lost)
            agent.hang_up()
            await it.until(lambda: it.job("job0").node not in ("", lost))
            it.unreachable.clear()
            await it.until(lambda: attempt.state == "stopped")
            await it.until(lambda: ("job0", 1) in agent.forgotten)
            assert it.job("job0").attempt == 2

    run(tmp_path, test, "a", "b")


def test_a_node_that_returns_in_time_goes_on(tmp_path: Path) -> None:
    """Negative control of the two above: the same partition, shorter than what makes a node lost."""

    async def test(it: Straw) -> None:
        async with it.running(limits=type(LIMITS)(lost_after_s=30.0, settle_s=0.5)):
            await it.submit("job0")
            agent, attempt = await started(it, "job0", steps=2)
            agent.hang_up()
            for _ in range(4):
                agent.advance(attempt)
            await it.until(lambda: is_ended(it, "job0"))
            assert it.job("job0").attempt == 1
            assert adapter(tmp_path, "job0") == weights("job0", 6)

    run(tmp_path, test, "a", "b")


def test_a_node_that_answers_nothing_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gshare.coordinator.link.HELLO_SECONDS", 0.2)

    async def test(it: Straw) -> None:
        it.agents["a"].mute = True
        async with it.running():
            await it.submit("job0", "job1")
            await it.until(lambda: is_ended(it, "job0", "job1"))
            assert not it.agents["a"].attempts

    run(tmp_path, test, "a", "b", auto=True)


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"\xc1\xc1", id="reserved bytes"),
        pytest.param(b"\x81\xa4type\xdb\x7f\xff\xff\xff" + bytes(17 << 20), id="a text without end"),
        pytest.param(b"{}", id="JSON"),
    ],
)
def test_a_node_that_talks_garbage_is_told_and_left_alone(tmp_path: Path, garbage: bytes) -> None:
    async def test(it: Straw) -> None:
        it.agents["a"].raw_answer = garbage
        async with it.running():
            await it.submit("job0")
            await it.until(lambda: is_ended(it, "job0"))
            # 17 MiB of it may take longer than a job elsewhere.
            await it.until(lambda: "not the protocol" in it.coordinator.cluster.nodes["a"].reason)
            rows = {row.node: row for row in (await it.ask(NodeRows, ListNodes)).nodes}
            assert "not the protocol" in rows["a"].reason
            assert rows["b"].state == "ready"

    run(tmp_path, test, "a", "b", auto=True)


def test_a_connection_cut_in_the_middle_of_a_result_goes_on_at_the_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fake_agent import FakeAgent

    real = FakeAgent.files
    big = bytes(range(256)) * (40 * p.CHUNK_BYTES // 256)

    def files(self: FakeAgent, attempt: Any, kind: str) -> dict[str, bytes]:
        return real(self, attempt, kind) | ({"big.bin": big} if kind == "final" else {})

    monkeypatch.setattr(FakeAgent, "files", files)
    # What is swept meanwhile is not what is on its way.
    monkeypatch.setattr(service_module, "HOUSEKEEPING_SECONDS", 0.0)

    async def test(it: Straw) -> None:
        async with it.running():
            await it.submit("job0")
            agent, attempt = await started(it, "job0", steps=5)
            await it.until(lambda: it.job("job0").checkpoint is not None and not it.job("job0").pulling)
            agent.cut_after_bytes = agent.bytes_moved + 20 * p.CHUNK_BYTES
            agent.advance(attempt)
            await it.until(lambda: is_ended(it, "job0"))
            assert (tmp_path / "out" / "job0" / "big.bin").read_bytes() == big
            reads = [r for r in agent.requests if isinstance(r, p.ReadChunk) and r.name == "big.bin"]
            assert agent.connections > 1
            assert len({r.offset for r in reads}) == 40
            assert len(reads) < 60  # not from the start again: at most a window was in flight

    run(tmp_path, test, "a")


def test_a_flipped_byte_never_reaches_the_output(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running():
            await it.submit("job0")
            agent, attempt = await started(it, "job0", steps=4)
            await it.until(lambda: it.job("job0").checkpoint is not None and not it.job("job0").pulling)
            agent.flip_byte_of = "adapter_model.safetensors"
            for _ in range(2):
                agent.advance(attempt)
            await it.until(lambda: is_ended(it, "job0"))
            assert adapter(tmp_path, "job0") == weights("job0", 6)
            assert any("do not have the hash" in text for text in it.said)

    run(tmp_path, test, "a")


# --- disks


def test_a_full_disk_at_home_keeps_the_results_on_the_node_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(it: Straw) -> None:
        async with it.running():
            await it.submit("job0")
            agent, attempt = await started(it, "job0")
            monkeypatch.setattr(blobs_module, "DISK_RESERVE", 1 << 62)
            for _ in range(6):
                agent.advance(attempt)
            await it.until(lambda: any("free space" in text for text in it.said))
            await asyncio.sleep(0.3)
            assert it.job("job0").state == "publishing"
            assert not (tmp_path / "out").exists()
            assert not agent.forgotten
            monkeypatch.undo()
            await it.until(lambda: is_ended(it, "job0"))
            assert adapter(tmp_path, "job0") == weights("job0", 6)

    run(tmp_path, test, "a")


def test_an_output_directory_that_was_taken_meanwhile_is_told_and_waited_for(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running():
            await it.submit("job0")
            agent, attempt = await started(it, "job0")
            out = tmp_path / "out" / "job0"
            out.mkdir(parents=True)
            (out / "adapter_model.safetensors").write_bytes(b"of another run")
            for _ in range(6):
                agent.advance(attempt)
            await it.until(lambda: any("is of another run; move" in text for text in it.said))
            assert adapter(tmp_path, "job0") == b"of another run"
            out.rename(tmp_path / "moved")
            await it.until(lambda: is_ended(it, "job0"))
            assert adapter(tmp_path, "job0") == weights("job0", 6)

    run(tmp_path, test, "a")


def test_a_full_disk_on_one_node_sends_the_job_to_another(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        it.agents["a"].disk_full = True
        async with it.running():
            await it.submit("job0", "job1")
            await it.until(lambda: is_ended(it, "job0", "job1"))
            assert [it.job(name).state for name in ("job0", "job1")] == ["completed"] * 2
            assert any("the node's disk is full" in text for text in it.said)

    run(tmp_path, test, "a", "b", auto=True)


def test_the_stores_disk_is_full_the_coordinator_ends_with_a_message_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(it: Straw) -> None:
        def full(self: Store, **fields: Any) -> None:
            raise GshareError("coordinator.db: nothing was written: no room")

        async def until_full() -> None:
            async with it.running():
                await it.submit("job0")
                found.extend(await started(it, "job0"))
                monkeypatch.setattr(Store, "commit", full)
                found[0].advance(found[1])
                await it.task

        found: list[Any] = []
        with pytest.raises(GshareError, match="no room"):
            await until_full()
        agent, attempt = found
        monkeypatch.undo()
        async with it.running():
            for _ in range(5):
                agent.advance(attempt)
            await it.until(lambda: is_ended(it, "job0"))
            assert adapter(tmp_path, "job0") == weights("job0", 6)

    run(tmp_path, test, "a")


# --- submissions


def test_a_data_file_that_changed_fails_its_job_alone_and_is_named(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        it.unreachable.update(it.agents)
        async with it.running():
            await it.submit("job0", "job1")
            (tmp_path / "data" / "job0.jsonl").write_text("other")
            it.unreachable.clear()
            await it.until(lambda: is_ended(it, "job0", "job1"))
            assert (it.job("job0").state, it.job("job1").state) == ("failed", "completed")
            assert "job0.jsonl" in it.job("job0").reason

    run(tmp_path, test, "a", auto=True)


def test_the_same_submission_again_is_the_same_and_another_of_that_name_is_refused(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running():
            await it.submit("job0")
            await it.submit("job0")  # the answer had been lost
            assert len(it.coordinator.cluster.jobs) == 1
            with pytest.raises(UsageError, match="stop it first"):
                await it.submit("job0", identity="s2")
            fields = submission(tmp_path, ["job1"], "s3")
            job = fields["jobs"][0]
            taken = p.msgspec.structs.replace(job.spec, output_dir=str(tmp_path / "out" / "job0"))
            fields["jobs"] = (p.msgspec.structs.replace(job, spec=taken),)
            with pytest.raises(UsageError, match="is that of job job0"):
                await it.ask(Submitted, SubmitToCluster, **fields)
            assert "job1" not in it.coordinator.cluster.jobs

    run(tmp_path, test, "a")


def test_killed_in_the_middle_of_a_submission_none_of_it_is_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"job{number}" for number in range(20)]
    real, written = Store._write_job, []

    def write_job(store: Store, job: Any) -> dict[str, str]:
        if len(written) == 7:
            raise KeyboardInterrupt  # in the place of kill -9: no handler of ours looks at it
        written.append(job.facts.name)
        return real(store, job)

    def stored() -> list[str]:
        with Store.open(tmp_path / "home") as store:
            return [job.facts.name for job in store.jobs()]

    async def killed(it: Straw) -> None:
        async with it.running() as coordinator:
            monkeypatch.setattr(Store, "_write_job", write_job)
            with pytest.raises(KeyboardInterrupt):
                coordinator._requests._submit(SubmitToCluster(id=1, **submission(tmp_path, names, "s1")))

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, killed, "a")
    assert (written, stored()) == (names[:7], [])
    monkeypatch.setattr(Store, "_write_job", real)

    async def again(it: Straw) -> None:
        async with it.running():
            await it.submit(*names, identity="s2")  # the command again draws another one

    run(tmp_path, again, "a")
    assert stored() == names


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_submission_whose_answer_was_lost_is_sent_again_and_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """Three times it is given up."""
    answers: list[list[str]] = []

    class Loses(CoordinatorClient):
        def ask(self, reply_type: Any, make: Any, **fields: Any) -> Any:
            reply = super().ask(reply_type, make, **fields)
            answers.append(reply.jobs)
            if len(answers) <= lost:
                raise CoordinatorGone("the coordinator is gone; jobs run on")
            return reply

    async def test(it: Straw) -> None:
        async with it.running():
            monkeypatch.setattr(
                main_module, "connect_or_start", lambda options, client: (Loses(it.state_dir, client), True)
            )
            options = main_module.Options(cluster=tmp_path / "cluster.toml", state_dir=it.state_dir)
            sending = asyncio.to_thread(submit_command._send, options, submission(tmp_path, ["job0", "job1"]))
            if lost == 3:
                with pytest.raises(CoordinatorGone):
                    await sending
            else:
                assert (await sending).jobs == ["job0", "job1"]
            assert answers == [["job0", "job1"]] * min(lost + 1, 3)
            assert [job.order for job in it.coordinator.store.jobs()] == [1, 2]

    run(tmp_path, test, "a")


def test_a_jobs_name_used_again_does_not_show_the_earlier_jobs_step(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async def step() -> int:
            return (await it.ask(JobRows, ListClusterJobs)).jobs[0].step

        async with it.running():
            await it.submit("job0")
            await started(it, "job0", steps=3)
            await it.until(lambda: "job0" in it.coordinator.losses and it.coordinator.losses["job0"][0] == 3)
            await it.submit("job0")  # the same one: nothing changes
            assert await step() == 3
            await it.ask(JobsDone, StopClusterJobs, jobs=["job0"])
            await it.until(lambda: is_ended(it, "job0"))
            assert await step() == 3
            await it.submit("job0", identity="s2")
            assert await step() == 0

    run(tmp_path, test, "a")


def test_jobs_are_stopped_paused_resumed_and_their_logs_and_files_fetched(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running():
            await it.submit("job0", "job1")
            _, attempt = await started(it, "job0", steps=4)
            await started(it, "job1")
            assert (await it.ask(JobsDone, PauseClusterJobs, jobs=["job0"])).failed == {}
            await it.until(lambda: attempt.state == "paused")
            await it.until(lambda: it.job("job0").state == "paused")
            await it.ask(JobsDone, ResumeClusterJobs, jobs=["job0"])
            await it.until(lambda: attempt.state == "running")
            log = await it.ask(JobLog, ReadJobLog, job="job0")
            assert (log.node, log.text) == (it.job("job0").node, "log of job0\n")
            await it.ask(JobLog, ReadJobLog, job="job0", max_bytes=1 << 30)
            asked = [one.max_bytes for one in it.agents["a"].requests if isinstance(one, p.ReadLog)]
            assert asked == [65536, p.MAX_LOG_BYTES]  # as much as the agent gives
            to = tmp_path / "fetched"
            fetched = await it.ask(Fetched, FetchJob, job="job0", kind="best", directory=str(to))
            assert fetched.files == sorted(
                f"best/{n}" for n in ("adapter_config.json", "adapter_model.safetensors", "metadata.json")
            )
            assert (to / "best" / "adapter_model.safetensors").read_bytes() == weights("job0", 4)
            with pytest.raises(UsageError, match="not empty"):
                await it.ask(Fetched, FetchJob, job="job0", kind="best", directory=str(to))
            await it.ask(JobsDone, StopClusterJobs, jobs=["job0"])
            await it.until(lambda: is_ended(it, "job0"))
            assert it.job("job0").state == "stopped"
            assert (await it.ask(JobsDone, StopClusterJobs, jobs=["job0"])).failed == {
                "job0": "job job0 has ended: stopped"
            }
            with pytest.raises(UsageError, match="did you mean job"):
                await it.ask(JobsDone, StopClusterJobs, jobs=["jobx"])
            # A stopped job goes on from the checkpoint that came home, wherever there is room.
            await it.until(lambda: it.job("job0").checkpoint is not None and not it.job("job0").pulling)
            await it.ask(JobsDone, ResumeClusterJobs, jobs=["job0"])
            await it.until(lambda: it.job("job0").attempt == 2)
            again, second = await started(it, "job0")
            assert second.step == 4
            for _ in range(2):
                again.advance(second)
            await it.until(lambda: is_ended(it, "job0"))
            assert adapter(tmp_path, "job0") == weights("job0", 6)

    run(tmp_path, test, "a")


def test_a_checkpoint_at_home_can_be_fetched_while_its_node_is_away(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running(limits=type(LIMITS)(lost_after_s=60.0)):
            await it.submit("job0")
            agent, _ = await started(it, "job0", steps=2)
            await it.until(lambda: it.job("job0").checkpoint is not None)
            it.unreachable.add("a")
            agent.hang_up()
            await it.until(lambda: it.coordinator.sessions["a"].link is None)
            with pytest.raises(RetryLater, match="node a is away"):
                await it.ask(JobLog, ReadJobLog, job="job0")
            with pytest.raises(RetryLater, match="node a is away"):
                await it.ask(Fetched, FetchJob, job="job0", kind="best", directory=str(tmp_path / "x"))
            fetched = await it.ask(
                Fetched, FetchJob, job="job0", kind="checkpoint", directory=str(tmp_path / "y")
            )
            assert fetched.step == 2
            assert json.loads((tmp_path / "y" / "state.json").read_text()) == {"step": 2}

    run(tmp_path, test, "a")


def test_the_leaderboard_follows_the_evaluations_of_current_attempts(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running():
            await it.submit("job0", "job1")
            await started(it, "job0", steps=4)
            await started(it, "job1", steps=2)
            await it.until(
                lambda: it.job("job0").best_val_loss == 0.5 and it.job("job1").best_val_loss == 1.0
            )
            rows = (await it.ask(Leaderboard, ReadLeaderboard)).standings
            assert [(row.job, row.best_val_loss, row.best_step) for row in rows] == [
                ("job0", 0.5, 4),
                ("job1", 1.0, 2),
            ]
            assert [seen.step for seen in it.coordinator.store.evaluations("job0")] == [2, 4]

    run(tmp_path, test, "a")


# --- workers


def test_too_few_workers_end_the_coordinator_naming_who_is_missing_and_why(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        it.unreachable.add("b")

        async def begin() -> None:
            async with it.running(expect_workers=2, expect_seconds=0.5):
                await it.submit("job0")
                await it.task

        with pytest.raises(TooFewWorkers) as caught:
            await begin()
        assert caught.value.exit_code == EXIT_RETRY
        assert "b: new" in str(caught.value)
        assert "no route to it" in str(caught.value)
        assert not it.agents["a"].attempts  # nothing was placed on the one that was there

    run(tmp_path, test, "a", "b")


def test_enough_workers_begin(tmp_path: Path) -> None:
    """Negative control of the above."""

    async def test(it: Straw) -> None:
        async with it.running(expect_workers=2, expect_seconds=30.0):
            await it.submit("job0")
            await it.until(lambda: is_ended(it, "job0"))
            assert any("2 workers are ready" in text for text in it.said)

    run(tmp_path, test, "a", "b", auto=True)


def test_a_node_behind_nat_dials_in_and_gets_jobs(tmp_path: Path) -> None:
    async def bridge(one: StreamPair, other: StreamPair) -> None:
        while data := await one.read():
            other.write(data)

    async def test(it: Straw) -> None:
        nodes = ClusterConfig(nodes=(), source="cluster.toml")
        agent = it.agents["a"]
        async with it.running(config=nodes):
            reader, writer = await asyncio.open_unix_connection(str(it.state_dir / "socket"))
            home, there = StreamPair(reader, writer), await agent.stream()
            home.write(encode(AgentsDialIn(node="far")))
            copying = [asyncio.create_task(bridge(home, there)), asyncio.create_task(bridge(there, home))]
            await it.submit("job0")
            await it.until(lambda: is_ended(it, "job0"))
            assert it.job("job0").last_node == "far"
            for task in copying:
                task.cancel()
            await home.close()
            await it.until(lambda: it.coordinator.cluster.nodes["far"].state == "unreachable")

    run(tmp_path, test, "a", auto=True)


@pytest.mark.parametrize("node", ["../x", "$(touch pwned)", "[/]", "a\nb", "x" * 4096, ""])
def test_a_node_that_dials_in_under_a_hostile_name_is_refused(tmp_path: Path, node: str) -> None:
    async def test(it: Straw) -> None:
        async with it.running():
            reader, writer = await asyncio.open_unix_connection(str(it.state_dir / "socket"))
            writer.write(encode(DialIn(node=node)))
            assert b"api_refused" in await reader.read(65536)
            assert set(it.coordinator.sessions) == {"a"}

    run(tmp_path, test, "a")


def test_the_agents_dial_in_is_the_one_that_is_understood() -> None:
    assert AgentsDialIn.__struct_config__.tag == DialIn.__struct_config__.tag
    assert set(AgentsDialIn.__struct_fields__) <= set(DialIn.__struct_fields__)


# --- hostile words


def test_what_nodes_say_is_one_plain_line(tmp_path: Path) -> None:
    hostile = "\x1b[2J[red]x[/red]\nsecond " + "y" * 4096

    async def test(it: Straw) -> None:
        it.agents["a"].node_info = {"problems": [hostile], "hostname": hostile}
        async with it.running():
            await it.submit("job0")
            agent, attempt = await started(it, "job0")
            agent.change(attempt, "failed", hostile)
            await it.until(lambda: is_ended(it, "job0"))
            rows = (await it.ask(NodeRows, ListNodes)).nodes
            jobs = (await it.ask(JobRows, ListClusterJobs)).jobs
        from gshare.cli.cluster import job_table, node_table

        shown = "\n".join([*node_table(rows), *job_table(jobs)])
        assert "\x1b" not in shown
        assert "[red]x[/red]" in shown  # as text, not as markup
        assert len(shown.splitlines()) == 4

    run(tmp_path, test, "a")


def test_nodes_of_an_older_configuration_are_reloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gshare.coordinator.api_protocol import ReloadCluster, Reloaded

    async def test(it: Straw) -> None:
        both = ClusterConfig(
            nodes=tuple(NodeConfig(name=name, transport="local", gpus=()) for name in ("a", "b")),
            source="cluster.toml",
        )
        one = ClusterConfig(nodes=both.nodes[:1], source="cluster.toml")
        async with it.running(config=one):
            await it.until(lambda: it.coordinator.cluster.nodes["a"].state == "ready")
            monkeypatch.setattr(service_module, "load_cluster", lambda path: both)
            assert (await it.ask(Reloaded, ReloadCluster)).nodes == ["a", "b"]
            await it.until(lambda: it.coordinator.cluster.nodes["b"].state == "ready")
            assert it.agents["a"].connections == 1  # what did not change was left alone
            monkeypatch.setattr(service_module, "load_cluster", lambda path: one)
            await it.ask(Reloaded, ReloadCluster)
            assert set(it.coordinator.cluster.nodes) == {"a"}

    run(tmp_path, test, "a", "b")


@pytest.mark.parametrize("how", ["connected", "away", "mute"])
def test_a_node_taken_out_of_the_cluster_file_stops_training_or_somebody_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    from gshare.coordinator.api_protocol import ReloadCluster, Reloaded

    async def test(it: Straw) -> None:
        async with it.running() as coordinator:
            await it.submit("job0")
            agent, attempt = await started(it, "job0", steps=2)
            left = it.job("job0").node
            if how == "away":
                it.unreachable.add(left)
                agent.hang_up()
                await it.until(lambda: coordinator.sessions[left].link is None)
            agent.mute = how == "mute"
            nodes = tuple(node for node in coordinator.config.nodes if node.name != left)
            rest = ClusterConfig(nodes=nodes, source="cluster.toml")
            monkeypatch.setattr(service_module, "load_cluster", lambda path: rest)
            assert (await it.ask(Reloaded, ReloadCluster)).nodes == [node.name for node in nodes]
            await it.until(lambda: it.job("job0").node == nodes[0].name)
            await it.until(lambda: not agent._writers)  # the connection has ended
            warned = [text for text in it.said if f"node {left} was taken out" in text]
            if how == "connected":
                assert (attempt.state, warned) == ("stopped", [])
                assert attempt.reason == f"node {left} was taken out of the cluster file"
            else:
                assert attempt.state == "running"
                await it.until(lambda: any("'job0' may go on training there" in text for text in it.said))

    monkeypatch.setattr(service_module, "LEAVE_SECONDS", 0.3)
    run(tmp_path, test, "a", "b")


def test_more_of_a_log_than_an_agent_gives_is_refused_with_the_limit(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--max-bytes: at most {p.MAX_LOG_BYTES}"):
        show_log(tmp_path / "cluster.toml", tmp_path / "home", "job0", p.MAX_LOG_BYTES + 1)
    with pytest.raises(RetryLater, match="no coordinator runs"):  # negative control: it would be asked
        show_log(tmp_path / "cluster.toml", tmp_path / "home", "job0", p.MAX_LOG_BYTES)
