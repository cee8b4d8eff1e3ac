"""RLOO: the mean of a group's other members is the baseline.

    A_i = r_i − mean(r_j, j ≠ i) = n / (n − 1) · (r_i − mean(r))

Source: Back to Basics (arXiv 2402.14740). Deviation: equal rewards give exactly zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megloom.compute.algorithms.group_relative import GroupRelative
from megloom.compute.algorithms.statistics import left_out


class Rloo(GroupRelative):
    """The knobs are those of `GroupRelative`."""

    name: Literal["rloo"] = "rloo"

    def relative(self, rewards: Sequence[float]) -> list[float]:
        return left_out(rewards)
