"""What the conductor knows of a trainer: its verbs and the plain data that they exchange. No torch here.

A replica accumulates raw gradient sums and exact counts over any number of `forward_backward` calls and
scales once, at `optim_step`. So any cut of a batch into micro-batches gives the same update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRow:
    """One sample as the trainer sees it; all arrays have shape [T] (T tokens of the path).

    `loss_mask` is 1 where the policy sampled the token (or a demonstration teaches it), `logprobs` holds the
    behaviour logprobs there (temperature `temperature` applied, full support) and 0 elsewhere.
    `weight` multiplies the row's token losses before they are summed.
    """

    sample_id: str
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    advantage: float
    weight: float
    temperature: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Rows whose gradient is taken together. `loss` names the loss: "policy_gradient" or "imitation"."""

    micro_batch_id: str
    loss: str
    rows: tuple[TrainingRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientReport:
    """Sums over the micro-batch's trainable tokens, never means; `num_clipped` counts clipped ratios."""

    micro_batch_id: str
    num_rows: int
    num_tokens: int
    num_trainable: int
    loss_sum: float
    num_clipped: int
    max_logprob_gap: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReport:
    """One optimizer step: the gradient's norm after scaling and before clipping, and what it consumed."""

    grad_norm: float
    num_trainable: int
    micro_batch_ids: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A complete weight version on disk. `digest` is blake2b of its safetensors file, in hex."""

    uri: str
    version: int
    digest: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerPlan:
    """All that a replica must know at its start, as plain JSON-like data (models as `model_dump()`)."""

    policy: str
    model: dict[str, Any]
    algorithm: dict[str, Any]
    optimizer: dict[str, Any]
    warm_optimizer: dict[str, Any] | None
    seed: int
    device: str = "cpu"
    threads: int = 1


class TrainerError(Exception):
    """A verb failed. The message names policy, verb and sample or micro-batch id."""


class TrainerLost(TrainerError):
    """The trainer process is gone; gradients that no saved state lists are lost."""


class Trainer(Protocol):
    """The verbs of a replica, in the order in which a step uses them."""

    async def create(self, weights_dir: str) -> Published:
        """Makes version 0 from the plan's model source in `weights_dir` (or keeps one that is complete)."""
        ...

    async def load(self, *, weights_uri: str, state_path: str | None) -> None:
        """Loads weights, and moments, step, rng and cached gradients from `state_path` if given."""
        ...

    async def forward_backward(self, batch: MicroBatch) -> GradientReport: ...

    async def optim_step(self, *, scale: float, warm: bool = False) -> UpdateReport:
        """Multiplies the accumulated sums by `scale`, clips, steps, and clears the accumulation."""
        ...

    async def publish(self, *, weights_dir: str, version: int) -> Published:
        """Writes a version directory, complete or not at all."""
        ...

    async def save(self, *, state_path: str) -> None:
        """Writes weights, moments, step, rng, cached gradients and their micro-batch ids."""
        ...

    async def close(self) -> None: ...
