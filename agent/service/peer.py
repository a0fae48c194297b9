"""Who listens at a Unix socket, by the kernel's word: whoever made the directory may have put it there."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

_UCRED = struct.Struct("3i")  # pid, uid, gid: unix(7), SO_PEERCRED


class Peer(NamedTuple):
    """The process that called listen(). `pid` 0: it is in another container."""

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """Of a connected Unix socket."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid, uid)


def stranger_fault(sock: socket.socket) -> str | None:
    """Why the one who listens is not to be talked to: neither this user nor root. None: he is."""
    owner = peer_of(sock).uid
    if owner in (os.getuid(), 0):
        return None
    return f"a process of user id {owner} listens there, not one of yours; choose another state directory"
