"""What the algorithms share whose baseline is the group's own: one formula on the rewards of one group.

A group is what one agent earned for one task: key (task, agent), which the group's id and the agent's name
give, or (task, agent, round) if `baseline_per` is "round". Groups may be ragged. An outcome counts once,
however many turns an episode took to earn it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from megloom.compute.algorithms.base import Outcome, PolicyGradient
from megloom.compute.algorithms.statistics import positions_by, require_finite


class GroupRelative(PolicyGradient):
    """`baseline_per` "round" compares only calls of the same turn, where calls were scored for themselves."""

    baseline_per: Literal["agent", "round"] = "agent"
    min_group_size: int = Field(default=2, ge=2)

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """One advantage per scored member of a group, in the order given; exact zeros if it is too small.

        Raises: ValueError for a reward that is not finite: unscored members never enter.
        """
        require_finite(rewards, "group")
        if len(rewards) < self.min_group_size:
            return [0.0] * len(rewards)
        return self.relative(rewards)

    @abstractmethod
    def relative(self, rewards: Sequence[float]) -> list[float]:
        """The formula, on at least `min_group_size` finite rewards."""

    def advantages_of(
        self, outcomes: Sequence[Outcome], rewards: Sequence[float], state: Mapping[str, float]
    ) -> list[float]:
        advantages = [0.0] * len(outcomes)
        for positions in positions_by(outcomes, self._group).values():
            found = self.advantages([rewards[position] for position in positions])
            for position, advantage in zip(positions, found, strict=True):
                advantages[position] = advantage
        return advantages

    def _group(self, outcome: Outcome) -> tuple[str, str, int]:
        return outcome.group_id, outcome.agent, outcome.round if self.baseline_per == "round" else 0
