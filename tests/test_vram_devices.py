"""Devices: NVML in every state that it may be in (a fake), simulated ones, names that users give them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pynvml
import pytest
from gshare.agent.errors import UsageError
from gshare.agent.vram import nvml
from gshare.agent.vram.devices import (
    CPU_UUID,
    Device,
    DeviceReading,
    HostMemory,
    ProcessUse,
    tegra_board,
)
from gshare.agent.vram.identify import find_device, find_devices, visible_devices
from gshare.agent.vram.nvml import NoNvml, NvmlDevices
from gshare.agent.vram.owners import outside_mb
from gshare.agent.vram.rows import Row
from gshare.agent.vram.settings import MAX_TOML
from gshare.agent.vram.simulated import SimulatedDevices
from gshare.agent.vram.sources import open_devices

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import child, device, write_devices

MIB = 1 << 20
NOT_AVAILABLE = 2**64 - 1


class Card:
    """One fake card. An attribute that is an error number makes the call fail with it."""

    def __init__(self, uuid: str = "GPU-1111", **keys: Any) -> None:
        self.uuid = uuid
        self.handle: Any = keys.get("handle")
        self.memory: Any = keys.get("memory", (24576 * MIB, 1000 * MIB))
        self.v2: Any = keys.get("v2", True)
        self.compute: Any = keys.get("compute", [])
        self.graphics: Any = keys.get("graphics", [])
        self.slices: list[Card] = keys.get("slices", [])


class FakeNvml:
    """As much of `pynvml` as is used, on fake cards."""

    def __init__(self, *cards: Card, init: int | None = None, old_process_calls: bool = False) -> None:
        self._cards, self._init = cards, init
        self._old = old_process_calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("NVML", "nvmlMemory")):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def nvmlInit(self) -> None:
        self._check(self._init)

    def nvmlDeviceGetCount(self) -> int:
        return len(self._cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        self._check(self._cards[index].handle)
        return self._cards[index]

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return card.uuid

    def nvmlDeviceGetName(self, card: Card) -> str:
        return "Fake"

    def nvmlDeviceGetMigMode(self, card: Card) -> tuple[int, int]:
        if not card.slices:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return (1, 1)

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, place: int) -> Card:
        if place >= len(card.slices):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return card.slices[place]

    def nvmlDeviceGetMemoryInfo(self, card: Card, version: int | None = None) -> SimpleNamespace:
        if version is not None and card.v2 is not True:
            raise pynvml.NVMLError(card.v2)
        self._check(card.memory)
        total, used = card.memory
        reserved = 0 if version is not None else 400 * MIB  # version 1 counts it as used
        return SimpleNamespace(total=total, used=used + reserved)

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> list[SimpleNamespace]:
        if self._old:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return self._list(card.compute)

    def nvmlDeviceGetComputeRunningProcesses_v2(self, card: Card) -> list[SimpleNamespace]:
        return self._list(card.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: Card) -> list[SimpleNamespace]:
        return self._list(card.graphics)

    def _list(self, entries: Any) -> list[SimpleNamespace]:
        self._check(entries)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in entries]

    def _check(self, value: Any) -> None:
        if isinstance(value, int):
            raise pynvml.NVMLError(value)


def only(fake: FakeNvml) -> tuple[NvmlDevices, Device]:
    source = NvmlDevices(fake, host_pids=True)
    (found,) = source.devices()
    return source, found


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded: modprobe nvidia"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "different versions: reboot"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "rights of /dev/nvidia"),
        (pynvml.NVML_ERROR_UNKNOWN, "NVML does not start"),
    ],
)
def test_a_driver_that_does_not_start_says_why(fault: int, text: str) -> None:
    with pytest.raises(NoNvml, match=text):
        NvmlDevices(FakeNvml(Card(), init=fault))


def test_a_driver_without_a_gpu_says_so() -> None:
    with pytest.raises(NoNvml, match="shows no GPU"):
        NvmlDevices(FakeNvml())


def test_without_a_driver_the_cpu_is_the_device_and_the_reason_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeNvml(init=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    monkeypatch.setattr("gshare.agent.vram.sources.NvmlDevices", lambda: NvmlDevices(fake))
    source = open_devices({})
    (cpu,) = source.devices()
    assert (cpu.uuid, cpu.memory_type, cpu.cuda_name) == (CPU_UUID, "cpu", None)
    assert "different versions" in source.note
    reading = source.read(cpu)
    assert reading.total_mb == psutil.virtual_memory().total >> 20
    assert reading.processes is None
    with pytest.raises(UsageError, match=r"no device '0000' here .*different versions.*there is CPU"):
        find_device("0000", source.devices(), note=source.note)


def test_memory_and_processes_of_a_card() -> None:
    card = Card(compute=[(10, 300 * MIB), (11, 5 * MIB + 1)], graphics=[(10, 300 * MIB), (12, 7 * MIB)])
    source, found = only(FakeNvml(card))
    reading = source.read(found)
    assert (reading.state, reading.total_mb, reading.used_mb) == ("ok", 24576, 1000)
    assert reading.processes == (ProcessUse(10, 300), ProcessUse(11, 6), ProcessUse(12, 7))


@pytest.mark.parametrize(
    "fault", [pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH]
)
def test_an_old_driver_falls_back_to_version_1(fault: int) -> None:
    source, found = only(FakeNvml(Card(v2=fault)))
    assert source.read(found).used_mb == 1400


def test_old_process_calls_are_used_where_the_new_ones_are_missing() -> None:
    source, found = only(FakeNvml(Card(compute=[(10, MIB)]), old_process_calls=True))
    assert source.read(found).processes == (ProcessUse(10, 1),)


def test_a_process_whose_memory_is_not_available_is_none_and_never_0_or_2_to_the_64() -> None:
    source, found = only(FakeNvml(Card(compute=[(10, None), (11, NOT_AVAILABLE)], graphics=[(11, 2 * MIB)])))
    assert source.read(found).processes == (ProcessUse(10, None), ProcessUse(11, 2))


def test_processes_that_nobody_may_list_are_unknown_and_not_an_empty_list() -> None:
    denied = pynvml.NVML_ERROR_NO_PERMISSION
    source, found = only(FakeNvml(Card(compute=denied, graphics=denied)))
    assert source.read(found).processes is None


def test_in_another_pid_namespace_the_drivers_pids_are_not_taken_for_ours() -> None:
    source = NvmlDevices(FakeNvml(Card(compute=[(10, MIB)])), host_pids=False)
    assert source.read(source.devices()[0]).processes is None


@pytest.mark.parametrize("memory", [(NOT_AVAILABLE, 0), (24576 * MIB, NOT_AVAILABLE), (0, 0)])
def test_memory_that_is_not_available_is_its_own_state(memory: tuple[int, int]) -> None:
    source, found = only(FakeNvml(Card(memory=memory)))
    reading = source.read(found)
    assert (reading.state, reading.total_mb, reading.used_mb) == ("no_memory_info", None, None)


def test_one_lost_card_does_not_take_the_others_with_it() -> None:
    lost = pynvml.NVML_ERROR_GPU_IS_LOST
    source = NvmlDevices(FakeNvml(Card(handle=lost), Card("GPU-2222"), Card("GPU-3333")), host_pids=True)
    first, second, third = source.devices()
    assert (first.index, second.uuid, third.index) == (0, "GPU-2222", 2)
    assert source.read(first).state == "lost"
    assert source.read(second).state == source.read(third).state == "ok"


@pytest.mark.parametrize(
    ("fault", "state"),
    [
        (pynvml.NVML_ERROR_GPU_IS_LOST, "lost"),
        (pynvml.NVML_ERROR_RESET_REQUIRED, "lost"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "no_memory_info"),
        (pynvml.NVML_ERROR_UNKNOWN, "failed"),
    ],
)
def test_a_card_that_fails_later_is_a_state_and_no_exception(fault: int, state: str) -> None:
    card = Card()
    source, found = only(FakeNvml(card))
    card.memory = fault
    reading = source.read(found)
    assert (reading.state, reading.total_mb) == (state, None)
    assert reading.problem


def test_a_gpu_without_memory_of_its_own_is_unified() -> None:
    source, found = only(FakeNvml(Card(memory=pynvml.NVML_ERROR_NOT_SUPPORTED)))
    assert found.memory_type == "unified"
    assert source.read(found).total_mb == psutil.virtual_memory().total >> 20


def test_a_name_that_would_drive_the_terminal_is_shown_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetName", lambda self, card: "A\x1b[2J")
    _, found = only(FakeNvml(Card("GPU-1\x9b")))
    assert (found.uuid, found.name) == ("GPU-1?", "A?[2J")


def test_with_mig_on_the_slices_are_the_devices() -> None:
    card = Card(slices=[Card("MIG-aa-1", memory=(5000 * MIB, 0)), Card("MIG-ab-2", memory=(9000 * MIB, 0))])
    source = NvmlDevices(FakeNvml(card), host_pids=True)
    first, second = source.devices()
    assert (first.uuid, second.uuid, first.mig) == ("MIG-aa-1", "MIG-ab-2", True)
    assert source.read(second).total_mb == 9000
    with pytest.raises(UsageError, match="split into MIG slices"):
        find_device("0", source.devices())


def test_the_host_namespace_is_known_by_its_fixed_inode(monkeypatch: pytest.MonkeyPatch) -> None:
    for inode, host in ((0xEFFFFFFC, True), (4026532000, False)):
        monkeypatch.setattr(nvml.os, "stat", lambda path, inode=inode: SimpleNamespace(st_ino=inode))
        assert nvml.in_host_namespace() is host


def test_a_tegra_board_is_found_by_its_device_tree(tmp_path: Path) -> None:
    assert tegra_board(tmp_path) is None
    (tmp_path / "compatible").write_bytes(b"nvidia,p3768-0000\0nvidia,tegra234\0")
    (tmp_path / "model").write_bytes(b"Jetson Orin Nano\0")
    (tmp_path / "serial-number").write_bytes(b"1421\0")
    board = tegra_board(tmp_path)
    assert board is not None
    assert (board.uuid, board.name, board.memory_type) == ("TEGRA-1421", "Jetson Orin Nano", "unified")
    assert board.cuda_name == "0"
    assert HostMemory(board).read(board).total_mb


# What is used outside the ledger: see also the ledger's tests, with real processes.


def test_without_a_list_of_processes_the_holders_own_measurements_are_taken_off() -> None:
    def row(row_id: str, used: int) -> Row:
        return Row(
            id=row_id,
            gpu_uuid="GPU-1111",
            budget_mb=500,
            task="",
            kind="trainer",
            pid=1,
            uid=0,
            created=0.0,
            used_mb=used,
        )

    held = [row("a", 300), row("b", 0)]
    unlisted = DeviceReading(total_mb=1000, used_mb=700)
    assert outside_mb(unlisted, held, lambda pid: None) == 400
    listed = DeviceReading(
        total_mb=1000, used_mb=700, processes=(ProcessUse(5, None), ProcessUse(6, 50), ProcessUse(7, 350))
    )
    owners = {5: "a", 6: "b", 7: None}
    assert outside_mb(listed, held, owners.get) == 350  # 300 by a's own word, 50 listed for b
    assert outside_mb(DeviceReading(total_mb=1000), held, owners.get) is None


@pytest.mark.parametrize(
    ("used", "peak", "outside"), [(500, 0, 0), (501, 0, 1), (900, 0, 400), (900, 850, 50)]
)
@pytest.mark.parametrize("how", ["listed", "listed without amounts", "not listed"])
def test_what_a_row_uses_beyond_what_it_counts_is_outside(
    used: int, peak: int, outside: int, how: str
) -> None:
    """Else it would be in no sum, and handed out a second time. A second row below its budget lends none."""
    over = Row(
        id="a",
        gpu_uuid="GPU-1111",
        budget_mb=500,
        peak_mb=peak,
        task="",
        kind="hold",
        pid=1,
        uid=0,
        created=0.0,
        used_mb=0 if how == "listed" else used,
    )
    below = msgspec.structs.replace(over, id="b", budget_mb=400, peak_mb=0, used_mb=0)
    amounts = (used - 30, 30) if how == "listed" else (None, None)
    listed = None if how == "not listed" else tuple(map(ProcessUse, (5, 6), amounts))
    reading = DeviceReading(total_mb=2000, used_mb=used, processes=listed)
    assert outside_mb(reading, [over, below], {5: "a", 6: "a"}.get) == outside


# Names


DEVICES = (
    Device(uuid="GPU-abcd-1", name="A", index=0),
    Device(uuid="GPU-abce-2", name="B", index=1),
    Device(uuid="MIG-77aa-3", name="C", index=2, mig=True),
)


@pytest.mark.parametrize(
    ("token", "uuid"),
    [
        ("0", "GPU-abcd-1"),
        (" 1 ", "GPU-abce-2"),
        ("GPU-abcd-1", "GPU-abcd-1"),
        ("gpu-ABCE", "GPU-abce-2"),
        ("abcd", "GPU-abcd-1"),
        ("MIG-", "MIG-77aa-3"),
        ("77aa", "MIG-77aa-3"),
    ],
)
def test_a_device_is_found_by_index_uuid_or_unique_prefix(token: str, uuid: str) -> None:
    assert find_device(token, DEVICES).uuid == uuid


@pytest.mark.parametrize(
    ("token", "text"),
    [
        ("", "an empty name"),
        ("GPU-abc", "is the beginning of GPU-abcd-1, GPU-abce-2; write more of it"),
        ("GPU-x", "no device 'GPU-x' here; there is GPU-abcd-1"),
        ("abc", "no device 'abc'"),
        ("3", "no device '3'"),
        ("-1", "no device '-1'"),
    ],
)
def test_a_name_that_is_not_one_device_is_one_line(token: str, text: str) -> None:
    with pytest.raises(UsageError, match=text) as error:
        find_device(token, DEVICES)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


def test_an_exact_uuid_wins_over_a_longer_one_that_begins_with_it() -> None:
    longer = (*DEVICES, Device(uuid="GPU-abcd-12", name="D", index=3))
    assert find_device("GPU-abcd-1", longer).name == "A"


def test_a_list_of_devices_names_each_once() -> None:
    assert [d.index for d in find_devices("1,GPU-abcd", DEVICES)] == [1, 0]
    with pytest.raises(UsageError, match="GPU-abcd-1 is named twice"):
        find_devices("0,GPU-abcd", DEVICES)
    with pytest.raises(UsageError, match="an empty name"):
        find_devices("0,", DEVICES)


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-abce,MIG-77", [1, 2]),
        ("0,7,1", [0]),  # CUDA stops at the first wrong name
        ("-1", []),
    ],
)
def test_cuda_visible_devices_limits_the_choice(value: str | None, indices: list[int]) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [d.index for d in visible_devices(DEVICES, environ)] == indices


def test_cuda_visible_devices_does_not_hide_the_cpu() -> None:
    cpu = Device(uuid=CPU_UUID, name="CPU", index=0, memory_type="cpu")
    assert visible_devices([cpu], {"CUDA_VISIBLE_DEVICES": ""}) == (cpu,)


# Simulated ones


def test_simulated_devices_follow_their_file(tmp_path: Path) -> None:
    path = write_devices(
        tmp_path / "d.toml", device(used_by_others_mb=100), device("GPU-b", memory_type='"unified"')
    )
    source = open_devices({"GSHARE_DEVICES": str(path)})
    first, second = source.devices()
    assert (second.memory_type, second.index) == ("unified", 1)
    assert source.read(first).used_mb == 100
    write_devices(path, device(used_by_others_mb=700, processes="[{ pid = 5, used_mb = 50 }]"))
    assert source.read(first).used_mb == 750
    assert source.read(second).state == "lost"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"no \[\[device\]\] table"),
        ("x = 1", r"unknown key 'x'; devices are \[\[device\]\] tables"),
        (
            "[[device]]\nuuid = 'a'\ntotal_mib = 5",
            "device 1: unknown key 'total_mib'; did you mean 'total_mb'",
        ),
        ("[[device]]\nuuid = 'a'\ntotal_mb = 'x'", r"device 1: Expected `int`, got `str` - at `\$.total_mb`"),
        ("[[device]]\nuuid = 'a'\ntotal_mb = -5", "device 1: total_mb = -5 must be 1 to 16777216 MiB"),
        ("[[device]]\nuuid = 'a'\ntotal_mb = 5\nstate = 'odd'", r"at `\$.state`"),
        ("[[device]]\nuuid = 'a'\ntotal_mb = 5\nmemory_type = 'cpu'", "must be discrete or unified"),
        ("[[device]]\nuuid = 'a'\ntotal_mb = 5\n" * 2, "device 2: uuid 'a' is taken"),
        ("[[device", "not TOML"),
        ("device = [1]", r"device 1: 1 is no \[\[device\]\] table"),
        ("[[device]]\nuuid = ''\ntotal_mb = 5", "uuid = '' must be 1 to 200 printable"),
        ('[[device]]\nuuid = "a\\u001b[2J"\ntotal_mb = 5', "must be 1 to 200 printable"),
        ('[[device]]\nuuid = "a"\nname = "\\u009b"\ntotal_mb = 5', "name = .* printable"),
        (f"[[device]]\nuuid = '{'a' * 201}'\ntotal_mb = 5", "must be 1 to 200 printable"),
        (f"[[device]]\nuuid = 'a'\ntotal_mb = {'9' * 400}", "total_mb = 999.* must be 1 to"),
        (f"[[device]]\nuuid = 'a'\ntotal_mb = {'9' * 5000}", "not TOML"),
        (
            "[[device]]\nuuid = 'a'\ntotal_mb = 5\nused_by_others_mb = -1",
            "used_by_others_mb = -1 must be 0 to",
        ),
        (
            "[[device]]\nuuid = 'a'\ntotal_mb = 5\nprocesses = [{ pid = 4, used_mb = -3 }]",
            "used_mb of a process = -3 must be 0 to",
        ),
        ("[[device]]\nuuid = 'a'\ntotal_mb = 5\nprocesses = [{ pid = 0 }]", "pid = 0 is no process's"),
        ("[[device]]\nuuid = 'a'\ntotal_mb = 5\nprocesses = [{ pid = -4 }]", "pid = -4 is no process's"),
        ("x = " + "[" * 100_000, "not TOML"),
        ("#" * (MAX_TOML + 1), "larger than 256 KiB"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_devices_file_is_one_line_naming_it(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "d.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message) as error:
        SimulatedDevices(path)
    assert str(path) in str(error.value)
    assert len(str(error.value)) < 400
    assert str(error.value).isprintable()


@pytest.mark.parametrize("kind", ["fifo", "directory", "device"])
def test_a_devices_file_that_is_no_file_is_one_line_and_nothing_waits_for_it(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "d.toml"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path = Path("/dev/zero")
    # In a process of its own, which can be killed: opening a pipe waits for its writer for ever.
    with child(lambda say, wait: say(str(SimulatedDevices(path).devices()))) as one:
        assert one.line(20) == f"UsageError: GSHARE_DEVICES: {path}: no regular file"


def test_a_devices_file_that_became_a_pipe_is_one_line(tmp_path: Path) -> None:
    path = write_devices(tmp_path / "d.toml", device())
    source = SimulatedDevices(path)
    path.unlink()
    os.mkfifo(path)
    with child(lambda say, wait: say(str(source.devices()))) as one:
        assert one.line(20).endswith("d.toml: no regular file")


def test_a_missing_devices_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"GSHARE_DEVICES: .*none\.toml: No such file"):
        SimulatedDevices(tmp_path / "none.toml")
