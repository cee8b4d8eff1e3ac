"""Balancing within a policy: the next call goes to the engine with the fewest outstanding tokens.

FlexMARL's min-heap over instances, with tokens instead of request counts. Load is a set of request ids
owned by an engine incarnation, so that a late release of a dead engine's request changes nothing.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class EngineLoad:
    """One engine's requests in flight. `incarnation` rises each time the engine comes back."""

    cell: str
    capacity: int
    incarnation: int = 0
    is_up: bool = False
    requests: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """One request's place on one engine incarnation."""

    cell: str
    incarnation: int
    request_id: str


class Balancer:
    """Chooses engines for one policy. Costs O(log engines) a call; stale heap entries are skipped."""

    def __init__(self) -> None:
        self._engines: dict[str, EngineLoad] = {}
        self._heap: list[tuple[int, int, str]] = []  # (outstanding tokens, number of requests, cell)

    def add(self, cell: str, *, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"engine {cell}: capacity must be at least 1, got {capacity}")
        self._engines[cell] = EngineLoad(cell=cell, capacity=capacity)

    def mark_up(self, cell: str) -> None:
        engine = self._engines[cell]
        engine.is_up = True
        self._push(engine)

    def mark_down(self, cell: str) -> list[str]:
        """Takes an engine out of service; returns the ids of the requests that it held."""
        engine = self._engines[cell]
        lost = list(engine.requests)
        engine.is_up = False
        engine.incarnation += 1
        engine.requests.clear()
        engine.num_tokens = 0
        return lost

    def acquire(self, request_id: str, num_tokens: int) -> Lease | None:
        """Places a request on the least loaded engine that is up and has room; None if there is none."""
        full: list[tuple[int, int, str]] = []
        lease = None
        while self._heap:
            entry = heapq.heappop(self._heap)
            engine = self._engines[entry[2]]
            if not engine.is_up or entry[:2] != (engine.num_tokens, len(engine.requests)):
                continue
            if len(engine.requests) >= engine.capacity:
                full.append(entry)
                continue
            engine.requests[request_id] = num_tokens
            engine.num_tokens += num_tokens
            self._push(engine)
            lease = Lease(cell=engine.cell, incarnation=engine.incarnation, request_id=request_id)
            break
        for entry in full:
            heapq.heappush(self._heap, entry)
        return lease

    def release(self, lease: Lease) -> None:
        """Frees a request's place; a lease of an earlier incarnation is ignored."""
        engine = self._engines[lease.cell]
        if engine.incarnation != lease.incarnation:
            return
        engine.num_tokens -= engine.requests.pop(lease.request_id, 0)
        if engine.is_up:
            self._push(engine)

    def is_current(self, lease: Lease) -> bool:
        """True while the engine incarnation that gave the lease is in service."""
        engine = self._engines[lease.cell]
        return engine.is_up and engine.incarnation == lease.incarnation

    def up(self) -> list[str]:
        return [engine.cell for engine in self._engines.values() if engine.is_up]

    def load(self, cell: str) -> tuple[int, int]:
        """(requests, tokens) outstanding on the engine."""
        engine = self._engines[cell]
        return len(engine.requests), engine.num_tokens

    def _push(self, engine: EngineLoad) -> None:
        heapq.heappush(self._heap, (engine.num_tokens, len(engine.requests), engine.cell))
