"""Hierarchical GRPO for agents of many turns: how good was the episode, and how good the turn in its round.

    A_it = Ã(R_i) + ω · Ã(r_it)
    R_i   what the agent earned in episode i: the mean of its outcomes, one entry per episode in (task, agent)
    r_it  the reward of call t, if it was scored for itself; one entry per call in (task, agent, round)
    Ã(x)  (x − mean(x)) / (std(x) + ε), or without the division; 0 in a group of one and for equal values

A call that inherits its episode's reward has no second part.
Source: GiGPO (arXiv 2505.10978), two levels of groups; AT-GRPO (arXiv 2510.11062), groups by agent and turn.
Deviations: calls are grouped by their turn, not by equal states; R is a mean, so that episodes of more turns
weigh the same; a call's reward is its own, without what later turns earned.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal

from pydantic import Field

from megloom.compute.algorithms.base import Outcome, PolicyGradient
from megloom.compute.algorithms.statistics import centred, exact_mean, positions_by, standardised


class HierarchicalGrpo(PolicyGradient):
    """`round_weight` is ω. `min_group_size` counts the agent's outcomes in the group."""

    name: Literal["hierarchical_grpo"] = "hierarchical_grpo"
    normalise: Literal["std", "none"] = "std"
    round_weight: float = Field(default=1.0, ge=0)
    min_group_size: int = Field(default=2, ge=2)

    def advantages_of(
        self, outcomes: Sequence[Outcome], rewards: Sequence[float], state: Mapping[str, float]
    ) -> list[float]:
        advantages = [0.0] * len(outcomes)
        episodes = positions_by(
            outcomes, lambda outcome: (outcome.group_id, outcome.agent, outcome.episode_id)
        )
        returns = {key: exact_mean([rewards[i] for i in found]) for key, found in episodes.items()}
        members: dict[Hashable, list[tuple[str, str, str]]] = {}
        for key in returns:
            members.setdefault(key[:2], []).append(key)
        for keys in members.values():
            for key, part in zip(keys, self._relative([returns[key] for key in keys]), strict=True):
                for position in episodes[key]:
                    advantages[position] += part
        own = [position for position, outcome in enumerate(outcomes) if outcome.key != outcome.episode_id]
        rounds = positions_by(own, lambda i: (outcomes[i].group_id, outcomes[i].agent, outcomes[i].round))
        for places in rounds.values():
            parts = self._relative([rewards[own[place]] for place in places])
            for place, part in zip(places, parts, strict=True):
                advantages[own[place]] += self.round_weight * part
        return advantages

    def _relative(self, values: Sequence[float]) -> list[float]:
        return standardised(values) if self.normalise == "std" else centred(values)
