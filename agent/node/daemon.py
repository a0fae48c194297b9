"""The agent's process: one loop over socket, attempts, housekeeping and signals.

SIGTERM, SIGINT    checkpoint and stop every attempt, exit 143 or 130; the next start resumes them
a second one       leave at once: the trainers see their client gone and checkpoint by themselves
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from gshare.agent.errors import EXIT_FAILURE, EXIT_OK, EXIT_SIGINT, EXIT_SIGTERM, GshareError
from gshare.agent.jobs.names import plain
from gshare.agent.node.loop_errors import LoopErrors
from gshare.agent.node.server import NodeServer
from gshare.agent.node.state_dir import StateDir, open_state_dir
from gshare.agent.service.registry import collect_dead
from gshare.agent.service.server import bound_socket

#: Below systemd's own 90 s: what has not checkpointed by then does so when its client is gone.
DRAIN_SECONDS = 60.0
LEAVE_SECONDS = 10.0
HOUSEKEEPING_SECONDS = 60.0
#: SIGHUP: the terminal that it was started from was closed.
_SIGNALS = {
    signal.SIGTERM: EXIT_SIGTERM,
    signal.SIGINT: EXIT_SIGINT,
    signal.SIGHUP: EXIT_SIGTERM,
}

#: A further way in or out, beside the socket: runs until it is cancelled.
Gate = Callable[[NodeServer], Awaitable[None]]


@dataclass
class Daemon:
    """One agent. `gates` are started when the socket listens."""

    state: StateDir
    gates: list[Gate] = field(default_factory=list)
    _exit_code: int = EXIT_OK

    async def run(self) -> int:
        """Until it is told to leave; the exit code. The state directory's lock is the caller's."""
        self._leave = asyncio.Event()
        loop = asyncio.get_running_loop()
        server = NodeServer(self.state, drain=self._leave.set)
        loop.set_exception_handler(LoopErrors(server.say))
        for number, code in _SIGNALS.items():
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, `&`
                loop.add_signal_handler(number, self._signalled, code)
        listening = await self._listen(server)
        collect_dead()
        server.attempts.resume_all(*server.journal.ends())
        tell(f"agent {os.getpid()} runs; state in {self.state.path}, socket {self.state.socket}")
        tasks = [asyncio.create_task(self._keep_house(server))]
        tasks += [asyncio.create_task(self._hold_open(gate, server)) for gate in self.gates]
        try:
            leaving = asyncio.create_task(self._leave.wait())
            # A gate that cannot be opened (a port in use) ends the agent: it was asked for by name.
            done, _ = await asyncio.wait({leaving, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            await self._stop_attempts(server)
            for task in done - {leaving}:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            raised = sys.exc_info()[1]
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception) and result is not raised:
                    loop.call_exception_handler({"message": "a task of the agent", "exception": result})
            listening.close()
            await server.close()
            self.state.socket.unlink(missing_ok=True)
            # asyncio waits for the threads that serve files and devices, of which one may hang in a driver.
            loop.call_later(LEAVE_SECONDS, os._exit, self._exit_code or EXIT_FAILURE)
        return self._exit_code

    def _signalled(self, code: int) -> None:
        if self._exit_code:
            os._exit(code)
        self._exit_code = code
        self._leave.set()

    async def _listen(self, server: NodeServer) -> asyncio.AbstractServer:
        path = self.state.socket
        path.unlink(missing_ok=True)  # we hold the lock: whoever bound it is dead
        try:
            sock = bound_socket(path)
        except OSError as error:
            raise GshareError(f"{path}: {error.strerror}") from None

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.serve(reader, writer, "this machine")

        return await asyncio.start_unix_server(serve, sock=sock)

    async def _stop_attempts(self, server: NodeServer) -> None:
        try:
            await asyncio.wait_for(server.attempts.interrupt(), DRAIN_SECONDS)
        except (asyncio.TimeoutError, TimeoutError):
            server.say("warning", f"not everything had stopped after {DRAIN_SECONDS:.0f} s")

    async def _hold_open(self, gate: Gate, server: NodeServer) -> None:
        await gate(server)

    async def _keep_house(self, server: NodeServer) -> None:
        """One chore that fails keeps none of the others from being done, and never ends the agent."""
        told = ""
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS)
            for chore in (server.attempts.collect, server.bundles.expire):
                try:
                    await asyncio.to_thread(chore)
                except Exception as error:
                    if str(error) != told:  # a file in the way for a night is told of once
                        told = str(error)
                        asyncio.get_running_loop().call_exception_handler(
                            {"message": "housekeeping", "exception": error}
                        )


def tell(text: str) -> None:
    """One line on stderr, for whoever started it or reads its log; without one it runs all the same."""
    with contextlib.suppress(OSError, ValueError):
        print(plain(text), file=sys.stderr, flush=True)


def run_agent(state_dir: Path | None, gates: list[Gate]) -> int:
    """Runs an agent in this process to its end. RetryLater: one runs on that directory already."""
    state = open_state_dir(state_dir)
    lock = state.lock()
    try:
        state.clear_leftovers()
        code = asyncio.run(Daemon(state, gates).run())
        tell("the agent has ended; what it ran goes on at its next start")
        return code
    finally:
        os.close(lock)
