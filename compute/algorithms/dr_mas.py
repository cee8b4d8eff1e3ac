"""Dr. MAS: each agent is normalised by its own mean and deviation, counted over its calls.

    A = (r − μ_k) / (σ_k + ε)     μ_k, σ_k over what agent k earned in the group, ε = 1e-6

    weigh="episodes"    an outcome counts once, however many calls earned it (this is GRPO per agent)
    weigh="calls"       an outcome counts as often as the agent was called for it, as in the paper

Either way a group of fewer than `min_group_size` outcomes has exact zeros, however many calls earned them.

Source: Dr. MAS (arXiv 2602.08847). Deviations: "episodes" is the default, so that an episode with more turns
does not move the baseline of the others; σ has Bessel's correction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from megloom.compute.algorithms.base import Outcome
from megloom.compute.algorithms.group_relative import GroupRelative
from megloom.compute.algorithms.statistics import EPSILON, are_equal, positions_by, standardised


class DrMas(GroupRelative):
    """The knobs beside those of `GroupRelative`."""

    name: Literal["dr_mas"] = "dr_mas"
    weigh: Literal["episodes", "calls"] = "episodes"

    def relative(self, rewards: Sequence[float]) -> list[float]:
        return standardised(rewards)

    def advantages_of(
        self, outcomes: Sequence[Outcome], rewards: Sequence[float], state: Mapping[str, float]
    ) -> list[float]:
        if self.weigh == "episodes":
            return super().advantages_of(outcomes, rewards, state)
        advantages = [0.0] * len(outcomes)
        for positions in positions_by(outcomes, self._group).values():
            if len(positions) < self.min_group_size:  # one round of a larger group, perhaps
                continue
            counts = [outcomes[position].num_calls for position in positions]
            found = _over_calls([rewards[position] for position in positions], counts)
            for position, advantage in zip(positions, found, strict=True):
                advantages[position] = advantage
        return advantages


def _over_calls(rewards: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Standardised by the mean and deviation over `counts` copies of each of at least 2 rewards."""
    if are_equal(rewards):
        return [0.0] * len(rewards)
    total = sum(counts)
    mean = math.fsum(r * n for r, n in zip(rewards, counts, strict=True)) / total
    square = math.fsum((r - mean) ** 2 * n for r, n in zip(rewards, counts, strict=True)) / (total - 1)
    return [(r - mean) / (math.sqrt(square) + EPSILON) for r in rewards]
