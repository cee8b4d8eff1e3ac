"""Sends ready calls to engines, balanced within each policy; turns engine failures into re-entry or failure.

A call that ran past its deadline, or whose engine went away, re-enters the ready queue with a new request id
(a retry is a new sample, so the old one is aborted first and never counted). A gateway's call takes its turn
like any other; then its place is lent out, and the gateway asks the engine itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from megloom.compute.conductor.events import Clock, EventLog
from megloom.compute.engines.protocol import (
    Completion,
    Engine,
    EngineError,
    EngineUnavailable,
    FinishReason,
    GenerateRequest,
)
from megloom.compute.graph.meg import ExecutionGraph, Vertex
from megloom.compute.graph.seeds import stable_id
from megloom.compute.graph.states import InvocationState
from megloom.compute.scheduling.balance import Balancer, Lease

log = logging.getLogger(__name__)
ABORT_TIMEOUT_S = 10.0  # an engine answers an abort between two decode steps
MAX_ATTEMPTS = 3  # of one call; then the call fails and its workflow decides


class CallEnds(Protocol):
    """Who hears of a call's end."""

    def call_finished(self, vertex: Vertex) -> None: ...
    def call_failed(self, vertex: Vertex, failure: str) -> None: ...


class Dispatcher:
    """Owns the requests in flight of every policy; which calls are ready is the graph's to say."""

    def __init__(
        self,
        *,
        run: str,
        graph: ExecutionGraph,
        stop_ids: Mapping[str, tuple[int, ...]],
        call_timeout_s: float,
        tasks: asyncio.TaskGroup,
        clock: Clock,
        events: EventLog,
    ) -> None:
        self._run, self._graph, self._stop_ids = run, graph, stop_ids
        self._call_timeout_s, self._tasks = call_timeout_s, tasks
        self._clock, self._events = clock, events
        self._balancers: dict[str, Balancer] = {}
        self._engines: dict[str, Engine] = {}
        self._policy_of: dict[str, str] = {}
        self._requests: dict[str, tuple[str, str]] = {}  # running invocation → (cell, request id)
        self._takers: dict[str, Callable[[Lease], None]] = {}  # a gateway's call → who takes its place
        self._lent: dict[str, Lease] = {}  # request id → its place, lent out
        self._held: set[str] = set()  # policies whose ready calls wait: their engines change weights
        self.ends: CallEnds | None = None
        self.lost_engine: Callable[[str, str], Coroutine[Any, Any, None]] | None = None  # brings a cell back

    def add_engine(self, cell: str, *, policy: str, capacity: int) -> None:
        self._balancers.setdefault(policy, Balancer()).add(cell, capacity=capacity)
        self._policy_of[cell] = policy

    def engine_up(self, cell: str, engine: Engine) -> None:
        """The engine serves the committed version; waiting calls flow to it."""
        self._engines[cell] = engine
        self._balancers[self._policy_of[cell]].mark_up(cell)
        self._events.add("engine_up", cell=cell)
        self._pump(self._policy_of[cell])

    def engine_down(self, cell: str, cause: str) -> None:
        """No more calls go there; those in flight fail on their own connection and re-enter."""
        balancer = self._balancers[self._policy_of[cell]]
        if cell not in balancer.up():
            return
        balancer.mark_down(cell)
        self._events.add("engine_down", cell=cell, cause=cause[:200])
        for rid, lease in self._lent.items():
            if lease.cell == cell:  # its gateway hears the abort, or that the connection broke, and asks anew
                self._tasks.create_task(self._abort(cell, rid), name=f"abort:{rid}")

    def engines_of(self, policy: str) -> dict[str, Engine]:
        """The engines of a policy that are in service."""
        balancer = self._balancers.get(policy)
        return {cell: self._engines[cell] for cell in balancer.up()} if balancer else {}

    def hold(self, policy: str) -> None:
        """From now on no call of the policy starts, until `release`."""
        self._held.add(policy)

    def release(self, policy: str) -> None:
        """Waiting calls start again."""
        self._held.discard(policy)
        if policy in self._balancers:
            self._pump(policy)

    def submit(self, vertex: Vertex) -> None:
        """A call has become ready. It starts as soon as an engine of its policy has room."""
        self._pump(vertex.policy)

    def abort(self, vertices: list[Vertex]) -> None:
        """Aborts calls whose episode no longer wants them."""
        for vertex in vertices:
            if request := self._requests.get(vertex.invocation_id):
                self._tasks.create_task(self._abort(*request), name=f"abort:{vertex.invocation_id}")

    # --- places that are lent out

    def lend(self, invocation_id: str, taker: Callable[[Lease], None]) -> None:
        """From now on `taker` gets each place of the call, and nothing is sent to the engine from here."""
        self._takers[invocation_id] = taker

    def take_back(self, vertex: Vertex, lease: Lease) -> None:
        """A lent place is free again."""
        if self._lent.pop(lease.request_id, None) is None:
            return
        self._requests.pop(vertex.invocation_id, None)
        self._balancers[vertex.policy].release(lease)
        self._pump(vertex.policy)

    def forget(self, invocation_id: str) -> None:
        """The call has ended: it will take no place any more."""
        self._takers.pop(invocation_id, None)

    def engine_at(self, lease: Lease) -> Engine:
        return self._engines[lease.cell]

    @property
    def num_lent(self) -> int:
        return len(self._lent)

    async def suspect(self, lease: Lease, cause: str) -> None:
        """A gateway says that the engine went away: if it does not answer here either, it is lost."""
        if not self._balancers[self._policy_of[lease.cell]].is_current(lease):
            return  # somebody has told already
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._engines[lease.cell].info()
        except (EngineError, TimeoutError) as error:
            self._lose(lease, f"{cause}; asked again: {error!r}")

    def overdue(self, lease: Lease) -> None:
        """A lent place has run past the call's deadline: its request is aborted; the gateway hears that."""
        cause = f"no answer from {lease.cell} within {self._call_timeout_s:g} s"
        self._tasks.create_task(self._end_overdue(lease, cause), name=f"overdue:{lease.request_id}")

    async def _end_overdue(self, lease: Lease, cause: str) -> None:
        if not await self._abort(lease.cell, lease.request_id):
            self._lose(lease, cause)

    def _pump(self, policy: str) -> None:
        balancer = self._balancers[policy]
        if policy in self._held:
            return
        while (vertex := self._graph.first_ready(policy)) is not None:
            rid = stable_id(self._run, vertex.invocation_id, vertex.num_reentries)
            lease = balancer.acquire(rid, len(vertex.prompt_ids or ()) + vertex.max_tokens)
            if lease is None:
                return
            engine = f"{lease.cell}#{lease.incarnation}"
            self._graph.start(vertex.invocation_id, cell=lease.cell, engine=engine, now=self._clock())
            self._requests[vertex.invocation_id] = (lease.cell, rid)
            if (taker := self._takers.get(vertex.invocation_id)) is not None:
                self._lent[rid] = lease
                taker(lease)
                continue
            self._tasks.create_task(self._generate(vertex, lease), name=f"call:{vertex.invocation_id}")

    async def _generate(self, vertex: Vertex, lease: Lease) -> None:
        """Runs one request to its end. Ends always: by answer, failure or deadline."""
        num_reentries = vertex.num_reentries
        retry, failure, completion = False, "", None
        try:
            async with asyncio.timeout(self._call_timeout_s):
                completion = await self._engines[lease.cell].generate(self._request(vertex, lease.request_id))
            if completion.finish_reason is FinishReason.ABORT or not completion.token_ids:
                retry, failure = (
                    True,
                    f"engine {lease.cell} gave {len(completion.token_ids)} tokens and aborted",
                )
                completion = None
        except TimeoutError:
            retry, failure = True, f"no answer from {lease.cell} within {self._call_timeout_s:g} s"
            if not await self._abort(lease.cell, lease.request_id):
                self._lose(lease, failure)  # it does not even answer an abort
        except EngineUnavailable as error:
            retry, failure = True, str(error)
            self._lose(lease, failure)
        except EngineError as error:
            failure = str(error)
        finally:
            self._requests.pop(vertex.invocation_id, None)
            self._balancers[vertex.policy].release(lease)
        if vertex.state is InvocationState.RUNNING and vertex.num_reentries == num_reentries:
            self._end(vertex, completion, retry, failure)
        self._pump(vertex.policy)

    def _lose(self, lease: Lease, cause: str) -> None:
        """Takes an unreachable engine out at once: a call that re-enters must not meet it again."""
        assert self.lost_engine is not None
        if not self._balancers[self._policy_of[lease.cell]].is_current(lease):
            return  # another call has told already
        self.engine_down(lease.cell, cause)
        self._tasks.create_task(self.lost_engine(lease.cell, cause), name=f"restart:{lease.cell}")

    def _end(self, vertex: Vertex, completion: Completion | None, retry: bool, failure: str) -> None:
        assert self.ends is not None
        if completion is not None:
            vertex.token_ids, vertex.logprobs = completion.token_ids, completion.logprobs
            vertex.version_spans = tuple((s.version, s.start, s.end) for s in completion.version_spans)
            vertex.finish_reason = completion.finish_reason.value
            self.ends.call_finished(vertex)
        elif retry and vertex.num_reentries + 1 < MAX_ATTEMPTS:
            self._events.add("call_reentered", invocation=vertex.invocation_id, cause=failure[:200])
            self._graph.reenter(vertex.invocation_id, now=self._clock())
        else:
            self._events.add("call_failed", invocation=vertex.invocation_id, cause=failure[:200])
            self.ends.call_failed(vertex, failure)

    def _request(self, vertex: Vertex, rid: str) -> GenerateRequest:
        assert vertex.prompt_ids is not None
        return GenerateRequest(
            rid=rid,
            token_ids=vertex.prompt_ids,
            max_tokens=vertex.max_tokens,
            temperature=vertex.temperature,
            seed=vertex.seed,
            stop_token_ids=self._stop_ids[vertex.policy],
            training=True,
        )

    async def _abort(self, cell: str, rid: str) -> bool:
        """Aborts a request; False if the engine does not answer."""
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._engines[cell].abort(rid)
        except (EngineError, TimeoutError) as error:
            log.warning("abort of rid=%s on cell=%s failed: %r", rid, cell, error)
            return False
        return True
