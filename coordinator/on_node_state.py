"""The half of the program on a node (`on_node.py`) that touches the state directory: whose it is, its socket,
its lock, its files. It travels before the other half; nothing but Python's standard library.

Trust boundary, as in `agent/node/state_dir.py`: what lies in the directory is run as the login's user, so it
has to be that user's (or root's), and closed to others, before anything below it is read. Who may rename the
directories above it can exchange it, as with a home.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Written to by others: what is below could be theirs.
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Failed(Exception):
    """An errand that cannot be done: a NodeFault's kind and text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


# --- whose it is


def check_ours(state: Path) -> None:
    """Failed "config" when another user could have put there what an errand reads, runs or writes.

    Looked at: the directory, its entries, those of install/ and of each installation. One that others may
    write to is closed to them, and looked at again, so that nothing comes in after the look.
    """
    installs = state / "install"
    folders = [state, installs]
    for folder in folders:
        entries = check_entries(folder)
        if close_to_others(folder):
            entries = check_entries(folder)
        if folder == installs:
            folders += [entry for entry in entries if entry.is_dir()]


def check_entries(folder: Path) -> list[Path]:
    """What is in it, all of it ours; [] when it is no directory, which whoever needs one says."""
    check_owner(folder)
    try:
        entries = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    for entry in entries:
        check_owner(entry)
    return entries


def close_to_others(folder: Path) -> bool:
    """Whether others could write to it. Failed "config": it is meant for everybody, such as /tmp."""
    try:
        mode = folder.stat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode) or not mode & OTHERS_WRITE:
        return False
    if mode & stat.S_ISVTX:
        raise Failed("config", f"{folder} is a directory for everybody: name one of its own as state_dir")
    folder.chmod(stat.S_IMODE(mode) & ~OTHERS_WRITE)
    return True


def check_owner(path: Path) -> None:
    """The link, if it is one, and what it leads to."""
    for look in (path.lstat, path.stat):
        try:
            owner = look().st_uid
        except FileNotFoundError:
            return
        if owner not in (os.getuid(), 0):
            raise Failed(
                "config",
                f"{path} belongs to user id {owner}, not to the login's ({os.getuid()}): nothing in it is "
                "used; name another state_dir in cluster.toml, or remove it there",
            )


def make_private(state: Path) -> None:
    state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o700)


# --- its socket


def listener(state: Path) -> int | None:
    """The pid of the agent that listens at the socket. Failed "config": it is another user's."""
    with connected(state) as sock:
        if sock is None:
            return None
        # Who called listen(): SO_PEERCRED is pid, uid, gid (unix(7)).
        pid, owner, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if owner not in (os.getuid(), 0):
        raise Failed(
            "config",
            f"a process of user id {owner} listens at {state}/socket, not one of the login's "
            f"({os.getuid()}): name another state_dir in cluster.toml",
        )
    return pid


@contextlib.contextmanager
def connected(state: Path) -> Iterator[socket.socket | None]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        try:
            directory = os.open(state, os.O_PATH | os.O_DIRECTORY)
        except OSError:
            yield None
            return
        try:
            # Through the descriptor: a socket's path may have 107 bytes only.
            sock.connect(f"/proc/self/fd/{directory}/socket")
        except OSError:
            yield None
            return
        finally:
            os.close(directory)
        yield sock


# --- its lock and files


@contextlib.contextmanager
def locked(state: Path) -> Iterator[None]:
    """One errand that changes something at a time, of however many coordinators."""
    make_private(state)
    folder = state / "install"
    folder.mkdir(exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def note_try(state: Path, stamp: str, fault: str, *, begun: bool = False) -> None:
    """When `stamp` was tried and what came of it; `begun`: one that nobody ends was cut off, and counted."""
    path = state / "install" / "tries.json"
    tries = read_json(path)
    cut = tries.get(stamp, {}).get("interrupted", 0) + 1 if begun else 0
    tries[stamp] = {"time": time.time(), "fault": fault, "interrupted": cut}
    newest = sorted(tries, key=lambda name: tries[name].get("time", 0), reverse=True)[:16]
    write_whole(path, json.dumps({name: tries[name] for name in newest}).encode())


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; {} when there is none that can be read (it is then made again)."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_whole(path: Path, content: bytes) -> None:
    """All or nothing: a temporary name, fsync, rename. A link that stands under that name is not followed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
