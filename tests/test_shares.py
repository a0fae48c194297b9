"""Clients of one trainer: the same share of tokens when they do not fit into one pass, fused when they do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from gshare.agent.jobs.schedules import JobView, RoundRobin, Schedule, Synchronized, make_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

SHARED = ["synchronized", "round_robin", "priority_val_loss"]
Jobs = dict[str, tuple[str, int]]  # name: (client, tokens of a step)


def views(jobs: Jobs, losses: dict[str, float] | None = None) -> list[JobView]:
    return [
        JobView(name, client, 1.0, order, 0, tokens, (losses or {}).get(name))
        for order, (name, (client, tokens)) in enumerate(jobs.items())
    ]


def serve(
    schedule: Schedule, jobs: Jobs, rounds: int, *, max_tokens: int = 1000, max_adapters: int = 0
) -> dict[str, int]:
    """Tokens that each client was served."""
    served, _ = watch(schedule, jobs, rounds, max_tokens=max_tokens, max_adapters=max_adapters)
    return served


def watch(
    schedule: Schedule, jobs: Jobs, rounds: int, *, max_tokens: int, max_adapters: int
) -> tuple[dict[str, int], set[str]]:
    """Tokens that each client was served, and who was left out of a round."""
    served = dict.fromkeys((client for client, _ in jobs.values()), 0)
    left_out: set[str] = set()
    for _ in range(rounds):
        chosen = schedule.next_round(views(jobs), max_tokens=max_tokens, max_adapters=max_adapters)
        for name in chosen:
            client, tokens = jobs[name]
            schedule.ran(name, tokens)
            served[client] += tokens
        left_out |= served.keys() - {jobs[name][0] for name in chosen}
    return served, left_out


clients = st.sampled_from("xyz")
some_jobs = st.lists(st.tuples(clients, st.integers(1, 900)), min_size=2, max_size=8).map(
    lambda drawn: {f"j{i}": job for i, job in enumerate(drawn)}
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SHARED), some_jobs, st.integers(0, 2))
def test_who_is_left_out_waits_for_two_of_the_largest_rounds_at_most(
    name: str, jobs: Jobs, most: int
) -> None:
    own = tokens_by_client(jobs)
    single = max(tokens for _, tokens in jobs.values())
    largest = {"priority_val_loss": single, "synchronized": max(own.values())}.get(
        name, min(1000, max(own.values()))
    )
    assert longest_wait(make_schedule(name), jobs, max_adapters=most) <= 2 * largest


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SHARED), some_jobs)
def test_clients_whose_rounds_never_fit_together_get_the_same_tokens(name: str, jobs: Jobs) -> None:
    own = tokens_by_client(jobs)
    served, _ = watch(make_schedule(name), jobs, 200, max_tokens=1000, max_adapters=1)
    largest = max(own.values()) if name == "synchronized" else max(tokens for _, tokens in jobs.values())
    assert max(served.values()) - min(served.values()) <= largest


def test_the_control_without_turns_one_client_waits_for_ever() -> None:
    jobs = {"a": ("A", 600), "b": ("B", 600)}

    class First(RoundRobin):
        def next_round(self, jobs: Sequence[JobView], *, max_tokens: int, max_adapters: int) -> list[str]:
            return [jobs[0].name]

    assert longest_wait(First(), jobs, max_adapters=0) == 600 * 120


def tokens_by_client(jobs: Jobs) -> dict[str, int]:
    return {c: sum(t for client, t in jobs.values() if client == c) for c, _ in jobs.values()}


def longest_wait(schedule: Schedule, jobs: Jobs, *, max_adapters: int) -> int:
    """The most tokens that one client was served in 120 rounds while another was left out of all of them."""
    clients = {client for client, _ in jobs.values()}
    since = {client: dict.fromkeys(clients, 0) for client in clients}
    longest = 0
    for _ in range(120):
        ran = dict.fromkeys(clients, 0)
        for name in schedule.next_round(views(jobs), max_tokens=1000, max_adapters=max_adapters):
            client, tokens = jobs[name]
            schedule.ran(name, tokens)
            ran[client] += tokens
        for client in clients:
            if ran[client]:
                since[client] = dict.fromkeys(clients, 0)
            else:
                since[client] = {other: since[client][other] + ran[other] for other in clients}
                longest = max(longest, *since[client].values())
    return longest


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["synchronized", "round_robin"]), some_jobs)
def test_what_fits_into_one_pass_runs_fused_as_if_it_were_one_clients(name: str, jobs: Jobs) -> None:
    plain: Schedule = Synchronized() if name == "synchronized" else RoundRobin()
    shared = make_schedule(name)
    everything = sum(tokens for _, tokens in jobs.values())
    for _ in range(3):
        chosen = shared.next_round(views(jobs), max_tokens=everything, max_adapters=0)
        assert chosen == list(jobs)
        assert set(chosen) == set(plain.next_round(views(jobs), max_tokens=everything, max_adapters=0))
        for job in chosen:
            shared.ran(job, jobs[job][1])


def test_the_control_without_shares_one_with_many_jobs_gets_most() -> None:
    jobs = {**{f"a{i}": ("A", 500) for i in range(6)}, "b": ("B", 500)}
    alone = serve(RoundRobin(), jobs, 210)
    assert alone["A"] == pytest.approx(6 * alone["B"], rel=0.05)
    shared = serve(make_schedule("round_robin"), jobs, 210)
    assert abs(shared["A"] - shared["B"]) <= 1000


def test_what_was_served_while_all_fitted_is_nobodys_debt() -> None:
    schedule = make_schedule("synchronized")
    little = {"a": ("A", 900), "b": ("B", 10)}
    serve(schedule, little, 100)
    crowded = {"a": ("A", 900), "b": ("B", 900)}
    served = serve(schedule, crowded, 10)
    assert served == {"A": 4500, "B": 4500}


def test_a_client_whose_steps_are_short_gathers_no_credit_while_it_takes_part() -> None:
    schedule = make_schedule("synchronized")
    serve(schedule, {"a": ("A", 900), "b": ("B", 900), "c": ("C", 1)}, 100)
    grown = serve(schedule, {"a": ("A", 900), "b": ("B", 900), "c": ("C", 900)}, 30)
    assert max(grown.values()) - min(grown.values()) <= 900


def test_a_client_that_joins_late_gets_its_share_from_then_on_and_no_more() -> None:
    schedule = make_schedule("synchronized")
    serve(schedule, {"a": ("A", 900), "b": ("B", 900)}, 100)
    served = serve(schedule, {"a": ("A", 900), "b": ("B", 900), "c": ("C", 900)}, 30)
    assert max(served.values()) - min(served.values()) <= 900


def test_one_client_alone_is_served_as_ever() -> None:
    jobs = {"a": ("A", 600), "b": ("A", 600), "c": ("A", 300)}
    plain, shared = RoundRobin(), make_schedule("round_robin")
    for _ in range(9):
        chosen = plain.next_round(views(jobs), max_tokens=1000, max_adapters=0)
        assert shared.next_round(views(jobs), max_tokens=1000, max_adapters=0) == chosen
        for name in chosen:
            plain.ran(name, jobs[name][1])
            shared.ran(name, jobs[name][1])


def test_inside_a_clients_share_its_own_schedule_decides() -> None:
    jobs = {"a": ("A", 900), "a2": ("A", 900), "b": ("B", 900)}
    schedule = make_schedule("priority_val_loss")
    order = []
    for _ in range(4):
        chosen = schedule.next_round(
            views(jobs, {"a": 1.0, "a2": 2.0, "b": 0.5}), max_tokens=1000, max_adapters=0
        )
        order += chosen
        for name in chosen:
            schedule.ran(name, 900)
    assert order == ["a2", "b", "a2", "b"]
