"""`gshare doctor`: what this machine has and lacks, and how to mend it.

    gshare doctor [--json] [--out DIR]

The report goes to stdout. Exit code 0 when training is possible here (on the CPU counts), else 1. Nothing
is asked of the network.
"""

from __future__ import annotations

import json as json_module
import os
from pathlib import Path
from typing import Annotated

import pynvml
from cyclopts import Parameter
from gshare.agent.errors import EXIT_FAILURE, EXIT_OK
from gshare.agent.xdg import cache_dir, xdg_dir
from gshare.cli.doctor_checks import (
    Check,
    check_directory,
    check_gpus,
    check_hub,
    check_libraries,
    check_machine,
    check_python,
    check_ssh,
    run_probe,
)
from rich.console import Console
from rich.text import Text

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    *,
    json: Annotated[bool, Parameter(negative=())] = False,
    out: Path = Path(),
) -> int:
    """What this machine has and lacks, and how to mend it.

    Parameters
    ----------
    json
        Print one JSON object instead of the report.
    out
        Where adapters will be written; its free space is looked at.
    """
    checks = examine(out)
    possible = all(check.status != "fail" for check in checks)
    if json:
        print(json_module.dumps({"training_possible": possible, "checks": [c.as_dict() for c in checks]}))
    else:
        render(checks, possible, Console(highlight=False))
    return EXIT_OK if possible else EXIT_FAILURE


def examine(out: Path) -> list[Check]:
    """Every check, in the order of the report. Takes as long as importing torch does."""
    probe = run_probe()
    return [
        check_python(),
        *check_machine(),
        *check_libraries(probe),
        *check_gpus(probe["torch"], pynvml),
        check_directory("output", out.absolute()),
        check_directory("cache", cache_dir()),
        check_directory("state", xdg_dir("XDG_STATE_HOME", ".local/state"), needs_disk=False),
        check_directory("runtime", runtime_parent(), needs_disk=False),
        check_hub(),
        check_ssh(),
    ]


def runtime_parent() -> Path:
    """Where trainers' sockets go: `$XDG_RUNTIME_DIR`, else /tmp."""
    value = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(value) if os.path.isabs(value) and os.path.isdir(value) else Path("/tmp")


def render(checks: list[Check], possible: bool, console: Console) -> None:
    """One line a check, and one for what to do about it. Names are text, never markup."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        line = Text.assemble(
            (f"{check.status:<5}", STYLES[check.status]), f"{check.name:<{width}}  ", check.found
        )
        console.print(line, soft_wrap=True)
        if check.mend:
            console.print(Text(" " * (5 + width + 2) + "→ " + check.mend), soft_wrap=True)
    end = "Training is possible here." if possible else "Training is not possible here yet: see `fail` above."
    console.print(Text(end), soft_wrap=True)
