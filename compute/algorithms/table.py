"""Algorithms by name."""

from __future__ import annotations

from typing import Any

from megloom.compute.algorithms.grpo import Grpo

ALGORITHMS: dict[str, type[Grpo]] = {"grpo": Grpo}


def parse_algorithm(values: dict[str, Any]) -> Grpo:
    """The knobs of the algorithm that `values["name"]` names.

    Raises: ValueError for an unknown name, naming the known ones.
    """
    name = values.get("name", "")
    if name not in ALGORITHMS:
        raise ValueError(f"no algorithm {name!r} (known: {', '.join(sorted(ALGORITHMS))})")
    return ALGORITHMS[name].parse(values)
