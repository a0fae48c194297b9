"""A state directory in which another user was first: nothing in it is read, run or written by an errand, and
nobody talks to who listens there. As root the other user is a real one, else this process says it is another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.node.bridge import connect_agent
from gshare.agent.node.state_dir import open_state_dir
from gshare.coordinator import deploy, on_node, on_node_state
from gshare.coordinator.api_client import connect_coordinator
from gshare.coordinator.channel import open_socket
from gshare.coordinator.node_fault import NodeFault

ROOT = os.getuid() == 0
STRANGER = 65534 if ROOT else os.getuid()
STAMP = "1.0-abc"


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    def give(path: Path) -> None:
        if ROOT:
            os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
        else:
            monkeypatch.setattr(os, "getuid", lambda: 12345)

    return give


def answer(op: str, state: Path, **arguments: Any) -> dict[str, Any]:
    """One errand by the program as it travels, in an interpreter of its own."""
    request = json.dumps({"op": op, "state_dir": str(state), **arguments})
    other = f"import os\nos.getuid = lambda: {os.getuid()}\n"  # what the fixture changed here
    program = f"{deploy._program()}\n{other}\nerrand({request!r})\n"
    done = subprocess.run(
        [sys.executable, "-"], input=program, capture_output=True, text=True, timeout=60, check=False
    )
    assert on_node.MARK in done.stdout, done.stderr
    return json.loads(done.stdout.partition(on_node.MARK)[2])


ERRANDS: dict[str, dict[str, Any]] = {
    "look": {"stamp": STAMP, "want_torch": False},
    "put": {"stamp": STAMP, "name": "w.whl", "sha256": "", "data": ""},
    "install": {
        "stamp": STAMP,
        "wheel": "w.whl",
        "extra": "",
        "inherit": False,
        "torch": "",
        "environment": {},
        "timeout": 5.0,
    },
    "start": {"stamp": STAMP, "command": ["false"], "environment": {}, "systemd": False},
    "stop": {"pid": 1, "systemd": False},
    "clear": {"keep": []},
}


def made(tmp_path: Path) -> Path:
    """A state directory with an installation that names this interpreter."""
    state = tmp_path / "state"
    home = state / "install" / STAMP
    home.mkdir(parents=True, mode=0o700)
    (home / "complete.json").write_text(json.dumps({"python": sys.executable, "torch": "2"}))
    (state / "agent.log").write_text("")
    return state


def listing(state: Path) -> dict[str, tuple[int, int]]:
    """What is there, with mode and time of change."""
    found = [state, *state.rglob("*")]
    return {str(path): (path.lstat().st_mode, path.lstat().st_ctime_ns) for path in found}


def test_every_errand_is_known_here() -> None:
    assert ERRANDS.keys() == on_node.ERRANDS.keys()


@pytest.mark.parametrize("op", ERRANDS)
def test_no_errand_touches_a_directory_that_another_user_made(
    tmp_path: Path, give_away: Callable[[Path], None], op: str
) -> None:
    state = made(tmp_path)
    if op == "look":  # the control: while it is ours, what is in it counts
        assert answer(op, state, **ERRANDS[op])["complete"]["python"] == sys.executable
    for path in (state, *state.rglob("*")):
        give_away(path)
    before = listing(state)
    kind, text = answer(op, state, **ERRANDS[op])["failed"]
    assert kind == "config"
    assert all(word in text for word in (str(state), "user id", "state_dir")), text
    assert listing(state) == before


@pytest.mark.skipif(not ROOT, reason="only root can give a part of it away")
@pytest.mark.parametrize(
    "part", ["install", f"install/{STAMP}", f"install/{STAMP}/complete.json", "agent.log"]
)
def test_a_part_that_another_user_put_into_ours_is_named_and_not_read(tmp_path: Path, part: str) -> None:
    state = made(tmp_path)
    os.chown(state / part, STRANGER, STRANGER)
    kind, text = answer("look", state, **ERRANDS["look"])["failed"]
    assert (kind, str(state / part) in text) == ("config", True)


def test_one_that_was_open_to_others_is_closed_before_it_is_used(tmp_path: Path) -> None:
    state = made(tmp_path)
    for folder in (state, state / "install", state / "install" / STAMP):
        folder.chmod(0o777)
    assert answer("look", state, **ERRANDS["look"])["complete"]
    for folder in (state, state / "install", state / "install" / STAMP):
        assert not stat.S_IMODE(folder.stat().st_mode) & 0o022, folder


def test_a_directory_for_everybody_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    state = tmp_path / "public"
    state.mkdir()
    state.chmod(0o1777)
    kind, text = answer("look", state, **ERRANDS["look"])["failed"]
    assert (kind, "everybody" in text) == ("config", True)
    assert stat.S_IMODE(state.stat().st_mode) == 0o1777


def test_a_link_in_the_place_of_the_lock_empties_nothing(tmp_path: Path) -> None:
    state = made(tmp_path)
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (state / "install" / "lock").symlink_to(precious)
    assert str(state / "install" / "lock") in answer("clear", state, keep=[])["failed"][1]
    assert precious.read_text() == "kept"
    (state / "install" / "lock").unlink()
    assert answer("clear", state, keep=[STAMP]) == {"gone": []}  # the control


def test_a_link_in_the_place_of_a_temporary_file_is_not_written_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / f".tries.json.{os.getpid()}").symlink_to(precious)
    on_node_state.write_whole(tmp_path / "tries.json", b"{}")
    assert (precious.read_text(), (tmp_path / "tries.json").read_text()) == ("kept", "{}")


# --- who listens


@pytest.fixture
def stranger(tmp_path: Path, give_away: Callable[[Path], None]) -> Iterator[Path]:
    """A directory of ours whose socket another user's process holds."""
    state = tmp_path / "listening"
    state.mkdir(mode=0o700)
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(state / "socket"))
    change = "import os, socket, sys\nif os.getuid() == 0: os.setuid(int(sys.argv[2]))\n"
    listen = "s = socket.socket(fileno=int(sys.argv[1]))\ns.listen(9)\nprint(flush=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{change}{listen}sys.stdin.read()", str(sock.fileno()), str(STRANGER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[sock.fileno()],
    )
    assert process.stdout is not None
    process.stdout.readline()
    sock.close()
    if not ROOT:
        give_away(state)
    yield state
    process.communicate()


def test_nobody_talks_to_another_users_process_at_the_socket(stranger: Path) -> None:
    with pytest.raises(on_node_state.Failed, match="user id"):
        on_node.running(stranger)
    with pytest.raises(GshareError, match="user id"):
        connect_agent(stranger / "socket")
    with pytest.raises(GshareError, match="user id"):
        connect_coordinator(stranger)
    with pytest.raises(NodeFault, match="user id") as caught:
        asyncio.run(open_socket("n", stranger / "socket"))
    assert caught.value.kind == "config"


def test_who_listens_himself_is_talked_to(tmp_path: Path) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.bind(str(tmp_path / "socket"))
        sock.listen(9)
        found = on_node.running(tmp_path)
        assert found is not None
        assert (found["pid"], found["stamp"]) == (os.getpid(), "")
        connect_agent(tmp_path / "socket").close()
        connect_coordinator(tmp_path).close()

        async def main() -> None:
            await (await open_socket("n", tmp_path / "socket")).close()

        asyncio.run(main())


# --- the agent itself


@pytest.mark.skipif(not ROOT, reason="only root can give a part of it away")
def test_an_agent_does_not_start_on_what_others_put_there(tmp_path: Path) -> None:
    state = tmp_path / "state"
    open_state_dir(state)
    os.chown(state / "blobs", STRANGER, STRANGER)
    with pytest.raises(UsageError, match="blobs in it belongs to user id"):
        open_state_dir(state)
