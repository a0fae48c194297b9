"""What can be wrong between the coordinator and a node, as one error type.

`kind` is for programs (states, tests, JSON), `text` for people: it says what to do. A fault that time may
mend by itself is `transient`; the others want a person, so trying again soon is pointless.
"""

from __future__ import annotations

from typing import Literal, get_args

from gshare.agent.errors import GshareError

FaultKind = Literal[
    "unresolved",  # the host's name has no address
    "refused",  # nothing listens at host:port
    "unreachable",  # no route to it
    "timeout",  # no answer in time
    "lost",  # the connection broke, or the other side hung up
    "host_key_unknown",
    "host_key_changed",
    "auth",  # none of our keys is accepted
    "forwarding",  # a jump host forbids to go on from it
    "config",  # ssh_config, known_hosts, an identity file or the node's state_dir is wrong
    "protocol",  # the other side does not speak SSH, or not our wire
    "no_python",
    "no_torch",
    "machine",  # neither x86_64 nor aarch64
    "disk_full",
    "install",  # pip or venv failed
    "version",  # an agent newer than we are, or one that was not upgraded
    "no_agent",  # it does not start, or does not run
]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)

#: Kinds that go away by themselves: a machine that boots, a line that comes back, a disk that is cleared.
TRANSIENT: frozenset[FaultKind] = frozenset(
    {"unresolved", "refused", "unreachable", "timeout", "lost", "disk_full", "no_agent"}
)


class NodeFault(GshareError):
    """Node `node` cannot be used now. `str()` is "node NAME: TEXT"."""

    def __init__(self, node: str, kind: FaultKind, text: str) -> None:
        super().__init__(f"node {node}: {text}")
        self.node = node
        self.kind: FaultKind = kind
        self.text = text

    @property
    def transient(self) -> bool:
        return self.kind in TRANSIENT
