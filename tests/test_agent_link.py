"""One connection to an agent: replies find their requests, events come once, and nothing odd is believed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_agent import FakeAgent, run_with_agent, start_fields
from gshare.agent.node import protocol as p
from gshare.agent.service.server import socket_address
from gshare.agent.service.wire import encode
from gshare.coordinator.link import AgentLink, LinkGone, LinkLate, LinkRefused, StreamPair


async def open_raw(tmp_path: Path, answer: bytes, **options: Any) -> AgentLink:
    """A link to a server that answers the hello with `answer` and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(answer)
        await asyncio.sleep(options.get("hello_seconds", 0.5) * 2)
        writer.close()

    with socket_address(tmp_path / "raw") as address:
        server = await asyncio.start_unix_server(serve, path=address)
        stream = StreamPair(*await asyncio.open_unix_connection(address))
    try:
        return await AgentLink.open(stream, client="test", **options)
    finally:
        server.close()


def hello(**fields: Any) -> bytes:
    values = {"protocol": 1, "gshare": "0", "agent_id": "a", "journal_id": "j", "pid": 1, "hostname": "h"}
    return encode(p.NodeHello(**{**values, **fields}))


def test_replies_reach_the_request_they_are_for_in_any_order(tmp_path: Path) -> None:
    async def test(agent: FakeAgent) -> None:
        link = await agent.connect()
        futures = [link.send(p.ReadLog, job=f"j{number}") for number in range(50)]
        texts = [link.checked(await future, p.LogText).text for future in reversed(futures)]
        assert texts == [f"log of j{number}\n" for number in reversed(range(50))]
        await link.close()

    run_with_agent(tmp_path, test)


def test_events_come_once_and_go_on_where_they_stopped(tmp_path: Path) -> None:
    async def test(agent: FakeAgent) -> None:
        seen: list[p.NodeEventFrame] = []
        link = await agent.connect(on_event=seen.append)
        await link.ask(p.AttemptAccepted, p.StartAttempt, **start_fields("a"))
        await link.follow("", 0)
        attempt = agent.running("a")
        agent.advance(attempt)
        agent.advance(attempt)
        await link.ask(p.NodeInfo, p.DescribeNode)
        first = [frame.seq for frame in seen if frame.seq]
        assert first == [1, 2, 3]
        assert len(seen) == 5  # two steps are samples
        agent.hang_up()
        assert "hung up" in await link.wait_gone() or "broke" in await link.wait_gone()
        agent.advance(attempt)
        agent.advance(attempt)
        again = await agent.connect(on_event=seen.append)
        await again.follow("journal-1", first[-1])
        await again.ask(p.NodeInfo, p.DescribeNode)
        assert [frame.seq for frame in seen if frame.seq] == [1, 2, 3, 4, 5]
        await again.close()

    run_with_agent(tmp_path, test)


def test_a_refusal_is_told_with_whether_it_may_be_asked_again(tmp_path: Path) -> None:
    async def test(agent: FakeAgent) -> None:
        link = await agent.connect()
        agent.disk_full = True
        with pytest.raises(LinkRefused, match="disk is full") as caught:
            await link.ask(p.Received, p.PutChunk, sha256="0" * 64, offset=0, total=1, data=b"x")
        assert caught.value.retry
        with pytest.raises(LinkRefused) as caught:
            await link.ask(p.BundleFiles, p.PinBundle, job="none", attempt=1, kind="best")
        assert not caught.value.retry
        assert not link.is_gone
        await link.close()

    run_with_agent(tmp_path, test)


def test_an_agent_that_answers_nothing_is_late_and_the_next_answer_is_not_mistaken(tmp_path: Path) -> None:
    async def test(agent: FakeAgent) -> None:
        link = await agent.connect()
        agent.mute = True
        with pytest.raises(LinkLate, match="did not answer ReadLog"):
            await link.ask(p.LogText, p.ReadLog, job="a", timeout=0.1)
        agent.mute = False
        assert (await link.ask(p.LogText, p.ReadLog, job="b")).text == "log of b\n"
        await link.close()

    run_with_agent(tmp_path, test)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"\xc1garbage", "not the protocol"),
        (b"SSH-2.0-OpenSSH\r\n", "not the protocol"),
        (b"\xdf\xff\xff\xff\xff", "not the protocol"),
        (encode(p.NodeDone(reply_to=99)), "which nobody made"),
        (encode(p.NodeInfo(**FakeAgent(Path("x"))._info(0))), "which nobody made"),
        (hello(), "hello twice"),
        (b"\x81\xa4type\xa5bogus", "not the protocol"),
        (encode(p.NodeRefused(reply_to=0, reason="two\ncoordinators\x1b[2J")), "two coordinators?[2J"),
    ],
)
def test_what_is_not_the_protocol_ends_the_connection_with_a_reason(
    tmp_path: Path, answer: bytes, told: str
) -> None:
    async def test(agent: FakeAgent) -> None:
        link = await agent.connect()
        agent.raw_answer = answer
        with pytest.raises(LinkGone) as caught:
            await link.ask(p.LogText, p.ReadLog, job="a")
        assert told in str(caught.value)
        assert link.is_gone
        with pytest.raises(LinkGone):
            link.send(p.DescribeNode)

    run_with_agent(tmp_path, test)


def test_an_endless_frame_is_cut_off(tmp_path: Path) -> None:
    """A map whose one string never ends: 16 MiB are read of it, no more."""

    async def test(agent: FakeAgent) -> None:
        link = await agent.connect()
        agent.raw_answer = b"\x81\xa4type\xdb\x7f\xff\xff\xff" + bytes(17 << 20)
        with pytest.raises(LinkGone, match="not the protocol"):
            await link.ask(p.LogText, p.ReadLog, job="a")

    run_with_agent(tmp_path, test)


@pytest.mark.parametrize(
    ("answer", "kind", "told"),
    [
        (b"Welcome to Ubuntu\n", LinkGone, "no gshare agent"),
        (b"", LinkLate, "no hello"),
        (encode(p.NodeDone(reply_to=1)), LinkGone, "NodeDone instead of a hello"),
        (hello() + hello(), LinkGone, "no gshare agent"),
        (hello(protocol=2, gshare="9.9"), LinkRefused, "speaks protocol 2"),
        (encode(p.NodeRefused(reply_to=0, reason="another session")), LinkRefused, "another session"),
    ],
)
def test_a_wrong_hello_is_refused(tmp_path: Path, answer: bytes, kind: type[Exception], told: str) -> None:
    async def main() -> None:
        with pytest.raises(kind, match=told):
            await open_raw(tmp_path, answer, hello_seconds=0.3)

    asyncio.run(main())


def test_the_right_hello_is_taken(tmp_path: Path) -> None:
    """Negative control of the test above: the same server with a hello as it should be."""

    async def main() -> None:
        link = await open_raw(tmp_path, hello(), hello_seconds=0.3)
        assert link.hello.agent_id == "a"
        await link.close()

    asyncio.run(main())


def test_a_handler_that_fails_ends_the_connection_so_that_nothing_is_skipped(tmp_path: Path) -> None:
    async def test(agent: FakeAgent) -> None:
        def fail(frame: p.NodeEventFrame) -> None:
            raise OSError("disk full")

        link = await agent.connect(on_event=fail)
        await link.ask(p.AttemptAccepted, p.StartAttempt, **start_fields("a"))
        await link.follow("", 0)
        agent.advance(agent.running("a"))
        assert "disk full" in await link.wait_gone()

    run_with_agent(tmp_path, test)
