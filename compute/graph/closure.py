"""Walks over a directed graph that is given as a mapping from a node to its neighbours. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def hops_from(neighbours: Mapping[Node, Iterable[Node]], starts: Iterable[Node]) -> dict[Node, int]:
    """Every node that can be reached, with the fewest hops to it; the starts have 0. Nearest first."""
    hops = dict.fromkeys(starts, 0)
    front = list(hops)
    while front:
        found: list[Node] = []
        for node in front:
            for other in neighbours.get(node, ()):
                if other not in hops:
                    hops[other] = hops[node] + 1
                    found.append(other)
        front = found
    return hops


def shortest_path(
    neighbours: Mapping[Node, Iterable[Node]], starts: Iterable[Node], goal: Node
) -> list[Node] | None:
    """The nodes of a path with the fewest hops from one of `starts` to `goal`, both included.

    None if there is none. Among several it takes the one whose neighbours are listed first.
    """
    came: dict[Node, Node | None] = dict.fromkeys(starts)
    front = list(came)
    while front and goal not in came:
        found: list[Node] = []
        for node in front:
            for other in neighbours.get(node, ()):
                if other not in came:
                    came[other] = node
                    found.append(other)
        front = found
    if goal not in came:
        return None
    path = [goal]
    while (before := came[path[-1]]) is not None:
        path.append(before)
    return path[::-1]
