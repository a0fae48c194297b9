"""What can be done to jobs and reservations: the question before it, and what is said after it."""

from __future__ import annotations

from gshare.agent.errors import GshareError
from gshare.tui.frames import ENDED
from gshare.tui.source import ActionName, Source

#: Action → (what is asked, what it means).
QUESTIONS: dict[str, tuple[str, str]] = {
    "stop": ("Stop", "It writes a checkpoint and ends; resuming goes on from there."),
    "pause": ("Pause", "It makes no steps until it is resumed."),
    "resume": ("Resume", ""),
    "release": (
        "Release",
        "Its memory counts as free at once: a program that still uses it can run others out of memory.",
    ),
}
_THINGS = {"release": ("reservation", "reservations")}
#: What an action has done to its targets.
DONE = {"stop": "stopped", "pause": "paused", "resume": "resumed", "release": "released"}
#: States that an action changes nothing of. Whatever else forbids it, the source says.
_NOT_IN: dict[str, frozenset[str]] = {
    "stop": ENDED | {"publishing", "placing"},
    "pause": ENDED | {"publishing", "placing", "paused"},
    "resume": frozenset(
        {"completed", "diverged", "publishing", "placing", "waiting", "queued", "starting", "running"}
    ),
}


def can_be(action: ActionName, state: str) -> bool:
    """Whether the action means anything to a job in that state.

    >>> can_be("resume", "paused"), can_be("resume", "stopped"), can_be("resume", "running")
    (True, True, False)
    """
    return state not in _NOT_IN[action]


def question(action: ActionName, count: int) -> tuple[str, str]:
    """(title, warning) of the dialog."""
    word, warning = QUESTIONS[action]
    one, many = _THINGS.get(action, ("adapter", "adapters"))
    return f"{word} {count} {one if count == 1 else many}?", warning


def refusal(source: Source, action: ActionName, read_only: bool) -> str:
    """Why it cannot even be asked; empty: it can."""
    if read_only:
        return f"--read-only: this dashboard does not {action} anything"
    if action not in source.can:
        return f"{source.title or 'this source'} cannot {action} anything"
    return ""


async def carry_out(
    source: Source, action: ActionName, targets: list[str], names: list[str]
) -> tuple[str, list[str]]:
    """(what was done, what failed and why); the first is empty when nothing was."""
    try:
        failed = await source.act(action, targets)
    except GshareError as error:
        return "", [f"could not {action} {', '.join(names)}: {error}"]
    called = dict(zip(targets, names, strict=True))
    done = [name for target, name in called.items() if target not in failed]
    problems = [f"could not {action} {called.get(target, target)}: {why}" for target, why in failed.items()]
    return f"{DONE[action]} {', '.join(done)}" if done else "", problems
