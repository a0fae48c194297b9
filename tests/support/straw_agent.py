"""An agent of another version: answers hello and DescribeNode at the socket, and nothing else.

python straw_agent.py STATE_DIR VERSION PROTOCOL ATTEMPTS
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from gshare.agent.node.protocol import DescribeNode, FromNodeClient, NodeClientHello, NodeHello, NodeInfo
from gshare.agent.service.server import socket_address
from gshare.agent.service.wire import FrameReader, convert, encode


async def main(state: Path, version: str, protocol: int, attempts: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader()
        while data := await reader.read(65536):
            for frame in frames.feed(data):
                message = convert(frame, FromNodeClient)
                if isinstance(message, NodeClientHello):
                    hello = NodeHello(
                        protocol=protocol,
                        gshare=version,
                        agent_id="a",
                        journal_id="j",
                        pid=1,
                        hostname="straw",
                    )
                    writer.write(encode(hello))
                elif isinstance(message, DescribeNode):
                    info = NodeInfo(
                        reply_to=message.id,
                        hostname="straw",
                        time=0.0,
                        uptime_s=0.0,
                        machine="x86_64",
                        python="3.11",
                        attempts_running=attempts,
                    )
                    writer.write(encode(info))
        writer.close()

    state.mkdir(parents=True, exist_ok=True)
    (state / "socket").unlink(missing_ok=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with socket_address(state / "socket") as address:
        server = await asyncio.start_unix_server(serve, address)
    print("listening", flush=True)
    await stop.wait()
    (state / "socket").unlink()  # before nobody listens: the next agent's socket may be there at once
    server.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
