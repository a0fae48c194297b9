"""Which device a user means: a UUID, a unique beginning of one, or the driver's index.

Inside there are only UUIDs: indices shift when a GPU goes offline, and CUDA counts in another order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from gshare.agent.errors import UsageError
from gshare.agent.jobs.names import shorten
from gshare.agent.vram.devices import Device

#: A number of up to three digits is an index; longer ones may be the beginning of a UUID.
_INDEX_DIGITS = 3
#: `GPU-abcd…` may be named `abcd`; less than this is taken for a slip.
_MIN_BARE_PREFIX = 4


def find_device(token: str, devices: Sequence[Device], *, note: str = "", what: str = "--gpus") -> Device:
    """The one device that `token` names. UsageError when there is none or more than one.

    `note` is the source's reason for having no GPU, put into the message.
    """
    word = token.strip()
    if not word:
        raise UsageError(f"{what}: an empty name; name a GPU by UUID, by the beginning of one, or by index")
    if word.isascii() and word.isdigit() and len(word) <= _INDEX_DIGITS:
        found = [device for device in devices if device.index == int(word)]
        if len(found) > 1:
            raise UsageError(f"{what}: GPU {word} is split into MIG slices; name one of {_uuids(found)}")
    else:
        lower = word.lower()
        found = [device for device in devices if device.uuid.lower() == lower]
        found = found or [device for device in devices if _begins(device.uuid.lower(), lower)]
        if len(found) > 1:
            raise UsageError(f"{what}: {shorten(word)} is the beginning of {_uuids(found)}; write more of it")
    if not found:
        reason = f" ({note})" if note else ""
        raise UsageError(f"{what}: no device {shorten(word)} here{reason}; there is {_uuids(devices)}")
    return found[0]


def find_devices(
    text: str, devices: Sequence[Device], *, note: str = "", what: str = "--gpus"
) -> tuple[Device, ...]:
    """The devices of a list such as `0,GPU-abcd`; one named twice is a UsageError."""
    found: list[Device] = []
    for token in text.split(","):
        device = find_device(token, devices, note=note, what=what)
        if device in found:
            raise UsageError(f"{what}: {device.uuid} is named twice in {shorten(text)}")
        found.append(device)
    return tuple(found)


def visible_devices(devices: Sequence[Device], environ: Mapping[str, str] = os.environ) -> tuple[Device, ...]:
    """What CUDA_VISIBLE_DEVICES leaves of `devices`. As in CUDA, a wrong name hides it and all after it.

    Unlike CUDA's own, an index counts as the driver does (CUDA_DEVICE_ORDER=PCI_BUS_ID).
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return tuple(devices)
    chosen = [device for device in devices if device.memory_type == "cpu"]
    gpus = [device for device in devices if device.memory_type != "cpu"]
    for token in value.split(","):
        try:
            device = find_device(token, gpus)
        except UsageError:
            break
        if device not in chosen:
            chosen.append(device)
    return tuple(chosen)


def _begins(uuid: str, prefix: str) -> bool:
    if uuid.startswith(prefix):
        return True
    _kind, _, rest = uuid.partition("-")
    return len(prefix) >= _MIN_BARE_PREFIX and rest.startswith(prefix)


def _uuids(devices: Sequence[Device]) -> str:
    return ", ".join(device.uuid for device in devices) or "none"
