"""Token losses: one number per trainable token, never a mean.

Only trainable tokens come in (the caller selects them before any arithmetic), so whatever stands in a masked
slot, a NaN included, cannot reach a sum. Shapes: N = trainable tokens of one forward pass, one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: beyond it a ratio is noise, and exp(89) is already infinite in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLosses:
    """`losses_N` carries the graph; `is_clipped_N` marks tokens whose clipped term was taken."""

    losses_N: Tensor
    is_clipped_N: Tensor


def policy_gradient(
    logprobs_N: Tensor,
    *,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLosses:
    """The clipped surrogate with separate bounds, per token:

        ρ = exp(logprob − behaviour)      loss = −w · min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high) A)

    Source: PPO (arXiv 1707.06347), clip-higher from DAPO (arXiv 2503.14476). Deviations: the ratio is against
    the recorded behaviour logprob, never a recomputed one; |log ρ| is bounded by 20; no dual clip.
    """
    ratios_N = torch.exp((logprobs_N - behaviour_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    plain_N = ratios_N * advantages_N
    clipped_N = ratios_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_N
    is_clipped_N = clipped_N < plain_N
    return TokenLosses(
        losses_N=-weights_N * torch.where(is_clipped_N, clipped_N, plain_N), is_clipped_N=is_clipped_N
    )


def imitation(logprobs_N: Tensor, *, weights_N: Tensor) -> TokenLosses:
    """Cross-entropy of recorded answers: loss = −w · logprob. Advantage and behaviour play no part."""
    return TokenLosses(
        losses_N=-weights_N * logprobs_N, is_clipped_N=torch.zeros_like(logprobs_N, dtype=torch.bool)
    )
