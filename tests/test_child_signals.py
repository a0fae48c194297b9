"""Tests started with signals ignored (nohup, `&`) still start processes that a signal can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from child_signals import INTERRUPTING

SUPPORT = Path(__file__).parent / "support"

#: Ignores what nohup and `&` ignore, perhaps undoes it, and says what a child of it then ignores.
PARENT = """
import signal, subprocess, sys
sys.path.insert(0, {support!r})
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
{undo}
ask = (
    "import signal;"
    "print(*(s.name for s in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)"
    " if signal.getsignal(s) is signal.SIG_IGN))"
)
subprocess.run([sys.executable, "-c", ask], check=True)
for number in (signal.SIGINT, signal.SIGHUP):
    signal.raise_signal(number)
print("the parent lives")
"""


@pytest.mark.parametrize(
    ("undo", "ignored"),
    [
        ("from child_signals import undo_ignoring; undo_ignoring()", ""),
        ("", "SIGINT SIGHUP SIGQUIT"),  # the control: what is ignored is inherited
    ],
)
def test_children_do_not_inherit_what_is_ignored_and_the_parent_still_ignores_it(
    undo: str, ignored: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PARENT.format(support=str(SUPPORT), undo=undo)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == [ignored, "the parent lives"]


def test_these_tests_run_with_nothing_ignored() -> None:
    """`conftest.py` has done it: this fails under nohup when it has not."""
    assert [number for number in INTERRUPTING if signal.getsignal(number) is signal.SIG_IGN] == []
    status = Path(f"/proc/{os.getpid()}/status").read_text(encoding="ascii")
    (mask,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn:"))
    assert [number.name for number in INTERRUPTING if mask >> (number - 1) & 1] == []
