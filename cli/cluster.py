"""`gshare cluster status` and `gshare cluster check`: how the nodes are, and what to mend on each."""

from __future__ import annotations

import asyncio
import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter
from gshare.agent.errors import EXIT_FAILURE, EXIT_OK
from gshare.agent.jobs.names import plain
from gshare.agent.service.journal import strict_json
from gshare.cli.board import columns, number
from gshare.cli.cluster_flags import options_of, running_coordinator

if TYPE_CHECKING:
    from gshare.coordinator.api_protocol import JobRow, NodeRow, Standing
    from gshare.coordinator.config import NodeConfig
    from gshare.coordinator.host_keys import HostKeys

app = App(name="cluster", help="How the nodes of a cluster are, and what to mend on each.")

app.command(
    "gshare.cli.cluster_plan:plan", name="plan", help="When several sweeps would run, and on which GPUs."
)

#: All nodes are tried at once; one that is made ready installs its environment first.
CHECK_SECONDS = 3600.0


@app.command
def status(
    *,
    cluster: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    state_dir: Path | None = None,
) -> int:
    """Show nodes, jobs and leaderboard, as the coordinator knows them.

    Parameters
    ----------
    cluster
        The file that names the nodes; by default that of the coordinator that runs.
    json
        One object: nodes, jobs, leaderboard.
    state_dir
        The coordinator's; by default $XDG_STATE_HOME/gshare/coordinator.
    """
    from gshare.coordinator.api_protocol import (
        JobRows,
        Leaderboard,
        ListClusterJobs,
        ListNodes,
        NodeRows,
        ReadLeaderboard,
    )

    with running_coordinator(cluster, state_dir, "gshare cluster status") as client:
        nodes = client.ask(NodeRows, ListNodes).nodes
        jobs = client.ask(JobRows, ListClusterJobs).jobs
        standings = client.ask(Leaderboard, ReadLeaderboard).standings
        welcome = client.welcome
    if json:
        told: dict[str, Any] = {
            "type": "cluster",
            "cluster": welcome.cluster,
            "coordinator": {"pid": welcome.pid, "owner": welcome.owner, "gshare": welcome.gshare},
            "nodes": msgspec.to_builtins(nodes),
            "jobs": msgspec.to_builtins(jobs),
            "leaderboard": msgspec.to_builtins(standings),
        }
        print(json_module.dumps(strict_json(told), allow_nan=False))
        return EXIT_OK
    print("\n".join(node_table(nodes)))
    if jobs:
        print("\n" + "\n".join(job_table(jobs)))
    if any(standing.best_val_loss is not None for standing in standings):
        print("\n" + "\n".join(standing_table(standings)))
    return EXIT_OK


@app.command
def check(
    *,
    cluster: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    accept_new: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Connect to every node, make it ready, and say what is wrong with each and how to mend it.

    Unknown host keys are shown for confirmation. Exit code 1 when a node cannot be used.

    Parameters
    ----------
    cluster
        The file that names the nodes; by default ~/.config/gshare/cluster.toml.
    json
        One JSON line a node: node, ok, kind, faults, done.
    accept_new
        Trust host keys that are seen for the first time. Changed ones are always refused.
    """
    from gshare.coordinator.config import load_cluster, same_agent
    from gshare.coordinator.host_keys import HostKeys
    from gshare.coordinator.main import ask_on_terminal

    config = load_cluster(options_of(cluster, None).cluster)
    person = sys.stdin.isatty() and sys.stderr.isatty()

    async def check_all() -> list[dict[str, Any]]:
        keys = HostKeys(ask=ask_on_terminal if person else None, accept_new=accept_new)
        return list(await asyncio.gather(*(_check(node, keys) for node in config.nodes)))

    found = asyncio.run(check_all())
    first: dict[str, str] = {}  # agent → the node it was found as
    for node in found:
        agent = node.pop("agent", None)
        if agent is not None and first.setdefault(agent, node["node"]) != node["node"]:
            node.update(ok=False, kind="config", faults=[same_agent(first[agent]), *node["faults"]])
    for node in found:
        if json:
            print(json_module.dumps(node))
            continue
        print(f"{node['node']}: {'ready' if node['ok'] else 'cannot be used'}")
        for line in (*node["done"], *node["faults"]):
            print(f"  {line}")
    return EXIT_OK if all(node["ok"] for node in found) else EXIT_FAILURE


async def _check(node: NodeConfig, keys: HostKeys) -> dict[str, Any]:
    """How one node is, and (`agent`, where it answered) which agent. Never raises for what is wrong there."""
    import time

    from gshare.agent.errors import GshareError
    from gshare.agent.node.protocol import DescribeNode, NodeInfo
    from gshare.coordinator.connecting import Connector
    from gshare.coordinator.link import AgentLink
    from gshare.coordinator.node_fault import NodeFault
    from gshare.coordinator.node_state import problems_of

    done: list[str] = []
    told: dict[str, Any] = {"type": "node", "node": node.name, "ok": False, "kind": "", "done": done}
    try:
        stream = await asyncio.wait_for(
            Connector(keys)(node, lambda text: done.append(plain(text))), CHECK_SECONDS
        )
        link = await AgentLink.open(stream, client="gshare cluster check")
        told["agent"] = link.hello.agent_id
        try:
            info = await link.ask(NodeInfo, DescribeNode, models=sorted(node.models.values()))
        finally:
            await link.close()
    except NodeFault as fault:
        return {**told, "kind": fault.kind, "faults": [plain(fault.text)]}
    except (GshareError, asyncio.TimeoutError) as error:
        return {**told, "faults": [plain(str(error) or f"no answer within {CHECK_SECONDS:.0f} s")]}
    listed = frozenset(gpu.uuid for gpu in node.gpus or ())
    problems = problems_of(info, wall=time.time(), draining=link.hello.draining, listed=listed)
    usable = not any(problem.forbids for problem in problems)
    return {**told, "ok": usable, "faults": [plain(problem.text) for problem in problems]}


def node_table(nodes: list[NodeRow]) -> list[str]:
    lines = [("node", "state", "host", "GPUs", "free MiB", "jobs", "seen", "gshare", "")]
    for row in nodes:
        info = row.info
        gpus = info.gpus if info is not None else []
        free = [gpu.free_mb for gpu in gpus] if gpus else [info.ram_free_mb if info is not None else None]
        lines.append(
            (
                row.node,
                row.state,
                row.host or row.transport or "dials in",
                ", ".join(gpu.name for gpu in gpus) or ("CPU" if info is not None else "-"),
                ", ".join("?" if mb is None else str(mb) for mb in free),
                str(row.jobs),
                "-" if row.seen_s is None else f"{row.seen_s:.0f} s",
                row.gshare or "-",
                row.reason,
            )
        )
    return _plain_columns(lines)


def job_table(jobs: list[JobRow]) -> list[str]:
    lines = [("job", "state", "node", "step", "loss", "val loss", "best", "output", "")]
    for row in jobs:
        lines.append(
            (
                row.job,
                row.state,
                row.node or "-",
                f"{row.step}/{row.total_steps or '?'}",
                number(row.loss),
                number(row.val_loss),
                number(row.best_val_loss),
                row.output_dir,
                row.reason,
            )
        )
    return _plain_columns(lines)


def standing_table(standings: list[Standing]) -> list[str]:
    lines = [("", "adapter", "best val loss", "at step", "val loss", "steps", "node", "state")]
    for place, row in enumerate(standings, start=1):
        lines.append(
            (
                str(place),
                row.job,
                number(row.best_val_loss),
                "-" if row.best_step is None else str(row.best_step),
                number(row.val_loss),
                f"{row.step}/{row.total_steps or '?'}",
                row.node or "-",
                row.state,
            )
        )
    return _plain_columns(lines)


def _plain_columns(lines: list[tuple[str, ...]]) -> list[str]:
    """Nodes and users named these: what a terminal would obey is shown as "?"."""
    return columns([tuple(plain(cell) for cell in line) for line in lines])
