"""GRPO: a group's own mean is the baseline.

    A_i = (r_i − mean(r)) / (std(r) + ε)     std with Bessel's correction, ε = 1e-6     normalise="std"
    A_i =  r_i − mean(r)                                                                normalise="none"

Source: DeepSeekMath (arXiv 2402.03300); "none" is Dr. GRPO (arXiv 2503.20783); the separate upper clip is
clip-higher of DAPO (arXiv 2503.14476). Deviations: no KL term; a group whose rewards agree to float32
precision, or that is smaller than `min_group_size`, has advantages of exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megloom.compute.algorithms.base import PolicyGradient

_EPSILON = 1e-6  # added to std, in reward units; the value that all peers use
_SAME_REWARD = 2.0**-21  # relative to the largest reward: 4 float32 ulps, so float noise is not a signal


class Grpo(PolicyGradient):
    """The knobs beside those of `PolicyGradient`."""

    name: Literal["grpo"] = "grpo"
    normalise: Literal["std", "none"] = "std"
    min_group_size: int = Field(default=2, ge=2)

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """One advantage per scored member of a group, in the order given.

        Two passes in float64; sums are exact (fsum), so that the order of members cannot matter.
        Raises: ValueError for a reward that is not finite: unscored members never enter.
        """
        for position, reward in enumerate(rewards):
            if not math.isfinite(reward):
                raise ValueError(f"reward {position} of the group is {reward}, expected a finite number")
        if len(rewards) < self.min_group_size:
            return [0.0] * len(rewards)
        mean = math.fsum(rewards) / len(rewards)
        centred = [reward - mean for reward in rewards]
        if max(map(abs, centred)) <= _SAME_REWARD * max(map(abs, rewards)):
            return [0.0] * len(rewards)
        if self.normalise == "none":
            return centred
        std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
        return [c / (std + _EPSILON) for c in centred]
