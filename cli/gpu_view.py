"""How `gshare gpu status` looks on a terminal."""

from __future__ import annotations

from gshare.agent.vram.budget import show_mb
from gshare.agent.vram.status import DeviceStatus, ReservationStatus, Status, WaiterStatus
from rich.console import Console
from rich.text import Text


def render(status: Status, *, clear: bool = False, console: Console | None = None) -> None:
    """Print the whole status; with `clear` on an empty screen. Text only: names may hold brackets."""
    console = console if console is not None else Console(highlight=False, soft_wrap=True)
    if clear:
        console.clear()
    for text in lines(status):
        console.print(text)


def lines(status: Status) -> list[Text]:
    """The status, one line each."""
    found = [Text(f"ledger {status.ledger}", "dim")]
    if status.note:
        found.append(Text(f"no GPU: {status.note}", "yellow"))
    for device in status.devices:
        found.extend(_device(device))
    for orphan in status.orphans:
        found.append(Text("on a device that is not here: ", "yellow") + _reservation(orphan))
    for damaged in status.damaged:
        where = damaged.gpu_uuid or "every device"
        known = damaged.gpu_uuid is not None and damaged.counted_mb is not None
        counts = f"counts {show_mb(damaged.counted_mb or 0)}" if known else "blocks"
        text = f"damaged row {damaged.name}: {damaged.reason}; {counts} on {where} until gshare gpu repair"
        found.append(Text(text, "bold red"))
    return found


def _device(device: DeviceStatus) -> list[Text]:
    kind = device.memory_type + (", MIG" if device.mig else "")
    head = Text(f"{device.uuid}: {device.name} ", "bold")
    found = [head.append(f"({_amount(device.total_mb)}, {kind})", "not bold")]
    if device.state != "ok":
        found.append(Text(f"  {device.state}: {device.problem}", "bold red"))
    found.append(Text(f"  Reserve factor: {device.reserve_factor:.0%}"))
    processes = "N/A" if device.processes is None else str(device.processes)
    found.append(Text(f"  Processes: {processes}"))
    share = ""
    if device.total_mb and device.used_mb is not None:
        share = f" ({device.used_mb / device.total_mb:.0%})"
    found.append(Text(f"  VRAM: {_amount(device.used_mb)} / {_amount(device.total_mb)}{share}"))
    if device.outside_mb:
        found.append(Text(f"  Outside the ledger: {show_mb(device.outside_mb)}", "yellow"))
    if device.reservations:
        found.append(Text("  Reservations:"))
        found.extend(Text("    ") + _reservation(row) for row in device.reservations)
    if device.queue:
        found.append(Text("  Queue:"))
        found.extend(Text("    ") + _waiter(waiter) for waiter in device.queue)
    ledger, driver = _amount(device.available_ledger_mb), _amount(device.available_driver_mb)
    found.append(Text(f"  Available for new jobs: {ledger} (ledger) / {driver} (driver)"))
    return found


def _reservation(row: ReservationStatus) -> Text:
    who = f"PID {row.pid}" if row.pid else "no process"
    text = Text(f"{row.id}  {who} {row.user}: {show_mb(row.budget_mb)} budget / {show_mb(row.peak_mb)} peak ")
    text.append(f"({row.task})")
    text.append(f", {show_age(row.age_s)}")
    if row.lease_left_s is not None:
        text.append(f", ends in {show_age(row.lease_left_s)}")
    for client in row.clients:
        text.append(f"; {client.name} {show_mb(client.budget_mb)}")
    if row.lingering:
        text.append("; dead, its memory is not free yet", "yellow")
    return text


def _waiter(waiter: WaiterStatus) -> Text:
    text = Text(f"{waiter.position}. PID {waiter.pid} {waiter.user}: {show_mb(waiter.request_mb)} ")
    passed = f", passed {waiter.passed} times" if waiter.passed else ""
    return text.append(f"({waiter.task}), waits {show_age(waiter.waited_s)}{passed}: {waiter.reason}")


def _amount(mb: int | None) -> str:
    return "N/A" if mb is None else show_mb(mb)


def show_age(seconds: float | None) -> str:
    """Seconds for people.

    >>> show_age(8100), show_age(75), show_age(None)
    ('2h 15m', '1m 15s', 'before the last boot')
    """
    if seconds is None:
        return "before the last boot"
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {rest}s" if minutes else f"{rest}s"
