"""How a token counts whose sampler was not the policy that its gradient is measured against.

π_new / π_behaviour is split at the proximal policy: the surrogate's ratio is π_new / π_proximal, and what is
left, π_proximal / π_behaviour, becomes a constant weight. Shapes as in `losses`; nothing here has a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megloom.compute.algorithms.base import Correction
from megloom.compute.trainers.losses import MAX_LOG_RATIO, row_means, row_sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrected:
    """`base_N` are the logprobs that the surrogate's ratio is measured against; `weights_N` multiply its loss
    and are None if they are all 1; `is_rejected_N` marks tokens that lost their weight.
    """

    base_N: Tensor
    weights_N: Tensor | None = None
    is_rejected_N: Tensor | None = None


def correct(
    correction: Correction | None, *, behaviour_N: Tensor, proximal_N: Tensor, rows_N: Tensor
) -> Corrected:
    """With w = π_proximal / π_behaviour per token, |log w| bounded by 20:

        none, "behaviour"   base = behaviour, no weight
        "token-tis"         min(w, high)
        "sequence-tis"      min(∏ w over the row, high)
        "icepop"            w within [low, high], else 0
        "sequence-mask"     w if the row's geometric mean of w is within [low, high], else 0
        "decoupled"         w

    Source: truncated importance sampling (F. Yao et al., 2025), IcePop (Ring-1T, arXiv 2510.18855),
    decoupled PPO (AReaL, arXiv 2505.24298).
    """
    if correction is None or correction.name == "behaviour":
        return Corrected(base_N=behaviour_N)
    log_ratios_N = proximal_N - behaviour_N
    weights_N = log_ratios_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    match correction.name:
        case "token-tis":
            return Corrected(base_N=proximal_N, weights_N=weights_N.clamp(max=correction.high))
        case "sequence-tis":
            sums_R, _ = row_sums(log_ratios_N, rows_N)
            products_R = sums_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=correction.high)
            weights_N = products_R.index_select(0, rows_N).to(weights_N.dtype)
            return Corrected(base_N=proximal_N, weights_N=weights_N)
        case "decoupled":
            return Corrected(base_N=proximal_N, weights_N=weights_N)
        case "icepop":
            judged_N = weights_N
        case "sequence-mask":
            judged_N = row_means(log_ratios_N, rows_N).exp()
    is_rejected_N = (judged_N < correction.low) | (judged_N > correction.high)
    return Corrected(
        base_N=proximal_N,
        weights_N=torch.where(is_rejected_N, 0.0, weights_N),
        is_rejected_N=is_rejected_N,
    )
