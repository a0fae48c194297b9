"""Events from before we came: lines of the journal, which change nothing of what is shown."""

from __future__ import annotations

from typing import Any

from gshare.agent.jobs.events import CheckpointSaved, Evaluated, Event, JobChanged, Stepped
from gshare.tui.frames import Message


def past_message(event: Event, moment: dict[str, Any], *, job: str = "", node: str = "") -> Message:
    """`moment`: the frame's `time` and `received`; `job`: the key, when it is another than the name."""
    about = {**moment, "job": job or event.job, "node": node}
    if isinstance(event, JobChanged):
        level = "error" if event.state in ("failed", "diverged") else "info"
        text = f"{event.state}: {event.reason}" if event.reason else event.state
        return Message(**about, level=level, kind="job", text=text)
    if isinstance(event, Evaluated):
        mark = ", the best so far" if event.best else ""
        text = f"val loss {event.val_loss:.4f} at step {event.step}{mark}"
        return Message(**about, level="info", kind="eval", text=text)
    if isinstance(event, CheckpointSaved):
        return Message(
            **about, level="info", kind="checkpoint", text=f"saved a checkpoint of step {event.step}"
        )
    assert not isinstance(event, Stepped), "samples are not kept"
    return Message(**about, level=event.level, text=event.text)
