"""The conductor as gateways see it: their calls become vertices, and get places on engines. A `CallDesk`.

    place ──► READY ──► RUNNING, its place lent to the gateway ──end──► DONE | FAILED
                ▲            │
                └──replace───┘      another request id and seed: what is sampled elsewhere is another sample

A call that `place` or `replace` raises for has failed. One whose answer's parts disagree is done, for its
client has the answer, and unusable: nothing is trained on it. What comes for an attempt that is over changes
nothing and leaves an event. When an attempt closes, its places are free again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from megloom.compute.conductor.dispatch import MAX_ATTEMPTS, Dispatcher
from megloom.compute.conductor.events import Clock, EventLog
from megloom.compute.gateway.protocol import CallEnd, CallRequest, NoPlace, NotAdmitted, Placement, flaw
from megloom.compute.graph.meg import FINAL, ExecutionGraph, GraphError, Vertex
from megloom.compute.graph.records import EdgeKind
from megloom.compute.graph.seeds import derive_seed
from megloom.compute.graph.states import InvocationState
from megloom.compute.rollout.protocol import AgentPlan
from megloom.compute.scheduling.balance import Lease

SeedOf = Callable[[str, int], int]  # (agent, index) → the seed of that call


@dataclass(kw_only=True, slots=True)
class _Call:
    """A call that has not ended: it waits for a place (`waiting`) or has one (`lease`)."""

    vertex: Vertex
    lease: Lease | None = None
    waiting: asyncio.Future[None] | None = None
    deadline: asyncio.TimerHandle | None = None


@dataclass(kw_only=True, slots=True)
class _Attempt:
    """An admitted attempt of an episode. `ids` are all calls that it ever made, `calls` the open ones."""

    episode_id: str
    attempt: int
    ends_s: float
    seed_of: SeedOf
    ids: set[str] = field(default_factory=set)
    calls: dict[str, _Call] = field(default_factory=dict)


class GatewayDesk:
    """One for all gateways of a session. The episode desk opens and closes attempts here."""

    def __init__(
        self,
        *,
        agents: Mapping[str, AgentPlan],
        graph: ExecutionGraph,
        dispatcher: Dispatcher,
        stop_ids: Mapping[str, tuple[int, ...]],
        call_timeout_s: float,
        clock: Clock,
        events: EventLog,
    ) -> None:
        self._agents, self._graph, self._dispatcher = agents, graph, dispatcher
        self._stop_ids, self._call_timeout_s = stop_ids, call_timeout_s
        self._clock, self._events = clock, events
        self._attempts: dict[str, _Attempt] = {}
        self._attempt_of: dict[str, _Attempt] = {}  # an open call → its attempt

    @property
    def num_open(self) -> int:
        """Calls of all attempts that have not ended."""
        return len(self._attempt_of)

    def open_attempt(self, episode_id: str, attempt: int, *, ends_s: float, seed_of: SeedOf) -> None:
        """From now on the attempt may call, until `ends_s` or until it is closed."""
        assert episode_id not in self._attempts, episode_id
        self._attempts[episode_id] = _Attempt(
            episode_id=episode_id, attempt=attempt, ends_s=ends_s, seed_of=seed_of
        )

    def close_attempt(self, episode_id: str) -> frozenset[str]:
        """Ends the attempt's calls and takes back its places; returns all calls that it made."""
        closed = self._attempts.pop(episode_id)
        # First, since a place that is free again goes to the next ready call, which must not be one of these.
        self._dispatcher.abort(self._graph.cancel_open(episode_id, "its episode ended", now=self._clock()))
        for invocation_id, call in list(closed.calls.items()):
            _wake(call, "its episode is over")
            self._forget(closed, invocation_id)
        return frozenset(closed.ids)

    # --- what gateways ask

    async def place(self, call: CallRequest) -> Placement:
        """See `CallDesk.place`."""
        attempt = self._admitted(call)
        vertex = self._vertex(attempt, call)
        try:
            is_ready = self._graph.add(vertex, now=self._clock())
        except GraphError as error:
            raise NotAdmitted(str(error)) from error
        opened = _Call(vertex=vertex)
        attempt.calls[call.invocation_id], self._attempt_of[call.invocation_id] = opened, attempt
        attempt.ids.add(call.invocation_id)
        with self._failing(attempt, opened):
            self._dispatcher.lend(call.invocation_id, partial(self._granted, opened))
            if is_ready:
                self._dispatcher.submit(vertex)
            return await self._placed(attempt, opened)

    async def replace(self, invocation_id: str, rid: str, cause: str) -> Placement:
        """See `CallDesk.replace`."""
        attempt = self._attempt_of.get(invocation_id)
        if attempt is None:
            self._late(invocation_id, "replace")
            raise NotAdmitted(f"call {invocation_id}: it has ended, or its episode is over")
        call = attempt.calls[invocation_id]
        lease, vertex = call.lease, call.vertex
        if lease is None or lease.request_id != rid:
            current = lease.request_id if lease else "none"
            raise NotAdmitted(f"call {invocation_id}: request {rid} is not its current one ({current})")
        with self._failing(attempt, call):
            await self._dispatcher.suspect(lease, cause)
            if self._attempt_of.get(invocation_id) is not attempt or call.lease is not lease:
                raise NotAdmitted(f"call {invocation_id}: it ended while its engine was asked")
            if vertex.num_reentries + 1 >= MAX_ATTEMPTS:
                raise NoPlace(f"call {invocation_id}: lost {MAX_ATTEMPTS} places, the last one to: {cause}")
            self._events.add("call_reentered", invocation=invocation_id, cause=cause[:200])
            self._release(call)
            self._graph.reenter(invocation_id, now=self._clock())
            self._dispatcher.submit(vertex)
            return await self._placed(attempt, call)

    async def end(self, end: CallEnd) -> None:
        """See `CallDesk.end`."""
        attempt = self._attempt_of.get(end.invocation_id)
        if attempt is None:
            self._late(end.invocation_id, "end")
            return
        call = attempt.calls[end.invocation_id]
        vertex, rid = call.vertex, call.lease.request_id if call.lease else None
        _wake(call, "its client left before it had a place")
        self._forget(attempt, end.invocation_id)
        failure = end.failure
        if failure is None and (rid is None or rid != end.rid):
            failure = f"ended with request {end.rid}, its place was for {rid}"
        if failure is not None:
            self._fail(vertex, failure)
            return
        self._keep(vertex, end)
        for name in self._graph.finish(vertex.invocation_id, now=self._clock()):
            child = self._graph[name]
            if child.prompt_ids is not None and self._graph.set_prompt(
                name, child.prompt_ids, now=self._clock()
            ):
                self._dispatcher.submit(child)

    # --- inside

    def _admitted(self, call: CallRequest) -> _Attempt:
        attempt = self._attempts.get(call.episode_id)
        if attempt is None or attempt.attempt != call.attempt:
            self._late(call.invocation_id, "place")
            running = f"attempt {attempt.attempt} runs" if attempt else "it is over or was never admitted"
            raise NotAdmitted(f"call {call.invocation_id}: episode {call.episode_id}: {running}")
        if call.agent not in self._agents:
            known = ", ".join(sorted(self._agents))
            raise NotAdmitted(f"call {call.invocation_id}: no agent {call.agent!r} (agents: {known})")
        return attempt

    def _vertex(self, attempt: _Attempt, call: CallRequest) -> Vertex:
        return Vertex(
            invocation_id=call.invocation_id,
            episode_id=call.episode_id,
            agent=call.agent,
            policy=self._agents[call.agent].policy,
            index=call.index,
            parents=tuple((parent, EdgeKind(kind)) for parent, kind in call.parents),
            registered_s=self._clock(),
            seed=attempt.seed_of(call.agent, call.index),
            temperature=call.temperature,
            max_tokens=call.max_tokens,
            prompt_ids=call.prompt_ids,
            messages=call.messages,
        )

    @contextmanager
    def _failing(self, attempt: _Attempt, call: _Call) -> Iterator[None]:
        """A call that gets no place has failed; one whose episode is over is the episode desk's to cancel."""
        try:
            yield
        except NoPlace as error:
            self._give_up(attempt, call, str(error))
            raise
        except asyncio.CancelledError:
            self._give_up(attempt, call, "its client left before it had a place")
            raise

    def _give_up(self, attempt: _Attempt, call: _Call, failure: str) -> None:
        invocation_id = call.vertex.invocation_id
        if self._attempt_of.get(invocation_id) is attempt:
            self._forget(attempt, invocation_id)
            self._fail(call.vertex, failure)

    async def _placed(self, attempt: _Attempt, call: _Call) -> Placement:
        """The call's place. Raises: NoPlace at the episode's deadline, NotAdmitted if it is over before."""
        if call.lease is None:
            waiting = call.waiting = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(max(0.0, attempt.ends_s - self._clock())):
                    await waiting
            except TimeoutError:
                raise NoPlace(self._describe_wait(call.vertex)) from None
            finally:
                call.waiting = None
        assert call.lease is not None
        return self._placement(call.vertex, call.lease)

    def _granted(self, call: _Call, lease: Lease) -> None:
        call.lease = lease
        loop = asyncio.get_running_loop()
        call.deadline = loop.call_later(self._call_timeout_s, self._dispatcher.overdue, lease)
        if call.waiting is not None and not call.waiting.done():
            call.waiting.set_result(None)

    def _placement(self, vertex: Vertex, lease: Lease) -> Placement:
        engine = self._dispatcher.engine_at(lease)
        retry = vertex.num_reentries
        return Placement(
            invocation_id=vertex.invocation_id,
            rid=lease.request_id,
            policy=vertex.policy,
            url=engine.url,
            token=engine.token,
            engine=vertex.engine or lease.cell,
            seed=derive_seed(vertex.seed, retry) if retry else vertex.seed,
            stop_token_ids=self._stop_ids[vertex.policy],
            context_length=engine.context_length,
        )

    def _release(self, call: _Call) -> None:
        lease, call.lease = call.lease, None
        if call.deadline is not None:
            call.deadline.cancel()
        if lease is not None:
            self._dispatcher.take_back(call.vertex, lease)

    def _forget(self, attempt: _Attempt, invocation_id: str) -> None:
        """The call is no longer open, and its place is free."""
        del self._attempt_of[invocation_id]
        call = attempt.calls.pop(invocation_id)
        self._dispatcher.forget(invocation_id)
        self._release(call)

    def _fail(self, vertex: Vertex, failure: str) -> None:
        """Fails a call, and with it those that wait for its answer."""
        self._events.add("call_failed", invocation=vertex.invocation_id, cause=failure[:200])
        for name in self._graph.fail(vertex.invocation_id, failure, now=self._clock()):
            if (attempt := self._attempt_of.get(name)) is not None:
                _wake(attempt.calls[name], f"its parent {vertex.invocation_id} failed")
                self._forget(attempt, name)

    def _keep(self, vertex: Vertex, end: CallEnd) -> None:
        """Keeps an answer. One whose parts disagree has neither log-probabilities nor versions: whose they
        are is not known, and readers of the records take one for each token.
        """
        sampled, cause = end.sampled, flaw(end.sampled)
        vertex.token_ids = sampled.token_ids
        if cause is None:
            vertex.logprobs, vertex.version_spans = sampled.logprobs, sampled.version_spans
        vertex.finish_reason, vertex.text = end.finish_reason, end.text
        vertex.leaf_class, vertex.unusable = end.leaf_class, end.unusable or cause
        if vertex.unusable is not None:
            self._events.add("call_unusable", invocation=vertex.invocation_id, cause=vertex.unusable[:200])

    def _late(self, invocation_id: str, what: str) -> None:
        """Notes what came too late; a call that has failed here is expected to be ended once more."""
        vertex = self._graph.get(invocation_id)
        if vertex is None or vertex.state not in FINAL:
            self._events.add("gateway_late", invocation=invocation_id, what=what)

    def _describe_wait(self, vertex: Vertex) -> str:
        policy = vertex.policy
        num_up = len(self._dispatcher.engines_of(policy))
        if vertex.state is InvocationState.BLOCKED:
            waited_for = f"{vertex.num_pending} parents to end"
        else:
            num_ready = self._graph.count(policy, InvocationState.READY)
            waited_for = (
                f"a place on one of {num_up} engines of policy {policy}, {num_ready} calls ready for them"
            )
        return f"call {vertex.invocation_id} of {vertex.agent}: its episode ended, waiting for {waited_for}"


def _wake(call: _Call, cause: str) -> None:
    """Tells who waits for the call's place that it will get none."""
    if call.waiting is not None and not call.waiting.done():
        call.waiting.set_exception(NotAdmitted(f"call {call.vertex.invocation_id}: {cause}"))
