from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megloom.compute.graph.closure import hops_from, shortest_path

DIAMOND = {"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": ["e"], "x": ["a"]}
graphs = st.dictionaries(st.integers(0, 7), st.lists(st.integers(0, 7), max_size=4), max_size=8)


def test_hops_are_the_fewest_and_count_from_the_nearest_start() -> None:
    assert hops_from(DIAMOND, ["a"]) == {"a": 0, "b": 1, "c": 1, "d": 2, "e": 3}
    assert hops_from(DIAMOND, ["a", "d"])["e"] == 1


def test_a_circle_ends() -> None:
    assert hops_from({1: [2], 2: [1]}, [1]) == {1: 0, 2: 1}


def test_a_path_takes_the_neighbour_that_is_listed_first() -> None:
    assert shortest_path(DIAMOND, ["a"], "e") == ["a", "b", "d", "e"]


def test_a_start_that_is_the_goal_is_a_path_of_one() -> None:
    assert shortest_path(DIAMOND, ["x", "e"], "e") == ["e"]


def test_there_is_no_path_against_the_arrows() -> None:
    assert shortest_path(DIAMOND, ["e"], "a") is None


@given(graph=graphs, start=st.integers(0, 7), goal=st.integers(0, 7))
def test_a_path_is_as_long_as_the_hops_say_and_follows_the_arrows(
    graph: dict[int, list[int]], start: int, goal: int
) -> None:
    hops = hops_from(graph, [start])
    path = shortest_path(graph, [start], goal)
    assert (path is None) == (goal not in hops)
    if path is not None:
        assert (path[0], path[-1], len(path) - 1) == (start, goal, hops[goal])
        assert all(after in graph[before] for before, after in pairwise(path))
