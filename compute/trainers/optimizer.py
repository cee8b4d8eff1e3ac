"""AdamW by parameter name: its schedule, its step, and its moments out and in, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megloom.compute.workload import Optimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(knobs: Optimizer, step: int) -> float:
    """The rate of optimizer step `step` (from 0): linear warm-up over W steps, then a cosine to 0 at step E.

    step < W: lr · (step + 1) / W      else: lr · (1 + cos(π · min(1, (step − W) / (E − W)))) / 2
    """
    if step < knobs.warmup_steps:
        return knobs.learning_rate * (step + 1) / knobs.warmup_steps
    if knobs.total_steps is None:
        return knobs.learning_rate
    progress = (step - knobs.warmup_steps) / (knobs.total_steps - knobs.warmup_steps)
    return knobs.learning_rate * (1.0 + math.cos(math.pi * min(1.0, progress))) / 2.0


class AdamW:
    """Steps the parameters that it was given. Vectors (norms, biases) have no weight decay."""

    def __init__(self, parameters: Mapping[str, Tensor], knobs: Optimizer) -> None:
        self.num_steps = 0
        self.knobs = knobs
        self._parameters = dict(parameters)
        matrices = [value for value in self._parameters.values() if value.ndim > 1]
        vectors = [value for value in self._parameters.values() if value.ndim <= 1]
        self._torch = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": knobs.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=knobs.learning_rate,
            betas=knobs.betas,
        )

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Moves every parameter by one step along `gradients`, which are already scaled and clipped."""
        for group in self._torch.param_groups:
            group["lr"] = learning_rate(self.knobs, self.num_steps)
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name]
        self._torch.step()
        self._torch.zero_grad(set_to_none=True)
        self.num_steps += 1

    def tensors(self) -> dict[str, Tensor]:
        """The moments as `<moment>/<parameter>`; empty before the first step."""
        return {
            f"{moment}/{name}": self._torch.state[parameter][moment]
            for name, parameter in self._parameters.items()
            if parameter in self._torch.state
            for moment in _MOMENTS
        }

    def restore(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Takes the moments of another instance over the same parameters. Raises: KeyError if one lacks."""
        self.num_steps = num_steps
        if num_steps:
            for name, parameter in self._parameters.items():
                moments = {moment: tensors[f"{moment}/{name}"].to(parameter.device) for moment in _MOMENTS}
                self._torch.state[parameter] = {"step": torch.tensor(float(num_steps)), **moments}
