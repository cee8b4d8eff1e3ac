"""What a completion costs in the graph, however many calls are open, and what a long conversation stores.

Ready: two graphs of a thousand and of a hundred thousand open calls, in chains of ten, a third of the heads
running. A completion is timed from the answer to the next running call: `finish`, the prompt of the unblocked
child, and the oldest ready call taken and started. The graphs take turns, so that other load hits both alike;
values are medians. Storage: the segment records of one episode whose prompt grows by a message and an answer
each turn; below 1 tokens would be lost, above 1 kept twice.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections import deque
from typing import Any

from megloom.compute.graph.meg import ExecutionGraph, Vertex
from megloom.compute.graph.records import EdgeKind
from megloom.compute.graph.states import InvocationState
from megloom.compute.graph.token_paths import TokenPaths

CHAIN = 10  # open calls of an episode: one ready or running, the others blocked behind it
POLICY = "solver"
TARGET_READY_US, TARGET_GROWTH = 100.0, 1.5
MESSAGE_TOKENS, ANSWER_TOKENS = 40, 60

Figures = dict[str, dict[str, Any]]


class OpenGraph:
    """A graph that keeps its number of open calls: one that ends is replaced at the end of its chain."""

    def __init__(self, num_open: int) -> None:
        self._graph = ExecutionGraph()
        self._names = itertools.count()
        self._tails: dict[str, str] = {}
        self._running: deque[str] = deque()
        for number in range(num_open // CHAIN):
            for _ in range(CHAIN):
                self._append(f"e{number:06d}")
        for _ in range(num_open // CHAIN // 3):
            self._start_oldest()

    def complete(self) -> int:
        """Ends the call that has run for longest; nanoseconds until the next one runs."""
        name = self._running.popleft()
        started_ns = time.perf_counter_ns()
        for child in self._graph.finish(name, now=1.0):
            self._graph.set_prompt(child, (1, 2, 3), now=1.0)
        self._start_oldest()
        took_ns = time.perf_counter_ns() - started_ns
        self._append(self._graph[name].episode_id)
        return took_ns

    def num_open(self) -> int:
        states = (InvocationState.BLOCKED, InvocationState.READY, InvocationState.RUNNING)
        return sum(self._graph.count(POLICY, state) for state in states)

    def _start_oldest(self) -> None:
        oldest = self._graph.first_ready(POLICY)
        assert oldest is not None
        self._graph.start(oldest.invocation_id, cell="engine/solver/0", now=1.0)
        self._running.append(oldest.invocation_id)

    def _append(self, episode: str) -> None:
        name, before = f"{episode}-i{next(self._names):07d}", self._tails.get(episode)
        parents = ((before, EdgeKind.DATA),) if before is not None else ()
        self._graph.add(call(name, episode, parents, None if before else (1, 2, 3)), now=0.0)
        self._tails[episode] = name


def call(
    name: str, episode: str, parents: tuple[tuple[str, EdgeKind], ...], prompt_ids: tuple[int, ...] | None
) -> Vertex:
    return Vertex(
        invocation_id=name,
        episode_id=episode,
        agent="solver",
        policy=POLICY,
        index=0,
        parents=parents,
        registered_s=0.0,
        seed=0,
        temperature=1.0,
        max_tokens=256,
        prompt_ids=prompt_ids,
    )


def ready_figures(
    *, small: int = 1_000, large: int = 100_000, turns: int = 40, per_turn: int = 250
) -> Figures:
    """Median time of a completion at `large` open calls, and its ratio to that at `small`."""
    graphs = {size: OpenGraph(size) for size in (small, large)}
    took_ns: dict[int, list[int]] = {size: [] for size in graphs}
    for turn in range(turns + 1):
        for size, graph in graphs.items():
            took = [graph.complete() for _ in range(per_turn)]
            if turn:  # the first one warms the caches
                took_ns[size] += took
    assert all(graph.num_open() == size for size, graph in graphs.items())
    medians = {size: statistics.median(took) for size, took in took_ns.items()}
    large_us, growth = medians[large] / 1e3, medians[large] / medians[small]
    return {
        "ready_us_100k": figure(large_us, "us", TARGET_READY_US),
        "ready_growth": figure(growth, "ratio", TARGET_GROWTH),
    }


def storage_figures(*, turns: int = 60) -> Figures:
    """Tokens in the segment records of a growing conversation, divided by the tokens that were new."""
    dice = random.Random(0)
    paths, conversation = TokenPaths(run="bench", step=0), tuple[int, ...]()
    new_tokens = 0
    for turn in range(turns):
        prompt = conversation + tuple(dice.choices(range(50_000), k=MESSAGE_TOKENS))
        vertex = call(f"e-i{turn:03d}", "e", (), prompt)
        vertex.token_ids = tuple(dice.choices(range(50_000), k=ANSWER_TOKENS))
        vertex.logprobs = (-1.0,) * ANSWER_TOKENS
        vertex.version_spans = ((0, 0, ANSWER_TOKENS),)
        vertex.state = InvocationState.DONE
        paths.add(vertex)
        conversation, new_tokens = prompt + vertex.token_ids, new_tokens + MESSAGE_TOKENS + ANSWER_TOKENS
    ratio = sum(len(segment.token_ids) for segment in paths.segments) / new_tokens
    return {"stored_tokens_ratio": {"value": ratio, "unit": "ratio", "target": 1.0, "ok": ratio == 1.0}}


def figure(value: float, unit: str, at_most: float) -> dict[str, Any]:
    return {"value": round(value, 3), "unit": unit, "target": at_most, "ok": value <= at_most}


if __name__ == "__main__":
    print(json.dumps({**ready_figures(), **storage_figures()}, indent=2))
