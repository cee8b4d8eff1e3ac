"""Gradients early, one update late: complete groups go to the trainer while other episodes still run.

One lane per trained policy. A lane survives the loss of its trainer: the new one loads the last committed
state and takes this step's micro-batches again, in their recorded order, so that nothing is counted twice.
A demonstration pass is many optimizer steps: whoever drives it begins it again (`revive`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from megloom.compute.conductor.events import Clock, EventLog
from megloom.compute.conductor.samples import Sample
from megloom.compute.graph.records import CellIntervalRecord, MicroBatchRecord
from megloom.compute.graph.states import SampleState, checked_move
from megloom.compute.trainers.protocol import (
    GradientReport,
    MicroBatch,
    Published,
    Trainer,
    TrainerLost,
    UpdateReport,
)

log = logging.getLogger(__name__)
MAX_TRAINER_LOSSES = 3  # in one verb of one policy; a trainer that dies each time is a bug, not an accident


@dataclass(kw_only=True, slots=True)
class Taken:
    """One micro-batch, its samples, and what the trainer said of it. Only its lane writes."""

    batch: MicroBatch
    samples: list[Sample]
    position: int
    state: SampleState = SampleState.READY  # of all its samples
    report: GradientReport | None = None
    started_s: float = 0.0
    finished_s: float = 0.0


@dataclass(kw_only=True, slots=True)
class LaneStep:
    """A policy's work in one step. Only its lane writes."""

    taken: list[Taken] = field(default_factory=list)
    waiting: list[list[Sample]] = field(default_factory=list)  # complete groups short of a micro-batch
    dropped: list[Sample] = field(default_factory=list)
    update: UpdateReport | None = None

    def trained(self) -> list[Sample]:
        return [sample for taken in self.taken for sample in taken.samples]


class GradientLane:
    """Turns one policy's complete groups into micro-batches and those into gradients, in order."""

    def __init__(
        self,
        *,
        run: str,
        policy: str,
        trainer: Trainer,
        restart: Callable[[str], Awaitable[Trainer]],
        groups_per_batch: int,
        hold: bool,
        record: Callable[[Any], None],
        clock: Clock,
        events: EventLog,
    ) -> None:
        self._run, self._policy, self._restart = run, policy, restart
        self.trainer = trainer
        self._groups_per_batch, self._hold = groups_per_batch, hold
        self._record, self._clock, self._events = record, clock, events
        self._step_number, self._base_version = 0, 0
        self._step = LaneStep()
        self._inbox: asyncio.Queue[Taken | None] = asyncio.Queue()  # bounded by the step's groups
        self.intervals: list[CellIntervalRecord] = []  # of the step in work

    def begin(self, step: int, base_version: int) -> LaneStep:
        """Begins a step's work."""
        self._step_number, self._base_version, self._step = step, base_version, LaneStep()
        self.intervals = []
        return self._step

    def open(self, step: int, base_version: int, tasks: asyncio.TaskGroup) -> None:
        """Begins a step; gradients are taken by a task of `tasks` until `close`."""
        self.begin(step, base_version)
        self._worker = tasks.create_task(self._take_gradients(), name=f"gradients:{self._policy}")

    def add_group(self, samples: list[Sample]) -> None:
        """Adds a complete group. A full micro-batch goes to the trainer at once, unless held (sync mode)."""
        self._step.dropped.extend(sample for sample in samples if sample.row is None)
        self._step.waiting.append([sample for sample in samples if sample.row is not None])
        if not self._hold and len(self._step.waiting) >= self._groups_per_batch:
            self._emit(self._step.waiting)
            self._step.waiting = []

    async def close(self) -> LaneStep:
        """Sends what is left and waits for the last gradient. The group statistics of the step are final."""
        for start in range(0, len(self._step.waiting), self._groups_per_batch):
            self._emit(self._step.waiting[start : start + self._groups_per_batch])
        self._inbox.put_nowait(None)
        await self._worker
        return self._step

    async def imitate(self, samples: list[Sample], *, warm: bool) -> None:
        """Takes one demonstration micro-batch and steps at once, in the warm start with its own optimizer."""
        taken = self._pack("imitation", samples)
        self._step.taken.append(taken)
        num_trainable = sum(sample.record.num_trainable for sample in samples)
        await self._take(taken)
        self._step.update = await self.trainer.optim_step(scale=1.0 / num_trainable, warm=warm)

    async def finish(self, *, denominator: int, version: int, weights_dir: str, state_path: str) -> Published:
        """The policy's one optimizer step (raw sums divided by the exact count), its weights and its state.

        A trainer lost anywhere in here is replayed from the last committed state: the same numbers again.
        """

        async def work() -> Published:
            started_s = self._clock()
            self._step.update = await self.trainer.optim_step(scale=1.0 / denominator)
            self._interval("update", started_s)
            return await self.publish(version=version, weights_dir=weights_dir, state_path=state_path)

        published: Published = await self._surviving(work)
        return published

    async def publish(self, *, version: int, weights_dir: str, state_path: str) -> Published:
        """Writes the trainer's weights as a version, and its full state beside."""
        started_s = self._clock()
        published = await self.trainer.publish(weights_dir=weights_dir, version=version)
        await self.trainer.save(state_path=state_path)
        self._interval("publish", started_s)
        return published

    def record_step(self) -> None:
        """Writes samples and micro-batches in their final states."""
        for taken in self._step.taken:
            assert taken.report is not None
            for sample in taken.samples:
                state = checked_move(sample.record.sample_id, taken.state, SampleState.APPLIED)
                self._record(
                    replace(sample.record, micro_batch_id=taken.batch.micro_batch_id, state=state.value)
                )
            self._record(
                MicroBatchRecord(
                    micro_batch_id=taken.batch.micro_batch_id,
                    run=self._run,
                    step=self._step_number,
                    policy=self._policy,
                    position=taken.position,
                    cell=self.cell,
                    base_version=self._base_version,
                    sample_ids=[row.sample_id for row in taken.batch.rows],
                    num_tokens=taken.report.num_tokens,
                    num_trainable=taken.report.num_trainable,
                    loss_sum=taken.report.loss_sum,
                    started_s=taken.started_s,
                    finished_s=taken.finished_s,
                )
            )
        for sample in self._step.dropped:
            self._record(sample.record)

    @property
    def cell(self) -> str:
        return f"trainer/{self._policy}"

    def _emit(self, groups: list[list[Sample]]) -> None:
        samples = [sample for group in groups for sample in group]
        if samples:
            taken = self._pack("policy_gradient", samples)
            self._step.taken.append(taken)
            self._inbox.put_nowait(taken)

    def _pack(self, loss: str, samples: list[Sample]) -> Taken:
        position = len(self._step.taken)
        name = f"{self._policy}-s{self._step_number:06d}-b{position:04d}"
        rows = tuple(sample.row for sample in samples if sample.row is not None)
        return Taken(
            batch=MicroBatch(micro_batch_id=name, loss=loss, rows=rows), samples=samples, position=position
        )

    async def _take_gradients(self) -> None:
        """Consumes micro-batches. Waits for complete groups. Woken by `add_group`; ends at `close`."""
        while (taken := await self._inbox.get()) is not None:
            await self._surviving(lambda taken=taken: self._take(taken))  # type: ignore[misc]

    async def _take(self, taken: Taken) -> None:
        taken.started_s = self._clock()
        taken.report = await self.trainer.forward_backward(taken.batch)
        name = taken.batch.micro_batch_id
        taken.state = checked_move(name, SampleState.READY, SampleState.GRADIENT_TAKEN)
        taken.finished_s = self._clock()
        self._events.add("gradient", micro_batch=taken.batch.micro_batch_id, rows=len(taken.batch.rows))
        self._interval("gradient", taken.started_s)

    async def revive(self, error: TrainerLost) -> None:
        """Brings a lost trainer back on its last committed state."""
        self._events.add("trainer_lost", policy=self._policy, cause=str(error)[:200])
        self.trainer = await self._restart(self._policy)

    async def _surviving(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Runs `work`; if the trainer is lost, brings one back, replays the step's gradients, tries again."""
        for _ in range(MAX_TRAINER_LOSSES):
            try:
                return await work()
            except TrainerLost as error:
                lost = error
            try:
                await self.revive(lost)
                for taken in self._step.taken:
                    if taken.state is SampleState.GRADIENT_TAKEN:
                        taken.state = checked_move(taken.batch.micro_batch_id, taken.state, SampleState.READY)
                        await self._take(taken)
            except TrainerLost:
                continue
        raise TrainerLost(f"trainer of {self._policy} was lost {MAX_TRAINER_LOSSES} times in a row")

    def _interval(self, activity: str, started_s: float) -> None:
        self.intervals.append(
            CellIntervalRecord(
                run=self._run,
                step=self._step_number,
                cell=self.cell,
                role="train",
                policy=self._policy,
                activity=activity,
                start_s=started_s,
                end_s=self._clock(),
            )
        )
