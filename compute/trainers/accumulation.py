"""The raw gradient sums between two optimizer steps, and the exact record of what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megloom.compute.trainers.protocol import TrainerError


class Accumulation:
    """Sums by parameter name, in the order of the calls. The learner that owns it may write."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.micro_batch_ids: list[str] = []
        self.num_trainable = 0

    def take(self, parameters: Mapping[str, Tensor]) -> None:
        """Moves the parameters' gradients into the sums."""
        for name, parameter in parameters.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if name in self.sums:
                self.sums[name] += gradient
            else:
                self.sums[name] = gradient

    def record(self, micro_batch_ids: Sequence[str], num_trainable: int) -> None:
        self.micro_batch_ids.extend(micro_batch_ids)
        self.num_trainable += num_trainable

    def add(self, sums: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Adds sums that another learner made.

        Raises: TrainerError, before anything is added, for an unknown parameter or another shape.
        """
        for name, value in sums.items():
            if name not in parameters or value.shape != parameters[name].shape:
                found = "is not trained here" if name not in parameters else f"has {tuple(value.shape)} there"
                raise TrainerError(f"gradient sums of another replica: parameter {name} {found}")
        for name, value in sums.items():
            moved = value.to(parameters[name].device, torch.float32, copy=True)
            self.sums[name] = self.sums[name] + moved if name in self.sums else moved

    def pop(self) -> tuple[dict[str, Tensor], list[str], int]:
        """The sums, their micro-batch ids and the number of trainable tokens; nothing is left."""
        taken = self.sums, self.micro_batch_ids, self.num_trainable
        self.sums, self.micro_batch_ids, self.num_trainable = {}, [], 0
        return taken
