"""Modelled trainers: they take time as real ones do, keep states in memory, and are lost when told to."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megloom.compute.graph.seeds import content_hash
from megloom.compute.simulation.cells import Costs
from megloom.compute.trainers.protocol import (
    ForwardReport,
    GradientReport,
    GradientSums,
    MicroBatch,
    Published,
    TrainerError,
    TrainerLost,
    TrainerPlan,
    UpdateReport,
)


@dataclass(kw_only=True, slots=True)
class Accumulation:
    """What a trainer's sums hold: the micro-batches, and how many trainable tokens. A lost one shows.

    `applied` are those that updates consumed since the last publish, in their order.
    """

    micro_batch_ids: list[str] = field(default_factory=list)
    num_trainable: int = 0
    applied: list[str] = field(default_factory=list)

    def copy(self) -> Accumulation:
        return Accumulation(
            micro_batch_ids=list(self.micro_batch_ids),
            num_trainable=self.num_trainable,
            applied=list(self.applied),
        )

    def add(self, other: Accumulation) -> None:
        """Raises: TrainerError for a micro-batch that is counted already."""
        for name in other.micro_batch_ids:
            if name in self.micro_batch_ids:
                raise TrainerError(f"{name}: its gradient is in the accumulation already")
        self.micro_batch_ids.extend(other.micro_batch_ids)
        self.num_trainable += other.num_trainable


class MemoryFiles:
    """The files of modelled trainers, and the shelf of suspended ones. `versions` are digests by address."""

    def __init__(self) -> None:
        self.states: dict[str, Accumulation] = {}
        self.versions: dict[str, str] = {}
        self._numbers = itertools.count()

    async def draft(self, policy: str) -> str:
        return f"shelf/{policy}-{next(self._numbers):06d}"

    async def keep(self, policy: str, draft: str, digest: str | None = None) -> str:
        return draft

    async def fetch(self, handle: str) -> str:
        if handle not in self.states:
            raise FileNotFoundError(f"suspended state {handle} is gone")
        return handle

    async def drop(self, handle: str) -> None:
        self.states.pop(handle, None)

    async def drop_draft(self, draft: str) -> None:
        self.states.pop(draft, None)

    async def pass_over(self, policy: str, draft: str) -> bool:
        return False

    def discard_after(self, weights_dir: str, version: int) -> None:
        """Removes the versions above `version` of a policy's folder."""
        for uri in [uri for uri in self.versions if uri.startswith(f"{weights_dir}/v")]:
            if int(uri.rpartition("/v")[2]) > version:
                del self.versions[uri]


@dataclass(kw_only=True, slots=True)
class Fuse:
    """Burns with the verbs of a policy's trainers; the trainer in whose verb it ends is lost."""

    verbs_left: int


class ModelledTrainer:
    """A `Trainer` whose gradient is a count of tokens: an update that misses some shows in its norm.

    The digest of a version tells the order in which its micro-batches were summed, as float sums do.
    """

    def __init__(
        self,
        plan: TrainerPlan,
        costs: Costs,
        *,
        files: MemoryFiles | None = None,
        fuse: Fuse | None = None,
    ) -> None:
        self._plan, self._costs = plan, costs
        self._files, self._fuse = files or MemoryFiles(), fuse
        self._sums = Accumulation()
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def create(self, weights_dir: str) -> Published:
        return self._published(weights_dir, 0, f"{self._plan.policy}@0")

    async def load(
        self, *, weights_uri: str, state_path: str | None, reference_uri: str | None = None
    ) -> None:
        await self._spend(self._costs.state_s)
        saved = None if state_path is None else self._files.states.get(state_path)
        self._sums = Accumulation() if saved is None else saved.copy()

    async def forward(self, batch: MicroBatch, wants: Sequence[str]) -> ForwardReport:
        seconds = sum(len(row.token_ids) for row in batch.rows) * self._costs.gradient_token_s / 3
        await self._spend(seconds)
        zeros = [np.zeros(len(row.token_ids), np.float32) for row in batch.rows]
        return ForwardReport(columns=dict.fromkeys(wants, zeros), seconds=seconds)

    async def forward_backward(self, batch: MicroBatch) -> GradientReport:
        self._burn()
        num_tokens = sum(len(row.token_ids) for row in batch.rows)
        num_trainable = sum(int(row.loss_mask.sum()) for row in batch.rows)
        await self._spend(num_tokens * self._costs.gradient_token_s)
        self._sums.add(Accumulation(micro_batch_ids=[batch.micro_batch_id], num_trainable=num_trainable))
        return GradientReport(
            micro_batch_id=batch.micro_batch_id,
            num_rows=len(batch.rows),
            num_tokens=num_tokens,
            num_trainable=num_trainable,
            loss_sum=0.0,
            num_clipped=0,
            max_logprob_gap=0.0,
            seconds=num_tokens * self._costs.gradient_token_s,
        )

    async def export_gradients(self, *, path: str) -> GradientSums:
        await self._spend(self._costs.state_s)
        sums, self._sums = self._sums, Accumulation(applied=self._sums.applied)
        self._files.states[path] = sums
        ids = tuple(sums.micro_batch_ids)
        return GradientSums(path=path, micro_batch_ids=ids, num_trainable=sums.num_trainable)

    async def add_gradients(self, *, path: str) -> None:
        await self._spend(self._costs.state_s)
        self._sums.add(self._files.states[path])

    async def optim_step(self, *, scale: float, warm: bool = False) -> UpdateReport:
        self._burn()
        await self._spend(self._costs.update_s)
        sums = self._sums
        self._sums = Accumulation(applied=[*sums.applied, *sums.micro_batch_ids])
        return UpdateReport(
            grad_norm=sums.num_trainable * scale,
            num_trainable=sums.num_trainable,
            micro_batch_ids=tuple(sums.micro_batch_ids),
            seconds=self._costs.update_s,
        )

    async def publish(self, *, weights_dir: str, version: int) -> Published:
        self._burn()
        await self._spend(self._costs.publish_s)
        applied, self._sums.applied = self._sums.applied, []
        return self._published(weights_dir, version, content_hash([self._plan.policy, version, applied]))

    async def save(self, *, state_path: str) -> str | None:
        self._burn()
        await self._spend(self._costs.state_s)
        self._files.states[state_path] = self._sums.copy()
        return None

    async def close(self) -> None:
        self.die()

    def die(self) -> None:
        """From now on nothing answers; the verb in work fails."""
        if not self._death.done():
            self._death.set_result(None)

    def _burn(self) -> None:
        if self._fuse is not None and self._fuse.verbs_left > 0:
            self._fuse.verbs_left -= 1
            if self._fuse.verbs_left == 0:
                self.die()

    async def _spend(self, seconds: float) -> None:
        """Raises: TrainerLost if this life ends meanwhile."""
        done, _ = await asyncio.wait([self._death], timeout=seconds)
        if done:
            raise TrainerLost(f"trainer of {self._plan.policy} was killed by the simulation")

    def _published(self, weights_dir: str, version: int, digest: str) -> Published:
        """Raises: TrainerError for a version that is there with another digest."""
        uri = f"{weights_dir}/v{version:06d}"
        if (there := self._files.versions.setdefault(uri, digest)) != digest:
            raise TrainerError(f"{uri} is complete with digest {there}, refused to replace it by {digest}")
        return Published(uri=uri, version=version, digest=digest, size_bytes=0)
