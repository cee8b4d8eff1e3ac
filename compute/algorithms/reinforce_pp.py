"""REINFORCE++: no group is needed, since the whole step is the baseline.

    x_i = r_i                     baseline="none"
    x_i = r_i − mean(r of i's group)    baseline="group", for tasks of unlike difficulty
    A_i = (x_i − μ) / sqrt(σ² + 1e-8)     μ, σ² over all tokens of the agent in the step, Bessel's correction

An outcome counts as often as it has trained tokens. As μ and σ need all groups, gradients begin at the step's
end. A group is (task, agent), or (task, agent, round) with `baseline_per` "round"; one that is too small
leaves before any statistic. Source: REINFORCE++ (arXiv 2501.03262), as verl computes it. Deviations: each
agent of a policy is whitened by itself, so that one agent's scale does not touch another's; the KL term is
the loss's, not the reward's; a reward reaches all tokens of its outcome (γ = 1). SkyRL's form cuts the return
at masked tokens inside a row, which gives what was sampled before a tool's answer a reward of 0; it is not
offered, as an outcome then rewards only its last turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, model_validator

from megloom.compute.algorithms.base import Outcome, PolicyGradient, Scope
from megloom.compute.algorithms.statistics import centred, positions_by, whitened


class ReinforcePlusPlus(PolicyGradient):
    """`min_group_size` is at least 2 with a group baseline: a group of one would only be its own mean.

    `baseline_per` "round" compares only calls of the same turn; it belongs to the group baseline.
    """

    name: Literal["reinforce_pp"] = "reinforce_pp"
    baseline: Literal["none", "group"] = "none"
    baseline_per: Literal["agent", "round"] = "agent"
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
        values = dict(enumerate(rewards))
        if self.baseline == "group":
            values = self._less_group_mean(outcomes, rewards)
        used = sorted(values)
        advantages = [0.0] * len(outcomes)
        for places in positions_by(used, lambda position: outcomes[position].agent).values():
            positions = [used[place] for place in places]
            tokens = [float(outcomes[position].num_tokens) for position in positions]
            found = whitened([values[position] for position in positions], tokens)
            for position, advantage in zip(positions, found, strict=True):
                advantages[position] = advantage
        return advantages

    def _less_group_mean(self, outcomes: Sequence[Outcome], rewards: Sequence[float]) -> dict[int, float]:
        """By position, for the outcomes in groups that are large enough."""
        values: dict[int, float] = {}
        for positions in positions_by(outcomes, self._group).values():
            if len(positions) >= self.smallest_group:
                found = centred([rewards[position] for position in positions])
                values.update(zip(positions, found, strict=True))
        return values

    def _group(self, outcome: Outcome) -> tuple[str, str, int]:
        return outcome.group_id, outcome.agent, outcome.round if self.baseline_per == "round" else 0

    @model_validator(mode="after")
    def _rounds_are_of_the_group_baseline(self) -> ReinforcePlusPlus:
        if self.baseline_per == "round" and self.baseline != "group":
            raise ValueError(f"baseline_per 'round' with baseline {self.baseline!r}: set baseline to 'group'")
        return self
