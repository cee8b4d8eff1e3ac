"""Full weights and moments of a DeepSpeed engine, out and in by parameter name, whatever the ZeRO stage.

Full means gathered over the ranks, so a state moves between stages, numbers of ranks and plain torch. All
functions are collective: every rank calls them for the same parameters in the same order.

DeepSpeed keeps moments per flat partition, one for each group of parameters, and makes them in its first
step. Stages 1 and 2 link them to the parameters at the end of the first group's step, when the other groups
have none yet: so they are made here, before the first step, and linked with a private call of the pinned
version. Stages 1 to 3 keep a master copy of the weights beside those that the model computes with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megloom.compute.trainers.optimizer import MOMENTS


class EngineState:
    """The parameters and moments of one engine. `stage` is its ZeRO stage."""

    def __init__(self, engine: Any, stage: int, deepspeed: Any) -> None:
        self._engine, self._stage, self._deepspeed = engine, stage, deepspeed
        self._has_moments = False

    def weight(self, parameter: Tensor) -> Tensor:
        """The full parameter on the CPU; on a CPU below stage 3 the parameter itself."""
        if self._stage < 3:
            return parameter.detach().cpu()
        with self._deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().to("cpu", copy=True)

    def set_weight(self, parameter: Tensor, value: Tensor) -> None:
        """Writes the parameter, and its master copy if it has one. Raises: RuntimeError for another shape."""
        value = value.to(parameter.device)
        with torch.no_grad():
            if self._stage < 3:
                parameter.copy_(value)
            else:
                with self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    parameter.copy_(value)  # rank 0's is broadcast; all have the same
        if self._stage and parameter.requires_grad:
            self._set_master(parameter, value)

    def moment(self, parameter: Tensor, moment: str) -> Tensor:
        """The full moment on the CPU, at stage 0 on a CPU the moment itself; only if there are moments."""
        if self._stage == 0:
            full = self._torch_optimizer.state[parameter][moment]
        else:  # gathered into a new tensor
            full = self._deepspeed.utils.safe_get_full_optimizer_state(parameter, moment)
        return full.reshape(self.shape(parameter)).cpu()

    def set_moment(self, parameter: Tensor, moment: str, value: Tensor) -> None:
        """Writes this rank's part of the moment. Raises: RuntimeError for another shape."""
        value = value.to(parameter.device, torch.float32)
        if self._stage == 0:
            self._torch_optimizer.state[parameter][moment].copy_(value)
        elif self._stage == 3:
            self._deepspeed.utils.safe_set_local_optimizer_state(
                parameter, self._partition(parameter, value), moment
            )
        else:
            self._require_shape(parameter, value)
            self._deepspeed.utils.safe_set_full_optimizer_state(parameter, value, moment)

    def ensure_moments(self) -> None:
        """Makes what a fresh engine lacks: call it before the first step."""
        if not self._has_moments:
            self.fill_moments(0)

    def fill_moments(self, num_steps: int) -> None:
        """Sets all moments to zero and the step count to `num_steps`."""
        self._has_moments = True
        state = self._torch_optimizer.state
        for flat in self._flat_parameters():
            kept = state[flat]
            for moment in MOMENTS:
                if moment in kept:
                    kept[moment].zero_()
                else:
                    kept[moment] = torch.zeros_like(flat)
            kept["step"] = torch.tensor(float(num_steps))
        if self._stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def shape(self, parameter: Any) -> torch.Size:
        """The full parameter's shape: at stage 3 the parameter itself is empty between passes."""
        full: torch.Size = parameter.ds_shape if self._stage == 3 else parameter.shape
        return full

    @property
    def _torch_optimizer(self) -> Any:
        optimizer = self._engine.optimizer
        return optimizer if self._stage == 0 else optimizer.optimizer

    def _flat_parameters(self) -> list[Tensor]:
        """What the torch optimizer steps."""
        groups = self._torch_optimizer.param_groups
        if self._stage == 0:
            return [parameter for group in groups for parameter in group["params"]]
        optimizer = self._engine.optimizer
        flats = optimizer.fp32_partitioned_groups_flat if self._stage == 3 else None
        return list(optimizer.single_partition_of_fp32_groups if flats is None else flats)

    def _set_master(self, parameter: Tensor, value: Tensor) -> None:
        if self._stage == 3:
            self._deepspeed.utils.safe_set_local_fp32_param(parameter, self._partition(parameter, value))
        else:
            self._deepspeed.utils.safe_set_full_fp32_param(parameter, value.float())

    def _partition(self, parameter: Any, value: Tensor) -> Tensor:
        """This rank's flat part of a full tensor at stage 3, padded with zeros to equal parts."""
        self._require_shape(parameter, value)
        size = parameter.ds_tensor.numel()
        start = size * self._engine.global_rank
        mine = value.flatten()[start : start + size]
        return torch.nn.functional.pad(mine, (0, size - mine.numel()))

    def _require_shape(self, parameter: Tensor, value: Tensor) -> None:
        if value.shape != self.shape(parameter):
            raise RuntimeError(f"shape {tuple(value.shape)}, expected {tuple(self.shape(parameter))}")
