"""The way of a state's bytes, from tables: where copies are, where it is wanted, what the hardware can do."""

from __future__ import annotations

import pytest

from megloom.compute.state.path_choice import (
    DEVICE_STEPS,
    MAPPED,
    Hardware,
    Place,
    Rate,
    StepKind,
    cheapest,
    ranked,
)
from megloom.compute.state.tiers import Tier

GB = 1 << 30
HARDWARE = Hardware(
    devices={"a": ("0", "1", "2"), "b": ("0",)},
    peer_devices=frozenset({("a", "0", "1")}),
    rdma_nodes=frozenset({("a", "b")}),
    transports={("a", "c"): ("http",), ("a", "d"): ("http", "mooncake")},
)


def at(text: str) -> Place:
    """`node:tier[:device]`."""
    node, tier, device = (text + ":").split(":")[:3]
    return Place(node=node, tier=tier, device=device)


@pytest.mark.parametrize(
    ("copies", "wanted", "kinds"),
    [
        ("a:device:0", "a:device:0", ""),
        ("a:device:0", "a:device:1", "D2D"),
        ("a:device:0", "a:device:2", "D2H H2D"),  # no peer access: through the pinned buffer
        ("a:device:0", "b:device:0", "D2D"),
        ("a:device:0", "a:tmpfs", "D2H"),
        ("a:device:0", "c:mapped", "D2H PULL MMAP"),
        ("a:pinned", "a:device:2", "H2D"),
        ("a:tmpfs", "a:device:0", "H2D"),
        ("a:tmpfs", "a:mapped", "MMAP"),
        ("a:disk", "a:mapped", "MMAP"),
        ("a:disk", "a:device:0", "COPY H2D"),
        ("a:disk", "c:mapped", "PULL MMAP"),
        (":remote", "c:mapped", "FETCH MMAP"),
        (":remote", "a:device:1", "FETCH H2D"),
        ("a:disk :remote", "c:mapped", "PULL MMAP"),  # another node is nearer than the bucket
        ("a:disk a:tmpfs", "a:mapped", "MMAP"),
        ("a:disk a:device:0", "a:device:1", "D2D"),
        ("a:disk a:pinned", "a:device:2", "H2D"),
        ("c:disk a:disk", "a:mapped", "MMAP"),
    ],
)
def test_the_cheapest_way_has_these_steps(copies: str, wanted: str, kinds: str) -> None:
    plan = cheapest(map(at, copies.split()), at(wanted), GB, HARDWARE)
    assert plan is not None and " ".join(step.kind.name for step in plan.steps) == kinds
    places = [plan.source, *(step.target for step in plan.steps)]
    assert [step.source for step in plan.steps] == places[:-1] and places[-1] == at(wanted)


@pytest.mark.parametrize(
    ("copies", "wanted"), [("c:disk", "a:mapped"), ("", "a:mapped"), ("b:device:0", "c:mapped")]
)
def test_without_a_way_there_is_no_plan(copies: str, wanted: str) -> None:
    assert cheapest(map(at, copies.split()), at(wanted), GB, HARDWARE) is None


def test_the_fastest_transport_is_taken_for_a_pull() -> None:
    plan = cheapest([at("a:disk")], at("d:tmpfs"), GB, HARDWARE)
    assert plan is not None and [step.via for step in plan.steps] == ["mooncake"]


def test_a_small_state_goes_where_latency_is_low_and_a_large_one_where_bandwidth_is_high() -> None:
    rates = {"http": Rate(latency_s=0.001, bytes_per_s=1e6), "mooncake": Rate(latency_s=1, bytes_per_s=1e9)}
    hardware = Hardware(transports=HARDWARE.transports, transport_rates=rates)
    small, large = (cheapest([at("a:disk")], at("d:tmpfs"), size, hardware) for size in (1000, GB))
    assert small is not None and large is not None
    assert (small.steps[0].via, large.steps[0].via) == ("http", "mooncake")


def test_all_copies_are_ranked_and_the_order_of_the_facts_does_not_matter() -> None:
    copies = [at(text) for text in (":remote", "a:disk", "c:disk", "c:tmpfs")]
    plans = ranked(copies, Place(node="c", tier=MAPPED), GB, HARDWARE)
    assert [str(plan.source.tier) + plan.source.node for plan in plans] == [
        "tmpfsc",
        "diskc",
        "diska",
        "remote",
    ]
    assert plans == ranked(reversed(copies), Place(node="c", tier=MAPPED), GB, HARDWARE)
    assert plans == sorted(plans, key=lambda plan: plan.seconds)


def test_only_device_steps_are_the_trainers_own() -> None:
    assert {StepKind.D2D, StepKind.D2H, StepKind.H2D} == DEVICE_STEPS
    assert Tier.DEVICE not in {Tier.TMPFS, Tier.DISK}
