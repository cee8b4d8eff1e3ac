"""The algorithms by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megloom.compute.algorithms.base import PolicyGradient
from megloom.compute.algorithms.dapo import Dapo
from megloom.compute.algorithms.dr_mas import DrMas
from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.algorithms.hierarchical_grpo import HierarchicalGrpo
from megloom.compute.algorithms.ppo import Ppo
from megloom.compute.algorithms.rae import Rae
from megloom.compute.algorithms.reinforce_pp import ReinforcePlusPlus
from megloom.compute.algorithms.rloo import Rloo

ALGORITHMS: dict[str, type[PolicyGradient]] = {
    "dapo": Dapo,
    "dr_mas": DrMas,
    "grpo": Grpo,
    "hierarchical_grpo": HierarchicalGrpo,
    "ppo": Ppo,
    "rae": Rae,
    "reinforce_pp": ReinforcePlusPlus,
    "rloo": Rloo,
}


def parse_algorithm(values: dict[str, Any]) -> PolicyGradient:
    """Returns the knobs of the class that `values["name"]` picks.

    Raises: ValueError for an unknown name, an unknown key or a value out of range.
    """
    name = values.get("name")
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm name: got {name!r}, known: {', '.join(sorted(ALGORITHMS))}")
    return ALGORITHMS[name].parse(values)


def policy_algorithm(policy: str, spec: Mapping[str, Any]) -> PolicyGradient:
    """The algorithm of a policy's plan, whose knobs came as plain data and may not have met their class.

    Raises: ValueError as `parse_algorithm`, and if lag is allowed that nothing corrects.
    """
    try:
        algorithm = parse_algorithm(spec["algorithm"])
    except ValueError as error:
        raise ValueError(f"policy {policy}: {error}") from None
    lag = spec.get("max_off_policy_steps", 0)
    if lag and algorithm.correction is None:
        raise ValueError(
            f"policy {policy}: max_off_policy_steps {lag} without a correction: "
            "set the algorithm's `correction`"
        )
    return algorithm
