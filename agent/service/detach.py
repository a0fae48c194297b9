"""`gshare finetune --detach`: a supervising client in a session of its own.

    python -m gshare.agent.service.detach --ready-fd N      (its plan comes on stdin)

Everything that can go wrong with the input has been checked in the foreground, data is tokenised; what is
left to do here is to supervise.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec
from gshare.agent.errors import EXIT_RETRY, EXIT_USAGE, GshareError, RetryLater, UsageError
from gshare.agent.jobs.events import Event, Stepped, TrainerMessage
from gshare.agent.jobs.spec import JobRequest
from gshare.agent.service.describe import describe
from gshare.agent.service.log_stream import forgive_output, open_log
from gshare.agent.service.registry import TrainerConfig, above_stdio
from gshare.agent.service.sinks import Sinks
from gshare.agent.service.supervise import StopRequest, Supervisor


class DetachedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a detached client is told on stdin."""

    config: TrainerConfig
    requests: list[JobRequest]
    report_to: list[str] = []
    join: bool = True


def detach(plan: DetachedPlan) -> tuple[int, str]:
    """Starts the client: `(pid, path of its log)`, as soon as its trainer lists its jobs.

    A trainer that reserves GPU memory must have it by then, or a place in the queue. Raises an error with
    the client's exit code when it ends before that.
    """
    log, output, no_log = open_log(f"client-{os.getpid()}-{time.time_ns()}")
    if no_log:
        print(no_log, file=sys.stderr)
    ready, ready_write = map(above_stdio, os.pipe())
    with os.fdopen(ready, "rb") as reader:
        try:
            with output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "gshare.agent.service.detach", "--ready-fd", str(ready_write)],
                    env={**os.environ, "PYTHONSAFEPATH": "1"},
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=(ready_write,),
                )
        finally:
            os.close(ready_write)
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(msgspec.json.encode(plan))
        if not reader.read(1):  # end of file: it is dead
            code = process.wait()
            kind = {EXIT_RETRY: RetryLater, EXIT_USAGE: UsageError}.get(code, GshareError)
            raise kind(f"the detached client ended at once (exit code {code}); its log says why: {log}")
    return process.pid, str(log)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gshare-detached", description=__doc__)
    parser.add_argument(
        "--ready-fd", type=int, required=True, help="gets one byte when the trainer lists the jobs"
    )
    forgive_output()
    ready: list[int] = [parser.parse_args(arguments).ready_fd]
    os.set_inheritable(ready[0], False)
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=DetachedPlan)
    sinks = Sinks(plan.report_to, plan.requests)
    connected = False

    def on_event(event: Event) -> None:
        # The first word of a trainer that reserves: it has its memory, or waits for it. What is said while a
        # trainer is still looked for is none.
        if isinstance(event, TrainerMessage) and event.level != "error" and (connected or supervisor.asking):
            tell_ready()
        sinks.take(event)
        if not isinstance(event, Stepped):  # those are in metrics.jsonl
            print(time.strftime("%H:%M:%S"), describe(event), flush=True)

    def on_connected() -> None:
        nonlocal connected
        connected = True
        if plan.config.gpu is None or supervisor.joined:
            tell_ready()

    def tell_ready() -> None:
        if ready:  # once: a later trainer is a new one after a crash
            fd = ready.pop()
            os.write(fd, b"1")
            os.close(fd)

    try:
        with StopRequest().listening() as stop:
            supervisor = Supervisor(
                config=plan.config,
                requests=plan.requests,
                on_event=on_event,
                on_connected=on_connected,
                stop=stop,
                join=plan.join,
            )
            return supervisor.run()
    except GshareError as error:
        print(error, flush=True)
        return error.exit_code
    finally:
        sinks.close()


if __name__ == "__main__":
    sys.exit(main())
