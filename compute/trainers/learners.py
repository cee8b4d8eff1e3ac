"""What a replica asks of a learner, and which learner a plan gets.

A learner holds a model in training: its parameters, the raw gradient sums, the optimizer. One verb at a time.
With several ranks every rank has a learner of its own, and all of them go through the same calls: the methods
marked "collective" wait for the others. A micro-batch is

    num_rounds ─▶ (backward | idle_round) × rounds ─▶ add_gradients ─▶ drop_gradients

where `drop_gradients` stands in a `finally` that also covers every check before `num_rounds`: so a rank that
fails takes part in what the others wait for, and the micro-batch fails on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megloom.compute.trainers.learner import TorchLearner
from megloom.compute.trainers.lora import add_lora
from megloom.compute.trainers.model import enable_checkpointing
from megloom.compute.trainers.protocol import TrainerPlan
from megloom.compute.trainers.snapshot import Facts
from megloom.compute.workload import Optimizer
from megloom.compute.workload import Trainer as TrainerKnobs


class Learner(Protocol):
    """`micro_batch_ids` and `num_trainable` (over all ranks) say what the sums hold.

    `extra` holds further trained modules by name, such as {"value_head": …}. Their parameters
    ("value_head.weight") are in the optimizer and the state, but not in `weights`.
    """

    @property
    def model(self) -> Any:
        """A causal model as transformers has it: `config`, `base_model(...)`, `get_output_embeddings()`."""
        ...

    @property
    def extra(self) -> Mapping[str, nn.Module]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files."""
        ...

    @property
    def micro_batch_ids(self) -> list[str]: ...
    @property
    def num_trainable(self) -> int: ...

    def num_rounds(self, num_local_passes: int) -> int:
        """How many passes every rank makes, at least its own: missing ones are `idle_round`. Collective.

        Raises: TrainerError if another rank failed before its first pass.
        """
        ...

    def backward(self, total: Tensor) -> None:
        """Adds the gradient of `total`, a sum over the pass's token losses, to that of the micro-batch."""
        ...

    def idle_round(self, *, has_gradient: bool = True) -> None:
        """A pass without loss, for the sake of the other ranks; `has_gradient` as in the passes it pads."""
        ...

    def add_gradients(self, micro_batch_id: str, num_trainable: int) -> None:
        """Moves the micro-batch's gradient into the sums, on every rank or none. Collective.

        `num_trainable` counts this rank's tokens. Raises: TrainerError if another rank failed.
        """
        ...

    def drop_gradients(self) -> None:
        """Ends a micro-batch: forgets what was not added. Exactly once per micro-batch, in a `finally`."""
        ...

    def step(self, scale: float, *, warm: bool) -> float:
        """Scales the sums, clips, steps, clears; returns the gradient's norm before clipping. Collective.

        Without a trainable token nothing moves and the norm is 0.
        Raises: TrainerError if the gradient is not finite, or the warm optimizer is not there.
        """
        ...

    def state(self, policy: str) -> tuple[Facts, dict[str, Tensor]]:
        """Everything that the next verb depends on, whole, by parameter name. Collective.

        The names do not depend on backend, stage or number of ranks: any of them restores what another saved.
        """
        ...

    def restore(self, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
        """Takes a state of the same model and optimizers. Collective.

        Raises: TrainerError if a tensor lacks or has another shape; the learner is then of no further use.
        """
        ...

    def gradient_sums(self) -> dict[str, Tensor]:
        """Copies of the raw sums of all ranks, by parameter name, on the CPU. Collective."""
        ...

    def clear_gradients(self) -> None:
        """Empties the sums, `micro_batch_ids` and `num_trainable`."""
        ...

    def add_sums(self, sums: Mapping[str, Tensor], micro_batch_ids: list[str], num_trainable: int) -> None:
        """Adds another learner's `gradient_sums`; every rank is given the same ones.

        Raises: TrainerError for a parameter that is not trained here, or another shape.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's full weights by name, float32, on the CPU, adapters merged. Collective: drain it."""
        ...

    def extra_weights(self) -> dict[str, Tensor]:
        """The full parameters of `extra` by name, float32, on the CPU. Collective."""
        ...

    def adapter_weights(self) -> dict[str, Tensor]:
        """The LoRA adapters by peft's names, for `lora.write_adapter`; empty without. Collective."""
        ...

    def close(self) -> None:
        """Frees what garbage collection would not; the learner is then of no further use."""
        ...


def make_learner(
    plan: TrainerPlan,
    model: Any,
    *,
    optimizer: Optimizer,
    warm_optimizer: Optimizer | None,
    extra: Mapping[str, nn.Module] | None = None,
) -> Learner:
    """The learner that the plan asks for, around `model`, which is on its device already.

    Raises: ValueError naming the key, for a raw DeepSpeed config that sets what the system owns;
        ModuleNotFoundError naming the extra, if an optional package is not installed.
    """
    knobs = TrainerKnobs.parse(plan.trainer)
    if knobs.lora is not None:
        add_lora(model, knobs.lora)
    if knobs.gradient_checkpointing:
        enable_checkpointing(model)
    modules = dict(extra or {})
    if knobs.backend == "torch":
        return TorchLearner(model, optimizer=optimizer, warm_optimizer=warm_optimizer, extra=modules)
    from megloom.compute.trainers.deepspeed_learner import DeepSpeedLearner  # half a second, for this backend

    return DeepSpeedLearner(
        model, optimizer=optimizer, warm_optimizer=warm_optimizer, extra=modules, knobs=knobs
    )
