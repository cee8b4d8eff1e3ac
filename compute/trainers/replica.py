"""The trainer that does the work: one model, on one rank or several. Its verbs are those of
`protocol.Trainer`; how gradients are kept and steps are made is its learner's.

A micro-batch's gradient is taken apart from the accumulation and added to it when it is complete, so that a
failed micro-batch leaves no trace. Sums are float32, in the order of the calls: the same order on the same
rows is bit-equal, another order or cut agrees to 1e-6 of the gradient's norm.

With several ranks each has a replica, and all get the same verbs in the same order, each its own rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from torch import nn

from megloom.compute.algorithms.table import parse_algorithm
from megloom.compute.state.staging import stage_whole
from megloom.compute.state.weights import (
    WeightManifest,
    WeightsError,
    is_complete,
    put_version,
    read_manifest,
    repair_version,
    version_dir,
)
from megloom.compute.trainers.admission import check_batch
from megloom.compute.trainers.columns import OF_THE_POLICY, Columns, check_wants, compute_columns
from megloom.compute.trainers.critic import VALUE_HEAD, load_critic, make_value_head
from megloom.compute.trainers.heads import read_out
from megloom.compute.trainers.learners import Learner, make_learner
from megloom.compute.trainers.model import write_model
from megloom.compute.trainers.objective import (
    POLICY_GRADIENT,
    imitation_objective,
    needed_columns,
    policy_objective,
)
from megloom.compute.trainers.passes import DEFAULT_BUDGET_TOKENS, Part, Pass, check_row, collate, cut
from megloom.compute.trainers.protocol import (
    ForwardReport,
    GradientReport,
    GradientSums,
    MicroBatch,
    Published,
    TrainerError,
    TrainerPlan,
    TrainingRow,
    UpdateReport,
)
from megloom.compute.trainers.publishing import load_version, version_writer
from megloom.compute.trainers.references import Reference
from megloom.compute.trainers.snapshot import SumsFacts, read_state, read_sums, write_state, write_sums
from megloom.compute.trainers.tally import Tally
from megloom.compute.workload import ModelSource, Optimizer, Publishing
from megloom.compute.workload import Trainer as TrainerKnobs


@dataclass(kw_only=True, slots=True)
class _Loaded:
    """What `load` made. Only the replica writes.

    `folder` and `base_version` are the parent of the next published version; `trainer_version` is that
    number, plus the updates since. `adapter_base` is the version that LoRA's adapter began on, None without.
    """

    learner: Learner
    folder: Path
    base_version: int
    trainer_version: int
    reference: Reference | None
    adapter_base: Path | None


class Replica:
    """Not thread-safe: one verb at a time. `load` comes before every verb but `create`."""

    def __init__(self, plan: TrainerPlan, *, cache_dir: Path | None = None) -> None:
        self._plan, self._cache_dir = plan, cache_dir
        self._source: ModelSource = TypeAdapter(ModelSource).validate_python(plan.model)
        self._algorithm = parse_algorithm(plan.algorithm)
        self._optimizer = Optimizer.parse(plan.optimizer)
        self._warm_optimizer = Optimizer.parse(plan.warm_optimizer or plan.optimizer)
        self._device = torch.device(plan.device)
        self._knobs = TrainerKnobs.parse(plan.trainer)
        self._publishing = Publishing.parse(plan.publishing)
        self._state: _Loaded | None = None

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
                publishing=self._publishing,
            )
            return _published(target, manifest)

    def load(self, *, weights_uri: str, state_path: str | None, reference_uri: str | None = None) -> None:
        with self._naming("load"):
            self.close()
            folder = Path(weights_uri)
            manifest = read_manifest(folder, verified=False)  # the weights are, when they are loaded
            holders, trainer_version = {manifest.policy}, manifest.version
            learner, damage = self._make_learner(folder, has_state=state_path is not None)
            adapter_base: str | None = folder.name  # a fresh adapter is put on what was loaded
            if state_path is not None:
                facts, tensors = read_state(Path(state_path))
                holders.add(facts.policy)
                trainer_version = max(trainer_version, facts.trainer_version)
                learner.restore(facts, tensors)
                adapter_base = facts.adapter_base
            if holders != {self._plan.policy}:
                raise TrainerError(f"{weights_uri}, {state_path} are of {sorted(holders)}")
            self._state = _Loaded(
                adapter_base=folder.parent / adapter_base if self._knobs.lora and adapter_base else None,
                learner=learner,
                folder=folder,
                base_version=manifest.version,
                trainer_version=trainer_version,
                reference=(
                    Reference(reference_uri, policy=self._plan.policy, device=self._device)
                    if reference_uri
                    else None
                ),
            )
            if damage is not None and learner.is_main:
                repair_version(folder, self._writer(self._state))

    def forward(self, batch: MicroBatch, wants: Sequence[str]) -> ForwardReport:
        started = time.perf_counter()
        with self._naming("forward", batch.micro_batch_id):
            state = self._loaded()
            try:
                check_wants(
                    wants,
                    has_critic=self._algorithm.has_critic,
                    has_reference=state.reference is not None,
                )
                for row in batch.rows:
                    check_row(row, vocab_size=self._vocab_size, needs_behaviour=False)
                columns = self._forward(state, batch.rows, wants)
            finally:
                state.learner.drop_gradients()
        return ForwardReport(columns=columns.by_name(), seconds=time.perf_counter() - started)

    def forward_backward(self, batch: MicroBatch) -> GradientReport:
        started = time.perf_counter()
        with self._naming("forward_backward", batch.micro_batch_id):
            state = self._loaded()
            learner, tally = state.learner, Tally()
            try:
                self._check(state, batch)
                parts = self._cut(batch.rows)
                for index in range(learner.num_rounds(len(parts))):
                    if index < len(parts):
                        self._backward(learner, batch.loss, collate(parts[index], self._device), tally)
                    else:
                        learner.idle_round()
                learner.add_gradients(batch.micro_batch_id, tally.num_trainable)
            finally:
                learner.drop_gradients()
        return tally.report(batch, seconds=time.perf_counter() - started)

    def export_gradients(self, *, path: str) -> GradientSums:
        with self._naming("export_gradients", path):
            state = self._loaded()
            learner = state.learner
            facts = SumsFacts(
                policy=self._plan.policy,
                trainer_version=state.trainer_version,
                micro_batch_ids=tuple(learner.micro_batch_ids),
                num_trainable=learner.num_trainable,
            )
            sums = learner.gradient_sums()
            if learner.is_main:
                write_sums(Path(path), facts, sums)
            learner.clear_gradients()
        return GradientSums(
            path=path, micro_batch_ids=facts.micro_batch_ids, num_trainable=facts.num_trainable
        )

    def add_gradients(self, *, path: str) -> None:
        with self._naming("add_gradients", path):
            state = self._loaded()
            facts, sums = read_sums(Path(path))
            here = self._plan.policy, state.trainer_version
            if (facts.policy, facts.trainer_version) != here:
                raise TrainerError(
                    f"sums of policy {facts.policy} at version {facts.trainer_version}, "
                    f"expected policy {here[0]} at version {here[1]}"
                )
            if twice := sorted(set(facts.micro_batch_ids) & set(state.learner.micro_batch_ids)):
                raise TrainerError(f"micro-batches {', '.join(twice)} are in the accumulation already")
            state.learner.add_sums(sums, list(facts.micro_batch_ids), facts.num_trainable)

    def optim_step(self, *, scale: float, warm: bool = False) -> UpdateReport:
        started = time.perf_counter()
        with self._naming("optim_step"):
            state = self._loaded()
            learner = state.learner
            taken, num_trainable = tuple(learner.micro_batch_ids), learner.num_trainable
            if not taken:
                raise TrainerError("no gradient was taken since the last step")
            if not (math.isfinite(scale) and scale > 0):
                raise TrainerError(f"scale {scale}, expected a finite number above 0")
            norm = learner.step(scale, warm=warm)
            if num_trainable:
                state.trainer_version += 1
        return UpdateReport(
            grad_norm=norm,
            num_trainable=num_trainable,
            micro_batch_ids=taken,
            seconds=time.perf_counter() - started,
        )

    def publish(self, *, weights_dir: str, version: int) -> Published:
        with self._naming("publish", f"version {version}"):
            state = self._loaded()
            write = self._writer(state)
            target = version_dir(Path(weights_dir), version)
            published = Published(uri=str(target), version=version, digest="", size_bytes=0)
            if state.learner.is_main:
                manifest = put_version(
                    Path(weights_dir),
                    version,
                    policy=self._plan.policy,
                    parent_version=state.base_version,
                    write=write,
                    publishing=self._publishing,
                    stage=stage_whole,
                )
                published = _published(target, manifest)
            state.folder, state.base_version, state.trainer_version = target, version, version
            return published

    def save(self, *, state_path: str) -> str | None:
        with self._naming("save", state_path):
            state = self._loaded()
            facts, tensors = state.learner.state(self._plan.policy)
            if state.learner.is_main:
                base = state.adapter_base
                facts = replace(
                    facts, trainer_version=state.trainer_version, adapter_base=base.name if base else None
                )
                return write_state(Path(state_path), facts, tensors)
            return None

    def close(self) -> None:
        """Lets go of the models; `load` may follow."""
        if self._state is not None:
            self._state.learner.close()
        self._state = None

    def _make_learner(self, folder: Path, *, has_state: bool) -> tuple[Learner, str | None]:
        """A learner, and what is wrong with the version, if its state will replace the weights anyway."""
        torch.manual_seed(self._plan.seed)
        model, damage = load_version(folder, self._device, or_anchor=has_state and self._knobs.ranks == 1)
        extra: dict[str, nn.Module] = {}
        if self._algorithm.has_critic:
            extra[VALUE_HEAD] = head = make_value_head(model, self._device)
            load_critic(head, folder)
        learner = make_learner(
            self._plan, model, optimizer=self._optimizer, warm_optimizer=self._warm_optimizer, extra=extra
        )
        return learner, damage

    def _writer(self, state: _Loaded) -> Callable[[Path], None]:
        return version_writer(state.learner, companions=state.folder, adapter_base=state.adapter_base)

    def _check(self, state: _Loaded, batch: MicroBatch) -> None:
        if batch.micro_batch_id in state.learner.micro_batch_ids:
            raise TrainerError("its gradient is in the accumulation already")
        check_batch(
            batch,
            vocab_size=self._vocab_size,
            columns=needed_columns(self._algorithm),
            trainer_version=state.trainer_version,
            max_off_policy_steps=self._plan.max_off_policy_steps,
        )

    def _cut(self, rows: Sequence[TrainingRow]) -> list[Part]:
        return cut(
            [row for row in rows if row.loss_mask.any()],
            self._knobs.budget_tokens or DEFAULT_BUDGET_TOKENS[self._device.type],
            packing=self._knobs.packing,
            shared_prefixes=self._knobs.shared_prefixes,
        )

    def _forward(self, state: _Loaded, rows: Sequence[TrainingRow], wants: Sequence[str]) -> Columns:
        learner, columns = state.learner, Columns(rows, wants)
        parts = self._cut([replace(row, columns={}) for row in rows])
        num_rounds = learner.num_rounds(len(parts) if OF_THE_POLICY & set(wants) else 0)
        for index in range(max(num_rounds, len(parts))):
            if index >= len(parts):
                learner.idle_round(has_gradient=False)
                continue
            part = collate(parts[index], self._device)
            columns_N = compute_columns(
                wants,
                part,
                model=learner.model,
                value_head=learner.extra.get(VALUE_HEAD),
                reference=state.reference,
            )
            columns.fill(part, columns_N)
        return columns

    def _backward(self, learner: Learner, loss: str, part: Pass, tally: Tally) -> None:
        is_policy_gradient = loss == POLICY_GRADIENT
        readout = read_out(
            learner.model,
            part,
            value_head=learner.extra.get(VALUE_HEAD),
            with_entropy=is_policy_gradient and self._algorithm.entropy > 0,
        )
        if is_policy_gradient:
            objective = policy_objective(self._algorithm, readout, part)
        else:
            objective = imitation_objective(readout, part)
        finite_N = objective.losses_N.detach().isfinite()
        if not finite_N.all():
            index = int((~finite_N).nonzero()[0, 0])
            raise TrainerError(
                f"sample {part.sample_of(index)}: token loss {objective.losses_N[index].item()}, "
                f"logprob {readout.logprobs_N[index].item()}"
            )
        learner.backward(objective.losses_N.sum())
        tally.add(objective, readout, part, has_behaviour=is_policy_gradient)

    @property
    def _vocab_size(self) -> int:
        return int(self._loaded().learner.model.config.vocab_size)

    def _loaded(self) -> _Loaded:
        if self._state is None:
            raise TrainerError("no weights are loaded")
        return self._state

    @contextmanager
    def _naming(self, verb: str, what: str = "") -> Iterator[None]:
        """Puts policy, verb and what it worked on in front of an error's message."""
        try:
            yield
        except (TrainerError, WeightsError, SafetensorError, ValueError, OSError) as error:
            about = f" {what}" if what else ""
            raise TrainerError(f"policy={self._plan.policy} {verb}{about}: {error}") from error


def _published(folder: Path, manifest: WeightManifest) -> Published:
    return Published(
        uri=str(folder), version=manifest.version, digest=manifest.digest, size_bytes=manifest.size_bytes
    )
