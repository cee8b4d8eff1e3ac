"""A model in training: parameters, gradient sums, optimizers; all of it out and in, bit for bit.

State of the accumulation:

    empty ──add_gradients──▶ holding ──add_gradients──▶ holding ──step──▶ empty      (also if the step fails)

A micro-batch's gradient stands in the parameters' `.grad` until `add_gradients` takes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megloom.compute.trainers.optimizer import AdamW
from megloom.compute.trainers.protocol import TrainerError
from megloom.compute.trainers.snapshot import Facts
from megloom.compute.workload import Optimizer

_WEIGHTS, _SUMS, _MAIN, _WARM, _RNG = "weights", "sums", "optimizer", "warm_optimizer", "rng"


class Learner:
    """`micro_batch_ids` and `num_trainable` say what the sums hold. `warm` is None once it is dropped."""

    def __init__(self, model: Any, *, optimizer: Optimizer, warm_optimizer: Optimizer | None) -> None:
        self.model = model
        self.micro_batch_ids: list[str] = []
        self.num_trainable = 0
        self._parameters: dict[str, Tensor] = dict(model.named_parameters())
        self._sums: dict[str, Tensor] = {}
        self._main = AdamW(self._parameters, optimizer)
        self._warm = AdamW(self._parameters, warm_optimizer) if warm_optimizer else None

    def add_gradients(self, micro_batch_id: str, num_trainable: int) -> None:
        """Moves the parameters' gradients into the sums."""
        for name, parameter in self._parameters.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if name in self._sums:
                self._sums[name] += gradient
            else:
                self._sums[name] = gradient
        self.micro_batch_ids.append(micro_batch_id)
        self.num_trainable += num_trainable

    def drop_gradients(self) -> None:
        """Forgets a gradient that was not added."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self, scale: float, *, warm: bool) -> float:
        """Scales the sums, clips, steps, clears; returns the gradient's norm before clipping.

        Without a trainable token nothing moves and the norm is 0.
        Raises: TrainerError if the gradient is not finite, or the warm optimizer is not there.
        """
        optimizer = self._warm if warm else self._main
        if optimizer is None:
            raise TrainerError("a warm step, but the warm optimizer is dropped or was never given")
        sums, num_trainable, taken = self._sums, self.num_trainable, self.micro_batch_ids
        self._sums, self.num_trainable, self.micro_batch_ids = {}, 0, []
        if not warm:
            self._warm = None
        if num_trainable == 0:
            return 0.0
        gradients = list(sums.values())
        torch._foreach_mul_(gradients, scale)
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            raise TrainerError(f"gradient norm {norm}, no step taken; micro-batches {', '.join(taken)}")
        if norm > optimizer.knobs.grad_clip:
            torch._foreach_mul_(gradients, optimizer.knobs.grad_clip / norm)
        optimizer.step(sums)
        return norm

    def state(self, policy: str) -> tuple[Facts, dict[str, Tensor]]:
        """Everything that the next verb depends on."""
        facts = Facts(
            policy=policy,
            num_steps=self._main.num_steps,
            num_warm_steps=None if self._warm is None else self._warm.num_steps,
            micro_batch_ids=tuple(self.micro_batch_ids),
            num_trainable=self.num_trainable,
        )
        tensors = {
            **_prefixed(_WEIGHTS, self._parameters),
            **_prefixed(_SUMS, self._sums),
            **_prefixed(_MAIN, self._main.tensors()),
            **_prefixed(_WARM, self._warm.tensors() if self._warm else {}),
        }
        for kind, values in _rng_states().items():
            tensors[f"{_RNG}/{kind}"] = values
        return facts, tensors

    def restore(self, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
        """Takes a state of the same model and optimizers.

        Raises: TrainerError if a tensor lacks or has another shape; the learner is then of no further use.
        """
        try:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(tensors[f"{_WEIGHTS}/{name}"])
            self._main.restore(_under(_MAIN, tensors), facts.num_steps)
            if facts.num_warm_steps is None:
                self._warm = None
            elif self._warm is not None:
                self._warm.restore(_under(_WARM, tensors), facts.num_warm_steps)
        except (KeyError, RuntimeError) as error:
            raise TrainerError(f"state of policy {facts.policy} does not fit the model: {error}") from error
        device = next(iter(self._parameters.values())).device
        self._sums = {name: value.to(device) for name, value in _under(_SUMS, tensors).items()}
        self.micro_batch_ids, self.num_trainable = list(facts.micro_batch_ids), facts.num_trainable
        _set_rng_states(_under(_RNG, tensors))


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _rng_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_rng_states(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
