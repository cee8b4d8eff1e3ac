"""The graph in memory: readiness follows edges, illegal moves are refused, counts never drift."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megloom.compute.graph.meg import ExecutionGraph, GraphError, Vertex
from megloom.compute.graph.records import EdgeKind
from megloom.compute.graph.states import IllegalMove, InvocationState


def vertex(name: str, *parents: str, prompt: tuple[int, ...] | None = None, policy: str = "solver") -> Vertex:
    return Vertex(
        invocation_id=name,
        episode_id="e",
        agent="solver",
        policy=policy,
        index=0,
        parents=tuple((parent, EdgeKind.DATA) for parent in parents),
        registered_s=0.0,
        seed=1,
        temperature=1.0,
        max_tokens=4,
        prompt_ids=prompt if parents else (1,),
    )


def run(graph: ExecutionGraph, name: str) -> list[str]:
    graph.start(name, cell="c", now=1.0)
    return graph.finish(name, now=2.0)


def test_a_call_without_parents_is_ready_at_once() -> None:
    graph = ExecutionGraph()
    assert graph.add(vertex("plan"), now=0.0)
    assert graph["plan"].state is InvocationState.READY


def test_a_solver_call_is_blocked_until_its_planner_has_finished() -> None:
    graph = ExecutionGraph()
    graph.add(vertex("plan"), now=0.0)
    assert not graph.add(vertex("try", "plan"), now=0.0)
    assert graph["try"].state is InvocationState.BLOCKED
    assert run(graph, "plan") == ["try"]
    assert graph.set_prompt("try", (1, 2), now=3.0)
    assert graph["try"].state is InvocationState.READY and graph["try"].ready_s == 3.0


def test_a_call_with_several_parents_waits_for_the_last_one() -> None:
    graph = ExecutionGraph()
    for name in ("a", "b"):
        graph.add(vertex(name), now=0.0)
    graph.add(vertex("choice", "a", "b"), now=0.0)
    assert run(graph, "a") == []
    assert run(graph, "b") == ["choice"]


def test_a_prompt_before_its_parents_is_an_error_that_names_the_call() -> None:
    graph = ExecutionGraph()
    graph.add(vertex("plan"), now=0.0)
    graph.add(vertex("try", "plan"), now=0.0)
    with pytest.raises(GraphError, match="try: prompt sent while 1 parents are pending"):
        graph.set_prompt("try", (1,), now=0.0)


def test_a_failed_call_cancels_its_blocked_descendants() -> None:
    graph = ExecutionGraph()
    graph.add(vertex("plan"), now=0.0)
    graph.add(vertex("try", "plan"), now=0.0)
    graph.add(vertex("choice", "try"), now=0.0)
    graph.start("plan", cell="c", now=1.0)
    assert graph.fail("plan", "engine gone", now=2.0) == ["try", "choice"]
    assert graph["choice"].state is InvocationState.CANCELLED


def test_a_reentered_call_counts_its_attempt_and_can_run_again() -> None:
    graph = ExecutionGraph()
    graph.add(vertex("plan"), now=0.0)
    graph.start("plan", cell="c", now=1.0)
    graph.reenter("plan", now=2.0)
    assert graph["plan"].num_reentries == 1 and graph["plan"].state is InvocationState.READY
    assert run(graph, "plan") == []


def test_an_illegal_move_names_the_call() -> None:
    graph = ExecutionGraph()
    graph.add(vertex("plan"), now=0.0)
    run(graph, "plan")
    with pytest.raises(IllegalMove, match="plan: done → running"):
        graph.start("plan", cell="c", now=3.0)


def test_unknown_parents_and_duplicates_are_refused() -> None:
    graph = ExecutionGraph()
    graph.add(vertex("plan"), now=0.0)
    with pytest.raises(GraphError, match="registered twice"):
        graph.add(vertex("plan"), now=0.0)
    with pytest.raises(GraphError, match="parent nobody is no call of its episode"):
        graph.add(vertex("x", "nobody"), now=0.0)


def test_taking_an_episode_leaves_nothing_behind() -> None:
    graph = ExecutionGraph()
    graph.add(vertex("plan"), now=0.0)
    graph.add(vertex("try", "plan"), now=0.0)
    assert graph.cancel_open("e", "over", now=1.0) == []
    assert [v.invocation_id for v in graph.take("e")] == ["plan", "try"]
    assert len(graph) == 0 and graph.count("solver", InvocationState.CANCELLED) == 0


@given(seed=st.integers(0, 10_000), size=st.integers(1, 40))
def test_every_call_of_a_random_graph_runs_after_its_parents(seed: int, size: int) -> None:
    dice = random.Random(seed)
    graph, ready, order = ExecutionGraph(), [], []
    for number in range(size):
        parents = [f"v{p}" for p in range(number) if dice.random() < 0.2]
        if graph.add(vertex(f"v{number}", *parents), now=0.0):
            ready.append(f"v{number}")
    while ready:
        name = ready.pop(dice.randrange(len(ready)))
        order.append(name)
        for child in run(graph, name):
            assert graph.set_prompt(child, (1,), now=0.0)
            ready.append(child)
    assert len(order) == size
    place = {name: position for position, name in enumerate(order)}
    for done in graph.of_episode("e"):
        assert all(place[parent] < place[done.invocation_id] for parent, _ in done.parents)
    assert graph.count("solver", InvocationState.DONE) == size
