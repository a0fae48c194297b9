"""`cluster.toml`: which machines there are, how to reach them, and what each may be used for.

Read whole: every fault in one run, each with line and key. What a node does not say (GPUs, cores, memory)
is discovered when the coordinator connects. `cluster.toml.example` at the top level is a valid file with
every key explained.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
from gshare.agent.errors import UsageError
from gshare.agent.jobs.faults import Faults, TomlFile, check_section, convert, unknown_key
from gshare.agent.jobs.names import name_fault, shorten

Transport = Literal["local", "ssh", "agent"]
MemoryType = Literal["discrete", "unified"]


class GpuConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a node; a node that lists GPUs uses these alone."""

    uuid: str  # as `nvidia-smi -L` prints it; survives reboots, unlike the index
    type: str | None = None  # "RTX 4090": the name in the table of speed factors; None: discovered
    vram_mb: int | None = None  # MiB; None: discovered
    memory_type: MemoryType | None = None  # None: discovered
    max_adapters: int | None = None  # None: as many as fit


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One machine."""

    name: str
    host: str = ""  # empty for transport "local"
    transport: Transport = "ssh"  # "agent": the node's own server (`gshare agent --bind`)
    user: str | None = None  # None: what ssh_config says, else the user's own name
    port: int | None = None  # None: ssh_config or 22; 7433 for "agent"
    proxy_jump: str | None = None  # "[user@]host[:port]", several separated by commas
    identity: str | None = None  # private key file, absolute
    state_dir: str | None = None  # on the node; relative: to its login's home, local: made absolute
    gpus: tuple[GpuConfig, ...] | None = None  # None: discovered; empty: CPU only
    cpu_cores: int | None = None
    ram_mb: int | None = None  # MiB
    max_adapters: int | None = None  # of the whole node
    models: dict[str, str] = {}  # a job's model → its path on the node
    python: str | None = None  # interpreter on the node that has torch
    environment: dict[str, str] = {}  # for the agent and its trainers

    @property
    def address(self) -> tuple[str | int | None, ...]:
        """What leads to the node's agent: where any of it is different, another one may answer."""
        return (self.transport, self.host, self.user, self.port, self.proxy_jump, self.state_dir)


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[NodeConfig, ...]
    source: str

    def node(self, name: str) -> NodeConfig | None:
        return next((node for node in self.nodes if node.name == name), None)


_NODE_TYPES: dict[str, Any] = {f.name: f.type for f in msgspec.structs.fields(NodeConfig)}
_GPU_TYPES: dict[str, Any] = {f.name: f.type for f in msgspec.structs.fields(GpuConfig)}


def default_cluster_path() -> Path:
    """`$XDG_CONFIG_HOME/gshare/cluster.toml`, by default in `~/.config`."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "gshare" / "cluster.toml"


def load_cluster(path: Path) -> ClusterConfig:
    """The cluster that `path` describes. UsageError with one line a fault otherwise."""
    if path == default_cluster_path():
        try:
            path.stat()
        except FileNotFoundError:
            raise UsageError(
                f"{path}: no such file; copy cluster.toml.example there, or name yours with --cluster"
            ) from None
        except OSError:
            pass  # `TomlFile` tells
    file = TomlFile(path)
    faults = Faults()
    for key in file.table:
        if key != "node":
            faults.add(file.where(key), unknown_key(key, ["node"], {"nodes": "node"}))
    tables = file.table.get("node", [])
    if not isinstance(tables, list):
        faults.add(file.where(section="node"), "write [[node]] with double brackets: one block a machine")
        tables = []
    elif not tables:
        faults.add(str(path), 'no [[node]]: name at least one, such as name = "here", transport = "local"')
    read = [_node(file, index, table, faults) for index, table in enumerate(tables)]
    _check_unique(file, read, faults)
    faults.raise_if_any()
    return ClusterConfig(nodes=tuple(NodeConfig(**values) for values in read), source=str(path))


def _node(file: TomlFile, index: int, table: object, faults: Faults) -> dict[str, Any]:
    """The values of one [[node]] that are right; faults for the others."""
    header = file.where(section="node", index=index)
    table = check_section(table, _NODE_TYPES, f"{header}: [[node]] {index + 1}", faults)
    if table is None:
        return {}
    name = table.get("name")
    label = f"node {shorten(name, 40)}" if isinstance(name, str) else f"node {index + 1}"

    def where(key: str) -> str:
        return f"{file.where(key, 'node', index)}: {label}, key {key!r}"

    values = _typed({k: v for k, v in table.items() if k != "gpus"}, _NODE_TYPES, _NODE_RULES, where, faults)
    if "gpus" in table:
        values["gpus"] = _gpus(table["gpus"], where("gpus"), faults)
    if "identity" in values:
        values["identity"] = str(
            (file.path.absolute().parent / Path(values["identity"]).expanduser()).resolve()
        )
    if values.get("transport") == "local":
        _local_paths(values, file.path.absolute().parent)
    else:
        for model, path in values.get("models", {}).items():
            if path.startswith(("./", "../")):
                fault = (
                    f"{shorten(model)} = {shorten(path)} has no folder there to start at: write it absolute"
                )
                faults.add(where("models"), fault)
    if "name" not in table:
        faults.add(f"{header}: {label}", "missing key 'name'")
    if values.get("transport") == "local":
        for key in ("host", "user", "port", "proxy_jump", "identity"):
            if key in table:
                faults.add(where(key), 'has no meaning with transport = "local"; leave it out')
    elif "host" not in table:
        faults.add(f"{header}: {label}", "missing key 'host' (or transport = \"local\" for this machine)")
    return values


def _local_paths(values: dict[str, Any], base_dir: Path) -> None:
    """Makes the paths of a node on this machine absolute, here: its agent starts in "/".

    Links stay, since a venv's python is one. A `python` of one word is looked up in PATH, and a model that
    is no path and not there may be a hub id.
    """

    def absolute(path: str) -> str:
        return os.path.abspath(base_dir / os.path.expanduser(path))

    if values.get("state_dir"):
        values["state_dir"] = absolute(values["state_dir"])
    if "/" in (values.get("python") or ""):
        values["python"] = absolute(values["python"])
    if "models" in values:
        values["models"] = {
            model: absolute(path)
            if path.startswith(("./", "../", "~")) or os.path.exists(base_dir / path)
            else path
            for model, path in values["models"].items()
        }


def _typed(
    table: dict[str, Any],
    types: dict[str, Any],
    rules: dict[str, Callable[[Any], str | None]],
    where: Callable[[str], str],
    faults: Faults,
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, raw in table.items():
        if key not in types:
            faults.add(where(key), unknown_key(key, types))
            continue
        value, fault = convert(raw, types[key])
        if fault is None and key in rules:
            fault = rules[key](value)
        if fault is None:
            values[key] = value
        else:
            faults.add(where(key), fault)
    return values


def _gpus(raw: object, where: str, faults: Faults) -> tuple[GpuConfig, ...]:
    """`gpus = [...]` or [[node.gpus]] blocks; faults name the GPU by its number."""
    if not isinstance(raw, list):
        faults.add(where, f"must be a list of GPUs, not {shorten(raw)}; leave it out to have them discovered")
        return ()
    gpus: list[GpuConfig] = []
    for number, entry in enumerate(raw, start=1):
        table = check_section(entry, _GPU_TYPES, f"{where}, GPU {number}", faults)
        if table is None:
            continue
        values = _typed(
            table, _GPU_TYPES, _GPU_RULES, lambda key, n=number: f"{where}, GPU {n}, {key!r}", faults
        )
        if "uuid" not in table:
            faults.add(f"{where}, GPU {number}", "missing key 'uuid' (nvidia-smi -L prints it)")
        elif "uuid" in values:
            gpus.append(GpuConfig(**values))
    for uuid in sorted({gpu.uuid for gpu in gpus if [g.uuid for g in gpus].count(gpu.uuid) > 1}):
        faults.add(where, f"GPU {uuid} is listed twice")
    return tuple(gpus)


def same_agent(node: str) -> str:
    """What is wrong with a node that reaches the agent of node `node`."""
    return (
        f"it is the same agent as node {node}: two nodes that reach one agent stop each other's jobs; give "
        "each a state_dir of its own, or take one out of the cluster file"
    )


def _check_unique(file: TomlFile, nodes: list[dict[str, Any]], faults: Faults) -> None:
    """One node a name, one an agent; no GPU on two hosts. Nodes of one host may share a GPU: its ledger is
    one."""
    names: set[str] = set()
    owners: dict[str, tuple[str, str]] = {}
    agents: dict[tuple[Any, ...], str] = {}
    for index, values in enumerate(nodes):
        name = values.get("name", f"number {index + 1}")
        if name in names:
            where = file.where("name", "node", index)
            faults.add(where, f"a second node named {name!r}; give each its own name")
        names.add(name)
        if (agent := _agent_of(values)) is not None and agents.setdefault(agent, name) != name:
            key = "state_dir" if "state_dir" in values else "name"
            where = file.where(key, "node", index)
            faults.add(where, f"node {shorten(name, 40)}: {same_agent(agents[agent])}")
        for gpu in values.get("gpus") or ():
            host = values.get("host", "")
            owner, its_host = owners.setdefault(gpu.uuid, (name, host))
            if host != its_host:
                where = file.where("gpus", "node", index)
                faults.add(where, f"GPU {gpu.uuid} is already listed by node {owner!r} on another host")


def _agent_of(values: dict[str, Any]) -> tuple[Any, ...] | None:
    """Equal for two nodes that surely reach one agent; None: not told by what is right of the node."""
    transport, host = values.get("transport", "ssh"), values.get("host", "").lower()
    if "name" not in values:
        return None
    if transport == "local":
        return transport, values.get("state_dir")
    if not host:
        return None
    # An agent's own server is the agent, whoever logs in; over SSH another login has another home.
    where = () if transport == "agent" else (values.get("user"), values.get("state_dir"))
    return transport, host, values.get("port"), values.get("proxy_jump"), *where


def _between(least: int, most: int) -> Callable[[int | None], str | None]:
    def rule(value: int | None) -> str | None:
        return (
            None
            if value is None or least <= value <= most
            else f"must be from {least} to {most}, not {value}"
        )

    return rule


def _plain(value: str | None) -> str | None:
    """Text that ends up as an argument of a program: never an option, never more than one word."""
    if value is None:
        return None
    if not value:
        return "may not be empty"
    if value.startswith("-") or not value.isprintable() or any(c.isspace() for c in value):
        return f"{shorten(value)} starts with '-' or holds a space or control character"
    return None


def _path(value: str | None) -> str | None:
    if value is None or (value.strip() and value.isprintable()):
        return None
    return f"{shorten(value)} is no path"


def _environment(value: dict[str, str]) -> str | None:
    for name, text in value.items():
        if not (name.isascii() and name.isidentifier()):
            return f"{shorten(name)} is no name of an environment variable"
        if "\0" in text:
            return f"the value of {name} holds a NUL character"
    return None


_COUNT = _between(1, 1_000_000)
_MIB = _between(1, 2**31 - 1)
_NODE_RULES: dict[str, Callable[[Any], str | None]] = {
    "name": name_fault,
    "host": _plain,
    "user": _plain,
    "port": _between(1, 65535),
    "proxy_jump": _plain,
    "identity": _path,
    "state_dir": _path,
    "cpu_cores": _COUNT,
    "ram_mb": _MIB,
    "max_adapters": _between(0, 1_000_000),  # 0: nothing is placed here
    "python": _path,
    "environment": _environment,
}
_GPU_RULES: dict[str, Callable[[Any], str | None]] = {
    "uuid": _plain,
    "vram_mb": _MIB,
    "max_adapters": _between(0, 1_000_000),
}
