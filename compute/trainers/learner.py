"""The reference learner: plain torch, one process; all of its state out and in, bit for bit.

State of the accumulation:

    empty ──add_gradients──▶ holding ──add_gradients──▶ holding ──step──▶ empty      (also if the step fails)

A micro-batch's gradient stands in the parameters' `.grad` until `add_gradients` takes it. Implements
`learners.Learner`, whose docstrings say what the methods promise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megloom.compute.trainers.accumulation import Accumulation
from megloom.compute.trainers.lora import adapter_weights, merged_weights
from megloom.compute.trainers.optimizer import AdamW
from megloom.compute.trainers.protocol import TrainerError
from megloom.compute.trainers.snapshot import Facts
from megloom.compute.workload import Optimizer

WEIGHTS, SUMS, MAIN, WARM, RNG = "weights", "sums", "optimizer", "warm_optimizer", "rng"


class TorchLearner:
    """The warm optimizer is dropped at the first step that is not warm."""

    is_main = True

    def __init__(
        self,
        model: Any,
        *,
        optimizer: Optimizer,
        warm_optimizer: Optimizer | None,
        extra: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.model = model
        self.extra = dict(extra or {})
        self._named = named_parameters(model, self.extra)
        self._parameters = {name: value for name, value in self._named.items() if value.requires_grad}
        self.device = next(iter(self._named.values())).device
        self._accumulation = Accumulation()
        self._main = AdamW(self._parameters, optimizer)
        self._warm = AdamW(self._parameters, warm_optimizer) if warm_optimizer else None

    @property
    def micro_batch_ids(self) -> list[str]:
        return self._accumulation.micro_batch_ids

    @property
    def num_trainable(self) -> int:
        return self._accumulation.num_trainable

    def num_rounds(self, num_local_passes: int) -> int:
        return num_local_passes

    def backward(self, total: Tensor) -> None:
        total.backward()

    def idle_round(self, *, has_gradient: bool = True) -> None:
        """Nothing: one rank waits for nobody."""

    def add_gradients(self, micro_batch_id: str, num_trainable: int) -> None:
        self._accumulation.take(self._parameters)
        self._accumulation.record([micro_batch_id], num_trainable)

    def drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self, scale: float, *, warm: bool) -> float:
        optimizer = self._warm if warm else self._main
        if optimizer is None:
            raise TrainerError("a warm step, but the warm optimizer is dropped or was never given")
        sums, taken, num_trainable = self._accumulation.pop()
        if not warm:
            self._warm = None
        if num_trainable == 0:
            return 0.0
        # In the model's order: a restored learner holds them in another, and the norm's rounding follows it.
        gradients = {name: sums[name] for name in self._parameters if name in sums}
        norm = scale_and_clip(gradients, scale, optimizer.knobs.grad_clip, taken)
        optimizer.step(gradients)
        return norm

    def state(self, policy: str) -> tuple[Facts, dict[str, Tensor]]:
        facts = Facts(
            policy=policy,
            num_steps=self._main.num_steps,
            num_warm_steps=None if self._warm is None else self._warm.num_steps,
            micro_batch_ids=tuple(self.micro_batch_ids),
            num_trainable=self.num_trainable,
        )
        tensors = {
            **prefixed(WEIGHTS, self._named),
            **prefixed(SUMS, self._accumulation.sums),
            **prefixed(MAIN, self._main.tensors()),
            **prefixed(WARM, self._warm.tensors() if self._warm else {}),
            **prefixed(RNG, rng_states()),
        }
        return facts, tensors

    def restore(self, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
        try:
            with torch.no_grad():
                for name, parameter in self._named.items():
                    parameter.copy_(tensors[f"{WEIGHTS}/{name}"])
            self._main.restore(under(MAIN, tensors), facts.num_steps)
            if facts.num_warm_steps is None:
                self._warm = None
            elif self._warm is not None:
                self._warm.restore(under(WARM, tensors), facts.num_warm_steps)
        except (KeyError, RuntimeError) as error:
            raise TrainerError(f"state of policy {facts.policy} does not fit the model: {error}") from error
        self._accumulation.pop()
        self.add_sums(under(SUMS, tensors), list(facts.micro_batch_ids), facts.num_trainable)
        set_rng_states(under(RNG, tensors))

    def gradient_sums(self) -> dict[str, Tensor]:
        return {name: value.to("cpu", copy=True) for name, value in self._accumulation.sums.items()}

    def clear_gradients(self) -> None:
        self._accumulation.pop()

    def add_sums(self, sums: Mapping[str, Tensor], micro_batch_ids: list[str], num_trainable: int) -> None:
        self._accumulation.add(sums, self._parameters)
        self._accumulation.record(micro_batch_ids, num_trainable)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return merged_weights(self.model, lambda name: self._named[name].detach().cpu())

    def extra_weights(self) -> dict[str, Tensor]:
        names = [f"{name}.{own}" for name, part in self.extra.items() for own, _ in part.named_parameters()]
        return {name: self._named[name].detach().cpu() for name in names}

    def adapter_weights(self) -> dict[str, Tensor]:
        return adapter_weights(self.model, lambda name: self._named[name].detach().cpu())

    def close(self) -> None:
        """Nothing: no part of it holds on to another."""


def named_parameters(model: Any, extra: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """All parameters by name, tied ones once; those of `extra` under the module's name."""
    named: dict[str, Tensor] = dict(model.named_parameters())
    for module_name, module in extra.items():
        named |= {f"{module_name}.{name}": value for name, value in module.named_parameters()}
    return named


def scale_and_clip(gradients: Mapping[str, Tensor], scale: float, clip: float, taken: list[str]) -> float:
    """Multiplies the gradients by `scale`, then bounds their norm by `clip`; the norm in between.

    Raises: TrainerError naming the micro-batches `taken`, if the norm is not finite.
    """
    values = [gradients[name] for name in sorted(gradients)]  # sums that came from a file have its order
    torch._foreach_mul_(values, scale)
    norm = float(torch.nn.utils.get_total_norm(values))
    if not math.isfinite(norm):
        raise TrainerError(f"gradient norm {norm}, no step taken; micro-batches {', '.join(taken)}")
    if norm > clip:
        torch._foreach_mul_(values, clip / norm)
    return norm


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `prefixed`; other tensors are left out."""
    start = f"{prefix}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def rng_states() -> dict[str, Tensor]:
    """The process's random generators, by device type."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_states(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
