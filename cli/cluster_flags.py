"""What the commands that talk to a coordinator share: which cluster, which state directory, one client."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gshare.coordinator.api_client import CoordinatorClient
    from gshare.coordinator.main import Options


def state_dir_of(state_dir: Path | None) -> Path:
    """The coordinator's state directory, absolute."""
    from gshare.coordinator.api_client import default_state_dir

    return (default_state_dir() if state_dir is None else state_dir).expanduser().absolute()


def options_of(cluster: Path | None, state_dir: Path | None, **fields: Any) -> Options:
    """The options of a coordinator; a cluster file that was not named is the default one."""
    from gshare.coordinator.config import default_cluster_path
    from gshare.coordinator.main import Options

    file = (default_cluster_path() if cluster is None else cluster).expanduser().absolute()
    return Options(cluster=file, state_dir=state_dir_of(state_dir), **fields)


def running_coordinator(cluster: Path | None, state_dir: Path | None, name: str) -> CoordinatorClient:
    """A client of the coordinator that runs; of that cluster file, when one was named. 75 when none runs."""
    from gshare.coordinator.api_client import CoordinatorClient
    from gshare.coordinator.main import checked_client

    if cluster is None:
        return CoordinatorClient(state_dir_of(state_dir), name)
    return checked_client(options_of(cluster, state_dir), name)
