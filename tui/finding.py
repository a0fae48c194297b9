"""Which source `gshare tui` shows: what was named, else the nearest thing that runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from gshare.agent.errors import GshareError, UsageError
from gshare.tui.source import Source


def find_source(
    *,
    cluster: Path | None = None,
    coordinator_state: Path | None = None,
    agent: str | None = None,
    agent_state: Path | None = None,
    run: Path | None = None,
    replay: Path | None = None,
    speed: float = 1.0,
) -> Source:
    """The one that was named; else the coordinator, else the agent, else this machine with its trainers, and
    the coordinator as soon as one runs.

    `cluster` names a cluster file: its coordinator is waited for if it does not run. `agent`: `HOST:PORT`, or
    the path of an agent's state directory or socket. The `…_state`: directories other than the default ones.
    UsageError: two were named, or one that cannot be.
    """
    named = {"--cluster": cluster, "--agent": agent, "--run": run, "--replay": replay}
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: name one of them")
    if replay is not None:
        from gshare.tui.replay_source import ReplaySource

        return ReplaySource(replay, speed=speed)
    if run is not None:
        from gshare.tui.run_source import RunSource

        return RunSource(run)
    if agent is not None:
        return _agent(agent)
    if cluster is not None:
        return _cluster(cluster, coordinator_state)
    return _nearest(coordinator_state, agent_state)


def _cluster(cluster: Path, state: Path | None) -> Source:
    from gshare.coordinator.api_client import default_state_dir
    from gshare.coordinator.config import load_cluster
    from gshare.tui.coordinator_source import CoordinatorSource

    load_cluster(cluster)  # what is wrong with it shows here
    return CoordinatorSource(state or default_state_dir(), cluster=cluster.absolute())


def _agent(text: str) -> Source:
    from gshare.tui.agent_source import AgentSource

    path = Path(text).expanduser()
    if "/" in text or path.exists():
        return AgentSource(path / "socket" if path.is_dir() else path)
    return AgentSource(text)


def _nearest(coordinator_state: Path | None, agent_state: Path | None) -> Source:
    from gshare.agent.node.bridge import connect_agent
    from gshare.agent.node.state_dir import default_state_dir as default_agent_dir
    from gshare.coordinator.api_client import connect_coordinator, default_state_dir
    from gshare.tui.nearest_source import NearestSource

    if coordinator_state is not None:
        connect_coordinator(coordinator_state).close()  # it was named: without it there is nothing to show
    directory = coordinator_state or default_state_dir()
    if (source := _coordinator(directory)) is not None:
        return source
    socket = (agent_state or default_agent_dir()) / "socket"
    try:
        connect_agent(socket).close()
    except GshareError:
        from gshare.tui.local_source import LocalSource

        return NearestSource(LocalSource(), partial(_coordinator, directory))
    from gshare.tui.agent_source import AgentSource

    return NearestSource(AgentSource(socket), partial(_coordinator, directory))


def _coordinator(directory: Path) -> Source | None:
    """Of that state directory, if it runs."""
    from gshare.coordinator.api_client import SOCKET, connect_coordinator
    from gshare.tui.coordinator_source import CoordinatorSource

    if not (directory / SOCKET).exists():
        return None
    try:
        connect_coordinator(directory).close()
    except GshareError:
        return None
    return CoordinatorSource(directory)
