"""`gshare agent connect`: stdin and stdout are the agent's socket. What SSH runs on the node.

Two copying threads, each with one buffer: a side that does not read holds up the other, and nothing grows.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

from gshare.agent.errors import EXIT_OK, GshareError, RetryLater
from gshare.agent.service.peer import stranger_fault
from gshare.agent.service.server import socket_address

_BUFFER = 1 << 16


def connect_bridge(path: Path, *, stdin: int = 0, stdout: int = 1) -> int:
    """Copies until one side ends. RetryLater: no agent listens at `path`."""
    sock = connect_agent(path)
    threading.Thread(target=_to_socket, args=(stdin, sock), daemon=True).start()
    with contextlib.suppress(OSError):  # either side went away: that is how this ends
        while data := sock.recv(_BUFFER):
            view = memoryview(data)
            while view:
                view = view[os.write(stdout, view) :]
    sock.close()
    return EXIT_OK


def connect_agent(path: Path) -> socket.socket:
    """A connection to the agent whose socket is `path`. RetryLater: none listens there, GshareError: another
    user's process does."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket_address(path) as address:
            sock.connect(address)
    except OSError as error:
        sock.close()
        raise RetryLater(
            f"{path}: no agent answers there ({error.strerror}); start one with `gshare agent`"
        ) from None
    if fault := stranger_fault(sock):
        sock.close()
        raise GshareError(f"{path}: {fault}")
    return sock


def _to_socket(stdin: int, sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(stdin, _BUFFER):
            sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
