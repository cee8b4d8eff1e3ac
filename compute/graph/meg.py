"""The execution graph in memory: open calls of live episodes, and which of them may run (the rollout view).

Only the conductor's loop writes. Every operation costs O(calls that it changes), never a scan. Finished
episodes are taken out whole (`take`), so that memory follows the episodes in flight; their calls go on to
`training_view.py`. Source: FlexMARL, the two views of the multi-agent execution graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megloom.compute.graph.records import EdgeKind
from megloom.compute.graph.states import IllegalMove, InvocationState, checked_move

FINAL = frozenset({InvocationState.DONE, InvocationState.FAILED, InvocationState.CANCELLED})


class GraphError(Exception):
    """A call that does not fit the graph: an unknown parent, a duplicate id, a prompt before its parents."""


@dataclass(kw_only=True, slots=True)
class Vertex:
    """One agent call. The graph changes `state` and `num_pending`; the dispatcher fills in the answer."""

    invocation_id: str
    episode_id: str
    agent: str
    policy: str
    index: int
    parents: tuple[tuple[str, EdgeKind], ...]
    registered_s: float
    seed: int
    temperature: float
    max_tokens: int
    state: InvocationState = InvocationState.BLOCKED
    num_pending: int = 0
    children: list[str] = field(default_factory=list)
    prompt_ids: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    version_spans: tuple[tuple[int, int, int], ...] = ()
    finish_reason: str | None = None
    failure: str | None = None
    cell: str | None = None
    engine: str | None = None
    num_reentries: int = 0
    messages: tuple[str, ...] = ()  # of the prompt, each as canonical JSON
    text: str = ""  # of a gateway's call, whose worker does not know it
    leaf_class: str = "main"  # which kind of path it ends: what samples are drawn from first
    unusable: str | None = None  # why an answered call may not be trained on
    fields: dict[str, Any] = field(default_factory=dict)  # user-defined values that came while it lived
    ready_s: float | None = None
    started_s: float | None = None
    finished_s: float | None = None


class ExecutionGraph:
    """The vertices of every live episode, and per policy the ready ones in the order of becoming ready.

    That order is a topological one: a call becomes ready after all its parents have ended.
    """

    def __init__(self) -> None:
        self._vertices: dict[str, Vertex] = {}
        self._by_episode: dict[str, list[str]] = {}
        self._counts: dict[tuple[str, InvocationState], int] = {}
        # Ordered dictionaries: a plain one takes longer and longer to find its first key behind removed ones.
        self._ready: dict[str, OrderedDict[str, None]] = {}

    def __getitem__(self, invocation_id: str) -> Vertex:
        return self._vertices[invocation_id]

    def get(self, invocation_id: str) -> Vertex | None:
        return self._vertices.get(invocation_id)

    def __contains__(self, invocation_id: str) -> bool:
        return invocation_id in self._vertices

    def __len__(self) -> int:
        return len(self._vertices)

    def count(self, policy: str, state: InvocationState) -> int:
        return self._counts.get((policy, state), 0)

    def first_ready(self, policy: str) -> Vertex | None:
        """The call of the policy that has been ready for longest."""
        ready = self._ready.get(policy)
        return self._vertices[next(iter(ready))] if ready else None

    def ready(self, policy: str) -> list[str]:
        """The ready calls of the policy, the oldest first."""
        return list(self._ready.get(policy, ()))

    def of_episode(self, episode_id: str) -> list[Vertex]:
        """The episode's calls in the order of their registration, which is a topological order."""
        return [self._vertices[name] for name in self._by_episode.get(episode_id, [])]

    def add(self, vertex: Vertex, *, now: float) -> bool:
        """Registers a call; returns True if it may run at once.

        Raises: GraphError for a known id or a parent that is not a call of the same episode.
        """
        if vertex.invocation_id in self._vertices:
            raise GraphError(f"{vertex.invocation_id}: registered twice")
        for parent_id, _ in vertex.parents:
            parent = self._vertices.get(parent_id)
            if parent is None or parent.episode_id != vertex.episode_id:
                raise GraphError(f"{vertex.invocation_id}: parent {parent_id} is no call of its episode")
        self._vertices[vertex.invocation_id] = vertex
        self._by_episode.setdefault(vertex.episode_id, []).append(vertex.invocation_id)
        for parent_id, _ in vertex.parents:
            parent = self._vertices[parent_id]
            if parent.state not in FINAL:
                parent.children.append(vertex.invocation_id)
                vertex.num_pending += 1
        self._count(vertex, +1)
        return self._make_ready_if_complete(vertex, now)

    def set_prompt(self, invocation_id: str, prompt_ids: Sequence[int], *, now: float) -> bool:
        """Adds the prompt of a call; returns True if it became ready.

        Raises: GraphError if parents are pending, whose answers a prompt needs, or if it is not blocked.
        """
        vertex = self._vertices[invocation_id]
        if vertex.num_pending:
            raise GraphError(f"{invocation_id}: prompt sent while {vertex.num_pending} parents are pending")
        if vertex.state is not InvocationState.BLOCKED:
            raise GraphError(f"{invocation_id}: prompt sent to a call that is {vertex.state}")
        vertex.prompt_ids = tuple(prompt_ids)
        return self._make_ready_if_complete(vertex, now)

    def start(self, invocation_id: str, *, cell: str, engine: str | None = None, now: float) -> None:
        """A ready call runs on a cell; `engine` names the process there, by default like the cell."""
        vertex = self._move(invocation_id, InvocationState.RUNNING)
        vertex.cell, vertex.engine, vertex.started_s = cell, engine or cell, now

    def reenter(self, invocation_id: str, *, now: float) -> None:
        """A running call goes back to ready: its engine was lost or it ran past its deadline."""
        if self._vertices[invocation_id].state is InvocationState.BLOCKED:
            raise IllegalMove(f"{invocation_id}: blocked → ready takes a prompt, it cannot re-enter")
        vertex = self._move(invocation_id, InvocationState.READY)
        vertex.num_reentries += 1
        vertex.ready_s = now

    def finish(self, invocation_id: str, *, now: float) -> list[str]:
        """Ends a running call; returns the blocked calls that now have all their parents' answers."""
        vertex = self._move(invocation_id, InvocationState.DONE)
        vertex.finished_s = now
        unblocked = []
        for child_id in vertex.children:
            child = self._vertices[child_id]
            child.num_pending -= 1
            if child.num_pending == 0 and child.state is InvocationState.BLOCKED:
                unblocked.append(child_id)
        return unblocked

    def fail(self, invocation_id: str, failure: str, *, now: float) -> list[str]:
        """Ends a call without an answer; returns its blocked descendants, which are cancelled with it."""
        vertex = self._move(invocation_id, InvocationState.FAILED)
        vertex.failure, vertex.finished_s = failure, now
        cancelled: list[str] = []
        frontier = list(vertex.children)
        while frontier:
            child = self._vertices[frontier.pop()]
            if child.state is InvocationState.BLOCKED:
                self._move(child.invocation_id, InvocationState.CANCELLED)
                child.failure, child.finished_s = f"parent {invocation_id} failed", now
                cancelled.append(child.invocation_id)
                frontier.extend(child.children)
        return cancelled

    def cancel_open(self, episode_id: str, failure: str, *, now: float) -> list[Vertex]:
        """Cancels every call of the episode that has not ended; returns those that were running."""
        running = []
        for vertex in self.of_episode(episode_id):
            if vertex.state in FINAL:
                continue
            if vertex.state is InvocationState.RUNNING:
                running.append(vertex)
            self._move(vertex.invocation_id, InvocationState.CANCELLED)
            vertex.failure, vertex.finished_s = failure, now
        return running

    def take(self, episode_id: str) -> list[Vertex]:
        """Removes a finished episode and returns its calls."""
        vertices = self.of_episode(episode_id)
        for vertex in vertices:
            del self._vertices[vertex.invocation_id]
            self._leave(vertex)
        self._by_episode.pop(episode_id, None)
        return vertices

    def _make_ready_if_complete(self, vertex: Vertex, now: float) -> bool:
        if vertex.num_pending or vertex.prompt_ids is None or vertex.state is not InvocationState.BLOCKED:
            return False
        self._move(vertex.invocation_id, InvocationState.READY)
        vertex.ready_s = now
        return True

    def _move(self, invocation_id: str, state: InvocationState) -> Vertex:
        vertex = self._vertices[invocation_id]
        checked = checked_move(invocation_id, vertex.state, state)
        self._leave(vertex)
        vertex.state = checked
        self._count(vertex, +1)
        if checked is InvocationState.READY:
            self._ready.setdefault(vertex.policy, OrderedDict())[invocation_id] = None
        return vertex

    def _leave(self, vertex: Vertex) -> None:
        self._count(vertex, -1)
        if vertex.state is InvocationState.READY:
            del self._ready[vertex.policy][vertex.invocation_id]

    def _count(self, vertex: Vertex, change: int) -> None:
        key = (vertex.policy, vertex.state)
        self._counts[key] = self._counts.get(key, 0) + change
