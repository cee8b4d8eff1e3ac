"""What the conductor knows of a trainer: its verbs and the plain data that they exchange. No torch here.

A replica accumulates raw gradient sums and exact counts over any number of `forward_backward` calls and
scales once, at `optim_step`. So any cut of a batch into micro-batches gives the same update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

# Per-token columns of a row: what an algorithm makes (advantages, returns) and what `Trainer.forward` gives.
# "values": the critic's; "reference_logprobs": of the policy's first trained-from version, for a KL term;
# "proximal_logprobs": of the weights that the trainer holds, for decoupled corrections over several updates.
COLUMNS = ("advantages", "returns", "values", "reference_logprobs", "proximal_logprobs")
FORWARD_COLUMNS = ("values", "reference_logprobs", "proximal_logprobs")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRow:
    """One sample as the trainer sees it; all arrays have shape [T] (T tokens of the path).

    `loss_mask` is 1 where the policy sampled the token (or a demonstration teaches it), `logprobs` holds the
    behaviour logprobs there (temperature `temperature` applied, full support) and 0 elsewhere.
    The first token has no prefix, so it is never trainable. `weight` multiplies the row's token losses
    before they are summed.

    `columns` holds further float32 arrays of shape [T], by the names of `COLUMNS`; "advantages" there
    replaces `advantage`. `version_min` is the oldest policy version among the trainable tokens, None for a
    demonstration. Rows with the same `episode_id` may share a prefix, which is then computed once.
    """

    sample_id: str
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    advantage: float
    weight: float
    temperature: float
    episode_id: str = ""
    version_min: int | None = None
    columns: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)


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
    None if the loss has no behaviour, or no token. `sums` are further metrics as (sum, count of tokens), by
    name: "kl", "entropy", "value_loss", "correction" (the weights), "num_rejected" (tokens that a correction
    masked), "num_computed" (tokens that went through the model: below `num_tokens` if prefixes were shared).
    `replica` is the satellite of the group that took it, 0 the core.
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
    replica: int = 0
    sums: Mapping[str, tuple[float, int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardReport:
    """Columns of rows, by name and then in the order of the rows; 0 where a token is not trainable."""

    columns: Mapping[str, Sequence[npt.NDArray[np.float32]]]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientSums:
    """A replica's raw sums in a file, and what they hold."""

    path: str
    micro_batch_ids: tuple[str, ...]
    num_trainable: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReport:
    """One optimizer step: the gradient's norm after scaling and before clipping, and what it consumed."""

    grad_norm: float
    num_trainable: int
    micro_batch_ids: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A complete weight version on disk. `digest` is BLAKE3 of its safetensors file, in hex."""

    uri: str
    version: int
    digest: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerPlan:
    """All that a replica must know at its start, as plain JSON-like data (models as `model_dump()`).

    `trainer` is `workload.Trainer`, `publishing` is `workload.Publishing`; empty takes their defaults.
    """

    policy: str
    model: dict[str, Any]
    algorithm: dict[str, Any]
    optimizer: dict[str, Any]
    warm_optimizer: dict[str, Any] | None
    seed: int
    device: str = "cpu"
    threads: int = 1
    trainer: dict[str, Any] = field(default_factory=dict)
    publishing: dict[str, Any] = field(default_factory=dict)
    max_off_policy_steps: int = 0


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

    async def load(
        self, *, weights_uri: str, state_path: str | None, reference_uri: str | None = None
    ) -> None:
        """Loads weights, and moments, step, rng and cached gradients from `state_path` if given.

        What was accumulated or loaded before is gone. The loaded version is the parent of the next published.
        `reference_uri` is the version that "reference_logprobs" come from, loaded when they are first asked.
        """
        ...

    async def forward(self, batch: MicroBatch, wants: Sequence[str]) -> ForwardReport:
        """The columns `wants` (of `FORWARD_COLUMNS`) of the rows under the loaded weights; no gradient."""
        ...

    async def forward_backward(self, batch: MicroBatch) -> GradientReport:
        """Adds the micro-batch's gradient sums to the accumulation, all of them or, on an error, none.

        Raises: TrainerError for a number that is not finite, naming the sample, for a micro-batch whose
        gradient is in the accumulation already, and for a row older than `max_off_policy_steps` allows.
        """
        ...

    async def export_gradients(self, *, path: str) -> GradientSums:
        """Writes the raw sums to a file and clears the accumulation: what a satellite hands in."""
        ...

    async def add_gradients(self, *, path: str) -> None:
        """Adds the sums of such a file to the accumulation.

        Raises: TrainerError if it holds a micro-batch whose gradient is in the accumulation already.
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

    async def save(self, *, state_path: str) -> str | None:
        """Writes weights, moments, step, rng, cached gradients and their micro-batch ids to one file.

        Returns the file's `digests.file_digest`, if it was taken while the file was written.
        """
        ...

    async def close(self) -> None: ...
