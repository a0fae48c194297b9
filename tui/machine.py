"""This machine as a node: its GPUs, ledger and queue. Looked at in a thread: the driver and the ledger's lock
may take their time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gshare.agent.node.health import Devices, Health
from gshare.agent.node.protocol import NodeInfo
from gshare.agent.vram.leases import end_leases
from gshare.tui.frames import NodeView

#: A look costs some milliseconds of ledger and driver.
LOOK_SECONDS = 1.5
#: A look takes milliseconds; a driver that is being loaded, a second or two.
DRIVER_SECONDS = 5.0

T = TypeVar("T")


class Machine:
    """`look` is called in the loop; a driver that hangs keeps a daemon thread, and nothing else."""

    def __init__(self) -> None:
        self._health: Health | None = None
        self._asking: asyncio.Future[Devices] | None = None
        self.info: NodeInfo | None = None

    async def look(self, jobs_running: int | None) -> NodeView:
        """`jobs_running`: for the row; None: not known."""
        health = self._health = self._health or Health(Path.home())
        if self._asking is None or self._asking.done():
            self._asking = in_daemon(health.devices)
        done, _ = await asyncio.wait({self._asking}, timeout=DRIVER_SECONDS)
        devices = self._asking.result() if done else None
        info = self.info = health.describe(0, devices, attempts_running=jobs_running or 0)
        state = "busy" if jobs_running or any(row.state == "held" for row in info.reservations) else "ready"
        return NodeView(
            node=info.hostname,
            state="degraded" if info.problems else state,
            reason="; ".join(info.problems),
            transport="local",
            seen_s=0.0,
            jobs=jobs_running,
            info=info,
        )

    async def release(self, ids: list[str]) -> dict[str, str]:
        """Ends holds (`gshare gpu hold`); id → why not: a living process keeps its reservation."""
        return await in_daemon(lambda: end_leases(ids))


def in_daemon(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs `work` in a thread that the interpreter does not wait for at its end, as it does for a pool's."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except Exception as failure:
            error = failure
        try:
            loop.call_soon_threadsafe(finish, result, error)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    threading.Thread(target=run, daemon=True).start()
    return future
