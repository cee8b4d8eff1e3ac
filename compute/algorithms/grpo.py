"""Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300) with clip-higher (DAPO, 2503.14476)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megloom.compute.workload import Algorithm

EPS = 1e-6
RELATIVE_ZERO = 1e-9


class Grpo(Algorithm):
    """Advantage of member i of a group: (r_i - mean r) / (std r + eps), std with ddof=1."""

    name: Literal["grpo"] = "grpo"
    clip_low: float = Field(default=0.2, ge=0)
    clip_high: float = Field(default=0.28, ge=0)
    normalise: Literal["std", "none"] = "std"
    aggregation: Literal["token-mean", "seq-mean-token-mean", "episode-mean"] = "token-mean"
    min_group_size: int = Field(default=2, ge=2)

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """One advantage per reward; exact zeros for a group without a signal or below the minimum size."""
        count = len(rewards)
        if count < self.min_group_size:
            return [0.0] * count
        mean = math.fsum(rewards) / count
        centred = [reward - mean for reward in rewards]
        if max(map(abs, centred)) <= RELATIVE_ZERO * max(1.0, max(map(abs, rewards))):
            return [0.0] * count
        if self.normalise == "none":
            return centred
        std = math.sqrt(math.fsum(value * value for value in centred) / (count - 1))
        return [value / (std + EPS) for value in centred]
