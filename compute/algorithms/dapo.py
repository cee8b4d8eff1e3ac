"""DAPO: GRPO without groups that teach nothing, with a higher upper clip and a penalty on overlong answers.

    A_i = (r'_i − mean(r')) / (std(r') + ε)   if the raw rewards r of the group differ, else 0
    r'  = r less the `overlong` penalty

A group whose raw rewards are all equal is filtered, also where the penalty alone would make a difference: its
advantages are exactly zero, so its samples are dropped and counted. Clip-higher and token-mean are defaults.
Source: DAPO (arXiv 2503.14476). Deviation: filtered groups are not replaced by drawing more tasks, so a step
may train on fewer groups than it drew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from megloom.compute.algorithms.base import Outcome
from megloom.compute.algorithms.group_relative import GroupRelative
from megloom.compute.algorithms.statistics import are_equal, positions_by, standardised


class Dapo(GroupRelative):
    """The knobs are those of `GroupRelative`; `overlong` is off unless its buffer is named."""

    name: Literal["dapo"] = "dapo"

    def relative(self, rewards: Sequence[float]) -> list[float]:
        return standardised(rewards)

    def advantages_of(
        self, outcomes: Sequence[Outcome], rewards: Sequence[float], state: Mapping[str, float]
    ) -> list[float]:
        advantages = super().advantages_of(outcomes, rewards, state)
        for positions in positions_by(outcomes, self._group).values():
            if are_equal([outcomes[position].reward for position in positions]):
                for position in positions:
                    advantages[position] = 0.0
        return advantages
