"""`gshare gpu`: who has reserved which device's memory, and any program under a reservation.

    gshare gpu status [--json] [--watch]
    gshare gpu run --vram 8 [--gpu UUID] [--strict] [--no-wait-gpu] [--timeout 1h] -- PROGRAM …
    gshare gpu hold --vram 8 --for 2h [--pid PID]      gshare gpu hold --renew ID --for 2h
    gshare gpu release ID
    gshare gpu repair
    gshare gpu trace RUN [--export trace.json]

`--vram 8` is GiB; 8GiB and 8000MiB are understood too. GSHARE_DEVICES names a file of simulated devices.
A gshare inside `gpu run` uses its reservation (agent/vram/inherit.py).
"""

from __future__ import annotations

import shlex
import sys
import time
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from gshare.agent.errors import EXIT_FAILURE, EXIT_OK, GshareError, UsageError
from gshare.agent.jobs.names import plain
from gshare.agent.vram.budget import parse_budget, parse_duration
from gshare.agent.vram.clock import start_ticks
from gshare.agent.vram.devices import Device
from gshare.agent.vram.guard import WAIT_SECONDS, candidates, reserve
from gshare.agent.vram.identify import find_devices
from gshare.agent.vram.ledger import Grant, Ledger, Wanted
from gshare.agent.vram.owners import RESERVATION_VARIABLE
from gshare.agent.vram.queue import Announcer, wait_for
from gshare.agent.vram.repair import repair as repair_ledger
from gshare.agent.vram.status import status as read_status
from gshare.agent.vram.watch import run_program
from gshare.cli.gpu_view import render
from gshare.cli.streams import ClosedStream, say

app = App(name="gpu", help="Who has reserved which GPU's memory; any program under a reservation.")
app.command("gshare.cli.gpu_trace:trace", name="trace", help="Where a run's time went; what sharing cost.")

#: `--watch` looks this often (seconds).
WATCH_S = 1.0
#: A task is one line in other users' status.
MAX_TASK = 80

Flag = Annotated[bool, Parameter(negative=())]


@app.command
def status(*, json: Flag = False, watch: Flag = False) -> None:
    """Devices, reservations and the queue.

    Parameters
    ----------
    json
        Print one JSON object instead; with --watch one a line.
    watch
        Look again every second until interrupted.
    """
    ledger = Ledger()
    while True:
        now = read_status(ledger)
        if json:
            print(msgspec.json.encode(now).decode(), flush=True)
        else:
            render(now, clear=watch)
        if not watch:
            return
        time.sleep(WATCH_S)


@app.command
def run(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    vram: str,
    gpu: Annotated[str | None, Parameter(alias="--gpus")] = None,
    strict: Flag = False,
    wait_gpu: Annotated[bool, Parameter(negative="--no-wait-gpu")] = True,
    timeout: str | None = None,
    task: str | None = None,
) -> int:
    """Run a program under a reservation; CUDA_VISIBLE_DEVICES names its GPU by UUID.

    The program is watched, not capped: a warning says when it uses more than was reserved.

    Parameters
    ----------
    command
        The program and its arguments, after `--`.
    vram
        Memory to reserve: 8 (GiB), 8GiB, 8000MiB.
    gpu
        The GPUs it may run on, by UUID, the beginning of one, or index; the emptiest is taken.
    strict
        Stop the program when it uses more than was reserved.
    wait_gpu
        Wait in the queue when it does not fit now; --no-wait-gpu exits with 75 instead.
    timeout
        How long to wait: 90 (seconds), 30m, 1h.
    task
        What other users see; the command by default.
    """
    if not command:
        raise UsageError(
            "gpu run: no program; write it after --, as in: gshare gpu run --vram 8 -- python train.py"
        )
    budget = parse_budget(vram)
    seconds = _patience(timeout, wait_gpu)
    ledger = Ledger()
    with reserve(
        budget,
        task=_one_line(task if task is not None else shlex.join(command)),
        devices=_devices(ledger, gpu),
        timeout_s=seconds,
        kind="run",
        on_wait=Announcer(say),
        on_warning=say,
        ledger=ledger,
    ) as reservation:
        return run_program(reservation, command, strict=strict, notify=say)


@app.command
def hold(
    *,
    vram: str | None = None,
    lease: Annotated[str, Parameter(name="--for")],
    gpu: Annotated[str | None, Parameter(alias="--gpus")] = None,
    pid: int | None = None,
    renew: str | None = None,
    wait_gpu: Annotated[bool, Parameter(negative="--no-wait-gpu")] = True,
    timeout: str | None = None,
    task: str | None = None,
) -> None:
    """Reserve memory for a while without a process of ours: for a notebook. Prints the reservation's id.

    Parameters
    ----------
    vram
        Memory to reserve: 8 (GiB), 8GiB, 8000MiB.
    lease
        How long: 90 (seconds), 30m, 2h.
    gpu
        The GPUs it may be on, by UUID, the beginning of one, or index.
    pid
        The notebook's process: its memory then counts as the hold's, not a second time.
    renew
        Let the hold of this id run so long from now instead of making one; goes with --for alone.
    wait_gpu
        Wait in the queue when it does not fit now; --no-wait-gpu exits with 75 instead.
    timeout
        How long to wait: 90 (seconds), 30m, 1h.
    task
        What other users see; "hold" by default.
    """
    seconds = parse_duration(lease)
    patience = _patience(timeout, wait_gpu)
    if renew is not None:
        given = {"--vram": vram, "--gpu": gpu, "--pid": pid, "--timeout": timeout, "--task": task}
        others = [flag for flag, value in given.items() if value is not None]
        others += [] if wait_gpu else ["--no-wait-gpu"]
        if others:
            raise UsageError(f"gpu hold: --renew changes the time alone; leave {', '.join(others)} out")
        print(Ledger().renew_lease(renew, seconds).id)
        return
    if vram is None:
        raise UsageError("gpu hold: --vram is missing; write how much, as in --vram 8")
    if pid is not None and start_ticks(pid) is None:
        raise UsageError(f"--pid {pid}: there is no such process")
    if isinstance(sys.stdout, ClosedStream):
        raise GshareError("gpu hold: stdout is closed; the id that it prints is needed to give the hold back")
    ledger = Ledger()
    wanted = Wanted(
        mb=parse_budget(vram),
        devices=candidates(ledger, _devices(ledger, gpu)),
        task=_one_line(task if task is not None else "hold"),
        kind="hold",
        pid=pid or 0,
        lease_s=seconds,
    )
    grant = wait_for(ledger, wanted, timeout_s=patience, on_wait=Announcer(say))
    _print_id(ledger, grant)
    if pid is None:
        say(
            f"start the program with {RESERVATION_VARIABLE}={grant.row.id} "
            f"CUDA_VISIBLE_DEVICES={grant.device.cuda_name or ''}, or its memory counts a second time"
        )


@app.command
def release(id: str) -> None:
    """Give a hold back.

    Parameters
    ----------
    id
        The reservation's id, or the beginning of one.
    """
    row = Ledger().end_lease(id)
    say(f"released {row.id}: {row.budget_mb} MiB on {row.gpu_uuid}")


@app.command
def repair() -> int:
    """Take damaged rows without a living holder out of the count; a copy of each is kept."""
    found = repair_ledger(Ledger())
    for item in found:
        kept = f", kept as {item.kept}" if item.kept else ""
        print(plain(f"{item.name}: {item.reason}: {item.outcome}{kept}"))
    if not found:
        say("nothing to repair")
    return EXIT_OK if all(item.kept for item in found) else EXIT_FAILURE


def _patience(timeout: str | None, wait_gpu: bool) -> float:
    """Seconds to wait for memory, 0 not at all. UsageError for a time to wait and not to wait at once."""
    if timeout is None:
        return WAIT_SECONDS if wait_gpu else 0.0
    if not wait_gpu:
        raise UsageError("--timeout and --no-wait-gpu: give one of them")
    return parse_duration(timeout, what="--timeout")


def _print_id(ledger: Ledger, grant: Grant) -> None:
    """Print the hold's id, or give the hold back: who does not know its id cannot."""
    try:
        print(grant.row.id, flush=True)
    except BaseException as error:
        ledger.release(grant)
        if not isinstance(error, OSError):
            raise
        text = f"gpu hold: its id cannot be printed: {error.strerror}; nothing stays reserved"
        raise GshareError(text) from None


def _devices(ledger: Ledger, text: str | None) -> tuple[Device, ...] | None:
    if text is None:
        return None
    return find_devices(text, ledger.list_devices(), note=ledger.source.note, what="--gpu")


def _one_line(text: str) -> str:
    line = "".join(char if char.isprintable() else " " for char in text)
    return line if len(line) <= MAX_TASK else line[: MAX_TASK - 1] + "…"
