"""RAE, role-conditioned advantage estimation: each agent has a running mean of its own rewards as baseline.

    A_i = r_i − b_k                       b_k as the last committed step left it, 0 at first
    b_k ← α^n · b_k + (1 − α^n) · mean(r)     after a step with n outcomes of agent k

For games between agents of unlike odds, where no group of equal tasks exists.
Source: SPIRAL (arXiv 2506.24119). Deviations: there b moves with each outcome and then serves it; here it
stands still within a step and moves at the commit, as far as n moves by the mean would take it, so that
neither the order of the groups nor a restart can matter. One baseline per agent, not per agent and game.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from megloom.compute.algorithms.base import Outcome, PolicyGradient
from megloom.compute.algorithms.statistics import exact_mean, positions_by


class Rae(PolicyGradient):
    """`decay` is α. The state maps an agent to its baseline."""

    name: Literal["rae"] = "rae"
    decay: float = Field(default=0.95, ge=0, lt=1)
    min_group_size: int = Field(default=1, ge=1)

    def advantages_of(
        self, outcomes: Sequence[Outcome], rewards: Sequence[float], state: Mapping[str, float]
    ) -> list[float]:
        return [
            reward - state.get(outcome.agent, 0.0) for outcome, reward in zip(outcomes, rewards, strict=True)
        ]

    def state_after(
        self, outcomes: Sequence[Outcome], rewards: Sequence[float], state: Mapping[str, float]
    ) -> dict[str, float]:
        after = dict(state)
        for agent, positions in positions_by(outcomes, lambda outcome: outcome.agent).items():
            kept = self.decay ** len(positions)
            mean = exact_mean([rewards[position] for position in positions])
            after[agent] = kept * state.get(agent, 0.0) + (1 - kept) * mean
        return after
