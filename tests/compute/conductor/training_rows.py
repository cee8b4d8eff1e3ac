"""Builders of drawn groups and samples without a graph, and a trainer that remembers what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megloom.compute.algorithms.base import Outcome
from megloom.compute.conductor.draws import DrawnGroup
from megloom.compute.rollout.samples import DrawnPath
from megloom.compute.trainers.protocol import (
    ForwardReport,
    GradientReport,
    MicroBatch,
    Published,
    TrainerLost,
    UpdateReport,
)


def path(name: str, *, num_prompt: int = 2, num_trainable: int = 3, reward: float = 1.0) -> DrawnPath:
    num_tokens = num_prompt + num_trainable
    mask = np.array([0] * num_prompt + [1] * num_trainable, dtype=np.uint8)
    return DrawnPath(
        leaf_invocation=name,
        leaf_class="main",
        agent="solver",
        token_ids=np.arange(num_tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        temperature=1.0,
        reward=reward,
        version_min=0,
        version_max=0,
        owned=(name,),
        owned_tokens=(num_trainable,),
        num_trainable=num_trainable,
    )


def drawn_group(number: int, rewards: Sequence[float], *, lengths: Sequence[int] | None = None) -> DrawnGroup:
    """A group whose members each made one call with a reward of its own; `lengths` are trainable tokens."""
    group_id = f"g{number}"
    names = [f"{group_id}-m{member}" for member in range(len(rewards))]
    sizes = lengths or [3 + member for member in range(len(rewards))]
    return DrawnGroup(
        run="r",
        step=1,
        policy="solver",
        group_id=group_id,
        task_id=f"t{number}",
        outcomes=tuple(
            Outcome(
                key=f"{name}-i0",
                episode_id=name,
                group_id=group_id,
                agent="solver",
                reward=reward,
                num_tokens=size,
                limit_tokens=64,
            )
            for name, reward, size in zip(names, rewards, sizes, strict=True)
        ),
        outcome_of={f"{name}-i0": f"{name}-i0" for name in names},
        paths=tuple(
            (name, path(f"{name}-i0", num_trainable=size, reward=reward))
            for name, reward, size in zip(names, rewards, sizes, strict=True)
        ),
    )


class FakeTrainer:
    """A `Trainer` with columns `column_of(sample_id, name, num_tokens)`; it dies in the verbs `dies_in`."""

    def __init__(
        self, column_of: Callable[[str, str, int], Any] | None = None, *, dies_in: Sequence[str] = ()
    ) -> None:
        self._column_of = column_of or (lambda sample_id, name, num_tokens: np.zeros(num_tokens, np.float32))
        self._dies_in, self._is_lost = dies_in, False
        self.asked: list[tuple[str, ...]] = []
        self.batches: list[MicroBatch] = []

    async def forward(self, batch: MicroBatch, wants: Sequence[str]) -> ForwardReport:
        self.asked.append(tuple(wants))
        self._live("forward")
        columns = {
            name: [self._column_of(row.sample_id, name, len(row.token_ids)) for row in batch.rows]
            for name in wants
        }
        return ForwardReport(columns=columns, seconds=0.0)

    async def forward_backward(self, batch: MicroBatch) -> GradientReport:
        self._live("forward_backward")
        self.batches.append(batch)
        num_trainable = sum(int(row.loss_mask.sum()) for row in batch.rows)
        return GradientReport(
            micro_batch_id=batch.micro_batch_id,
            num_rows=len(batch.rows),
            num_tokens=sum(len(row.token_ids) for row in batch.rows),
            num_trainable=num_trainable,
            loss_sum=0.0,
            num_clipped=0,
            max_logprob_gap=0.0,
            seconds=0.0,
        )

    async def optim_step(self, *, scale: float, warm: bool = False) -> UpdateReport:
        self._live("optim_step")
        ids = tuple(batch.micro_batch_id for batch in self.batches)
        return UpdateReport(grad_norm=1.0, num_trainable=1, micro_batch_ids=ids, seconds=0.0)

    async def publish(self, *, weights_dir: str, version: int) -> Published:
        return Published(uri=weights_dir, version=version, digest="d", size_bytes=1)

    async def save(self, *, state_path: str) -> None:
        return None

    def _live(self, verb: str) -> None:
        """Raises: TrainerLost in a verb of `dies_in`, and ever after."""
        if verb in self._dies_in or self._is_lost:
            self._is_lost = True
            raise TrainerLost(f"lost in {verb}")
