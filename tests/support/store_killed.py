"""A coordinator that is killed with SIGKILL at every boundary of its store's transactions, one by one.

    python tests/support/store_killed.py DIR [--step N] [--no-outbox]

Each world begins with an empty directory. Its first coordinator is killed at boundary k (before BEGIN, before
COMMIT, after COMMIT; also those of the schema); its second runs to the end. Nodes and home are files, so they
survive: attempts by node, and for each job the attempts that were put into its output directory. k goes from
1 (in steps of N) until a coordinator ends before its k-th boundary. Prints one JSON object.

A coordinator is a fork, so that a kill costs milliseconds, not the start of an interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.jobs.events import ENDED
from gshare.agent.node.protocol import AttemptStatus
from gshare.coordinator.actions import CheckBest, ClusterAction, Ended, Forget, Place, Publish, Say, Start
from gshare.coordinator.cluster import Cluster
from gshare.coordinator.events import (
    AttemptChanged,
    BroughtHome,
    CheckpointPulled,
    ClusterEvent,
    NodeAdded,
    NodeUp,
    Published,
    Started,
    Submit,
)
from gshare.coordinator.facts import ENDED_STATES, CheckpointRef
from gshare.coordinator.store import Cursor, Pending, Store

sys.path.insert(0, str(Path(__file__).parent))
from cluster_model import facts, gpu_node, node_info

JOBS = ("j1", "j2")
NODES = ("a", "b")
CONFIGS = [gpu_node(name) for name in NODES]


class Fuse:
    """Kills this process at boundary number `at`; 0: never."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def boundary(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def statement(self, sql: str) -> None:
        if sql.startswith(("BEGIN", "COMMIT")):
            self.boundary()


class Unsynced(sqlite3.Connection):
    """What a killed process has written is there, synced or not; a hundred kills shall take seconds."""

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        return super().execute(sql.replace("synchronous = FULL", "synchronous = OFF"), parameters)


class OutboxInMemory:
    """Negative control: a store whose actions are not on the disk."""

    def __init__(self, store: Store) -> None:
        self.store, self.rows, self.count = store, [], 0

    def commit(self, *, actions: Iterable[ClusterAction], done: Iterable[int] = (), **rest: Any) -> None:
        self.store.commit(**rest)
        gone = set(done)
        self.rows = [row for row in self.rows if row.id not in gone]
        for action in actions:
            if not isinstance(action, (Say, Ended, CheckBest)):
                self.count += 1
                self.rows.append(Pending(self.count, action))

    def pending(self) -> list[Pending]:
        return list(self.rows)


class Coordinator:
    """What the service does, one thing after another."""

    def __init__(self, world: Path, fuse: Fuse, *, outbox: bool) -> None:
        self.world, self.fuse = world, fuse
        self.store = Store.open(world / "state")
        self.box: Store | OutboxInMemory = self.store if outbox else OutboxInMemory(self.store)
        self.cluster = Cluster(self.store.jobs())

    def tell(self, event: ClusterEvent, done: int | None = None, cursor: Cursor | None = None) -> None:
        actions = self.cluster.handle(event)
        ids = [] if done is None else [done]
        self.box.commit(jobs=self.cluster.take_changed(), actions=actions, done=ids, cursor=cursor)
        self.fuse.boundary()

    def run(self) -> None:
        for config in CONFIGS:
            self.tell(NodeAdded(config=config))
        self.tell(Started(now=0.0, wall=0.0))
        for name in NODES:
            info = node_info(name, gpus=(f"GPU-{name}-0",))
            self.tell(NodeUp(node=name, info=info, attempts=tuple(self.attempts(name))))
        for job in JOBS:
            self.tell(Submit(facts=facts(job)))
        while not all(job.state in ENDED_STATES for job in self.cluster.jobs.values()):
            pending = self.box.pending()
            for row in pending:
                self.carry_out(row)
            moved = [self.go_on(name, status) for name in NODES for status in self.attempts(name)]
            if not pending and not any(moved):
                break  # nobody has anything to do, and not all have ended: lost

    # --- the world: files

    def path(self, node: str, job: str, attempt: int) -> Path:
        return self.world / node / f"{job}-{attempt}"

    def attempts(self, node: str) -> list[AttemptStatus]:
        files = sorted((self.world / node).glob("*-*"))
        return [msgspec.json.decode(file.read_bytes(), type=AttemptStatus) for file in files]

    def save(self, node: str, status: AttemptStatus) -> None:
        self.path(node, status.job, status.attempt).write_bytes(msgspec.json.encode(status))

    def go_on(self, node: str, status: AttemptStatus) -> bool:
        """A step of an attempt, its event numbered as in the node's journal."""
        if status.state in ENDED:
            return False
        step = status.step + 1
        state = "completed" if step == 3 else "running"
        status = msgspec.structs.replace(status, step=step, state=state, checkpoint_step=step)
        self.save(node, status)
        seq = self.store.cursor(node).seq + 1
        self.tell(AttemptChanged(node=node, status=status), cursor=Cursor(node, "journal", seq))
        return True

    def carry_out(self, row: Pending) -> None:
        action = row.action
        if not self.cluster.still_wanted(action):
            self.box.commit(actions=(), done=[row.id])
        elif isinstance(action, Place):
            home = self.world / "home" / action.job
            home.mkdir(parents=True, exist_ok=True)
            (home / str(action.attempt)).touch()
            self.tell(Published(job=action.job, attempt=action.attempt), done=row.id)
        elif isinstance(action, Publish):
            self.tell(BroughtHome(job=action.job, attempt=action.attempt, val_loss=1.0), done=row.id)
        elif isinstance(action, (Start, Forget)):
            path = self.path(action.node, action.job, action.attempt)
            if isinstance(action, Forget):
                path.unlink(missing_ok=True)
            elif not path.exists():
                status = AttemptStatus(
                    owner="me", job=action.job, attempt=action.attempt, state="queued", gpu=action.gpu
                )
                self.save(action.node, status)
            self.box.commit(actions=(), done=[row.id])
        else:
            assert not isinstance(action, (Say, Ended, CheckBest)), action
            checkpoint = CheckpointRef(attempt=action.attempt, step=1)
            self.tell(CheckpointPulled(job=action.job, checkpoint=checkpoint), done=row.id)


def life(world: Path, kill_at: int, *, outbox: bool) -> bool:
    """One coordinator in a process of its own; whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            fuse = Fuse(kill_at)
            connect = sqlite3.connect

            def watched(*args: Any, **options: Any) -> sqlite3.Connection:
                connection = connect(*args, factory=Unsynced, **options)
                connection.set_trace_callback(fuse.statement)
                return connection

            sqlite3.connect = watched
            Coordinator(world, fuse, outbox=outbox).run()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not killed and status:
        raise SystemExit(f"a coordinator failed: {status}")
    return killed


def judge(world: Path) -> tuple[list[str], list[str], set[int]]:
    """(lost, doubled, attempt numbers at home)"""
    lost, doubled, numbers = [], [], set()
    with Store.open(world / "state") as store:
        jobs = {job.facts.name: job for job in store.jobs()}
    for name in JOBS:
        home = world / "home" / name
        placed = sorted(path.name for path in home.iterdir()) if home.exists() else []
        if name not in jobs or jobs[name].state != "completed" or not placed:
            lost.append(name)
        if len(placed) > 1:
            doubled.append(name)
        numbers |= {int(number) for number in placed}
    return lost, doubled, numbers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--no-outbox", action="store_true")
    args = parser.parse_args()
    kills, lost, doubled = 0, 0, 0
    numbers: set[int] = set()
    while True:
        at = 1 + kills * args.step
        world = args.directory / f"world-{at}"
        for name in NODES:
            (world / name).mkdir(parents=True)
        if not life(world, at, outbox=not args.no_outbox):
            break
        kills += 1
        life(world, 0, outbox=not args.no_outbox)
        worlds_lost, worlds_doubled, seen = judge(world)
        lost, doubled, numbers = lost + len(worlds_lost), doubled + len(worlds_doubled), numbers | seen
        shutil.rmtree(world)
    print(json.dumps({"kills": kills, "lost": lost, "doubled": doubled, "attempts": sorted(numbers)}))


if __name__ == "__main__":
    main()
