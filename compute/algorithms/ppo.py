"""PPO with a critic: advantages of single tokens, from the values that a head on the policy predicts.

    δ_t = r_t + γ · V_{t+1} − V_t    r_t is the reward at a row's last trained token, else 0; V after it is 0
    A_t = δ_t + γλ · A_{t+1}         G_t = A_t + V_t, what the value head learns

t counts the trained tokens of a row: what a tool or another agent wrote in between takes no time.
Source: PPO (arXiv 1707.06347), GAE (arXiv 1506.02438). Deviations: advantages are not whitened over the
batch, which would hold every gradient back to the step's end; the KL term is the loss's, not the reward's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from megloom.compute.algorithms.base import Outcome, PolicyGradient


class Ppo(PolicyGradient):
    """`value_coefficient` weighs the value loss, `value_clip` bounds a value's move in it (None: free).

    The "advantage" of an outcome is its reward, which `columns` spreads over the tokens.
    """

    name: Literal["ppo"] = "ppo"
    clip_high: float = Field(default=0.2, ge=0, description="the ratio is clipped to [1 − clip_low, 1 + …]")
    gamma: float = Field(default=1.0, ge=0, le=1)
    lam: float = Field(default=0.95, ge=0, le=1)
    value_coefficient: float = Field(default=0.5, ge=0)
    value_clip: float | None = Field(default=0.2, gt=0)
    min_group_size: int = Field(default=1, ge=1, le=1, description="a critic needs no group")

    @property
    def has_critic(self) -> bool:
        return True

    @property
    def wants(self) -> tuple[str, ...]:
        return ("values", *super().wants)

    def advantages_of(
        self, outcomes: Sequence[Outcome], rewards: Sequence[float], state: Mapping[str, float]
    ) -> list[float]:
        return list(rewards)

    def columns(self, reward: float, values: Sequence[float]) -> dict[str, list[float]]:
        advantages: list[float] = []
        value_after, advantage_after, reward_here = 0.0, 0.0, reward
        for value in reversed(values):
            advantage_after = (
                reward_here + self.gamma * value_after - value + self.gamma * self.lam * advantage_after
            )
            advantages.append(advantage_after)
            value_after, reward_here = value, 0.0
        advantages.reverse()
        returns = [advantage + value for advantage, value in zip(advantages, values, strict=True)]
        return {"advantages": advantages, "returns": returns}
