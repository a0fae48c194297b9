"""`gshare audit`: train the same jobs packed and one by one, and compare them byte for byte.

    gshare audit --adapters-config adapters.toml [--max-steps 8] [--join NAME@STEP] [--json]

Exit 0 only when every loss, gradient norm, validation loss, adapter and optimizer byte is identical, and
the packed run really had more than one adapter in a pass. The runs go to a temporary directory; the
adapters' own output directories are not touched.
"""

from __future__ import annotations

import json as json_module
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from gshare.agent.data.prepare import run_estimate
from gshare.agent.errors import EXIT_FAILURE, EXIT_OK, UsageError
from gshare.agent.jobs.events import Event, Stepped
from gshare.agent.jobs.spec import RunSpec
from gshare.cli.finetune_flags import AdapterFlags, ReserveFlags, RunFlags, given
from gshare.cli.gpu_hold import hold_gpu, say
from gshare.cli.gpu_plan import plan_gpu
from gshare.cli.prepare import prepare, read_spec
from gshare.cli.streams import stderr_console
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from gshare.agent.train.audit import AuditReport

#: Test hook, the negative control: "1" makes large products split K, so that the audit must fail.
INEXACT_VARIABLE = "GSHARE_TEST_INEXACT"

_NO_RUN_FLAGS = RunFlags()
_NO_ADAPTER_FLAGS = AdapterFlags()
_NO_GPU_FLAGS = ReserveFlags()


def audit(
    *,
    model: str | None = None,
    adapter: Annotated[Sequence[str], Parameter(negative=())] = (),
    adapters_config: Annotated[Path | None, Parameter(name=["--adapters-config", "--adapters"])] = None,
    join: Annotated[Sequence[str], Parameter(negative=())] = (),
    json: Annotated[bool, Parameter(negative=())] = False,
    keep: Path | None = None,
    device: str = "auto",
    run_flags: RunFlags = _NO_RUN_FLAGS,
    adapter_flags: AdapterFlags = _NO_ADAPTER_FLAGS,
    gpu_flags: ReserveFlags = _NO_GPU_FLAGS,
) -> int:
    """Train packed and alone, and compare byte for byte.

    Parameters
    ----------
    model
        The base, as for finetune.
    adapter
        DATA:OUT or NAME=DATA:OUT, as for finetune; OUT is not written.
    adapters_config
        A TOML file with the whole run; flags go over what it says.
    join
        NAME@STEP: this adapter joins the packed run only after STEP rounds.
    json
        The whole report on stdout: per-step losses, hashes, what differs.
    keep
        A new directory to keep both runs in; by default they are deleted.
    device
        auto, cpu, cuda or cuda:N.
    """
    run = read_spec(model, adapter, adapters_config, given(run_flags, adapter_flags))
    if len(run.adapters) < 2:
        raise UsageError(
            f"{run.source}: an audit compares packed with alone, so it needs two adapters or more"
        )
    joins = _joins(join, run)
    if keep is not None and keep.exists():
        raise UsageError(f"--keep {keep}: exists already; choose a new directory")
    plan = plan_gpu(gpu_flags, device)
    from gshare.agent.service.environment import trainer_environment

    os.environ.update(trainer_environment())
    console = stderr_console()
    model_dir, requests = prepare(run, console, resume=False)
    cards = plan.cards if plan is not None else ()
    estimate = partial(run_estimate, run, model_dir, requests, on_gpu=plan is not None, cards=cards)
    task = f"audit {', '.join(spec.name for spec in run.adapters)}"
    inexact = os.environ.get(INEXACT_VARIABLE) == "1"
    with ExitStack() as stack:
        held = stack.enter_context(hold_gpu(plan, estimate, task, flags=gpu_flags, device=device))
        from gshare.agent.base.device import pick_device
        from gshare.agent.train.audit import audit as compare
        from gshare.agent.train.gpu_guard import make_guard
        from gshare.kernels.backend import pick_backend

        where = pick_device(held.device)
        guard = make_guard(held.reservation, asked=held.device, where=where, may_grow=held.may_grow, say=say)
        directory = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gshare-audit-")))
        status = stack.enter_context(console.status(Text("loading the base")))

        def progress(arm: str, event: Event) -> None:
            if isinstance(event, Stepped):
                status.update(Text(f"{arm}: {event.job} step {event.step}/{event.total_steps}"))

        report = compare(
            run,
            requests,
            model_dir=model_dir,
            device=where,
            guard=guard,
            backend_factory=lambda: pick_backend(where, exact=not inexact),
            directory=directory,
            joins=joins,
            on_progress=progress,
        )
    if json:
        print(json_module.dumps(report.to_json()))
    else:
        _show(report)
    return EXIT_OK if report.passed else EXIT_FAILURE


def _joins(texts: Sequence[str], run: RunSpec) -> dict[str, int]:
    names = {spec.name for spec in run.adapters}
    joins: dict[str, int] = {}
    for text in texts:
        name, _, step = text.rpartition("@")
        if name not in names or not step.isdecimal():
            raise UsageError(f"--join {text}: give NAME@STEP with one of {', '.join(sorted(names))}")
        joins[name] = int(step)
    if len(joins) == len(names):
        raise UsageError("--join: at least one adapter must be there from the start")
    return joins


def _show(report: AuditReport) -> None:
    table = Table(title="packed against alone")
    for heading in ("adapter", "steps", "adapters in a pass", "adapter sha256", "verdict"):
        table.add_column(heading)
    for name, trace in report.packed.items():
        differences = report.differences[name]
        table.add_row(
            Text(name),
            str(len(trace.losses)),
            f"{min(trace.adapters_in_pass)}–{max(trace.adapters_in_pass)}",
            trace.adapter_sha256[:16],
            Text("identical" if not differences else "; ".join(differences)),
        )
    Console().print(table)
    if not report.packed_for_real:
        print("FAILED: no pass ever held two adapters, so this proves nothing", file=sys.stderr)
    elif report.identical:
        print(f"identical: {len(report.packed)} adapters, up to {report.most_adapters} in a pass")
    else:
        print("FAILED: packed and alone differ", file=sys.stderr)
