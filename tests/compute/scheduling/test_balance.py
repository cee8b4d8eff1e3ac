"""Balancing within a policy: least outstanding tokens first, leases owned by an incarnation."""

from __future__ import annotations

import random

from megloom.compute.scheduling.balance import Balancer


def balancer(*cells: str, capacity: int = 4) -> Balancer:
    made = Balancer()
    for cell in cells:
        made.add(cell, capacity=capacity)
        made.mark_up(cell)
    return made


def test_the_engine_with_the_fewest_outstanding_tokens_gets_the_call() -> None:
    made = balancer("a", "b")
    first = made.acquire("r1", 100)
    second = made.acquire("r2", 10)
    third = made.acquire("r3", 10)
    assert first and second and third
    assert (first.cell, second.cell, third.cell) == ("a", "b", "b")


def test_no_engine_is_filled_past_its_capacity() -> None:
    made = balancer("a", capacity=2)
    assert made.acquire("r1", 1) and made.acquire("r2", 1)
    assert made.acquire("r3", 1) is None


def test_a_released_place_is_used_again() -> None:
    made = balancer("a", capacity=1)
    lease = made.acquire("r1", 5)
    assert lease is not None
    made.release(lease)
    assert made.acquire("r2", 5) is not None and made.load("a") == (1, 5)


def test_an_engine_that_is_down_gets_nothing_and_returns_its_requests() -> None:
    made = balancer("a")
    made.acquire("r1", 5)
    assert made.mark_down("a") == ["r1"]
    assert made.acquire("r2", 5) is None and made.up() == []


def test_a_late_release_of_an_earlier_incarnation_changes_nothing() -> None:
    made = balancer("a")
    old = made.acquire("r1", 5)
    assert old is not None
    made.mark_down("a")
    made.mark_up("a")
    made.acquire("r1", 7)
    made.release(old)
    assert made.load("a") == (1, 7)


def test_random_traffic_keeps_the_load_equal_to_the_sum_of_open_leases() -> None:
    dice = random.Random(7)
    made, leases = balancer("a", "b", "c", capacity=8), []  # type: Balancer, list[tuple[Lease, int]]
    for number in range(3000):
        if leases and dice.random() < 0.5:
            lease, _ = leases.pop(dice.randrange(len(leases)))
            made.release(lease)
        elif lease := made.acquire(f"r{number}", tokens := dice.randrange(1, 50)):
            leases.append((lease, tokens))
            before = made.load(lease.cell)[1] - tokens
            with_room = [load[1] for cell in "abc" if cell != lease.cell and (load := made.load(cell))[0] < 8]
            assert all(before <= other for other in with_room)
        for cell in "abc":
            open_tokens = [tokens for lease, tokens in leases if lease.cell == cell]
            assert made.load(cell) == (len(open_tokens), sum(open_tokens))
