"""Many connections to one agent: who says nothing, or only looks, shuts nobody out who comes to steer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from gshare.agent.node import server as server_module
from gshare.agent.node.connection import GAVE_WAY, MAX_STRANGERS
from gshare.agent.node.protocol import (
    NODE_PROTOCOL_VERSION,
    FromNode,
    NodeClientHello,
    NodeHello,
    NodeRefused,
)
from gshare.agent.node.state_dir import open_state_dir
from gshare.agent.service.server import socket_address
from gshare.agent.service.wire import FrameReader, convert, encode

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def hello(role: str = "coordinator", owner: str = "owner-one") -> bytes:
    return encode(
        NodeClientHello(
            protocol=NODE_PROTOCOL_VERSION,
            gshare=version("gshare"),
            client="test",
            role=role,  # type: ignore[arg-type]
            owner=owner if role == "coordinator" else "",
            session="s1",
        )
    )


def run(tmp_path: Path, test: Callable[[Callable[[], Awaitable[Stream]]], Awaitable[None]]) -> None:
    """`test(connect)` beside a server in this process."""

    async def main() -> None:
        server = server_module.NodeServer(open_state_dir(tmp_path / "node"), drain=lambda: None)
        streams: list[Stream] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.serve(reader, writer, "here")

        async def connect() -> Stream:
            with socket_address(tmp_path / "socket") as address:
                streams.append(await asyncio.open_unix_connection(address))
            return streams[-1]

        with socket_address(tmp_path / "socket") as address:
            listening = await asyncio.start_unix_server(serve, path=address)
        try:
            await asyncio.wait_for(test(connect), 60)
        finally:
            for _, writer in streams:
                writer.close()
            listening.close()
            await server.close()

    asyncio.run(main())


async def first(stream: Stream) -> Any:
    """What the agent says first."""
    frames = FrameReader()
    while not (messages := frames.feed(await asyncio.wait_for(stream[0].read(65536), 5))):
        assert not stream[0].at_eof(), "hung up without a word"
    return convert(messages[0], FromNode)


async def is_open(stream: Stream) -> bool:
    with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
        await asyncio.wait_for(stream[0].read(1), 0.05)
        return False
    return True


def test_connections_that_never_say_hello_give_way_to_newer_ones(tmp_path: Path) -> None:
    """However many, and renewed as soon as one is cut off: who says hello is let in at once."""

    async def test(connect: Callable[[], Awaitable[Stream]]) -> None:
        early = await connect()
        early[1].write(hello())
        assert isinstance(await first(early), NodeHello)
        idle = [await connect() for _ in range(MAX_STRANGERS)]
        assert await is_open(idle[0])  # the control: so many may wait for their hello
        for _ in range(20):
            idle.append(await connect())
            client = await connect()
            client[1].write(hello())
            assert isinstance(await first(client), NodeHello)
            client[1].close()
        told = await first(idle[0])
        assert isinstance(told, NodeRefused)
        assert (told.reason, told.retry) == (GAVE_WAY, True)
        assert await is_open(idle[-1])
        assert await is_open(early)  # who has said hello stays

    run(tmp_path, test)


def test_who_only_looks_leaves_room_for_coordinators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CLIENTS", 6)
    monkeypatch.setattr(server_module, "FOR_COORDINATORS", 2)

    async def test(connect: Callable[[], Awaitable[Stream]]) -> None:
        async def comes(role: str, owner: str = "") -> Any:
            stream = await connect()
            stream[1].write(hello(role, owner))
            return await first(stream)

        said = [await comes("observer") for _ in range(5)]
        assert [type(one) for one in said] == [NodeHello] * 4 + [NodeRefused]
        assert (said[-1].reason, said[-1].retry) == ("this agent has 4 clients already", True)
        steering = [await comes("coordinator", f"owner-{number}") for number in range(3)]
        assert [type(one) for one in steering] == [NodeHello] * 2 + [NodeRefused]

    run(tmp_path, test)
