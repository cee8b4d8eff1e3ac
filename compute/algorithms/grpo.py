"""GRPO: a group's own mean is the baseline.

    A_i = (r_i − mean(r)) / (std(r) + ε)     std with Bessel's correction, ε = 1e-6     normalise="std"
    A_i =  r_i − mean(r)                                                                normalise="none"

Source: DeepSeekMath (arXiv 2402.03300); "none" is Dr. GRPO (arXiv 2503.20783), whose loss has the aggregation
seq-mean-token-sum-norm; the separate upper clip is clip-higher of DAPO (arXiv 2503.14476). Deviations: the KL
term is off unless asked for; a group whose rewards agree to float32 precision, or that is smaller than
`min_group_size`, has advantages of exactly zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megloom.compute.algorithms.group_relative import GroupRelative
from megloom.compute.algorithms.statistics import centred, standardised


class Grpo(GroupRelative):
    """The knobs beside those of `GroupRelative`."""

    name: Literal["grpo"] = "grpo"
    normalise: Literal["std", "none"] = "std"

    def relative(self, rewards: Sequence[float]) -> list[float]:
        return standardised(rewards) if self.normalise == "std" else centred(rewards)
