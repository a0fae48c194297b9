"""`gshare agent`: the daemon of a node that runs the adapters a coordinator sends.

gshare agent [--state-dir DIR]                 listens on a Unix socket
gshare agent --bind [HOST:PORT]                and as an SSH server of its own
gshare agent --coordinator USER@HOST           and calls a coordinator (a node behind NAT)
gshare agent --install                         as a systemd user service
gshare agent stop [--state-dir DIR]            ends the one that runs; what it ran goes on at its next start
gshare agent connect [--state-dir DIR]         stdin and stdout are its socket: what SSH runs
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from gshare.agent.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from gshare.agent.node.server import NodeServer

app = App(name="agent", help="Run this node's agent: it runs the adapters that a coordinator sends.")


@app.default
def agent(
    *,
    bind: str | None = None,
    coordinator: str | None = None,
    node: str | None = None,
    state_dir: Path | None = None,
    authorized_keys: Path | None = None,
    install: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Run the agent of this node until it is told to stop; what ran goes on at its next start.

    Parameters
    ----------
    bind
        Also listen as an SSH server of its own on HOST:PORT; alone: all interfaces, port 7433.
    coordinator
        Also call the coordinator on USER@HOST[:PORT] and serve it: for a node that cannot be reached.
    node
        This node's name in cluster.toml, for --coordinator; left out: the host's name.
    state_dir
        Where files, checkpoints and the socket are; by default $XDG_STATE_HOME/gshare/agent.
    authorized_keys
        Public keys that may come in through --bind; by default ~/.ssh/authorized_keys.
    install
        Make it a systemd user service with these flags, start it, and return.
    """
    from gshare.agent.node.daemon import Gate, run_agent
    from gshare.agent.node.dial_out import dial_out, node_name, parse_coordinator
    from gshare.agent.node.ssh_server import check_authorized_keys, parse_bind, serve_ssh
    from gshare.agent.node.state_dir import default_state_dir

    directory = (default_state_dir() if state_dir is None else state_dir).expanduser().absolute()
    gates: list[Gate] = []
    words = ["agent", "--state-dir", str(directory)]
    if bind is not None:
        host, port = parse_bind(bind)
        keys = (authorized_keys or Path("~/.ssh/authorized_keys")).expanduser().absolute()
        check_authorized_keys(keys)
        words += [f"--bind={host}:{port}", "--authorized-keys", str(keys)]
        gates.append(
            partial(
                serve_ssh,
                host=host,
                port=port,
                host_key=directory / "ssh_host_key",
                authorized_keys=keys,
                on_listening=partial(_say_listening, host),
            )
        )
    elif authorized_keys is not None:
        raise UsageError("--authorized-keys is for --bind; give both or none")
    if coordinator is not None:
        target, name = parse_coordinator(coordinator), node_name(node)
        words += ["--coordinator", coordinator, "--node", name]

        def call(server: NodeServer) -> Awaitable[None]:
            return dial_out(server, target, name)

        gates.append(call)
    elif node is not None:
        raise UsageError("--node is for --coordinator; give both or none")
    if install:
        from gshare.agent.node.install import install as install_unit

        print("\n".join(install_unit(words)), file=sys.stderr)
        return EXIT_OK
    return run_agent(directory, gates)


@app.command
def stop(*, state_dir: Path | None = None) -> int:
    """Checkpoint what the agent of this node runs and end it; 75 when none runs.

    What it ran goes on at its next start. A coordinator that still runs starts it again: stop that first.

    Parameters
    ----------
    state_dir
        The agent's; by default $XDG_STATE_HOME/gshare/agent.
    """
    from gshare.agent.node.state_dir import default_state_dir
    from gshare.agent.node.stop import stop_agent

    directory = (default_state_dir() if state_dir is None else state_dir).expanduser().absolute()
    pid = stop_agent(directory)
    print(f"agent {pid} has ended; what it ran goes on at its next start", file=sys.stderr)
    return EXIT_OK


@app.command
def connect(*, state_dir: Path | None = None) -> int:
    """Join stdin and stdout to the agent's socket; 75 when none runs.

    Parameters
    ----------
    state_dir
        The agent's; by default $XDG_STATE_HOME/gshare/agent.
    """
    from gshare.agent.node.bridge import connect_bridge
    from gshare.agent.node.state_dir import default_state_dir

    directory = default_state_dir() if state_dir is None else state_dir.expanduser().absolute()
    return connect_bridge(directory / "socket")


def _say_listening(host: str, port: int, fingerprint: str) -> None:
    from gshare.agent.node.daemon import tell

    where = host or "all interfaces"
    tell(f"listening on {where} as an SSH server on port {port}; host key {fingerprint}")
