"""Runs episodes: places attempts on workload workers, feeds the graph with their calls, records how they end.

Each attempt has one absolute deadline over all its phases. Past it, its worker gets a grace to score what was
kept. A lost worker or gateway costs an attempt, never the episode; a timeout, a failed workflow or an
unscorable result is data: recorded once, with its boundary. What an attempt sends when it is over is late: an
event, and never counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megloom.compute.conductor.dispatch import Dispatcher
from megloom.compute.conductor.events import Clock, EventLog
from megloom.compute.conductor.gateways import Admitted, Closed, Gateways
from megloom.compute.conductor.recording import Attempt, episode_records, with_gateway_calls
from megloom.compute.conductor.restoring import RETRIED, Restored
from megloom.compute.gateway.protocol import GatewayLost
from megloom.compute.graph.meg import ExecutionGraph, Vertex
from megloom.compute.graph.records import EdgeKind
from megloom.compute.graph.seeds import derive_seed
from megloom.compute.graph.states import EpisodeState, InvocationState
from megloom.compute.rollout.protocol import (
    CallAnswer,
    CallOpened,
    CallPrompt,
    EpisodeOrder,
    EpisodeOutcome,
    Worker,
    WorkerLost,
    WorkloadError,
    WorkloadPlan,
)

log = logging.getLogger(__name__)
MAX_ATTEMPTS = 3  # starts of one episode whose worker or gateway was lost
GRACE_SHARE, MAX_GRACE_S = 0.25, 30.0  # of the deadline, for scoring what was kept at it


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """An episode to run. `purpose` is "train" or "eval"; `epoch` and `member` make its seeds its own."""

    episode_id: str
    group_id: str
    task_id: str
    split: str
    purpose: str
    step: int
    epoch: int
    member: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedEpisode:
    """An episode's last attempt with all of its calls."""

    episode: Episode
    outcome: EpisodeOutcome
    vertices: list[Vertex]

    @property
    def is_scored(self) -> bool:
        return self.outcome.state == EpisodeState.SCORED.value


@dataclass(kw_only=True, slots=True)
class _Live:
    """An attempt in flight. Only the desk writes it."""

    episode: Episode
    attempt: int
    ends_s: float
    worker_name: str = ""
    worker: Worker | None = None
    at_gateway: Admitted | None = None


class EpisodeDesk:
    """Owns the episodes in flight. Workers announce calls here; the dispatcher reports their ends here."""

    def __init__(
        self,
        *,
        run: str,
        seed: int,
        plan: WorkloadPlan,
        graph: ExecutionGraph,
        dispatcher: Dispatcher,
        record: Callable[[Any], None],
        max_episodes: int,
        timeout_s: float,
        reward_retries: int,
        gateways: Gateways | None,
        suspects: asyncio.Queue[str],
        clock: Clock,
        events: EventLog,
    ) -> None:
        self._run, self._seed, self._plan, self._graph = run, seed, plan, graph
        self._dispatcher, self._record = dispatcher, record
        self._timeout_s, self._clock, self._events = timeout_s, clock, events
        self._grace_s = min(MAX_GRACE_S, GRACE_SHARE * timeout_s)
        self._reward_retries, self._gateways = reward_retries, gateways
        self._slots = asyncio.Semaphore(max_episodes)
        self._workers: dict[str, Worker] = {}
        self._load: dict[str, int] = {}
        self._worker_up = asyncio.Event()
        self._running: dict[str, _Live] = {}
        self._late: set[asyncio.Future[EpisodeOutcome]] = set()  # of attempts that are over
        self._restored: dict[str, Restored] = {}
        self.suspects = suspects  # cells that let a deadline pass
        dispatcher.ends = self

    def restore(self, restored: Mapping[str, Restored]) -> None:
        """Episodes that a killed session had ended: `run` returns them without running them again."""
        self._restored.update(restored)

    def take_restored(self) -> dict[str, Restored]:
        """Those that `run` has not returned yet: it forgets them."""
        restored, self._restored = self._restored, {}
        return restored

    def worker_up(self, name: str, worker: Worker) -> None:
        self._workers[name] = worker
        self._load.setdefault(name, 0)
        self._worker_up.set()

    def worker_down(self, name: str) -> None:
        self._workers.pop(name, None)
        if not self._workers:
            self._worker_up.clear()

    def describe_wait(self) -> str:
        """What the episodes in flight wait for, in one line."""
        oldest = next(iter(self._running.values()), None)
        if oldest is None:
            return "no episode in flight"
        return (
            f"{len(self._running)} episodes in flight; "
            f"{oldest.episode.episode_id}: {self._open_calls(oldest.episode)}"
        )

    def workers(self) -> dict[str, Worker]:
        """The workers that are up, by name."""
        return dict(self._workers)

    async def any_worker(self) -> Worker:
        """A worker that is up; waits for one."""
        return self._workers[await self._pick_worker()]

    async def run(self, episode: Episode) -> EndedEpisode:
        """Runs an episode to a terminal state and records it. Raises only for control-plane errors."""
        if (restored := self._restored.pop(episode.episode_id, None)) is not None:
            return EndedEpisode(episode=episode, outcome=restored.outcome, vertices=restored.vertices)
        async with self._slots:
            for attempt in range(MAX_ATTEMPTS):
                ended = await self._attempt(episode, attempt)
                if ended.outcome.boundary not in RETRIED or attempt + 1 == MAX_ATTEMPTS:
                    return ended
        raise AssertionError("unreachable: the last attempt returns")

    async def _attempt(self, episode: Episode, attempt: int) -> EndedEpisode:
        started_s = self._clock()
        live = _Live(episode=episode, attempt=attempt, ends_s=started_s + self._timeout_s)
        self._running[episode.episode_id] = live
        try:
            outcome = await self._run_live(live)
        except WorkerLost as error:
            self.worker_down(live.worker_name)  # at once: the next attempt must not meet it again
            outcome = self._failed(episode, "worker", str(error))
        except GatewayLost as error:
            outcome = self._failed(episode, "gateway", str(error))
        except WorkloadError as error:
            outcome = self._failed(episode, "workflow", str(error))
        finally:
            closed = await self._leave(live)
            vertices = self._graph.take(episode.episode_id)
        if closed is not None and closed.lost is not None:
            outcome = self._failed(episode, "gateway", closed.lost)
        elif closed is not None:
            outcome = with_gateway_calls(outcome, vertices, closed.calls, closed.warnings)
        return self._close(episode, attempt, outcome, vertices, started_s)

    async def _run_live(self, live: _Live) -> EpisodeOutcome:
        """Finds a worker and a gateway, then runs the attempt. Raises what their loss raises."""
        episode = live.episode
        try:
            async with asyncio.timeout(self._timeout_s):
                live.worker_name = await self._pick_worker()
                live.worker = self._workers[live.worker_name]
                self._load[live.worker_name] += 1
                if self._gateways is not None:
                    live.at_gateway = await self._gateways.admit(
                        episode.episode_id,
                        live.attempt,
                        ends_s=live.ends_s,
                        grace_s=self._grace_s,
                        seed_of=partial(self._call_seed, live),
                    )
        except TimeoutError:
            waited_for = "a gateway to admit it" if live.worker else "a worker to be up"
            text = f"not started within {self._timeout_s:g} s, waiting for: {waited_for}"
            return self._failed(episode, "deadline", text)
        order = EpisodeOrder(
            episode_id=episode.episode_id,
            task_id=episode.task_id,
            split=episode.split,
            attempt=live.attempt,
            endpoint=live.at_gateway.endpoint if live.at_gateway else None,
            timeout_s=max(0.0, live.ends_s - self._clock()),
            reward_retries=self._reward_retries,
        )
        running = asyncio.ensure_future(live.worker.run_episode(order))
        try:
            return await self._outcome(live, running)
        except asyncio.CancelledError:
            running.cancel()
            raise
        finally:
            if not running.done():
                self._late.add(running)
                running.add_done_callback(partial(self._came_late, live))

    async def _outcome(self, live: _Live, running: asyncio.Future[EpisodeOutcome]) -> EpisodeOutcome:
        """What the worker says, or has to say once it was told to end.

        Raises: GatewayLost if that goes away before.
        """
        assert live.worker is not None
        ends = {running} | ({live.at_gateway.lost} if live.at_gateway else set())  # type: set[asyncio.Future[Any]]
        await asyncio.wait(
            ends, timeout=max(0.0, live.ends_s - self._clock()), return_when=asyncio.FIRST_COMPLETED
        )
        if running.done():
            return running.result()
        waited_for = self._open_calls(live.episode)
        live.worker.cancel(live.episode.episode_id, live.attempt)
        if live.at_gateway is not None and live.at_gateway.lost.done():
            raise GatewayLost(live.at_gateway.lost.result())
        text = f"not finished within {self._timeout_s:g} s, waiting for: {waited_for}"
        await asyncio.wait([running], timeout=self._grace_s)
        if not running.done():
            self.suspects.put_nowait(live.worker_name)
            return self._failed(live.episode, "deadline", text)
        outcome = running.result()
        if outcome.state == EpisodeState.SCORED.value:
            return replace(outcome, failure=text, boundary="deadline")
        return self._failed(live.episode, "deadline", f"{text}; {outcome.failure}")

    async def _leave(self, live: _Live) -> Closed | None:
        """Ends what the attempt still has open."""
        episode_id = live.episode.episode_id
        try:
            if self._gateways is not None and live.at_gateway is not None:
                return await self._gateways.close(episode_id)
            return None
        finally:
            if live.worker is not None:
                self._load[live.worker_name] -= 1
            self._running.pop(episode_id, None)
            open_calls = self._graph.cancel_open(episode_id, "its episode ended", now=self._clock())
            self._dispatcher.abort(open_calls)

    def _came_late(self, live: _Live, running: asyncio.Future[EpisodeOutcome]) -> None:
        """The outcome of an attempt that is over: noted, never counted."""
        self._late.discard(running)
        if not running.cancelled() and running.exception() is None:
            state = running.result().state
            self._events.add(
                "outcome_late", episode=live.episode.episode_id, attempt=live.attempt, state=state
            )

    def _close(
        self,
        episode: Episode,
        attempt: int,
        outcome: EpisodeOutcome,
        vertices: list[Vertex],
        started_s: float,
    ) -> EndedEpisode:
        if outcome.failure is not None:
            scored = outcome.state == EpisodeState.SCORED.value
            self._events.add(
                "episode_scored_in_part" if scored else "episode_failed",
                episode=episode.episode_id,
                attempt=attempt,
                boundary=outcome.boundary,
                cause=outcome.failure[:200],
            )
        for warning in outcome.warnings:
            self._events.add("warning", episode=episode.episode_id, text=warning)
        attempted = Attempt(
            run=self._run,
            step=episode.step,
            purpose=episode.purpose,
            group_id=episode.group_id,
            task_id=episode.task_id,
            member=episode.member,
            attempt=attempt,
            reward_hash=self._plan.reward_hash,
            started_s=started_s,
            finished_s=self._clock(),
        )
        for record in episode_records(attempted, outcome, vertices):
            self._record(record)
        return EndedEpisode(episode=episode, outcome=outcome, vertices=vertices)

    async def _pick_worker(self) -> str:
        """The worker with the fewest episodes; waits for one if none is up."""
        while not self._workers:
            await self._worker_up.wait()
        return min(self._workers, key=lambda name: (self._load[name], name))

    def _failed(self, episode: Episode, boundary: str, failure: str) -> EpisodeOutcome:
        return EpisodeOutcome(
            episode_id=episode.episode_id,
            state=EpisodeState.FAILED.value,
            reward=None,
            calls=(),
            failure=failure,
            boundary=boundary,
        )

    def _open_calls(self, episode: Episode) -> str:
        open_calls = [
            f"{v.agent} call {v.invocation_id} is {v.state} on {v.cell or 'no engine'}"
            for v in self._graph.of_episode(episode.episode_id)
            if v.state in (InvocationState.BLOCKED, InvocationState.READY, InvocationState.RUNNING)
        ]
        return "; ".join(open_calls) or "user code, no call was open"

    # --- what workers announce

    def call_opened(self, call: CallOpened) -> None:
        live = self._running.get(call.episode_id)
        if live is None or not call.invocation_id.startswith(f"{call.episode_id}-a{live.attempt}-"):
            self._events.add("call_late", invocation=call.invocation_id)
            return
        agent = self._plan.agents[call.agent]
        vertex = Vertex(
            invocation_id=call.invocation_id,
            episode_id=call.episode_id,
            agent=call.agent,
            policy=agent.policy,
            index=call.index,
            parents=tuple((parent, EdgeKind(kind)) for parent, kind in call.parents),
            registered_s=self._clock(),
            seed=self._call_seed(live, call.agent, call.index),
            temperature=agent.temperature,
            max_tokens=agent.max_tokens,
            prompt_ids=call.prompt_ids,
            messages=call.messages,
        )
        if self._graph.add(vertex, now=self._clock()):
            self._dispatcher.submit(vertex)

    def call_prompt(self, prompt: CallPrompt) -> None:
        if prompt.invocation_id not in self._graph:
            return
        vertex = self._graph[prompt.invocation_id]
        if vertex.state is not InvocationState.BLOCKED:
            return
        vertex.messages = prompt.messages
        if self._graph.set_prompt(prompt.invocation_id, prompt.prompt_ids, now=self._clock()):
            self._dispatcher.submit(vertex)

    def _call_seed(self, live: _Live, agent: str, index: int) -> int:
        episode = live.episode
        place = (episode.task_id, episode.epoch, episode.member, agent, index, live.attempt)
        return derive_seed(self._seed, episode.purpose, *place)

    # --- what the dispatcher reports

    def call_finished(self, vertex: Vertex) -> None:
        self._graph.finish(vertex.invocation_id, now=self._clock())
        self._answer(vertex, failure=None)

    def call_failed(self, vertex: Vertex, failure: str) -> None:
        cancelled = self._graph.fail(vertex.invocation_id, failure, now=self._clock())
        self._answer(vertex, failure=failure)
        for name in cancelled:
            self._answer(self._graph[name], failure=f"parent {vertex.invocation_id} failed")

    def _answer(self, vertex: Vertex, *, failure: str | None) -> None:
        live = self._running.get(vertex.episode_id)
        if live is None or live.worker is None:
            return
        live.worker.answer(
            CallAnswer(
                invocation_id=vertex.invocation_id,
                token_ids=vertex.token_ids,
                finish_reason=vertex.finish_reason or "",
                failure=failure,
            )
        )
