"""The learner on DeepSpeed, ZeRO stages 0 to 3, one or more ranks. Implements `learners.Learner`.

Gradients stay raw sums until `step`, which undoes DeepSpeed's average over the ranks and scales once.

- Stages 0 and 1 reduce over the ranks once, in `step`. Until then each rank's sums lie here by parameter
  name, as in the torch learner: a failed micro-batch leaves no trace, ranks may make different numbers of
  passes, and `state` is complete in mid-batch.
- Stages 2 and 3 reduce in every backward and keep the sums in DeepSpeed's own buffers. So every rank makes
  the same number of passes, a micro-batch that fails after its first backward spoils the whole batch (every
  verb but a new load then says so), and gradients can neither be saved, exported nor added in mid-batch.

A state that is taken in mid-batch moves all sums to rank 0, here as in the state: what follows is the same,
bit for bit, with and without a restart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megloom.compute.trainers.accumulation import Accumulation
from megloom.compute.trainers.deepspeed_config import deepspeed_config
from megloom.compute.trainers.deepspeed_import import import_deepspeed, quiet
from megloom.compute.trainers.deepspeed_state import EngineState
from megloom.compute.trainers.learner import (
    MAIN,
    RNG,
    SUMS,
    WARM,
    WEIGHTS,
    named_parameters,
    prefixed,
    rng_states,
    scale_and_clip,
    set_rng_states,
    under,
)
from megloom.compute.trainers.lora import adapter_weights, merged_weights
from megloom.compute.trainers.optimizer import MOMENTS, parameter_groups, set_knobs
from megloom.compute.trainers.process_group import join_ranks
from megloom.compute.trainers.protocol import TrainerError
from megloom.compute.trainers.snapshot import Facts
from megloom.compute.workload import Optimizer
from megloom.compute.workload import Trainer as TrainerKnobs


class DeepSpeedLearner:
    """One engine, one optimizer: warm steps come first, so the first other step finds the moments unused.

    `_num_warm_steps` is None once the warm optimizer is dropped, or if there was none.
    """

    def __init__(
        self,
        model: Any,
        *,
        optimizer: Optimizer,
        warm_optimizer: Optimizer | None,
        extra: Mapping[str, nn.Module] | None = None,
        knobs: TrainerKnobs,
    ) -> None:
        self.model = model
        self.extra = dict(extra or {})
        self._named = named_parameters(model, self.extra)
        self._parameters = {name: value for name, value in self._named.items() if value.requires_grad}
        self.device = next(iter(self._named.values())).device
        self._stage = knobs.zero_stage
        self._ranks = join_ranks(self.device)
        self._accumulation = Accumulation()
        self._optimizer, self._warm_optimizer = optimizer, warm_optimizer
        self._num_steps = 0
        self._num_warm_steps = None if warm_optimizer is None else 0
        self._is_settled = False  # whether the ranks have agreed on the end of the micro-batch
        self._spoiled: str | None = None
        config = deepspeed_config(knobs, optimizer)
        deepspeed = import_deepspeed(self.device)
        with quiet():
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
            self._engine, *_ = deepspeed.initialize(
                model=nn.ModuleDict({"model": model, **self.extra}),
                optimizer=torch.optim.AdamW(parameter_groups(self._parameters.values())),
                config=config,
                dist_init_required=False,
            )
        if self._stage == 0:
            self._engine.enable_backward_allreduce = False  # it would average; `_step_whole` sums
        self._state = EngineState(self._engine, self._stage, deepspeed)
        if self._engine.torch_autocast_enabled():
            for module in (model.base_model, model.get_output_embeddings()):
                _compute_in(self._engine.torch_autocast_dtype(), module, self.device)

    @property
    def is_main(self) -> bool:
        return self._ranks.rank == 0

    @property
    def micro_batch_ids(self) -> list[str]:
        return self._accumulation.micro_batch_ids

    @property
    def num_trainable(self) -> int:
        return self._accumulation.num_trainable

    def num_rounds(self, num_local_passes: int) -> int:
        self._require_whole()
        if not self._partitions_gradients:
            return num_local_passes
        return max(self._exchange(num_local_passes))

    def backward(self, total: Tensor) -> None:
        if self._partitions_gradients:
            self._exchange(0)  # or a rank that failed would leave the others in a collective
            self._spoiled = "a micro-batch failed half-way"  # until all of its rounds are through
            self._engine.optimizer.clear_backward_seen_flag()  # else done in the engine's own forward
        with quiet():
            self._engine.backward(total)

    def idle_round(self, *, has_gradient: bool = True) -> None:
        ids = torch.zeros((1, 2), dtype=torch.int64, device=self.device)
        with torch.set_grad_enabled(has_gradient):
            hidden_BTH = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            total = self.model.get_output_embeddings()(hidden_BTH).float().sum() * 0.0
            for head in self.extra.values():  # in the order of a real pass, each once
                total = total + head(hidden_BTH.float()).sum() * 0.0
        if has_gradient:
            self.backward(total)

    def add_gradients(self, micro_batch_id: str, num_trainable: int) -> None:
        everyones = self._exchange(num_trainable)
        self._is_settled = True
        if not self._partitions_gradients:
            self._accumulation.take(self._parameters)
        self._spoiled = None
        self._accumulation.record([micro_batch_id], sum(everyones))

    def drop_gradients(self) -> None:
        is_settled, self._is_settled = self._is_settled, False
        if not is_settled:
            self._ranks.failed()
        for parameter in self._parameters.values():
            parameter.grad = None  # stages 2 and 3 hold none here

    def step(self, scale: float, *, warm: bool) -> float:
        self._require_whole()
        knobs = self._warm_optimizer if warm else self._optimizer
        if knobs is None or (warm and self._num_warm_steps is None):
            raise TrainerError("a warm step, but the warm optimizer is dropped or was never given")
        sums, taken, num_trainable = self._accumulation.pop()
        if not warm and self._num_warm_steps is not None:
            if self._num_warm_steps:
                self._state.fill_moments(0)
            self._num_warm_steps = None
        if num_trainable == 0:
            self._clear_engine()
            return 0.0
        num_steps = self._num_warm_steps if warm else self._num_steps
        assert num_steps is not None
        self._state.ensure_moments()
        set_knobs(self._engine.optimizer, knobs, num_steps)
        with quiet():
            if self._stage == 0:
                norm = self._step_whole(sums, scale, knobs, taken)
            else:
                norm = self._step_partitions(sums, scale, knobs, taken)
        if warm:
            self._num_warm_steps = num_steps + 1
        else:
            self._num_steps = num_steps + 1
        return norm

    def state(self, policy: str) -> tuple[Facts, dict[str, Tensor]]:
        self._require_whole()
        if self._partitions_gradients and self.micro_batch_ids:
            raise TrainerError(
                f"ZeRO stage {self._stage} cannot save gradients in mid-batch; "
                f"{len(self.micro_batch_ids)} micro-batches are in the accumulation: save after the step"
            )
        with quiet():
            sums = self._sums_on_main()
            tensors = {f"{WEIGHTS}/{name}": self._state.weight(value) for name, value in self._named.items()}
            kind, num_steps = (
                (WARM, self._num_warm_steps) if self._num_warm_steps else (MAIN, self._num_steps)
            )
            for moment in MOMENTS if num_steps else ():
                for name, value in self._parameters.items():
                    tensors[f"{kind}/{moment}/{name}"] = self._state.moment(value, moment)
        facts = Facts(
            policy=policy,
            num_steps=self._num_steps,
            num_warm_steps=self._num_warm_steps,
            micro_batch_ids=tuple(self.micro_batch_ids),
            num_trainable=self.num_trainable,
        )
        return facts, tensors | prefixed(SUMS, sums) | prefixed(RNG, rng_states())

    def restore(self, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
        self._accumulation.pop()
        self._clear_engine()
        self._spoiled = None
        self._num_steps = facts.num_steps
        self._num_warm_steps = facts.num_warm_steps if self._warm_optimizer is not None else None
        kind, num_steps = (WARM, self._num_warm_steps) if self._num_warm_steps else (MAIN, self._num_steps)
        try:
            with quiet():
                for name, value in self._named.items():
                    self._state.set_weight(value, tensors[f"{WEIGHTS}/{name}"])
                self._state.fill_moments(num_steps or 0)
                for moment in MOMENTS if num_steps else ():
                    for name, value in self._parameters.items():
                        self._state.set_moment(value, moment, tensors[f"{kind}/{moment}/{name}"])
        except (KeyError, RuntimeError) as error:
            raise TrainerError(f"state of policy {facts.policy} does not fit the model: {error}") from error
        if facts.micro_batch_ids:
            self.add_sums(under(SUMS, tensors), list(facts.micro_batch_ids), facts.num_trainable)
        set_rng_states(under(RNG, tensors))

    def gradient_sums(self) -> dict[str, Tensor]:
        self._require_own_sums("export")
        return {name: value.to("cpu", copy=True) for name, value in self._sums_on_main().items()}

    def clear_gradients(self) -> None:
        self._accumulation.pop()
        self._clear_engine()

    def add_sums(self, sums: Mapping[str, Tensor], micro_batch_ids: list[str], num_trainable: int) -> None:
        self._require_own_sums("add")
        if self.is_main:
            self._accumulation.add(sums, self._parameters)
        self._accumulation.record(micro_batch_ids, num_trainable)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return merged_weights(self.model, lambda name: self._state.weight(self._named[name]))

    def extra_weights(self) -> dict[str, Tensor]:
        names = [f"{name}.{own}" for name, part in self.extra.items() for own, _ in part.named_parameters()]
        return {name: self._state.weight(self._named[name]) for name in names}

    def adapter_weights(self) -> dict[str, Tensor]:
        return adapter_weights(self.model, lambda name: self._state.weight(self._named[name]))

    def close(self) -> None:
        """Frees the engine, whose parts hold on to each other; the learner is then of no further use."""
        self._engine.destroy()

    @property
    def _partitions_gradients(self) -> bool:
        return self._stage >= 2

    def _require_whole(self) -> None:
        if self._spoiled is not None:
            raise TrainerError(
                f"{self._spoiled}, and ZeRO stage {self._stage} cannot take back what it has reduced: "
                "load the last state and take the batch again"
            )

    def _require_own_sums(self, verb: str) -> None:
        if self._partitions_gradients:
            raise TrainerError(f"ZeRO stage {self._stage} cannot {verb} gradients in mid-batch; use 0 or 1")

    def _clear_engine(self) -> None:
        """Forgets what DeepSpeed has accumulated at stages 2 and 3."""
        if not self._partitions_gradients:
            return
        optimizer = self._engine.optimizer
        optimizer.zero_grad()
        for kept in ("averaged_gradients", "all_grad_tensors"):
            for key in getattr(optimizer, kept, {}):
                getattr(optimizer, kept)[key] = None
        optimizer.micro_step_id = 0 if self._stage == 3 else optimizer.micro_step_id
        optimizer._epilogue_ran_this_backward = False

    def _exchange(self, value: int) -> list[int]:
        try:
            return self._ranks.exchange(value)
        except TrainerError:
            self._is_settled = True  # the ranks agree that the micro-batch failed
            raise

    def _step_whole(self, sums: dict[str, Tensor], scale: float, knobs: Optimizer, taken: list[str]) -> float:
        gradients = self._reduced(sums)
        norm = scale_and_clip(gradients, scale, knobs.grad_clip, taken)
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name]
        self._engine.step()
        return norm

    def _step_partitions(
        self, sums: dict[str, Tensor], scale: float, knobs: Optimizer, taken: list[str]
    ) -> float:
        """DeepSpeed averages over the ranks, divides by its loss scale, clips and steps.

        Where it holds the sums itself, that one division is where our scale goes in.
        """
        optimizer = self._engine.optimizer
        optimizer.clip_grad = knobs.grad_clip
        scale *= self._ranks.world_size
        if self._partitions_gradients:
            optimizer.loss_scale = 1.0 / scale
        else:
            for value in sums.values():
                value.mul_(scale)
            for name, parameter in self._parameters.items():
                parameter.grad = sums[name] if name in sums else torch.zeros_like(parameter)
        try:
            self._engine.step()
        finally:
            optimizer.loss_scale = 1.0
        norm = float(self._engine.get_global_grad_norm())
        if optimizer.overflow:
            raise TrainerError(f"gradient norm {norm}, no step taken; micro-batches {', '.join(taken)}")
        if not math.isfinite(norm):  # finite before our scale, so that DeepSpeed has stepped
            self._spoiled = f"scale {scale} took the gradient's norm beyond float32"
            self._require_whole()
        return norm

    def _reduced(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums over all ranks, of every trained parameter, as new tensors."""
        whole = {
            name: sums[name] if name in sums else torch.zeros_like(value)
            for name, value in self._parameters.items()
        }
        if self._ranks.world_size == 1:
            return whole
        flat = torch.cat([value.flatten() for value in whole.values()])
        dist.all_reduce(flat)
        parts = flat.split([value.numel() for value in whole.values()])
        return {name: part.view_as(whole[name]) for name, part in zip(whole, parts, strict=True)}

    def _sums_on_main(self) -> dict[str, Tensor]:
        """Moves all sums to rank 0 and returns them there; {} on the other ranks. Collective."""
        if self._ranks.world_size > 1 and not self._partitions_gradients and self.micro_batch_ids:
            reduced = self._reduced(self._accumulation.sums)
            self._accumulation.sums = reduced if self.is_main else {}
        return self._accumulation.sums


def _compute_in(dtype: torch.dtype, module: Any, device: torch.device) -> None:
    """Lets a module's forward run under autocast: passes call it by itself, not through the engine."""
    module.forward = torch.autocast(device.type, dtype=dtype)(module.forward)
