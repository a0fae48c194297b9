"""known_hosts files: what counts as known, new, changed and revoked; what is written and what is not."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import asyncssh
import pytest
from gshare.agent.errors import UsageError
from gshare.coordinator.host_keys import HostKeyChanged, HostKeys, HostKeyUnknown

KEY = asyncssh.generate_private_key("ssh-ed25519").convert_to_public()
OTHER = asyncssh.generate_private_key("ssh-ed25519").convert_to_public()


def line(names: str, key: asyncssh.SSHKey = KEY, marker: str = "") -> str:
    kind, data = key.export_public_key("openssh").decode().split()[:2]
    return f"{marker} {names} {kind} {data}".strip() + "\n"


def keys(tmp_path: Path, text: str) -> HostKeys:
    (tmp_path / "known_hosts").write_text(text)
    return HostKeys(tmp_path / "known_hosts", also_read=())


@pytest.mark.parametrize(
    ("names", "host", "port"),
    [
        ("desk", "desk", 22),
        ("lab,desk,10.0.0.1", "desk", 22),
        ("*.example.org", "desk.example.org", 22),
        ("[desk]:2222", "desk", 2222),
        ("desk", "desk", 2222),  # OpenSSH: the plain name is good at another port too
        ("10.0.0.0/24", "10.0.0.7", 22),
    ],
)
def test_a_key_is_known_under_that_name(tmp_path: Path, names: str, host: str, port: int) -> None:
    assert keys(tmp_path, line(names)).check(host, port, KEY, "the node") is None


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("", "desk", 22),
        (line("lab"), "desk", 22),
        (line("[desk]:2222"), "desk", 22),
        (line("*.example.org,!desk.example.org"), "desk.example.org", 22),
        (line("desk", OTHER), "desk", 2222),  # another server of that machine
        ("# " + line("desk"), "desk", 22),
        ("desk ssh-ed25519 garbage\n", "desk", 22),
        ("desk\n", "desk", 22),
        (line("lab,,gate"), "desk", 22),  # an empty name is not every host's
        ("\x00\xff\n", "desk", 22),
    ],
)
def test_a_key_is_new(tmp_path: Path, text: str, host: str, port: int) -> None:
    fault = keys(tmp_path, text).check(host, port, KEY, "the node")
    assert isinstance(fault, HostKeyUnknown)
    assert fault.fingerprint.startswith("SHA256:")


def test_a_changed_key_names_file_and_line(tmp_path: Path) -> None:
    fault = keys(tmp_path, "# mine\n\n" + line("desk", OTHER)).check("desk", 22, KEY, "the node")
    assert isinstance(fault, HostKeyChanged)
    assert (fault.file, fault.line, fault.revoked) == (tmp_path / "known_hosts", 3, False)


def test_a_second_key_of_the_host_is_as_good(tmp_path: Path) -> None:
    assert keys(tmp_path, line("desk", OTHER) + line("desk")).check("desk", 22, KEY, "the node") is None


def test_a_line_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    assert keys(tmp_path, "broken\n" + line("desk")).check("desk", 22, KEY, "the node") is None


def test_a_revoked_key_is_refused_although_another_line_has_it(tmp_path: Path) -> None:
    fault = keys(tmp_path, line("desk") + line("*", KEY, "@revoked")).check("desk", 22, KEY, "the node")
    assert isinstance(fault, HostKeyChanged)
    assert (fault.revoked, fault.line) == (True, 2)


def test_hashed_names(tmp_path: Path) -> None:
    # printf '%s' desk | openssl dgst -sha1 -hmac (salt of 20 zero bytes), as ssh-keygen -H writes it.
    import base64
    import hashlib
    import hmac

    salt = bytes(20)
    name = base64.b64encode(hmac.new(salt, b"desk", hashlib.sha1).digest()).decode()
    hashed = keys(tmp_path, line(f"|1|{base64.b64encode(salt).decode()}|{name}"))
    assert hashed.check("desk", 22, KEY, "the node") is None
    assert isinstance(hashed.check("lab", 22, KEY, "the node"), HostKeyUnknown)


def test_the_system_file_counts_too_and_is_not_written(tmp_path: Path) -> None:
    system = tmp_path / "system"
    system.write_text(line("lab"))
    both = HostKeys(tmp_path / "mine", also_read=(system,), accept_new=True)
    assert both.check("lab", 22, KEY, "the node") is None
    assert asyncio.run(both.decide(HostKeyUnknown("desk", 22, KEY, "the node")))
    assert system.read_text() == line("lab")
    assert (tmp_path / "mine").read_text() == line("desk")


@pytest.mark.parametrize("before", ["", line("lab"), line("lab").rstrip("\n")])
def test_an_accepted_key_gets_a_line_of_its_own(tmp_path: Path, before: str) -> None:
    file = tmp_path / "ssh" / "known_hosts"
    if before:
        file.parent.mkdir()
        file.write_text(before)
    new = HostKeys(file, also_read=(), accept_new=True)
    assert asyncio.run(new.decide(HostKeyUnknown("desk", 2222, KEY, "the node")))
    assert file.read_text() == (line("lab") if before else "") + line("[desk]:2222")
    assert new.check("desk", 2222, KEY, "the node") is None
    if not before:
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    new = HostKeys(tmp_path / "file" / "known_hosts", also_read=(), accept_new=True)
    with pytest.raises(UsageError, match="known_hosts"):
        asyncio.run(new.decide(HostKeyUnknown("desk", 22, KEY, "the node")))


def test_a_file_that_was_changed_by_somebody_else_is_read_again(tmp_path: Path) -> None:
    known = keys(tmp_path, "")
    assert known.check("desk", 22, KEY, "the node") is not None
    with known.file.open("a") as stream:
        stream.write(line("desk"))
    assert known.check("desk", 22, KEY, "the node") is None
    os.unlink(known.file)
    assert known.check("desk", 22, KEY, "the node") is not None
