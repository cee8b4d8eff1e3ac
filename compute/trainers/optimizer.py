"""AdamW by parameter name: its schedule, its step, and its moments out and in, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megloom.compute.workload import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


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


def parameter_groups(parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    """The matrices, then the vectors (norms, biases), as groups of a torch optimizer; no empty ones."""
    values = list(parameters)
    matrices = [value for value in values if value.ndim > 1]
    vectors = [value for value in values if value.ndim <= 1]
    return [{"params": group, "decays": group is matrices} for group in (matrices, vectors) if group]


def set_knobs(optimizer: torch.optim.Optimizer, knobs: Optimizer, step: int) -> None:
    """Gives the groups what `knobs` say for optimizer step `step` (from 0). Vectors have no weight decay."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(knobs, step)
        group["betas"] = knobs.betas
        group["weight_decay"] = knobs.weight_decay if group["decays"] else 0.0


class AdamW:
    """Steps the parameters that it was given; one without a gradient is stepped along zero."""

    def __init__(self, parameters: Mapping[str, Tensor], knobs: Optimizer) -> None:
        self.num_steps = 0
        self.knobs = knobs
        self._parameters = dict(parameters)
        self._torch = torch.optim.AdamW(parameter_groups(self._parameters.values()), betas=knobs.betas)

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Moves every parameter by one step along `gradients`, which are already scaled and clipped."""
        set_knobs(self._torch, self.knobs, self.num_steps)
        for name, parameter in self._parameters.items():
            gradient = gradients.get(name)
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient
        self._torch.step()
        self._torch.zero_grad(set_to_none=True)
        self.num_steps += 1

    def tensors(self) -> dict[str, Tensor]:
        """The moments as `<moment>/<parameter>`; empty before the first step."""
        return {
            f"{moment}/{name}": self._torch.state[parameter][moment]
            for name, parameter in self._parameters.items()
            if parameter in self._torch.state
            for moment in MOMENTS
        }

    def restore(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Takes the moments of another instance over the same parameters. Raises: KeyError if one lacks."""
        self.num_steps = num_steps
        if not num_steps:
            return

        def moments_of(name: str) -> dict[str, Tensor]:
            device = self._parameters[name].device
            return {moment: tensors[f"{moment}/{name}"].to(device, copy=True) for moment in MOMENTS}

        # Two threads: most of the time goes to memory pages that the process has not had before.
        with ThreadPoolExecutor(2, thread_name_prefix="moments") as pool:
            copies = dict(zip(self._parameters, pool.map(moments_of, self._parameters), strict=True))
        for name, parameter in self._parameters.items():
            self._torch.state[parameter] = {"step": torch.tensor(float(num_steps)), **copies[name]}
