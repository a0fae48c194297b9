"""The agent's state directory: what lies where, one agent at a time, its identity.

    <state>/  (0700)
      agent.json         {"agent_id": …}, drawn once
      lock               flock of the running agent
      socket             0600
      journal.jsonl      events, numbered
      fences.json        the highest attempt number seen of every (owner, job)
      blobs/<sha256>     files by content; <sha256>.part while they arrive
      models/<hash>/     bases that were pushed: hard links to blobs
      attempts/<owner8>-<job>-<attempt>/    attempt.json  data/  val/  out/  trainer.log
      bundles/<id>/      files kept as they are while somebody reads them
      ssh_host_key       of `--bind`
      agent.log          of a detached agent

Trust boundary: the directory is 0700 and ours; whoever is this user (or root) may do anything here.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from pathlib import Path

import msgspec
from gshare.agent.errors import GshareError, RetryLater, UsageError
from gshare.agent.node.durable import read_struct, write_struct
from gshare.agent.service.registry import take_lock
from gshare.agent.xdg import xdg_dir

_FOLDERS = ("blobs", "models", "attempts", "bundles")
#: What is being made; whoever died over it left it.
NEW = ".new-"


class AgentIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """`agent.json`."""

    agent_id: str


def default_state_dir() -> Path:
    """`$XDG_STATE_HOME/gshare/agent`, by default in `~/.local/state`."""
    return xdg_dir("XDG_STATE_HOME", ".local/state") / "agent"


class StateDir:
    """Paths of one agent. `open_state_dir` makes it, `lock` claims it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = path / "socket"
        self.journal = path / "journal.jsonl"
        self.fences = path / "fences.json"
        self.blobs = path / "blobs"
        self.models = path / "models"
        self.attempts = path / "attempts"
        self.bundles = path / "bundles"
        self.host_key = path / "ssh_host_key"
        self.log = path / "agent.log"

    def lock(self) -> int:
        """Holds the directory for this process: a descriptor. RetryLater: another agent has it."""
        fd = take_lock(self.path / "lock")
        if fd is None:
            raise RetryLater(
                f"{self.path}: an agent runs there already; talk to that one with `gshare agent connect`, "
                "or give this one another --state-dir"
            )
        return fd

    def identity(self) -> AgentIdentity:
        """Who this agent is, drawn at the first start."""
        path = self.path / "agent.json"
        found = read_struct(path, AgentIdentity)
        if found is None:
            found = AgentIdentity(agent_id=secrets.token_hex(16))
            write_struct(path, found)
        return found

    def clear_leftovers(self) -> None:
        """Removes what a killed agent was making, and the bundles that nobody can ask for any more."""
        for folder in (self.models, self.attempts):
            for entry in folder.glob(f"{NEW}*"):
                shutil.rmtree(entry, ignore_errors=True)
        for entry in self.bundles.iterdir():
            shutil.rmtree(entry, ignore_errors=True)


def open_state_dir(path: Path | None) -> StateDir:
    """The directory, made with its folders. UsageError when it cannot be ours alone."""
    path = default_state_dir() if path is None else path.expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = path.resolve()
        status = path.lstat()
        if status.st_uid != os.getuid():
            raise UsageError(
                f"--state-dir {path}: belongs to user id {status.st_uid}, not to you; choose another"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            path.chmod(0o700)
        for entry in path.iterdir():  # what was put there while it was open to others
            owner = entry.lstat().st_uid
            if owner not in (os.getuid(), 0):
                raise UsageError(
                    f"--state-dir {path}: {entry.name} in it belongs to user id {owner}, not to you; remove "
                    "it, or choose another directory"
                )
        for name in _FOLDERS:
            (path / name).mkdir(exist_ok=True, mode=0o700)
    except FileExistsError:
        raise UsageError(f"--state-dir {path}: is a file; name a directory") from None
    except OSError as error:
        raise GshareError(
            f"--state-dir {path}: {error.strerror}; make room, or choose another directory"
        ) from None
    return StateDir(path)
