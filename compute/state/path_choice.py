"""Pure: which way a state's bytes take from where copies are to where they are wanted.

Places are (node, tier, device); a step moves bytes along one edge between places, and costs its latency plus
size over bandwidth. The choice is the cheapest way (Dijkstra), ties broken by name, so that the same facts
give the same plan. Device steps (D2D, D2H, H2D) are done by the training backend, the others by the store.
Source: FlexMARL 3.4, "the runtime picks D2D, D2H, H2D or cross-node transfer from the metadata".
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from megloom.compute.state.tiers import Tier

MAPPED = "mapped"


class StepKind(StrEnum):
    """MMAP: map the file. COPY: between tiers of one node. PULL: from another node. FETCH: from the URL."""

    D2D = "device to device"
    D2H = "device to host"
    H2D = "host to device"
    COPY = "copy"
    MMAP = "mmap"
    PULL = "pull"
    FETCH = "fetch"


DEVICE_STEPS = frozenset({StepKind.D2D, StepKind.D2H, StepKind.H2D})


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Place:
    """`tier` is a `Tier`, or `MAPPED`: readable by a process of the node. REMOTE has no node."""

    node: str
    tier: str
    device: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """`via` names the transport of a PULL, else it is empty."""

    kind: StepKind
    source: Place
    target: Place
    via: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The steps in order, none if a copy is where it is wanted already. `seconds` is an estimate."""

    steps: tuple[Step, ...]
    source: Place
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Seconds of a step = latency_s + size_bytes / bytes_per_s."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: int) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s


# Orders of magnitude of today's servers: they rank the ways, they promise nothing.
RATES: Mapping[str, Rate] = {
    "d2d": Rate(latency_s=1e-4, bytes_per_s=200e9),  # NVLink-class peer access
    "d2d_network": Rate(latency_s=1e-3, bytes_per_s=20e9),  # device memory over RDMA
    "pinned": Rate(latency_s=1e-4, bytes_per_s=25e9),  # PCIe with a page-locked buffer
    "pageable": Rate(latency_s=1e-3, bytes_per_s=6e9),  # PCIe through a mapped file
    "memory": Rate(latency_s=1e-3, bytes_per_s=4e9),
    "disk": Rate(latency_s=5e-3, bytes_per_s=1e9),
    "mmap_tmpfs": Rate(latency_s=1e-4, bytes_per_s=1e12),  # nothing moves
    "mmap_disk": Rate(latency_s=5e-3, bytes_per_s=1.2e9),  # pages are read when they are touched
    "remote": Rate(latency_s=0.2, bytes_per_s=0.2e9),
}
TRANSPORT_RATES: Mapping[str, Rate] = {
    "file": Rate(latency_s=5e-3, bytes_per_s=1e9),
    "http": Rate(latency_s=5e-3, bytes_per_s=0.5e9),
    "mooncake": Rate(latency_s=5e-3, bytes_per_s=2e9),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What can reach what. Pairs are directed: (source, target).

    `peer_devices` are (node, device, device) with direct copies; `rdma_nodes` pairs of nodes whose devices
    reach each other; `transports` the transports (names of `transport_rates`) from one node to another.
    """

    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    peer_devices: frozenset[tuple[str, str, str]] = frozenset()
    rdma_nodes: frozenset[tuple[str, str]] = frozenset()
    transports: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    rates: Mapping[str, Rate] = field(default_factory=lambda: RATES)
    transport_rates: Mapping[str, Rate] = field(default_factory=lambda: TRANSPORT_RATES)


def cheapest(copies: Iterable[Place], wanted: Place, size_bytes: int, hardware: Hardware) -> Plan | None:
    """The cheapest plan from any of the copies; None if no way leads from them to `wanted`."""
    return next(iter(ranked(copies, wanted, size_bytes, hardware)), None)


def ranked(copies: Iterable[Place], wanted: Place, size_bytes: int, hardware: Hardware) -> list[Plan]:
    """The cheapest plan of every copy that reaches `wanted`, the best first: the order to try them in."""
    plans = (_from_one(copy, wanted, size_bytes, hardware) for copy in sorted(set(copies)))
    return sorted((plan for plan in plans if plan), key=lambda plan: (plan.seconds, plan.source))


def _from_one(source: Place, wanted: Place, size_bytes: int, hardware: Hardware) -> Plan | None:
    done: set[Place] = set()
    queue: list[tuple[float, int, Place, tuple[Step, ...]]] = [(0.0, 0, source, ())]
    num_pushed = 0  # breaks ties by the order of `_edges`, which is fixed
    while queue:
        seconds, _, place, steps = heapq.heappop(queue)
        if place == wanted:
            return Plan(steps=steps, source=source, seconds=seconds)
        if place in done:
            continue
        done.add(place)
        for step, rate in _edges(place, wanted, hardware):
            if step.target not in done:
                num_pushed += 1
                cost = seconds + rate.seconds(size_bytes)
                heapq.heappush(queue, (cost, num_pushed, step.target, (*steps, step)))
    return None


def _edges(place: Place, wanted: Place, hardware: Hardware) -> Iterator[tuple[Step, Rate]]:
    if place.tier == Tier.DEVICE:
        yield from _from_device(place, hardware)
    elif place.tier == Tier.REMOTE:
        target = Place(node=wanted.node, tier=Tier.TMPFS)
        yield Step(kind=StepKind.FETCH, source=place, target=target), hardware.rates["remote"]
    elif place.tier in (Tier.PINNED, Tier.TMPFS, Tier.DISK):
        yield from _within_host(place, hardware)
        if place.tier != Tier.PINNED:
            yield from _over_network(place, hardware)


def _from_device(place: Place, hardware: Hardware) -> Iterator[tuple[Step, Rate]]:
    rates = hardware.rates
    for tier, rate in ((Tier.PINNED, "pinned"), (Tier.TMPFS, "pageable")):
        yield Step(kind=StepKind.D2H, source=place, target=Place(node=place.node, tier=tier)), rates[rate]
    for node, source, device in sorted(hardware.peer_devices):
        if (node, source) == (place.node, place.device):
            target = Place(node=node, tier=Tier.DEVICE, device=device)
            yield Step(kind=StepKind.D2D, source=place, target=target), rates["d2d"]
    for source, node in sorted(hardware.rdma_nodes):
        if source == place.node:
            for device in hardware.devices.get(node, ()):
                target = Place(node=node, tier=Tier.DEVICE, device=device)
                yield Step(kind=StepKind.D2D, source=place, target=target), rates["d2d_network"]


def _within_host(place: Place, hardware: Hardware) -> Iterator[tuple[Step, Rate]]:
    rates = hardware.rates
    if place.tier in (Tier.TMPFS, Tier.DISK):
        target = Place(node=place.node, tier=MAPPED)
        yield Step(kind=StepKind.MMAP, source=place, target=target), rates[f"mmap_{place.tier}"]
    for tier in (Tier.PINNED, Tier.TMPFS, Tier.DISK):
        if tier != place.tier:
            rate = rates["disk" if Tier.DISK in (tier, place.tier) else "memory"]
            yield Step(kind=StepKind.COPY, source=place, target=Place(node=place.node, tier=tier)), rate
    if place.tier in (Tier.PINNED, Tier.TMPFS):
        rate = rates["pinned" if place.tier == Tier.PINNED else "pageable"]
        for device in hardware.devices.get(place.node, ()):
            target = Place(node=place.node, tier=Tier.DEVICE, device=device)
            yield Step(kind=StepKind.H2D, source=place, target=target), rate


def _over_network(place: Place, hardware: Hardware) -> Iterator[tuple[Step, Rate]]:
    for (source, node), names in sorted(hardware.transports.items()):
        if source == place.node:
            for name in names:
                target = Place(node=node, tier=Tier.TMPFS)
                step = Step(kind=StepKind.PULL, source=place, target=target, via=name)
                yield step, hardware.transport_rates[name]
