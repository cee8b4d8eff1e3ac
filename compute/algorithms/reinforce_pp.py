"""REINFORCE++: no group is needed, since the whole step is the baseline.

    x_i = r_i                     baseline="none"
    x_i = r_i − mean(r of i's group)    baseline="group", for tasks of unlike difficulty
    A_i = (x_i − μ) / sqrt(σ² + 1e-8)     μ, σ² over all tokens of the agent in the step, Bessel's correction

An outcome counts as often as it has trained tokens. As μ and σ need all groups, gradients begin at the step's
end. Source: REINFORCE++ (arXiv 2501.03262), as verl computes it. Deviations: each agent of a policy is
whitened by itself, so that one agent's scale does not touch another's; the KL term is the loss's, not the
reward's; a reward reaches all tokens of its outcome (γ = 1). SkyRL's form cuts the return at masked tokens
inside a row, which gives what was sampled before a tool's answer a reward of 0; it is not offered, as an
outcome then rewards only its last turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from megloom.compute.algorithms.base import Outcome, PolicyGradient, Scope
from megloom.compute.algorithms.statistics import centred, positions_by, whitened


class ReinforcePlusPlus(PolicyGradient):
    """`min_group_size` is at least 2 with a group baseline: a group of one would only be its own mean."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    baseline: Literal["none", "group"] = "none"
    clip_high: float = Field(default=0.2, ge=0, description="the ratio is clipped to [1 − clip_low, 1 + …]")
    min_group_size: int = Field(default=1, ge=1)

    @property
    def scope(self) -> Scope:
        return "step"

    @property
    def smallest_group(self) -> int:
        return max(2, self.min_group_size) if self.baseline == "group" else self.min_group_size

    def advantages_of(
        self, outcomes: Sequence[Outcome], rewards: Sequence[float], state: Mapping[str, float]
    ) -> list[float]:
        values = self._less_group_mean(outcomes, rewards) if self.baseline == "group" else list(rewards)
        advantages = [0.0] * len(outcomes)
        for positions in positions_by(outcomes, lambda outcome: outcome.agent).values():
            tokens = [float(outcomes[position].num_tokens) for position in positions]
            found = whitened([values[position] for position in positions], tokens)
            for position, advantage in zip(positions, found, strict=True):
                advantages[position] = advantage
        return advantages

    def _less_group_mean(self, outcomes: Sequence[Outcome], rewards: Sequence[float]) -> list[float]:
        values = [0.0] * len(outcomes)
        for positions in positions_by(outcomes, lambda outcome: (outcome.group_id, outcome.agent)).values():
            found = centred([rewards[position] for position in positions])
            for position, value in zip(positions, found, strict=True):
                values[position] = value
        return values
