"""An event as one line for people: for logs and for terminals without a live table."""

from __future__ import annotations

from gshare.agent.jobs.events import CheckpointSaved, Evaluated, Event, JobChanged, Stepped, TrainerMessage


def describe(event: Event) -> str:
    """What happened to which job, at which step."""
    if isinstance(event, TrainerMessage):
        level = "" if event.level == "info" else f"{event.level}: "
        return f"{event.job}: {level}{event.text}" if event.job else f"{level}{event.text}"
    if isinstance(event, JobChanged):
        line = f"{event.job}: {event.state}"
        if event.total_steps:
            line += f" at step {event.step} of {event.total_steps}"
        return f"{line}: {event.reason}" if event.reason else line
    if isinstance(event, Stepped):
        shared = f"  trunk {event.trunk_shared:.0%} shared" if event.trunk_shared >= 0.005 else ""
        return f"{event.job}: step {event.step} of {event.total_steps}  loss {event.loss:.4f}{shared}"
    if isinstance(event, Evaluated):
        best = "  (best)" if event.best else ""
        return f"{event.job}: step {event.step}  val loss {event.val_loss:.4f}{best}"
    assert isinstance(event, CheckpointSaved)
    return f"{event.job}: saved {event.path}"
