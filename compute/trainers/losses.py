"""Token losses: one number per trainable token, never a mean and never weighted.

Only trainable tokens come in (the caller selects them before any arithmetic), so whatever stands in a masked
slot, a NaN included, cannot reach a sum. Shapes: N = trainable tokens of one forward pass; `rows_N` is the
number of the row that each belongs to, and a row is the sequence of sequence-level ratios. A is the
advantage, ρ = exp(logprob − base) the ratio to the policy that the loss is measured against.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megloom.compute.algorithms.base import Cispo, Clip, Gspo, Sapo

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: beyond it a ratio is noise, and exp(89) is already infinite in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLosses:
    """`losses_N` carries the graph; `is_clipped_N` marks tokens whose clipped term was taken."""

    losses_N: Tensor
    is_clipped_N: Tensor


def surrogate(
    knobs: Clip | Gspo | Cispo | Sapo,
    logprobs_N: Tensor,
    *,
    base_N: Tensor,
    advantages_N: Tensor,
    rows_N: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLosses:
    """The loss that `knobs` names, with ratios clipped to [1 − clip_low, 1 + clip_high]; SAPO has no clip.

    |log ρ| is bounded by 20 in every one, so that a ratio and its gradient stay finite in float32.
    """
    log_ratios_N = (logprobs_N - base_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    low, high = 1.0 - clip_low, 1.0 + clip_high
    match knobs:
        case Clip():
            return _clip(log_ratios_N.exp(), advantages_N, low, high, knobs.dual_clip)
        case Gspo():
            ratios_N = _sequence_ratios(knobs, log_ratios_N, rows_N)
            return _clip(ratios_N, advantages_N, low, high, None)
        case Cispo():
            return _cispo(log_ratios_N.detach().exp(), logprobs_N, advantages_N, low, high)
        case Sapo():
            return _sapo(knobs, log_ratios_N.exp(), advantages_N)


def imitation(logprobs_N: Tensor) -> TokenLosses:
    """Cross-entropy of recorded answers: loss = −logprob. Advantage and behaviour play no part."""
    return TokenLosses(losses_N=-logprobs_N, is_clipped_N=torch.zeros_like(logprobs_N, dtype=torch.bool))


def kl_penalty(logprobs_N: Tensor, *, reference_N: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """KL(policy ‖ reference) per token, with δ = logprob − reference and |δ| bounded by 20:

        k1 = δ        k2 = δ² / 2        k3 = exp(−δ) + δ − 1

    k2 and k3 are differentiated as they stand. The expected gradient of k1 as it stands is zero, so k1 takes
    its value from δ and its gradient, δ · ∇logprob, from k2.
    Source: J. Schulman, "Approximating KL divergence" (2020); k3 in a loss is GRPO's (arXiv 2402.03300).
    """
    delta_N = (logprobs_N - reference_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            half_N = 0.5 * delta_N.square()
            return delta_N.detach() + (half_N - half_N.detach())
        case "k2":
            return 0.5 * delta_N.square()
        case "k3":
            return torch.expm1(-delta_N) + delta_N


def row_sums(values_N: Tensor, rows_N: Tensor) -> tuple[Tensor, Tensor]:
    """The sums [R] over each row's tokens and their numbers [R]; R is one more than the highest row.

    In float64: a sequence's ratio is the exponential of such a sum, and rounding would grow with its length.
    """
    num_rows = int(rows_N.max()) + 1 if len(rows_N) else 0
    sums_R = values_N.new_zeros(num_rows, dtype=torch.float64).index_add(0, rows_N, values_N.double())
    return sums_R, torch.bincount(rows_N, minlength=num_rows)


def row_means(values_N: Tensor, rows_N: Tensor) -> Tensor:
    """For each token the mean over its row's tokens, [N]."""
    sums_R, counts_R = row_sums(values_N, rows_N)
    return (sums_R / counts_R.clamp(min=1)).index_select(0, rows_N).to(values_N.dtype)


def _clip(
    ratios_N: Tensor, advantages_N: Tensor, low: float, high: float, dual_clip: float | None
) -> TokenLosses:
    """−min(ρ A, clip(ρ) A); with dual clip c, −max(that minimum, c A) where A < 0.

    Source: PPO (arXiv 1707.06347), separate bounds from DAPO (arXiv 2503.14476), dual clip from
    arXiv 1912.09729.
    """
    plain_N = ratios_N * advantages_N
    clipped_N = ratios_N.clamp(low, high) * advantages_N
    is_clipped_N = clipped_N < plain_N
    kept_N = torch.where(is_clipped_N, clipped_N, plain_N)
    if dual_clip is not None:
        floor_N = dual_clip * advantages_N
        is_floored_N = (advantages_N < 0) & (kept_N < floor_N)
        kept_N = torch.where(is_floored_N, floor_N, kept_N)
        is_clipped_N = is_clipped_N | is_floored_N
    return TokenLosses(losses_N=-kept_N, is_clipped_N=is_clipped_N)


def _sequence_ratios(knobs: Gspo, log_ratios_N: Tensor, rows_N: Tensor) -> Tensor:
    """s = exp(mean over the row of log ρ), on each of the row's tokens.

    Form "token": the value is s, the gradient s · ∇log ρ of the token itself, so that advantages may differ
    within a row; with equal ones and equal weights both forms have the same gradient. `token_cap` bounds ρ
    before the mean; a token above it has no gradient.
    Source: GSPO and GSPO-token (arXiv 2507.18071); cap 5 with clip [0.995, 1.005] is QwenGyre's variant
    (arXiv 2609.33848).
    """
    if knobs.token_cap is not None:
        log_ratios_N = log_ratios_N.clamp(max=math.log(knobs.token_cap))
    means_N = row_means(log_ratios_N, rows_N)
    if knobs.form == "token":
        means_N = means_N.detach() + (log_ratios_N - log_ratios_N.detach())
    return means_N.exp()


def _cispo(
    ratios_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor, low: float, high: float
) -> TokenLosses:
    """−sg(clip(ρ)) A logprob: every token keeps a gradient. Source: MiniMax-M1 (arXiv 2506.13585)."""
    bounded_N = ratios_N.clamp(low, high)
    return TokenLosses(losses_N=-bounded_N * advantages_N * logprobs_N, is_clipped_N=bounded_N != ratios_N)


def _sapo(knobs: Sapo, ratios_N: Tensor, advantages_N: Tensor) -> TokenLosses:
    """−A · (4 / τ) · sigmoid(τ (ρ − 1)), τ by the sign of A (0 counts as negative).

    At ρ = 1 its gradient is that of −ρ A. Source: SAPO (arXiv 2511.20347).
    """
    taus_N = torch.where(advantages_N > 0, knobs.tau_positive, knobs.tau_negative)
    gates_N = torch.sigmoid(taus_N * (ratios_N - 1.0)) * (4.0 / taus_N)
    return TokenLosses(
        losses_N=-gates_N * advantages_N, is_clipped_N=torch.zeros_like(ratios_N, dtype=torch.bool)
    )
