"""The algorithms by name."""

from __future__ import annotations

from typing import Any

from megloom.compute.algorithms.grpo import Grpo

ALGORITHMS: dict[str, type[Grpo]] = {"grpo": Grpo}


def parse_algorithm(values: dict[str, Any]) -> Grpo:
    """Returns the knobs of the class that `values["name"]` picks.

    Raises: ValueError for an unknown name, an unknown key or a value out of range.
    """
    name = values.get("name")
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm name: got {name!r}, known: {', '.join(sorted(ALGORITHMS))}")
    return ALGORITHMS[name].parse(values)
