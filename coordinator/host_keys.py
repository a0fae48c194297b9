"""Host keys: which are known, what is done with a new one, and never a changed one.

    HostKeyUnknown    no known_hosts file has a key of that host: asked for, accepted, or refused
    HostKeyChanged    one has another key, or has revoked this one: refused, whatever the settings

OpenSSH's files and rules (sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT"): hashed names, patterns, ports in
brackets, `@revoked`, `@cert-authority`. Two rules are stricter here: a host known by a key of another type
counts as changed, and `StrictHostKeyChecking no` has no meaning. A line that cannot be read is skipped, as
OpenSSH does: it cannot make a host known.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gshare.agent.errors import UsageError

if TYPE_CHECKING:
    from asyncssh import SSHKey
    from asyncssh.known_hosts import SSHKnownHosts

SSH_PORT = 22
SYSTEM_FILE = Path("/etc/ssh/ssh_known_hosts")


class HostKeyFault(Exception):
    """A host's key cannot be trusted as it is."""

    def __init__(self, host: str, port: int, key: SSHKey, hop: str) -> None:
        """`host`: the name its key is filed under; `hop`: "the node" or "jump host gate:22"."""
        self.host = host
        self.port = port
        self.key = key
        self.fingerprint = key.get_fingerprint()  # SHA256:…, as ssh-keygen -l prints it
        self.key_type = key.get_algorithm()
        self.hop = hop
        super().__init__(f"{hop}: {host}:{port} has the {self.key_type} key {self.fingerprint}")


class HostKeyUnknown(HostKeyFault):
    """The host's first key."""


class HostKeyChanged(HostKeyFault):
    """`file` and `line` are where the other key (or the revocation, `revoked`) stands."""

    def __init__(
        self, host: str, port: int, key: SSHKey, hop: str, *, file: Path, line: int, revoked: bool
    ) -> None:
        super().__init__(host, port, key, hop)
        self.file = file
        self.line = line
        self.revoked = revoked


#: Shows the fingerprint to a person and returns whether it was confirmed.
Ask = Callable[[HostKeyUnknown], Awaitable[bool]]


@dataclass(frozen=True)
class _Line:
    """One line of a known_hosts file that could be read."""

    file: Path
    number: int
    entry: SSHKnownHosts


@dataclass(frozen=True)
class Known:
    """What the files say about one host."""

    keys: tuple[tuple[SSHKey, _Line], ...]
    authorities: tuple[SSHKey, ...]
    revoked: tuple[tuple[SSHKey, _Line], ...]
    #: Keys of the plain name, when the host is at another port than 22: good when equal, never "changed".
    fallback: tuple[SSHKey, ...] = ()

    @property
    def key_algorithms(self) -> list[str]:
        """Signature algorithms of the known keys, for the server to be asked for those first."""
        found: list[str] = []
        for key in (*(key for key, _ in self.keys), *self.fallback):
            found += [name.decode() for name in key.sig_algorithms if name.decode() not in found]
        return found


class HostKeys:
    """The known hosts of one user.

    A new key is shown to `ask` when there is one, else taken with `accept_new`, else refused. What was taken
    is appended to `file`. Questions come one at a time, however many nodes are being connected to; a jump
    host that many nodes share is asked about once.
    """

    def __init__(
        self,
        file: Path | None = None,
        *,
        also_read: tuple[Path, ...] = (SYSTEM_FILE,),
        ask: Ask | None = None,
        accept_new: bool = False,
    ) -> None:
        """`file`: default `~/.ssh/known_hosts`; need not exist."""
        self.file = file if file is not None else Path.home() / ".ssh" / "known_hosts"
        self._also_read = also_read
        self._ask = ask
        self._accept_new = accept_new
        self._asking = asyncio.Lock()
        self._refused: set[tuple[str, int, str]] = set()
        self._parsed: dict[Path, tuple[tuple[int, int, int], list[_Line]]] = {}

    def lookup(self, host: str, port: int, more_files: Iterable[Path] = ()) -> Known:
        """What the files say; `more_files` are those of ssh_config. UsageError: one cannot be read."""
        lines = [line for file in (self.file, *more_files, *self._also_read) for line in self._lines(file)]
        keys: list[tuple[SSHKey, _Line]] = []
        revoked: list[tuple[SSHKey, _Line]] = []
        authorities: list[SSHKey] = []
        fallback: list[SSHKey] = []
        for line in lines:
            here, trusted, bad = _match(line.entry, host, port)
            keys += [(key, line) for key in here]
            authorities += trusted
            revoked += [(key, line) for key in bad]
            if port != SSH_PORT:
                plain, _, plain_bad = _match(line.entry, host, SSH_PORT)
                fallback += plain
                revoked += [(key, line) for key in plain_bad]
        return Known(
            keys=tuple(keys),
            authorities=tuple(authorities),
            revoked=tuple(revoked),
            fallback=() if keys else tuple(fallback),
        )

    def check(
        self, host: str, port: int, key: SSHKey, hop: str, more_files: Iterable[Path] = ()
    ) -> HostKeyFault | None:
        """None when `key` is trusted for that host, else what is wrong (not raised: asyncssh calls this)."""
        known = self.lookup(host, port, more_files)
        for bad, line in known.revoked:
            if bad == key:
                return HostKeyChanged(host, port, key, hop, file=line.file, line=line.number, revoked=True)
        if any(key == good for good, _ in known.keys) or key in known.fallback:
            return None
        if known.keys:
            line = known.keys[0][1]
            return HostKeyChanged(host, port, key, hop, file=line.file, line=line.number, revoked=False)
        return HostKeyUnknown(host, port, key, hop)

    async def decide(self, unknown: HostKeyUnknown) -> bool:
        """Whether that key may be trusted from now on; if so it is in `file` when this returns."""
        async with self._asking:
            if self.check(unknown.host, unknown.port, unknown.key, unknown.hop) is None:
                return True  # while this one waited for its turn
            which = (unknown.host, unknown.port, unknown.fingerprint)
            if self._ask is None:
                trusted = self._accept_new
            elif which in self._refused:  # by the same person, for another node behind the same jump host
                trusted = False
            else:
                trusted = await self._ask(unknown)
                if not trusted:
                    self._refused.add(which)
            if trusted:
                self._append(unknown)
            return trusted

    def _append(self, unknown: HostKeyUnknown) -> None:
        name = unknown.host if unknown.port == SSH_PORT else f"[{unknown.host}]:{unknown.port}"
        kind, data = unknown.key.export_public_key("openssh").decode().split()[:2]  # the rest is a comment
        entry = f"{name} {kind} {data}\n"
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # O_APPEND and one write: two programs that add a line do not mix them.
            fd = os.open(self.file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                size = os.fstat(fd).st_size
                if size and os.pread(fd, 1, size - 1) != b"\n":
                    entry = "\n" + entry
                os.write(fd, entry.encode())
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise UsageError(
                f"{self.file}: the host key of {name} cannot be added: {error.strerror}; "
                "make the file writable, or add the key with ssh"
            ) from None

    def _lines(self, file: Path) -> list[_Line]:
        """Parsed once for each state of the file: a thousand nodes ask for the same one."""
        try:
            with file.open(encoding="utf-8", errors="replace") as stream:
                stat = os.fstat(stream.fileno())
                state = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
                cached = self._parsed.get(file)
                if cached is not None and cached[0] == state:
                    return cached[1]
                lines = [
                    _Line(file, number, entry)
                    for number, text in enumerate(stream, start=1)
                    for entry in _parse(text)
                ]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UsageError(
                f"{file}: cannot be read: {error.strerror}; host keys are checked with it"
            ) from None
        self._parsed[file] = (state, lines)
        return lines


def _parse(text: str) -> Iterator[SSHKnownHosts]:
    """The line as asyncssh understands it; nothing for a comment or a line that is wrong."""
    from asyncssh.known_hosts import import_known_hosts

    text = text.strip()
    names = text.split()[1:2] if text.startswith("@") else text.split()[:1]
    # "a,,b": asyncssh would file the key under the empty name, which stands for a missing address there.
    if not text or text.startswith("#") or "" in ",".join(names).split(","):
        return
    with contextlib.suppress(ValueError):
        yield import_known_hosts(text)


def _match(entry: SSHKnownHosts, host: str, port: int) -> tuple[list[SSHKey], list[SSHKey], list[SSHKey]]:
    """Keys, authorities and revoked keys of that host in one line.

    `SSHKnownHosts.match` falls back to the plain name by itself; the name in brackets is matched here as a
    name of its own, so that the two can be told apart.
    """
    name = host if port == SSH_PORT else f"[{host}]:{port}"
    keys, authorities, revoked, *_ = entry.match(name, "", None)
    return list(keys), list(authorities), list(revoked)
