"""The coordinator's socket: frozen fields, clients that misbehave, events exactly once."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from cluster_of_straw import Straw, agents_of_straw, submission
from gshare.agent.errors import GshareError, RetryLater
from gshare.agent.jobs.events import Stepped
from gshare.agent.service.wire import encode
from gshare.cli.cluster_live import watch_jobs
from gshare.coordinator import api, api_protocol
from gshare.coordinator.api import EventRing
from gshare.coordinator.api_client import CoordinatorClient, NoCoordinator
from gshare.coordinator.api_protocol import (
    ApiHello,
    ClusterMessage,
    JobEnded,
    JobEvent,
    JobsDone,
    ListClusterJobs,
    NodeChanged,
    StopClusterJobs,
    Submitted,
    SubmitToCluster,
)
from gshare.coordinator.store import Store

#: Message → its fields; adding one with a default is fine, changing or removing one is not.
FIELDS = {
    "ApiHello": "protocol gshare client",
    "DialIn": "node gshare",
    "ApiWelcome": "protocol gshare owner pid cluster journal_id knows",
    "LocalFile": "name path sha256 size",
    "ModelSource": "name files parameters",
    "JobSubmission": "spec data val_data base_mb adapter_mb early_exit pause_at",
    "SubmitToCluster": "id submission model base_dtype schedule max_tokens_per_pass max_adapters_per_pass "
    "jobs",
    "ListClusterJobs": "id orders",
    "ListNodes": "id",
    "ReadLeaderboard": "id",
    "StopClusterJobs": "id jobs reason",
    "PauseClusterJobs": "id jobs",
    "ResumeClusterJobs": "id jobs",
    "ReadJobLog": "id job max_bytes",
    "FetchJob": "id job kind directory",
    "FollowCluster": "id journal_id after_seq jobs samples new_only",
    "ReloadCluster": "id",
    "ApiRefused": "reply_to reason exit_code",
    "Submitted": "reply_to jobs journal_id after_seq",
    "JobRow": "job state node gpu attempt step total_steps loss val_loss best_val_loss best_step "
    "output_dir reason placed position model base_dtype spec parked exit submission",
    "JobRows": "reply_to jobs",
    "NodeRow": "node transport host state reason gshare seen_s jobs info",
    "NodeRows": "reply_to nodes",
    "Standing": "job node val_loss best_val_loss best_step step total_steps state",
    "Leaderboard": "reply_to standings",
    "JobsDone": "reply_to failed told",
    "JobLog": "reply_to node text",
    "Fetched": "reply_to directory files step",
    "FollowingCluster": "reply_to journal_id next_seq gap last_seq",
    "Reloaded": "reply_to nodes",
    "JobEvent": "node attempt event",
    "JobEnded": "job state reason",
    "NodeChanged": "node state reason",
    "ClusterMessage": "level text job",
    "ClusterEventFrame": "journal_id seq event time",
    "ReadNodeLog": "id node max_bytes",
    "EndNodeLeases": "id node reservations",
    "NodeLeasesEnded": "reply_to failed",
    "ReadEvaluations": "id jobs newest",
    "ReadJobSamples": "id job after_step limit",
    "JobEvaluations": "reply_to evaluations",
    "JobSamples": "reply_to lines more",
    "JobMoved": "job state node attempt step total_steps position reason",
}


def test_the_protocol_is_frozen() -> None:
    assert api_protocol.API_PROTOCOL_VERSION == 1
    for name, fields in FIELDS.items():
        assert list(getattr(api_protocol, name).__struct_fields__)[: len(fields.split())] == fields.split()
    unions = (api_protocol.FromApiClient, api_protocol.FromCoordinator, api_protocol.ClusterEvent)
    messages = {kind.__name__ for union in unions for kind in get_args(union)}
    assert messages <= FIELDS.keys()


def run(tmp_path: Path, test: Callable[[Straw], Awaitable[None]], **fields: Any) -> None:
    async def main() -> None:
        async with agents_of_straw(tmp_path, "a", **fields) as it:
            await asyncio.wait_for(test(it), 60)

    asyncio.run(main())


async def raw(it: Straw, data: bytes) -> bytes:
    """What the coordinator answers to those bytes before it hangs up."""
    reader, writer = await asyncio.open_unix_connection(str(it.state_dir / "socket"))
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


def hello(protocol: int = 1) -> bytes:
    return encode(ApiHello(protocol=protocol, gshare="0", client="test"))


def test_the_socket_is_the_users_alone(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running():
            mode = (it.state_dir / "socket").stat().st_mode
            assert stat.S_IMODE(mode) == 0o600
            assert stat.S_IMODE(it.state_dir.stat().st_mode) == 0o700
        assert not (it.state_dir / "socket").exists()

    run(tmp_path, test)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", b"not a gshare stream", id="HTTP"),
        pytest.param(b"\xc1", b"not a MessagePack stream", id="reserved byte"),
        pytest.param(b"\x81\xa4type\xdb\x7f\xff\xff\xff" + bytes(17 << 20), b"", id="a text without end"),
        pytest.param(hello(2), b"speaks protocol 1", id="another version"),
        pytest.param(encode(ListClusterJobs(id=1)), b"before the hello", id="no hello"),
        pytest.param(hello() + hello(), b"a second hello", id="two hellos"),
        pytest.param(hello() + b"\x81\xa4type\xa5bogus", b"unexpected message", id="unknown request"),
    ],
)
def test_what_is_not_the_protocol_is_refused_and_the_others_are_served(
    tmp_path: Path, data: bytes, told: bytes
) -> None:
    async def test(it: Straw) -> None:
        async with it.running():
            try:
                assert told in await raw(it, data)
            except ConnectionError:
                assert told == b""  # hung up with bytes unread
            await it.submit("job0")

    run(tmp_path, test)


def test_a_client_that_never_reads_holds_nobody_up_and_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "STALL_SECONDS", 0.3)

    async def test(it: Straw) -> None:
        async with it.running() as coordinator:
            server = coordinator._api
            _, writer = await asyncio.open_unix_connection(str(it.state_dir / "socket"))
            writer.write(hello())
            writer.write(encode(api_protocol.FollowCluster(id=1)))
            await it.until(lambda: any(client.following for client in server._clients))
            for _ in range(3000):
                coordinator.say("info", "x" * 1000)
            await it.submit("job0")  # answered meanwhile
            await it.until(lambda: not any(client.following for client in server._clients))
            writer.close()

    run(tmp_path, test)


def test_one_who_floods_and_reads_nothing_is_cut_off(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running() as coordinator:
            await it.submit(*(f"job{number}" for number in range(40)))
            _, writer = await asyncio.open_unix_connection(str(it.state_dir / "socket"))
            writer.write(hello())
            for number in range(1, 4000):
                writer.write(encode(ListClusterJobs(id=number)))
            await it.until(lambda: not coordinator._api._clients)
            writer.close()

    run(tmp_path, test)


def test_events_come_once_and_in_order_over_a_reconnection(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running() as coordinator:
            await it.until(lambda: coordinator.cluster.nodes["a"].state == "ready")

            def first() -> tuple[list[Any], str, int]:
                with CoordinatorClient(it.state_dir, "test") as client:
                    client.follow()
                    seen: list[Any] = []
                    while NodeChanged(node="a", state="ready", reason="") not in seen:
                        seen += client.poll(5.0)
                    return seen, client.journal_id, client.seq

            seen, journal_id, seq = await asyncio.to_thread(first)
            states = [event.state for event in seen if isinstance(event, NodeChanged)]
            assert len(states) == len(set(states))  # each told once
            coordinator.say("info", "while nobody listened")

            def second() -> list[Any]:
                with CoordinatorClient(it.state_dir, "test") as client:
                    client.journal_id, client.seq = journal_id, seq
                    assert not client.follow().gap
                    return client.poll(5.0)

            assert await asyncio.to_thread(second) == [
                ClusterMessage(level="info", text="while nobody listened")
            ]

    run(tmp_path, test)


def test_a_follower_of_one_job_hears_of_it_alone_with_samples_and_its_end(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running():

            def follow() -> list[Any]:
                seen: list[Any] = []
                with CoordinatorClient(it.state_dir, "test") as client:
                    client.follow(["job1"])
                    while not any(isinstance(event, JobEnded) for event in seen):
                        seen += client.poll(5.0)
                return seen

            following = asyncio.create_task(asyncio.to_thread(follow))
            await it.until(lambda: any(client.following for client in it.coordinator._api._clients))
            await it.submit("job0", "job1")
            seen = await following
        inner = [event.event for event in seen if isinstance(event, JobEvent)]
        assert {event.job for event in inner} == {"job1"}
        assert [event.step for event in inner if isinstance(event, Stepped)] == list(range(1, 7))
        assert seen[-1] == JobEnded(job="job1", state="completed")
        assert (tmp_path / "out" / "job1" / "adapter_model.safetensors").exists()  # before it is told

    run(tmp_path, test, auto=True)


def test_the_ring_keeps_the_newest() -> None:
    ring = EventRing("j", keep=3)
    assert (ring.first_seq, ring.after(0)) == (1, None)
    for number in range(5):
        assert ring.append(ClusterMessage(level="info", text=str(number))) == number + 1
    assert ring.first_seq == 3
    found = ring.after(0)
    assert found is not None
    assert (found[0], found[1].text) == (3, "2")  # type: ignore[union-attr]
    assert ring.after(5) is None


def test_without_a_coordinator_the_message_says_what_to_start(tmp_path: Path) -> None:
    with pytest.raises(NoCoordinator, match="gshare coordinator") as caught:
        CoordinatorClient(tmp_path, "test")
    assert caught.value.exit_code == 75


def test_two_coordinators_of_one_state_directory(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running():
            with pytest.raises(RetryLater, match="another coordinator runs"):
                Store.open(it.state_dir)
            await it.submit("job0")  # the first one is none the worse

    run(tmp_path, test)


def test_a_mistake_of_ours_in_a_request_is_told_and_the_coordinator_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(it: Straw) -> None:
        async with it.running() as coordinator:

            async def fail(request: Any) -> Any:
                raise ZeroDivisionError("ours")

            monkeypatch.setattr(coordinator._api, "_handle", fail)
            with pytest.raises(GshareError, match="ZeroDivisionError: ours"):
                await it.ask(api_protocol.JobRows, ListClusterJobs)
            monkeypatch.undo()
            await it.submit("job0")

    run(tmp_path, test)


@pytest.mark.parametrize("submits", [True, False])
def test_a_watcher_hears_nothing_of_an_earlier_job_of_the_name(tmp_path: Path, submits: bool) -> None:
    """After a submission by its position, on attaching by how the job stands; the old is kept."""

    async def test(it: Straw) -> None:
        async with it.running() as coordinator:
            old = JobEnded(job="job0", state="failed", reason="the old one")
            coordinator._api.publish(old)
            reply = await it.ask(Submitted, SubmitToCluster, **submission(tmp_path, ["job0"]))
            await it.until(lambda: it.job("job0").total_steps > 0)  # its node has it
            since = (reply.journal_id, reply.after_seq) if submits else ("", 0)
            outputs = [("job0", str(tmp_path / "out"))]
            watching = asyncio.create_task(
                asyncio.to_thread(watch_jobs, it.state_dir, outputs, json_lines=True, since=since)
            )
            clients = coordinator._api._clients
            await it.until(lambda: any(client.following for client in clients) or watching.done())
            await it.until(
                lambda: watching.done() or all(c.seq == coordinator.ring.last_seq for c in clients)
            )
            await it.ask(JobsDone, StopClusterJobs, jobs=["job0"])
            assert await watching == 130  # by the new job's end, not by the old one's

            def all_kept() -> list[Any]:
                seen: list[Any] = []
                with CoordinatorClient(it.state_dir, "test") as client:
                    last = client.follow().last_seq
                    while True:  # events may have come with the reply already
                        seen += client.poll(0.5)
                        if client.seq >= last:
                            return seen

            assert old in await asyncio.to_thread(all_kept)

    run(tmp_path, test)
