"""The reference trainer: one model in one process, plain torch. Its verbs are those of `protocol.Trainer`.

A micro-batch's gradient is taken apart from the accumulation and added to it when it is complete, so that a
failed micro-batch leaves no trace. Sums are float32, in the order of the calls: the same order on the same
rows is bit-equal, another order or cut agrees to 1e-6 of the gradient's norm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter

from megloom.compute.algorithms.table import parse_algorithm
from megloom.compute.state.weights import (
    MODEL_FILE,
    WeightManifest,
    WeightsError,
    is_complete,
    put_version,
    read_manifest,
    version_dir,
)
from megloom.compute.trainers.learner import Learner
from megloom.compute.trainers.losses import TokenLosses, imitation, policy_gradient
from megloom.compute.trainers.model import copy_companions, load_model, save_weights, write_model
from megloom.compute.trainers.passes import (
    DEFAULT_BUDGET_TOKENS,
    Pass,
    check_row,
    collate,
    cut,
    token_logprobs,
)
from megloom.compute.trainers.protocol import (
    GradientReport,
    MicroBatch,
    Published,
    TrainerError,
    TrainerPlan,
    UpdateReport,
)
from megloom.compute.trainers.snapshot import read_state, write_state
from megloom.compute.workload import ModelSource, Optimizer
from megloom.compute.workload import Trainer as TrainerKnobs

POLICY_GRADIENT, IMITATION = "policy_gradient", "imitation"


@dataclass(kw_only=True, slots=True)
class _Tally:
    """Running sums of one micro-batch. Only the replica writes."""

    loss_sum: float = 0.0
    num_clipped: int = 0
    num_trainable: int = 0
    max_logprob_gap: float | None = None


class TorchReplica:
    """Not thread-safe: one verb at a time. `load` comes before every verb but `create`."""

    def __init__(self, plan: TrainerPlan, *, cache_dir: Path | None = None) -> None:
        self._plan, self._cache_dir = plan, cache_dir
        self._source: ModelSource = TypeAdapter(ModelSource).validate_python(plan.model)
        self._algorithm = parse_algorithm(plan.algorithm)
        self._optimizer = Optimizer.parse(plan.optimizer)
        self._warm_optimizer = Optimizer.parse(plan.warm_optimizer or plan.optimizer)
        self._device = torch.device(plan.device)
        self._knobs = TrainerKnobs.parse(plan.trainer)
        self._budget_tokens = self._knobs.budget_tokens or DEFAULT_BUDGET_TOKENS[self._device.type]
        self._learner: Learner | None = None
        self._base: tuple[Path, int] | None = None  # the folder and number of the next version's parent

    def create(self, weights_dir: str) -> Published:
        with self._naming("create"):
            folder = Path(weights_dir)
            target = version_dir(folder, 0)
            if is_complete(target):
                return _published(target, read_manifest(target))
            manifest = put_version(
                folder,
                0,
                policy=self._plan.policy,
                parent_version=None,
                write=lambda staging: write_model(
                    self._source, staging, seed=self._plan.seed, cache_dir=self._cache_dir
                ),
            )
            return _published(target, manifest)

    def load(self, *, weights_uri: str, state_path: str | None) -> None:
        with self._naming("load"):
            self._learner, self._base = None, None
            folder = Path(weights_uri)
            manifest = read_manifest(folder)
            torch.manual_seed(self._plan.seed)
            learner = Learner(
                load_model(folder, self._device),
                optimizer=self._optimizer,
                warm_optimizer=self._warm_optimizer,
            )
            holders = {manifest.policy}
            if state_path is not None:
                facts, tensors = read_state(Path(state_path))
                holders.add(facts.policy)
                learner.restore(facts, tensors)
            if holders != {self._plan.policy}:
                raise TrainerError(f"{weights_uri}, {state_path} are of {sorted(holders)}")
            self._learner, self._base = learner, (folder, manifest.version)

    def forward_backward(self, batch: MicroBatch) -> GradientReport:
        started = time.perf_counter()
        with self._naming("forward_backward", batch.micro_batch_id):
            learner = self._loaded()
            if batch.micro_batch_id in learner.micro_batch_ids:
                raise TrainerError("its gradient is in the accumulation already")
            if batch.loss not in (POLICY_GRADIENT, IMITATION):
                raise TrainerError(f"loss {batch.loss!r}, expected {POLICY_GRADIENT} or {IMITATION}")
            vocab_size = learner.model.config.vocab_size
            for row in batch.rows:
                check_row(row, vocab_size=vocab_size, needs_behaviour=batch.loss == POLICY_GRADIENT)
            rows = [row for row in batch.rows if row.loss_mask.any()]
            tally = _Tally()
            try:
                for part in cut(rows, self._budget_tokens):
                    self._backward(learner, batch.loss, collate(part, self._device), tally)
                learner.add_gradients(batch.micro_batch_id, tally.num_trainable)
            finally:
                learner.drop_gradients()
        return GradientReport(
            micro_batch_id=batch.micro_batch_id,
            num_rows=len(rows),
            num_empty_rows=len(batch.rows) - len(rows),
            num_tokens=sum(len(row.token_ids) for row in batch.rows),
            num_trainable=tally.num_trainable,
            loss_sum=tally.loss_sum,
            num_clipped=tally.num_clipped,
            max_logprob_gap=tally.max_logprob_gap,
            seconds=time.perf_counter() - started,
        )

    def optim_step(self, *, scale: float, warm: bool = False) -> UpdateReport:
        started = time.perf_counter()
        with self._naming("optim_step"):
            learner = self._loaded()
            taken, num_trainable = tuple(learner.micro_batch_ids), learner.num_trainable
            if not taken:
                raise TrainerError("no gradient was taken since the last step")
            if not (math.isfinite(scale) and scale > 0):
                raise TrainerError(f"scale {scale}, expected a finite number above 0")
            norm = learner.step(scale, warm=warm)
        return UpdateReport(
            grad_norm=norm,
            num_trainable=num_trainable,
            micro_batch_ids=taken,
            seconds=time.perf_counter() - started,
        )

    def publish(self, *, weights_dir: str, version: int) -> Published:
        with self._naming("publish", f"version {version}"):
            learner = self._loaded()
            assert self._base is not None
            base_folder, base_version = self._base

            def write(staging: Path) -> None:
                copy_companions(base_folder, staging)
                save_weights(learner.model, staging / MODEL_FILE)

            manifest = put_version(
                Path(weights_dir),
                version,
                policy=self._plan.policy,
                parent_version=base_version,
                write=write,
            )
            self._base = version_dir(Path(weights_dir), version), version
            return _published(self._base[0], manifest)

    def save(self, *, state_path: str) -> None:
        with self._naming("save", state_path):
            write_state(Path(state_path), *self._loaded().state(self._plan.policy))

    def close(self) -> None:
        """Lets go of the model; `load` may follow."""
        self._learner, self._base = None, None

    def _backward(self, learner: Learner, loss: str, part: Pass, tally: _Tally) -> None:
        logprobs_N = token_logprobs(learner.model, part)
        losses = self._losses(loss, logprobs_N, part)
        finite_N = losses.losses_N.detach().isfinite()
        if not finite_N.all():
            index = int((~finite_N).nonzero()[0, 0])
            raise TrainerError(
                f"sample {part.sample_of(index)}: token loss {losses.losses_N[index].item()}, "
                f"logprob {logprobs_N[index].item()}"
            )
        losses.losses_N.sum().backward()
        tally.loss_sum += losses.losses_N.detach().double().sum().item()
        tally.num_trainable += len(part.targets_N)
        if loss == POLICY_GRADIENT:
            tally.num_clipped += int(losses.is_clipped_N.sum())
            gap = (logprobs_N.detach() - part.behaviour_N).abs().max().item()
            tally.max_logprob_gap = max(gap, tally.max_logprob_gap or 0.0)

    def _losses(self, loss: str, logprobs_N: torch.Tensor, part: Pass) -> TokenLosses:
        if loss == IMITATION:
            return imitation(logprobs_N, weights_N=part.weights_N)
        return policy_gradient(
            logprobs_N,
            behaviour_N=part.behaviour_N,
            advantages_N=part.advantages_N,
            weights_N=part.weights_N,
            clip_low=self._algorithm.clip_low,
            clip_high=self._algorithm.clip_high,
        )

    def _loaded(self) -> Learner:
        if self._learner is None:
            raise TrainerError("no weights are loaded")
        return self._learner

    @contextmanager
    def _naming(self, verb: str, what: str = "") -> Iterator[None]:
        """Puts policy, verb and what it worked on in front of an error's message."""
        try:
            yield
        except (TrainerError, WeightsError, ValueError, FileNotFoundError) as error:
            about = f" {what}" if what else ""
            raise TrainerError(f"policy={self._plan.policy} {verb}{about}: {error}") from error


def _published(folder: Path, manifest: WeightManifest) -> Published:
    return Published(
        uri=str(folder), version=manifest.version, digest=manifest.digest, size_bytes=manifest.size_bytes
    )
