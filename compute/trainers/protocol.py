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
    The first token has no prefix, so it is never trainable. `weight` multiplies the row's token losses
    before they are summed.
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
    """Sums over the micro-batch's trainable tokens, never means; `num_clipped` counts clipped ratios.

    `num_rows` counts rows with a trainable token; the others, which contribute nothing, are `num_empty_rows`.
    `max_logprob_gap` is max |trainer's − behaviour logprob|: near 0 if the weights are those that sampled.
    None if the loss has no behaviour, or no token.
    """

    micro_batch_id: str
    num_rows: int
    num_tokens: int
    num_trainable: int
    loss_sum: float
    num_clipped: int
    max_logprob_gap: float | None
    seconds: float
    num_empty_rows: int = 0


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
    budget_tokens: int | None = None  # padded tokens of one forward pass; None takes the device's own


class TrainerError(Exception):
    """A verb failed. The message names policy, verb and sample or micro-batch id."""


class TrainerLost(TrainerError):
    """The trainer process is gone; gradients that no saved state lists are lost."""


class Trainer(Protocol):
    """The verbs of a replica, in the order in which a step uses them."""

    async def create(self, weights_dir: str) -> Published:
        """Makes version 0 from the plan's model source in `weights_dir` (or keeps one that is complete).

        `weights_dir` is the policy's own folder of versions. Nothing is loaded: `load` comes next.
        """
        ...

    async def load(self, *, weights_uri: str, state_path: str | None) -> None:
        """Loads weights, and moments, step, rng and cached gradients from `state_path` if given.

        What was accumulated or loaded before is gone. The loaded version is the parent of the next published.
        """
        ...

    async def forward_backward(self, batch: MicroBatch) -> GradientReport:
        """Adds the micro-batch's gradient sums to the accumulation, all of them or, on an error, none.

        Raises: TrainerError for a number that is not finite, naming the sample, and for a micro-batch whose
        gradient is in the accumulation already.
        """
        ...

    async def optim_step(self, *, scale: float, warm: bool = False) -> UpdateReport:
        """Multiplies the accumulated sums by `scale`, clips, steps, and clears the accumulation.

        Without a single trainable token nothing moves. `warm` steps use the plan's `warm_optimizer`, whose
        moments are dropped at the first step that is not warm.
        Raises: TrainerError if the gradient is not finite (no step; the accumulation is cleared).
        """
        ...

    async def publish(self, *, weights_dir: str, version: int) -> Published:
        """Writes a version directory, complete or not at all."""
        ...

    async def save(self, *, state_path: str) -> None:
        """Writes weights, moments, step, rng, cached gradients and their micro-batch ids to one file."""
        ...

    async def close(self) -> None: ...
