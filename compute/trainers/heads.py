"""What is read off the hidden states that predict trainable tokens: logprobs, entropy, values.

Shapes: N = trainable tokens of a pass, H = hidden size, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megloom.compute.trainers.passes import Pass, hidden_states


@dataclass(frozen=True, kw_only=True, slots=True)
class Readout:
    """All [N], float32, with the graph; None where it was not asked for."""

    logprobs_N: Tensor
    entropies_N: Tensor | None
    values_N: Tensor | None


def read_out(
    model: Any, part: Pass, *, value_head: nn.Module | None = None, with_entropy: bool = False
) -> Readout:
    """log softmax(logits / temperature) of the trainable tokens, the entropy of that distribution in nats,
    and the value head's estimate before the token.

    The LM head sees only hidden states that predict a trainable token: logits are [N, V], never [B, T, V].
    """
    hidden_NH = hidden_states(model, part)
    logits_NV = model.get_output_embeddings()(hidden_NH).float() / part.temperatures_N[:, None]
    return Readout(
        logprobs_N=-nn.functional.cross_entropy(logits_NV, part.targets_N, reduction="none"),
        entropies_N=_entropies(logits_NV) if with_entropy else None,
        values_N=None if value_head is None else value_head(hidden_NH.float()).squeeze(-1),
    )


def _entropies(logits_NV: Tensor) -> Tensor:
    """log Σ exp(l) − Σ p l, which stays finite where a probability is zero."""
    means_N = (torch.softmax(logits_NV, -1) * logits_NV).sum(-1)
    return torch.logsumexp(logits_NV, -1) - means_N
