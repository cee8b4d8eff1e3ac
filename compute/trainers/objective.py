"""A pass's loss: surrogate, correction, KL, entropy and value terms put together, each a sum over tokens.

    Σ_t w_t · (c_t · surrogate_t + β · KL_t − η · H_t + ν · value_t)

w is the row's weight (the aggregation, which is the conductor's), c the correction's. Aggregation-free sums
are what makes the gradient independent of the cut. Shapes as in `losses`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megloom.compute.algorithms.base import PolicyGradient
from megloom.compute.trainers.corrections import Corrected, correct
from megloom.compute.trainers.critic import value_losses
from megloom.compute.trainers.heads import Readout
from megloom.compute.trainers.losses import imitation, kl_penalty, surrogate
from megloom.compute.trainers.passes import Pass
from megloom.compute.trainers.protocol import TrainerError, TrainingRow

POLICY_GRADIENT, IMITATION = "policy_gradient", "imitation"


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """`losses_N` are weighted and carry the graph. `metrics_N` are per token, without it, by report name."""

    losses_N: Tensor
    is_clipped_N: Tensor
    metrics_N: dict[str, Tensor] = field(default_factory=dict)


def needed_columns(algorithm: PolicyGradient) -> tuple[str, ...]:
    """The columns that every row of a policy-gradient micro-batch must bring."""
    needed = ["reference_logprobs"] if algorithm.kl is not None else []
    if algorithm.has_critic:
        needed += ["advantages", "returns", "values"]
    return tuple(needed)


def check_columns(row: TrainingRow, needed: tuple[str, ...]) -> None:
    """Refuses a row that lacks a column.

    Raises: TrainerError naming the sample and the column.
    """
    for name in needed:
        if name not in row.columns:
            have = ", ".join(sorted(row.columns)) or "none"
            raise TrainerError(f"sample {row.sample_id}: column {name!r} is missing; columns: {have}")


def policy_objective(algorithm: PolicyGradient, readout: Readout, part: Pass) -> Objective:
    """The objective of `algorithm`. Without a column "proximal_logprobs" the proximal policy is that of this
    very pass, which is exact as long as a batch makes one update.
    """
    columns, logprobs_N = part.columns_N, readout.logprobs_N
    corrected = correct(
        algorithm.correction,
        behaviour_N=part.behaviour_N,
        proximal_N=columns.get("proximal_logprobs", logprobs_N.detach()),
        rows_N=part.rows_N,
    )
    token = surrogate(
        algorithm.surrogate,
        logprobs_N,
        base_N=corrected.base_N,
        advantages_N=part.advantages_N,
        rows_N=part.rows_N,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
    )
    losses_N = token.losses_N if corrected.weights_N is None else corrected.weights_N * token.losses_N
    metrics_N = _correction_metrics(corrected)
    for name, coefficient, term_N in _terms(algorithm, readout, part):
        losses_N = losses_N + coefficient * term_N
        metrics_N[name] = term_N.detach()
    return Objective(losses_N=part.weights_N * losses_N, is_clipped_N=token.is_clipped_N, metrics_N=metrics_N)


def imitation_objective(readout: Readout, part: Pass) -> Objective:
    """Weighted cross-entropy of the recorded tokens. Values stay in the graph with a gradient of zero: ranks
    that share a critic's parameters wait for each other in every pass.
    """
    token = imitation(readout.logprobs_N)
    losses_N = part.weights_N * token.losses_N
    if readout.values_N is not None:
        losses_N = losses_N + 0.0 * readout.values_N
    return Objective(losses_N=losses_N, is_clipped_N=token.is_clipped_N)


def _terms(algorithm: PolicyGradient, readout: Readout, part: Pass) -> list[tuple[str, float, Tensor]]:
    """(name, coefficient, term) of what is added to the surrogate."""
    terms: list[tuple[str, float, Tensor]] = []
    if algorithm.kl is not None:
        penalty_N = kl_penalty(
            readout.logprobs_N,
            reference_N=part.columns_N["reference_logprobs"],
            estimator=algorithm.kl.estimator,
        )
        terms.append(("kl", algorithm.kl.coefficient, penalty_N))
    if readout.entropies_N is not None:
        terms.append(("entropy", -algorithm.entropy, readout.entropies_N))
    if readout.values_N is not None:
        critic: Any = algorithm  # one with `has_critic` has the two knobs of the value loss
        value_N = value_losses(
            readout.values_N,
            returns_N=part.columns_N["returns"],
            old_values_N=part.columns_N["values"],
            clip=critic.value_clip,
        )
        terms.append(("value_loss", critic.value_coefficient, value_N))
    return terms


def _correction_metrics(corrected: Corrected) -> dict[str, Tensor]:
    metrics_N = {}
    if corrected.weights_N is not None:
        metrics_N["correction"] = corrected.weights_N
    if corrected.is_rejected_N is not None:
        metrics_N["num_rejected"] = corrected.is_rejected_N
    return metrics_N
