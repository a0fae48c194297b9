"""Every interleaving of lock, read, write, unlock and crash of three processes, on the real decision.

The model has the ledger's own order of steps (`Ledger.reserve`): take the lock, read the rows, decide, make
the proof of life, write the row, unlock. A crash may come before any step; it frees the lock and the proof of
life. With the lock left out the same search finds an over-commit, so it can fail.
"""

from __future__ import annotations

from typing import NamedTuple

from gshare.agent.vram.machine import Admit, Claim, DeviceState, Request, decide

GPU = "GPU-a"
DEVICE = DeviceState(uuid=GPU, total_mb=100, outside_mb=0, reserve_factor=0.85)
BUDGET = 40  # two fit below 85, three do not

START, LOCKED, DECIDED_YES, DECIDED_NO, ALIVE, WRITTEN, HOLDING, DONE, DEAD = range(9)


class State(NamedTuple):
    """Where each process is, who has the lock, which life files are held, which rows are on disk."""

    at: tuple[int, ...]
    lock: int | None
    lives: frozenset[int]
    rows: frozenset[int]


def decision(state: State) -> int:
    """What a process decides on what it reads: rows whose holder is dead do not count."""
    claims = [Claim(id=str(row), gpu_uuid=GPU, mb=BUDGET) for row in sorted(state.rows & state.lives)]
    answer = decide(claims, [], DEVICE, Request(mb=BUDGET))
    return DECIDED_YES if isinstance(answer, Admit) else DECIDED_NO


def steps(state: State, process: int, *, with_lock: bool) -> list[State]:
    """Every state that one step of `process` may lead to."""
    here = state.at[process]

    def to(where: int, **changes: object) -> State:
        at = tuple(where if number == process else old for number, old in enumerate(state.at))
        return state._replace(at=at, **changes)  # pyright: ignore[reportArgumentType]

    if here in (DONE, DEAD):
        return []
    after: list[State] = []
    unlocked = {"lock": None if state.lock == process else state.lock}
    if here == START:
        if not with_lock:
            after.append(to(LOCKED))
        elif state.lock is None:
            after.append(to(LOCKED, lock=process))
    elif here == LOCKED:  # read, clean the dead out, decide
        cleaned = state.rows & state.lives
        after.append(to(decision(state), rows=cleaned))
    elif here == DECIDED_YES:
        after.append(to(ALIVE, lives=state.lives | {process}))
    elif here == DECIDED_NO:
        after.append(to(DONE, **unlocked))
    elif here == ALIVE:
        after.append(to(WRITTEN, rows=state.rows | {process}))
    elif here == WRITTEN:
        after.append(to(HOLDING, **unlocked))
    elif here == HOLDING:  # release: the row, then the life
        after.append(to(DONE, rows=state.rows - {process}, lives=state.lives - {process}))
    after.append(to(DEAD, lives=state.lives - {process}, **unlocked))  # SIGKILL
    return after


def explore(*, with_lock: bool) -> tuple[int, list[State]]:
    """(states seen, those in which more is held than the device may hand out)."""
    first = State((START,) * 3, None, frozenset(), frozenset())
    seen, todo = {first}, [first]
    broken = []
    while todo:
        state = todo.pop()
        if sum(at == HOLDING for at in state.at) * BUDGET > DEVICE.usable_mb:
            broken.append(state)
        for process in range(3):
            for after in steps(state, process, with_lock=with_lock):
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
    return len(seen), broken


def test_no_interleaving_over_commits() -> None:
    seen, broken = explore(with_lock=True)
    assert not broken
    assert seen > 300  # the search went somewhere


def test_without_the_lock_one_does() -> None:
    _, broken = explore(with_lock=False)
    assert broken


def test_no_interleaving_leaves_a_live_holder_without_a_row_or_the_lock_with_the_dead() -> None:
    first = State((START,) * 3, None, frozenset(), frozenset())
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        for process, at in enumerate(state.at):
            assert at != HOLDING or process in state.rows & state.lives
            assert at != DEAD or (state.lock != process and process not in state.lives)
        for process in range(3):
            for after in steps(state, process, with_lock=True):
                if after not in seen:
                    seen.add(after)
                    todo.append(after)


def test_some_interleaving_has_two_holders_and_some_refuses_the_third() -> None:
    """Else "nothing over-committed" could be had by admitting nobody."""
    first = State((START,) * 3, None, frozenset(), frozenset())
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        for process in range(3):
            for after in steps(state, process, with_lock=True):
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
    assert any(state.at.count(HOLDING) == 2 for state in seen)
    assert any(state.at.count(HOLDING) == 2 and DECIDED_NO in state.at for state in seen)
