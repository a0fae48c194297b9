"""Values as a report shows them: what is not known is said in words, or by a sign that is explained."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from gshare.agent.jobs.names import plain, shorten
from gshare.agent.report.model import Run, Samples

UNKNOWN = "-"
#: Where a table uses `UNKNOWN` or "nan".
LEGEND = "- not known, or never evaluated; nan: not a number"

DEVICE_TIME = "device time: of each pass its share, the pass's time ÷ the adapters in it"


def loss_text(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3e}"


def count_text(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def samples_text(value: Samples | None) -> str:
    return UNKNOWN if value is None else f"{'' if value.exact else '≤ '}{value.count:,}"


def steps_text(run: Run) -> str:
    total = "?" if run.total_steps is None else count_text(run.total_steps)
    return f"{count_text(run.steps)}/{total}"


def seconds_text(value: float | None) -> str:
    """Seconds, from a minute on h:mm:ss or m:ss."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def time_text(value: float | None) -> str:
    """Local time; what is no time (a damaged file) is not known."""
    try:
        return UNKNOWN if value is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def hyper_text(key: str, value: Any) -> str:
    """A hyper-parameter's value on a line; of a data file its name."""
    if value is None:
        return UNKNOWN
    if key in ("data", "val_data"):
        return plain(Path(str(value)).name)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return plain(",".join(map(str, value)))
    return plain(str(value)) if isinstance(value, (str, int, bool)) else shorten(value)


def why_text(run: Run) -> str:
    """Why it ended: the pattern, and what was written down."""
    if run.pattern and run.reason and not run.reason.startswith(run.pattern):
        return plain(f"{run.pattern}: {run.reason}")
    return plain(run.reason or run.pattern)


def evidence_text(run: Run) -> str:
    """`name value` of each number that the decision follows from."""
    return plain(", ".join(f"{name} {_value(value)}" for name, value in run.evidence.items()))


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + " ".join(_value(one) for one in value) + "]"
    return "not known" if value is None else str(value)
